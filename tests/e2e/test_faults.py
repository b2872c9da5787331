"""Sites that fail, lie, dawdle or die in a running job: named, never waited for in vain, and never taken for success."""

import time
from pathlib import Path
from typing import Any

from e2e.simulation import END_TO_END, Simulate, problems, use_executor
from medflare.core.events import DOUBTS
from medflare.flare.jobs.building import build_job

pytestmark = END_TO_END

FAULTY = Path(__file__).parent / "components" / "faulty_executor.py"


def test_the_others_go_on(simulate: Simulate, tiny_task: dict[str, Any], tmp_path: Path) -> None:
    job = build_job("fedavg", tiny_task, out=tmp_path / "job", rounds=3, min_sites=2, step_timeout=20.0, heartbeat_timeout=30.0)
    sites = ("bad", "dead", "good", "late", "lost", "well")
    faults = {"bad": "nan", "dead": "die", "late": "slow", "lost": "raise"}
    use_executor(job, FAULTY, "FaultyExecutor", faults=faults, seconds=30.0)  # a round takes a second; the rest is for busy machines
    simulation = simulate(job, "-c", ",".join(sites), "-t", str(len(sites))).wait()
    ended, results = time.time(), simulation.results
    assert results["status"] == "COMPLETED"
    assert ended - (simulation.folder / "results.json").stat().st_mtime < 60, "seconds, of which a busy machine takes most"
    assert "NaN" in problems(results, "rejected")["bad"][0]
    assert "ZeroDivisionError" in problems(results, "failed")["lost"][0]
    assert ["lost" in step["sites"] for step in simulation.steps if step["phase"] == "train"] == [True, False, True], "it takes part again"
    assert "late" in problems(results, "late"), results["events"]
    assert "dead" in problems(results, "missing")
    assert "good" not in {event["site"] for event in results["events"] if event["kind"] not in DOUBTS}
    assert all(results["sites"][site]["metrics"]["global"]["dice"] is not None for site in sites if site != "dead")
    assert results["sites"]["dead"]["metrics"]["global"]["dice"] is None


def test_no_usable_update_is_a_failure(simulate: Simulate, tiny_task: dict[str, Any], tmp_path: Path) -> None:
    job = build_job("fedavg", tiny_task, out=tmp_path / "job", rounds=2)
    use_executor(job, FAULTY, "FaultyExecutor", faults={"site-1": "nan", "site-2": "nan"}, always=True)
    simulation = simulate(job, "-n", "2", "-t", "2").wait()
    assert simulation.results["status"] == "FAILED"
    assert "'train'" in simulation.results["reason"] and simulation.console.count("medflare: FAILED:") == 1
    assert len(problems(simulation.results, "repeated")[None]) == 1


def test_missing_data_fail_before_training(simulate: Simulate, tiny_task: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    job = build_job("fedavg", tiny_task, out=tmp_path / "job", rounds=2)
    simulation = simulate(job, "-n", "2", "-t", "2", MEDFLARE_DATA_ROOT="data", PWD=str(tmp_path)).wait()
    assert simulation.results["status"] == "FAILED"
    assert "datalist.json" in simulation.results["reason"] and "medflare: FAILED:" in simulation.console
    assert not (simulation.folder / "metrics.jsonl").exists()


def test_a_job_that_cannot_be_read_leaves_results(simulate: Simulate, tmp_path: Path) -> None:
    job = build_job("fedavg", "phantom", out=tmp_path / "job", rounds=2)
    task = job / "app" / "config" / "task.json"
    task.write_text(task.read_text()[:100])
    simulation = simulate(job, "-n", "2", "-t", "2").wait()
    assert simulation.results["status"] == "FAILED"
    assert "task.json" in simulation.results["reason"]
    assert set(simulation.results["sites"]) == {"site-1", "site-2"}
    assert simulation.console.count("medflare: FAILED:") == 1
