"""Messages on disk: safetensors with metadata in the header and a checksum; no pickle."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from medflare.core.errors import StateError
from medflare.core.files import replacing
from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state, on_cpu
from medflare.core.text import JsonDict

SEPARATOR = "//"  # between entry and tensor name
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # in an error of safetensors
_HEADER = "medflare"  # the field of the safetensors header with metadata, entry names and checksum


def write_message(path: Path, message: Message) -> None:
    """Write a message atomically, so that the old file is intact after an OSError; equal messages
    give equal files.
    """
    tensors = flat(message)
    names = {entry: list(state) for entry, state in message.states.items()}
    content = {"meta": message.meta, "entries": sorted(message.states), "names": names}
    header = json.dumps({**content, "digest": _digest(tensors, content)}, sort_keys=True)
    with replacing(path) as temporary:
        try:
            # One field: safetensors writes several in any order.
            save_file(tensors, temporary, metadata={_HEADER: header})
        except SafetensorError as error:
            code = _OS_ERROR.search(str(error))
            if code:
                raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
            raise OSError(f"{path}: {error}") from error


def flat(message: Message) -> StateDict:
    """All tensors by entry and name for safetensors: on the CPU, contiguous, and without shared
    memory.
    """
    named = {}
    for entry, state in message.states.items():
        for name, tensor in on_cpu(state).items():
            named[f"{entry}{SEPARATOR}{name}"] = tensor.detach().contiguous()
    end = 0
    for key, tensor in sorted(named.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < end:
            named[key] = copy_state({key: tensor})[key]
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return named


def states_digest(states: Mapping[str, StateDict]) -> str:
    """A checksum of the names, dtypes, shapes and values of all tensors."""
    return _digest(flat(Message(dict(states))), {})


def read_message(path: Path) -> Message:
    """The message in a file.

    Raises:
        StateError: the file is truncated, damaged or was not written by medflare.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})[_HEADER])
            names = file.keys()
            tensors = {key: file.get_tensor(key) for key in names}
        content = {name: header[name] for name in ("meta", "entries", "names") if name in header}
        intact = header["digest"] == _digest(tensors, content)
        message = _message(tensors, content)
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise StateError(
            f"{path}: not a readable state file ({error}); "
            "restore it from a backup, or start a new run"
        ) from error
    if not intact:
        raise StateError(
            f"{path}: content does not match its checksum; "
            "restore it from a backup, or start a new run"
        )
    return message


def _message(tensors: StateDict, content: JsonDict) -> Message:
    """The message of a file, which another party may have made, checksum included.

    Raises:
        KeyError, TypeError, ValueError: `write_message` does not write such a file.
    """
    if not isinstance(content["meta"], dict) or not isinstance(content["entries"], list):
        raise TypeError("other metadata or entries than medflare writes")
    states: dict[str, StateDict] = {entry: {} for entry in content["entries"]}
    for key, tensor in tensors.items():
        entry, name = key.rsplit(SEPARATOR, 1)
        states[entry][name] = tensor
    if "names" in content:  # safetensors changes the order
        for entry, state in states.items():
            states[entry] = {name: state.pop(name) for name in content["names"][entry]}
            if state:
                raise ValueError(f"{entry} has tensors without a name")
    return Message(states, content["meta"]).aligned()


def _digest(tensors: StateDict, content: JsonDict) -> str:
    """A checksum of tensors (names, dtypes, shapes, values), of metadata and of entry names."""
    digest = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16)
    for key, tensor in sorted(tensors.items()):
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.numel():
            # The stride of a single value may be 0, which `view` rejects.
            values = tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,))
            digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()


class MemoryStore:
    """Messages by name as long as the process lives; they are copied, since training changes
    tensors in place.
    """

    def __init__(self) -> None:
        self._messages: dict[str, Message] = {}

    def save(self, name: str, message: Message) -> None:
        self._messages[name] = message.copied()

    def load(self, name: str) -> Message | None:
        if name not in self._messages:
            return None
        return self._messages[name].copied()

    def names(self) -> list[str]:
        return sorted(self._messages)

    def delete(self, name: str) -> None:
        self._messages.pop(name, None)


class StateStore:
    """Messages by name in one folder; `load` returns None for an unknown name and raises StateError
    if the file is damaged.
    """

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)

    def path(self, name: str) -> Path:
        """The file of a message, whether it exists or not."""
        return self.folder / f"{name}.safetensors"

    def save(self, name: str, message: Message) -> None:
        write_message(self.path(name), message)

    def load(self, name: str) -> Message | None:
        path = self.path(name)
        if not path.exists():
            return None
        return read_message(path)

    def names(self) -> list[str]:
        paths = self.folder.glob("*.safetensors")
        return sorted(path.stem for path in paths if not path.name.startswith("."))

    def delete(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)


Store = MemoryStore | StateStore
