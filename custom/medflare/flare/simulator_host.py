"""The process of FLARE's simulator in which everything is imported once: each site has a fork of it, and so has the server's run.

A site's fork keeps its participant from task to task, as a site's process does in a real federation. What it remembers is written to
disk after every task all the same: a fork that is killed, or ends because it had nothing to do for a while, is replaced by a
new one that goes on from there. The server's fork computes the whole run; what it needs of FLARE it asks the server's process for.
"""

import json
import mmap
import os
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from nvflare.apis.shareable import Shareable
from nvflare.fuel.utils.memory_utils import try_malloc_trim

from medflare.core.errors import Aborted, ConfigError, MedflareError
from medflare.core.events import Event, EventLog
from medflare.data.progress import print_lines
from medflare.evaluation.results import json_ready
from medflare.federation.outcome import StepReport
from medflare.flare.messages import (
    MessageExchange,
    from_bytes,
    register_decomposers,
    register_tensors,
    to_bytes,
    to_message,
    to_shareable,
    together_to_bytes,
)
from medflare.flare.participants import DATA_ROOT, DEVICES, ParticipantSpec, anchor, load_ahead
from medflare.flare.server_run import Ending, ServerSpec
from medflare.flare.tasks import A, Answer, Read

_TICK = 1.0  # seconds between two looks at who still lives
_IDLE = 60.0  # seconds after which a fork without work ends: with many sites and few threads not all stay in memory


@dataclass
class _Fork:
    """The fork that acts for one site, or for the server, as the host sees it."""

    process: Any
    address: str
    request: bytes  # what it was made for: another one needs another fork
    at_work: mmap.mmap  # one byte, shared with it
    busy: float  # when it was asked for, or seen at work, last

    def end(self) -> None:
        """Kill it, where it lives."""
        self.process.kill()
        self.process.join()


class Host:
    """Answers every request with the address of the fork that acts for the party."""

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
            fork.end()

    def _fork_for(self, request: bytes, connection: Connection) -> _Fork:
        asked = json.loads(request)
        party = asked["kind"], asked["spec"]["name" if asked["kind"] == "site" else "job"]
        fork = self._forks.get(party)
        if fork is None or not fork.process.is_alive() or fork.request != request:
            if fork is not None:
                fork.end()
            fork = self._forks[party] = self._forked(request, connection)
        fork.busy = time.monotonic()
        return fork

    def _forked(self, request: bytes, connection: Connection) -> _Fork:
        self._made += 1
        address, at_work = str(self._folder / f"fork-{self._made}"), mmap.mmap(-1, 1)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            arguments = (json.loads(request), listener, at_work, os.getpid(), (self._listener, connection))
            process = get_context("fork").Process(target=_act, args=arguments)
            process.start()
        return _Fork(process, address, request, at_work, time.monotonic())

    def _end_idle(self) -> None:
        now = time.monotonic()
        for party, fork in list(self._forks.items()):
            if fork.at_work[0]:
                fork.busy = now
            elif now - fork.busy > _IDLE:
                fork.end()
                del self._forks[party]


def _act(request: dict[str, Any], listener: socket.socket, at_work: mmap.mmap, host: int, others: Iterable[Any]) -> None:
    """A fork's life: one connection after the other, until the host is gone or ends it."""
    for of_the_host in others:
        of_the_host.close()
    if request["devices"] is not None:
        os.environ[DEVICES] = request["devices"]
    listener.settimeout(_TICK)
    spec = request["spec"]
    worker = SiteWorker(ParticipantSpec(**spec)) if request["kind"] == "site" else ServerWorker(spec)
    while os.getppid() == host:
        try:
            accepted, _ = listener.accept()
        except TimeoutError:
            continue
        at_work[0] = 1
        with Connection(accepted.detach()) as connection, suppress(EOFError, ConnectionError):
            worker.answer(connection)
        try_malloc_trim()  # tens of megabytes in each of many forks are more than what they use
        at_work[0] = 0


