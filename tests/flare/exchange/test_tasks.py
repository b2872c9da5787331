"""One step under FLARE: whatever the sites do, the wait ends, and every missing answer has a reason."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import Task, TaskCompletionStatus
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.impl.wf_comm_server import WFCommServer
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.app_constant import AppConstants

from medflare.core.backing import Backing
from medflare.core.errors import Aborted, ConfigError
from medflare.core.message import Message
from medflare.federation.exchange import Reply
from medflare.flare.exchange import tasks as steps
from medflare.flare.exchange import watch
from medflare.flare.exchange.messages import MessageExchange
from medflare.flare.exchange.tasks import TaskExchange, survive_resends
from medflare.flare.exchange.watch import Watch
from medflare.flare.exchange.wire import error_reply, to_message, to_shareable
from medflare.methods.base import Step
from waiting import eventually

STEP = Step("train", 3)
ENROLMENT = Step("enrol", 0)
LONG = 60.0  # seconds that nothing takes, also on a busy machine
Behaviour = Callable[[Any], Shareable | None]


class FakeController:
    """Hands every task to the behaviour of its site, in a thread, as FLARE's own threads would."""

    def __init__(self, **behaviours: Behaviour):
        self.behaviours = behaviours
        self.sent: dict[str, Any] = {}
        self.cancelled: dict[str, TaskCompletionStatus] = {}
        self.disconnected: set[str] = set()

    def send(self, task: Any, fl_ctx: FLContext, targets: list[str]) -> None:
        (site,) = targets
        self.sent[site] = task
        threading.Thread(target=self._play, args=(site, task), daemon=True).start()

    def _play(self, site: str, task: Any) -> None:
        client_task = SimpleNamespace(client=SimpleNamespace(name=site), task=task, result=None)
        behaviour = self.behaviours[site]
        if behaviour is never_fetches:
            return
        task.after_task_sent_cb(client_task=client_task, fl_ctx=None)
        client_task.result = behaviour(task)
        if client_task.result is not None:
            task.result_received_cb(client_task=client_task, fl_ctx=None)

    def cancel_task(self, task: Any, status: TaskCompletionStatus, fl_ctx: FLContext) -> None:
        self.cancelled[next(site for site, sent in self.sent.items() if sent is task)] = status

    def get_client_disconnect_time(self, site: str) -> float | None:
        return 1.0 if site in self.disconnected else None


def answers(**facts: Any) -> Behaviour:
    def behave(task: Any) -> Shareable:
        model = to_message(task.data).states["model"]
        return to_shareable(Message({"model": model}, facts))

    return behave


def never_fetches(task: Any) -> None: ...


def never_answers(task: Any) -> None: ...


def later(seconds: float, behaviour: Behaviour) -> Behaviour:
    def behave(task: Any) -> Shareable | None:
        time.sleep(seconds)
        return behaviour(task)

    return behave


def received(reply: Reply) -> Message:
    """The message of a reply that has one."""
    assert reply.message is not None, reply.problem
    return reply.message


def tasks(controller: FakeController, **settings: Any) -> TaskExchange:
    options = {"step_timeout": 0.0, "enrol_timeout": 0.0, "stop_reason": lambda: "asked to", "say": lambda line: None}
    options["watch"] = Watch(settings.pop("silence", 60.0), settings.pop("dead", None))
    options |= settings
    return TaskExchange(controller, FLContext(), Signal(), members=lambda: list(controller.behaviours), **options)  # type: ignore[arg-type]


class Carrier(MessageExchange):
    """The exchange that the schedule has, and the tasks behind it."""

    def __init__(self, tasks: TaskExchange, outside: tuple[str, ...]):
        super().__init__(tasks, outside)
        self.tasks = tasks


def exchange(controller: FakeController, *, outside: tuple[str, ...] = (), **settings: Any) -> Carrier:
    return Carrier(tasks(controller, **settings), outside)


