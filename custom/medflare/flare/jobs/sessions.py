"""A person's session with the server of a federation: jobs by name as well as by id, their list, their results, what can be resumed."""

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Any, Final

from nvflare.apis.job_def import JobMetaKey, RunStatus
from nvflare.fuel.flare_api import api_spec
from nvflare.fuel.flare_api.api_spec import TargetType
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from medflare.core.errors import ConfigError, MedflareError
from medflare.core.settings import no_such
from medflare.core.text import printable_json

Job = Mapping[str, Any]  # what FLARE knows of a job
RUNNING: Final = RunStatus.RUNNING.value
REFUSALS: Final = (  # of the server, each an Exception of its own
    api_spec.AuthenticationError,
    api_spec.AuthorizationError,
    api_spec.InternalError,
    api_spec.JobNotDone,
    api_spec.JobNotFound,
    api_spec.JobNotRunning,
    api_spec.NoConnection,
    api_spec.NoReply,
    api_spec.SessionClosed,
)
LOST: Final = (  # of these, what a server says, or leaves unsaid, that goes away or was started again
    api_spec.AuthenticationError,
    api_spec.NoConnection,
    api_spec.SessionClosed,
)
_COLUMNS: Final = ("name", "id", "state", "method", "rounds", "submitted by", "at", "took", "")
_WAITING: Final = (RunStatus.SUBMITTED.value, RunStatus.APPROVED.value, RunStatus.DISPATCHED.value)
ABOUT: Final = "medflare"  # in a job's meta.json: what a list of jobs shows of it
SHORT: Final = 8  # letters of an id that a list shows


class Unreachable(MedflareError):
    """There is no connection to the server, or no more."""


