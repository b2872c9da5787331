"""Images decoded once: per process, and with a cache folder once per site, in one safetensors file per image.

A file's name is the hash of all that decides its tensors. It appears in one step and is never changed. Whoever lacks a file decodes the
image again, so that files may be deleted at any time.
"""

import errno
import hashlib
import json
import logging
import math
import os
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from medflare.core.errors import DataError
from medflare.core.packages import versions
from medflare.core.store import write_atomically
from medflare.data.datalist import DatalistItem
from medflare.data.decoding import Decoded, DecodedRow, decode, decoded_rows, gathered
from medflare.data.progress import counted
from medflare.data.settings import CacheSettings
from medflare.data.sources import Source
from medflare.data.targets import LazyTensors, class_counts
from medflare.tasks.config import TaskConfig

_FORMAT: Final = 10  # raise when the meaning of cached tensors or the checks of images change
_KEPT_SITES: Final = 16  # decoded sites that one process keeps
_GB: Final = 10**9
_ENDING: Final = ".safetensors"
_DTYPES: Final = {"F32": torch.float32, "U8": torch.uint8, "I64": torch.int64}  # as the format calls them
_FACTS: Final = "rows"  # of a file's metadata: name, spacing, acquisition and class counts of each row
_DECODERS: Final = ("torch", "monai", "numpy", "pillow", "pydicom", "nibabel")  # another release may read the same file otherwise
_SETTINGS: Final = (
    *("kind", "target", "labels", "channels", "size", "intensity", "slices", "label_values", "unlisted_labels", "spatial_dims"),
    *("image_mode", "orientation", "spacing", "missing_channels", "pick"),
)
_memory: OrderedDict[tuple[str, CacheSettings | None], Decoded] = OrderedDict()
_log = logging.getLogger(__name__)


def decoded_once(site: str, task: TaskConfig, source: Source, entries: list[DatalistItem], cache: CacheSettings | None) -> Decoded:
    """The decoded images of `entries`: as this process has them, else from the cache folder, else from the source.

    Args:
        site: its name, for messages.
        task: decides kind, size, channels and slices.
        source: gives images and masks.
        entries: of the datalist.
        cache: the folder, and how much comes from there into memory; None decodes into memory.

    Raises:
        DataError: an image cannot be used, or all of them fit neither into memory nor into the cache.
    """
    keys = _keys(task, source, entries)
    key = hashlib.blake2b("".join([*keys, task.unreadable]).encode(), digest_size=16).hexdigest(), cache
    decoded = _memory.pop(key, None)
    if decoded is None:
        what = f"site {site}, images read"
        if cache is None:
            decoded = decode(task, source, counted(entries, len(entries), what))
        else:
            decoded = _Files(task, source, entries, keys, cache).decoded(site, what)
    _memory[key] = decoded
    while len(_memory) > _KEPT_SITES:
        _memory.popitem(last=False)
    return decoded


def _keys(task: TaskConfig, source: Source, entries: list[DatalistItem]) -> list[str]:
    settings = task.to_dict()
    shared = [_FORMAT, versions(_DECODERS), {name: settings[name] for name in _SETTINGS}, source.annotated()]
    common = hashlib.blake2b(json.dumps(shared).encode(), digest_size=16)
    keys = []
    for entry in entries:
        chosen = [entry.split] if task.slices.keep == "foreground" else []  # slices are chosen for training alone
        own = common.copy()
        own.update(json.dumps([source.state([entry]), str(entry.label), entry.name, *chosen]).encode())
        keys.append(own.hexdigest())
    return keys


class _Row(NamedTuple):
    """A row of a file: what is known of it without its tensors."""

    name: str
    spacing: list[float] | None
    acquired: list[float]
    counts: list[int]  # of classes, see `class_counts`
    nbytes: int