def test_answers_to_large_models_lie_in_files(tmp_path: Path) -> None:
    controller = FakeController(CS=answers(n_samples=3), DU=later(0.05, answers(n_samples=4)), FG=lambda task: error_reply("no images"))
    outgoing = {site: Message({"model": {"w": torch.full((30_000,), float(place))}}) for place, site in enumerate(("CS", "DU", "FG"))}
    with Backing(tmp_path).used():
        replies = exchange(controller)(STEP, outgoing)
    for site in ("CS", "DU"):
        found = received(replies[site]).states["model"]["w"]
        assert found.is_shared() and torch.equal(found, outgoing[site].states["model"]["w"])
    assert replies["FG"].problem == "no images" and replies["DU"].seconds >= 0.05


def asked(controller: FakeController) -> dict[str, Message]:
    return {site: Message({"model": {"w": torch.tensor([float(number)])}}) for number, site in enumerate(sorted(controller.behaviours))}


def test_every_site_gets_its_own_message_and_its_answer_comes_back() -> None:
    controller = FakeController(CS=answers(n_samples=3), DU=answers(n_samples=4))
    replies = exchange(controller)(STEP, asked(controller))
    assert {site: received(reply).facts["n_samples"] for site, reply in replies.items()} == {"CS": 3, "DU": 4}
    assert {site: received(reply).states["model"]["w"].item() for site, reply in replies.items()} == {"CS": 0.0, "DU": 1.0}
    assert {task.name for task in controller.sent.values()} == {"train"}
    assert {task.data.get_header(AppConstants.CURRENT_ROUND) for task in controller.sent.values()} == {3}
    assert not controller.cancelled


def test_failed_and_strange_answers_say_what_they_are() -> None:
    strange = DXO(DataKind.WEIGHTS, {"w": torch.ones(1)}).to_shareable()
    controller = FakeController(
        CS=lambda task: error_reply("mask 3.png has another size"),
        DU=lambda task: make_reply(ReturnCode.TASK_ABORTED),
        FG=lambda task: strange,
    )
    replies = exchange(controller)(STEP, asked(controller))
    assert (replies["CS"].kind, replies["CS"].problem) == ("failed", "mask 3.png has another size")
    assert (replies["DU"].kind, replies["DU"].problem) == ("failed", "the task ended with FLARE's return code TASK_ABORTED")
    assert replies["FG"].kind == "rejected"


def test_a_step_is_closed_in_time() -> None:
    controller = FakeController(CS=answers(), DU=never_answers, FG=never_fetches)
    replies = exchange(controller, step_timeout=1.5)(STEP, asked(controller))
    assert replies["CS"].message is not None
    assert (replies["DU"].kind, replies["DU"].problem) == ("late", "'train' of round 3 was closed after 1.5 s; the site was still at work")
    assert replies["FG"].problem.endswith("the site had not fetched its task")
    assert set(controller.cancelled) == {"DU", "FG"}


def test_enrolment_has_a_time_of_its_own() -> None:
    controller = FakeController(CS=later(0.5, answers()))
    assert exchange(controller, step_timeout=0.1)(ENROLMENT, asked(controller))["CS"].message is not None


def test_who_is_late_for_enrolment_is_asked_again_when_it_asks_for_work() -> None:
    controller = FakeController(CS=answers(), DU=never_answers, FG=never_fetches)
    carrier = exchange(controller, enrol_timeout=0.3)
    replies = carrier(ENROLMENT, asked(controller))
    assert replies["CS"].message is not None
    assert (replies["DU"].kind, replies["DU"].problem) == ("late", "'enrol' of round 0 was closed after 0.3 s; the site was still at work")
    assert replies["FG"].problem.endswith("the site had not fetched its task")
    carrier.tasks.watch.sign_of_life("DU")
    assert carrier.present(0) == ["CS"], "it is still reading its images: the others do not wait for it at every step"
    carrier.tasks.wait_for_task("DU", 0.0)
    assert carrier.present(1) == ["CS", "DU"]


