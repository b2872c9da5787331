"""Three runs with numbers that can be worked out by hand, and small sites on disk."""

import dataclasses
from typing import Any

import pytest

from medflare.evaluation.results import RunRecord, SiteRecord, build_results
from medflare.studies.statistics import Results
from medflare.tasks.config import load_task


@pytest.fixture
def record() -> RunRecord:
    """A run without sites."""
    return RunRecord("fedsm", load_task("phantom"), seed=7, rounds=2, sites={})


@pytest.fixture
def runs(record: RunRecord) -> list[dict[str, Any]]:
    """Three seeds; global Dice of A is 0.4, 0.5, 0.6 and of B 0.6, 0.5, undefined."""

    def run(seed: int, a: float, b: float | None, deployed: float) -> dict[str, Any]:
        sites = {
            "A": SiteRecord("inside", metrics={"global": {"dice": a, "hd95": 10 * a}}),
            "B": SiteRecord("inside", metrics={"global": {"dice": b}}),
            "X": SiteRecord("outside", metrics={"deployed": {"dice": deployed}}),
        }
        return build_results(dataclasses.replace(record, seed=seed, sites=sites))

    return [run(0, 0.4, 0.6, 0.1), run(1, 0.5, 0.5, 0.2), run(2, 0.6, None, 0.6)]


def leaving_out(site: str, value: float, run: Results) -> dict[str, Any]:
    """The run with `site` outside in X's place, where the deployed model has this Dice."""
    outside = {
        **run["sites"]["X"],
        "metrics": {**run["sites"]["X"]["metrics"], "deployed": {"dice": value}},
    }
    return {**run, "sites": {"A": run["sites"]["A"], site: outside}}
