"""A person's session with the server of a federation, which lists jobs, finds them by name or id,
and fetches their results.
"""

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import datetime
from io import StringIO
from pathlib import Path

from nvflare.apis.job_def import JobMetaKey, RunStatus
from nvflare.fuel.flare_api import api_spec
from nvflare.fuel.flare_api.api_spec import TargetType
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from medflare.core.errors import ConfigError, MedflareError, one_line
from medflare.core.settings import no_such
from medflare.core.text import Json, printable_json, read_json
from medflare.flare.flare_patches import search_kits_only
from medflare.flare.names import JOB_ID
from medflare.flare.other_parties.limits import keep_downloads_inside
from medflare.flare.other_parties.senders import connect_nowhere_else

Job = Json  # FLARE's metadata of a job
RUNNING = RunStatus.RUNNING.value
# Also after a restart of the server.
LOST = (api_spec.AuthenticationError, api_spec.NoConnection, api_spec.SessionClosed)
REFUSALS = (
    *LOST,
    api_spec.AuthorizationError,
    api_spec.InternalError,
    api_spec.InvalidJobDefinition,
    api_spec.JobNotDone,
    api_spec.JobNotFound,
    api_spec.JobNotRunning,
    api_spec.NoReply,
)
ABOUT = "medflare"  # in a job's meta.json: what `job_table` shows of it
_WAITING = (RunStatus.SUBMITTED, RunStatus.APPROVED, RunStatus.DISPATCHED)
_COLUMNS = ("name", "id", "state", "method", "rounds", "submitted by", "at", "took", "")
_PAGES = (".html", ".htm", ".xhtml", ".shtml", ".mhtml", ".xml", ".svg")
_REPORT = "report.html"  # written after the download, see `report.write_report`
_ID_LETTERS = 8  # of an id that a list shows
_WIDEST = 150  # letters of a column of a list


class Unreachable(MedflareError):
    """The server cannot be reached, or no longer."""


@contextmanager
def session(kit: Path) -> Iterator[Session]:
    """A session with the server, closed at the end of the block.

    Raises:
        ConfigError: the kit is no startup kit of a person.
        Unreachable: the server cannot be reached, or no longer.
        MedflareError: the server refuses a request of the block.
    """
    kit_file = kit / "startup" / "fed_admin.json"
    try:
        user = read_json(kit_file)["admin"]["username"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{kit} is no startup kit of a person ({kit_file} cannot be read); "
            "give that of the lead"
        ) from error
    search_kits_only()
    connect_nowhere_else()
    keep_downloads_inside()
    try:
        with redirect_stdout(StringIO()):  # FLARE prints that it connects
            connection = new_secure_session(user, str(kit))
    except Exception as error:  # FLARE raises exceptions of many kinds
        raise Unreachable(
            f"no session with the server by {kit}: {one_line(error)}; is the server up, "
            "and is this a kit of its federation?"
        ) from error
    try:
        yield connection
    except LOST as error:
        raise Unreachable(f"no more session with the server of {kit}: {one_line(error)}") from error
    except api_spec.AuthorizationError as error:
        raise MedflareError(
            f"the server of {kit}: its account may not do this; a lead's may (--kit)"
        ) from error
    except REFUSALS as error:
        raise MedflareError(f"the server of {kit}: {one_line(error)}") from error
    finally:
        with suppress(Exception):  # the connection may be lost
            connection.close()


def jobs_of(connection: Session) -> list[Job]:
    """All jobs of the server, the oldest first."""
    # Other leads chose the names.
    return printable_json(connection.list_jobs(detailed=True))


def found_job(jobs: Sequence[Job], wanted: str) -> Job:
    """A job by its id, the beginning of its id, or its name; the newest that runs if several have
    the name.

    Raises:
        ConfigError: there is none, or several have the name and none of them runs.
    """
    matching = [job for job in jobs if wanted and id_of(job).startswith(wanted.lower())]
    if len(matching) != 1:
        named = [job for job in jobs if _name(job) == wanted]
        running = [job for job in named if job[JobMetaKey.STATUS] == RUNNING]
        matching = running[-1:] or named or matching
    if not matching:
        problem = no_such("job", wanted, {_name(job) for job in jobs})
        raise ConfigError(f"{problem}; `medflare job list` shows names and ids")
    if len(matching) > 1:
        candidates = [f"{id_of(job)[:_ID_LETTERS]} ({job[JobMetaKey.STATUS]})" for job in matching]
        raise ConfigError(
            f"{len(matching)} jobs fit {wanted!r}: {', '.join(candidates)}; give the id of one"
        )
    return matching[0]


def id_of(job: Job) -> str:
    """FLARE's id of the job; MedflareError for what cannot be the name of a folder."""
    name = str(job[JobMetaKey.JOB_ID])
    if Path(name).name != name or name.startswith("."):
        raise MedflareError(f"the server lists a job with the id {name!r}, which is no id")
    return name


