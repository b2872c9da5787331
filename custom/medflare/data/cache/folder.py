"""The folder of a site's decoded images: outside all jobs, private, bounded. Light to import: torch is not needed to clean it.

Every entry is a folder named by the key of what it holds. It appears in one step, complete, and is not changed afterwards. Whoever works
with it holds a shared lock on its file `lock`, whose time of change is that of the last use: what is held is never removed, and of
the rest the longest unused goes first. Locks end with the process that holds them, however it ends.
"""

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Annotated, Final

from pydantic import Field
from pydantic.dataclasses import dataclass

from medflare.core.settings import STRICT

ENVIRONMENT: Final = "MEDFLARE_CACHE"
GB: Final = 10**9
_LOCK: Final = "lock"
_PARTIAL: Final = ".partial-"  # how the names of folders begin that are being written, or were when a process ended
_OURS: Final = re.compile(r"[0-9a-f]{32}|\.partial-[0-9a-f]+")  # whatever else lies in the folder is somebody else's
_log = logging.getLogger(__name__)


@dataclass(frozen=True, config=STRICT)
class CacheSettings:
    """Where decoded images are kept, and how many of them.

    Attributes:
        folder: for the entries; "" for MEDFLARE_CACHE, else the engine's choice.
        limit_gb: most that all entries together take on disk, in gigabytes; the longest unused make room.
        memory_gb: splits of a site that take more than this, in gigabytes, stay on disk and are read batch by batch.
    """

    folder: str = ""
    limit_gb: Annotated[float, Field(gt=0)] = 100.0
    memory_gb: Annotated[float, Field(ge=0)] = 4.0


def placed(own: CacheSettings | None, engines: Path | None = None) -> CacheSettings | None:
    """The settings with the folder that is used, or None where nothing is kept on disk.

    Args:
        own: the site's settings; None where it wants no cache.
        engines: folder of the engine's choice, where neither the site nor MEDFLARE_CACHE names one.
    """
    if own is None:
        return None
    folder = own.folder or os.environ.get(ENVIRONMENT) or engines
    return replace(own, folder=str(Path(folder).expanduser())) if folder else None


def hold(entry: Path) -> IO[bytes] | None:
    """Hold an entry against removal for as long as the file that is returned is open, and note its use; None where there is no entry.

    Args:
        entry: its folder.
    """
    try:
        file = (entry / _LOCK).open("rb")
    except OSError:
        return None
    fcntl.flock(file, fcntl.LOCK_SH)  # waits where somebody removes the entry at this moment
    with suppress(OSError):
        if os.path.samestat(os.fstat(file.fileno()), (entry / _LOCK).stat()):
            with suppress(OSError):  # a folder that is read-only gives its entries all the same
                os.utime(entry / _LOCK)
            return file
    file.close()
    return None


@contextmanager
def new_entry(entry: Path) -> Iterator[Path]:
    """An empty folder that becomes the entry when the block ends, unless another process was faster; nothing is left of it after an error.

    Args:
        entry: its folder.
    """
    entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = entry.with_name(_PARTIAL + secrets.token_hex(8))
    partial.mkdir(mode=0o700)
    try:
        with private(partial / _LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            yield partial
            with suppress(OSError):  # an entry that is there already is as good
                os.rename(partial, entry)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def private(path: Path) -> IO[bytes]:
    """A new file that only this account can read, open for writing."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


class Room:
    """How much may still be written to a folder.

    Args:
        settings: with the folder.
    """

    def __init__(self, settings: CacheSettings):
        self._folder, self._limit = Path(settings.folder), settings.limit_gb
        self._left = int(settings.limit_gb * GB) - sum(_size(entry) for entry in _entries(self._folder))

    def take(self, count: int) -> None:
        """Nothing where there is room for so many bytes more; the longest unused entries are removed for it.

        Raises:
            OSError: all that is left is in use.
        """
        self._left -= count
        for entry in _entries(self._folder) if self._left < 0 else ():
            self._left += remove(entry) or 0
            if self._left >= 0:
                break
        if self._left < 0:
            raise OSError(errno.ENOSPC, f"more than cache.limit_gb = {self._limit:g}, and no entry is out of use")


def discard(entry: Path) -> None:
    """Remove an entry that is damaged, in use or not: who reads it is told so when it next does."""
    with suppress(OSError):
        gone = entry.with_name(_PARTIAL + secrets.token_hex(8))
        os.rename(entry, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _entries(folder: Path) -> list[Path]:
    """All entries, finished or not, the longest unused first."""
    found = [path for path in folder.glob("*") if _OURS.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_last_use)


def _last_use(entry: Path) -> float:
    for path in (entry / _LOCK, entry):
        with suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def _size(entry: Path) -> int:
    total = 0
    with suppress(OSError), os.scandir(entry) as files:
        for file in files:
            total += file.stat().st_size
    return total


def remove(entry: Path) -> int | None:
    """Remove an entry that is not in use; gives the bytes that it took, None where it is in use and stays."""
    try:
        file = (entry / _LOCK).open("ab")  # what was never finished may lack one
    except OSError:
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        size = _size(entry)
        discard(entry)
        _log.info("data cache: %s removed, %d MB", entry, size // 10**6)
        return size
