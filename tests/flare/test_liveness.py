"""A site polls when the server can be heard, and the server tells a working site from a dead one."""

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

from helpers.waiting import eventually
from medflare.flare import liveness
from medflare.flare.liveness import Heartbeat, wait_for_work


class Engine:
    """The site's engine, with a server that answers as it is told to, and then as it did last."""

    def __init__(self, *codes: str | None):
        self.codes = list(codes)
        self.asked = 0
        self.new_context: Any = None
        self.client = SimpleNamespace(communicator=SimpleNamespace(timeout=300.0))

    def was_asked(self, times: int) -> bool:
        return self.asked >= times

    def send_aux_request(self, topic: str, **request: Any) -> dict[str, Any]:
        code = self.codes[min(self.asked, len(self.codes) - 1)]
        self.asked += 1
        return {} if code is None else {"server": make_reply(code)}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_RETRY", 0.0)


def context(engine: Engine, aborted: bool = False) -> FLContext:
    manager = FLContextManager(
        engine=engine, identity_name="CS", job_id="job", public_stickers={}, private_stickers={}
    )
    fl_ctx = manager.new_context()
    signal = Signal()
    if aborted:
        signal.trigger(True)
    fl_ctx.put(ReservedKey.RUN_ABORT_SIGNAL, signal, private=True, sticky=False)
    return fl_ctx


@pytest.mark.parametrize(
    ("codes", "asked"),
    [
        ([ReturnCode.TOPIC_UNKNOWN], 1),
        ([ReturnCode.TIMEOUT, ReturnCode.COMMUNICATION_ERROR, None, ReturnCode.OK], 4),
    ],
)
def test_a_site_polls_as_soon_as_the_server_answers(codes: list[str | None], asked: int) -> None:
    engine = Engine(*codes)
    wait_for_work(context(engine))
    assert engine.asked == asked
    assert engine.client.communicator.timeout == 30.0, (
        "a lost answer to a poll is noticed in half a minute"
    )


def test_an_aborted_run_does_not_wait_and_an_unreachable_server_holds_a_site_for_a_minute_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(ReturnCode.TIMEOUT)
    wait_for_work(context(engine, aborted=True))
    assert engine.asked == 1
    monkeypatch.setattr(liveness, "_UNREACHABLE", 0.05)
    wait_for_work(context(Engine(ReturnCode.TIMEOUT)))


def test_heartbeats_are_sent_until_they_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_INTERVAL", 0.01)
    engine = Engine(ReturnCode.OK)
    fl_ctx = context(engine)
    heartbeat = Heartbeat()
    engine.new_context = lambda: nullcontext(fl_ctx)
    for _ in range(2):
        heartbeat.begin(fl_ctx)
        assert eventually(partial(engine.was_asked, engine.asked + 2))
    heartbeat.end()
    assert eventually(
        lambda: not any(thread.name == "medflare_heartbeat" for thread in threading.enumerate())
    )
