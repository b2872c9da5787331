"""What a run tells while it goes on: its lines and events, whom it waits for, and curves for FLARE's own trackers."""

import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, ProcessType, ReservedKey
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.app_opt.tracking.tb.tb_receiver import TBAnalyticsReceiver
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from medflare.core.events import EventLog
from medflare.federation.schedule import StepReport
from medflare.flare import tracking
from medflare.flare.controller import MedflareController
from medflare.flare.tracking import MLflowTracker, Progress, Tracking
from medflare.methods.base import Step

RECEIVER = "nvflare.app_opt.tracking.mlflow.mlflow_receiver"


def report(round: int, aggregation: dict[str, Any] | None = None, **meta: dict[str, Any]) -> dict[str, Any]:
    return StepReport(Step("train", round), round, meta, {}, 1.0, aggregation or {}).line()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Tracking]:
    """A server's FL context whose events reach FLARE's TensorBoard receiver ."""
    workspace = SimpleNamespace(get_run_dir=lambda job: str(tmp_path))
    handlers = [TBAnalyticsReceiver()]
    engine = SimpleNamespace(get_workspace=lambda: workspace, fire_event=lambda event, ctx: fire(event, ctx))
    manager = FLContextManager(engine=engine, identity_name="server", job_id="job", public_stickers={}, private_stickers={})
    engine.new_context = manager.new_context

    def fire(event: str, fl_ctx: FLContext) -> None:
        for handler in handlers:
            handler.handle_event(event, fl_ctx)

    fl_ctx = manager.new_context()
    fl_ctx.set_prop(ReservedKey.ENGINE, engine, private=True, sticky=False)
    fire(EventType.START_RUN, fl_ctx)
    yield Tracking(FLComponent(), fl_ctx)
    fire(EventType.END_RUN, fl_ctx)


class Experiments:
    """An MLflow server as far as FLARE's receiver needs one, in place of the package.

    Attributes:
        uri: where the receiver looks for it.
        curves: run -> tag -> (step, value) of all points.
        ended: runs that were closed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.uri = ""
        self.experiments: dict[str, Any] = {}
        self.curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
        self.ended: list[str] = []
        named = {name: namedtuple(name, "key value timestamp step", defaults=[0, 0]) for name in ("Metric", "Param", "RunTag")}
        parts: dict[str, dict[str, Any]] = {
            "mlflow": {"set_tracking_uri": lambda uri: setattr(self, "uri", uri)},
            "mlflow.entities": named,
            "mlflow.tracking": {},
            "mlflow.tracking.client": {"MlflowClient": lambda: self},
        }
        for name, content in parts.items():
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
            vars(sys.modules[name]).update(content)
        monkeypatch.delitem(sys.modules, RECEIVER, raising=False)

    def get_experiment_by_name(self, name: str) -> Any:
        return self.experiments.get(name)

    def create_experiment(self, name: str, artifact_location: str, tags: dict[str, str]) -> str:
        self.experiments[name] = SimpleNamespace(experiment_id=name)
        return name

    def create_run(self, experiment_id: str, run_name: str, tags: dict[str, str]) -> Any:
        self.curves[run_name] = {}
        return SimpleNamespace(info=SimpleNamespace(run_id=run_name))

    def log_batch(self, run_id: str, metrics: list[Any], params: list[Any], tags: list[Any]) -> None:
        for metric in metrics:
            self.curves[run_id].setdefault(metric.key, []).append((metric.step, metric.value))

    def set_terminated(self, run_id: str) -> None:
        self.ended.append(run_id)


def test_mlflow_has_a_run_for_each_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the sites comes after the first round."""
    server, sites = Experiments(monkeypatch), ["CS"]
    workspace = SimpleNamespace(get_run_dir=lambda job: str(tmp_path), get_result_root=lambda job: str(tmp_path))
    tracker = MLflowTracker("http://mlflow.example", "medflare brain", "fedsm")
    engine = SimpleNamespace(get_workspace=lambda: workspace, fire_event=tracker.handle_event)
    engine.get_clients = lambda: [SimpleNamespace(name=site) for site in sites]
    manager = FLContextManager(engine=engine, identity_name="server", job_id="0123456789", public_stickers={}, private_stickers={})
    engine.new_context = manager.new_context
    fl_ctx = manager.new_context()
    fl_ctx.set_prop(ReservedKey.ENGINE, engine, private=True, sticky=False)
    fl_ctx.set_prop(FLContextKey.PROCESS_TYPE, ProcessType.SERVER_JOB, private=True, sticky=False)
    tracker.handle_event(EventType.START_RUN, fl_ctx)
    observe = Tracking(FLComponent(), fl_ctx)
    observe(report(0, CS={"loss": 0.9, "validation": {"global": 0.5}}))
    sites.append("DU")
    observe(report(1, CS={"loss": 0.8}, DU={"loss": 0.6}, gone={"loss": 0.1}))
    tracker.handle_event(EventType.END_RUN, fl_ctx)
    assert server.uri == "http://mlflow.example" and list(server.experiments) == ["medflare brain"]
    runs = {site: f"{site}-012345-unknown_job-fedsm" for site in ("CS", "DU")}
    assert server.curves == {
        runs["CS"]: {"loss": [(0, 0.9), (1, 0.8)], "validation_global": [(0, 0.5)]},
        runs["DU"]: {"loss": [(1, 0.6)]},
    }
    assert sorted(server.ended) == sorted(runs.values())


