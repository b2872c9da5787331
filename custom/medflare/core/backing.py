"""Where the numbers of large states lie: in memory, or in files that are read and written as they are touched.

A server holds the models of all sites at once. Inside `Backing.used()` every tensor of some size that the arithmetic of states makes is
the mapping of a file: the operating system keeps of it in memory what there is room for, writes the rest to the disk and reads it again
when it is needed. To the code it is a tensor like any other, of the same bits.
"""

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from medflare.core.errors import StateError

_SMALL: Final = 2**16  # bytes; what is smaller is not worth a file


@dataclass(frozen=True)
class Backing:
    """A folder for the numbers of large states. Its files have no names: they go with the tensors, and with the process.

    Attributes:
        folder: on a disk with room for them; it is made when it is needed.
    """

    folder: Path

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, `empty` makes large tensors here."""
        before = _USED.set(self)
        try:
            yield
        finally:
            _USED.reset(before)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros in a file.

        Raises:
            StateError: the disk is full, or the folder cannot be written.
        """
        size = torch.Size(shape).numel()
        path = self.folder / f".{secrets.token_hex(8)}"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(file, 0, size * dtype.itemsize)  # a disk that is full says so here; a mapping would end the process
                return torch.from_file(str(path), shared=True, size=size, dtype=dtype).reshape(shape)
            finally:
                os.close(file)
                path.unlink()
        except OSError as error:
            raise StateError(f"{self.folder}: no room for the models of all sites ({error.strerror}); free some") from error


_USED: ContextVar[Backing | None] = ContextVar("medflare_backing", default=None)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor on the CPU whose numbers are still to be written: in memory, or in a file where a backing is used."""
    backing = _USED.get()
    if backing is None or torch.Size(shape).numel() * dtype.itemsize < _SMALL:
        return torch.empty(shape, dtype=dtype)
    return backing.tensor(shape, dtype)


def backed() -> bool:
    """Whether large tensors lie in files."""
    return _USED.get() is not None
