"""FLARE's simulator: its processes hand their work to forks of one host process, which has everything imported (`simulator_host`).

FLARE starts a process for every site, and with fewer threads than sites for every task. Importing torch and MONAI costs each of
them seconds, so none does: a site's process sends its task to a fork of the host and carries the answer back, and the server's process does
the same with the whole run. The controller starts the host; it ends with the simulator. In POC and production a party's process lives as
long as its job and computes itself, and there is no host. The imports here are light: no torch, no MONAI.
"""

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, Final

import psutil
from nvflare.apis.shareable import Shareable

from medflare.core.errors import Aborted, ConfigError, MedflareError
from medflare.core.events import Event
from medflare.flare.messages import from_bytes, readable, to_bytes, together_from_bytes
from medflare.flare.participants import DEVICES, ParticipantSpec
from medflare.flare.server_run import Ending, ServerSpec
from medflare.flare.tasks import Answer, TaskExchange
from medflare.flare.tracking import Progress

_LOOK = 0.1  # seconds between two looks at the abort signal
_PACKAGES = Path(__file__).resolve().parents[2]  # where this package lies; a job may carry it, and only FLARE's processes know
_SITE: Final = "--client"  # FLARE's option that names the site on the command line of a site's process
_SPINS: Final = ("GOMP_SPINCOUNT", "1000")  # GNU OpenMP's own number where it knows that threads outnumber cores
_DIED: Final = (
    "the process in which the simulator's server computed died, as when memory runs out; metrics.jsonl has the steps that were done"
)
_log = logging.getLogger(__name__)


