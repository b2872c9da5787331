"""One step under FLARE: whatever the sites do, the wait ends, and each missing reply has a reason."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.apis.controller_spec import TaskCompletionStatus
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.app_constant import AppConstants
from nvflare.fuel.utils import fobs

from medflare.core.errors import Aborted, ConfigError
from medflare.core.message import Message
from medflare.federation.exchange import SiteReply
from medflare.federation.settings import run_settings
from medflare.flare import task_exchange as steps
from medflare.flare.messages import error_reply, register_decomposers, to_message, to_shareable
from medflare.flare.task_exchange import TaskExchange, read_reply
from medflare.methods.base import Step

STEP = Step("train", 3)
ENROLMENT = Step("enrol", 0)
LONG = 60.0  # seconds that nothing takes, also on a busy machine
Behaviour = Callable[[Any], Shareable | None]


class FakeController:
    """Hands each task to the behaviour of its site, in a thread, as FLARE's own threads would."""

    def __init__(self, **behaviours: Behaviour):
        self.behaviours = behaviours
        self.sent: dict[str, Any] = {}
        self.cancelled: set[str] = set()
        self.disconnected: set[str] = set()

    def send(self, task: Any, fl_ctx: FLContext, targets: list[str]) -> None:
        (site,) = targets
        self.sent[site] = task
        threading.Thread(target=self.play, args=(site, task), daemon=True).start()

    def play(self, site: str, task: Any) -> None:
        client_task = SimpleNamespace(client=SimpleNamespace(name=site), task=task, result=None)
        behaviour = self.behaviours[site]
        if behaviour is never_fetches:
            return
        task.after_task_sent_cb(client_task=client_task, fl_ctx=None)
        client_task.result = behaviour(task)
        if client_task.result is not None:
            task.result_received_cb(client_task=client_task, fl_ctx=None)

    def cancel_task(self, task: Any, status: TaskCompletionStatus, fl_ctx: FLContext) -> None:
        self.cancelled |= {site for site, sent in self.sent.items() if sent is task}

    def get_client_disconnect_time(self, site: str) -> float | None:
        return 1.0 if site in self.disconnected else None


def answers(**meta: Any) -> Behaviour:
    return lambda task: to_shareable(
        Message({"model": to_message(task.data).states["model"]}, meta)
    )


def never_fetches(task: Any) -> None: ...


def never_answers(task: Any) -> None: ...


def later(seconds: float, behaviour: Behaviour) -> Behaviour:
    def behave(task: Any) -> Shareable | None:
        time.sleep(seconds)
        return behaviour(task)

    return behave


def received(reply: SiteReply) -> Message:
    """The message of a reply that has one."""
    assert reply.message is not None, reply.problem
    return reply.message


def exchange(
    controller: FakeController, *, say: Callable[[str], None] = lambda line: None, **changes: Any
) -> TaskExchange:
    settings = run_settings(
        {"rounds": 1, "seed": 0, "enrol_timeout": 0.0, "heartbeat_timeout": LONG, **changes}
    )
    context = FLContext()
    signal = Signal()
    return TaskExchange(
        controller,
        context,
        signal,
        settings,
        members=lambda: controller.behaviours,
        stop_reason=lambda: "asked to",
        say=say,
    )


def requests(controller: FakeController) -> dict[str, Message]:
    return {
        site: Message({"model": {"w": torch.tensor([float(number)])}})
        for number, site in enumerate(sorted(controller.behaviours))
    }


def test_each_site_gets_its_own_message_and_its_reply_comes_back() -> None:
    controller = FakeController(CS=answers(n_samples=3), DU=answers(n_samples=4))
    replies = exchange(controller)(STEP, requests(controller))
    assert {site: received(reply).meta["n_samples"] for site, reply in replies.items()} == {
        "CS": 3,
        "DU": 4,
    }
    assert {
        site: received(reply).states["model"]["w"].item() for site, reply in replies.items()
    } == {"CS": 0.0, "DU": 1.0}
    tasks = controller.sent.values()
    assert {(task.name, task.data.get_header(AppConstants.CURRENT_ROUND)) for task in tasks} == {
        ("train", 3)
    }
    assert not controller.cancelled


STRANGE: dict[str, Callable[[DXO], object]] = {
    "another byte order": lambda model: model.data.update(w=np.ones(3, ">f4")),
    "ragged": lambda model: model.data.update(w=[[1.0], [1.0, 2.0]]),
    "dates": lambda model: model.data.update(w=np.zeros(2, "datetime64[s]")),
    "text": lambda model: model.data.update(w="a patient"),
    "float listed as bfloat16": lambda model: (
        model.data.update(w=np.float32(3)),
        model.meta.update(bfloat16=["w"]),
    ),
    "bytes listed as bfloat16": lambda model: (
        model.data.update(w=np.ones(3, np.uint8)),
        model.meta.update(bfloat16=["w"]),
    ),
    "no list of names": lambda model: model.meta.update(bfloat16=3),
}


