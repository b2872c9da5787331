"""What GRACE's server is for: sites whose updates do not agree with those of the others, here from random labels."""

from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from medflare.federation.local.loop import run_local
from medflare.federation.outcome import StepReport
from medflare.tasks.config import load_task

pytestmark = pytest.mark.timeout(900)  # several runs, on a machine that may be busy

# Half of the images of a site in a batch: half the steps of the task's batches.
TASK = replace(load_task("mechanisms/noisy_sites"), batch_size=24)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sites_with_random_labels_get_less_weight(seed: int) -> None:
    """At a clean outside site the model is better than FedAvg's, which that of the clean sites alone (an oracle) is, too."""
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
    clean = run_local("fedavg", TASK, [*"ABC"], outside=["X"], rounds=10, seed=seed, resplit=seed)
    oracle = clean["sites"]["X"]["metrics"]["deployed"]["f1_macro"]
    assert f1["fedavg"] < min(f1["grace"], oracle)
    assert f1["grace"] < 0.99, "a perfect model shows no difference"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_clean_sites_keep_their_weights_and_the_model_is_near_fedavgs(seed: int) -> None:
    """The server's part alone, which trains as FedAvg does; GRACE's second step of each batch may gain."""
    sites = ["A", "B", "C"]
    weights: list[float] = []

    def observe(report: StepReport) -> None:
        if report.step.phase == "train":
            aggregation = report.line()["aggregation"]
            weights.extend(aggregation[site]["weight"] for site in sites)

    def f1(method: str, **options: Any) -> tuple[float, float]:
        """Macro F1 at the sites and at X."""
        results = run_local(
            method, TASK, sites, outside=["X"], rounds=10, seed=seed, resplit=seed, **options
        )
        outside = results["sites"]["X"]["metrics"]["deployed"]["f1_macro"]
        return results["mean"]["inside"]["deployed"]["f1_macro"], outside

    fedavg = f1("fedavg")
    server_alone = f1("grace", client="erm", observe=observe)
    grace = f1("grace", observe=observe)
    assert server_alone[0] == pytest.approx(fedavg[0], abs=0.03)
    assert min(grace[0] - fedavg[0], grace[1] - fedavg[1]) >= -0.02
    assert weights and weights == pytest.approx([1 / 3] * len(weights), abs=0.05)
