"""The desk: however many sites ask for work, FLARE keeps threads for those that bring some."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.sfm import conn_manager
from nvflare.fuel.f3.streaming import stream_utils

from medflare.flare.exchange import desk as desk_module
from medflare.flare.exchange.desk import HELD, Desk
from medflare.flare.exchange.signs import LATER, TENSORS
from waiting import eventually


class Exchange:
    """Has work for one site, and holds the questions of the others until the test lets go."""

    def __init__(self) -> None:
        self.held = 0
        self.let_go = threading.Event()
        self._lock = threading.Lock()

    def wait_for_task(self, site: str, seconds: float) -> bool:
        if site == "lucky" or not seconds:
            return site == "lucky"
        with self._lock:
            self.held += 1
        return not self.let_go.wait(10)


def asked(desk: Desk, site: str) -> bool:
    """Whether the site is to wait by itself."""
    peer = SimpleNamespace(get_identity_name=lambda: site)
    context: Any = SimpleNamespace(get_peer_context=lambda: peer)
    return bool(desk.work("", Shareable(), context).get_header(LATER))


@pytest.fixture
def exchange() -> Exchange:
    return Exchange()


@pytest.fixture
def desk(exchange: Exchange) -> Desk:
    desk = Desk()
    desk.exchange = exchange  # type: ignore[assignment]
    return desk


def test_only_some_questions_are_held(desk: Desk, exchange: Exchange) -> None:
    with ThreadPoolExecutor(100) as threads:
        answers = [threads.submit(asked, desk, f"site-{number}") for number in range(100)]
        assert eventually(lambda: sum(answer.done() for answer in answers) == 100 - HELD, 10), "more questions are held, or fewer"
        assert all(answer.result() for answer in answers if answer.done()), "the others wait themselves"
        assert not asked(desk, "lucky"), "who has work is never sent away"
        exchange.let_go.set()
        assert sum(answer.result() for answer in answers) == 100 - HELD and exchange.held == HELD
    assert not asked(desk, "site-1"), "there is room again"


def test_nobody_waits_before_the_run_begins() -> None:
    assert not asked(Desk(), "site-1")


def test_flare_has_threads_for_more() -> None:
    """They are no documented numbers of FLARE's: a new version may have fewer."""
    assert min(conn_manager.FRAME_THREAD_POOL_SIZE, stream_utils.CALLBACK_THREAD_POOL_SIZE) >= 2 * HELD


def test_the_simulators_server_learns_of_tensors_when_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has not imported torch, and FLARE ends the whole job for a type that its server cannot read."""
    desk, learnt = Desk(), list[bool]()
    monkeypatch.setattr(desk_module, "register_tensors", lambda: learnt.append(True))
    context: Any = SimpleNamespace(get_peer_context=lambda: SimpleNamespace(get_identity_name=lambda: "site-1"))
    request = Shareable()
    desk.alive("", request, context)
    assert not learnt
    request.set_header(TENSORS, True)
    desk.alive("", request, context)
    assert learnt
