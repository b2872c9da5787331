"""A job followed to its end: rounds, sites, metrics and silences as they come, and why it failed where it did."""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from nvflare.apis.job_def import JobMetaKey, RunStatus
from nvflare.fuel.flare_api.api_spec import MonitorReturnCode, TargetType
from nvflare.fuel.flare_api.flare_api import Session

from medflare.flare.exchange.progress import GROUP, NOTED
from medflare.flare.jobs.explaining import deployment, explained, explanations, server_log
from medflare.flare.jobs.sessions import LOST, REFUSALS, RUNNING, Job, Unreachable, found_job, id_of, jobs_of, session

_EVERY = 1.0  # seconds between two looks
_GONE = 300.0  # seconds without statistics of a job that is called running after which it has no process
_QUIET = 10.0  # seconds without a sign of life until a site is named; it is named again whenever they have doubled
_RESUME = "the server was started again meanwhile; a new job takes it up after the last step that it finished (`medflare resume`)"
_FINISHED = "FINISHED:"  # what FLARE's words for the end of a job begin with
_STEP = r"(?:round \d+ \(\d+/\d+\)|after round \d+|without a round) \w+: .+"  # as `evaluation.console.round_line` writes it
_SLOW = r"slow: \S+: at work on .+"  # as `exchange.tasks` writes it
_TOLD = re.compile(f"(?:{NOTED}(?P<event>.+))|(?P<step>{_STEP}|{_SLOW})")  # in the server's log


class Follower:
    """What is new in a job's statistics.

    Args:
        say: takes a line.
    """

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._count = 0
        self._said: set[str] = set()
        self._named: dict[str, float] = {}  # site -> its silence when it was named last

    def show(self, told: Mapping[str, Any]) -> None:
        """The lines that are new, and who is silent.

        Args:
            told: see `exchange.progress.Progress.to_dict`; empty where the job has not begun.
        """
        if not told:
            return
        new = told["count"] - self._count
        for line in told["lines"][-new:] if new > 0 else ():
            self._say(line)
            self._said.add(line)
        self._count = told["count"]
        silent = told.get("silent", {})
        for site, seconds in silent.items():
            if seconds >= max(_QUIET, 2 * self._named.get(site, 0.0)):
                step = f"'{told['phase']}' of round {told['round']}"
                self._say(f"silent: {site}: nothing heard for {seconds:.0f} s in {step}; given up after {told['silence']:g} s")
                self._named[site] = seconds
        for site in [site for site in self._named if silent.get(site, 0.0) < _QUIET]:
            del self._named[site]

    def tell(self, lines: Iterable[str]) -> None:
        """Those that have not been said yet.

        Args:
            lines: one after the other.
        """
        for line in lines:
            if line not in self._said:
                self._say(line)
                self._said.add(line)

    def complete(self, log: str) -> None:
        """The steps that ended after the last look, and what was noted meanwhile.

        Args:
            log: the server's, of the whole job.
        """
        matches = map(_TOLD.search, log.splitlines())
        self.tell(found["event"] or found["step"] for found in matches if found)


def watch_job(
    kit: Path,
    wanted: str,
    say: Callable[[str], None],
    *,
    timeout: float = 0.0,
    patience: float = 600.0,
    every: float = _EVERY,
    opening: Callable[[Path], AbstractContextManager[Session]] = session,
) -> bool:
    """Follow a job until it ends, also where the server goes away and comes back; whether it completed.

    Args:
        kit: startup kit of who submitted it, or of the project admin.
        wanted: the job, see `found_job`.
        say: takes a line.
        timeout: seconds after which nobody watches any more, while the job goes on; 0: none.
        patience: seconds for which a server that was there is tried again.
        every: seconds between two looks, and between two tries.
        opening: kit -> a session.

    Raises:
        Unreachable: the server is not there at the beginning, or did not come back in time.
        MedflareError: see `sessions`.
    """
    began, lost, job, follower = time.monotonic(), 0.0, "", Follower(say)
    while True:
        try:
            with opening(kit) as opened:
                job = job or id_of(found_job(jobs_of(opened), wanted))
                if lost:
                    say(f"the server is back after {time.monotonic() - lost:.0f} s")
                    lost = 0.0
                left = max(timeout - (time.monotonic() - began), every) if timeout else 0.0
                return watch(opened, job, say, timeout=left, every=every, follower=follower)
        except Unreachable as error:
            if not job:
                raise
            if not lost:
                say(f"{error}; waiting for it, for up to {patience:g} s")
                lost = time.monotonic()
            if time.monotonic() - lost >= patience:
                raise Unreachable(
                    f"the server did not come back within {patience:g} s ({error}); job {job} may go on: watch it again"
                ) from error
        time.sleep(every)


def watch(
    opened: Session, job: str, say: Callable[[str], None], *, timeout: float = 0.0, every: float = _EVERY, follower: Follower | None = None
) -> bool:
    """Follow a job until it ends, by one session; whether it completed.

    Args:
        opened: a session of who submitted it, or of the project admin.
        job: its id.
        say: takes a line.
        timeout: seconds after which nobody watches any more, while the job goes on; 0: none.
        every: seconds between two looks.
        follower: of the same job by an earlier session; None: there was none.
    """
    follower, states = follower or Follower(say), [""]
    heard = time.monotonic()

    def look(opened: Session, job: str, meta: Job) -> bool:
        nonlocal heard
        state = meta[JobMetaKey.STATUS.value]
        shown = state + _waits(meta)
        if shown != states[-1] and not state.startswith(_FINISHED):  # before that come the last steps
            say(f"{job} {shown}")
            states.append(shown)
            follower.tell(explanations(deployment(meta)))  # who refused it, while the others go on
        refused = False
        if state == RUNNING:
            try:
                follower.show(_told(opened.show_stats(job, TargetType.SERVER)))
            except LOST:
                raise
            except REFUSALS:  # its process comes up or goes down, or is no more
                refused = True
        heard = heard if refused else time.monotonic()
        return time.monotonic() - heard < _GONE

    ended, meta = opened.monitor_job_and_return_job_meta(job, timeout, every, look)
    if ended == MonitorReturnCode.TIMEOUT:
        say(f"{job} is still {states[-1]} after {timeout:g} s; it goes on, nobody watches")
        return False
    if ended == MonitorReturnCode.ENDED_BY_CB:
        say(f"{job} is called {RUNNING}, and has no process for {_GONE:g} s: {_RESUME}")
        return False
    with suppress(*REFUSALS):
        follower.complete(server_log(opened, job))
    say(f"{job} {meta[JobMetaKey.STATUS.value]}")
    if meta[JobMetaKey.STATUS.value] == RunStatus.FINISHED_COMPLETED.value:
        return True
    if meta[JobMetaKey.STATUS.value] == RunStatus.ABANDONED.value:
        say(_RESUME)
        return False
    for line in explained(opened, job):
        say(line)
    return False


def _waits(meta: Job) -> str:
    """Why FLARE has not started a job yet, as it said when it tried last; empty where it has, or has not tried."""
    history = meta.get(JobMetaKey.SCHEDULE_HISTORY.value)
    if meta[JobMetaKey.STATUS.value] != RunStatus.SUBMITTED.value or not history:
        return ""
    return f", waits: {history[-1].partition(': ')[2]}"  # before it stands the time


def _told(stats: Mapping[str, Any]) -> Mapping[str, Any]:
    """What medflare says in the server's statistics; empty where the job is none of its, or has not begun."""
    server = stats.get(TargetType.SERVER)
    told = server.get(GROUP) if isinstance(server, Mapping) else None
    return told if isinstance(told, Mapping) else {}
