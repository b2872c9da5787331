"""What a site keeps longer than it needs to: decoded images, and what ended jobs leave beside their models. Light to import."""

import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Final, NamedTuple

from medflare.cli.federation.kits.kit import Kit
from medflare.cli.federation.kits.processes import running
from medflare.cli.federation.kits.status import job_folders
from medflare.core.errors import ConfigError
from medflare.data.cache.folder import clean, placed
from medflare.data.sites.local import CACHE, FOLDER, LOCAL_FILE, local_settings, read_local

_MEMORY: Final = "state"  # in the site's folder of a job: what it remembered between two steps
_RECORDS: Final = (FOLDER, "audit.log", "meta.json")  # who asked for what, and what came of it


class Removed(NamedTuple):
    """What is removed: in words, and the bytes that it took."""

    what: str
    bytes: int


def clean_kit(kit: Kit, older_than: timedelta, *, jobs: bool = False, dry_run: bool = False) -> list[Removed]:
    """Remove what nobody has used for so long. Models, scores, pictures and the records of what was asked and what left are kept.

    Args:
        kit: of a site.
        older_than: since the last use, or the last change.
        jobs: also of ended jobs what they remembered and what FLARE kept; they cannot be resumed afterwards.
        dry_run: only say what would be removed.

    Returns:
        What was removed, or would be.

    Raises:
        ConfigError: the kit is the server's, or its settings cannot be read.
    """
    if kit.kind == "server":
        raise ConfigError(
            f"{kit.folder} is the server's kit, which caches nothing; old jobs go with `nvflare job delete ID --startup-kit ...`"
        )
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
        files = [path for path in folder.rglob("*") if path.is_file()]
        last = max((path.stat().st_mtime for path in (folder, *files)), default=0.0)
        surplus = [path for path in (*folder.iterdir(), folder / FOLDER / _MEMORY) if path.name not in _RECORDS and path.exists()]
        if folder.name in active or time.time() - last < older_than.total_seconds() or not surplus:
            continue
        size = sum(file.stat().st_size for file in files if any(place == file or place in file.parents for place in surplus))
        done.append(Removed(f"what job {folder.name} remembered, and FLARE's copy of it", size))
        for place in () if dry_run else surplus:
            shutil.rmtree(place) if place.is_dir() else place.unlink()
    return done
