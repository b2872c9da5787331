"""Messages between two processes of one machine: tensors lie in memory that both see, and are copied once on their way."""

import json
import mmap
import os
import socket
import struct
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import torch
from torch import Tensor

from medflare.core.errors import StateError
from medflare.core.message import Message
from medflare.core.states import StateDict

_ALIGNED: Final = 64  # bytes: tensors begin where vector instructions like it
_LENGTH: Final = struct.Struct("!Q")
_MEMORY: Final = Path("/dev/shm")  # a file there never reaches a disk; elsewhere the operating system decides


@dataclass
class Parcel:
    """What one process tells another: JSON, and tensors by entry and name."""

    words: dict[str, Any]
    states: dict[str, StateDict] = field(default_factory=dict)

    @property
    def message(self) -> Message:
        """The message that travels in it."""
        return Message(self.states, self.words["facts"])


def send(connection: socket.socket, parcel: Parcel) -> None:
    """Send a parcel; returns when its tensors have been copied and its words are on the way.

    Args:
        connection: of AF_UNIX, to a process that calls `receive`.
        parcel: its tensors may lie on any device.

    Raises:
        OSError: the other process is gone.
        StateError: this machine has no room for its tensors.
    """
    places, size = _placed(parcel.states)
    words = json.dumps({"words": parcel.words, "places": places, "size": size}).encode()
    with _room(size) as file:
        if size:
            with mmap.mmap(file.fileno(), size) as memory:
                _fill(memory, parcel.states, places)
        socket.send_fds(connection, [_LENGTH.pack(len(words))], [file.fileno()])
        connection.sendall(words)


def receive(connection: socket.socket) -> Parcel:
    """The next parcel; its tensors live in the memory that the sender filled, which is now this process's alone.

    Raises:
        EOFError: the other process has closed the connection.
    """
    start, files, _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
    try:
        if not start:
            raise EOFError("the other process has closed the connection")
        said = json.loads(_exactly(connection, _LENGTH.unpack(start + _exactly(connection, _LENGTH.size - len(start)))[0]))
        memory = mmap.mmap(files[0], said["size"]) if said["size"] else None
    finally:
        for file in files:
            os.close(file)
    states: dict[str, StateDict] = {}
    for entry, tensors in said["places"].items():
        states[entry] = {name: _tensor(memory, *place) for name, place in tensors.items()}
    return Parcel(said["words"], states)


def _room(size: int) -> IO[bytes]:
    """A file of so many bytes without a name: in memory, or where that has too little room (Docker gives it 64 MB) in the temporary folder.

    Raises:
        StateError: there is no room either.
    """
    try:
        return _file(_MEMORY, size)
    except OSError:
        try:
            return _file(None, size)
        except OSError as error:
            remedy = f"make room there, or enlarge {_MEMORY} (docker run --shm-size)"
            raise StateError(f"{tempfile.gettempdir()}: takes no message of {size} bytes ({error.strerror}); {remedy}") from error


def _file(folder: Path | None, size: int) -> IO[bytes]:
    """OSError where the folder, None for the temporary one, has no room for it."""
    with ExitStack() as closing:
        file = closing.enter_context(tempfile.TemporaryFile(dir=folder))
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)  # a full folder says so here; a mapping of what is not there would end the process
        else:
            file.truncate(size)
        closing.pop_all()
        return file


def _placed(states: dict[str, StateDict]) -> tuple[dict[str, dict[str, tuple[str, list[int], int]]], int]:
    """(entry -> name -> (dtype, shape, offset), bytes of all)."""
    places: dict[str, dict[str, tuple[str, list[int], int]]] = {}
    size = 0
    for entry, state in states.items():
        places[entry] = {}
        for name, tensor in state.items():
            places[entry][name] = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size)
            size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    return places, size


def _fill(memory: mmap.mmap, states: dict[str, StateDict], places: dict[str, dict[str, tuple[str, list[int], int]]]) -> None:
    for entry, state in states.items():
        for name, tensor in state.items():
            if tensor.numel():
                _tensor(memory, *places[entry][name]).copy_(tensor.detach())


def _tensor(memory: mmap.mmap | None, dtype: str, shape: list[int], offset: int) -> Tensor:
    kind = getattr(torch, dtype)
    count = torch.Size(shape).numel()
    if memory is None or not count:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(memory, dtype=kind, count=count, offset=offset).reshape(shape)


def _exactly(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise EOFError("the other process has closed the connection")
        received += part
    return bytes(received)
