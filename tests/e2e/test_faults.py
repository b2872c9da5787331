"""Sites that fail, send nonsense, are slow or die in a running job: the run names each, waits for none in vain, and goes on.

Processes that are killed in a provisioned federation are in test_faults_provisioned.py.
"""

import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from e2e.components.faulty_executor import FAULTS
from e2e.simulation import END_TO_END, Simulate, problems, use_executor
from helpers.rounds import read_rounds
from medflare.core.events import DOUBTS
from medflare.flare.jobs.building import build_job

pytestmark = END_TO_END

FAULTY = Path(__file__).parent / "components" / "faulty_executor.py"
SITES = ("bad", "dead", "good", "late")
ROUND_OF = {fault: round for round, fault in enumerate(FAULTS)}
# fault of the site "bad" -> (kind of its event, a token in the message)
EVENTS = {
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


def test_each_fault_is_named_and_the_others_go_on(
    simulate: Simulate, tiny_task: dict[str, Any], tmp_path: Path
) -> None:
    """One round for each fault that FLARE's own FedAvg lets pass or dies of."""
    settings = {
        "rounds": len(FAULTS),
        "seed": 1,
        "min_sites": 1,
        "step_timeout": 20.0,
        "heartbeat_timeout": 15.0,
    }
    job = build_job("fedavg", tiny_task, out=tmp_path / "job", **settings)
    use_executor(
        job,
        FAULTY,
        "FaultyExecutor",
        faults={"bad": "all", "dead": "die", "late": "slow"},
        seconds=30.0,
    )
    simulation = simulate(job, "-c", ",".join(SITES), "-t", str(len(SITES))).wait()
    ended = time.time()
    results = simulation.results
    assert results["status"] == "COMPLETED"
    assert ended - (simulation.folder / "results.json").stat().st_mtime < 60, (
        "the simulator ends soon, also on a busy machine"
    )
    events = {
        event["round"]: event
        for event in results["events"]
        if event["site"] == "bad" and event["kind"] not in DOUBTS
    }
    for fault, (kind, token) in EVENTS.items():
        event = events[ROUND_OF[fault]]
        assert event["kind"] == kind and token in event["message"], (fault, event)
    assert "late" in problems(results, "late") and "dead" in problems(results, "missing"), results[
        "events"
    ]
    of_good = [
        event
        for event in results["events"]
        if event["site"] == "good" and event["kind"] not in DOUBTS
    ]
    assert {event["kind"] for event in of_good} <= {"suspicious"}
    assert all("either can be wrong" in event["message"] for event in of_good)

    trained = {
        step["round"]: step["sites"]
        for step in read_rounds(simulation.folder)
        if step["phase"] == "train"
    }
    assert "bad" in trained[ROUND_OF["nan_metric"]], (
        "a metric that is no number costs a vote, not the update"
    )
    assert "late" not in trained[1] and "late" in trained[len(FAULTS) - 1], "it takes part again"
    assert all(
        results["sites"][site]["metrics"]["global"][tiny_task["metric"]] is not None
        for site in SITES
        if site != "dead"
    )
    assert results["sites"]["dead"]["metrics"]["global"][tiny_task["metric"]] is None
    for model in simulation.folder.rglob("model.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(model).values()), model


def test_a_run_without_a_usable_update_fails(
    simulate: Simulate, tiny_task: dict[str, Any], tmp_path: Path
) -> None:
    job = build_job("fedavg", tiny_task, out=tmp_path / "job", rounds=2)
    use_executor(job, FAULTY, "FaultyExecutor", faults={"site-1": "nan", "site-2": "nan"})
    simulation = simulate(job, "-n", "2", "-t", "2").wait()
    assert simulation.results["status"] == "FAILED"
    assert (
        "'train'" in simulation.results["reason"]
        and simulation.console.count("medflare: FAILED:") == 1
    )
    assert len(problems(simulation.results, "repeated")[None]) == 1
