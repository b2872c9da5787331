"""State that survives a process: one safetensors file per message, written atomically, checked when read.

Tensors and meta share one file (the meta are JSON in the safetensors header), so a crash can never leave tensors of one
round beside meta of another. Nothing is ever unpickled.
"""

import copy
import csv
import errno
import hashlib
import io
import json
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from medflare.core.errors import StateError
from medflare.core.message import Message
from medflare.core.states import StateDict, bytes_of, copy_state
from medflare.core.text import escaped

SEPARATOR = "//"  # entry // tensor name: PyTorch's names hold dots, never slashes
_HEADER = "medflare"  # the field of the safetensors header that holds meta, entry names and the checksum


def write_atomically(path: Path, content: bytes, *, public: bool = False) -> None:
    """Replace `path` in one step: a reader, or a crash, sees the old content or the new, never a part.

    Args:
        path: the file; folders that do not exist are made.
        public: whether file and folders get the permissions of the user's umask, as a report that is there to be read. Else they are for
            this account alone: most of what is written is made of patients' images, or of models that know them.
    """
    with replacing(path, public=public) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replacing(path: Path, *, public: bool = False) -> Iterator[Path]:
    """An empty file beside `path`, which takes its place in one step once the block has written it; see `write_atomically`.

    Yields:
        The path of the file to write, which is there already with its permissions.
    """
    make_folder(path.parent, public=public)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb", opener=None if public else own_opener) as file:
            yield temporary
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:  # the system names none where writing fails
            error.filename = str(path)
        raise


def refuse_unwritable(path: Path) -> None:
    """Before long work: nothing where a public file can be written there; folders that do not exist are made.

    Raises:
        OSError: it cannot, for the reason that writing would have.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    make_folder(path.parent, public=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    """The checksum of a file's content, in hexadecimal digits."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with open(path, "rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def own_opener(path: str, flags: int) -> int:
    """For `open(..., opener=own_opener)`: a file that is made is for this account alone."""
    return os.open(path, flags, 0o600)


def make_folder(folder: Path, *, public: bool = False) -> None:
    """Make a folder and those above it where they do not exist; a folder that is there stays as it is.

    Raises:
        OSError: it cannot be made, or is a file.
    """
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    for place in reversed(missing):
        place.mkdir(mode=0o777 if public else 0o700, exist_ok=True)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def write_json(path: Path, content: Any, *, public: bool = False) -> None:
    """Write `content` as indented JSON, atomically; NaN and infinity are refused. `public` as for `write_atomically`."""
    write_atomically(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode(), public=public)


def csv_text(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], *, header: bool = True) -> str:
    """Rows as CSV without control characters; a missing column stays empty.

    Args:
        rows: column -> value.
        columns: their names, in order.
        header: whether the names come first.
    """
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n")
    if header:
        writer.writerow({name: escaped(name) for name in columns})
    writer.writerows({name: escaped(value) if isinstance(value, str) else value for name, value in row.items()} for row in rows)
    return text.getvalue()


def write_message(path: Path, message: Message) -> None:
    """Write the message as a safetensors file, atomically and without a copy of it in memory; equal messages give equal files.

    Args:
        message: to write.

    Raises:
        OSError: it cannot be written; what was there before is whole.
    """
    tensors = flat(message)
    content = {"meta": message.meta, "entries": sorted(message.states)}
    header = json.dumps({**content, "digest": _digest(tensors, content)}, sort_keys=True)
    with replacing(path) as temporary:
        try:
            save_file(tensors, temporary, metadata={_HEADER: header})  # one field: safetensors writes several in any order
        except SafetensorError as error:
            raise OSError(f"{path}: {error}") from error


