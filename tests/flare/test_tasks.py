"""One step under FLARE: whatever the sites do, the wait ends, and every missing answer has a reason."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nvflare.apis.controller_spec import TaskCompletionStatus
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.app_constant import AppConstants

from medflare.core.backing import Backing
from medflare.core.errors import Aborted, ConfigError
from medflare.core.message import Message
from medflare.federation.exchange import Reply
from medflare.flare import liveness
from medflare.flare import tasks as steps
from medflare.flare.liveness import Liveness
from medflare.flare.messages import MessageExchange, error_reply, to_message, to_shareable
from medflare.flare.tasks import Listener, TaskExchange
from medflare.methods.base import Step

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


def answers(**meta: Any) -> Behaviour:
    def behave(task: Any) -> Shareable:
        model = to_message(task.data).states["model"]
        return to_shareable(Message({"model": model}, meta))

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
    options["liveness"] = Liveness(settings.pop("heartbeat_timeout", 60.0), settings.pop("dead", None))
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


def test_the_listener_takes_heartbeats_and_holds_questions_for_work() -> None:
    controller, listener = FakeController(CS=never_fetches), Listener()
    context: Any = SimpleNamespace(get_peer_context=lambda: SimpleNamespace(get_identity_name=lambda: "CS"))
    for handler in (listener.alive, listener.work):
        assert handler("", Shareable(), context).get_return_code() == ReturnCode.OK, "before the run begins"
    listener.exchange = tasks(controller)
    listener.alive("", Shareable(), context)
    heard = listener.exchange.liveness.heard.pop("CS")
    listener.work("", Shareable(), context)
    assert listener.exchange.liveness.heard["CS"] > heard and time.monotonic() - heard >= steps.PATIENCE


def asked(controller: FakeController) -> dict[str, Message]:
    return {site: Message({"model": {"w": torch.tensor([float(number)])}}) for number, site in enumerate(sorted(controller.behaviours))}


def test_every_site_gets_its_own_message_and_its_answer_comes_back() -> None:
    controller = FakeController(CS=answers(n_samples=3), DU=answers(n_samples=4))
    replies = exchange(controller)(STEP, asked(controller))
    assert {site: received(reply).meta["n_samples"] for site, reply in replies.items()} == {"CS": 3, "DU": 4}
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
    replies = exchange(controller, step_timeout=0.5)(STEP, asked(controller))
    assert replies["CS"].message is not None
    assert {replies[site].kind for site in ("DU", "FG")} == {"late"}
    assert set(controller.cancelled) == {"DU", "FG"}


def test_enrolment_has_a_time_of_its_own() -> None:
    controller = FakeController(CS=later(0.5, answers()))
    assert exchange(controller, step_timeout=0.1)(ENROLMENT, asked(controller))["CS"].message is not None


def test_who_is_late_for_enrolment_is_asked_again_when_it_asks_for_work() -> None:
    controller = FakeController(CS=answers(), DU=never_answers, FG=never_fetches)
    carrier = exchange(controller, enrol_timeout=0.3)
    replies = carrier(ENROLMENT, asked(controller))
    assert replies["CS"].message is not None
    assert {replies[site].kind for site in ("DU", "FG")} == {"late"}
    carrier.tasks.liveness.heard_of("DU")
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
    assert {reply.kind for reply in late.values()} == {"late"}
    assert carrier.present(1) == ["CS"]
    carrier.tasks.wait_for_task("DU", 0.0)
    assert carrier.present(1) == ["CS", "DU"]


def test_a_site_that_lives_but_works_far_longer_than_the_others_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_SLOW", 0.3)
    monkeypatch.setattr(steps, "_TIMES", 0.01)
    controller, said = FakeController(CS=answers(), DU=later(0.9, answers()), FG=never_fetches), list[str]()
    assert received(exchange(controller, step_timeout=1.2, say=said.append)(STEP, asked(controller))["DU"])
    assert 1 <= len(said) <= 3 and all("DU" in line for line in said), "after .3 s, and whenever that has doubled"


def test_a_silent_site_is_given_up_until_it_is_heard_of() -> None:
    controller = FakeController(CS=answers(), DU=never_answers)
    carrier = exchange(controller, heartbeat_timeout=0.5)
    assert carrier(STEP, asked(controller))["DU"].kind == "missing"
    assert carrier.present(4) == ["CS"]
    carrier.tasks.liveness.heard_of("DU")
    assert carrier.present(5) == ["CS", "DU"]


def test_heartbeats_keep_a_site_in_the_step() -> None:
    def slow(task: Any) -> Shareable:
        for _ in range(12):
            time.sleep(0.1)
            carrier.tasks.liveness.heard_of("CS")
        return answers()(task)

    controller = FakeController(CS=slow)
    carrier = exchange(controller, heartbeat_timeout=0.8)
    assert carrier(STEP, asked(controller))["CS"].message is not None


def test_a_site_may_wait_for_its_turn_while_another_one_works() -> None:
    """FLARE's simulator with one thread: the second site's process starts when the first one's is done."""

    def first(task: Any) -> Shareable:
        for _ in range(12):
            time.sleep(0.1)
            carrier.tasks.liveness.heard_of("CS")
        return answers()(task)

    def second(task: Any) -> Shareable:
        return answers()(task)

    controller = FakeController(CS=first, DU=never_fetches)
    carrier = exchange(controller, heartbeat_timeout=0.8)

    def its_turn() -> None:
        controller.behaviours["DU"] = second
        controller._play("DU", controller.sent["DU"])

    threading.Timer(1.3, its_turn).start()
    replies = carrier(STEP, asked(controller))
    assert replies["DU"].message is not None


def test_a_site_that_flare_has_lost_is_not_waited_for() -> None:
    controller = FakeController(CS=answers(), DU=never_fetches)
    controller.disconnected.add("DU")
    assert exchange(controller)(STEP, asked(controller))["DU"].kind == "missing"


def test_a_site_whose_process_died_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_PROCESSES", 0.05)
    controller = FakeController(CS=later(0.3, answers()), DU=never_answers, FG=never_fetches)
    carrier = exchange(controller, step_timeout=0.8, heartbeat_timeout=LONG, dead=lambda: {"DU", "FG"})
    replies = carrier(STEP, asked(controller))
    assert replies["CS"].message is not None
    assert replies["DU"].kind == "missing"
    assert replies["FG"].kind == "late", "with fewer threads than sites it has no process until its turn comes"
    assert carrier.present(4) == ["CS", "FG"]
    controller.behaviours["DU"] = never_fetches
    carrier.tasks.step_timeout = LONG
    started = time.monotonic()
    assert carrier(Step("finalize", 4), {"DU": Message({})})["DU"].kind == "missing", "who is dead is not waited for a second time"
    assert time.monotonic() - started < LONG / 2
    carrier.tasks.liveness.heard_of("DU")
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
    assert received(reply).meta == {"step": 4}


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
    with pytest.raises(ConfigError, match="HT"):
        exchange(controller, outside=("HT",)).present(0)
