"""State that survives a process: one safetensors file per message, written atomically, checked when read.

Tensors and facts share one file (the facts are JSON in the safetensors header), so a crash can never leave tensors of one
round beside facts of another. Nothing is ever unpickled.
"""

import copy
import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors

from medflare.core.errors import StateError
from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state

_SEPARATOR = "//"  # entry // tensor name: PyTorch's names hold dots, never slashes
_HEADER = "medflare"  # the field of the safetensors header that holds facts, entry names and the checksum


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` in one step: a reader, or a crash, sees the old content or the new, never a part.

    Unlike a file of `tempfile`, the new one has the permissions that the user's umask gives: a report is there to be read.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any) -> None:
    """Write `content` as indented JSON, atomically; NaN and infinity are refused."""
    write_atomically(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def message_to_bytes(message: Message) -> bytes:
    """The message as a safetensors file; equal messages give equal bytes."""
    tensors = {
        f"{entry}{_SEPARATOR}{name}": tensor for entry, state in message.states.items() for name, tensor in copy_state(state).items()
    }
    content = {"facts": message.facts, "entries": sorted(message.states)}
    header = json.dumps({**content, "digest": _digest(tensors, content)}, sort_keys=True)
    return to_safetensors(tensors, metadata={_HEADER: header})  # one field: safetensors writes several in any order


def read_message(path: Path) -> Message:
    """The message stored in `path`.

    Raises:
        StateError: the file is truncated, damaged or was not written by medflare.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})[_HEADER])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
        content = {"facts": header["facts"], "entries": header["entries"]}
        intact = header["digest"] == _digest(tensors, content)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise StateError(f"{path}: not a readable state file ({error}); restore it from a backup or delete it to start afresh") from error
    if not intact:
        raise StateError(f"{path}: content does not match its checksum; restore it from a backup or delete it to start afresh")
    states: dict[str, StateDict] = {entry: {} for entry in content["entries"]}
    for key, tensor in tensors.items():
        entry, name = key.rsplit(_SEPARATOR, 1)
        states[entry][name] = tensor
    return Message(states, content["facts"])


def _digest(tensors: StateDict, content: dict[str, Any]) -> str:
    """A checksum of names, dtypes, shapes and values of all tensors, and of the facts and entry names beside them."""
    digest = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16)
    for key, tensor in sorted(tensors.items()):
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
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
    return Message({entry: copy_state(state) for entry, state in message.states.items()}, copy.deepcopy(message.facts))


class StateStore:
    """Messages by name in one folder, for example a site's half between two tasks."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)

    def path(self, name: str) -> Path:
        """The file of a message, whether it exists or not."""
        return self.folder / f"{name}.safetensors"

    def save(self, name: str, message: Message) -> None:
        """Write a message to its file, atomically."""
        write_atomically(self.path(name), message_to_bytes(message))

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