def flat(message: Message) -> StateDict:
    """All tensors by entry and name as safetensors takes them: on the CPU, contiguous, and none in the memory of another one."""
    named = {
        f"{entry}{SEPARATOR}{name}": tensor.detach().to("cpu").contiguous()
        for entry, state in message.states.items()
        for name, tensor in state.items()
    }
    end = 0
    for key, tensor in sorted(named.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < end:
            named[key] = copy_state({key: tensor})[key]
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return named


def read_message(path: Path) -> Message:
    """The message stored in `path`; where another one takes its place meanwhile, that one.

    Raises:
        StateError: the file is truncated, damaged or was not written by medflare.
    """
    while True:
        version = _version(path)
        try:
            return _read_once(path)
        except StateError:  # safetensors opens a file twice, and a writer may replace it in between
            if _version(path) == version:
                raise


def _version(path: Path) -> tuple[int, int] | None:
    """Tells a file from one that has taken its place; None where there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _read_once(path: Path) -> Message:
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})[_HEADER])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
        content = {"meta": header["meta"], "entries": header["entries"]}
        intact = header["digest"] == _digest(tensors, content)
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise StateError(f"{path}: not a readable state file ({error}); restore it from a backup or delete it to start afresh") from error
    if not intact:
        raise StateError(f"{path}: content does not match its checksum; restore it from a backup or delete it to start afresh")
    states: dict[str, StateDict] = {entry: {} for entry in content["entries"]}
    for key, tensor in tensors.items():
        entry, name = key.rsplit(SEPARATOR, 1)
        states[entry][name] = tensor
    return Message(states, content["meta"])


def _digest(tensors: StateDict, content: dict[str, Any]) -> str:
    """A checksum of names, dtypes, shapes and values of all tensors, and of the meta and entry names beside them."""
    digest = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16)
    for key, tensor in sorted(tensors.items()):
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


class Store(Protocol):
    """Messages by name."""

    def save(self, name: str, message: Message) -> None:
        """Keep a message under a name, in place of an earlier one."""

    def load(self, name: str) -> Message | None:
        """The message saved under `name`, or None where none was.

        Raises:
            StateError: it is damaged.
        """

    def names(self) -> list[str]:
        """Names of all messages, sorted."""

    def delete(self, name: str) -> None:
        """Forget a message; nothing where there is none."""


class MemoryStore:
    """A store that lives as long as its process. What is saved and loaded is a copy: training goes on in place."""

    def __init__(self) -> None:
        self._messages: dict[str, Message] = {}

    def save(self, name: str, message: Message) -> None:
        """Keep a copy of a message under a name."""
        self._messages[name] = _copied(message)

    def load(self, name: str) -> Message | None:
        """A copy of the message saved under `name`, or None where none was."""
        return _copied(self._messages[name]) if name in self._messages else None

    def names(self) -> list[str]:
        """Names of all messages, sorted."""
        return sorted(self._messages)

    def delete(self, name: str) -> None:
        """Forget a message; nothing where there is none."""
        self._messages.pop(name, None)


def _copied(message: Message) -> Message:
    return Message({entry: copy_state(state) for entry, state in message.states.items()}, copy.deepcopy(message.meta))


class StateStore:
    """Messages by name in one folder, for example a site's algorithm between two tasks."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)

    def path(self, name: str) -> Path:
        """The file of a message, whether it exists or not."""
        return self.folder / f"{name}.safetensors"

    def save(self, name: str, message: Message) -> None:
        """Write a message to its file, atomically."""
        write_message(self.path(name), message)

    def load(self, name: str) -> Message | None:
        """The message saved under `name`, or None where none was.

        Raises:
            StateError: it is damaged.
        """
        return read_message(self.path(name)) if self.path(name).exists() else None

    def names(self) -> list[str]:
        """Names of all messages in the folder, sorted."""
        return sorted(path.stem for path in self.folder.glob("*.safetensors") if not path.name.startswith("."))

    def delete(self, name: str) -> None:
        """Remove a message's file; nothing where there is none."""
        self.path(name).unlink(missing_ok=True)