@contextmanager
def session(kit: Path) -> Iterator[Session]:
    """A session with the server, closed at the end of the block.

    Raises:
        ConfigError: it is no such kit.
        Unreachable: the server cannot be reached, or no more.
        MedflareError: it refuses what the block asks of it.
    """
    place = kit / "startup" / "fed_admin.json"
    try:
        user = json.loads(place.read_text(encoding="utf-8"))["admin"]["username"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{kit} is no startup kit of a person ({place} cannot be read); give that of the lead") from error
    try:
        with redirect_stdout(StringIO()):  # FLARE says there that it connects
            opened = new_secure_session(user, str(kit))
    except Exception as error:  # FLARE's reasons are of many kinds
        raise Unreachable(f"no session with the server by {kit}: {_one_line(error)}; is the server up?") from error
    try:
        yield opened
    except LOST as error:
        raise Unreachable(f"no more session with the server of {kit}: {_one_line(error)}") from error
    except REFUSALS as error:
        raise MedflareError(f"the server of {kit}: {_one_line(error)}") from error
    finally:
        with suppress(Exception):  # whose connection is gone cannot say goodbye
            opened.close()


def jobs_of(opened: Session) -> list[Job]:
    """All jobs that the server has, the oldest first, each with all that FLARE knows of it."""
    found: list[Job] = printable_json(opened.list_jobs(detailed=True))  # names are those that other leads gave
    return found


def found_job(jobs: Iterable[Job], wanted: str) -> Job:
    """A job by its id, the beginning of its id, or its name; of several with one name the newest that runs.

    Raises:
        ConfigError: there is none, or several have the name and none of them runs.
    """
    known = list(jobs)
    matching = [job for job in known if wanted and id_of(job).startswith(wanted.lower())]
    if len(matching) != 1:
        named = [job for job in known if name_of(job) == wanted]
        running = [job for job in named if job[JobMetaKey.STATUS.value] == RUNNING]
        matching = running[-1:] or named or matching
    if not matching:
        raise ConfigError(f"{no_such('job', wanted, {name_of(job) for job in known})}; `medflare job list` shows names and ids")
    if len(matching) > 1:
        those = ", ".join(f"{short_id(job)} ({job[JobMetaKey.STATUS.value]})" for job in matching)
        raise ConfigError(f"{len(matching)} jobs fit {wanted!r}: {those}; give the id of one")
    return matching[0]


def name_of(job: Job) -> str:
    """The name that the job was submitted with."""
    return str(job.get(JobMetaKey.JOB_NAME.value) or job.get(JobMetaKey.JOB_FOLDER_NAME.value) or "")


def id_of(job: Job) -> str:
    """FLARE's id of the job."""
    return str(job[JobMetaKey.JOB_ID.value])


def short_id(job: Job) -> str:
    """The beginning of the job's id, which names it as well."""
    return id_of(job)[:SHORT]


def listing(jobs: Sequence[Job]) -> str:
    """A line a job, under a heading; one sentence where there is none."""
    if not jobs:
        return "no jobs"
    rows = [_COLUMNS, *(_row(job) for job in jobs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _row(job: Job) -> tuple[str, ...]:
    about = _about(job)
    return (
        name_of(job),
        short_id(job),
        str(job[JobMetaKey.STATUS.value]),
        str(about.get("method", "-")),
        str(about.get("rounds", "-")),
        str(job.get(JobMetaKey.SUBMITTER_NAME.value, "-")),
        _local(str(job.get(JobMetaKey.SUBMIT_TIME_ISO.value, ""))),
        str(job.get(JobMetaKey.DURATION.value, "-")).partition(".")[0],
        f"takes up {about['resume'][:SHORT]}" if "resume" in about else "",
    )


def _about(job: Job) -> Mapping[str, Any]:
    """What the job says of itself; empty for one that an older medflare, or somebody else, wrote."""
    props = job.get(JobMetaKey.CUSTOM_PROPS.value)
    about = props.get(ABOUT) if isinstance(props, Mapping) else None
    return about if isinstance(about, Mapping) else {}


def _local(moment: str) -> str:
    """A moment in this machine's time; as it is where FLARE writes something else."""
    try:
        return f"{datetime.fromisoformat(moment).astimezone():%Y-%m-%d %H:%M}"
    except ValueError:
        return moment or "-"


def fetch_job(opened: Session, job: str, out: Path) -> Path:
    """Download the results of a job; those that an earlier fetch left there are replaced.

    Returns:
        That folder.

    Raises:
        ConfigError: the folder is there and holds what is not the job's.
        MedflareError: the download failed.
    """
    place = out.resolve() / job
    if place.exists() and not place.is_dir():
        raise ConfigError(f"{place} is a file; choose another --out, or move it away")
    with beside(place) as scratch, _tidied(Path(opened.download_dir), job):
        try:
            location = opened.download_job_result(job, str(scratch))
        except RuntimeError as error:  # so FLARE calls what went wrong on this side
            reason = f"job {job} could not be downloaded ({_one_line(error)})"
            raise MedflareError(f"{reason}; see that there is room in {opened.download_dir} and {out}, then fetch it again") from error
        if not location or not (found := Path(location)).is_dir():
            raise MedflareError(f"the server sent no results of job {job}; `medflare job list` shows whether it has ended")
        _refuse_more(place, found)
        put_in_place(found, place)
    return place


def _refuse_more(place: Path, found: Path) -> None:
    """Nothing where each file in a place is among those found, as a later version of it.

    Raises:
        ConfigError: one would be lost.
    """
    for path in sorted(place.rglob("*")):
        if not path.is_dir() and not (found / path.relative_to(place)).exists():
            raise ConfigError(f"{path} is not among the job's results and would be lost; choose another --out, or move it away")


@contextmanager
def _tidied(transfer: Path, job: str) -> Iterator[None]:
    """Whatever of a job comes into FLARE's folder for transfers in the block is gone at its end; what was there before stays."""
    before = set(transfer.glob(f"{job}*"))
    try:
        yield
    finally:
        for left in set(transfer.glob(f"{job}*")) - before:
            shutil.rmtree(left, ignore_errors=True)


def interrupted_job(kit: Path, wanted: str) -> str:
    """The id of a job that a new one may take up.

    Raises:
        ConfigError: there is none, or several, or it waits, runs or has completed.
        MedflareError: see `session`.
    """
    with session(kit) as opened:
        found = found_job(jobs_of(opened), wanted)
        job, state = id_of(found), found[JobMetaKey.STATUS.value]
        if state == RunStatus.FINISHED_COMPLETED.value:
            raise ConfigError(f"job {job} has completed and needs no resuming; `medflare job fetch {job}` has its results")
        if state in _WAITING or (state == RUNNING and _has_process(opened, job)):
            raise ConfigError(f"job {job} is {state}; watch it (`medflare job watch {job}`), or abort it before you resume it")
        return job


def _has_process(opened: Session, job: str) -> bool:
    """Whether a job that is called running is: after a restart a server without `components.UnfinishedJobs` calls it so for ever."""
    try:
        opened.show_stats(job, TargetType.SERVER)
    except LOST:
        raise
    except REFUSALS:
        return False
    return True


@contextmanager
def beside(place: Path) -> Iterator[Path]:
    """An empty folder beside a place, on the same disk, which is gone at the end of the block."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent, ignore_cleanup_errors=True) as scratch:
        yield Path(scratch)


def put_in_place(new: Path, place: Path) -> None:
    """Rename a folder; an earlier one in its place goes once the new one is there."""
    old = place.with_name(f".{place.name}.{secrets.token_hex(8)}")
    if place.exists():
        os.rename(place, old)
    os.rename(new, place)
    shutil.rmtree(old, ignore_errors=True)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
