"""FLARE's simulator: the sites' workers are forks of one host, and whatever ends them has a reason."""

import inspect
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from nvflare.fuel.utils import log_utils
from nvflare.private.fed.app.simulator import simulator_runner, simulator_worker

from helpers.waiting import eventually
from medflare.core.errors import MedflareError
from medflare.core.message import Message
from medflare.flare import simulator
from medflare.flare.flare_patches import connect_sites_by_files, quiet_ports
from medflare.flare.messages import register_decomposers, to_bytes, to_shareable
from medflare.flare.participants import ParticipantSpec
from medflare.flare.simulator import Host, HostClient, SiteWorker
from medflare.methods.catalogue import get_method

SPEC = {
    "name": "A",
    "method": "fedavg",
    "server_algorithm": "",
    "seed": 0,
    "task_file": "",
    "local_file": "",
    "folder": "",
}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """A host that answers requests at `tmp_path`/host in a thread."""
    ended = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "host"))
        listener.listen()
        made = Host(listener, tmp_path)

        def serve() -> None:
            while not ended.is_set():
                made.serve_next()

        thread = threading.Thread(target=serve)
        thread.start()
        yield made
        ended.set()
        thread.join()
        made.close()


def worker_of(folder: Path, site: str, seed: int = 0) -> str:
    """The address that the host gives for a site's worker."""
    with Client(str(folder / "host"), family="AF_UNIX") as connection:
        connection.send_bytes(
            json.dumps({"spec": {**SPEC, "name": site, "seed": seed}, "devices": None}).encode()
        )
        return connection.recv_bytes().decode()


def test_a_site_has_one_worker_until_its_job_changes(host: Host, tmp_path: Path) -> None:
    first = worker_of(tmp_path, "A")
    assert worker_of(tmp_path, "A") == first != worker_of(tmp_path, "B")
    old, _, _ = host._workers["A"]
    assert worker_of(tmp_path, "A", seed=1) != first and not old.is_alive()


def test_an_idle_worker_ends_and_is_replaced(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulator, "_TICK", 0.05)
    monkeypatch.setattr(simulator, "_IDLE", 0.2)
    first = worker_of(tmp_path, "A")
    assert eventually(lambda: not host._workers["A"][0].is_alive())
    assert worker_of(tmp_path, "A") != first


def test_a_worker_names_the_place_of_an_error_of_the_code() -> None:
    def reply(*arguments: object) -> None:
        raise KeyError("head.weight")

    register_decomposers()
    participant = SimpleNamespace(reply=reply, method=get_method("fedavg"))
    spec: Any = SimpleNamespace(participant=lambda aborted, share_model: participant)
    here, there = Pipe()
    here.send_bytes(json.dumps({"phase": "train", "round": 1}).encode())
    here.send_bytes(to_bytes(to_shareable(Message())))
    SiteWorker(spec).serve(there)
    problem = json.loads(here.recv_bytes())["problem"]
    assert re.fullmatch(r"KeyError: 'head\.weight' \(simulator\.py, line \d+, in serve\)", problem)


def test_a_worker_gets_the_gpu_that_flare_gave_its_sites_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    host = HostClient(0)
    requests = list[dict[str, object]]()
    host.folder.mkdir()

    def answering() -> None:
        with listener.accept() as connection:
            requests.append(json.loads(connection.recv_bytes()))

    try:
        with Listener(host.address, family="AF_UNIX") as listener:
            thread = threading.Thread(target=answering)
            thread.start()
            with pytest.raises(MedflareError):
                host._worker(ParticipantSpec(**SPEC))  # type: ignore[arg-type]
            thread.join()
    finally:
        host.folder.rmdir()
    assert requests[0]["devices"] == "3"


def test_flare_source_gives_a_sites_process_its_gpu_by_this_variable() -> None:
    """Detects a change of FLARE's source; it shows no behaviour.

    After an upgrade of FLARE it can fail at a harmless rename. `HostClient` reads the variable.
    """
    source = inspect.getsource(simulator_worker)
    assert 'os.environ["CUDA_VISIBLE_DEVICES"] = args.gpu' in source


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Any:
    """FLARE's module of the simulator, whose sites have sockets in a folder of its own."""
    for name in ("Client", "subprocess"):
        monkeypatch.setattr(simulator_runner, name, getattr(simulator_runner, name))
    connect_sites_by_files()
    return simulator_runner


def test_the_sites_of_a_simulator_listen_where_no_other_account_can(
    simulation: Any, tmp_path: Path
) -> None:
    """At a port another account could listen first, or pass the messages of both on."""
    [port] = quiet_ports(1)
    config = Path(log_utils.__file__).with_name("log_config.json")
    arguments = ["-o", str(tmp_path), "--port", str(port), "--logging_config", str(config)]
    arguments += ["--client", "A", "--token", "t", "--decomposer_module", "none"]
    command = [sys.executable, "-m", simulator_worker.__name__, *arguments]
    site = simulation.subprocess.Popen([*command, "--parent_pid", str(os.getpid())])
    connections: list[Connection] = []

    def is_connected() -> bool:
        with suppress(OSError, KeyError):  # the latter once it is connected
            connections.append(simulation.Client(("localhost", port)))
        return bool(connections)

    try:
        [folder] = simulation.subprocess._folders.values()
        assert Path(folder).stat().st_mode & 0o077 == 0
        assert eventually(is_connected)
        process = psutil.Process(site.pid)
        assert not process.net_connections("inet")
        paths = {files.laddr for files in process.net_connections("unix") if files.laddr}
        assert paths <= {str(Path(folder, "socket"))}  # closed once it is connected
        assert eventually(lambda: not Path(folder).exists())
    finally:
        site.kill()
        site.wait()
