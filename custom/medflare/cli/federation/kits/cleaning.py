"""What a party keeps longer than it needs to: decoded images, and what ended jobs leave beside their models. Light to import."""

import shutil
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from medflare.cli.federation.kits.kit import Kit
from medflare.cli.federation.kits.processes import running
from medflare.cli.federation.kits.status import job_folders
from medflare.core.errors import ConfigError
from medflare.data.cache.folder import clean, placed
from medflare.data.sites.local import CACHE, FOLDER, LOCAL_FILE, kept_of, local_settings, read_local
from medflare.evaluation.presentation import format_bytes

_MEMORY: Final = "state"  # in the site's own folder of a job: what it remembered between two steps
_RECORDS: Final = (FOLDER, "audit.log", "meta.json")  # who asked for what, and what came of it


class Removed(NamedTuple):
    """What is removed: in words, and the bytes that it took."""

    what: str
    bytes: int


def clean_kit(kit: Kit, older_than: timedelta, *, jobs: bool = False, dry_run: bool = False) -> list[Removed]:
    """Remove what nobody has used for so long. Models, scores, pictures and the records of what was asked and what left are kept.

    Args:
        kit: of a site; of the server with `jobs` only, which keeps the checkpoints of jobs that came to no end.
        older_than: since the last use, or the last change.
        jobs: also of ended jobs what they remembered and what FLARE kept; they cannot be resumed afterwards.
        dry_run: only say what would be removed.

    Returns:
        What was removed, or would be.

    Raises:
        ConfigError: the kit is the server's, and `jobs` are to stay; or its settings cannot be read.
    """
    if kit.kind == "server":
        return _checkpoints(kit, older_than, dry_run) if jobs else _nothing_of(kit)
    done = []
    own = local_settings(read_local(kit.local / LOCAL_FILE))
    if (cache := placed(own.cache, kit.folder / CACHE)) is not None:
        cleaned = clean(Path(cache.folder), older_than, dry_run=dry_run)
        if cleaned.removed:
            done.append(Removed(f"{cleaned.removed} sets of decoded images in {cache.folder} ({cleaned.left} left)", cleaned.freed))
    return [*done, *(_ended_jobs(kit, older_than, dry_run) if jobs else ())]


def _ended_jobs(kit: Kit, older_than: timedelta, dry_run: bool) -> list[Removed]:
    active, done = running(kit).jobs, []
    for folder in job_folders(kit):
        own = kept_of(folder)
        files = [*_files(folder), *_files(own)]
        surplus = [path for path in (*folder.iterdir(), own / _MEMORY) if path.name not in _RECORDS and path.exists()]
        if folder.name in active or _is_young((folder, *files), older_than) or not surplus:
            continue
        size = _size(file for file in files if any(place == file or place in file.parents for place in surplus))
        done.append(Removed(f"what job {folder.name} remembered, and FLARE's copy of it", size))
        for place in () if dry_run else surplus:
            shutil.rmtree(place) if place.is_dir() else place.unlink()
    return done


def _checkpoints(kit: Kit, older_than: timedelta, dry_run: bool) -> list[Removed]:
    """Of jobs that failed or were stopped; a completed one has removed its own, and those of the jobs that it took up."""
    active, done = running(kit).jobs, []
    for folder in _kept(kit):
        files = _files(folder)
        if folder.name in active or _is_young((folder, *files), older_than):
            continue
        done.append(Removed(f"the checkpoint of job {folder.name}, without which it cannot be resumed", _size(files)))
        if not dry_run:
            shutil.rmtree(folder)
    return done


def _nothing_of(kit: Kit) -> NoReturn:
    """ConfigError, which says what there is all the same."""
    folders = _kept(kit)
    size = format_bytes(_size(file for folder in folders for file in _files(folder)))
    kept = f"; checkpoints of jobs that came to no end ({len(folders)}, {size} in {kit.folder / FOLDER}) go with --jobs" if folders else ""
    raise ConfigError(
        f"{kit.folder} is the server's kit, which caches nothing; old jobs go with `nvflare job delete ID --startup-kit ...`{kept}"
    )


def _kept(kit: Kit) -> list[Path]:
    """The folders of checkpoints that the server has, each named after its job."""
    return sorted(path for path in (kit.folder / FOLDER).glob("*") if path.is_dir())


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _size(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _is_young(paths: Iterable[Path], older_than: timedelta) -> bool:
    """Whether one of them was changed since."""
    return time.time() - max(path.stat().st_mtime for path in paths) < older_than.total_seconds()
