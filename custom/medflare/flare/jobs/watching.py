"""Follows a job to its end: prints rounds, metrics and silent sites as they come, and the reasons
if it failed.
"""

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from nvflare.apis.job_def import JobMetaKey, RunStatus
from nvflare.fuel.flare_api.api_spec import MonitorReturnCode, TargetType
from nvflare.fuel.flare_api.flare_api import Session

from medflare.core.text import Json, Say, printable
from medflare.federation.settings import ENROL, step_name
from medflare.flare.jobs.sessions import (
    LOST,
    REFUSALS,
    RUNNING,
    Job,
    Unreachable,
    found_job,
    id_of,
    jobs_of,
    session,
)
from medflare.flare.messages import UNABLE
from medflare.flare.tracking import GROUP, NOTED

_INTERVAL = 1.0  # seconds between two looks, or two attempts to reach the server
_GONE = 300.0  # seconds in the state RUNNING without statistics after which a job has no process
# Seconds without a sign of life until a site is reported, and without a line until it is said what
# the job does; and again each time they have doubled.
_SILENT = 10.0
_REPEAT = 60.0  # seconds without a line, at most
_RESUME = (
    "the server was started again meanwhile; "
    "a new job resumes it after its last finished step "
    "(`medflare resume JOB_FOLDER --job ID --out NEW`, then submit NEW)"
)
_OK = ("OK", "")  # replies to a deployment
_FINISHED = "FINISHED:"  # prefix of FLARE's final states
# From `federation.outcome.StepReport.text`.
_STEP = r"(?:round \d+/\d+|after round \d+|without training) \w+: .+"
_SLOW = r"slow: \S+: at work on .+"  # from `task_exchange`
_PROGRESS = re.compile(f"(?:{NOTED}(?P<event>.+))|(?P<step>{_STEP}|{_SLOW})")  # in the server's log

_NEW_POLICIES = (
    "the administrator of {party} runs `medflare site setup KIT --replace-policies`, "
    "then submit the job again"
)

# What FLARE or medflare writes -> what it means; {party} is the server or site that wrote it.
MEANINGS: Mapping[str, str] = {
    r"BYOC not permitted": (
        "{party} refuses jobs that bring their own code; "
        "submit the job without app/custom/ (medflare job ... --no-byoc), "
        'or have {party} allow "byoc" to your role in its local/authorization.json'
    ),
    r"Component '(?P<what>medflare\.[\w.]+)'.* is not in allow_list": (
        f"{{party}} does not allow the component {{what}}; {_NEW_POLICIES}"
    ),
    r"Component '(?P<what>(?!medflare\.)[\w.]+)'.* is not in allow_list": (
        "{party} does not allow the component {what}"
    ),
    r"^(?:\w+: )?component (?P<what>medflare\.\S+) refused: (?P<why>.+)": (
        f"{{party}} refuses this job's component {{what}}: {{why}}; {_NEW_POLICIES}"
    ),
    (
        r"^(?:\w+: )?(?P<what>(?:component (?!medflare\.)|network |configuration ).+?) refused: "
        r"(?P<why>.+)"
    ): "{party} refuses this job's {what}: {why}",
    r"privacy scope '(?P<what>.*)' is not allowed": (
        "{party} does not allow the privacy scope '{what}' of this job; "
        'remove "scope" from its meta.json'
    ),
    r"no reply \(deployment timeout\)": (
        "{party} did not reply when the job was sent to it; its administrator checks it "
        "(`medflare site doctor KIT`), then submit the job again"
    ),
    r"fatal return code UNSAFE_JOB from client (?P<site>\S+)": (
        "{site} takes no job with task_result_filters of its own, "
        "which would run after the site's filters; "
        "leave them out, or have the site name them in its local/privacy.json"
    ),
    r"\"filters\" must contain Filter object but got <class '(?P<what>[\w.]+)'>": (
        "{party} cannot use {what} as a filter; remove it from the filters of this job"
    ),
    r"received dead job report for client (?P<site>\S+)": (
        "the job's process at {site} ended too early, as the site was stopped or the process "
        "failed; its administrator finds the reason in ID/log.txt of its kit"
    ),
    r"No module named '(?P<what>[\w.]+)'": (
        "{party} lacks the Python package {what}; "
        "its administrator installs medflare with pip in the environment that FLARE runs in, "
        "or, where it allows jobs that bring code, submit one that does "
        "(medflare job ... --embed-code)"
    ),
    r"medflare: FAILED: (?!aborted)(?P<what>.+)": "the federation failed: {what}",
    rf"{UNABLE}(?:site \S+: )?(?P<what>.+)": "{party} could not do its part: {what}",
}


