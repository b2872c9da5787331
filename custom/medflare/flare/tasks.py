"""How a step's messages reach the sites under FLARE and their answers come back: one task per site, one wait for all.

Nothing here can hang on a site: an answer comes, or the step's time is over, or the site shows no sign of life any more (`liveness`).
What the messages say is not looked at (`messages` does), and the imports are light, see `executors`.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.app_constant import AppConstants
from nvflare.fuel.utils.memory_utils import try_malloc_trim

from medflare.core.errors import Aborted, ConfigError
from medflare.federation.settings import ENROL, FINALIZE
from medflare.flare.liveness import ALIVE, PATIENCE, WORK, Liveness

_NEWCOMER = 60.0  # seconds for which the others wait for a site that joins later; then it goes on reading, and is asked again
_SLOW = 300.0  # seconds at work after which a site is named where the others were done long ago: it lives, yet may never answer
_TIMES = 5  # as long as the slowest of the others
_LOOK = 0.1  # seconds between two looks at the clock and the abort signal; answers wake the wait at once
A = TypeVar("A")
Read = Callable[[str, Shareable], A]  # of a site's name and its answer


@dataclass
class Answer(Generic[A]):
    """What became of a site's task.

    Attributes:
        content: what `read` made of the answer; None where none came.
        problem: why none came, one line.
        kind: the event that a problem becomes, "late" or "missing".
        seconds: between fetching the task and answering.
    """

    content: A | None = None
    problem: str = "no answer"
    kind: str = "missing"
    seconds: float = 0.0


class _Step(NamedTuple):
    phase: str
    round: int

    def __str__(self) -> str:
        return f"'{self.phase}' of round {self.round}"


@dataclass
class _Asked:
    """One site's task in the current step."""

    task: Task
    since: float
    fetched: bool = False
    answer: Shareable | None = None  # until it has been read
    taken: Answer[Any] | None = None
    began: float = 0.0
    seconds: float = 0.0
    named: float = 0.0  # seconds at work when it was last said to be slow

    @property
    def answered(self) -> bool:
        return self.answer is not None or self.taken is not None


