"""Interrupted runs and damaged states in the plain loop."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import medflare
from helpers.final_models import same_weights
from helpers.killed_runs import Killed
from helpers.small_tasks import tiny_phantom
from medflare.federation.local.loop import resume_local
from medflare.federation.memory import StoredAlgorithm
from medflare.federation.outcome import StepReport

TINY = tiny_phantom(batch_size=32)
ROUNDS = 2

KILLED = """
import json, os, signal, sys
import medflare
from medflare.federation import run
method, folder, task, moment, count = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4], int(sys.argv[5])
seen = 0

def die(*_):
    global seen
    seen += 1
    if seen == count:
        os.kill(os.getpid(), signal.SIGKILL)

if moment == "writing":  # between the temporary file and its final name
    replace = os.replace
    os.replace = lambda source, target: (str(target).endswith("checkpoint.safetensors") and die(), replace(source, target))[1]
medflare.run_local(method, task, 2, rounds=2, seed=1, out=folder, say=die if moment == "step" else lambda line: None)
"""


def run(folder: Path, method: str = "fedsm", **options: Any) -> dict[str, Any]:
    return medflare.run_local(method, TINY, 2, **{"rounds": ROUNDS, "seed": 1, "out": folder, **options})


def killed(folder: Path, method: str, moment: str, count: int) -> None:
    """A run in a separate process that kills itself."""
    import json

    done = subprocess.run(
        [sys.executable, "-c", KILLED, method, folder, json.dumps(TINY), moment, str(count)], env={**os.environ, **SOURCES}
    )
    assert done.returncode == -signal.SIGKILL


SOURCES = {"PYTHONPATH": str(Path(medflare.__file__).parents[1])}


class TestResume:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("method", "moment", "count"),
        [("fedsm", "step", 2), ("fedsm", "writing", 2), ("prr", "step", 2)],  # test_catalogue.py interrupts every method
    )
    def test_kill_9_loses_nothing(self, tmp_path: Path, method: str, moment: str, count: int) -> None:
        """The sites have the killed step behind them; they answer it again from the state before it."""
        killed(tmp_path / "killed", method, moment, count)
        results = resume_local(tmp_path / "killed")
        assert results["status"] == "COMPLETED"
        assert results["sites"] == run(tmp_path / "whole", method)["sites"]
        assert same_weights(tmp_path / "whole", tmp_path / "killed")
        assert [event["kind"] for event in results["events"]].count("resumed") == 1


class TestAbsentAtResume:
    """One of three sites is absent when the run is resumed, which is interrupted again."""

    @staticmethod
    def leg(folder: Path, last: int | None, **options: Any) -> dict[str, Any]:
        """A run that is killed within a step, or comes to its end."""

        def observe(report: StepReport) -> None:
            if report.index == last:
                raise Killed

        try:
            return medflare.run_local("ditto", TINY, 3, rounds=3, seed=1, out=folder, observe=observe, **options)
        except Killed:
            return {}

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        self.leg(tmp_path, 1)
        self.leg(tmp_path, 2, resume=True, absent={round: ["site-3"] for round in range(4)})
        return tmp_path

    def test_the_site_continues_from_its_stored_state(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(StoredAlgorithm, "begin", lambda algorithm, *_: pytest.fail(f"{algorithm.name} starts again"))
        results = self.leg(folder, None, resume=True)
        assert results["status"] == "COMPLETED" and not [event for event in results["events"] if event["kind"] == "rejected"]

    def test_a_lost_state_fails_the_run(self, folder: Path) -> None:
        shutil.rmtree(folder / "sites" / "site-3" / "state")
        results = self.leg(folder, None, resume=True)
        assert results["status"] == "FAILED"
        assert "site-3" in results["reason"] and "state" in results["reason"]


class TestDamagedStates:
    @pytest.fixture(scope="class")
    @staticmethod
    def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("finished")
        run(folder, "fedavg", rounds=1)
        return folder

    @pytest.fixture
    def folder(self, finished: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(finished, tmp_path / "run"))

    @pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes()[:40]), lambda path: path.write_bytes(b"")])
    def test_a_damaged_state_fails_the_run(self, folder: Path, damage: Any) -> None:
        for path in (folder / "sites" / "site-2" / "state").glob("algorithm-*"):
            damage(path)
        results = resume_local(folder)
        assert results["status"] == "FAILED"
        assert "site-2" in results["reason"] and ".safetensors" in results["reason"]

    def test_swapped_states_fail_the_run(self, folder: Path) -> None:
        first, second = (folder / "sites" / site / "state" for site in ("site-1", "site-2"))
        first.rename(folder / "aside")
        second.rename(first)
        (folder / "aside").rename(second)
        results = resume_local(folder)
        assert results["status"] == "FAILED"
        assert "belongs to site site-2" in results["reason"]

    def test_a_lost_state_is_not_replaced_by_a_new_one(self, folder: Path) -> None:
        shutil.rmtree(folder / "sites" / "site-2" / "state")
        results = resume_local(folder)
        assert results["status"] == "FAILED" and "its state is lost" in results["reason"]
