"""A person's session with the server of a federation, by the startup kit; jobs by name as well as by id."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any, Final

from nvflare.apis.job_def import JobMetaKey, RunStatus
from nvflare.fuel.flare_api import api_spec
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
SHORT: Final = 8  # letters of an id that a list shows


class Unreachable(MedflareError):
    """There is no connection to the server, or no more."""


@contextmanager
def session(kit: Path) -> Iterator[Session]:
    """A session with the server, closed at the end of the block.

    Args:
        kit: startup kit of a person: the lead, or the project admin.

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

    Args:
        jobs: the oldest first.
        wanted: id or name.

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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
