"""FLARE's simulator: runs and sites in forks of one host compute what the plain loop does, and whatever ends them has a reason."""

import inspect
import json
import mmap
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.private.fed.app.simulator import simulator_worker

from flare.server import SITES, Server, in_this_process
from helpers.small_tasks import tiny_phantom
from helpers.waiting import eventually
from medflare.core.errors import Aborted, MedflareError
from medflare.core.events import DOUBTS, EventLog
from medflare.evaluation.results import load_results
from medflare.federation.local.loop import run_local
from medflare.federation.settings import PHASES_OF_ALL
from medflare.flare import simulator_host as host
from medflare.flare.aggregators import MethodAggregator
from medflare.flare.liveness import Liveness
from medflare.flare.messages import error_reply, register_decomposers, to_message, to_shareable
from medflare.flare.server_run import ServerSpec
from medflare.flare.simulator import Relay, ServerProxy, Workers, sleep_soon
from medflare.flare.simulator_host import ServerWorker
from medflare.flare.tasks import Answer, Read, TaskExchange
from medflare.flare.tracking import Progress
from medflare.methods.base import Step
from medflare.methods.catalogue import get_method
from medflare.tasks.config import TaskConfig, load_task

SEED = 3
SETTINGS: dict[str, Any] = {"rounds": 2, "seed": SEED, "outside": [], "resume": ""}
Behaviour = Callable[[str, int, Shareable], Shareable]


@pytest.fixture(autouse=True)
def serialisation() -> None:
    """As FLARE itself makes every process of its own ready."""
    register_decomposers()


@pytest.fixture(scope="module")
def task() -> TaskConfig:
    return load_task(tiny_phantom(size=[16, 16]))


class Tasks(TaskExchange):
    """The sites work in this process, but for one that answers as it likes.

    Args:
        work: what they answer.
        strange: site -> how it answers.
    """

    def __init__(self, work: Any, **strange: Behaviour):
        members: Any = SimpleNamespace(get_client_disconnect_time=lambda site: None)
        options: dict[str, Any] = {"stop_reason": str, "say": str, "step_timeout": 0.0, "enrol_timeout": 0.0, "liveness": Liveness(60.0)}
        super().__init__(members, FLContext(), Signal(), members=lambda: list(SITES), **options)
        self.work, self.strange = work, {name.replace("_", "-"): behaviour for name, behaviour in strange.items()}
        self.asked: list[tuple[str, int]] = []

    def __call__(self, phase: str, round: int, outgoing: Any, read: Read[Any]) -> dict[str, Answer[Any]]:
        self.asked.append((phase, round))
        found = {}
        for site, data in sorted(outgoing.items()):
            reply = self.work(Step(phase, round), {site: to_message(data)})[site]
            assert reply.message is not None, reply.problem
            answer = to_shareable(reply.message)
            if site in self.strange:
                answer = self.strange[site](phase, round, answer)
            found[site] = Answer(read(site, answer), "", "", 1.0)
        return found


class Relayed:
    """A run in a thread, and the proxy that serves it; stands in for the way to the host, too."""

    def __init__(self, folder: Path, task: TaskConfig, tasks: TaskExchange, method: str = "fedavg", **settings: Any):
        server = Server(folder, MethodAggregator(method=method), task)
        self.spec = ServerSpec.of(server.context(), server.aggregator, None, {**SETTINGS, **settings}, SITES)
        self.events, self.steps = EventLog(), list[Any]()
        self.progress = Progress(self.events)
        self.proxy = ServerProxy(tasks, self.progress, self.steps.append)

    def connected(self, kind: str, spec: dict[str, Any]) -> Connection:
        assert kind == "server"
        near, far = Pipe()
        worker = ServerWorker(json.loads(json.dumps(spec)))

        def act() -> None:
            with far:
                worker.answer(far)

        threading.Thread(target=act, daemon=True).start()
        return near

    def serve(self) -> Any:
        return self.proxy.serve(self, self.spec)  # type: ignore[arg-type]

    @property
    def results(self) -> dict[str, Any]:
        return load_results(Path(self.spec.results))


@pytest.mark.parametrize("method", ["fedavg", "fedsm"])
def test_the_run_is_the_plain_loops(task: TaskConfig, tmp_path: Path, method: str) -> None:
    plain = run_local(method, task, SITES, rounds=2, seed=SEED, out=tmp_path / "plain")
    tasks = Tasks(in_this_process(get_method(method), task, {}, SEED)())
    run = Relayed(tmp_path / "flare", task, tasks, method)
    ending = run.serve()
    assert ending.reason == "" and "COMPLETED" in ending.table
    assert run.results["sites"] == plain["sites"] and run.results["configuration"]["settings"]["engine"] == "flare"
    models = sorted((tmp_path / "plain" / "models").rglob("model.safetensors"))
    found = Path(run.spec.results) / "models"
    assert models and all((found / path.relative_to(tmp_path / "plain" / "models")).read_bytes() == path.read_bytes() for path in models)
    steps = [asked for asked in tasks.asked if asked[0] not in PHASES_OF_ALL]
    assert [(step["phase"], step["round"]) for step in run.steps] == steps
    assert len([line for line in run.progress.to_dict(None)["lines"] if line.startswith(("round", "after"))]) == len(steps)


