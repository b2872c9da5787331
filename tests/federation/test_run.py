"""The records of a run: aggregation weights, the report while it runs, interruption, and rounds on cards."""

from pathlib import Path

import pytest

from helpers.rounds import read_rounds
from helpers.small_tasks import tiny_phantom
from medflare.evaluation.results import load_results
from medflare.federation.local.loop import resume_local, run_local
from medflare.federation.outcome import StepReport
from medflare.federation.run import Run
from medflare.federation.settings import WAITS, RunSettings
from medflare.inference.deployed import load_model
from medflare.methods.catalogue import get_method
from medflare.tasks.config import load_task

TINY = tiny_phantom(batch_size=32)


@pytest.mark.figures
@pytest.mark.parametrize(
    ("method", "phase", "numbers"),
    [
        ("grace", "train", {"weight"}),
        ("feddag", "score", {"score", "weight"}),
        ("sha", "score", {"score", "weight"}),
    ],
)
def test_aggregation_weights_are_recorded(
    method: str, phase: str, numbers: set[str], tmp_path: Path
) -> None:
    lines: list[str] = []
    assert (
        run_local(method, TINY, 3, rounds=2, seed=3, out=tmp_path, say=lines.append)["status"]
        == "COMPLETED"
    )
    steps = read_rounds(tmp_path)
    noted = {
        (step["phase"], step["round"]): step["aggregation"] for step in steps if step["aggregation"]
    }
    # And nothing that is left over stands beside another step.
    assert list(noted) == [(phase, 0), (phase, 1)]
    for by_site in noted.values():
        assert set(by_site) == {"site-1", "site-2", "site-3"}
        for numbers_of_site in by_site.values():
            assert set(numbers_of_site) == numbers
        assert sum(
            numbers_of_site["weight"] for numbers_of_site in by_site.values()
        ) == pytest.approx(1.0)
    shown = next(line for line in lines if f"round 2/2 {phase}:" in line)
    assert f"weight {noted[phase, 1]['site-3']['weight']:.3f}" in shown
    assert "Aggregation weight" in (tmp_path / "report.html").read_text()


def test_a_run_may_be_resumed_with_other_timeouts(tmp_path: Path) -> None:
    def plan(**settings: float) -> object:
        settings_of_run = RunSettings(rounds=1, seed=0, **settings)  # type: ignore[arg-type]
        checkpoint = Run(
            get_method("fedavg"),
            load_task("phantom"),
            {},
            settings_of_run,
            ("A", "B"),
            folder=tmp_path,
        )._checkpoint
        assert checkpoint is not None
        return checkpoint.plan

    assert plan() == plan(**dict.fromkeys(WAITS, 5.0)) != plan(max_client_weight=0.5)


def test_an_interrupted_run_is_failed_with_its_reason(tmp_path: Path) -> None:
    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_local("fedavg", TINY, 2, rounds=2, seed=3, out=tmp_path, observe=stop)
    results = load_results(tmp_path)
    assert (results["status"], results["reason"]) == ("FAILED", "interrupted from the keyboard")
    assert [event["kind"] for event in results["events"]] == ["aborted"]


def test_an_earlier_run_in_the_folder_is_renamed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    said: list[str] = []
    for rounds in (1, 2, 3):
        run_local("fedavg", TINY, 2, rounds=rounds, seed=3, out=folder, say=said.append)
    of_folders = [load_results(tmp_path / name)["rounds"] for name in ("run.1", "run.2", "run")]
    assert of_folders == [1, 2, 3]
    assert f"the earlier run in {folder} is in {folder}.2 now" in said


def test_the_checkpoint_of_a_run_that_was_stopped_is_kept(tmp_path: Path) -> None:
    def stop(report: StepReport) -> None:
        if report.index == 1:
            raise KeyboardInterrupt

    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run_local("fedavg", TINY, 2, rounds=2, seed=3, out=folder, observe=stop)
    (folder / "results.json").unlink()  # as after a kill
    run_local("fedavg", TINY, 2, rounds=1, seed=3, out=folder)
    assert resume_local(tmp_path / "run.1")["status"] == "COMPLETED"


@pytest.mark.parametrize("method", ["fedrep", "fedsm"])
@pytest.mark.parametrize("selection", ["median", "last"])
def test_every_card_has_the_round_of_its_model(method: str, selection: str, tmp_path: Path) -> None:
    task = {**TINY, "network": {"name": "unet", "channels": [4, 8], "norm": "batch"}}
    results = run_local(
        method, task, 2, rounds=2, seed=3, out=tmp_path, outside=["site-3"], selection=selection
    )
    rounds_of_cards = {
        card.parent.relative_to(tmp_path): load_model(card.parent).card["round"]
        for card in (tmp_path / "sites").rglob("card.json")
    }
    assert len(rounds_of_cards) >= 8 and set(rounds_of_cards.values()) <= {1, 2}
    chosen = results["model_selection"].get("global", {"round": 2})["round"]
    assert (
        rounds_of_cards[Path("sites/site-3/global")]
        == load_model(tmp_path / "models" / "global").card["round"]
        == chosen
    )
    assert selection != "last" or set(rounds_of_cards.values()) == {2}
