"""Early stopping: the run equals one of as many rounds, also if it is interrupted."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.final_models import same_weights
from helpers.small_tasks import tiny_grades
from medflare.federation.local.loop import resume_local, run_local
from medflare.federation.schedule import Federation
from medflare.methods.base import SiteAlgorithm
from medflare.testing import in_pieces

TASK = tiny_grades(batch_size=32)
CURVE = (0.1, 0.4, 0.5, 0.5, 0.45, 0.4, 0.7)  # of every site's models by rounds of training


@pytest.fixture
def curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The validation metric depends on the round alone."""
    rounds: dict[int, int] = {}
    perform = SiteAlgorithm.perform

    def performed(algorithm: Any, phase: str, round: int, incoming: Any) -> Any:
        rounds[id(algorithm)] = round
        return perform(algorithm, phase, round, incoming)

    monkeypatch.setattr(SiteAlgorithm, "perform", performed)
    monkeypatch.setattr(
        SiteAlgorithm, "validation", lambda algorithm, *_: CURVE[rounds[id(algorithm)]]
    )


def run(
    method: str = "fedavg", folder: Path | None = None, rounds: int = 6, **more: Any
) -> dict[str, Any]:
    return run_local(method, TASK, 2, rounds=rounds, seed=1, out=folder, **more)


@pytest.mark.usefixtures("curve")
class TestEarlyStopping:
    @pytest.mark.parametrize("method", ["sha", "fedsm"])
    def test_it_equals_a_run_of_as_many_rounds(self, method: str, tmp_path: Path) -> None:
        """Best after two rounds; round 3 equals it, round 4 is worse, and by then the fifth is trained."""
        early = run(method, tmp_path / "early", patience=2)
        plain = run(method, tmp_path / "plain", rounds=5)
        assert (early["status"], early["rounds"], early["configuration"]["settings"]["rounds"]) == (
            "COMPLETED",
            5,
            6,
        )
        (event,) = (event for event in early["events"] if event["kind"] == "stopped_early")
        assert (event["round"], event["site"]) == (4, None)
        assert "5 of 6" in event["message"]
        assert early["model_selection"]["global"] == plain["model_selection"]["global"]
        assert early["model_selection"]["global"]["round"] == 3, (
            "rounds 2 and 3 are equal: the later one"
        )
        assert same_weights(tmp_path / "early", tmp_path / "plain")
        cards = sorted((tmp_path / "early" / "models").rglob("card.json"))
        assert cards
        for card in cards:
            assert json.loads(card.read_text())["rounds"] == 5

    def test_the_last_step_is_said_to_be_after_the_last_round(self) -> None:
        lines: list[str] = []
        run(rounds=6, patience=2, say=lines.append)
        assert lines[-1].startswith("after round 5 validate")

    def test_a_run_with_a_trained_selector_stops_too(self) -> None:
        """The selector's updates of a round follow from the planned rounds."""
        results = run("fedsm", patience=2, selector="compact_selector", gamma=0.5)
        assert results["rounds"] == 5

    def test_a_warm_up_does_not_end_the_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A warm-up of three rounds without progress; later round 5 is the best."""
        flat = (0.0, 0.1, 0.1, 0.1, 0.2, 0.3, 0.3, *[0.2] * 6)
        monkeypatch.setitem(globals(), "CURVE", flat)
        assert run("feddag", rounds=12, patience=1)["rounds"] == 7

    def test_a_resumed_run_stops_in_the_same_round(self, tmp_path: Path) -> None:
        whole = run(folder=tmp_path / "whole", patience=2)
        folder = tmp_path / "pieced"
        pieced = in_pieces(
            lambda say: run(folder=folder, patience=2, say=say),
            lambda say: resume_local(folder, say=say),
        )
        kinds = [event["kind"] for event in pieced["events"]]
        assert (pieced["rounds"], kinds.count("stopped_early")) == (5, 1) and kinds.count(
            "resumed"
        ) == 5
        assert whole["model_selection"] == pieced["model_selection"] and same_weights(
            tmp_path / "whole", tmp_path / "pieced"
        )

    @pytest.mark.parametrize("method", ["fedavg", "fedsm"])
    def test_a_run_resumed_after_its_last_round_trains_no_more(
        self, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Killed while the final models are evaluated."""
        whole = run(method, tmp_path / "whole", patience=2)
        with monkeypatch.context() as patch:
            patch.setattr(
                Federation, "_finalize", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
            )
            with pytest.raises(KeyboardInterrupt):
                run(method, tmp_path / "pieced", patience=2)
        lines: list[str] = []
        pieced = resume_local(tmp_path / "pieced", say=lines.append)
        assert not lines and pieced["rounds"] == whole["rounds"] == 5
        assert [event["kind"] for event in pieced["events"]].count("stopped_early") == 1
        assert same_weights(tmp_path / "whole", tmp_path / "pieced")

    @pytest.mark.parametrize("patience", [None, 3])
    def test_with_enough_patience_all_rounds_are_trained(self, patience: int | None) -> None:
        results = run(patience=patience)
        assert results["rounds"] == 6 and "stopped_early" not in [
            event["kind"] for event in results["events"]
        ]
