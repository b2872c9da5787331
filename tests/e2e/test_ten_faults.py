"""The faults that FLARE's own FedAvg lets pass or dies of, at one site of three in a running job: each has its line.

Processes that die are in test_faults.py (simulator) and test_faults_provisioned.py.
"""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from e2e.components.misbehaving import FAULTS
from e2e.simulation import END_TO_END, Simulate, use_executor
from medflare.flare.jobs.building import build_job

pytestmark = END_TO_END

SITES = ("site-1", "site-2", "site-3")
VICTIM = "site-2"
COMPONENT = Path(__file__).parent / "components" / "misbehaving.py"

# fault -> (kind of the event that names the site, a token in it)
LINES = {
    "nan": ("rejected", "NaN"),
    "huge": ("rejected", "times"),
    "missing_key": ("rejected", "missing"),
    "extra_key": ("rejected", "patients"),
    "wrong_shape": ("rejected", "shape"),
    "no_samples": ("rejected", "n_samples"),
    "negative_samples": ("rejected", "n_samples"),
    "nan_samples": ("rejected", "n_samples"),
    "exception": ("failed", "ZeroDivisionError"),
    "extra_entry": ("rejected", "images"),
    "tensor_in_facts": ("rejected", "meta"),
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, tiny_task: dict[str, Any]) -> Path:
    """One round for every fault."""
    folder = build_job("fedavg", tiny_task, rounds=len(FAULTS), seed=1, out=tmp_path_factory.mktemp("jobs") / "faults")
    use_executor(folder, COMPONENT, "MisbehavingExecutor", victim=VICTIM)
    return folder


def test_every_fault_is_rejected_named_and_survived(simulate: Simulate, job: Path) -> None:
    simulation = simulate(job, "-n", "3", "-t", "3").wait()
    results = simulation.results
    assert results["status"] == "COMPLETED", "one bad site of three does not end a federation"
    events = {event["round"]: event for event in results["events"] if event["site"] == VICTIM}
    for fault, (kind, words) in LINES.items():
        event = events[FAULTS.index(fault)]
        assert event["kind"] == kind and words in event["message"], (fault, event)
    assert {event["site"] for event in results["events"] if event["kind"] in ("rejected", "failed")} == {VICTIM}

    # A metric that is no number costs a vote, not the update: the site took part in that round.
    (line,) = (line for line in simulation.steps if line["round"] == FAULTS.index("nan_metric") and line["phase"] == "train")
    assert VICTIM in line["sites"]
    for model in simulation.folder.rglob("model.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(model).values()), model