class Follower:
    """Passes what is new about a job to `say`, line by line, over all sessions with its server."""

    def __init__(self, say: Say):
        self._tell = lambda line: say(printable(line))  # the server and the sites write some of it
        self._told = time.monotonic()  # when there was news
        self._patience = _SILENT
        self._printed: set[str] = set()
        self._reported: dict[str, float] = {}  # site -> its silence when it was last reported

    def follow(self, connection: Session, job: str, timeout: float) -> bool:
        """Follow a job until it ends, in one session; return whether it completed."""
        shown = ""
        heard = time.monotonic()

        def look(connection: Session, job: str, meta: Job) -> bool:
            nonlocal heard, shown
            state = meta[JobMetaKey.STATUS] + _waits(meta)
            finished = state.startswith(_FINISHED)  # the last steps are printed before that
            if state != shown and not finished:
                self._say(f"{job} {state}")
                shown = state
                # A party may have refused the job while others run it.
                self._print_once(explanations(deployment(meta)))
            progress: Json = {}
            if meta[JobMetaKey.STATUS] == RUNNING:
                try:
                    progress = _progress(connection.show_stats(job, TargetType.SERVER))
                    self._show(progress)
                except LOST:
                    raise
                except REFUSALS:  # the job's process starts or ends, or has ended
                    self._show_work(state, progress)
                    return time.monotonic() - heard < _GONE
            self._show_work(state, progress)
            heard = time.monotonic()
            return True

        ended, meta = connection.monitor_job_and_return_job_meta(job, timeout, _INTERVAL, look)
        if ended == MonitorReturnCode.TIMEOUT:
            self._say(
                f"{job} is still {shown} after {timeout:.0f} s; it goes on; "
                "`medflare job watch` follows it again"
            )
            return False
        if ended == MonitorReturnCode.ENDED_BY_CB:
            self._say(f"{job} is called {RUNNING}, and has no process for {_GONE:g} s: {_RESUME}")
            return False
        state = meta[JobMetaKey.STATUS]
        with suppress(*REFUSALS):
            self._print_log("".join(connection.get_job_logs(job)["logs"].values()))
        self._say(f"{job} {state}")
        if state == RunStatus.FINISHED_COMPLETED:
            return True
        reasons = [_RESUME]
        if state != RunStatus.ABANDONED:
            reasons = end_reasons(connection, job)
        for reason in reasons:
            self._say(reason)
        return False

    def _say(self, line: str) -> None:
        self._tell(line)
        self._told = time.monotonic()
        self._patience = _SILENT

    def _show_work(self, state: str, progress: Json) -> None:
        """Say what the job does if nothing was said for a while."""
        quiet = time.monotonic() - self._told
        if quiet < self._patience or state.startswith(_FINISHED):
            return
        self._patience = quiet + min(quiet, _REPEAT)
        work = state
        if "phase" in progress:
            work = step_name(progress["phase"], progress["round"])
            if progress["phase"] == ENROL:
                work = "enrolment, for which sites read their images"
            silent = progress["silent"]
            work += f", at work: {', '.join(sorted(silent)) or 'the server'}"
        elif state == RUNNING:
            work = "the processes of the server and the sites start"
        self._tell(f"{work} ({quiet:.0f} s)")

    def _print_log(self, log: str) -> None:
        """Print the steps and events of the server's log that came after the last look."""
        for line in log.splitlines():
            match = _PROGRESS.search(line)
            if match:
                self._print_once([match["event"] or match["step"]])

    def _show(self, progress: Json) -> None:
        """Print the new lines and the silent sites."""
        if not progress:
            return
        self._print_once(progress["lines"])
        silent = progress.get("silent", {})
        for site, seconds in silent.items():
            if seconds >= max(_SILENT, 2 * self._reported.get(site, 0.0)):
                self._say(
                    f"silent: {site}: nothing heard for {seconds:.0f} s "
                    f"in {step_name(progress['phase'], progress['round'])}; "
                    f"given up after {progress['heartbeat_timeout']:g} s"
                )
                self._reported[site] = seconds
        for site in list(self._reported):
            if silent.get(site, 0.0) < _SILENT:
                del self._reported[site]

    def _print_once(self, lines: Iterable[str]) -> None:
        for line in lines:
            if line not in self._printed:
                self._say(line)
                self._printed.add(line)


