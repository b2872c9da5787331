"""Interrupted runs and damaged states in the plain loop."""

import os
import shutil
import signal
from collections.abc import Callable
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import medflare
from helpers.final_models import same_weights
from helpers.rounds import read_rounds
from helpers.small_tasks import tiny_grades
from medflare.core.errors import StateError
from medflare.federation.checkpoint import Checkpoint
from medflare.federation.local.local_exchange import LocalExchange
from medflare.federation.local.loop import resume_local
from medflare.federation.memory import StoredAlgorithm
from medflare.federation.outcome import StepReport
from medflare.federation.schedule import Federation
from medflare.federation.settings import ENROL
from medflare.methods.base import Step
from medflare.testing import Killed

TINY = tiny_grades(batch_size=32)
QUICK: dict[str, dict[str, Any]] = {
    "fedsm": {"selector": "compact_selector", "selector_updates": 1}
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Method -> folder and results of a run that is not interrupted; read only."""

    @cache
    def finished(method: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("whole")
        return folder, run(folder, method)

    return finished


def run(folder: Path, method: str = "fedsm", **options: Any) -> dict[str, Any]:
    settings = {"rounds": 2, "seed": 1, "out": folder, **QUICK.get(method, {}), **options}
    return medflare.run_local(method, TINY, 2, **settings)


def run_killed(folder: Path, method: str, moment: str) -> None:
    """A run whose process is killed after its second step, or while it writes the second checkpoint."""
    seen = iter(range(100))

    def die(*_: Any) -> None:
        if next(seen) == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    replace = os.replace

    def replace_killed(source: Any, target: Any) -> None:
        """The moment is between the temporary file and its final name."""
        if str(target).endswith("checkpoint.safetensors"):
            die()
        replace(source, target)

    if moment == "writing":
        setattr(os, "replace", replace_killed)  # noqa: B010 - in this process alone
    run(folder, method, say=die if moment == "step" else lambda line: None)


@pytest.mark.parametrize(
    ("method", "moment"), [("fedsm", "step"), ("fedsm", "writing"), ("prr", "step")]
)
def test_kill_9_loses_nothing(
    tmp_path: Path, method: str, moment: str, whole: Callable[[str], tuple[Path, Any]]
) -> None:
    """The sites have the killed step behind them; they answer it again from the state before it (test_catalogue.py: every method)."""
    process = get_context("fork").Process(target=run_killed, args=(tmp_path, method, moment))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    results = resume_local(tmp_path)
    assert results["status"] == "COMPLETED"
    folder, expected = whole(method)
    assert results["sites"] == expected["sites"]
    assert same_weights(folder, tmp_path)
    steps = [line["step"] for line in read_rounds(tmp_path)]
    assert steps == [line["step"] for line in read_rounds(folder)]
    assert [event["kind"] for event in results["events"]].count("resumed") == 1


def test_the_time_of_a_run_has_the_steps_before_it_was_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TestAbsentAtResume.leg(tmp_path, 1)
    restore = Checkpoint.restore

    def restored(checkpoint: Checkpoint, federation: Federation) -> int:
        finished = restore(checkpoint, federation)
        federation.outcome.history[0]["seconds"] += 1000
        return finished

    monkeypatch.setattr(Checkpoint, "restore", restored)
    results = resume_local(tmp_path)
    assert results["seconds"]["total"] >= results["seconds"]["training"] > 1000


def test_what_a_site_says_of_its_data_is_an_event_once(tmp_path: Path) -> None:
    TestAbsentAtResume.leg(tmp_path, 1)
    kinds = [event["kind"] for event in resume_local(tmp_path)["events"]]
    assert kinds.count("rare_class") == 1


class TestAbsentAtResume:
    """One of three sites is absent when the run is resumed, which is interrupted again."""

    @staticmethod
    def leg(folder: Path, last: int | None, **options: Any) -> dict[str, Any]:
        """A run that is killed within a step, or comes to its end."""

        def observe(report: StepReport) -> None:
            if report.index == last:
                raise Killed

        try:
            return medflare.run_local(
                "ditto", TINY, 3, rounds=3, seed=1, out=folder, observe=observe, **options
            )
        except Killed:
            return {}

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        self.leg(tmp_path, 1)
        self.leg(tmp_path, 2, resume=True, absent={round: ["site-3"] for round in range(4)})
        return tmp_path

    def test_the_site_continues_from_its_stored_state(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            StoredAlgorithm,
            "begin",
            lambda algorithm, *_: pytest.fail(f"{algorithm.name} starts again"),
        )
        results = self.leg(folder, None, resume=True)
        assert results["status"] == "COMPLETED" and not [
            event for event in results["events"] if event["kind"] == "rejected"
        ]

    def test_a_lost_state_fails_the_run(self, folder: Path) -> None:
        shutil.rmtree(folder / "sites" / "site-3" / "state")
        results = self.leg(folder, None, resume=True)
        assert results["status"] == "FAILED"
        assert "site-3" in results["reason"] and "state" in results["reason"]


@pytest.mark.parametrize(
    ("damage", "token"),
    [
        (
            lambda state: [
                path.write_bytes(path.read_bytes()[:40]) for path in state.glob("algorithm-*")
            ],
            ".safetensors",
        ),
        (
            lambda state: [path.write_bytes(b"") for path in state.glob("algorithm-*")],
            ".safetensors",
        ),
        (
            lambda state: shutil.copytree(
                state.parents[1] / "site-1" / "state", state, dirs_exist_ok=True
            ),
            "belongs to site site-1",
        ),
        (shutil.rmtree, "its state is lost"),
    ],
)
def test_a_damaged_foreign_or_lost_state_fails_the_run(
    damage: Callable[[Path], object], token: str, tmp_path: Path
) -> None:
    run(tmp_path, "fedavg", rounds=1)
    damage(tmp_path / "sites" / "site-2" / "state")
    results = resume_local(tmp_path)
    assert (
        results["status"] == "FAILED"
        and "site-2" in results["reason"]
        and token in results["reason"]
    )


class TestUsedFolder:
    """A run in the folder of another one."""

    @pytest.fixture
    def used(self, tmp_path: Path, whole: Callable[[str], tuple[Path, Any]]) -> Path:
        return shutil.copytree(whole("fedsm")[0], tmp_path / "run")

    def test_a_folder_of_no_run_keeps_its_files(self, tmp_path: Path) -> None:
        for name in ("models", "sites"):
            (tmp_path / name / "mine").mkdir(parents=True)
        run(tmp_path, "fedavg", rounds=1)
        assert (tmp_path / "models" / "mine").exists() and (tmp_path / "sites" / "mine").exists()

    def test_the_earlier_checkpoint_resumes_no_later_run(
        self, used: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ask = LocalExchange.__call__

        def interrupt(exchange: LocalExchange, step: Step, messages: Any) -> Any:
            if step.phase != ENROL:
                raise KeyboardInterrupt
            return ask(exchange, step, messages)

        monkeypatch.setattr(LocalExchange, "__call__", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(used)
        monkeypatch.setattr(LocalExchange, "__call__", ask)
        with pytest.raises(StateError, match="checkpoint"):
            resume_local(used)

    @pytest.mark.parametrize(
        ("rounds", "checkpoint", "named"), [(3, True, "rounds = 2"), (2, False, "checkpoint")]
    )
    def test_a_resume_that_is_refused_keeps_the_results(
        self, rounds: int, checkpoint: bool, named: str, used: Path
    ) -> None:
        if not checkpoint:
            (used / "checkpoint.safetensors").unlink()
        before = (used / "results.json").read_bytes()
        with pytest.raises(StateError, match=named):
            run(used, rounds=rounds, resume=True)
        assert (used / "results.json").read_bytes() == before
