"""Makes new processes cheap where FLARE's simulator starts one for every task, that is with fewer threads than sites.

Importing torch and MONAI costs such a process three seconds, more than most tasks. The first one that finds its site served
before starts a host, a process that has everything imported; the tasks that follow run in forks of the host, each as fresh as
a new process. The host ends with the simulator. Elsewhere a site's process lives as long as its job, and there is no host.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medflare.core.errors import Aborted, MedflareError
from medflare.flare.exchange.participants import ParticipantSpec, load_site_half

if TYPE_CHECKING:
    from medflare.core.message import Message

_LOOK = 0.1  # seconds between two looks at the abort signal
_PACKAGES = Path(__file__).resolve().parents[3]  # where this package lies; a job may carry it, and only FLARE's processes know
_DEVICES = "CUDA_VISIBLE_DEVICES"  # the simulator gives each site's process its own


class WarmHost:
    """The host of one simulator, as a site's process sees it.

    Args:
        simulator: process id of the simulator; the host ends with it.
    """

    def __init__(self, simulator: int):
        self.simulator = simulator
        self.folder = Path(tempfile.gettempdir()) / f"medflare-{os.getuid()}-{simulator}"
        self.address = str(self.folder / "host")

    def running(self) -> bool:
        """Whether there is a host of this user's to connect to."""
        return os.path.exists(self.address) and self.folder.stat().st_uid == os.getuid()

    def start(self, method: str) -> None:
        """Start a host that has the method's site half imported; returns at once. Where two do so, the second one ends."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        command = [sys.executable, "-m", "medflare.flare.simulator.host", str(self.simulator), method]
        paths = [str(_PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, env=environment)

    def answer(self, spec: ParticipantSpec, phase: str, round: int, incoming: "Message", aborted: Callable[[], bool]) -> "Message":
        """What the site's participant answers, computed in a fork of the host.

        Args:
            spec: what the fork needs to act for the site.
            phase: of the step.
            round: 0-based.
            incoming: the server's message.
            aborted: whether the run was asked to stop; asked again and again.

        Raises:
            MedflareError: what the participant raised.
            Aborted: `aborted` became true; the fork notices before its next batch.
        """
        from medflare.core.store import StateStore

        store = StateStore(Path(spec.folder) / "exchange")
        store.save("incoming", incoming)
        request = {"spec": asdict(spec), "phase": phase, "round": round, "devices": os.environ.get(_DEVICES)}
        with Client(self.address, family="AF_UNIX") as connection:
            connection.send_bytes(json.dumps(request).encode())
            while not connection.poll(_LOOK):
                if aborted():
                    raise Aborted(f"site {spec.name}: stopped on request")
            try:
                problem = json.loads(connection.recv_bytes())
            except EOFError:
                problem = f"the process that worked on '{phase}' of round {round} died"
        if problem:
            raise MedflareError(problem)
        reply = store.load("reply")
        assert reply is not None
        return reply


def serve(simulator: int, method: str) -> None:
    """The host's life: import, listen, fork for every request, end with the simulator."""
    host = WarmHost(simulator)
    _import_everything(method)
    with socket.socket(socket.AF_UNIX) as listener:
        starting = f"{host.address}.{os.getpid()}"
        listener.bind(starting)
        listener.listen()
        listener.settimeout(1.0)
        try:
            os.link(starting, host.address)  # appears when it can be connected to; fails where another host was faster
        except FileExistsError:
            return
        finally:
            os.unlink(starting)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
        try:
            while _alive(simulator):
                _serve_next(listener)
        finally:
            os.unlink(host.address)
            host.folder.rmdir()


def _serve_next(listener: socket.socket) -> None:
    try:
        accepted, _ = listener.accept()
    except TimeoutError:
        return
    with Connection(accepted.detach()) as connection:
        if os.fork() == 0:
            listener.close()
            try:
                connection.send_bytes(json.dumps(_worked(connection)).encode())
            finally:
                os._exit(0)


def _worked(connection: Any) -> str | None:
    """Do what is asked for; what went wrong, or None."""
    from medflare.core.store import StateStore

    request = json.loads(connection.recv_bytes())
    if request["devices"] is not None:
        os.environ[_DEVICES] = request["devices"]
    spec = ParticipantSpec(**request["spec"])
    store = StateStore(Path(spec.folder) / "exchange")
    try:
        incoming = store.load("incoming")
        assert incoming is not None
        # the other side sends nothing more: the connection becomes readable when it gives up
        reply = spec.participant(connection.poll).answer(request["phase"], request["round"], incoming)
        store.save("reply", reply)
    except MedflareError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__} in '{request['phase']}' of round {request['round']}: {error}"
    return None


def _import_everything(method: str) -> None:
    import monai  # noqa: F401

    from medflare.federation import participant  # noqa: F401

    load_site_half(method)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
