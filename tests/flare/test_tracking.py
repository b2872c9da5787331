"""What a run tells while it goes on: its lines and events, and whom it waits for; where a job may send its curves."""

from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.fl_context import FLContext
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector

from medflare.core.errors import ConfigError
from medflare.core.events import EventLog
from medflare.flare import tracking
from medflare.flare.controller import MedflareController
from medflare.flare.tracking import MLflowTracker, Progress

URI = "mlflow=http://mlflow.example"


def context(*components: Any) -> Any:
    return SimpleNamespace(get_engine=lambda: SimpleNamespace(get_component=dict(components).get))


def test_a_job_names_an_mlflow_server_by_the_component_that_the_server_can_refuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And its own alone, as the server's name and password go there."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", URI.partition("=")[2])
    plain = MedflareController(1, 0)
    wandb = MedflareController(1, 0, track="wandb=study")
    assert plain._track(context(("mlflow", MLflowTracker(URI)))) == URI
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI alone"):
        plain._track(context(("mlflow", MLflowTracker(f"{URI}.evil"))))
    assert plain._track(context(("mlflow", MLflowTracker("mlflow")))) == "mlflow"
    assert (plain._track(context()), wandb._track(context())) == (None, "wandb=study")
    for track in ("mlflow", URI):
        with pytest.raises(ConfigError, match="component"):
            MedflareController(1, 0, track=track)._track(context(("mlflow", object())))


def test_lines_and_events_once_and_in_order_in_log_and_statistics() -> None:
    events = EventLog()
    logged = list[str]()
    progress = Progress(events)
    progress.log = logged.append
    progress.say("round 0")
    events.add("missing", "no sign of life", site="B", round=1)
    progress.say("round 1")
    events.add("warning", "nearly over")
    lines = ["round 0", "missing: B (round 2): no sign of life", "round 1", "warning: nearly over"]
    assert progress.to_dict() == {"lines": lines} == progress.to_dict()
    noted = ["missing: B (round 2): no sign of life", "warning: nearly over"]
    assert logged == [
        "round 0",
        f"medflare: noted: {noted[0]}",
        "round 1",
        f"medflare: noted: {noted[1]}",
    ]
    for number in range(2 * tracking._LINES):
        progress.say(str(number))
    last = progress.to_dict()
    assert len(last["lines"]) == tracking._LINES


def test_flare_is_told_when_it_asks() -> None:
    controller = MedflareController(rounds=1, seed=0)
    collector = GroupInfoCollector()
    fl_ctx = FLContext()
    fl_ctx.set_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR, collector, private=True, sticky=False)
    controller.handle_event(InfoCollector.EVENT_TYPE_GET_STATS, fl_ctx)
    assert collector.info == {"medflare": {"lines": []}}


def test_events_of_an_interrupted_run_are_no_news_and_hide_none() -> None:
    events = EventLog()
    logged = list[str]()
    progress = Progress(events)
    progress.log = logged.append
    events.add("warning", "before")
    progress.take_events()
    events.restore({"kind": "missing", "message": f"old {number}"} for number in range(3))
    events.add("resumed", "after")
    for _ in range(2):
        progress.take_events()
    assert logged == ["medflare: noted: warning: before", "medflare: noted: resumed: after"]
