"""The host process of FLARE's simulator: the sites' processes hand their tasks to forks of it,
which have everything imported.

FLARE starts a process for each site or, with fewer threads than sites, for each task. Importing
torch and MONAI would cost each of them seconds. The controller therefore starts one host, `python
-m medflare.flare.simulator`, which imports everything once and forks a worker for each site. A
site's process sends its task to the site's worker and returns the reply. The host ends with the
simulator. In POC and production there is no host: a site's process lives as long as the job and
computes itself.

A worker keeps its participant from task to task. The participant's state is on disk after each task
all the same, so that a worker that was killed, or ended because it was idle, is replaced by a new
one.
"""

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.connection import Client, Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from nvflare.apis.shareable import Shareable
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.memory_utils import try_malloc_trim

from medflare.core.errors import Aborted, MedflareError
from medflare.federation.settings import step_name
from medflare.federation.step_errors import described
from medflare.flare.messages import register_decomposers, to_bytes, to_message, to_shareable
from medflare.flare.participants import DEVICES, ParticipantSpec, anchor_data_root, load_ahead

if TYPE_CHECKING:
    from medflare.federation.participant import Participant

# A job may carry this package; only FLARE's processes have it in their sys.path then.
_PACKAGES = Path(__file__).resolve().parents[2]
_ABORT_CHECK = 0.1  # seconds between two looks at the abort signal
_TICK = 1.0  # seconds after which host and workers check which processes are alive
# Seconds without a task after which a worker ends, so that with many sites not all stay in memory.
_IDLE = 60.0
_log = logging.getLogger(__name__)


class HostClient:
    """The host of a simulator, for the simulator's processes.

    Args:
        simulator: process id of the simulator.
    """

    def __init__(self, simulator: int):
        self.simulator = simulator
        created = 0  # hundredths of a second: the system uses process ids again
        with suppress(psutil.Error):
            created = int(psutil.Process(simulator).create_time() * 100)
        self.folder = Path(tempfile.gettempdir()) / f"medflare-{os.getuid()}-{simulator}-{created}"
        self.address = str(self.folder / "host")

    def started(self) -> bool:
        """Whether this user has started the host."""
        try:
            return os.lstat(self.folder).st_uid == os.getuid() and os.path.exists(self.address)
        except FileNotFoundError:
            return False

    def start(self, method: str, task_file: str) -> None:
        """Start the host, which imports what method and task need; an earlier request waits.

        Raises:
            OSError: it cannot be started, or has been started already.
        """
        self.folder.mkdir(mode=0o700)
        paths = filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH")))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(128)
            command = [
                sys.executable,
                "-m",
                "medflare.flare.simulator",
                str(listener.fileno()),
                str(self.simulator),
                method,
                task_file,
            ]
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
                pass_fds=[listener.fileno()],
                cwd=self.folder,
            )

    def reply(
        self,
        spec: ParticipantSpec,
        phase: str,
        round: int,
        incoming: Shareable,
        aborted: Callable[[], bool],
    ) -> Shareable:
        """The reply of the site's participant, computed by the site's worker.

        Raises:
            MedflareError: the participant raised it, or the worker died.
            Aborted: `aborted` became true; the worker stops before its next batch.
        """
        with self._worker(spec) as worker:
            try:
                worker.send_bytes(json.dumps({"phase": phase, "round": round}).encode())
                worker.send_bytes(to_bytes(incoming))
                while not worker.poll(_ABORT_CHECK):
                    if aborted():
                        raise Aborted(f"site {spec.name}: stopped on request")
                status = json.loads(worker.recv_bytes())
                if "problem" not in status:
                    return fobs.loads(worker.recv_bytes())
            except (EOFError, ConnectionError) as error:
                raise MedflareError(
                    f"the process that worked on {step_name(phase, round)} died"
                ) from error
        if status["trace"]:
            _log.error("%s", status["trace"])
        raise MedflareError(status["problem"])

    def _worker(self, spec: ParticipantSpec) -> Connection:
        """A connection to the site's worker, once the host has imported everything."""
        request = {"spec": asdict(spec), "devices": os.environ.get(DEVICES)}
        try:
            while True:
                with Client(self.address, family="AF_UNIX") as host:
                    host.send_bytes(json.dumps(request, default=str).encode())
                    address = host.recv_bytes().decode()
                # A worker that has just ended because it was idle refuses.
                with suppress(ConnectionRefusedError):
                    return Client(address, family="AF_UNIX")
        except (EOFError, OSError) as error:
            raise MedflareError(
                "the simulator's host process has ended; the console shows its last words"
            ) from error