def test_what_happens_on_either_side_is_noted_once(task: TaskConfig, tmp_path: Path) -> None:
    """A site whose answers are no messages is the run's to note, a late answer the proxy's."""

    def strange(phase: str, round: int, answer: Shareable) -> Shareable:
        if phase == "train" and round == 0:
            run.proxy.note({"kind": "late", "message": "an answer came late", "site": "site-2"})
            return DXO(DataKind.WEIGHTS, {"w": 1.0}).to_shareable()
        return error_reply("no images") if phase == "train" else answer

    run = Relayed(tmp_path, task, Tasks(in_this_process(get_method("fedavg"), task, {}, SEED)(), site_1=strange), min_sites=1)
    assert run.serve().reason == ""
    assert run.events.to_list() == run.results["events"]
    noted = [(event["kind"], event["site"]) for event in run.events if event["kind"] not in DOUBTS]
    assert noted == [("late", "site-2"), ("rejected", "site-1"), ("failed", "site-1")]
    assert len([line for line in run.progress.to_dict(None)["lines"] if line.startswith(("late", "rejected", "failed"))]) == len(noted)


@pytest.mark.parametrize(("settings", "said"), [({"rounds": "three"}, "rounds"), ({"outside": ["HT"]}, "HT")])
def test_a_job_that_is_wrong_is_refused(task: TaskConfig, tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    run = Relayed(tmp_path, task, Tasks(None), **settings)
    assert said in run.serve().reason and said in run.results["reason"]
    assert run.results["status"] == "FAILED"


def test_abort_reaches_the_run(task: TaskConfig, tmp_path: Path) -> None:
    def aborting(phase: str, round: int, answer: Shareable) -> Shareable:
        if phase == "train":
            raise Aborted("the user said so")
        return answer

    run = Relayed(tmp_path, task, Tasks(in_this_process(get_method("fedavg"), task, {}, SEED)(), site_1=aborting))
    with pytest.raises(Aborted, match="the user"):
        run.serve()
    assert run.results["reason"] == "aborted: the user said so"


def test_what_nobody_foresaw_is_a_failure(task: TaskConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr("medflare.federation.schedule.Federation.run", broken)
    run = Relayed(tmp_path, task, Tasks(None))
    assert run.serve().reason == run.results["reason"] == "ZeroDivisionError: by nothing"


def test_a_run_that_dies_is_named(task: TaskConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerWorker, "answer", lambda worker, connection: None)
    run = Relayed(tmp_path, task, Tasks(None))
    with pytest.raises(MedflareError):
        run.serve()


@pytest.mark.slow
def test_in_a_fork_of_the_host(task: TaskConfig, tmp_path: Path, simulator: "subprocess.Popen[bytes]") -> None:
    """It computes what the run here does, and one that is killed is named at once."""
    plain = run_local("fedavg", task, SITES, rounds=2, seed=SEED, out=tmp_path / "plain")
    relay = Relay(simulator.pid)
    relay.start("fedavg")

    def killing(phase: str, round: int, answer: Shareable) -> Shareable:
        if round == 1:
            (host,) = (one for one in psutil.Process().children() if "medflare.flare.simulator_host" in one.cmdline())
            (fork,) = host.children()
            fork.kill()
        return answer

    work = in_this_process(get_method("fedavg"), task, {}, SEED)
    run = Relayed(tmp_path / "whole", task, Tasks(work()))
    assert run.proxy.serve(relay, run.spec).reason == "" and run.results["sites"] == plain["sites"]
    run = Relayed(tmp_path / "killed", task, Tasks(work(), site_1=killing))
    with pytest.raises(MedflareError):
        run.proxy.serve(relay, run.spec)


# -- the host's forks ----------------------------------------------------------------------------------------------------


SITE = "A"


class Fork(host._Fork):
    """One whose process is no process."""

    ended = False

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
    made = Fork(SimpleNamespace(is_alive=lambda: True), f"address of {site}", b"", mmap.mmap(-1, 1), serving.seconds)
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


def test_a_fork_gets_the_gpu_that_flare_gave_its_sites_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    relay, asked = Relay(0), list[dict[str, object]]()
    relay.folder.mkdir()

    def host() -> None:
        with requests.accept() as connection:
            asked.append(json.loads(connection.recv_bytes()))

    try:
        with Listener(relay.address, family="AF_UNIX") as requests:
            answering = threading.Thread(target=host)
            answering.start()
            with pytest.raises(MedflareError):
                relay.connected("site", {"name": "CS"})
            answering.join()
    finally:
        relay.folder.rmdir()
    assert asked == [{"kind": "site", "spec": {"name": "CS"}, "devices": "3"}]
    assert 'os.environ["CUDA_VISIBLE_DEVICES"] = args.gpu' in inspect.getsource(simulator_worker), "FLARE's name for it"


@pytest.mark.parametrize("said", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}, {"OMP_NUM_THREADS": "3"}], ids=str)
def test_threads_of_the_host_soon_sleep_unless_the_user_says_otherwise(said: dict[str, str]) -> None:
    environment = dict(said)
    sleep_soon(environment)
    spins = {} if said.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} else {"GOMP_SPINCOUNT": "1000"}
    assert environment == said | spins


def worker(site: str) -> "subprocess.Popen[bytes]":
    """A process with the command line of a site's."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "-o", "workspace", "--client", site, "--port", "1"])


def test_a_process_that_is_killed_is_dead_and_one_that_never_was_is_not() -> None:
    workers = Workers()
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "--client"])
    processes = {site: worker(site) for site in ("A", "B")}
    try:
        assert workers.dead() == set()
        processes["A"].kill()
        assert eventually(lambda: workers.dead() == {"A"}, seconds=10), "nobody has waited for it yet"
        processes["A"].wait()
        processes["C"] = worker("C")
        assert eventually(lambda: workers.dead() == {"A"}, seconds=10)
        processes["D"] = worker("A")
        assert eventually(lambda: workers.dead() == set(), seconds=10), "its next task has another process"
    finally:
        for process in (other, *processes.values()):
            process.kill()
            process.wait()
