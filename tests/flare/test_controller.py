"""A job that cannot become a run: whatever is wrong with it, it ends as failed and leaves results that say why."""

import itertools
import json
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.apis.shareable import Shareable

from flare.server import SITES, Server
from helpers.small_tasks import tiny_phantom
from medflare.cli import main
from medflare.core.errors import FederationFailed
from medflare.core.events import Event
from medflare.evaluation.results import load_results
from medflare.federation.local.exchange import LocalExchange
from medflare.federation.participant import Participant
from medflare.federation.run import Run
from medflare.flare.aggregators import SoftPullAggregator, WeightedAggregator
from medflare.flare.controller import MedflareController
from medflare.flare.server_run import Ending
from medflare.methods.catalogue import get_method
from medflare.tasks.config import load_task
from medflare.training.opening import open_site


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path, WeightedAggregator())


def no_task(server: Server) -> None:
    server.task_file.unlink()


def task_of_bytes(server: Server) -> None:
    server.task_file.write_bytes(b"\xff\xfe\x00binary")


def cut_short(server: Server) -> None:
    server.task_file.write_text(server.task_file.read_text()[:40])


def unknown_key(server: Server) -> None:
    server.task_file.write_text(json.dumps({**load_task("phantom").to_dict(), "batchsize": 4}))


def unknown_method(server: Server) -> None:
    server.aggregator = WeightedAggregator(method="fedms")


def no_aggregator(server: Server) -> None:
    server.aggregator = None


def broken_aggregator(server: Server) -> None:
    server.aggregator = SoftPullAggregator(method=["fedsm"])


@pytest.mark.parametrize(
    ("break_", "method", "task", "said"),
    [
        (no_task, "fedavg", "unknown", "task.json"),
        (task_of_bytes, "fedavg", "unknown", "task.json"),
        (cut_short, "fedavg", "unknown", "task.json"),
        (unknown_key, "fedavg", "unknown", "batchsize"),
        (unknown_method, "fedms", "phantom", "fedms"),
        (no_aggregator, "unknown", "phantom", "aggregator"),
        (broken_aggregator, "['fedsm']", "phantom", "TypeError"),
    ],
)
def test_a_job_that_is_wrong_leaves_results(
    server: Server,
    break_: Callable[[Server], None],
    method: str,
    task: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    break_(server)
    server.run(MedflareController(rounds=3, seed=7, outside=["site-2"]))
    results = load_results(server.root)  # holds the contract
    assert (results["status"], results["method"], results["task"]) == ("FAILED", method, task)
    assert said in results["reason"] and server.panics == [results["reason"]]
    assert (results["rounds"], results["seed"]) == (3, 7)
    assert {name: site["role"] for name, site in results["sites"].items()} == {"site-1": "inside", "site-2": "outside"}
    assert [event["kind"] for event in results["events"]] == ["failed"]
    assert "FAILED" in (server.root / "job" / "medflare" / "report.html").read_text()
    assert main(["results", str(server.root)]) == 1
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rounds": "three"}, "rounds"),
        ({"rounds": -1}, "rounds"),
        ({"seed": None}, "seed"),
        ({"outside": 5}, "outside"),
        ({"site_algorithm": "fedms"}, "fedms"),
        ({"aggregator_id": "mine"}, "mine"),
        ({"resume": "../other"}, "../other"),
        ({"resume": "gone"}, "gone"),
    ],
)
def test_settings_that_are_wrong_leave_results(server: Server, settings: dict[str, Any], said: str) -> None:
    server.run(MedflareController(**{"rounds": 3, "seed": 7, **settings}))
    results = load_results(server.root)
    assert results["status"] == "FAILED" and said in results["reason"]
    assert server.panics == [results["reason"]]


def test_weights_lie_where_the_servers_own_settings_say(server: Server) -> None:
    weights = {"file": "start.safetensors", "sha256": "0" * 64, "format": "safetensors"}
    phantom = load_task("phantom").to_dict()
    server.task_file.write_text(json.dumps({**phantom, "network": {**phantom["network"], "weights": weights}}))
    server.local_file.parent.mkdir()
    folder = server.root / "weights"
    folder.mkdir()
    (folder / "start.safetensors").write_bytes(b"other")
    for own, said in (
        ({"weights": str(folder)}, "start.safetensors"),
        ({"wieghts": ""}, "wieghts"),
    ):
        server.local_file.write_text(json.dumps(own))
        server.run(MedflareController(rounds=1, seed=0))
        assert said in load_results(server.root)["reason"]


