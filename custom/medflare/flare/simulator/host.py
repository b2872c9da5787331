"""The process of FLARE's simulator in which everything is imported once: each site has a fork of it, and so has the server's run.

A site's fork keeps its participant from task to task, as a site's process does in a real federation. What it remembers is written to
disk after every task all the same: a fork that is killed, or ends because it had nothing to do for a while, is replaced by a
new one that goes on from there. The server's fork computes the whole run (`running`).
"""

import json
import mmap
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from medflare.core.errors import MedflareError
from medflare.data.progress import print_lines
from medflare.flare.exchange.participants import DATA_ROOT, DEVICES, ParticipantSpec, anchor, load_ahead
from medflare.flare.exchange.upkeep import give_back_memory

if TYPE_CHECKING:
    from medflare.flare.simulator.running import RunSeat

_TICK = 1.0  # seconds between two looks at who still lives
_IDLE = 60.0  # seconds after which a fork without work ends: with many sites and few threads not all stay in memory


@dataclass
class _Fork:
    """The fork that acts for one site, or for the server, as the host sees it."""

    process: int
    address: str
    request: bytes  # what it was made for: another one needs another fork
    at_work: mmap.mmap  # one byte, shared with it
    busy: float  # when it was asked for, or seen at work, last

    def alive(self) -> bool:
        return os.waitpid(self.process, os.WNOHANG) == (0, 0)

    def end(self) -> None:
        """Only while `alive()` has just been true: afterwards the number may be another process's."""
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)


class Host:
    """Answers every request with the address of the fork that acts for the party.

    Args:
        listener: takes the requests.
        folder: of the addresses.
    """

    def __init__(self, listener: socket.socket, folder: Path):
        self._listener = listener
        self._folder = folder
        self._forks: dict[tuple[str, str], _Fork] = {}
        self._made = 0
        listener.settimeout(_TICK)

    def serve_next(self) -> None:
        """One request, or a second without any."""
        self._end_idle()
        try:
            accepted, _ = self._listener.accept()
        except TimeoutError:
            return
        with Connection(accepted.detach()) as connection, suppress(EOFError, ConnectionError):
            request = connection.recv_bytes()
            connection.send_bytes(self._fork_for(request, connection).address.encode())

    def close(self) -> None:
        """End all forks."""
        for fork in self._forks.values():
            if fork.alive():
                fork.end()

    def _fork_for(self, request: bytes, connection: Connection) -> _Fork:
        party = _party(json.loads(request))
        fork = self._forks.get(party)
        alive = fork is not None and fork.alive()
        if fork is None or not alive or fork.request != request:
            if fork is not None and alive:
                fork.end()
            fork = self._forks[party] = self._forked(request, connection)
        fork.busy = time.monotonic()
        return fork

    def _forked(self, request: bytes, connection: Connection) -> _Fork:
        self._made += 1
        address, at_work = str(self._folder / f"fork-{self._made}"), mmap.mmap(-1, 1)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen()
        host = os.getpid()
        process = os.fork()
        if process == 0:
            self._listener.close()
            connection.close()
            _act(json.loads(request), listener, at_work, host)
        listener.close()
        return _Fork(process, address, request, at_work, time.monotonic())

    def _end_idle(self) -> None:
        now = time.monotonic()
        for party, fork in list(self._forks.items()):
            if fork.at_work[0]:
                fork.busy = now
            elif now - fork.busy > _IDLE:
                if fork.alive():
                    fork.end()
                del self._forks[party]


class _Seat:
    """One site's participant in its fork, and the connection that it works for."""

    def __init__(self, spec: ParticipantSpec):
        self._spec = spec
        self._connection: Connection | None = None
        self._participant: Any = None

    def answer(self, connection: Connection) -> None:
        """Take one task and answer it."""
        from medflare.flare.exchange.wire import from_bytes, to_bytes, to_message, to_shareable, unexpected

        self._connection = connection
        asked, content = json.loads(connection.recv_bytes()), connection.recv_bytes()
        trace = ""
        try:
            if self._participant is None:
                self._participant = self._spec.participant(self._given_up)
            answer = self._participant.answer(asked["phase"], asked["round"], to_message(from_bytes(content)))
            reply = to_bytes(to_shareable(answer))
        except MedflareError as error:
            problem = str(error)
        except Exception as error:
            problem = unexpected(error, asked["phase"], asked["round"])
            trace = traceback.format_exc()
        else:
            connection.send_bytes(b"{}")
            connection.send_bytes(reply)
            return
        connection.send_bytes(json.dumps({"problem": problem, "trace": trace}).encode())

    def _given_up(self) -> bool:
        """The other side sends nothing more: the connection becomes readable when it closes it."""
        return self._connection is None or self._connection.poll()


def _party(request: dict[str, Any]) -> tuple[str, str]:
    """For whom a fork is to act: "site" and its name, or "server" and its job."""
    kind, spec = request["kind"], request["spec"]
    return kind, spec["name" if kind == "site" else "job"]


def _seat(request: dict[str, Any]) -> "_Seat | RunSeat":
    from medflare.flare.simulator.running import RunSeat

    return _Seat(ParticipantSpec(**request["spec"])) if request["kind"] == "site" else RunSeat(request["spec"])


def serve(listener: socket.socket, simulator: int, method: str) -> None:
    """The host's life: import, listen, fork, end with the simulator.

    Args:
        listener: bound in a folder of its own, which goes with the host.
        simulator: process id.
        method: whose site half the sites run.
    """
    folder = Path(listener.getsockname()).parent
    anchor(DATA_ROOT)
    print_lines()
    _import_everything(method)
    host = Host(listener, folder)
    try:
        while _alive(simulator):
            host.serve_next()
    finally:
        host.close()
        shutil.rmtree(folder, ignore_errors=True)


def _act(request: dict[str, Any], listener: socket.socket, at_work: mmap.mmap, host: int) -> NoReturn:
    """A fork's life: one connection after the other, until the host is gone or ends it."""
    try:
        if request["devices"] is not None:
            os.environ[DEVICES] = request["devices"]
        listener.settimeout(_TICK)
        seat = _seat(request)
        while os.getppid() == host:
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                continue
            at_work[0] = 1
            with Connection(accepted.detach()) as connection, suppress(EOFError, ConnectionError):
                seat.answer(connection)
            give_back_memory()  # tens of megabytes in each of many forks are more than what they use
            at_work[0] = 0
    except BaseException:
        traceback.print_exc()
    os._exit(0)  # this process never leaves the loop in which it was forked


def _import_everything(method: str) -> None:
    import medflare.flare.simulator.running  # noqa: F401, for the server's fork
    from medflare.flare.exchange.wire import register_decomposers

    register_decomposers()
    load_ahead(method)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3])