def job_table(jobs: Sequence[Job]) -> str:
    """A table with a line for each job."""
    if not jobs:
        return "no jobs"
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for job in jobs:  # a lead could make the lines of all jobs as long as it likes
        rows.append(tuple(cell[:_WIDEST] for cell in _row(job)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _row(job: Job) -> tuple[str, ...]:
    properties = job.get(JobMetaKey.CUSTOM_PROPS)
    # A job of another program has none.
    about = properties.get(ABOUT) if isinstance(properties, Mapping) else None
    if not isinstance(about, Mapping):
        about = {}
    submitted = str(job.get(JobMetaKey.SUBMIT_TIME_ISO, "-"))
    with suppress(ValueError):
        submitted = f"{datetime.fromisoformat(submitted).astimezone():%Y-%m-%d %H:%M}"
    return (
        _name(job),
        id_of(job)[:_ID_LETTERS],
        str(job[JobMetaKey.STATUS]),
        str(about.get("method", "-")),
        str(about.get("rounds", "-")),
        str(job.get(JobMetaKey.SUBMITTER_NAME, "-")),
        submitted,
        str(job.get(JobMetaKey.DURATION, "-")).partition(".")[0],
        f"resumes {about['resume']!s:.{_ID_LETTERS}}" if "resume" in about else "",
    )


def _name(job: Job) -> str:
    name = job.get(JobMetaKey.JOB_NAME) or job.get(JobMetaKey.JOB_FOLDER_NAME)
    return str(name or "")


def interrupted_job(kit: Path, wanted: str) -> str:
    """The id of a job that can be resumed.

    Raises:
        ConfigError: there is none, or several, or it waits, runs or has completed.
        MedflareError: see `session`.
    """
    with session(kit) as connection:
        job = found_job(jobs_of(connection), wanted)
        identity = id_of(job)
        state = job[JobMetaKey.STATUS]
        if state == RunStatus.FINISHED_COMPLETED:
            raise ConfigError(
                f"job {identity} has completed and needs no resuming; "
                f"`medflare job fetch {identity}` has its results"
            )
        if state in _WAITING or (state == RUNNING and _has_process(connection, identity)):
            raise ConfigError(
                f"job {identity} is {state}; watch it (`medflare job watch {identity}`), "
                "or abort it before you resume it"
            )
        return identity


def _has_process(connection: Session, job: str) -> bool:
    """Whether a job in the state RUNNING has a process; after a restart of the server without
    `UnfinishedJobs` it has none.
    """
    try:
        connection.show_stats(job, TargetType.SERVER)
    except LOST:
        raise
    except REFUSALS:
        return False
    return True


def fetch_job(connection: Session, job: str, out: Path) -> Path:
    """Download the results of a job to `out`/JOB; results of an earlier fetch are replaced.

    Raises:
        ConfigError: the folder exists and holds other files.
        MedflareError: the download failed.
    """
    if not JOB_ID.fullmatch(job):  # its folder is replaced
        raise MedflareError(f"the server lists a job with the id {job!r}, which is no id")
    destination = out.resolve() / job
    if destination.exists() and not destination.is_dir():
        raise ConfigError(f"{destination} is a file; choose another --out, or move it away")
    with beside(destination) as scratch, _downloads(connection.download_dir, job) as downloads:
        try:
            location = connection.download_job_result(job)
        except RuntimeError as error:  # FLARE's exception for a problem on this side
            reason = f"job {job} could not be downloaded ({one_line(error)})"
            raise MedflareError(
                f"{reason}; see that there is room in {connection.download_dir} and {out}, "
                "then fetch it again"
            ) from error
        downloaded = Path(location or "")
        if downloaded not in downloads():  # the server can name any folder
            raise MedflareError(
                f"the server sent no results of job {job}; "
                "`medflare job list` shows whether it has ended"
            )
        for path in sorted(downloaded.rglob("*")):
            # Shells and git run what .envrc, .git or, beside a HEAD, config say, browsers pages.
            runs_code = path.name.startswith(".") or path.name.casefold() == "head"
            runs_code |= path.suffix.casefold() in _PAGES
            if runs_code and path.is_dir():
                shutil.rmtree(path)
            elif runs_code:
                path.unlink(missing_ok=True)  # a folder around it may be gone
        for path in sorted(destination.rglob("*")):
            is_ours = path.is_dir() or path.name == _REPORT
            if not is_ours and not (downloaded / path.relative_to(destination)).exists():
                raise ConfigError(
                    f"{path} is not among the job's results and would be lost; "
                    "choose another --out, or move it away"
                )
        put_in_place(Path(shutil.move(downloaded, scratch)), destination)
    return destination


@contextmanager
def _downloads(transfer: str, job: str) -> Iterator[Callable[[], set[Path]]]:
    """What the block adds for a job to FLARE's folder for transfers; it is removed at the block's
    end.
    """
    before = set(Path(transfer).glob(f"{job}*"))

    def added() -> set[Path]:
        return set(Path(transfer).glob(f"{job}*")) - before

    try:
        yield added
    finally:
        for path in added():
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def beside(destination: Path) -> Iterator[Path]:
    """An empty folder next to `destination`, on the same disk, removed at the end of the block."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{destination.name}.", dir=destination.parent, ignore_cleanup_errors=True
    ) as scratch:
        yield Path(scratch)


def put_in_place(new: Path, destination: Path) -> None:
    """Rename a folder to `destination`; an earlier folder there is removed after that."""
    old = destination.with_name(f".{destination.name}.{secrets.token_hex(8)}")
    if destination.exists():
        os.rename(destination, old)
    os.rename(new, destination)
    shutil.rmtree(old, ignore_errors=True)