class Host:
    """Answers each request of a site's process with the address of the site's worker."""

    def __init__(self, listener: socket.socket, folder: Path):
        self._listener = listener
        self._folder = folder
        # Site -> process, address, request.
        self._workers: dict[str, tuple[BaseProcess, str, bytes]] = {}
        self._forked = 0
        listener.settimeout(_TICK)

    def serve_next(self) -> None:
        """Answer one request, or return after a second without any."""
        try:
            accepted, _ = self._listener.accept()
        except TimeoutError:
            return
        with Connection(accepted.detach()) as connection, suppress(EOFError, ConnectionError):
            request = connection.recv_bytes()
            connection.send_bytes(self._worker_for(request, connection).encode())

    def close(self) -> None:
        """End all workers."""
        for process, _, _ in self._workers.values():
            process.kill()
            process.join()

    def _worker_for(self, request: bytes, connection: Connection) -> str:
        """The address of the site's worker; a request that differs from the worker's own gets
        another worker.
        """
        site = json.loads(request)["spec"]["name"]
        if site in self._workers:
            process, address, served = self._workers[site]
            if process.is_alive() and served == request:
                return address
            process.kill()
            process.join()
        self._forked += 1
        address = str(self._folder / f"worker-{self._forked}")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            inherited = (self._listener, connection)
            process = get_context("fork").Process(
                target=_work, args=(request, listener, os.getpid(), inherited)
            )
            process.start()
        self._workers[site] = process, address, request
        return address


def _work(request: bytes, listener: socket.socket, host: int, inherited: Iterable[Any]) -> None:
    """Run a worker: serve one connection after the other, until it is idle or the host has
    ended.
    """
    for of_the_host in inherited:
        of_the_host.close()
    content = json.loads(request)
    if content["devices"] is not None:
        os.environ[DEVICES] = content["devices"]
    worker = SiteWorker(ParticipantSpec(**content["spec"]))
    listener.settimeout(_TICK)
    last_task = time.monotonic()
    while os.getppid() == host and time.monotonic() - last_task < _IDLE:
        with suppress(TimeoutError):
            accepted, _ = listener.accept()
            with Connection(accepted.detach()) as connection, suppress(EOFError, ConnectionError):
                worker.serve(connection)
            try_malloc_trim()
            last_task = time.monotonic()


class SiteWorker:
    """One site's participant in its own process."""

    def __init__(self, spec: ParticipantSpec):
        self._spec = spec
        self._connection: Connection | None = None
        self._participant: Participant | None = None

    def serve(self, connection: Connection) -> None:
        """Receive one task and send its reply."""
        self._connection = connection
        task = json.loads(connection.recv_bytes())
        content = connection.recv_bytes()
        try:
            if self._participant is None:
                # The personal models may be shared: all sites are on one machine.
                self._participant = self._spec.participant(self._aborted, share_model=True)
            incoming = to_message(fobs.loads(content))
            message = self._participant.reply(task["phase"], task["round"], incoming)
            reply = to_bytes(to_shareable(message))
        except Exception as error:
            status = {"problem": str(error), "trace": ""}
            if not isinstance(error, MedflareError):
                opened = self._participant
                algorithms = () if opened is None else (opened.method.site_class,)
                status["problem"] = described(error, *algorithms)
                status["trace"] = traceback.format_exc()
            connection.send_bytes(json.dumps(status).encode())
        else:
            connection.send_bytes(b"{}")
            connection.send_bytes(reply)

    def _aborted(self) -> bool:
        """Whether the site's process has closed its end of the connection: it sends nothing more,
        so its end becomes readable only then.
        """
        return self._connection is None or self._connection.poll()


def main(listener: socket.socket, simulator: int, method: str, task_file: str) -> None:
    """Run the host: import, listen, fork, end with the simulator."""
    from medflare.data.progress import print_lines

    folder = Path(listener.getsockname()).parent
    anchor_data_root()
    print_lines()
    register_decomposers()
    load_ahead(method, task_file)
    host = Host(listener, folder)
    try:
        while psutil.pid_exists(simulator):
            host.serve_next()
    finally:
        host.close()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), *sys.argv[3:])