class TaskExchange:
    """Asks the sites of a FLARE job.

    Args:
        controller: schedules the tasks.
        fl_ctx: of the run.
        abort_signal: of the job.
        members: names of the sites that FLARE has in this job at the moment.
        stop_reason: why the job is being stopped, asked for when the abort signal is set.
        say: takes a line for who follows the run.
        step_timeout: seconds after which a step goes on without the sites that have not answered; 0 waits for every site that
            lives. Delivery always does: the last evaluation may take long.
        enrol_timeout: the same for enrolment, in which sites read their images; a site that is late joins when it is ready.
        liveness: when sites count as gone.
    """

    def __init__(
        self,
        controller: Controller,
        fl_ctx: FLContext,
        abort_signal: Signal,
        *,
        members: Callable[[], Iterable[str]],
        stop_reason: Callable[[], str],
        say: Callable[[str], None],
        step_timeout: float,
        enrol_timeout: float,
        liveness: Liveness,
    ):
        self.liveness = liveness
        self.controller, self.fl_ctx, self.abort_signal = controller, fl_ctx, abort_signal
        self.members, self.stop_reason, self.say = members, stop_reason, say
        self.step_timeout, self.enrol_timeout = step_timeout, enrol_timeout
        self._step: _Step | None = None
        self._asked: dict[str, _Asked] = {}
        self._changed = threading.Condition()
        self._closed = False

    def present(self, outside: Iterable[str]) -> list[str]:
        """The job's sites that are not given up; one that was comes back when it is heard of, see `Liveness`.

        Raises:
            ConfigError: FLARE does not know one of them.
        """
        unknown = sorted(set(outside) - set(self.members()))
        if unknown:
            there = ", ".join(sorted(self.members()))
            raise ConfigError(f"unknown outside site {unknown[0]!r}; this job runs at {there}: correct 'outside' or start the site first")
        return sorted(site for site in self.members() if self.liveness.there(site))

    def __call__(self, phase: str, round: int, outgoing: Mapping[str, Shareable], read: Read[A]) -> dict[str, Answer[A]]:
        """Ask every site that is sent something.

        Returns:
            Site -> what became of its task.

        Raises:
            Aborted: the job is being stopped.
        """
        timeout = self._timeout(phase)
        with self._changed:
            self._step = _Step(phase, round)
            self._asked = {site: self._ask(self._step, site, data) for site, data in sorted(outgoing.items())}
            self._changed.notify_all()
        try:
            problems = self._wait(self._step, read, timeout)
        finally:
            with self._changed:
                asked, self._asked = self._asked, {}
            for one in asked.values():
                if not one.answered:
                    self.controller.cancel_task(one.task, TaskCompletionStatus.CANCELLED, self.fl_ctx)
            try_malloc_trim()  # many threads make and read messages, and the C library keeps what each has freed
        return {site: problems.get(site) or _taken(site, one, read) for site, one in asked.items()}

    # -- for who asks beside the tasks ----------------------------------------------------------------------------------------

    def wait_for_task(self, site: str, seconds: float) -> bool:
        """The site asks for work: returns when there is a task that it has not fetched, at the latest after `seconds`, and whether."""
        with self._changed:
            self.liveness.question(site, self._ready(site))
            return self._changed.wait_for(lambda: self._closed or self._ready(site), seconds)

    def _ready(self, site: str) -> bool:
        return site in self._asked and not self._asked[site].fetched

    def waiting(self) -> dict[str, Any]:
        """The `phase` and `round` of the step, the seconds for which every site that has not answered was not heard of (`silent`), and
        those after which it is given up (`heartbeat_timeout`); empty before the first step."""
        with self._changed:
            if self._step is None:
                return {}
            since = {site: self.liveness.silent_since(site, one.since) for site, one in self._asked.items() if not one.answered}
        silent = {site: round(seconds, 1) for site, seconds in since.items()}
        return {**self._step._asdict(), "silent": silent, "heartbeat_timeout": self.liveness.heartbeat_timeout}

    def close(self) -> None:
        """There will be no more tasks: nobody is kept waiting for one."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _timeout(self, phase: str) -> float:
        """Seconds for which the next step waits; for a newcomer everybody does, so that it may read its images while the others go on."""
        if phase == ENROL:
            return self.enrol_timeout if self._step is None else min(self.enrol_timeout or _NEWCOMER, _NEWCOMER)
        return 0.0 if phase == FINALIZE else self.step_timeout

    # -- asking ------------------------------------------------------------------------------------------------------------

    def _ask(self, step: _Step, site: str, data: Shareable) -> _Asked:
        data.set_header(AppConstants.CURRENT_ROUND, step.round)
        task = Task(step.phase, data, after_task_sent_cb=self._fetched, result_received_cb=self._answered)
        self.controller.send(task, self.fl_ctx, targets=[site])
        return _Asked(task, time.monotonic())

    def _fetched(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        site = client_task.client.name
        with self._changed:
            self.liveness.fetched(site)
            if site in self._asked and self._asked[site].task is client_task.task:
                self._asked[site].fetched, self._asked[site].began = True, time.monotonic()

    def _answered(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """Only stores the answer: FLARE holds its locks while this runs."""
        site, result = client_task.client.name, client_task.result
        client_task.result = None  # FLARE would keep it until the task monitor comes round
        self.liveness.heard_of(site)
        with self._changed:
            if site in self._asked and self._asked[site].task is client_task.task:
                self._asked[site].answer = result
                self._asked[site].seconds = time.monotonic() - (self._asked[site].began or self._asked[site].since)
                self._changed.notify_all()

    # -- waiting -----------------------------------------------------------------------------------------------------------

    def _wait(self, step: _Step, read: Read[A], timeout: float) -> dict[str, Answer[A]]:
        """Returns when every site has answered or is given up; says why answers are missing."""
        started = busy = time.monotonic()
        problems: dict[str, Answer[A]] = {}
        while True:
            for site, one in self._asked.items():
                _taken(site, one, read)  # while further answers may come
            for line in _slow(step, {site: one for site, one in self._asked.items() if site not in problems}):
                self.say(line)
            with self._changed:
                pending = {site: one for site, one in self._asked.items() if not one.answered and site not in problems}
                if not pending:
                    return problems
                if self.abort_signal.triggered:
                    raise Aborted(self.stop_reason())
                if timeout and time.monotonic() - started > timeout:
                    problems |= {site: Answer(problem=_overdue(step, one, timeout), kind="late") for site, one in pending.items()}
                    if step.phase == ENROL:
                        self.liveness.behind |= pending.keys()
                    return problems
                self.liveness.look()
                gone = {site: why for site, one in pending.items() if (why := self._gone(step, site, one, busy))}
                self.liveness.lost |= gone.keys()
                problems |= {site: Answer(problem=why) for site, why in gone.items()}
                busy = time.monotonic() if any(one.fetched for site, one in pending.items() if site not in gone) else busy
                self._changed.wait(_LOOK)

    def _gone(self, step: _Step, site: str, asked: _Asked, busy: float) -> str:
        """Why a site cannot be expected to answer; empty as long as it can."""
        if self.controller.get_client_disconnect_time(site):
            return f"no sign of life in {step}; going on without the site"
        return self.liveness.gone(site, str(step), asked.fetched, asked.since, busy)


class Listener:
    """Takes heartbeats and questions for work.

    Attributes:
        exchange: the run's; None before the run begins, when sites may ask already.
    """

    def __init__(self) -> None:
        self.exchange: TaskExchange | None = None

    def open(self, engine: Any) -> None:
        """Take messages from now on."""
        engine.register_aux_message_handler(ALIVE, self.alive)
        engine.register_aux_message_handler(WORK, self.work)

    def alive(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        """A heartbeat, in FLARE's form of a handler."""
        if self.exchange is not None:
            self.exchange.liveness.heard_of(_sender(fl_ctx))
        return make_reply(ReturnCode.OK)

    def work(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        """Hold a question for work until there is some, in FLARE's form of a handler."""
        if self.exchange is not None:
            self.exchange.wait_for_task(_sender(fl_ctx), PATIENCE)
        return make_reply(ReturnCode.OK)


def _sender(fl_ctx: FLContext) -> str:
    return fl_ctx.get_peer_context().get_identity_name()


def _overdue(step: _Step, asked: _Asked, timeout: float) -> str:
    state = "was still at work" if asked.fetched else "had not fetched its task"
    return f"{step} was closed after {timeout:g} s; the site {state}"


def _slow(step: _Step, asked: Mapping[str, _Asked]) -> list[str]:
    """Who is at work far longer than the slowest of those who are done; again when it has been twice as long."""
    took = max((one.seconds for one in asked.values() if one.answered), default=math.inf)
    lines = []
    for site, one in asked.items():
        seconds = time.monotonic() - one.began
        if one.fetched and not one.answered and seconds >= max(_SLOW, _TIMES * took, 2 * one.named):
            one.named = seconds
            remedy = "" if step.phase in (ENROL, FINALIZE) else "; a job with a step_timeout would go on without it"
            lines.append(f"slow: {site}: at work on {step} for {seconds:.0f} s, the others took {took:.0f} s at most{remedy}")
    return lines


def _taken(site: str, one: _Asked, read: Read[A]) -> Answer[A]:
    """What became of the site's task; its answer is read once."""
    if one.answer is not None:
        answer, one.answer = one.answer, None
        one.taken = Answer(read(site, answer), "", "", one.seconds)
    return one.taken or Answer()