def test_nobody_waits_long_for_a_site_that_joins_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads its images while the others go on, and is asked again when it asks for work."""
    monkeypatch.setattr(steps, "_NEWCOMER", 0.3)
    controller = FakeController(CS=answers(), DU=later(1.0, answers()), FG=never_answers)
    carrier = exchange(controller, enrol_timeout=LONG)
    controller.behaviours["CS"] = later(0.5, answers())
    sent = asked(controller)
    assert carrier(ENROLMENT, {"CS": sent.pop("CS")})["CS"].message is not None, "at the beginning there is time"
    late = carrier(ENROLMENT, sent)
    assert {reply.kind for reply in late.values()} == {"late"} and "was closed after 0.3 s" in late["DU"].problem
    assert carrier.present(1) == ["CS"]
    carrier.tasks.wait_for_task("DU", 0.0)
    assert carrier.present(1) == ["CS", "DU"]


def test_a_site_that_lives_but_works_far_longer_than_the_others_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_SLOW", 0.3)
    monkeypatch.setattr(steps, "_TIMES", 0.01)
    controller, said = FakeController(CS=answers(), DU=later(1.5, answers()), FG=never_fetches), list[str]()
    assert received(exchange(controller, step_timeout=2.5, say=said.append)(STEP, asked(controller))["DU"])
    assert 1 <= len(said) <= 3  # after .3 s, and whenever that has doubled
    assert all(re.match(r"slow: DU: at work on 'train' of round 3 for \d s, the others took 0 s at most; a job", line) for line in said)


def test_a_site_whose_polls_are_refused_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preflight check of a site that runs voids its token: it asks for work for ever, and FLARE gives it none."""
    monkeypatch.setattr(watch, "_REFUSED", 0.3)
    controller = FakeController(CS=answers(), DU=never_fetches)
    carrier = exchange(controller)
    over = threading.Event()

    def knock() -> None:
        while not over.wait(0.02):
            carrier.tasks.wait_for_task("DU", 0.02)

    knocking = threading.Thread(target=knock, daemon=True)
    knocking.start()
    reply = carrier(ENROLMENT, asked(controller))["DU"]
    assert reply.kind == "missing" and "registration" in reply.problem
    time.sleep(0.1)
    assert carrier.present(1) == ["CS"], "its questions are no sign of life, also when no task lies there"
    over.set()
    knocking.join()


def test_a_site_that_was_served_before_is_not_taken_for_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_REFUSED", 0.0)
    controller = FakeController(CS=answers())
    carrier = exchange(controller, step_timeout=0.3)
    carrier(STEP, asked(controller))
    controller.behaviours["CS"] = never_fetches

    def knock() -> None:
        for _ in range(9):
            carrier.tasks.wait_for_task("CS", 0.0)

    threading.Timer(0.1, knock).start()
    assert carrier(STEP, asked(controller))["CS"].kind == "late"


def test_a_silent_site_is_given_up_until_it_is_heard_of() -> None:
    controller = FakeController(CS=answers(), DU=never_answers)
    carrier = exchange(controller, silence=1.5)
    replies = carrier(STEP, asked(controller))
    assert replies["DU"].kind == "missing"
    assert "no sign of life" in replies["DU"].problem
    assert carrier.present(4) == ["CS"]
    carrier.tasks.watch.sign_of_life("DU")
    assert carrier.present(5) == ["CS", "DU"]


def test_a_pulse_keeps_a_site_in_the_step() -> None:
    def slow(task: Any) -> Shareable:
        for _ in range(20):
            time.sleep(0.1)
            carrier.tasks.watch.sign_of_life("CS")
        return answers()(task)

    controller = FakeController(CS=slow)
    carrier = exchange(controller, silence=1.5)
    assert carrier(STEP, asked(controller))["CS"].message is not None


def test_a_site_may_wait_for_its_turn_while_another_one_works() -> None:
    """FLARE's simulator with one thread: the second site's process starts when the first one's is done."""

    def first(task: Any) -> Shareable:
        for _ in range(20):
            time.sleep(0.1)
            carrier.tasks.watch.sign_of_life("CS")
        return answers()(task)

    def second(task: Any) -> Shareable:
        return answers()(task)

    controller = FakeController(CS=first, DU=never_fetches)
    carrier = exchange(controller, silence=1.5)

    def its_turn() -> None:
        controller.behaviours["DU"] = second
        controller._play("DU", controller.sent["DU"])

    threading.Timer(2.2, its_turn).start()
    replies = carrier(STEP, asked(controller))
    assert replies["DU"].message is not None


