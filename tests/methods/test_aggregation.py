"""The weighted mean as a formula that both worlds call, and what a reply must bring for it."""

from dataclasses import dataclass

import pytest
import torch

from medflare.core.errors import UpdateError
from medflare.core.message import Message
from medflare.core.states import StateDict
from medflare.methods.aggregation import SiteModel, WeightedMean, site_models


@dataclass(frozen=True)
class Hyper:
    weighting: str = "samples"


def state(value: float, count: int = 0) -> StateDict:
    return {"w": torch.tensor([value]), "n": torch.tensor(count)}


MODELS = {"A": SiteModel(state(1.0, 3), 10.0), "B": SiteModel(state(3.0, 8), 30.0)}


def test_by_hand() -> None:
    mean = WeightedMean(Hyper()).shared(MODELS, 0)
    assert mean["w"].tolist() == [2.5] and mean["n"].item() == 8, "a counter takes the largest value"
    assert WeightedMean(Hyper("uniform")).shared(MODELS, 0)["w"].tolist() == [2.0]


def test_a_reply_without_samples_is_refused_with_the_remedy() -> None:
    replies = {"A": Message({"model": state(1.0)}, {"n_samples": 7}), "B": Message({"model": state(1.0)})}
    with pytest.raises(UpdateError, match="n_samples"):
        site_models(replies, "model")