class Gone:
    """The way to a host that has died."""

    def connected(self, kind: str, spec: dict[str, Any]) -> Any:
        near, far = Pipe()
        far.close()
        return near


def test_a_simulator_whose_run_has_died_says_so(server: Server) -> None:
    controller = MedflareController(rounds=3, seed=7)
    controller._relay = Gone()  # type: ignore[assignment]
    controller.communicator = WFCommServer()
    controller._events.add("late", "was late", site="site-2", round=1)
    server.run(controller)
    results = load_results(server.root)
    assert results["status"] == "FAILED" and server.panics == [results["reason"]]
    assert [event["kind"] for event in results["events"]] == ["late", "failed"], "what the run had told is not lost"


class OwnAggregator(WeightedAggregator):
    """A class that no other process knows."""


def test_ones_own_aggregator_keeps_the_run_in_its_process(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.aggregator = OwnAggregator()
    ran: list[str] = []

    def executed(run: Run, tasks: Any) -> Ending:
        ran.append(run.method.name)
        return Ending("", "")

    monkeypatch.setattr("medflare.flare.controller.executed", executed)
    controller = MedflareController(rounds=1, seed=0)
    controller._relay = Gone()  # type: ignore[assignment]
    server.run(controller)
    assert ran == ["fedavg"] and not server.panics


def test_answers_that_nobody_waits_for_become_so_many_events_and_no_more(server: Server) -> None:
    """Their number and the task's name are a site's own word, and events go into every record of the run."""
    controller, noted = MedflareController(rounds=1, seed=0), list[Event]()
    controller._note = noted.append
    for _ in range(1000):
        controller.process_result_of_unknown_task(SimpleNamespace(name="site-1"), "train" * 10**5, "1", Shareable(), server.context())
    controller.process_result_of_unknown_task(SimpleNamespace(name="site-2"), "train", "1", Shareable(), server.context())
    assert len(noted) == 21 and max(len(event["message"]) for event in noted) < 200


def test_flares_monitor_of_tasks_is_made_to_last() -> None:
    controller = MedflareController(rounds=1, seed=0)
    controller.set_communicator(WFCommServer())
    controller.start_controller(FLContext())
    controller.communicator._client_task_map.pop("unknown")


class Failing(WeightedAggregator):
    """A class of one's own, so that the run stays in this process; its formula fails in its second step."""

    def __init__(self, fails: bool):
        super().__init__()
        formula: Any = self.aggregation
        shared, calls = formula.shared, itertools.count(1)

        def once(*arguments: Any) -> Any:
            if fails and next(calls) == 2:
                raise FederationFailed("the machine is full")
            return shared(*arguments)

        vars(formula).update(shared=once)


def test_a_completed_job_leaves_no_checkpoint_of_itself_or_of_the_one_that_it_took_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, method = load_task(tiny_phantom(size=[16, 16])), get_method("fedavg")
    participants: dict[str, Participant] = {}

    def opened(site: str) -> Participant:
        made = Participant(site, lambda role: open_site(site, task, seed=0, role=role), method, {})
        return participants.setdefault(site, made)

    monkeypatch.setattr("medflare.flare.messages.MessageExchange", lambda *given: LocalExchange(SITES, opened))
    kept = tmp_path / "medflare"
    (kept / "another").mkdir(parents=True)
    left = []
    for job, resume in (("one", ""), ("two", "one")):
        server = Server(tmp_path, Failing(fails=job == "one"), task, job)
        server.run(MedflareController(rounds=4, seed=0, resume=resume))
        left.append(({path.name for path in kept.iterdir()} - {"another"}, server.panics))
    assert left == [({"one"}, ["the machine is full"]), (set(), [])]
    assert (kept / "another").exists(), "of a job that nobody has taken up yet"
