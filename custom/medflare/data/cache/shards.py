"""Images and targets on disk: safetensors files of some dozens of megabytes, written while the images come and read by the row.

Rows are read by their position in the file and not mapped: that is faster for images of some kilobytes (docs/performance.md), what was
read counts to no process's memory, and the kernel keeps it once for all processes all the same.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor

from medflare.core.errors import StateError
from medflare.core.store import file_digest
from medflare.data.cache.folder import Room, private

SHARD_BYTES: Final = 32 * 2**20  # of images and targets; a larger image has a file of its own
IMAGES, TARGETS = "images", "targets"
_DIGEST: Final = "blake2b"  # of a file, against damage


class Part(NamedTuple):
    """Tensors of one shape that lie one after the other in a file: where the first begins, what one is."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


class Shard(NamedTuple):
    """A file of rows; a JSON list in the index."""

    file: str
    rows: int
    digest: str
    images: Part
    targets: Part


@dataclass(frozen=True)
class Shards:
    """Images and targets by row.

    Attributes:
        folder: of the files.
        shards: in the order of the rows.
        target_dtype: of targets in memory; on disk they take as few bytes as they can.
        counts: int64 (N, classes), what `targets.class_counts` counts in each target.
        held: keeps the files from being removed, see `folder.hold`.
    """

    folder: Path
    shards: tuple[Shard, ...]
    target_dtype: torch.dtype
    counts: Tensor
    held: IO[bytes]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(shard.rows for shard in self.shards))

    def images(self, rows: Sequence[int]) -> Tensor:
        """Images (B, C, ...) of rows that have one shape.

        Raises:
            StateError: they are gone.
        """
        return self._read(rows, IMAGES)

    def targets(self, rows: Sequence[int]) -> Tensor:
        """Targets (B, ...) of rows that have one shape.

        Raises:
            StateError: they are gone.
        """
        return self._read(rows, TARGETS).to(self.target_dtype)

    def portions(self, most: int) -> Iterator[list[int]]:
        """All rows in their order, at most so many at a time, each portion of one shape."""
        start = 0
        for shard in self.shards:
            rows = list(range(start, start + shard.rows))
            yield from (rows[first : first + most] for first in range(0, shard.rows, most))
            start += shard.rows

    def verify(self) -> None:
        """Read every file once.

        Raises:
            StateError: one is gone, or its content is not what was written.
        """
        for shard in self.shards:
            try:
                digest = file_digest(self.folder / shard.file, _DIGEST)
            except OSError as error:
                raise self._spoilt(shard) from error
            if digest != shard.digest:
                raise self._spoilt(shard)

    def _read(self, rows: Sequence[int], name: str) -> Tensor:
        places = [self._place(row) for row in rows]
        parts: list[Part] = [getattr(shard, name) for shard, _ in places]
        if len({part.shape for part in parts}) != 1:
            raise ValueError(f"rows of {len({part.shape for part in parts})} shapes do not make one batch")
        if len({part.dtype for part in parts}) > 1:  # targets of one file fit in bytes, those of another do not
            return torch.cat([self._read([row], name) for row in rows])
        found = torch.empty((len(rows), *parts[0].shape), dtype=getattr(torch, parts[0].dtype))
        buffer, size = found.numpy(), found[:1].nbytes
        for number, ((shard, row), part) in enumerate(zip(places, parts, strict=True)):
            try:
                with (self.folder / shard.file).open("rb", buffering=0) as file:
                    file.seek(part.offset + row * size)
                    _fill(file, buffer[number : number + 1].data.cast("B"))
            except (OSError, EOFError) as error:
                raise self._spoilt(shard) from error
        return found

    def _place(self, row: int) -> tuple[Shard, int]:
        """The file of a row, and its place there."""
        number = bisect_right(self._ends, row)
        return self.shards[number], row - (self._ends[number - 1] if number else 0)

    def _spoilt(self, shard: Shard) -> StateError:
        return StateError(f"{self.folder / shard.file}: gone or changed while it was used; start again, and the images are decoded anew")


def _fill(file: Any, buffer: memoryview) -> None:
    """Read until the buffer is full: the system may hand over large rows in pieces."""
    done = 0
    while done < len(buffer):
        count = file.readinto(buffer[done:])
        if not count:
            raise EOFError
        done += count


def write(folder: Path, rows: Iterable[tuple[Tensor, Tensor]], room: Room) -> list[Shard]:
    """Write images and targets as they come; no more than one file's worth of them is in memory.

    Args:
        folder: for the files, empty.
        rows: image (C, ...) and target of each.
        room: asked before every file.

    Returns:
        The files, in the order of the rows.

    Raises:
        OSError: there is no room, or the folder cannot be written.
    """
    shards: list[Shard] = []
    waiting: list[tuple[Tensor, Tensor]] = []

    def flush() -> None:
        if waiting:
            shards.append(_written(folder, f"{len(shards):05}.safetensors", waiting, room))
            waiting.clear()

    size = 0
    for image, target in rows:
        size += image.nbytes + target.nbytes
        if waiting and (size > SHARD_BYTES or image.shape != waiting[0][0].shape):
            flush()
            size = image.nbytes + target.nbytes
        waiting.append((image, target))
    flush()
    return shards


def _written(folder: Path, name: str, rows: Sequence[tuple[Tensor, Tensor]], room: Room) -> Shard:
    tensors = {IMAGES: torch.stack([image for image, _ in rows]), TARGETS: _packed(torch.stack([target for _, target in rows]))}
    content = to_safetensors(tensors)
    room.take(len(content))
    with private(folder / name) as file:
        file.write(content)
    start = 8 + int.from_bytes(content[:8], "little")  # the format: length of the header, header, tensors
    header = json.loads(content[8:start])
    parts = {
        part: Part(start + header[part]["data_offsets"][0], str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:]))
        for part, tensor in tensors.items()
    }
    return Shard(name, len(rows), hashlib.new(_DIGEST, content).hexdigest(), parts[IMAGES], parts[TARGETS])


def _packed(targets: Tensor) -> Tensor:
    """Labels and masks in one byte each, where that loses nothing."""
    small = targets.to(torch.uint8)
    return small if torch.equal(small.to(targets.dtype), targets) else targets
