"""A run outside FLARE's process: it is the run of the plain loop, tells all it would have told, and whatever ends it has a reason."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from flare.server import SITES, Server, in_this_process
from medflare.core.errors import Aborted, MedflareError
from medflare.core.events import DOUBTS, EventLog
from medflare.evaluation.results import load_results
from medflare.federation.local.loop import run_local
from medflare.federation.settings import PHASES_OF_ALL
from medflare.flare.aggregators import MethodAggregator
from medflare.flare.exchange.progress import Journal, Progress
from medflare.flare.exchange.serving import ServerSpec
from medflare.flare.exchange.tasks import Answer, Read, TaskExchange
from medflare.flare.exchange.watch import Watch
from medflare.flare.exchange.wire import error_reply, register_decomposers, to_message, to_shareable
from medflare.flare.simulator.office import Office
from medflare.flare.simulator.relay import Relay
from medflare.flare.simulator.running import RunSeat
from medflare.methods.base import Step
from medflare.methods.catalogue import get_method
from medflare.tasks.config import TaskConfig, load_task
from small import tiny_phantom

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
        options: dict[str, Any] = {"stop_reason": str, "say": str, "step_timeout": 0.0, "enrol_timeout": 0.0, "watch": Watch(60.0)}
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
    """A run in a thread, and the office that serves it; stands in for the way to the host, too."""

    def __init__(self, folder: Path, task: TaskConfig, tasks: TaskExchange, method: str = "fedavg", **settings: Any):
        server = Server(folder, MethodAggregator(method=method), task)
        self.spec = ServerSpec.of(server.context(), server.aggregator, None, {**SETTINGS, **settings}, SITES)
        self.events, self.steps = EventLog(), list[Any]()
        self.progress = Progress(self.events)
        self.office = Office(tasks, Journal(FLComponent(), FLContext(), self.events, self.progress, self.steps.append))

    def connected(self, kind: str, spec: dict[str, Any]) -> Connection:
        assert kind == "server"
        near, far = Pipe()
        seat = RunSeat(json.loads(json.dumps(spec)))

        def act() -> None:
            with far:
                seat.answer(far)

        threading.Thread(target=act, daemon=True).start()
        return near

    def serve(self) -> Any:
        return self.office.serve(self, self.spec)  # type: ignore[arg-type]

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
    """A site whose answers are no messages is the run's to note, a late answer the office's."""

    def strange(phase: str, round: int, answer: Shareable) -> Shareable:
        if phase == "train" and round == 0:
            run.office.note({"kind": "late", "message": "an answer came late", "site": "site-2"})
            return DXO(DataKind.WEIGHTS, {"w": 1.0}).to_shareable()
        return error_reply("no images") if phase == "train" else answer

    run = Relayed(tmp_path, task, Tasks(in_this_process(get_method("fedavg"), task, {}, SEED)(), site_1=strange), min_sites=1)
    assert run.serve().reason == ""
    assert run.events.to_list() == run.results["events"]
    noted = [(event["kind"], event["site"]) for event in run.events if event["kind"] not in DOUBTS]
    assert noted == [("late", "site-2"), ("rejected", "site-1"), ("failed", "site-1")]
    assert len([line for line in run.progress.to_dict(None)["lines"] if line.startswith(("late", "rejected", "failed"))]) == len(noted)


@pytest.mark.parametrize(
    ("settings", "said"), [({"rounds": "three"}, "rounds must be a whole number"), ({"outside": ["HT"]}, "unknown outside site 'HT'")]
)
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
    with pytest.raises(Aborted, match="the user said so"):
        run.serve()
    assert run.results["reason"] == "aborted: the user said so"


def test_what_nobody_foresaw_is_a_failure(task: TaskConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr("medflare.federation.schedule.Federation.run", broken)
    run = Relayed(tmp_path, task, Tasks(None))
    assert run.serve().reason == run.results["reason"] == "ZeroDivisionError: by nothing"


def test_a_run_that_dies_is_named(task: TaskConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunSeat, "answer", lambda seat, connection: None)
    run = Relayed(tmp_path, task, Tasks(None))
    with pytest.raises(MedflareError, match="the process in which the simulator's server computed died"):
        run.serve()


@pytest.mark.slow
def test_in_a_fork_of_the_host(task: TaskConfig, tmp_path: Path, simulator: "subprocess.Popen[bytes]") -> None:
    """It computes what the run here does, and one that is killed is named at once."""
    plain = run_local("fedavg", task, SITES, rounds=2, seed=SEED, out=tmp_path / "plain")
    relay = Relay(simulator.pid)
    relay.start("fedavg")

    def killing(phase: str, round: int, answer: Shareable) -> Shareable:
        if round == 1:
            (host,) = (one for one in psutil.Process().children() if "medflare.flare.simulator.host" in one.cmdline())
            (fork,) = host.children()
            fork.kill()
        return answer

    work = in_this_process(get_method("fedavg"), task, {}, SEED)
    run = Relayed(tmp_path / "whole", task, Tasks(work()))
    assert run.office.serve(relay, run.spec).reason == "" and run.results["sites"] == plain["sites"]
    run = Relayed(tmp_path / "killed", task, Tasks(work(), site_1=killing))
    with pytest.raises(MedflareError, match="the process in which the simulator's server computed died"):
        run.office.serve(relay, run.spec)


def test_a_workflow_ends_without_torch() -> None:
    """FLARE imports it for its own clean-up; a FLARE that no longer does needs none of this."""
    code = """
import sys
from types import SimpleNamespace
from nvflare.apis.impl.wf_comm_server import WFCommServer
from medflare.flare.simulator.lightness import spare_torch
from medflare.flare.simulator.office import Office
communicator = WFCommServer()
spared = sys.argv[1] == "spared"
if spared:
    spare_torch(communicator)
communicator.finalize_run(SimpleNamespace())
print("torch" in sys.modules)
"""
    for how, imported in (("spared", "False"), ("as it is", "True")):
        done = subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == imported, how
