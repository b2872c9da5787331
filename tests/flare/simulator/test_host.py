"""The forks of the simulator's host: which of them end because they have nothing to do."""

import json
import mmap
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client
from pathlib import Path
from types import SimpleNamespace

import pytest

from medflare.flare.simulator import host

SITE = "A"


class Fork(host._Fork):
    """One without a process."""

    ended = False

    def alive(self) -> bool:
        return True

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as found:
        found.bind(str(tmp_path / "host"))
        found.listen()
        yield found


class Clocked(host.Host):
    """A host that lets a second go by between two looks."""

    seconds = 0.0

    def serve(self, seconds: int) -> None:
        for _ in range(seconds):
            self.seconds += 1
            self.serve_next()


@pytest.fixture
def serving(listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clocked:
    monkeypatch.setattr(host, "_TICK", 0.001)
    made = Clocked(listener, tmp_path)
    monkeypatch.setattr(host, "time", SimpleNamespace(monotonic=lambda: made.seconds))
    return made


def fork(serving: Clocked, site: str = SITE) -> Fork:
    made = Fork(1, f"address of {site}", b"", mmap.mmap(-1, 1), serving.seconds)
    serving._forks["site", site] = made
    return made


def test_a_fork_with_nothing_to_do_ends(serving: Clocked) -> None:
    made = fork(serving)
    serving.serve(int(host._IDLE))
    assert not made.ended
    serving.serve(2)
    assert made.ended and not serving._forks


def test_after_a_step_that_was_longer_it_has_its_time_as_after_any(serving: Clocked) -> None:
    made = fork(serving)
    made.at_work[0] = 1
    serving.serve(600)
    made.at_work[0] = 0
    serving.serve(int(host._IDLE))
    assert not made.ended, "the next step would have to read all images anew"
    serving.serve(2)
    assert made.ended


def test_it_ends_also_while_others_ask_for_theirs_all_the_time(serving: Clocked, tmp_path: Path) -> None:
    idle, busy = fork(serving), fork(serving, "B")
    busy.request, times = json.dumps({"kind": "site", "spec": {"name": "B"}}).encode(), 100
    answers: list[bytes] = []

    def ask() -> None:
        while len(answers) < times:
            with Client(str(tmp_path / "host"), family="AF_UNIX") as connection:
                connection.send_bytes(busy.request)
                answers.append(connection.recv_bytes())

    serving._listener.settimeout(60)  # every look finds a request
    asking = threading.Thread(target=ask)
    asking.start()
    serving.serve(times)
    asking.join()
    assert answers == [b"address of B"] * times and idle.ended and not busy.ended