class SiteWorker:
    """One site's participant in its fork, and the connection that it works for."""

    def __init__(self, spec: ParticipantSpec):
        self._spec = spec
        self._connection: Connection | None = None
        self._participant: Any = None

    def answer(self, connection: Connection) -> None:
        """Take one task and answer it."""
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
            problem = f"{type(error).__name__}: {error}"
            trace = traceback.format_exc()
        else:
            connection.send_bytes(b"{}")
            connection.send_bytes(reply)
            return
        connection.send_bytes(json.dumps({"problem": problem, "trace": trace}).encode())

    def _given_up(self) -> bool:
        """The other side sends nothing more: the connection becomes readable when it closes it."""
        return self._connection is None or self._connection.poll()


class ServerWorker:
    """The server's part of a job, in its fork."""

    def __init__(self, spec: Mapping[str, Any]):
        self._spec = ServerSpec(**{**spec, "members": tuple(spec["members"])})

    def answer(self, connection: Connection) -> None:
        """Run to the end, and say how it ended."""
        register_tensors()
        tasks = RelayedTasks(connection)
        try:
            ending = self._ended(tasks)
        except Aborted as error:
            tasks.tell("end", aborted=True, reason=str(error))
            return
        except Exception as error:  # the run's results say so already
            traceback.print_exc()
            ending = Ending(f"{type(error).__name__}: {error}", "")
        tasks.tell("end", aborted=False, reason=ending.reason, table=ending.table)

    def _ended(self, tasks: "RelayedTasks") -> Ending:
        try:
            run = self._spec.run(self._spec.aggregator(), say=tasks.say, observe=tasks.observe, events=tasks.events)
        except Exception as error:
            return self._spec.refused(error)
        return Ending.of(run.execute(MessageExchange(tasks, run.outside), resume=bool(run.settings.resume)))


class RelayedTasks:
    """The job's tasks, log and trackers, which the server's process has; see `TaskExchange`.

    Attributes:
        events: of the run.
    """

    def __init__(self, connection: Connection):
        self.events = EventLog()
        self._connection = connection
        self._told: list[Event] = []

    def present(self, outside: Iterable[str]) -> list[str]:
        """See `TaskExchange.present`."""
        self.tell("present", outside=list(outside))
        found: list[str] = self._hear()["sites"]
        return found

    def __call__(self, phase: str, round: int, outgoing: Mapping[str, Shareable], read: Read[A]) -> dict[str, Answer[A]]:
        """See `TaskExchange`."""
        self.tell("ask", phase=phase, round=round)
        self._connection.send_bytes(together_to_bytes(outgoing))
        contents: dict[str, A] = {}
        while "site" in (said := self._hear()):
            contents[said["site"]] = read(said["site"], from_bytes(self._connection.recv_bytes()))
        return {site: Answer(contents.get(site), **found) for site, found in said["answers"].items()}

    def say(self, line: str) -> None:
        """A line for the job's log."""
        self.tell("say", line=line)

    def observe(self, report: StepReport) -> None:
        """A step for FLARE's trackers."""
        self.tell("step", line=json_ready(report.line()))

    def tell(self, what: str, **more: Any) -> None:
        """Send something, and the events if there are others than last time."""
        events = self.events.to_list()
        said = {"what": what, "events": None if events == self._told else events, **more}
        self._told = events
        self._connection.send_bytes(json.dumps(said).encode())

    def _hear(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
        self.events.extend(answer.pop("noted", ()))
        if "aborted" in answer:
            raise Aborted(answer["aborted"])
        if "refused" in answer:
            raise ConfigError(answer["refused"])
        return answer


def serve(listener: socket.socket, simulator: int, method: str) -> None:
    """The host's life: import, listen, fork, end with the simulator."""
    folder = Path(listener.getsockname()).parent
    anchor(DATA_ROOT)
    print_lines()
    register_decomposers()
    load_ahead(method)
    host = Host(listener, folder)
    try:
        while psutil.pid_exists(simulator):
            host.serve_next()
    finally:
        host.close()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3])