def watch_job(
    kit: Path, wanted: str, say: Say, *, timeout: float = 0.0, patience: float = 600.0
) -> bool:
    """Follow a job until it ends, even if the server stops and comes back; return whether it
    completed.

    Args:
        kit: startup kit of the lead or the project admin.
        wanted: the job, see `found_job`.
        say: takes a line.
        timeout: seconds after which to stop watching, while the job goes on; 0: none.
        patience: seconds to wait for a server that has stopped.

    Raises:
        Unreachable: the server cannot be reached at the beginning, or did not come back in time.
        MedflareError: see `sessions`.
    """
    began = time.monotonic()
    lost = 0.0  # when the server stopped
    job = ""
    follower = Follower(say)
    while True:
        try:
            with session(kit) as connection:
                job = job or id_of(found_job(jobs_of(connection), wanted))
                if lost:
                    say(f"the server is back after {time.monotonic() - lost:.0f} s")
                    lost = 0.0
                left = 0.0
                if timeout:
                    left = max(timeout - (time.monotonic() - began), _INTERVAL)
                return follower.follow(connection, job, left)
        except Unreachable as error:
            if not job:
                raise
            if not lost:
                say(f"{error}; waiting for it, for up to {patience:g} s")
                lost = time.monotonic()
            if time.monotonic() - lost >= patience:
                reason = f"the server did not come back within {patience:g} s ({error})"
                raise Unreachable(f"{reason}; job {job} may go on: watch it again") from error
        time.sleep(_INTERVAL)


def _waits(meta: Job) -> str:
    """Why FLARE has not started a submitted job at its last attempt; "" if it has started it, or
    has not tried.
    """
    history = meta.get(JobMetaKey.SCHEDULE_HISTORY)
    if meta[JobMetaKey.STATUS] != RunStatus.SUBMITTED or not history:
        return ""
    return f", waits: {history[-1].partition(': ')[2]}"  # after the time


def _progress(stats: Json) -> Json:
    """medflare's part of the server's statistics; {} if the job has none, or not yet."""
    server = stats.get(TargetType.SERVER)
    progress = server.get(GROUP) if isinstance(server, Mapping) else None
    return progress if isinstance(progress, Mapping) else {}


def end_reasons(connection: Session, job: str) -> list[str]:
    """The reasons for the end of a job, each once; never empty."""
    meta = connection.get_job_meta(job)
    replies = list(deployment(meta))
    log = connection.get_job_logs(job)["logs"]
    reasons = list(dict.fromkeys(explanations([*replies, *log.items()])))
    if not reasons:
        for party, reply in replies:
            if reply not in _OK:
                reasons.append(f"{party} replied to the deployment: {reply}")
        if meta.get(JobMetaKey.STATUS) == RunStatus.FINISHED_ABORTED:
            reasons.append("somebody aborted it")
    return reasons or [
        f"nothing known about job {job} explains its end; read the logs of the server and the sites"
    ]


def explanations(texts: Iterable[tuple[str, str]]) -> Iterator[str]:
    """The meanings of (party, text), line by line.

    Examples:
        >>> list(explanations([("server", "... ERROR - medflare: FAILED: no site is present")]))
        ['the federation failed: no site is present']
    """
    for party, text in texts:
        for line in text.splitlines():
            if NOTED in line:  # the words of a site
                continue
            for pattern, meaning in MEANINGS.items():
                match = re.search(pattern, line)
                if match:
                    yield meaning.format(party=party, **match.groupdict())


def deployment(meta: Json) -> Iterator[tuple[str, str]]:
    """(party, its reply) of every party to which FLARE deployed the job."""
    for detail in meta.get(JobMetaKey.JOB_DEPLOY_DETAIL) or []:
        party, _, reply = str(detail).partition(": ")
        yield party, reply
