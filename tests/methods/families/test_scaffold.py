"""SCAFFOLD by its formulas; c remains the mean of the sites' c_k if sites or updates are missing; client drift is corrected."""

from typing import Any

import pytest
import torch
from torch import nn

from helpers.fixture_types import Golden
from medflare.core.states import StateDict, difference, moved, weighted_mean
from medflare.methods.families.local_terms.scaffold import (
    Correction,
    ScaffoldServer,
    ScaffoldSite,
    corrected_gradients,
)
from methods import squares

LR = 0.05


def test_step_is_the_reference(golden: Golden) -> None:
    numbers = {}
    for name, array in golden("baselines").items():
        if "/" in name and array.ndim:
            numbers[name] = torch.from_numpy(array)
    for name in ("weight", "bias"):
        gradient = numbers[f"grad/{name}"]
        (corrected,) = corrected_gradients(
            [gradient], [torch.full_like(gradient, -0.01)], [torch.full_like(gradient, 0.03)]
        )
        expected = numbers[f"scaffold_step_lr.1_c.03_ci-.01/{name}"]
        torch.testing.assert_close(
            numbers[f"theta/{name}"] - 0.1 * corrected, expected, rtol=1e-5, atol=1e-6
        )


def test_correction_by_hand() -> None:
    network = nn.Linear(1, 1)
    correction = Correction(
        network,
        {"weight": torch.tensor([[2.0]]), "bias": torch.zeros(1)},
        dict.fromkeys(("weight", "bias"), torch.ones(1)),
    )
    for gradient in (3.0, 5.0):
        network.weight.grad = torch.tensor([[gradient]])
        network.bias.grad = None
        correction()
        assert network.weight.grad.item() == gradient - 2 + 1
        assert network.bias.grad is not None and network.bias.grad.item() == 1, (
            "no gradient is a gradient of zero"
        )
    assert correction.steps == 2
    assert {name: tensor.item() for name, tensor in correction.mean().items()} == {
        "weight": 4,
        "bias": 0,
    }


def test_mean_gradient_along_the_path_is_the_printed_difference_of_weights() -> None:
    """c_k⁺ - c_k = -c + (w_g - y) / (K η_l) under plain gradient descent (Alg. 1, line 12, ii)."""
    task = squares.task(optimizer={"name": "sgd", "lr": LR}, local_epochs=2, batch_size=5)
    played = squares.run("scaffold", task, rounds=3)
    steps = 2 * 3  # epochs of 12 images in batches of 5
    for turn in played.log[:3]:
        for name, reply in turn.replies.items():
            sent = turn.outgoing[name].states
            update = reply.states["control_update"]
            way = difference(sent["model"], reply.states["model"])
            printed = {key: way[key] / (steps * LR) - sent["control"][key] for key in update}
            squares.assert_close(update, printed)


def test_the_first_round_is_fedavg() -> None:
    scaffold = squares.run("scaffold", rounds=1)
    assert squares.equal(scaffold.model, squares.run("fedavg", rounds=1, weighting="uniform").model)


def control_variates(played: Any) -> dict[str, StateDict]:
    """site -> c_k, with its last update if the server has counted it."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in played.server.control.items()}
    controls = {}
    for name, algorithm in played.algorithms.items():
        counted = (
            algorithm.update is not None
            and played.server.memory.meta["counted"].get(name) == algorithm.memory.meta["updated"]
        )
        controls[name] = (
            moved(algorithm.control or zeros, algorithm.update)
            if counted
            else algorithm.control or zeros
        )
    return controls


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_c_is_the_mean_of_all_c_k_for_any_participation(weighting: str) -> None:
    counts = {"B": (6, 4, 5), "C": (9, 4, 5)}
    missing = {0: "C", 1: "C", 2: "A"}
    absent = lambda step, name: missing.get(step.round) == name  # noqa: E731
    played = squares.run("scaffold", rounds=4, counts=counts, absent=absent, weighting=weighting)
    weights = dict.fromkeys("ABC", 1.0) if weighting == "uniform" else {"A": 12, "B": 6, "C": 9}
    squares.assert_close(played.server.control, weighted_mean(control_variates(played), weights))
    assert any(tensor.any() for tensor in played.server.control.values())


def test_a_limited_share_holds_for_control_variates_too() -> None:
    """`max_client_weight` reduces A's weight; after C has enrolled late, which changes the limit, c is still the mean of the c_k."""
    algorithms = squares.algorithms(
        ScaffoldSite, counts=dict.fromkeys("BC", (6, 4, 5)), weighting="samples"
    )
    server = squares.server(ScaffoldServer, rounds=2, outside=(), algorithms=algorithms)
    late = server.context.site_counts.pop("C")
    server.context.counted_fraction = {"A": 0.5, "B": 1.0}
    for step in server.steps()[:2]:
        enrolled = [name for name in algorithms if name in server.context.site_counts]
        replies = {
            name: algorithms[name].perform(step.phase, step.round, server.configure(step, name))
            for name in enrolled
        }
        server.aggregate(step, replies)
        server.context.site_counts["C"], server.context.counted_fraction = (
            late,
            {"A": 1.0, "B": 1.0, "C": 1.0},
        )
    assert server.weights == {"A": 6.0, "B": 6.0, "C": 6.0}
    squares.assert_close(
        server.control,
        weighted_mean(control_variates(squares.Played([], server, algorithms)), server.weights),
    )


def test_few_sites_move_c_by_their_share_of_all() -> None:
    """c <- c + |S|/N · mean of the updates (Alg. 1, line 17), N = 3."""
    played = squares.run("scaffold", rounds=1, absent=lambda step, name: name != "A")
    update = played.log[0].replies["A"].states["control_update"]
    squares.assert_close(
        played.server.control, {name: tensor / 3 for name, tensor in update.items()}
    )


def test_an_update_that_never_arrives_changes_neither_side() -> None:
    algorithms = squares.algorithms(ScaffoldSite)
    server = squares.server(ScaffoldServer, rounds=3, outside=(), algorithms=algorithms)
    for step in server.steps()[:3]:
        replies = {
            name: algorithm.perform(step.phase, step.round, server.configure(step, name))
            for name, algorithm in algorithms.items()
        }
        arrived = {}
        for name, reply in replies.items():
            if (name, step.round) not in {("B", 1), ("C", 2)}:
                arrived[name] = reply
        server.aggregate(step, arrived)
    controls = control_variates(squares.Played([], server, algorithms))
    squares.assert_close(server.control, weighted_mean(controls, dict.fromkeys("ABC", 1.0)))
    assert algorithms["B"].control is not None, (
        "the update of round 0 was counted, that of round 1 was not"
    )
