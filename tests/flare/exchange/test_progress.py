"""What a running job tells of itself: its lines, its events among them, and whom it waits for."""

import threading
import time

import pytest
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector

from flare.exchange.test_tasks import STEP, FakeController, answers, asked, exchange, never_answers
from medflare.core.events import EventLog
from medflare.flare.controller import MedflareController
from medflare.flare.exchange import progress
from medflare.flare.exchange.progress import Journal, Progress


def test_events_stand_before_the_line_of_their_step() -> None:
    events = EventLog()
    told = Progress(events)
    told.say("round 0")
    events.add("missing", "no sign of life", site="B", round=1)
    told.say("round 1")
    events.add("warning", "nearly over")
    expected = ["round 0", "missing: B (round 1): no sign of life", "round 1", "warning: nearly over"]
    assert told.to_dict(None) == {"count": 4, "lines": expected}
    assert told.to_dict(None)["count"] == 4, "an event is told once"


def test_a_long_run_keeps_its_last_lines_and_counts_all() -> None:
    told = Progress(EventLog())
    for number in range(2 * progress._KEPT):
        told.say(str(number))
    found = told.to_dict(None)
    assert found["count"] == 2 * progress._KEPT and found["lines"][-1] == str(found["count"] - 1)
    assert len(found["lines"]) == progress._KEPT


def test_whom_the_step_waits_for_and_for_how_long() -> None:
    controller = FakeController(CS=answers(), DU=never_answers)
    carrier = exchange(controller, step_timeout=1.0, silence=30.0)
    assert carrier.tasks.waiting() == {}
    step = threading.Thread(target=carrier, args=(STEP, asked(controller)))
    step.start()
    time.sleep(0.5)
    told = Progress(EventLog()).to_dict(carrier.tasks)
    step.join()
    assert (told["phase"], told["round"], told["silence"]) == ("train", 3, 30.0)
    assert list(told["silent"]) == ["DU"] and 0.2 < told["silent"]["DU"] < 60
    assert carrier.tasks.waiting()["silent"] == {}, "nobody is waited for between two steps"


def test_flare_is_told_when_it_asks() -> None:
    controller = MedflareController(rounds=1, seed=0)
    collector, fl_ctx = GroupInfoCollector(), FLContext()
    fl_ctx.set_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR, collector, private=True, sticky=False)
    controller.handle_event(InfoCollector.EVENT_TYPE_GET_STATS, fl_ctx)
    assert collector.info == {"medflare": {"count": 0, "lines": []}}


def test_events_go_to_the_log_before_the_line_of_their_step(caplog: pytest.LogCaptureFixture) -> None:
    events = EventLog()
    journal = Journal(FLComponent(), FLContext(), events, Progress(events), lambda step: None)
    events.add("rejected", "its vote does not count", site="B", round=0)
    with caplog.at_level("INFO"):
        journal.say("round 0")
        journal.say("round 1")
    said = [record.getMessage().rpartition("]: ")[2] for record in caplog.records]
    assert said == ["medflare: noted: rejected: B (round 0): its vote does not count", "round 0", "round 1"]
