"""The controller: a job that cannot become a run leaves results that say why, and the job's aggregator makes the next model."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.fl_constant import ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.apis.shareable import Shareable

from e2e.simulation import edit
from flare.server import Server, in_this_process
from flare.test_task_exchange import FakeController, exchange, never_fetches
from helpers.small_tasks import tiny_phantom
from medflare.cli import main
from medflare.core.errors import FederationFailed
from medflare.core.states import StateDict
from medflare.evaluation.results import load_results
from medflare.flare.aggregators import AGGREGATORS, MethodAggregator, WeightedAggregator
from medflare.flare.controller import MedflareController
from medflare.flare.liveness import ALIVE, LONG_POLL, WORK
from medflare.methods.aggregation import Aggregation
from medflare.methods.catalogue import get_method
from medflare.tasks.config import TaskConfig, load_task

ROUNDS = 1
SEED = 3
# The best round may be the one before anything was aggregated.
LAST: dict[str, Any] = {"server": {"selection": "last"}}


@pytest.fixture(scope="module")
def task() -> TaskConfig:
    return load_task(tiny_phantom(size=[16, 16]))


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path, WeightedAggregator())


@pytest.mark.parametrize(
    ("spoil", "method", "task", "token"),
    [
        (lambda server: server.task_file.unlink(), "fedavg", "unknown", "task.json"),
        (
            lambda server: server.task_file.write_text('{"name": "ph'),
            "fedavg",
            "unknown",
            "task.json",
        ),
        (
            lambda server: edit(server.task_file, lambda task: task.update(batchsize=4)),
            "fedavg",
            "unknown",
            "batchsize",
        ),
        (
            lambda server: edit(
                server.task_file,
                lambda task: task.update(network={"name": "unet", "channels": [20_000, 40_000]}),
            ),
            "fedavg",
            "phantom",
            "bounds.model_bytes",
        ),
        (
            lambda server: setattr(server, "aggregator", WeightedAggregator(method="fedms")),
            "fedms",
            "phantom",
            "fedms",
        ),
        (lambda server: setattr(server, "aggregator", None), "unknown", "phantom", "aggregator"),
    ],
)
def test_an_invalid_job_leaves_results(
    server: Server,
    spoil: Callable[[Server], object],
    method: str,
    task: str,
    token: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(server)
    server.run(MedflareController(rounds=3, seed=7, outside=["site-2"]))
    results = load_results(server.root)  # holds the contract
    assert (results["status"], results["method"], results["task"]) == ("FAILED", method, task)
    assert token in results["reason"] and server.panics == [results["reason"]]
    assert (results["rounds"], results["seed"]) == (3, 7)
    assert {name: site["role"] for name, site in results["sites"].items()} == {
        "site-1": "inside",
        "site-2": "outside",
    }
    assert [event["kind"] for event in results["events"]] == ["failed"]
    assert "FAILED" in (server.root / "job" / "medflare" / "report.html").read_text()
    assert main(["results", str(server.root)]) == 1
    assert token in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "token"),
    [
        ({"rounds": "three"}, "rounds"),
        ({"site_algorithm": "fedms"}, "fedms"),
        ({"resume": "../other"}, "../other"),
        ({"resume": "gone"}, "gone"),
    ],
)
def test_invalid_settings_leave_results(
    server: Server, settings: dict[str, Any], token: str
) -> None:
    server.run(MedflareController(**{"rounds": 3, "seed": 7, **settings}))
    results = load_results(server.root)
    assert (
        results["status"] == "FAILED"
        and token in results["reason"]
        and server.panics == [results["reason"]]
    )


def test_a_bug_in_the_run_is_a_failure_with_its_reason(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr("medflare.federation.schedule.Federation.run", broken)
    server.run(MedflareController(rounds=1, seed=0))
    assert (
        server.panics == [load_results(server.root)["reason"]] == ["ZeroDivisionError: by nothing"]
    )


def test_heartbeats_are_noted_and_requests_for_work_are_held() -> None:
    controller = MedflareController(rounds=1, seed=0)
    sites = FakeController(CS=never_fetches)
    fl_ctx: Any = SimpleNamespace(
        get_peer_context=lambda: SimpleNamespace(get_identity_name=lambda: "CS")
    )
    replies = [controller._on_message(topic, Shareable(), fl_ctx) for topic in (ALIVE, WORK)]
    for reply in replies:
        assert reply.get_return_code() == ReturnCode.OK, "before the run begins"
    controller._exchange = exchange(sites)
    heard = controller._exchange.heard
    controller._on_message(ALIVE, Shareable(), fl_ctx)
    first = heard["CS"]
    controller._on_message(WORK, Shareable(), fl_ctx)
    assert heard["CS"] > first and time.monotonic() - first >= LONG_POLL
    fl_ctx.get_peer_context = lambda: SimpleNamespace(get_identity_name=lambda: "nobody")
    asked = time.monotonic()
    controller._on_message(WORK, Shareable(), fl_ctx)
    assert "nobody" not in heard and time.monotonic() - asked < LONG_POLL


def test_late_replies_become_a_limited_number_of_events(server: Server) -> None:
    """Their number and the task's name are up to the site, and events go into every record of the run."""
    controller = MedflareController(rounds=1, seed=0)
    for _ in range(1000):
        controller.process_result_of_unknown_task(
            SimpleNamespace(name="site-1"), "train" * 10**5, "1", Shareable(), server.context()
        )
    controller.process_result_of_unknown_task(
        SimpleNamespace(name="site-2"), "train", "1", Shareable(), server.context()
    )
    assert (
        len(controller._events) == 21
        and max(len(event["message"]) for event in controller._events) < 200
    )


