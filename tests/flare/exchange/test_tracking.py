"""FLARE's own trackers, fed from the reports of a run's steps."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.app_common.widgets.metrics_artifact_writer import MetricsArtifactWriter
from nvflare.app_opt.tracking.tb.tb_receiver import TBAnalyticsReceiver
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from medflare.federation.schedule import StepReport
from medflare.flare.exchange.tracking import Tracking, numbers_of, weighted_means
from medflare.methods.base import Step


def report(round: int, aggregation: dict[str, Any] | None = None, **facts: dict[str, Any]) -> StepReport:
    return StepReport(Step("train", round), round, facts, {}, 1.0, 0, 0, aggregation or {})


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Tracking]:
    """A server's FL context whose events reach FLARE's TensorBoard receiver and its metrics artefact writer."""
    workspace = SimpleNamespace(get_run_dir=lambda job: str(tmp_path))
    handlers = [TBAnalyticsReceiver(), MetricsArtifactWriter()]
    engine = SimpleNamespace(get_workspace=lambda: workspace, fire_event=lambda event, ctx: fire(event, ctx))
    manager = FLContextManager(engine=engine, identity_name="server", job_id="job", public_stickers={}, private_stickers={})
    engine.new_context = manager.new_context

    def fire(event: str, fl_ctx: FLContext) -> None:
        for handler in handlers:
            handler.handle_event(event, fl_ctx)

    fl_ctx = manager.new_context()
    fl_ctx.set_prop(ReservedKey.ENGINE, engine, private=True, sticky=False)
    fire(EventType.START_RUN, fl_ctx)
    yield Tracking(FLComponent(), fl_ctx, rounds=2)
    fire(EventType.END_RUN, fl_ctx)


def test_curves_and_artefacts(run: Tracking, tmp_path: Path) -> None:
    run(
        report(
            0,
            CS={"n_samples": 1, "loss": 0.9, "validation": {"global": 0.5}},
            DU={"n_samples": 3, "loss": 0.7, "validation": {"global": None}},
        )
    )
    run(
        report(
            1,
            {"CS": {"weight": 0.2, "score": None}, "DU": {"weight": 0.7}, "HT": {"weight": 0.1}},
            CS={"n_samples": 1, "loss": 0.8, "validation": {"global": 0.6}},
            DU={"n_samples": 3, "loss": 0.6, "validation": {"global": 0.8}},
        )
    )
    run.component.fire_event(EventType.END_RUN, run.fl_ctx)

    def curve(tag: str, site: str) -> list[tuple[int, Any]]:
        events = EventAccumulator(str(tmp_path / "tb_events" / "server" / f"{tag}_{site}")).Reload()
        return [(event.step, pytest.approx(event.value)) for event in events.Scalars(tag)]

    assert curve("loss", "DU") == [(0, 0.7), (1, 0.6)]
    assert curve("validation_global", "DU") == [(1, 0.8)]  # undefined in round 0: no point, not a zero
    assert [curve("aggregation_weight", site) for site in ("CS", "DU", "HT")] == [[(1, 0.2)], [(1, 0.7)], [(1, 0.1)]]
    assert not list((tmp_path / "tb_events").rglob("aggregation_score*"))
    summary = json.loads((tmp_path / "metrics" / "metrics_summary.json").read_text())
    assert summary["final_round"] == 1
    found = {metric["name"]: metric["value"] for metric in summary["final_aggregated_metrics"]}
    assert found == pytest.approx({"loss": (0.8 + 3 * 0.6) / 4, "validation_global": (0.6 + 3 * 0.8) / 4})
    rounds = [json.loads(line) for line in (tmp_path / "metrics" / "round_metrics.jsonl").read_text().splitlines()]
    assert [site["name"] for site in rounds[0]["sites"]] == ["CS", "DU"]


def test_what_is_undefined_or_not_finite_is_left_out() -> None:
    assert numbers_of({"loss": float("nan"), "validation": {"global": 0.5, "personal": None}}) == {"validation_global": 0.5}
    assert numbers_of({}) == {}
    assert weighted_means({"a": {"loss": 1.0}, "b": {}}, {"a": 2.0, "b": 8.0}) == {"loss": 1.0}