@pytest.mark.parametrize("change", STRANGE.values(), ids=STRANGE)
def test_a_reply_that_cannot_be_unpacked_is_rejected_and_raises_nothing(
    change: Callable[[DXO], object],
) -> None:
    """FLARE carries all of it: an exception would end the job for all sites."""
    register_decomposers()
    shareable = to_shareable(Message({"model": {"w": torch.ones(2)}}))
    change(from_shareable(shareable).data["model"])
    reply = read_reply(fobs.loads(fobs.dumps(shareable)))
    assert reply.message is None and reply.kind == "rejected" and reply.problem


def test_failed_tasks_and_foreign_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = read_reply(error_reply("mask 3.png has another size"))
    assert (failed.kind, failed.problem) == ("failed", "mask 3.png has another size")
    assert "TASK_ABORTED" in read_reply(make_reply(ReturnCode.TASK_ABORTED)).problem
    without_headers = to_shareable(Message())
    without_headers["__headers__"] = [1]
    for shareable in (
        DXO(DataKind.WEIGHTS, {"w": torch.ones(1)}).to_shareable(),
        without_headers,
        Shareable(),
    ):
        assert read_reply(shareable).kind == "rejected"

    def full(shareable: Shareable) -> Message:
        raise MemoryError

    monkeypatch.setattr(steps, "to_message", full)
    with pytest.raises(MemoryError):  # the server's own error
        read_reply(to_shareable(Message()))


# -- timeouts --------------------------------------------------------------------------------------------------------------


def test_a_step_is_closed_in_time() -> None:
    controller = FakeController(CS=answers(), DU=never_answers, FG=never_fetches)
    replies = exchange(controller, step_timeout=0.5)(STEP, requests(controller))
    assert replies["CS"].message is not None
    assert {replies[site].kind for site in ("DU", "FG")} == {"late"}
    assert controller.cancelled == {"DU", "FG"}


def test_a_site_that_is_late_for_enrollment_is_asked_again_when_it_asks_for_work() -> None:
    controller = FakeController(CS=answers(), DU=never_answers, FG=never_fetches)
    tasks = exchange(controller, enrol_timeout=0.3)
    replies = tasks(ENROLMENT, requests(controller))
    assert {site: reply.kind for site, reply in replies.items() if reply.message is None} == {
        "DU": "late",
        "FG": "late",
    }
    tasks.heard_from("DU")
    assert tasks.present(0) == ["CS"], (
        "it still reads its images: the others do not wait for it at each step"
    )
    tasks.wait_for_task("DU", 0.0)
    assert tasks.present(1) == ["CS", "DU"]


def test_the_run_waits_shortly_for_a_site_that_enrolls_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps, "_NEWCOMER_TIMEOUT", 0.3)
    controller = FakeController(
        CS=later(0.5, answers()), DU=later(1.0, answers()), FG=never_answers
    )
    tasks = exchange(controller, enrol_timeout=LONG)
    outgoing = requests(controller)
    assert tasks(ENROLMENT, {"CS": outgoing.pop("CS")})["CS"].message is not None, (
        "at the beginning there is time"
    )
    assert {reply.kind for reply in tasks(ENROLMENT, outgoing).values()} == {"late"}
    assert tasks.present(1) == ["CS"]


def test_a_site_that_works_far_longer_than_the_others_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps, "_SLOW", 0.3)
    monkeypatch.setattr(steps, "_TIMES_SLOWEST", 0.01)
    controller = FakeController(CS=answers(), DU=later(0.9, answers()), FG=never_fetches)
    lines = list[str]()
    assert received(
        exchange(controller, step_timeout=1.2, say=lines.append)(STEP, requests(controller))["DU"]
    )
    assert 1 <= len(lines) <= 3, "after 0.3 s, and whenever the time has doubled"
    for line in lines:
        assert "DU" in line


# -- signs of life ---------------------------------------------------------------------------------------------------------


def test_a_silent_site_is_given_up_until_it_is_heard_from() -> None:
    controller = FakeController(CS=answers(), DU=never_answers)
    tasks = exchange(controller, heartbeat_timeout=0.5)
    assert tasks(STEP, requests(controller))["DU"].kind == "missing"
    assert tasks.present(4) == ["CS"]
    tasks.heard_from("DU")
    assert tasks.present(5) == ["CS", "DU"]


