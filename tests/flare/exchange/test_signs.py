"""Signs between a site and the server: a site polls when the server can be heard, and never waits for minutes for a lost message."""

import threading
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.fl_constant import ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import make_reply
from nvflare.apis.signal import Signal
from nvflare.private.fed.client.client_run_manager import ClientRunManager
from nvflare.private.fed.client.communicator import Communicator

from medflare.flare.exchange import signs
from medflare.flare.exchange.signs import LATER, PATIENCE, Pulse, expect_answers, wait_for_work
from waiting import eventually


class Line:
    """The site's engine, with a server that answers as it is told to, and then as it did last."""

    def __init__(self, *codes: str | None):
        self.codes = list(codes)
        self.asked = 0
        self.later = False
        self.new_context: Any = None
        self.client = SimpleNamespace(communicator=SimpleNamespace(timeout=300.0))

    def was_asked(self, times: int) -> bool:
        return self.asked >= times

    def send_aux_request(self, topic: str, **request: Any) -> dict[str, Any]:
        code = self.codes[min(self.asked, len(self.codes) - 1)]
        self.asked += 1
        return {} if code is None else {"server": make_reply(code, {LATER: self.later})}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs, "_PAUSE", 0.0)


def context(engine: Line, signal: Signal | None = None) -> FLContext:
    manager = FLContextManager(engine=engine, identity_name="CS", job_id="job", public_stickers={}, private_stickers={})
    fl_ctx = manager.new_context()
    fl_ctx.put(ReservedKey.RUN_ABORT_SIGNAL, signal or Signal(), private=True, sticky=False)
    return fl_ctx


@pytest.mark.parametrize("answer", [ReturnCode.OK, ReturnCode.TOPIC_UNKNOWN])
def test_a_server_that_answers_is_asked_once(answer: str) -> None:
    line = Line(answer)
    wait_for_work(context(line))
    assert line.asked == 1


def test_a_site_that_is_to_wait_itself_does(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(signs.time, "sleep", slept.append)
    line = Line(ReturnCode.OK)
    wait_for_work(context(line))
    assert not slept
    line.later = True
    wait_for_work(context(line))
    assert slept == [PATIENCE] and line.asked == 2


def test_no_poll_is_sent_into_a_cut_network() -> None:
    line = Line(ReturnCode.TIMEOUT, ReturnCode.COMMUNICATION_ERROR, None, ReturnCode.OK)
    wait_for_work(context(line))
    assert line.asked == 4


def test_an_aborted_run_waits_for_nobody() -> None:
    signal = Signal()
    signal.trigger(True)
    line = Line(ReturnCode.TIMEOUT)
    wait_for_work(context(line, signal))
    assert line.asked == 1


def test_a_server_that_never_answers_does_not_hold_the_site_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs, "_UNREACHABLE", 0.05)
    wait_for_work(context(Line(ReturnCode.TIMEOUT)))


def test_a_lost_message_is_noticed_in_half_a_minute() -> None:
    line = Line(ReturnCode.OK)
    fl_ctx = context(line)
    wait_for_work(fl_ctx)
    assert line.client.communicator.timeout == 30.0
    expect_answers(fl_ctx, result_bytes=1 << 30)
    assert line.client.communicator.timeout == 300.0, "the server fetches a large result itself, which no byte of progress tells"
    expect_answers(fl_ctx, result_bytes=1 << 20)
    assert line.client.communicator.timeout == 30.0


def test_a_site_that_has_a_task_shows_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs, "_EVERY", 0.01)
    line = Line(ReturnCode.OK)
    fl_ctx, pulse = context(line), Pulse()
    line.new_context = lambda: nullcontext(fl_ctx)
    pulse.end()
    for _ in range(2):
        pulse.begin(fl_ctx)
        wanted = line.asked + 2
        assert eventually(partial(line.was_asked, wanted))
    pulse.end()
    assert eventually(lambda: not any(thread.name == "medflare_pulse" for thread in threading.enumerate()))


def test_flare_has_the_attributes_that_are_set() -> None:
    """They are no documented interface of FLARE's: a new version may move them."""
    assert "client" in ClientRunManager.__init__.__code__.co_varnames
    assert "timeout" in Communicator.__init__.__code__.co_varnames
