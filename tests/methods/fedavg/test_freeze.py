"""Parts of the network that are frozen in the first rounds: they do not change, do not travel, and are trained afterwards."""

from typing import Any

import torch

from helpers.small_tasks import small_task
from medflare.methods.fedavg import FedAvgServer, FedAvgSite
from medflare.networks.catalogue import initial_network
from medflare.tasks.config import TaskConfig
from methods import squares

FROZEN: dict[str, Any] = {"freeze": {"parts": ["body"], "rounds": 2}}


def head(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith("head.")}


def play(task: TaskConfig, rounds: int = 3) -> squares.Played:
    return squares.federation(FedAvgSite, FedAvgServer, task, rounds=rounds)


def test_frozen_parts_neither_change_nor_travel() -> None:
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


def test_a_list_is_frozen_in_every_round() -> None:
    task = small_task(freeze=["body"])
    assert list(task.freeze.parts) == ["body"] and small_task(**task.to_dict()) == task
    log, server, _ = play(task)
    start = initial_network(task, squares.SEED).state_dict()
    assert [turn.step.phase for turn in log] == ["train_part", "train_part", "train_part", "validate"]
    moved = {name for name in start if not torch.equal(server.model[name], start[name])}
    assert moved and moved <= set(head(start))
    assert small_task(freeze=[]) == small_task()


def test_the_trainable_part_has_its_own_moments() -> None:
    members = play(small_task(**FROZEN), rounds=4)[2]
    kept = members["A"].memory.states
    assert {"optimizer/model", "optimizer/model/part"} <= set(kept)
    assert len(kept["optimizer/model/part"]) < len(kept["optimizer/model"])
