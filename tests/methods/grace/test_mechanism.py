"""What GRACE's server is for: sites whose updates do not agree with those of the others, here from random labels."""

from dataclasses import replace
from statistics import fmean

import pytest

from medflare.federation.local.loop import run_local
from medflare.federation.outcome import StepReport
from medflare.tasks.config import load_task

# Half of the images of a site in a batch: half the steps of the task's batches.
TASK = replace(load_task("mechanisms/noisy_sites"), batch_size=24)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sites_with_random_labels_get_less_weight(seed: int) -> None:
    """At a clean outside site the model is better than FedAvg's, and not perfect, so that a difference can show."""
    sites = ["A", "B", "C", "D", "E"]
    f1 = {}
    aggregations = []
    for method in ("fedavg", "grace"):
        reports: list[StepReport] = []
        results = run_local(
            method,
            TASK,
            sites,
            outside=["X"],
            rounds=10,
            seed=seed,
            resplit=seed,
            observe=reports.append,
        )
        f1[method] = results["sites"]["X"]["metrics"]["deployed"]["f1_macro"]
        aggregations = [
            report.line()["aggregation"] for report in reports if report.step.phase == "train"
        ]
    for site in "DE":
        assert fmean(aggregation[site]["weight"] for aggregation in aggregations) < 1 / len(sites)
    assert f1["grace"] > f1["fedavg"]
