"""A job's results from the server: whole, or not at all, and nothing of them stays in the lead's kit."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nvflare.fuel.flare_api.flare_api import Session

from medflare.core.errors import ConfigError, MedflareError, one_line
from medflare.flare.jobs.placing import beside, put_in_place


def fetch_job(opened: Session, job: str, out: Path) -> Path:
    """Download the results of a job; those that an earlier fetch left there are replaced.

    Args:
        opened: a session of who submitted it, or of the project admin.
        job: its id.
        out: gets a folder named like the id.

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
            reason = f"job {job} could not be downloaded ({one_line(error)})"
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
