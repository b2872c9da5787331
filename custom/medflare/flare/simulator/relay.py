"""The way from a process of FLARE's simulator to where everything is computed, which is another process.

FLARE starts a process for every site, and with fewer threads than sites for every task. Importing torch and MONAI costs each of
them seconds, so none does: it hands its task to a fork of one host that has everything imported (`host`), and carries the answer
back. The server's process does the same with the whole run (`office`). The controller starts the host with the run; it ends with the
simulator. Elsewhere a party's process lives as long as its job and computes itself, and there is no host.
"""

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import psutil
from nvflare.apis.shareable import Shareable

from medflare.core.errors import Aborted, MedflareError
from medflare.flare.exchange.participants import DEVICES, ParticipantSpec
from medflare.flare.exchange.wire import from_bytes, to_bytes
from medflare.flare.simulator.threads import sleep_soon

_LOOK = 0.1  # seconds between two looks at the abort signal
_PACKAGES = Path(__file__).resolve().parents[3]  # where this package lies; a job may carry it, and only FLARE's processes know
_log = logging.getLogger(__name__)


class Relay:
    """The host of one simulator, as the simulator's processes see it.

    Args:
        simulator: process id of the simulator; the host ends with it.
    """

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
            command = [sys.executable, "-m", "medflare.flare.simulator.host", str(listener.fileno()), str(self.simulator), method]
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, start_new_session=True, env=environment, pass_fds=[listener.fileno()], cwd=self.folder
            )

    def answer(self, spec: ParticipantSpec, phase: str, round: int, incoming: Shareable, aborted: Callable[[], bool]) -> Shareable:
        """What the site's participant answers, computed in a fork of the host.

        Args:
            spec: what the fork needs to act for the site.
            phase: of the step.
            round: 0-based.
            incoming: the server's message.
            aborted: whether the run was asked to stop; asked again and again.

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

        Args:
            kind: of the party, "site" or "server".
            spec: what the fork needs to act for it, a `ParticipantSpec` or a `ServerSpec`.

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