def test_without_mlflow_the_run_goes_on(run: Tracking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    tracker = MLflowTracker()
    for event in (EventType.START_RUN, ANALYTIC_EVENT_TYPE, EventType.END_RUN):
        tracker.handle_event(event, run._fl_ctx)


def test_curves_reach_tensorboard(run: Tracking, tmp_path: Path) -> None:
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
    run._component.fire_event(EventType.END_RUN, run._fl_ctx)

    def curve(tag: str, site: str) -> list[tuple[int, Any]]:
        events = EventAccumulator(str(tmp_path / "tb_events" / "server" / f"{tag}_{site}")).Reload()
        return [(event.step, pytest.approx(event.value)) for event in events.Scalars(tag)]

    assert curve("loss", "DU") == [(0, 0.7), (1, 0.6)]
    assert curve("validation_global", "DU") == [(1, 0.8)]  # undefined in round 0: no point, not a zero
    assert [curve("aggregation_weight", site) for site in ("CS", "DU", "HT")] == [[(1, 0.2)], [(1, 0.7)], [(1, 0.1)]]
    assert not list((tmp_path / "tb_events").rglob("aggregation_score*"))


def test_lines_and_events_once_and_in_order_in_log_and_statistics() -> None:
    events, logged = EventLog(), list[str]()
    progress = Progress(events, logged.append)
    progress.say("round 0")
    events.add("missing", "no sign of life", site="B", round=1)
    progress.say("round 1")
    events.add("warning", "nearly over")
    lines = ["round 0", "missing: B (round 2): no sign of life", "round 1", "warning: nearly over"]
    assert progress.to_dict() == {"count": 4, "lines": lines} == progress.to_dict()
    assert logged == ["round 0", "medflare: noted: missing: B (round 2): no sign of life", "round 1"]
    for number in range(2 * tracking._LINES):
        progress.say(str(number))
    last = progress.to_dict()
    assert last["count"] == 4 + 2 * tracking._LINES and len(last["lines"]) == tracking._LINES


def test_flare_is_told_when_it_asks() -> None:
    controller = MedflareController(rounds=1, seed=0)
    collector, fl_ctx = GroupInfoCollector(), FLContext()
    fl_ctx.set_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR, collector, private=True, sticky=False)
    controller.handle_event(InfoCollector.EVENT_TYPE_GET_STATS, fl_ctx)
    assert collector.info == {"medflare": {"count": 0, "lines": []}}
