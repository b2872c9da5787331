"""What medflare changes in FLARE's internals works, and FLARE still has it: a failure after an upgrade says which patch to revisit."""

import inspect
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import Task
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.private.fed.app.simulator import simulator_runner
from nvflare.private.fed.client.client_run_manager import ClientRunManager
from nvflare.private.fed.client.communicator import Communicator

from helpers.waiting import eventually
from medflare.flare.flare_patches import keep_ports_apart, quiet_ports, share_cleanup_thread, survive_resends

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_received_streams_share_one_cleanup_thread() -> None:
    source = inspect.getsource(inspect.getmodule(RxTask))  # type: ignore[arg-type]
    assert "threading.Timer" in source and "self.cleanup_timer.cancel()" in source
    share_cleanup_thread()
    before = threading.active_count()
    tasks = [RxTask(number, "somebody", cell=None) for number in range(50)]
    for task in tasks:
        RxTask.rx_task_map[(task.origin, task.sid)] = task
        task._schedule_remove_task(0.2)
    assert threading.active_count() <= before + 1
    assert eventually(lambda: not any(key[0] == "somebody" for key in RxTask.rx_task_map))


@contextmanager
def monitored() -> Iterator[tuple[WFCommServer, FLContext]]:
    """FLARE's own server side of tasks with two sites, as a run's controller has it, its monitor at work."""
    engine = SimpleNamespace(get_clients=lambda: [Client("CS", "1"), Client("DU", "2")])
    manager = FLContextManager(engine=engine, identity_name="server", job_id="job", public_stickers={}, private_stickers={})
    engine.new_context = manager.new_context
    communicator = WFCommServer(task_check_period=0.01)
    communicator._engine, communicator.controller = engine, SimpleNamespace(name="controller")
    survive_resends(communicator)
    communicator._task_monitor.start()
    try:
        yield communicator, manager.new_context()
    finally:
        communicator._all_done = True
        communicator._task_monitor.join()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_task_monitor_survives_a_task_that_is_fetched_twice() -> None:
    """While another site still has one: FLARE then notes the task twice. A model would stay in memory for every later step."""
    with monitored() as (communicator, fl_ctx):
        for step in range(2):
            for site in ("CS", "DU"):
                task = Task("train", Shareable(), result_received_cb=lambda client_task, fl_ctx: None)
                communicator.send(task, fl_ctx, targets=[site])
            given = {}
            for site in ("CS", "DU", "CS") if step == 0 else ("CS", "DU"):
                _, given[site], _ = communicator.process_task_request(Client(site, "1"), fl_ctx)
            if step == 0:
                assert [len(task.client_tasks) for task in communicator._tasks] == [2, 1], "FLARE notes it once: the patch can go"
            for site, number in given.items():
                communicator.process_submission(Client(site, "1"), "train", number, Shareable(), fl_ctx)
            assert eventually(lambda: not communicator._tasks, seconds=20)
        assert communicator._task_monitor.is_alive() and not communicator._client_task_map


def test_flare_has_the_timeout_of_polls() -> None:
    assert "client" in ClientRunManager.__init__.__code__.co_varnames
    assert "timeout" in Communicator.__init__.__code__.co_varnames


def test_simulator_ports_are_free_and_not_handed_out_by_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = quiet_ports(3)
    assert len(set(ports)) == 3
    if RANGE.exists():
        assert max(ports) < int(RANGE.read_text().split()[0])
    for port in ports:
        socket.create_server(("localhost", port)).close()
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        draws = iter([port, port, 12_345, 12_346])
        monkeypatch.setattr("random.SystemRandom.choice", lambda *_: next(draws))
        assert quiet_ports(1)[0] in (12_345, 12_346), "a port in use is not taken"


def test_the_simulator_takes_its_ports_from_the_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "get_open_ports(1)[0]" in inspect.getsource(simulator_runner.SimulatorClientRunner.do_one_task)
    monkeypatch.setattr(simulator_runner, "get_open_ports", simulator_runner.get_open_ports)
    keep_ports_apart()
    assert simulator_runner.get_open_ports is quiet_ports
