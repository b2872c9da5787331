"""Parts of the network that rest in the first rounds: they do not move, do not travel, and train afterwards."""

from typing import Any

import pytest
import torch

from helpers.small_tasks import INSTANCE_UNET, small_task
from medflare.core.errors import ConfigError
from medflare.methods.baselines.fedprox import FedProxSite
from medflare.methods.catalogue import get_method
from medflare.methods.fedavg import FedAvgServer, FedAvgSite
from medflare.networks.catalogue import initial_network
from medflare.tasks.config import TaskConfig
from methods import squares

FROZEN: dict[str, Any] = {"freeze": {"parts": ["body"], "rounds": 2}}


def head(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith("head.")}


def play(task: TaskConfig, site_class: type[FedAvgSite[Any]] = FedAvgSite, rounds: int = 3, **hyper: Any) -> Any:
    members = {name: squares.algorithm(site_class, name, task, **hyper) for name in "ABC"}
    return squares.play(squares.server(FedAvgServer, task, rounds=rounds, outside=(), algorithms=members), members)


def test_what_rests_neither_moves_nor_travels() -> None:
    task = small_task(**FROZEN)
    log, server, _ = play(task)
    start = initial_network(task, squares.SEED).state_dict()
    assert [turn.step.phase for turn in log] == ["train_part", "train_part", "train", "validate"]
    for turn in log[:2]:
        for message in (*turn.outgoing.values(), *turn.replies.values()):
            assert set(message.states["model"]) == set(head(start))
    after = log[2].outgoing["A"].states["model"]
    assert all(torch.equal(after[name], start[name]) for name in start if name not in head(start)), "batch normalisation too"
    assert not torch.equal(after["head.weight"], start["head.weight"])
    assert not all(torch.equal(server.model[name], start[name]) for name in start if name.endswith("conv.weight"))


def test_a_list_rests_in_every_round() -> None:
    task = small_task(freeze=["body"])
    assert list(task.freeze["parts"]) == ["body"] and small_task(**task.to_dict()) == task
    log, server, _ = play(task)
    start = initial_network(task, squares.SEED).state_dict()
    assert [turn.step.phase for turn in log] == ["train_part", "train_part", "train_part", "validate"]
    moved = {name for name in start if not torch.equal(server.model[name], start[name])}
    assert moved and moved <= set(head(start))
    assert small_task(freeze=[]) == small_task()


def test_moments_of_the_part_are_not_those_of_the_whole() -> None:
    members = play(small_task(**FROZEN), rounds=4, reset_optimizer=False)[2]
    kept = members["A"].memory.states
    assert {"optimizer/model", "optimizer/model/part"} <= set(kept)
    assert len(kept["optimizer/model/part"]) < len(kept["optimizer/model"])


def test_the_proximal_term_pulls_what_moves() -> None:
    log, server, _ = play(small_task(**FROZEN), FedProxSite, mu=10.0)
    assert [turn.step.phase for turn in log] == ["train_part", "train_part", "train", "validate"]
    assert all(tensor.isfinite().all() for tensor in server.model.values())


def test_a_network_at_rest_moves_again_afterwards() -> None:
    network = initial_network(small_task(), 0)
    with network.at_rest(["body"]):
        network.train()
        assert network.training and network.head.training and not network.body.training
        assert {name for name, weight in network.named_parameters() if weight.requires_grad} == {"head.weight", "head.bias"}
    assert network.train().body.training and all(weight.requires_grad for weight in network.parameters())


@pytest.mark.parametrize(
    ("method", "hyper", "freeze", "words"),
    [
        (
            "fedsm",
            {},
            {"parts": ["body"], "rounds": 2},
            "method 'fedsm' trains all of the network from the first round; leave out task.freeze",
        ),
        ("fedavg", {}, {"parts": ["boddy"], "rounds": 2}, "boddy"),
        ("fedavg", {}, {"parts": ["body", "head"], "rounds": 2}, "freeze.parts"),
        (
            "fedavg",
            {"dp_noise": 1.0},
            {"parts": ["body"], "rounds": 2},
            "dp_noise",
        ),
        ("fedavg", {}, ["boddy"], "boddy"),
        ("fedavg", {}, {"parts": ["body"]}, "freeze"),
    ],
)
def test_what_is_refused(method: str, hyper: dict[str, Any], freeze: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        get_method(method).check(hyper, small_task(freeze=freeze, network=INSTANCE_UNET))


def test_it_goes_with_a_robust_mean() -> None:
    get_method("robust").check({}, small_task(**FROZEN))
    get_method("fedavg", server="robust").check({}, small_task(**FROZEN))
