"""A job followed to its end: rounds, sites, metrics and silences as they come, and why it failed where it did."""

import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Final

from nvflare.apis.job_def import JobMetaKey, RunStatus
from nvflare.fuel.flare_api.api_spec import MonitorReturnCode, TargetType
from nvflare.fuel.flare_api.flare_api import Session

from medflare.flare.jobs.sessions import LOST, REFUSALS, RUNNING, Job, Unreachable, found_job, id_of, jobs_of, session
from medflare.flare.messages import UNABLE
from medflare.flare.tracking import GROUP, NOTED

_EVERY = 1.0  # seconds between two looks
_GONE = 300.0  # seconds without statistics of a job that is called running after which it has no process
_QUIET = 10.0  # seconds without a sign of life until a site is named; it is named again whenever they have doubled
_RESUME = "the server was started again meanwhile; a new job takes it up after the last step that it finished (`medflare resume`)"
_FINISHED = "FINISHED:"  # what FLARE's words for the end of a job begin with
_STEP = r"(?:round \d+ \(\d+/\d+\)|after round \d+|without a round) \w+: .+"  # as `evaluation.console.round_line` writes it
_SLOW = r"slow: \S+: at work on .+"  # as `tasks` writes it
_TOLD = re.compile(f"(?:{NOTED}(?P<event>.+))|(?P<step>{_STEP}|{_SLOW})")  # in the server's log

# What FLARE or medflare writes -> what it means. {party} is the server or the site whose log or reply it is.
MEANINGS: Final[Mapping[str, str]] = {
    r"BYOC not permitted": (
        "{party} refuses jobs that bring their own code; submit the job without app/custom/ (medflare job ... --no-byoc), "
        'or have {party} allow "byoc" to your role in its local/authorization.json'
    ),
    r"Component '(?P<what>[\w.]+)'.* is not in allow_list": (
        "{party} does not allow the component {what}; where it is one of medflare's, its administrator brings class_allow_list in "
        "{party}'s local/resources.json up to date (`medflare site setup KIT --replace-policies`), then submit the job again"
    ),
    r"^(?:\w+: )?(?P<kind>component|network) (?P<what>.+?) refused: (?P<why>.+)": (
        "{party} refused the {kind} {what} that the job names: {why}; where it is one of medflare's, the administrator of {party} runs "
        "`medflare site setup KIT --replace-policies`, then submit the job again"
    ),
    r"No module named '(?P<what>[\w.]+)'": (
        "{party} lacks the Python package {what}; its administrator installs medflare with pip in the environment that FLARE runs in, "
        "or, where it allows jobs that bring code, submit one that does (medflare job ... --embed-code)"
    ),
    r"medflare: FAILED: (?!aborted)(?P<what>.+)": "the federation failed: {what}",
    rf"{UNABLE}(?:site \S+: )?(?P<what>.+)": "{party} could not do its part: {what}",
}


class Follower:
    """What is new in a job's statistics."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._count = 0
        self._said: set[str] = set()
        self._named: dict[str, float] = {}  # site -> its silence when it was named last

    def show(self, told: Mapping[str, Any]) -> None:
        """The lines that are new, and who is silent."""
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
                self._say(f"silent: {site}: nothing heard for {seconds:.0f} s in {step}; given up after {told['heartbeat_timeout']:g} s")
                self._named[site] = seconds
        for site in [site for site in self._named if silent.get(site, 0.0) < _QUIET]:
            del self._named[site]

    def tell(self, lines: Iterable[str]) -> None:
        """Those that have not been said yet."""
        for line in lines:
            if line not in self._said:
                self._say(line)
                self._said.add(line)

    def complete(self, log: str) -> None:
        """The steps that ended after the last look, and what was noted meanwhile."""
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
    """Follow a job until it ends, by one session; whether it completed."""
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


# -- why a job did not end as completed -----------------------------------------------------------------------------------------


def explained(opened: Session, job: str) -> list[str]:
    """What is known about the end of a job, each reason once; never empty."""
    found = list(dict.fromkeys(explanations(_texts(opened, job))))
    return found or [f"nothing known about job {job} explains its end; read the logs of the server and the sites"]


def explanations(texts: Iterable[tuple[str, str]]) -> Iterator[str]:
    """What texts mean, line by line.

    Examples:
        >>> list(explanations([("server", "... ERROR - medflare: FAILED: no site is present")]))
        ['the federation failed: no site is present']
    """
    for party, text in texts:
        for line in text.splitlines():
            matches = ((re.search(pattern, line), meaning) for pattern, meaning in MEANINGS.items())
            yield from (meaning.format(party=party, **match.groupdict()) for match, meaning in matches if match)


def server_log(opened: Session, job: str) -> str:
    """The server's log of a job."""
    return "".join(opened.get_job_logs(job)["logs"].values())


def deployment(meta: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(party, what it said) when FLARE handed the job out."""
    for detail in meta.get(JobMetaKey.JOB_DEPLOY_DETAIL.value) or []:
        party, _, said = str(detail).partition(": ")
        yield party, said


def _texts(opened: Session, job: str) -> Iterator[tuple[str, str]]:
    """(party, what it said): how the job was deployed, the error logs that sites let the server have, and the server's log."""
    yield from deployment(opened.get_job_meta(job))
    if "ERRORLOG" in " ".join(opened.list_job_components(job)):
        downloaded = Path(opened.download_job_components(job))
        try:
            for log in sorted(downloaded.rglob("ERRORLOG_*")):
                yield log.name.removeprefix("ERRORLOG_"), log.read_text(errors="replace")
        finally:
            shutil.rmtree(downloaded, ignore_errors=True)  # in the kit's transfer/, where results would then get another name
    yield from opened.get_job_logs(job)["logs"].items()
