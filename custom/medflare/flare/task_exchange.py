"""One step under FLARE: a task for each site, and a wait for the replies, which always ends.

A site replies, the step times out, or the site shows no sign of life (`liveness`).
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.app_constant import AppConstants
from nvflare.fuel.utils.memory_utils import try_malloc_trim

from medflare.core.errors import Aborted, ConfigError, UpdateError
from medflare.core.message import Message
from medflare.core.text import JsonDict, Say
from medflare.federation.exchange import SiteReplies, SiteReply
from medflare.federation.settings import (
    BUILTIN_PHASES,
    CROSS_SITE,
    ENROL,
    FINALIZE,
    RunSettings,
    step_name,
)
from medflare.flare.messages import error_of, to_message, to_shareable
from medflare.methods.base import Step

# Seconds that a run waits for a site that enrolls after the first step; the site is asked again
# later.
_NEWCOMER_TIMEOUT = 60.0
# Seconds of work after which a site that is still alive is reported, and only if it has worked this
# many times as long as the slowest of the other sites.
_SLOW = 300.0
_TIMES_SLOWEST = 5
# Seconds between two checks of the clock and of the abort signal; a reply wakes the wait at once.
_POLL = 0.1


@dataclass
class _SiteTask:
    """The task of one site in the current step. Times are on the monotonic clock."""

    task: Task
    sent: float
    fetched: float | None = None
    shareable: Shareable | None = None  # the reply, until it has been read
    reply: SiteReply | None = None
    seconds: float = 0.0  # from fetching the task to the reply
    reported: float = 0.0  # seconds of work when the site was last reported as slow

    @property
    def replied(self) -> bool:
        return self.shareable is not None or self.reply is not None


@dataclass(eq=False)
class TaskExchange:
    """The schedule's exchange (`federation.exchange.Exchange`) over FLARE's tasks.

    Args:
        members: returns the names of the sites that FLARE has in this job now.
        stop_reason: returns why the job is being stopped.
        say: takes a progress line.
    """

    controller: Controller
    fl_ctx: FLContext
    abort_signal: Signal
    settings: RunSettings
    members: Callable[[], Iterable[str]]
    stop_reason: Callable[[], str]
    say: Say

    def __post_init__(self) -> None:
        # Site -> when the server last heard from it, on the monotonic clock.
        self.heard: dict[str, float] = {}
        # Sites that are given up until the server hears from them again.
        self._lost: set[str] = set()
        # Sites whose enrollment timed out; they are present again when they ask for work.
        self._not_ready: set[str] = set()
        self._waiting: set[str] = set()  # sites with a request that waits for a task
        self._step: Step | None = None
        self._tasks: dict[str, _SiteTask] = {}
        self._changed = threading.Condition()
        self._closed = False

    def present(self, round: int) -> list[str]:
        """Names of the sites that can be asked, among them a lost site from which the server hears
        again.

        Raises:
            ConfigError: FLARE does not know an outside site.
        """
        members = sorted(self.members())
        unknown = sorted(set(self.settings.outside) - set(members))
        if unknown:
            raise ConfigError(
                f"unknown outside site {unknown[0]!r}; this job runs at {', '.join(members)}: "
                "correct 'outside' or start the site first"
            )
        return [site for site in members if site not in self._lost | self._not_ready]

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> SiteReplies:
        """Send each site its message and wait for the replies.

        Raises:
            Aborted: the job is being stopped.
        """
        timeout = self._timeout(step)
        with self._changed:
            self._step = step
            self._tasks = {
                site: self._send(step, site, message) for site, message in sorted(outgoing.items())
            }
            self._changed.notify_all()
        try:
            missing = self._wait(step, timeout)
        finally:
            with self._changed:
                tasks = self._tasks
                self._tasks = {}
            for site_task in tasks.values():
                if not site_task.replied:
                    self.controller.cancel_task(
                        site_task.task, TaskCompletionStatus.CANCELLED, self.fl_ctx
                    )
            try_malloc_trim()
        return {site: missing.get(site) or _read(site_task) for site, site_task in tasks.items()}

    def heard_from(self, site: str) -> None:
        """Note that the server heard from the site just now."""
        self.heard[site] = time.monotonic()
        self._lost.discard(site)

    def wait_for_task(self, site: str, seconds: float) -> None:
        """Return when the site, which asks for work and so has read its images, has a new task, at
        the latest after `seconds`.

        Returns at once if the site waits already, as each waiting request holds one of FLARE's
        threads.
        """
        with self._changed:
            self._not_ready.discard(site)
            self.heard_from(site)
            if site in self._waiting:
                return
            self._waiting.add(site)
            self._changed.wait_for(
                lambda: self._closed or (site in self._tasks and self._tasks[site].fetched is None),
                seconds,
            )
            self._waiting.discard(site)

    def waiting(self) -> JsonDict:
        """The current step and the sites that have not replied; {} before the first step.

        The items are `phase`, `round`, `silent` (site -> seconds of silence) and
        `heartbeat_timeout`.
        """
        with self._changed:
            if self._step is None:
                return {}
            silent = {
                site: round(self._silence(site, site_task.sent), 1)
                for site, site_task in self._tasks.items()
                if not site_task.replied
            }
            step = self._step
        return {
            "phase": step.phase,
            "round": step.round,
            "silent": silent,
            "heartbeat_timeout": self.settings.heartbeat_timeout,
        }

    def close(self) -> None:
        """Note that there are no more tasks, so that no site is kept waiting for one."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _timeout(self, step: Step) -> float:
        """Seconds until the step is closed; 0: never, as for the final models, whose evaluation may
        take long.
        """
        if step.phase in (FINALIZE, CROSS_SITE):
            return 0.0
        if step.phase != ENROL:
            return self.settings.step_timeout
        timeout = self.settings.enrol_timeout
        if self._step is None:
            return timeout
        return min(timeout or _NEWCOMER_TIMEOUT, _NEWCOMER_TIMEOUT)

    def _send(self, step: Step, site: str, message: Message) -> _SiteTask:
        data = to_shareable(message)
        data.set_header(AppConstants.CURRENT_ROUND, step.round)
        task = Task(
            step.phase, data, after_task_sent_cb=self._on_fetched, result_received_cb=self._on_reply
        )
        self.controller.send(task, self.fl_ctx, targets=[site])
        return _SiteTask(task, time.monotonic())

    def _on_fetched(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        self.heard_from(client_task.client.name)
        with self._changed:
            site_task = self._current(client_task)
            if site_task:
                site_task.fetched = time.monotonic()

    def _on_reply(self, client_task: ClientTask, fl_ctx: FLContext) -> None:
        """Store the reply without reading it: FLARE holds its locks while this runs."""
        shareable = client_task.result
        client_task.result = None  # FLARE would keep it until its task monitor runs
        self.heard_from(client_task.client.name)
        with self._changed:
            site_task = self._current(client_task)
            if site_task:
                site_task.shareable = shareable
                site_task.seconds = time.monotonic() - (site_task.fetched or site_task.sent)
                self._changed.notify_all()

    def _current(self, client_task: ClientTask) -> _SiteTask | None:
        """The site's task, or None for a reply to an earlier step."""
        site_task = self._tasks.get(client_task.client.name)
        if site_task is None or site_task.task is not client_task.task:
            return None
        return site_task

    def _wait(self, step: Step, timeout: float) -> SiteReplies:
        """Return when each site has replied or is given up.

        Returns:
            Site -> the reply that says why there is none.
        """
        started = time.monotonic()
        busy = started  # when any site was last at work
        missing: SiteReplies = {}
        while True:
            for site_task in self._tasks.values():
                _read(site_task)  # while other sites still work
            remaining = {site: task for site, task in self._tasks.items() if site not in missing}
            for line in _slow_sites(step, remaining):
                self.say(line)
            with self._changed:
                pending = {site: task for site, task in remaining.items() if not task.replied}
                if not pending:
                    return missing
                if self.abort_signal.triggered:
                    raise Aborted(self.stop_reason())
                if timeout and time.monotonic() - started > timeout:
                    missing |= _late_replies(step, pending, timeout)
                    if step.phase == ENROL:
                        self._not_ready |= pending.keys()
                    return missing
                at_work = False
                for site, site_task in pending.items():
                    if self._gone(site, site_task, busy):
                        self._lost.add(site)
                        problem = f"no sign of life in {_name(step)}; going on without the site"
                        missing[site] = SiteReply(None, problem, "missing")
                    elif site_task.fetched is not None:
                        at_work = True
                if at_work:
                    busy = time.monotonic()
                self._changed.wait(_POLL)

    def _gone(self, site: str, site_task: _SiteTask, busy: float) -> bool:
        """Whether a site that has a task is lost; `busy` is when any site was last at work.

        A site that has not fetched its task may be waiting for its turn (FLARE's simulator with
        fewer threads than sites): its silence counts only while no other site is at work.
        """
        if self.controller.get_client_disconnect_time(site):
            return True
        since = site_task.sent
        if site_task.fetched is None:
            since = max(since, busy)
        return self._silence(site, since) > self.settings.heartbeat_timeout

    def _silence(self, site: str, since: float) -> float:
        """Seconds since the server heard from the site, or since this moment, whichever is less."""
        return time.monotonic() - max(self.heard.get(site, 0.0), since)


def read_reply(shareable: Shareable) -> SiteReply:
    """What a site sent, as the schedule uses it: a message, or why there is none.

    Raises:
        MemoryError: the server is at fault.
    """
    try:
        problem = error_of(shareable)
        if problem is not None:
            return SiteReply(None, problem)
        return SiteReply(to_message(shareable))
    except MemoryError:
        raise
    except UpdateError as error:
        return SiteReply(None, str(error), "rejected")
    except Exception as error:
        # FLARE carries whatever a filter or an attacker puts into a reply; it must cost this site's
        # update only.
        problem = f"its reply cannot be read ({type(error).__name__}: {error})"
        return SiteReply(None, problem, "rejected")


def _read(site_task: _SiteTask) -> SiteReply:
    """The site's reply, which is read once."""
    if site_task.shareable is not None:
        shareable = site_task.shareable
        site_task.shareable = None
        site_task.reply = replace(read_reply(shareable), seconds=site_task.seconds)
    return site_task.reply or SiteReply(None, "no reply", "missing")


def _late_replies(step: Step, pending: Mapping[str, _SiteTask], timeout: float) -> SiteReplies:
    """The replies that stand for those of the sites that a closed step did not wait for."""
    replies = {}
    for site, site_task in pending.items():
        state = "had not fetched its task" if site_task.fetched is None else "was still at work"
        problem = f"{_name(step)} was closed after {timeout:g} s; the site {state}"
        replies[site] = SiteReply(None, problem, "late")
    return replies


def _name(step: Step) -> str:
    return step_name(step.phase, step.round)


def _slow_sites(step: Step, tasks: Mapping[str, _SiteTask]) -> list[str]:
    """A line for each site that has worked far longer than the slowest of those that are done,
    again when the time has doubled.
    """
    done = [site_task.seconds for site_task in tasks.values() if site_task.replied]
    slowest = max(done, default=math.inf)
    lines = []
    for site, site_task in tasks.items():
        if site_task.fetched is None or site_task.replied:
            continue
        seconds = time.monotonic() - site_task.fetched
        if seconds >= max(_SLOW, _TIMES_SLOWEST * slowest, 2 * site_task.reported):
            site_task.reported = seconds
            line = (
                f"slow: {site}: at work on {_name(step)} for {seconds:.0f} s, "
                f"the others took {slowest:.0f} s at most"
            )
            if step.phase not in BUILTIN_PHASES:
                line += "; a job with a step_timeout would go on without it"
            lines.append(line)
    return lines