class Relay:
    """The host of one simulator, as the simulator's processes see it."""

    def __init__(self, simulator: int):
        self.simulator = simulator
        born = 0
        with suppress(psutil.Error):
            born = int(psutil.Process(simulator).create_time() * 100)  # process ids are used again
        self.folder = Path(tempfile.gettempdir()) / f"medflare-{os.getuid()}-{simulator}-{born}"
        self.address = str(self.folder / "host")

    def there(self) -> bool:
        """Whether this user has started a host for the simulator."""
        try:
            return os.lstat(self.folder).st_uid == os.getuid() and os.path.exists(self.address)
        except FileNotFoundError:
            return False

    def start(self, method: str) -> None:
        """Start the host, which imports what the method needs; returns at once, and who asks before it is ready waits.

        Raises:
            OSError: it cannot be started, or somebody has started one already.
        """
        self.folder.mkdir(mode=0o700)
        paths = [str(_PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        sleep_soon(environment)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(128)
            command = [sys.executable, "-m", "medflare.flare.simulator_host", str(listener.fileno()), str(self.simulator), method]
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, start_new_session=True, env=environment, pass_fds=[listener.fileno()], cwd=self.folder
            )

    def answer(self, spec: ParticipantSpec, phase: str, round: int, incoming: Shareable, aborted: Callable[[], bool]) -> Shareable:
        """What the site's participant answers, computed in a fork of the host.

        Raises:
            MedflareError: what the participant raised, or that it died.
            Aborted: `aborted` became true; the fork notices before its next batch.
        """
        try:
            with self.connected("site", asdict(spec)) as connection:
                connection.send_bytes(json.dumps({"phase": phase, "round": round}).encode())
                connection.send_bytes(to_bytes(incoming))
                answered = False
                while not answered:
                    if aborted():
                        raise Aborted(f"site {spec.name}: stopped on request")
                    answered = connection.poll(_LOOK)
                said = json.loads(connection.recv_bytes())
                if "problem" in said:
                    if said["trace"]:
                        _log.error("%s", said["trace"])
                    raise MedflareError(said["problem"])
                return from_bytes(connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise MedflareError(f"the process that worked on '{phase}' of round {round} died") from error

    def connected(self, kind: str, spec: dict[str, Any]) -> Connection:
        """A connection to the fork that acts for a party; there is one as soon as the host has imported everything.

        Raises:
            MedflareError: there is none, and no host that makes one.
        """
        request = {"kind": kind, "spec": spec, "devices": os.environ.get(DEVICES)}
        try:
            with Client(self.address, family="AF_UNIX") as host:
                host.send_bytes(json.dumps(request).encode())
                address = host.recv_bytes().decode()
            return Client(address, family="AF_UNIX")
        except (EOFError, OSError) as error:
            raise MedflareError("the process in which the simulator computes is gone; what it said last is on the console") from error


def sleep_soon(environment: MutableMapping[str, str]) -> None:
    """Let OpenMP's threads soon sleep while they wait, unless the user has said how they are to.

    Where they wait awake, four sites on two cores take more than twice as long. Their number, which decides on the last bits, stays.
    """
    if not environment.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        environment.update([_SPINS])


class Workers:
    """The simulator's site processes, as the process sees them that started them."""

    def __init__(self, simulator: int | None = None):
        self._simulator = psutil.Process(simulator)
        self._seen: set[str] = set()
        self._dead: set[str] = set()

    def dead(self) -> set[str]:
        """Sites that had a process when somebody looked and have none now; with fewer threads than sites most of them have none.

        While a process starts nobody can tell whose it is: the answer is then that of the last look.
        """
        commands = self._commands()
        if [] not in commands:
            living = {words[words.index(_SITE) + 1] for words in commands if _SITE in words[:-1]}
            self._seen |= living
            self._dead = self._seen - living
        return self._dead

    def _commands(self) -> list[list[str]]:
        """The command line of every living child; empty for one that is just starting."""
        commands = []
        for child in self._simulator.children():
            with suppress(psutil.Error):  # it ended meanwhile
                if child.status() != psutil.STATUS_ZOMBIE:
                    commands.append(child.cmdline())
        return commands


class ServerProxy:
    """The server's process while a fork of the host computes the run: does what only FLARE's process can, and hears how the run ended."""

    def __init__(self, tasks: TaskExchange, progress: Progress, observe: Callable[[Mapping[str, Any]], None]):
        self._tasks, self._progress, self._observe = tasks, progress, observe
        self._noted: list[Event] = []

    def note(self, event: Event) -> None:
        """Add an event to those of the run, which hears of it with the next answer."""
        self._noted.append(event)

    def serve(self, relay: Relay, spec: ServerSpec) -> Ending:
        """Returns when the run is over.

        Raises:
            Aborted: it was stopped, and has written its results.
            MedflareError: the host or the run died.
        """
        with relay.connected("server", asdict(spec)) as connection:
            try:
                said = self._listen(connection)
            except (EOFError, ConnectionError) as error:
                raise MedflareError(_DIED) from error
        if said["aborted"]:
            raise Aborted(said["reason"])
        return Ending(said["reason"], said["table"])

    def _listen(self, connection: Connection) -> dict[str, Any]:
        """What the run says last."""
        while True:
            said: dict[str, Any] = json.loads(connection.recv_bytes())
            if said["events"] is not None:
                self._progress.events.replace(said["events"])
            if said["what"] == "say":
                self._progress.say(said["line"])
            elif said["what"] == "step":
                self._observe(said["line"])
            elif said["what"] == "end":
                return said
            else:
                self._answer(said, connection)

    def _answer(self, asked: Mapping[str, Any], connection: Connection) -> None:
        """What the sites have to do with; that the job is being stopped, or names a site that is not there, is the run's to record."""
        answer: dict[str, Any]
        try:
            if asked["what"] == "present":
                answer = {"sites": self._tasks.present(asked["outside"])}
            else:
                answer = {"answers": self._ask(asked["phase"], asked["round"], connection)}
        except Aborted as error:
            answer = {"aborted": str(error)}
        except ConfigError as error:
            answer = {"refused": str(error)}
        noted, self._noted = self._noted, []
        connection.send_bytes(json.dumps({**answer, "noted": noted}).encode())

    def _ask(self, phase: str, round: int, connection: Connection) -> dict[str, dict[str, Any]]:
        """Site -> what became of its task; the answers that can be read go to the run as they come."""

        def passed_on(site: str, answer: Shareable) -> tuple[str, str]:
            content, problem, kind = readable(answer, to_bytes)
            if content is not None:
                connection.send_bytes(json.dumps({"site": site}).encode())
                connection.send_bytes(content)
            return problem, kind

        found = self._tasks(phase, round, together_from_bytes(connection.recv_bytes()), passed_on)
        return {site: _told(answer) for site, answer in found.items()}


def _told(answer: Answer[tuple[str, str]]) -> dict[str, Any]:
    """What the run hears of a site's task beside the answer."""
    problem, kind = (answer.problem, answer.kind) if answer.content is None or answer.problem else answer.content
    return {"problem": problem, "kind": kind, "seconds": answer.seconds}
