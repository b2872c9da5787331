"""Records of small runs: three inside sites, of which C has no metrics, and one outside site."""

import dataclasses
import math
from typing import Any

import pytest

from helpers.small_tasks import small_task
from medflare.core.events import EventLog
from medflare.evaluation.results import RunRecord, SiteRecord
from medflare.tasks.config import TaskConfig

History = list[dict[str, Any]]  # type of `history`


@pytest.fixture
def task() -> TaskConfig:
    return small_task(name="tiny", labels=["disc"], source="Synthetic discs, generated for tests.")


@pytest.fixture
def history() -> History:
    """Two rounds and the validation of the last models; site C does not reply in round 1."""

    def meta(loss: float | None, value: float | None) -> dict[str, Any]:
        return {"n_samples": 4, "loss": loss, "validation": {"global": value, "personal": None}}

    def step(number: int, phase: str, seconds: float, **sites: dict[str, Any]) -> dict[str, Any]:
        return {"step": number, "phase": phase, "round": number, "seconds": seconds, "sites": sites}

    return [
        step(0, "train", 1.5, A=meta(0.9, 0.1), B=meta(0.8, 0.2), C=meta(0.7, 0.3)),
        step(1, "train", 1.0, A=meta(0.5, 0.4), B=meta(0.4, 0.5)),
        step(2, "validate", 0.2, A=meta(None, 0.405), B=meta(None, 0.505), C=meta(None, None)),
    ]


@pytest.fixture
def classified(task: TaskConfig) -> RunRecord:
    """Two inside sites and one outside site, two classes; X keeps its counts back."""

    def scores(value: float) -> dict[str, float]:
        return {"accuracy": value, "auc_macro": value}

    def answers(hits: int) -> dict[str, Any]:
        low, high = (0.5, 1.0) if hits else (None, None)
        curve = {"auc": 0.75, "low": low, "high": high, "sensitivity": [0.5] * 10 + [1.0] * 11}
        return {"confusion": [[[3, 1], [4 - hits, hits]]], "roc": [curve]}

    kept_back: dict[str, Any] = {"confusion": [], "roc": []}
    sites = {
        "A": SiteRecord(
            "inside", {"train": 4, "test": 8}, {"global": scores(0.5), "deployed": scores(0.75)}
        ),
        "B": SiteRecord(
            "inside", {"train": 4, "test": 8}, {"global": scores(0.5), "deployed": scores(0.5)}
        ),
        "X": SiteRecord(
            "outside", {"train": 0, "test": 8}, {"global": scores(0.5), "deployed": scores(0.5)}
        ),
    }
    sites["A"].classes = {"global": answers(1), "deployed": answers(3)}
    sites["B"].classes = {"global": answers(1), "deployed": answers(0)}
    sites["X"].classes = {"global": kept_back, "deployed": kept_back}
    changed: dict[str, Any] = {"kind": "classification", "labels": ("<ill>",), "metric": "accuracy"}
    costs = {"A": {"down_bytes": 2048, "up_bytes": 1024, "seconds": 61.0}}
    return RunRecord("fedavg", dataclasses.replace(task, **changed), 7, 2, sites, costs=costs)


@pytest.fixture
def selecting(record: RunRecord) -> RunRecord:
    """The record of a super model: B keeps its counts back, C reports no counts, X is outside."""
    taken: dict[str, dict[str, Any]] = {
        "A": {"A": 2, "B": 1},
        "B": {"A": None, "B": None},
        "C": {"C": "many"},
        "X": {"A": 9, "B": 0},
    }
    sites = {
        name: dataclasses.replace(
            site, reports={"deployed": {"selector": taken[name]}} if name in taken else {}
        )
        for name, site in record.sites.items()
    }
    selector = {
        "gamma": 0.3,
        "temperature": 0.25,
        "candidates": [0.0, 0.3, 1.0],
        "votes": {"A": [0.02, 0.0425, 0.0]},
        "mean_gain": 0.0425,
    }
    return dataclasses.replace(record, sites=sites, selector=selector)


@pytest.fixture
def record(task: TaskConfig, history: History) -> RunRecord:
    def scores(dice: float, hd95: float) -> dict[str, float]:
        return {"dice": dice, "iou": dice / (2 - dice), "hd95": hd95}

    sites = {
        "B": SiteRecord(
            "inside",
            {"train": 6, "validation": 2, "test": 2},
            {"global": scores(0.6, 4), "personal": scores(0.8, 2)},
        ),
        "A": SiteRecord(
            "inside",
            {"train": 4, "validation": 1, "test": 3},
            {"global": scores(0.4, 8), "personal": scores(0.5, math.nan)},
        ),
        "C": SiteRecord("inside", {"train": 3}, {"global": {"dice": None}}),
        "X": SiteRecord(
            "outside",
            {"train": 0, "validation": 0, "test": 9},
            {"global": scores(0.7, 3), "deployed": scores(0.75, 2.5)},
            {"deployed": {"global": 5, "A": 1, "B": 3}},
        ),
    }
    events = EventLog()
    events.add(
        "rejected", "update to 'train' not used: model/w holds NaN or infinity", site="C", round=1
    )
    events.add("undefined", "personal hd95: no image has a boundary", site="A")
    return RunRecord(
        "fedsm",
        task,
        7,
        2,
        sites,
        events=events.to_list(),
        down_bytes=3 * 2**20,
        up_bytes=2**20,
        seconds={"training": 2.7, "total": 4.25},
        hyper={"site": {"lam": 0.7}, "server": {"gamma": "tune", "selection": None}},
        settings={"engine": "local"},
        history=history,
    )