class _Files:
    """The cached images of a site."""

    def __init__(self, task: TaskConfig, source: Source, entries: list[DatalistItem], keys: list[str], cache: CacheSettings):
        self._task, self._source, self._entries, self._cache = task, source, entries, cache
        self._paths = [Path(cache.folder) / f"{key}{_ENDING}" for key in keys]
        self._problem = ""  # why files cannot be written
        self._left: int | None = None  # bytes that may still be written
        self._others: list[Path] = []  # files of other sites and tasks, the longest unused first

    def decoded(self, site: str, what: str) -> Decoded:
        """All images, in memory where they fit; else they are read when they are asked for."""
        task, most = self._task, self._cache.memory_gb * _GB
        failed: dict[int, str] = {}
        rows: list[tuple[int, int, _Row]] = []  # number of the entry, place in its file
        tensors: list[tuple[Tensor, Tensor]] = []
        labels: list[Tensor] = []
        nbytes = 0
        for number in counted(range(len(self._entries)), len(self._entries), what):
            try:
                found, images, targets = self._open(number, images=nbytes <= most)
            except DataError as error:
                if task.unreadable == "error":
                    raise
                failed[number] = str(error)
                continue
            rows += [(number, place, row) for place, row in enumerate(found)]
            nbytes += sum(row.nbytes for row in found)
            if task.kind == "classification":
                labels += targets
            if nbytes <= most:
                tensors += zip(images, targets, strict=True)
                continue
            tensors.clear()
            if self._problem:
                raise DataError(
                    f"site {site}: its decoded images take more than memory_gb = {self._cache.memory_gb:g}, and the cache "
                    f"{self._cache.folder} cannot take them ({self._problem}); give it room in local/medflare.json, or raise memory_gb"
                )
        spacings = [None if row.spacing is None else tuple(row.spacing) for _, _, row in rows]
        if nbytes <= most:
            ready = zip(rows, spacings, tensors, strict=True)
            return gathered(
                (DecodedRow(*pair, number, row.name, spacing, row.acquired) for (number, _, row), spacing, pair in ready), task, failed
            )
        places = [(number, place) for number, place, _ in rows]
        counts = torch.tensor([row.counts for _, _, row in rows], dtype=torch.int64)
        return Decoded(
            images=LazyTensors(len(rows), lambda row: self._tensor(*places[row], "image")),
            targets=torch.stack(labels) if labels else LazyTensors(len(rows), lambda row: self._tensor(*places[row], "target"), counts),
            entries=[number for number, _ in places],
            names=[row.name for _, _, row in rows],
            spacings=spacings if task.spatial_dims == 3 else [],
            failed=failed,
            acquired=torch.tensor([row.acquired for _, _, row in rows], dtype=torch.float64),
        )

    def _open(self, number: int, *, images: bool) -> tuple[list[_Row], list[Tensor], list[Tensor]]:
        """The rows of an entry, their images where they are wanted, their targets with them or where they are labels.

        An image without a file is decoded and its file is written.
        """
        path = self._paths[number]
        try:
            with safe_open(path, "pt") as file:
                rows = [_Row(*row) for row in json.loads(file.metadata()[_FACTS])]
                wanted = {"image": images, "target": images or self._task.kind == "classification"} if rows else {}
                found = {name: file.get_tensor(name).clone() for name in wanted if wanted[name]}
            with suppress(OSError):
                os.utime(path)
            return rows, list(found.get("image", ())), [self._unpacked(target) for target in found.get("target", ())]
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            decoded = self._decode(number)
        return [self._facts(row) for row in decoded], [row.image for row in decoded], [row.target for row in decoded]

    def _tensor(self, number: int, place: int, name: str) -> Tensor:
        try:
            found = _read_row(self._paths[number], place, name)
        except (OSError, ValueError, KeyError):
            return getattr(self._decode(number)[place], name)
        return found if name == "image" else self._unpacked(found)

    def _decode(self, number: int) -> list[DecodedRow]:
        failed: dict[int, str] = {}
        rows = list(decoded_rows(self._task, self._source, [self._entries[number]], failed))
        if failed:
            raise DataError(failed[0])
        if not self._problem:
            try:
                self._write(self._paths[number], rows)
            except OSError as error:
                self._problem = error.strerror or str(error)
                _log.warning(
                    "cache %s cannot be written (%s); the next process decodes the images again", self._cache.folder, self._problem
                )
        return rows

    def _write(self, path: Path, rows: Sequence[DecodedRow]) -> None:
        stacked = {name: torch.stack([getattr(row, name) for row in rows]) for name in ("image", "target")} if rows else {}
        if rows:
            small = stacked["target"].to(torch.uint8)  # labels and masks in one byte each, where that loses nothing
            stacked["target"] = small if torch.equal(small.to(stacked["target"].dtype), stacked["target"]) else stacked["target"]
        content = save(stacked, {_FACTS: json.dumps([self._facts(row) for row in rows])})
        self._make_room(len(content))
        write_atomically(path, content)

    def _make_room(self, count: int) -> None:
        """Delete the longest unused files of others where there is no room for so many bytes more."""
        if self._left is None:
            own = {path.name for path in self._paths}
            found = [(path.stat(), path) for path in Path(self._cache.folder).glob(f"*{_ENDING}")]
            self._others = [path for _, path in sorted(found, key=lambda item: item[0].st_mtime) if path.name not in own]
            self._left = int(self._cache.limit_gb * _GB) - sum(stat.st_size for stat, _ in found)
        self._left -= count
        while self._left < 0:
            if not self._others:
                raise OSError(errno.ENOSPC, f"more than cache.limit_gb = {self._cache.limit_gb:g}")
            with suppress(OSError):
                oldest = self._others.pop(0)
                size = oldest.stat().st_size
                oldest.unlink()
                self._left += size

    def _facts(self, row: DecodedRow) -> _Row:
        counts = class_counts(row.target[None], self._task).tolist()
        return _Row(
            row.name, None if row.spacing is None else list(row.spacing), row.acquired, counts, row.image.nbytes + row.target.nbytes
        )

    def _unpacked(self, target: Tensor) -> Tensor:
        return target.to(torch.float32 if self._task.target == "multilabel" else torch.int64)


def _read_row(path: Path, place: int, name: str) -> Tensor:
    """A row of a tensor, by its place in the file: three times as fast as mapping the file, for images of some kilobytes."""
    with path.open("rb", buffering=0) as file:
        start = 8 + int.from_bytes(file.read(8), "little")  # the format: length of the header, header, tensors
        described = json.loads(file.read(start - 8))[name]
        dtype, shape = _DTYPES[described["dtype"]], described["shape"][1:]
        count = dtype.itemsize * math.prod(shape)
        file.seek(start + described["data_offsets"][0] + place * count)
        return torch.from_numpy(np.fromfile(file, np.uint8, count)).view(dtype).reshape(shape)
