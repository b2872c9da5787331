"""Files: written atomically, links refused, JSON and CSV."""

import csv
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZipFile

from medflare.core.errors import StateError
from medflare.core.text import Json, escaped

_FORMULA = re.compile(r"[=@\t\r\n]|[+-](?![\d.]+(?:e[+-]?\d+)?\Z)", re.ASCII | re.IGNORECASE)
_MOST_UNPACKED = 5e8  # bytes


def write_atomically(path: Path, content: bytes, *, public: bool = False) -> None:
    """Replace a file in one step, so that a reader, or a crash, sees the old content or the new
    one; its folders are made if needed.

    A `public` file and its folders get the permissions of the umask. Only this account can read
    others: most come from patients' images.
    """
    with replacing(path, public=public) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replacing(path: Path, *, public: bool = False) -> Iterator[Path]:
    """An empty temporary file to write, which replaces `path` after the block; see
    `write_atomically`.
    """
    make_folder(path.parent, public=public)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb", opener=None if public else private_opener):
            pass
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
        with suppress(OSError):  # some network file systems cannot sync a folder
            _sync(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # The error of a failed write does not name the file.
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def _sync(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on disk.

    The path is opened anew: safetensors puts a new file under the name that it writes to.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_unwritable(path: Path) -> None:
    """Raise OSError, before long work, if a public file cannot be written there."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    make_folder(path.parent, public=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def file_digest(path: Path) -> str:
    """The SHA-256 checksum of a file's content, in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def refuse_bomb(archive: ZipFile, most: float | None = None) -> None:
    """Raise ValueError for an archive of more than 500 MB unpacked, or `most` bytes, before it is
    unpacked.
    """
    limit = most or _MOST_UNPACKED
    unpacked = sum(member.file_size for member in archive.infolist())
    if unpacked > limit:
        raise ValueError(f"unpacked it has {unpacked / 1e6:.0f} MB, more than {limit / 1e6:.0f} MB")


def private_opener(path: str, flags: int) -> int:
    """An opener, as in `open(..., opener=private_opener)`: only this account can read a new
    file.
    """
    return os.open(path, flags, 0o600)


@contextmanager
def appending(path: Path, *, public: bool = False) -> Iterator[BinaryIO]:
    """A file to append lines to, at its end: after a line that a crash or a full disk cut short, a
    new one begins. `public` as for `write_atomically`; OSError for a link.
    """
    make_folder(path.parent, public=public)

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666 if public else 0o600)

    with open(path, "a+b", opener=opener) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if size > 0 and file.read() != b"\n":
            file.write(b"\n")
        yield file


def refuse_links(folder: Path) -> None:
    """Raise StateError as of `refuse_link` for all that a folder has; OSError for a folder in it
    that cannot be read.
    """
    for parent, folders, files in os.walk(folder, onerror=_raised):
        for name in (*folders, *files):
            refuse_link(Path(parent, name), folder)


def refuse_link(path: Path, folder: Path) -> None:
    """Raise StateError for a link that leads out of a folder, which another person may have packed,
    for a second name of a file, and for what is no file and no folder: what is written or deleted
    there could be any file.
    """
    if not os.path.lexists(path):
        return
    about = path.lstat()
    if stat.S_ISLNK(about.st_mode):
        if not path.resolve().is_relative_to(folder.resolve()):
            raise StateError(
                f"{path} is a link that leads elsewhere; take it out, or put the file there"
            )
    elif stat.S_ISREG(about.st_mode):
        if about.st_nlink > 1:
            raise StateError(f"{path} has a second name (a hard link); copy the folder")
    elif not stat.S_ISDIR(about.st_mode):
        raise StateError(f"{path} is no file and no folder; take it out")


def _raised(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # who reads it says so
        raise error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """A lock between processes, held during the block; its file and folder are made if needed."""
    make_folder(path.parent)
    with open(path, "a", opener=private_opener) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released with the file
        yield


def make_folder(folder: Path, *, public: bool = False) -> None:
    """Make a folder and those above it; the permissions of existing folders do not change.

    Raises:
        OSError: one of them is a file.
    """
    mode = 0o777 if public else 0o700
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=mode, exist_ok=True)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def free_folder(folder: Path) -> Path:
    """The folder, or the first of FOLDER.1, FOLDER.2, ... without anything in it."""
    free = folder
    number = 0
    while free.is_dir() and any(free.iterdir()):
        number += 1
        free = folder.with_name(f"{folder.name}.{number}")
    return free


def write_json(path: Path, content: Any, *, public: bool = False) -> None:
    """Write indented JSON atomically; ValueError for NaN and infinity. `public` as for
    `write_atomically`.
    """
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    write_atomically(path, text.encode(), public=public)


def csv_text(rows: Iterable[Json], columns: Sequence[str], *, header: bool = True) -> str:
    """Rows (column -> value) as CSV of `csv_cell`; a missing column is empty."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n")
    if header:
        writer.writerow({name: csv_cell(name) for name in columns})
    for row in rows:
        writer.writerow({name: csv_cell(value) for name, value in row.items()})
    return text.getvalue()


def csv_cell(value: Any) -> Any:
    """A value for a CSV file: text without control characters that no spreadsheet takes for a
    formula.

    Examples:
        >>> csv_cell("=1+1"), csv_cell("-3.5e-2"), csv_cell("-"), csv_cell("A"), csv_cell(-3.5)
        ("'=1+1", '-3.5e-2', "'-", 'A', -3.5)
    """
    if not isinstance(value, str):
        return value
    if _FORMULA.match(value):
        return "'" + escaped(value)
    return escaped(value)
