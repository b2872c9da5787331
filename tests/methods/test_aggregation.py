"""The weighted mean as a formula that both worlds call, and what a reply must bring for it."""

from dataclasses import dataclass

import pytest
import torch

from medflare.core.errors import UpdateError
from medflare.core.message import Message
from medflare.core.states import StateDict
from medflare.methods.aggregation import SiteModel, WeightedMean, samples_of, site_models, states_of
from methods import squares


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


def test_what_it_goes_by() -> None:
    assert WeightedMean(Hyper()).shares(MODELS) == {"A": 10.0, "B": 30.0} == samples_of(MODELS)
    assert WeightedMean(Hyper("uniform")).shares(MODELS) == {"A": 1.0, "B": 1.0}
    assert states_of(MODELS)["B"] is MODELS["B"].state
    assert SiteModel(state(1.0)).samples == 1.0


def test_a_federation_tells_it_how_many_rounds_there_are() -> None:
    formula = WeightedMean(Hyper())
    assert formula.rounds is None
    formula.prepare(squares.SEGMENTATION, 5)
    assert formula.rounds == 5


def test_replies_become_models() -> None:
    found = site_models({"A": Message({"model": state(1.0), "more": {}}, {"n_samples": 7, "loss": 0.5})}, "model")
    assert found["A"].samples == 7.0 and found["A"].meta["loss"] == 0.5 and squares.equal(found["A"].state, state(1.0))


def test_a_reply_without_samples_is_refused_with_the_remedy() -> None:
    replies = {"A": Message({"model": state(1.0)}, {"n_samples": 7}), "B": Message({"model": state(1.0)})}
    with pytest.raises(UpdateError, match="n_samples"):
        site_models(replies, "model")