def test_a_site_that_flare_has_lost_is_not_waited_for() -> None:
    controller = FakeController(CS=answers(), DU=never_fetches)
    controller.disconnected.add("DU")
    assert exchange(controller)(STEP, asked(controller))["DU"].kind == "missing"


def test_a_site_whose_process_died_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_PROCESSES", 0.05)
    controller = FakeController(CS=later(0.3, answers()), DU=never_answers, FG=never_fetches)
    carrier = exchange(controller, step_timeout=1.5, silence=LONG, dead=lambda: {"DU", "FG"})
    replies = carrier(STEP, asked(controller))
    assert replies["CS"].message is not None
    assert replies["DU"].kind == "missing" and replies["DU"].problem.startswith("its process died; 'train' of round 3 goes on")
    assert replies["FG"].kind == "late", "with fewer threads than sites it has no process until its turn comes"
    assert carrier.present(4) == ["CS", "FG"]
    controller.behaviours["DU"] = never_fetches
    carrier.tasks.step_timeout = LONG
    started = time.monotonic()
    assert carrier(Step("deliver", 4), {"DU": Message({})})["DU"].kind == "missing", "who is dead is not waited for a second time"
    assert time.monotonic() - started < LONG / 2
    carrier.tasks.watch.sign_of_life("DU")
    assert "DU" in carrier.present(5)


def test_abort_ends_the_wait() -> None:
    controller = FakeController(CS=never_answers)
    carrier = exchange(controller)
    threading.Timer(0.2, carrier.tasks.abort_signal.trigger, args=(True,)).start()
    with pytest.raises(Aborted, match="asked to"):
        carrier(STEP, asked(controller))
    assert set(controller.cancelled) == {"CS"}


def test_an_answer_to_an_earlier_step_is_not_taken_for_a_later_one() -> None:
    controller = FakeController(CS=never_answers)
    carrier = exchange(controller, step_timeout=0.2)
    carrier(STEP, asked(controller))
    old = controller.sent["CS"]
    controller.behaviours["CS"] = later(0.3, answers(step=4))
    late = SimpleNamespace(client=SimpleNamespace(name="CS"), task=old, result=answers(step=3)(old))
    threading.Timer(0.1, lambda: old.result_received_cb(client_task=late, fl_ctx=None)).start()
    carrier.tasks.step_timeout = 0.0
    reply = carrier(Step("train", 4), asked(controller))["CS"]
    assert received(reply).facts == {"step": 4}


def test_a_question_for_work_is_answered_when_there_is_some() -> None:
    controller = FakeController(CS=never_fetches)
    carrier = exchange(controller, step_timeout=1.0)
    started = time.monotonic()
    carrier.tasks.wait_for_task("CS", 0.2)
    assert time.monotonic() - started > 0.15
    threading.Timer(0.1, carrier, args=(STEP, asked(controller))).start()
    started = time.monotonic()
    carrier.tasks.wait_for_task("CS", LONG)
    assert time.monotonic() - started < LONG / 2


def test_nobody_waits_for_work_after_the_end() -> None:
    carrier = exchange(FakeController(CS=never_fetches))
    threading.Timer(0.1, carrier.tasks.close).start()
    started = time.monotonic()
    carrier.tasks.wait_for_task("CS", LONG)
    assert time.monotonic() - started < LONG / 2


def test_an_unknown_outside_site_is_named() -> None:
    controller = FakeController(CS=answers(), DU=answers())
    with pytest.raises(ConfigError, match="unknown outside site 'HT'; this job runs at CS, DU"):
        exchange(controller, outside=("HT",)).present(0)


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
def test_a_task_that_a_site_asks_for_twice_is_forgotten_like_any_other() -> None:
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
                assert [len(task.client_tasks) for task in communicator._tasks] == [2, 1], "FLARE notes it once: no need to survive that"
            for site, number in given.items():
                communicator.process_submission(Client(site, "1"), "train", number, Shareable(), fl_ctx)
            assert eventually(lambda: not communicator._tasks, seconds=20)
        assert communicator._task_monitor.is_alive() and not communicator._client_task_map