def test_the_start_of_the_controller_patches_flares_task_monitor() -> None:
    """The monitor removes a task from this map once for each time that a site fetched it.

    FLARE's map raises KeyError the second time, which ends the monitor's thread. Later tasks then
    stay in memory, and a dead site is not noticed (test_flare_patches.py has the whole path).
    """
    controller = MedflareController(rounds=1, seed=0)
    communicator = WFCommServer()
    controller.set_communicator(communicator)
    communicator._client_task_map["fetched"] = "a task"
    with pytest.raises(KeyError):
        communicator._client_task_map.pop("removed before")
    controller.start_controller(FLContext())
    assert communicator._client_task_map.pop("removed before") is None
    assert communicator._client_task_map.pop("fetched") == "a task", "open tasks are still there"


class Failing(WeightedAggregator):
    """Its aggregation fails in its second step."""

    def __init__(self, fails: bool):
        super().__init__()
        formula: Any = self.aggregation
        shared = formula.shared
        calls = itertools.count(1)

        def once(*arguments: Any) -> Any:
            if fails and next(calls) == 2:
                raise FederationFailed("the machine is full")
            return shared(*arguments)

        vars(formula).update(shared=once)


def test_a_completed_job_leaves_no_checkpoint_of_itself_or_of_the_one_that_it_resumed(
    task: TaskConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = in_this_process(get_method("fedavg"), task, {}, 0)()
    monkeypatch.setattr(
        "medflare.flare.task_exchange.TaskExchange", lambda *arguments, **options: sites
    )
    kept = tmp_path / "medflare"
    (kept / "another").mkdir(parents=True)
    left = []
    for job, resume in (("one", ""), ("two", "one")):
        server = Server(tmp_path, Failing(fails=job == "one"), task, job)
        server.run(MedflareController(rounds=4, seed=0, resume=resume))
        left.append(({path.name for path in kept.iterdir()} - {"another"}, server.panics))
    assert left == [({"one"}, ["the machine is full"]), (set(), [])]
    assert (kept / "another").exists(), "of a job that nobody has resumed yet"


def test_a_lead_resumes_no_job_of_another_lead(
    task: TaskConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would get its models, and by the differences that are named all its settings."""
    sites = in_this_process(get_method("fedavg"), task, {}, 0)()
    monkeypatch.setattr(
        "medflare.flare.task_exchange.TaskExchange", lambda *arguments, **options: sites
    )
    reasons = []
    for job, resume, lead, rounds in (
        ("one", "", "ana@a.org", 4),
        ("two", "one", "ben@b.org", 4),
        ("three", "one", "ben@b.org", 5),
        ("four", "one", "ana@a.org", 4),
    ):
        server = Server(tmp_path, Failing(fails=job == "one"), task, job)
        server.properties[ReservedKey.JOB_META] = {"submitter_name": lead}
        server.run(MedflareController(rounds=rounds, seed=0, resume=resume))
        reasons += server.panics
    refusal = "the checkpoint of {} has lead = 'ana@a.org', this run 'ben@b.org'; use the same"
    assert reasons == ["the machine is full", refusal.format("two"), refusal.format("three")]


# -- the aggregator of a job ------------------------------------------------------------------------------------------------


def served(
    folder: Path, aggregator: MethodAggregator, task: TaskConfig, monkeypatch: pytest.MonkeyPatch
) -> dict[str, bytes]:
    """The models, by path, of a run that the controller makes with this component."""
    exchange = in_this_process(get_method(aggregator.method_name), task, LAST, SEED)
    monkeypatch.setattr("medflare.flare.task_exchange.TaskExchange", exchange)
    server = Server(folder, aggregator, task)
    server.run(MedflareController(rounds=ROUNDS, seed=SEED))
    assert load_results(folder)["status"] == "COMPLETED", server.panics
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.glob("job/medflare/models/**/model.safetensors")
    }


def doctor(aggregation: Aggregation[Any]) -> None:
    """Let the aggregation return doubled models."""
    shared = aggregation.shared
    personal = aggregation.personal

    def doubled(state: StateDict) -> StateDict:
        return {name: tensor * 2 for name, tensor in state.items()}

    def doubled_personal(*arguments: Any) -> dict[str, StateDict]:
        return {site: doubled(state) for site, state in personal(*arguments).items()}

    vars(aggregation).update(
        shared=lambda *arguments: doubled(shared(*arguments)), personal=doubled_personal
    )


@pytest.mark.parametrize("method", AGGREGATORS)
def test_the_component_makes_the_next_model(
    method: str, task: TaskConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = AGGREGATORS[method](LAST)
    wrong = AGGREGATORS[method](LAST)
    doctor(wrong.aggregation)
    models = served(tmp_path / "right", right, task, monkeypatch)
    doctored = served(tmp_path / "wrong", wrong, task, monkeypatch)
    assert models and doctored.keys() == models.keys() and doctored != models


def test_an_aggregator_takes_every_spelling_of_its_hyper_parameters() -> None:
    for spelling in (
        {"server.lam": 0.3},
        {"server": {"lam": 0.3}},
        {"site": {"personalization": "softpull"}, "lam": 0.3},
    ):
        assert MethodAggregator(spelling, "fedsm").aggregation.hyper.lam == 0.3


def test_hyper_parameters_of_two_methods(task: TaskConfig, tmp_path: Path) -> None:
    """`mu` is MOON's: the controller, which knows both algorithms, sorts them before the aggregation is made."""
    aggregation = MethodAggregator(
        {"site": {"mu": 0.7}, "server": {"consistency": False}}, "grace"
    ).aggregation
    assert not aggregation.hyper.consistency
    server = Server(tmp_path, MethodAggregator({"mu": 0.7, "consistency": False}, "grace"), task)
    controller = MedflareController(rounds=1, seed=0, site_algorithm="moon")
    controller._engine = server
    run = controller._run(server.context())
    assert run.aggregation is not None and run.aggregation is server.aggregator.aggregation
    assert not run.aggregation.hyper.consistency and run.hyper["site"]["mu"] == 0.7
