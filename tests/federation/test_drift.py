"""Drift: one site's small updates that add up, remembered over rounds and restarts."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import medflare
from helpers.small_tasks import tiny_phantom
from medflare.core.message import Message
from medflare.core.rng import torch_generator
from medflare.federation.exchange import SiteReply
from medflare.federation.local import loop
from medflare.federation.local.local_exchange import LocalExchange
from medflare.federation.outcome import StepReport
from medflare.federation.update_validation.clipping import usual_lengths
from medflare.federation.update_validation.drift import DriftMemory, drift
from medflare.testing import Killed

NORTH = (0.0, 1.0)
EAST = (1.0, 0.0)
NORTH_EAST = (1.0, 1.0)
NORTH_WEST = (-1.0, 1.0)
NOBODY = [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("sites", "named"),
    [
        ([[NORTH_EAST, NORTH_WEST]] * 2 + [[EAST, EAST]], [0.0, 0.0, 1.0]),
        ([[NORTH_EAST, NORTH_WEST]] * 2 + [[(0.0, -3.0)] * 2], [0.0, 0.0, 3.0]),
        ([[NORTH, NORTH]] * 2 + [[EAST, EAST]], NOBODY),  # the others are as straight
        ([[NORTH_EAST, NORTH_WEST]] * 2 + [[EAST, NORTH]], NOBODY),  # cosine 0.7 to the others
        ([[NORTH_EAST, NORTH_WEST]] * 2 + [[EAST, (-1.0, 0.0)]], NOBODY),  # its sum is 0
        # A fifth of the usual length.
        ([[NORTH_EAST, NORTH_WEST]] * 2 + [[(0.2, 0.0)] * 2], NOBODY),
        # The others do not agree.
        ([[NORTH_EAST, NORTH_WEST], [(1.0, -1.0), (-1.0, -1.0)], [EAST, EAST]], NOBODY),
        ([[(0.0, 0.0)] * 2] * 3, NOBODY),
    ],
)
def test_a_straight_path_in_a_direction_of_its_own_is_drift(
    sites: list[Any], named: list[float]
) -> None:
    assert drift(torch.tensor(sites), [4, 4, 4]) == named


def test_usual_lengths() -> None:
    assert usual_lengths(torch.tensor([1.0, 2.0, 9.0]), [8, 8, 8]).tolist() == [9, 9, 2]
    assert usual_lengths(torch.tensor([1.0, 2.0, 3.0, 4.0]), [8, 8, 8, 8]).tolist() == [3, 3, 2, 2]
    assert usual_lengths(torch.tensor([1.0, 1.0, 9.0]), [8, 16, 400]).tolist() == [9, 9, 50]
    assert usual_lengths(torch.tensor([1.0]), [8]).tolist() == [0]
    assert usual_lengths(torch.tensor([[0.0, 0.0, 5.0], [0.0, 2.0, 5.0]]), [0, 0, 0]).tolist() == [
        [5, 5, 0],
        [5, 5, 2],
    ]


def test_a_sample_keeps_lengths_and_no_single_site_knows_it() -> None:
    sent = {"w": torch.zeros(100_000), "b": torch.zeros(3), "n": torch.tensor(1)}
    state = {
        "w": torch.randn(100_000, generator=torch_generator(0)),
        "b": torch.ones(3),
        "n": torch.tensor(2),
    }
    replies = {"A": Message({"model": state})}
    requests = {"A": Message({"model": sent})}
    first, again, other = (
        DriftMemory(0).sketch("train", "model", replies, requests, salt)["A"] for salt in "112"
    )
    assert len(first) == 512 + 3 and torch.equal(first, again) and not torch.equal(first, other)
    assert math.isclose(float(first.norm()), math.sqrt(100_000), rel_tol=0.1)
    memory = DriftMemory(0)
    kept = memory.sketch("train", "model", replies, requests, "1")
    assert torch.equal(kept["A"], memory.sketch("train", "model", replies, requests, "2")["A"]), (
        "that of the first round"
    )


class Drifting(LocalExchange):
    """Site-2 sends what it was sent, moved by so many times the length of its own update in one direction."""

    factor = 1.0

    def reply(self, site: str, step: Any, message: Any) -> SiteReply:
        sent = {name: tensor.clone() for name, tensor in message.states.get("model", {}).items()}
        reply = super().reply(site, step, message)
        if site == "site-2" and reply.message is not None and "model" in reply.message.states:
            state = reply.message.states["model"]
            drawn = torch_generator(1)
            direction = {
                name: torch.randn(tensor.shape, generator=drawn) for name, tensor in state.items()
            }
            long = math.sqrt(
                sum(float((state[name] - sent[name]).square().sum()) for name in state)
            )
            unit = math.sqrt(sum(float(tensor.square().sum()) for tensor in direction.values()))
            reply.message.states["model"] = {
                name: sent[name] + self.factor * long / unit * direction[name] for name in state
            }
        return reply


def run(folder: Path, last: int | None = None, **options: Any) -> dict[str, Any]:
    def observe(report: StepReport) -> None:
        if report.index == last:
            raise Killed

    try:
        return medflare.run_local(
            "fedavg", tiny_phantom(), 3, rounds=4, seed=1, out=folder, observe=observe, **options
        )
    except Killed:
        return {}


def named(results: dict[str, Any]) -> list[tuple[str, str, int]]:
    kinds = ("suspicious", "rejected")
    found = []
    for event in results["events"]:
        if event["kind"] in kinds:
            found.append((event["kind"], event["site"], event["round"]))
    return found


def test_a_drifting_site_is_named_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LocalExchange", Drifting)
    whole = run(tmp_path / "whole")
    assert named(whole) == [("suspicious", "site-2", 2), ("suspicious", "site-2", 3)]
    run(tmp_path / "killed", 2)
    assert named(run(tmp_path / "killed", resume=True)) == named(whole)
    assert named(run(tmp_path / "strict", outlier_policy="rejected")) == [
        ("rejected", "site-2", 2),
        ("rejected", "site-2", 3),
    ]


def test_a_long_drift_is_clipped_and_then_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LocalExchange", Drifting)
    monkeypatch.setattr(Drifting, "factor", 4.0)
    assert named(run(tmp_path)) == [
        (kind, "site-2", round) for round, kind in enumerate(["suspicious"] * 2 + ["rejected"] * 2)
    ]


def test_honest_sites_are_not_named(tmp_path: Path) -> None:
    assert named(run(tmp_path)) == []
