"""How a step's messages reach the sites under FLARE and their answers come back: one task per site, one wait for all.

Nothing here can hang on a site: an answer comes, or the step's time is over, or the site shows no sign of life any more. Signs
of life are its questions for work and the pulse that it sends while a task runs, see `signs`.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.app_constant import AppConstants

from medflare.core.errors import Aborted, ConfigError, UpdateError
from medflare.core.message import Message
from medflare.federation.exchange import DELIVER, ENROL, Reply
from medflare.flare.exchange.watch import Watch
from medflare.flare.exchange.wire import error_of, to_message, to_shareable
from medflare.methods.base import Step

_LOOK = 0.1  # seconds between two looks at the clock and the abort signal; answers wake the wait at once


@dataclass
class _Asked:
    """One site's task in the current step."""

    task: Task
    since: float
    fetched: bool = False
    answer: Shareable | None = None
    began: float = 0.0
    seconds: float = 0.0  # between fetching and answering


class TaskExchange:
    """The exchange that the schedule uses under FLARE.

    Args:
        controller: schedules the tasks.
        fl_ctx: of the run.
        abort_signal: of the job.
        members: names of the sites that FLARE has in this job at the moment.
        outside: names of sites that never train, as the job has them.
        stop_reason: why the job is being stopped, asked for when the abort signal is set.
        step_timeout: seconds after which a step goes on without the sites that have not answered; 0 waits for every site that
            lives. Delivery always does: the last evaluation may take long.
        enrol_timeout: the same for enrolment, in which sites read their images; a site that is late joins when it is ready.
        watch: when sites count as gone.
    """

    def __init__(
        self,
        controller: Controller,
        fl_ctx: FLContext,
        abort_signal: Signal,
        *,
        members: Callable[[], Iterable[str]],
        outside: Iterable[str],
        stop_reason: Callable[[], str],
        step_timeout: float,
        enrol_timeout: float,
        watch: Watch,
    ):
        self.controller = controller
        self.fl_ctx = fl_ctx
        self.abort_signal = abort_signal
        self.members = members
        self.outside = tuple(outside)
        self.stop_reason = stop_reason
        self.step_timeout, self.enrol_timeout = step_timeout, enrol_timeout
        self.watch = watch
        self._step: Step | None = None
        self._asked: dict[str, _Asked] = {}
        self._changed = threading.Condition()
        self._closed = False

    def present(self, round: int) -> list[str]:
        """The job's sites that are not given up; one that was comes back when it is heard of, see `Watch`.

        Raises:
            ConfigError: the job names an outside site that FLARE does not know.
        """
        unknown = sorted(set(self.outside) - set(self.members()))
        if unknown:
            there = ", ".join(sorted(self.members()))
            raise ConfigError(f"unknown outside site {unknown[0]!r}; this job runs at {there}: correct 'outside' or start the site first")
        return sorted(site for site in self.members() if self.watch.there(site))

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, Reply]:
        with self._changed:
            self._step = step
            self._asked = {site: self._ask(step, site, message) for site, message in sorted(outgoing.items())}
            self._changed.notify_all()
        try:
            problems = self._wait(step, {ENROL: self.enrol_timeout, DELIVER: 0.0}.get(step.phase, self.step_timeout))
        finally:
            with self._changed:
                asked, self._asked = self._asked, {}
            for one in asked.values():
                if one.answer is None:
                    self.controller.cancel_task(one.task, TaskCompletionStatus.CANCELLED, self.fl_ctx)
        return {site: problems.get(site) or replace(_reply(one.answer), seconds=one.seconds) for site, one in asked.items()}

    def wait_for_task(self, site: str, seconds: float) -> bool:
        """The site asks for work: returns when there is a task that it has not fetched, at the latest after `seconds`, and whether."""
        with self._changed:
            self.watch.question(site, self._ready(site))
            return self._changed.wait_for(lambda: self._closed or self._ready(site), seconds)

    def _ready(self, site: str) -> bool:
        return site in self._asked and not self._asked[site].fetched

    def waiting(self) -> dict[str, Any]:
        """The `phase` and `round` of the step, the seconds for which every site that has not answered was not heard of (`silent`), and
        those after which it is given up (`silence`); empty before the first step."""
        with self._changed:
            if self._step is None:
                return {}
            since = {site: self.watch.silent_since(site, one.since) for site, one in self._asked.items() if one.answer is None}
        silent = {site: round(seconds, 1) for site, seconds in since.items()}
        return {"phase": self._step.phase, "round": self._step.round, "silent": silent, "silence": self.watch.silence}

    def close(self) -> None:
        """There will be no more tasks: nobody is kept waiting for one."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- asking ------------------------------------------------------------------------------------------------------------

    def _ask(self, step: Step, site: str, message: Message) -> _Asked:
        shareable = to_shareable(message)
        shareable.set_header(AppConstants.CURRENT_ROUND, step.round)
        task = Task(step.phase, shareable, after_task_sent_cb=self._fetched, result_received_cb=self._answered)
        self.controller.send(task, self.fl_ctx, targets=[site])
        return _Asked(task, time.monotonic())

    def _fetched(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        site = client_task.client.name
        with self._changed:
            self.watch.fetched(site)
            if site in self._asked and self._asked[site].task is client_task.task:
                self._asked[site].fetched, self._asked[site].began = True, time.monotonic()

    def _answered(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """Only stores the answer: FLARE holds its locks while this runs."""
        site, result = client_task.client.name, client_task.result
        client_task.result = None  # FLARE would keep it until the task monitor comes round
        self.watch.sign_of_life(site)
        with self._changed:
            if site in self._asked and self._asked[site].task is client_task.task:
                self._asked[site].answer = result
                self._asked[site].seconds = time.monotonic() - (self._asked[site].began or self._asked[site].since)
                self._changed.notify_all()

    # -- waiting -----------------------------------------------------------------------------------------------------------

    def _wait(self, step: Step, timeout: float) -> dict[str, Reply]:
        """Returns when every site has answered or is given up; gives the replies that stand for missing answers."""
        started = busy = time.monotonic()
        problems: dict[str, Reply] = {}
        with self._changed:
            while pending := {site: one for site, one in self._asked.items() if one.answer is None and site not in problems}:
                if self.abort_signal.triggered:
                    raise Aborted(self.stop_reason())
                if timeout and time.monotonic() - started > timeout:
                    problems |= {site: _overdue(step, one, timeout) for site, one in pending.items()}
                    if step.phase == ENROL:
                        self.watch.behind |= pending.keys()
                    break
                self.watch.look()
                gone = {site: why for site, one in pending.items() if (why := self._gone(step, site, one, busy))}
                self.watch.lost |= gone.keys()
                problems |= {site: Reply(problem=why, kind="missing") for site, why in gone.items()}
                if any(one.fetched for site, one in pending.items() if site not in gone):
                    busy = time.monotonic()
                self._changed.wait(_LOOK)
        return problems

    def _gone(self, step: Step, site: str, asked: _Asked, busy: float) -> str:
        """Why a site cannot be expected to answer; empty as long as it can."""
        if self.controller.get_client_disconnect_time(site):
            return f"no sign of life in '{step.phase}' of round {step.round}; going on without the site"
        return self.watch.gone(site, step, asked.fetched, asked.since, busy)


def _overdue(step: Step, asked: _Asked, timeout: float) -> Reply:
    state = "was still at work" if asked.fetched else "had not fetched its task"
    return Reply(problem=f"'{step.phase}' of round {step.round} was closed after {timeout:g} s; the site {state}", kind="late")


def _reply(answer: Shareable | None) -> Reply:
    if answer is None:
        return Reply(problem="no answer", kind="missing")
    problem = error_of(answer)
    if problem is not None:
        return Reply(problem=problem, kind="failed")
    try:
        return Reply(to_message(answer))
    except UpdateError as error:
        return Reply(problem=str(error), kind="rejected")
