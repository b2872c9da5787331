"""How a step's messages reach the sites under FLARE and their answers come back: one task per site, one wait for all.

Nothing here can hang on a site: an answer comes, or the step's time is over, or the site shows no sign of life any more. Signs
of life are its questions for work and the pulse that it sends while a task runs, see `signs`.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.app_constant import AppConstants

from medflare.core.errors import Aborted, ConfigError, UpdateError
from medflare.core.message import Message
from medflare.federation.exchange import DELIVER, ENROL, Reply
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


@dataclass
class Watch:
    """When each site was heard of last, and which ones are given up until they are heard of again."""

    silence: float
    heard: dict[str, float] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)

    def sign_of_life(self, site: str) -> None:
        """The site was heard of just now, and is not given up any more."""
        self.heard[site] = time.monotonic()
        self.lost.discard(site)

    def silent_since(self, site: str, *moments: float) -> float:
        """Seconds since the site was heard of or the latest of `moments`, whichever is shorter ago."""
        return time.monotonic() - max(self.heard.get(site, 0.0), *moments)


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
            lives. Enrolment and delivery always do: reading the data may take long, and so may the last evaluation.
        silence: seconds without a sign of life after which a site counts as gone.
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
        silence: float,
    ):
        self.controller = controller
        self.fl_ctx = fl_ctx
        self.abort_signal = abort_signal
        self.members = members
        self.outside = tuple(outside)
        self.stop_reason = stop_reason
        self.step_timeout = step_timeout
        self.watch = Watch(silence)
        self._asked: dict[str, _Asked] = {}
        self._changed = threading.Condition()
        self._closed = False

    def present(self, round: int) -> list[str]:
        """The job's sites that are not given up; one that was comes back with its first sign of life.

        Raises:
            ConfigError: the job names an outside site that FLARE does not know.
        """
        unknown = sorted(set(self.outside) - set(self.members()))
        if unknown:
            there = ", ".join(sorted(self.members()))
            raise ConfigError(f"unknown outside site {unknown[0]!r}; this job runs at {there}: correct 'outside' or start the site first")
        return sorted(site for site in self.members() if site not in self.watch.lost)

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, Reply]:
        with self._changed:
            self._asked = {site: self._ask(step, site, message) for site, message in sorted(outgoing.items())}
            self._changed.notify_all()
        try:
            problems = self._wait(step, 0.0 if step.phase in (ENROL, DELIVER) else self.step_timeout)
        finally:
            with self._changed:
                asked, self._asked = self._asked, {}
            for one in asked.values():
                if one.answer is None:
                    self.controller.cancel_task(one.task, TaskCompletionStatus.CANCELLED, self.fl_ctx)
        return {site: problems.get(site) or replace(_reply(one.answer), seconds=one.seconds) for site, one in asked.items()}

    def wait_for_task(self, site: str, seconds: float) -> None:
        """Returns when there is a task that the site has not fetched, at the latest after `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (site in self._asked and not self._asked[site].fetched), seconds)

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
        self.watch.sign_of_life(site)
        with self._changed:
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
                    problems |= {site: self._overdue(step, one) for site, one in pending.items()}
                    break
                gone = {site for site, one in pending.items() if self._gone(site, one, busy)}
                self.watch.lost |= gone
                silent = f"no sign of life in '{step.phase}' of round {step.round}; going on without the site"
                problems |= {site: Reply(problem=silent, kind="missing") for site in gone}
                if any(one.fetched for site, one in pending.items() if site not in gone):
                    busy = time.monotonic()
                self._changed.wait(_LOOK)
        return problems

    def _gone(self, site: str, asked: _Asked, busy: float) -> bool:
        """Whether a site cannot be expected to answer.

        A site that works on its task sends a pulse. One that has not fetched its task may be waiting for its turn (FLARE's
        simulator with fewer threads than sites), so its silence counts only while no other site is at work either.
        """
        if self.controller.get_client_disconnect_time(site):
            return True
        since = (asked.since,) if asked.fetched else (asked.since, busy)
        return self.watch.silent_since(site, *since) > self.watch.silence

    def _overdue(self, step: Step, asked: _Asked) -> Reply:
        state = "was still at work" if asked.fetched else "had not fetched its task"
        problem = f"'{step.phase}' of round {step.round} was closed after {self.step_timeout:g} s; the site {state}"
        return Reply(problem=problem, kind="late")


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
