"""The jobs of a federation as a table: names and states, method and rounds, who submitted them and when, and which one takes up which."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from nvflare.apis.job_def import JobMetaKey

from medflare.flare.jobs.building import ABOUT
from medflare.flare.jobs.sessions import SHORT, Job, id_of, name_of, short_id

_COLUMNS: Final = ("name", "id", "state", "method", "rounds", "submitted by", "at", "took", "")


def listing(jobs: Sequence[Job]) -> str:
    """A line a job, under a heading; one sentence where there is none.

    Args:
        jobs: in the order of the lines.
    """
    if not jobs:
        return "no jobs"
    successors = {about["resume"]: job for job in jobs if "resume" in (about := _about(job))}
    rows = [_COLUMNS, *(_row(job, successors.get(id_of(job))) for job in jobs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _row(job: Job, successor: Job | None) -> tuple[str, ...]:
    about = _about(job)
    notes = [f"takes up {about['resume'][:SHORT]}"] if "resume" in about else []
    notes += [f"taken up by {short_id(successor)}"] if successor else []
    return (
        name_of(job),
        short_id(job),
        str(job[JobMetaKey.STATUS.value]),
        str(about.get("method", "-")),
        str(about.get("rounds", "-")),
        str(job.get(JobMetaKey.SUBMITTER_NAME.value, "-")),
        _local(str(job.get(JobMetaKey.SUBMIT_TIME_ISO.value, ""))),
        str(job.get(JobMetaKey.DURATION.value, "-")).partition(".")[0],
        ", ".join(notes),
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
