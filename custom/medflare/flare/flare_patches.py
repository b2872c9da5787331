"""Changes to FLARE 2.9's internals; docs/flare.md has measurements and says when each can go."""

import asyncio
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Client, Connection
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NoReturn

from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3 import mpm
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.utils.config import ConfigFormat, ConfigLoader
from nvflare.fuel.utils.config_factory import ConfigFactory
from nvflare.private.fed.app import default_app_validator

from medflare.flare import simulator_site

if TYPE_CHECKING:
    from nvflare.private.fed.server.fed_server import FederatedServer

_SIMULATOR = "nvflare.private.fed.app.simulator.simulator_runner"
# Above services, below the ports that systems hand out (Linux: from 32768).
_PORTS = range(10_000, 30_000)
JSON_ONLY = "medflare reads JSON only"
_POLL_TIMEOUT = 30.0  # seconds; FLARE waits 300 s for the answer to a poll


class _RefusedFormat(ConfigLoader):
    """Replaces FLARE's parser of HOCON or YAML; both can read other files and environment
    variables, HOCON also URLs.
    """

    def load_config(self, file_path: str) -> NoReturn:
        raise ValueError(f"configuration {PurePath(file_path).name} refused: {JSON_ONLY}")

    def load_config_from_str(self, content: Any) -> NoReturn:
        raise ValueError(f"configuration in {self.format.value} refused: {JSON_ONLY}")

    load_config_from_dict = load_config_from_str


def parse_json_only() -> None:
    """Have FLARE parse configuration in JSON and nothing else, in this process.

    FLARE parses a job's configuration when the job is uploaded and when it is deployed, before it
    asks the party's app_validator.
    """
    for refused in (ConfigFormat.PYHOCON, ConfigFormat.OMEGACONF):
        ConfigFactory._fmt2Loader[refused] = _RefusedFormat(refused)
    # FLARE's own validator only looks whether the file is there, which `job_policy.JobComponents`
    # does as well.
    default_app_validator._config_exists = lambda *args, **kwargs: ""


def search_kits_only() -> None:
    """Have FLARE search for a party's settings in startup/ and local/ of its kit, in this process.

    It searches all folders below the kit, or below the folder in which a person starts a command;
    so it would take comm_config.json of a job, which names Python files to run.
    """
    ConfigFactory.search_config_format = staticmethod(_search_kits_only)


_SEARCH = ConfigFactory.search_config_format
_OF_KITS = ("startup", "local")


def _search_kits_only(
    init_file_path: str, search_dirs: Any = None, target_fmt: ConfigFormat | None = None
) -> tuple[ConfigFormat | None, str | None]:
    """As FLARE's function, but with the folders of a kit instead of the whole kit."""
    folders = [search_dirs] if isinstance(search_dirs, str) else search_dirs or []
    is_name = not PurePath(init_file_path).parent.parts
    if not folders and is_name:
        return None, None
    searched: list[str] = []
    for folder in folders:
        of_kit = [Path(folder, name) for name in _OF_KITS]
        if all(path.is_dir() for path in of_kit):
            searched += map(str, of_kit)
        else:
            searched.append(folder)
    return _SEARCH(init_file_path, searched, target_fmt)


def share_cleanup_thread() -> None:
    """Let one thread remove all received streams of this process; FLARE starts a timer thread of 65
    s for each.
    """
    RxTask._schedule_remove_task = _schedule_remove_task


def _schedule_remove_task(task: RxTask, ttl: float | None = None) -> None:
    with task.stop_lock:
        if task.cleanup_timer is None:  # which FLARE cancels if the stream is removed earlier
            seconds = task.completed_task_ttl if ttl is None else ttl
            loop = _cleanup_loop()
            task.cleanup_timer = loop.call_soon_threadsafe(
                loop.call_later, seconds, _remove, weakref.ref(task)
            )


def _remove(stream: "weakref.ref[RxTask]") -> None:
    task = stream()
    if task is not None:
        task._remove_task()


@cache
def _cleanup_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="stream_cleanup", daemon=True).start()
    return loop


class _ClientTasks(dict[str, Any]):
    """FLARE's map of the tasks that sites have fetched; removing one twice raises nothing."""

    def pop(self, key: str, default: Any = None) -> Any:
        return super().pop(key, default)


def survive_resends(communicator: Any) -> None:
    """Keep FLARE's task monitor alive when a site fetches its task twice, after a lost answer or a
    restart.

    Otherwise the monitor ends by a KeyError: FLARE then keeps each later task and its model, and
    notices no dead site.
    """
    communicator._client_task_map = _ClientTasks(communicator._client_task_map)


def notice_lost_answers(fl_ctx: FLContext) -> None:
    """Let a site poll again 30 s after an answer was lost, for example in a cut network, instead of
    300 s.
    """
    fl_ctx.get_engine().client.communicator.timeout = _POLL_TIMEOUT


def keep_ports_apart() -> None:
    """If this is a simulator, give its sites ports that the system hands out to no connection."""
    runner = sys.modules.get(_SIMULATOR)
    if runner:
        runner.get_open_ports = quiet_ports  # type: ignore[attr-defined]


def look_often() -> None:
    """If this is a simulator, have it look for a site's process, and for work, every 0.1 s instead
    of every second, since with fewer threads than sites it starts a process for each task. Its end,
    when all sites have ended, waits as long instead of 3 s.
    """
    runner = sys.modules.get(_SIMULATOR)
    if runner:
        runner.time = simulator_site.Clock  # type: ignore[attr-defined]
        mpm.time = simulator_site.Clock


def end_soon(server: "FederatedServer") -> None:
    """Have a simulator's server look every 0.3 s, instead of 3 s, whether its job has ended."""
    server.check_engine_frequency = 0.3


def connect_sites_by_files() -> None:
    """If this is a simulator, have it talk with each site's process by a socket in a folder of this
    account: both unpickle what comes, and another account can take a port first.
    """
    runner = sys.modules.get(_SIMULATOR)
    if runner:
        processes = _SitesProcesses()
        runner.Client = processes.connected  # type: ignore[attr-defined]
        runner.subprocess = processes  # type: ignore[attr-defined]


class _SitesProcesses:
    """Replaces the simulator's module `subprocess`."""

    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self) -> None:
        self._folders: dict[int, str] = {}  # of the processes' sockets, by FLARE's port

    def connected(self, address: tuple[str, int]) -> Connection:
        """A connection to the process of the site that FLARE gives this port."""
        return Client(str(Path(self._folders[address[1]], "socket")), "AF_UNIX")

    def Popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:  # noqa: N802
        """The process of a site, which runs our file instead of FLARE's simulator_worker."""
        python, _, _, *arguments = command
        folder = tempfile.mkdtemp(prefix="medflare-")
        self._folders[int(arguments[arguments.index("--port") + 1])] = folder
        environment = {**os.environ, **options.pop("env", {})}
        environment[simulator_site.SOCKET] = str(Path(folder, "socket"))
        run = f"import runpy; runpy.run_path({simulator_site.__file__!r}, run_name='__main__')"
        return subprocess.Popen([python, "-c", run, *arguments], env=environment, **options)


def quiet_ports(number: int) -> list[int]:
    """Different free ports below those that the system hands out.

    They are bound, but never listened on: FLARE's forks would inherit a listening socket, and a
    site that connects to it is reset.
    """
    ports: set[int] = set()
    draw = random.SystemRandom()  # no seed: two simulators must not draw the same ports
    while len(ports) < number:
        port = draw.choice(_PORTS)
        with suppress(OSError), socket.socket() as bound:
            bound.bind(("localhost", port))
            ports.add(port)
    return sorted(ports)