def test_a_site_with_heartbeats_is_waited_for_and_so_is_one_that_waits_for_its_turn() -> None:
    """FLARE's simulator with one thread: the second site's process starts when the first one's has ended."""

    def slow(task: Any) -> Shareable | None:
        for _ in range(12):
            time.sleep(0.1)
            tasks.heard_from("CS")
        return answers()(task)

    def its_turn() -> None:
        controller.behaviours["DU"] = answers()
        controller.play("DU", controller.sent["DU"])

    controller = FakeController(CS=slow, DU=never_fetches)
    tasks = exchange(controller, heartbeat_timeout=0.8)
    threading.Timer(1.3, its_turn).start()
    for reply in tasks(STEP, requests(controller)).values():
        assert received(reply)


def test_a_site_that_flare_has_lost_is_not_waited_for() -> None:
    controller = FakeController(CS=answers(), DU=never_fetches)
    controller.disconnected.add("DU")
    assert exchange(controller)(STEP, requests(controller))["DU"].kind == "missing"


# -- the run ---------------------------------------------------------------------------------------------------------------


def test_abort_ends_the_wait() -> None:
    controller = FakeController(CS=never_answers)
    tasks = exchange(controller)
    threading.Timer(0.2, tasks.abort_signal.trigger, args=(True,)).start()
    with pytest.raises(Aborted, match="asked to"):
        tasks(STEP, requests(controller))
    assert controller.cancelled == {"CS"}


def test_a_reply_to_an_earlier_step_is_not_taken_for_a_later_one() -> None:
    controller = FakeController(CS=never_answers)
    tasks = exchange(controller, step_timeout=0.2)
    tasks(STEP, requests(controller))
    old = controller.sent["CS"]
    controller.behaviours["CS"] = later(0.3, answers(step=4))
    late = SimpleNamespace(client=SimpleNamespace(name="CS"), task=old, result=answers(step=3)(old))
    threading.Timer(0.1, lambda: old.result_received_cb(client_task=late, fl_ctx=None)).start()
    tasks.settings = replace(tasks.settings, step_timeout=0.0)
    assert received(tasks(Step("train", 4), requests(controller))["CS"]).meta == {"step": 4}


def test_a_request_for_work_is_answered_when_there_is_some_or_none_will_come() -> None:
    controller = FakeController(CS=never_fetches)
    tasks = exchange(controller, step_timeout=1.0)
    started = time.monotonic()
    tasks.wait_for_task("CS", 0.2)
    assert time.monotonic() - started > 0.15
    step = threading.Timer(0.1, tasks, args=(STEP, requests(controller)))
    step.start()
    tasks.wait_for_task("CS", LONG)
    step.join()
    threading.Timer(0.1, tasks.close).start()
    tasks.wait_for_task("CS", LONG)
    assert time.monotonic() - started < LONG / 2


def test_one_request_of_a_site_waits_for_a_task() -> None:
    """Each holds one of the 64 threads by which FLARE answers all sites."""
    tasks = exchange(FakeController(CS=never_fetches))
    waiting = [threading.Thread(target=tasks.wait_for_task, args=("CS", LONG)) for _ in range(20)]
    for thread in waiting:
        thread.start()
    for thread in waiting[1:]:
        thread.join(LONG / 2)
    assert sum(thread.is_alive() for thread in waiting) == 1
    tasks.close()
    waiting[0].join(LONG / 2)
    assert not waiting[0].is_alive()


def test_the_statistics_say_which_site_is_silent_and_for_how_long() -> None:
    controller = FakeController(CS=answers(), DU=never_answers)
    tasks = exchange(controller, step_timeout=0.7, heartbeat_timeout=30.0)
    assert tasks.waiting() == {}
    step = threading.Thread(target=tasks, args=(STEP, requests(controller)))
    step.start()
    time.sleep(0.4)
    waiting = tasks.waiting()
    step.join()
    assert (waiting["phase"], waiting["round"], waiting["heartbeat_timeout"]) == ("train", 3, 30.0)
    assert list(waiting["silent"]) == ["DU"] and 0.2 < waiting["silent"]["DU"] < LONG
    assert tasks.waiting()["silent"] == {}, "between two steps the run waits for no site"


def test_an_unknown_outside_site_is_named() -> None:
    controller = FakeController(CS=answers(), DU=answers())
    with pytest.raises(ConfigError, match="HT"):
        exchange(controller, outside=("HT",)).present(0)
