"""Ditto: FedAvg's global model, and personal models between training alone (λ = 0) and the global model (λ large)."""

from typing import Any

import pytest
import torch

from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state
from medflare.methods.families.second_models import DITTO
from medflare.methods.families.second_models.ditto import DittoSite
from medflare.methods.fedavg.site import FedAvgSite
from medflare.training.epochs import trainable
from methods import squares

LR = 0.1


def by_hand(
    algorithm: Any, start: StateDict, shared: StateDict, round: int, lam: float
) -> StateDict:
    """v <- v - η (∇F_k(v) + λ (v - w_g)) over the round's batches (Alg. 1), written down anew."""
    network = algorithm.site.network()
    site = algorithm.site
    network.load_state_dict(start)
    anchor = [shared[name] for name, _ in network.named_parameters()]
    network.train()
    for images, targets, _ in site.batches("train", round, "personal", 0):
        gradients = torch.autograd.grad(site.loss(network(images), targets), trainable(network))
        with torch.no_grad():
            for v, g, w in zip(trainable(network), gradients, anchor, strict=True):
                v.sub_(LR * (g + lam * (v - w)))
    return copy_state(network.state_dict())


def test_personal_model_by_hand() -> None:
    task = squares.task(optimizer={"name": "sgd", "lr": LR})
    played = squares.run("ditto", task, lam=0.7)
    expected = squares.start(task)
    for round in range(2):
        shared = played.log[round].outgoing["B"].states["model"]
        expected = by_hand(played.algorithms["B"], expected, shared, round, 0.7)
    squares.assert_close(played.algorithms["B"].personal, expected)


def test_both_models_are_validated_and_the_personal_one_never_leaves() -> None:
    played = squares.run("ditto")
    for turn in played.log:
        for reply in turn.replies.values():
            assert reply.meta["validation"].keys() == {"global", "personal"}
            assert reply.states.keys() <= {"model"}
    first = played.log[0].replies["A"].meta["validation"]
    assert first["personal"] == first["global"], "v begins as w_g"
    expected = {name: phase for name, phase in FedAvgSite.phases.items() if name != "train_part"}
    assert DITTO.site_class.phases == expected


@pytest.mark.parametrize("name", ["O", "B"], ids=["outside", "never trained"])
def test_a_site_without_a_personal_model_uses_the_global_one(name: str) -> None:
    algorithm = squares.algorithm(DittoSite, name)
    assert algorithm.finalize(Message({"model": squares.start()})).keys() == {"global", "deployed"}
    assert (
        algorithm.validate(3, Message({"model": squares.start()})).meta["validation"]["personal"]
        is None
    )
