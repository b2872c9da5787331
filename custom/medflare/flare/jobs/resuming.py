"""Which job of a federation a new one may take up."""

from pathlib import Path

from nvflare.apis.job_def import JobMetaKey, RunStatus
from nvflare.fuel.flare_api.api_spec import TargetType
from nvflare.fuel.flare_api.flare_api import Session

from medflare.core.errors import ConfigError
from medflare.flare.jobs.sessions import LOST, REFUSALS, RUNNING, found_job, id_of, jobs_of, session

_WAITING = (RunStatus.SUBMITTED.value, RunStatus.APPROVED.value, RunStatus.DISPATCHED.value)


def interrupted_job(kit: Path, wanted: str) -> str:
    """The id of a job that was interrupted.

    Args:
        kit: startup kit of who submitted it, or of the project admin.
        wanted: the job, see `sessions.found_job`.

    Raises:
        ConfigError: there is none, or several, or it waits, runs or has completed.
        MedflareError: see `sessions`.
    """
    with session(kit) as opened:
        return resumable(opened, wanted)


def resumable(opened: Session, wanted: str) -> str:
    """As `interrupted_job`, in a session that is open."""
    found = found_job(jobs_of(opened), wanted)
    job, state = id_of(found), found[JobMetaKey.STATUS.value]
    if state == RunStatus.FINISHED_COMPLETED.value:
        raise ConfigError(f"job {job} has completed and needs no resuming; `medflare job fetch {job}` has its results")
    if state in _WAITING:
        raise ConfigError(f"job {job} has not begun yet ({state}); wait for it: `medflare job watch {job}`")
    if state == RUNNING and _has_process(opened, job):
        raise ConfigError(f"job {job} is running; watch it (`medflare job watch {job}`), or abort it before you resume it")
    return job


def _has_process(opened: Session, job: str) -> bool:
    """Whether a job that is called running is: after a restart a server without `UnfinishedJobs` calls it so for ever."""
    try:
        opened.show_stats(job, TargetType.SERVER)
    except LOST:
        raise
    except REFUSALS:
        return False
    return True
