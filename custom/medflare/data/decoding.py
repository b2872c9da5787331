"""From files, or generated pictures, to tensors of the network's size: once per process, or once per site with a cache folder."""

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from medflare.core.errors import DataError, StateError
from medflare.core.message import Message
from medflare.core.store import StateStore
from medflare.data import phantom
from medflare.data.datalist import SPLITS, Entry, listed_splits, read_datalist
from medflare.data.readers import read_image, read_mask
from medflare.data.targets import encode_label, encode_mask
from medflare.data.transforms import Preprocessing
from medflare.tasks.config import TaskConfig

_FORMAT = 1  # raise when the meaning of cached tensors changes
_KEPT_SITES = 16  # decoded sites that one process keeps
_memory: "OrderedDict[str, Decoded]" = OrderedDict()
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decoded:
    """All images of a site in datalist order, before they are divided into splits."""

    images: Tensor  # float32 (N, C, H, W)
    targets: Tensor  # see `data.Split`
    entries: list[int]  # row -> index of its entry (a volume gives many rows)
    names: list[str]  # row -> name


class Source(Protocol):
    """Where a site's pictures come from."""

    def entries(self) -> list[Entry]: ...

    def listed(self) -> tuple[str, ...]:
        """Splits that are given, be they empty."""

    def image(self, entry: Entry) -> np.ndarray:
        """float32 (C, H, W[, slices])."""

    def mask(self, entry: Entry) -> np.ndarray:
        """int64 (M, H, W[, slices])."""

    def state(self, entries: list[Entry]) -> Any:
        """JSON that changes whenever a picture or a mask does."""


class FileSource:
    """A site's folder with its datalist.json."""

    def __init__(self, root: Path, task: TaskConfig):
        self._root, self._task = root, task

    def entries(self) -> list[Entry]:
        return read_datalist(self._root, self._task.kind)

    def listed(self) -> tuple[str, ...]:
        return listed_splits(self._root)

    def image(self, entry: Entry) -> np.ndarray:
        return read_image(entry.image, self._task.channels)

    def mask(self, entry: Entry) -> np.ndarray:
        files = entry.label if isinstance(entry.label, list) else [entry.label]
        masks = [read_mask(file) for file in files]
        for file, mask in zip(files, masks, strict=True):
            if mask.shape[1:] != masks[0].shape[1:]:
                raise DataError(f"{file}: the mask is {_size(mask)}, {files[0].name} is {_size(masks[0])}; store masks of one size")
        return np.concatenate(masks)

    def state(self, entries: list[Entry]) -> Any:
        return [[_file_state(file) for file in _files(entry, self._task)] for entry in entries]


class PhantomSource:
    """The embedded federation: generated images, see `tasks.phantom`."""

    def __init__(self, site: str, task: TaskConfig):
        self._site, self._task = site, task

    def entries(self) -> list[Entry]:
        place = f"phantom {self._site}"
        return [
            Entry(Path(item.name), item.grade if self._task.kind == "classification" else Path(item.name), item.patient, item.split, place)
            for item in _generated(self._site).values()
        ]

    def listed(self) -> tuple[str, ...]:
        return SPLITS

    def image(self, entry: Entry) -> np.ndarray:
        picture = _generated(self._site)[entry.name].image.astype(np.float32)
        return picture.transpose(2, 0, 1) if self._task.channels == 3 else picture.mean(axis=2)[None]

    def mask(self, entry: Entry) -> np.ndarray:
        return _generated(self._site)[entry.name].mask.astype(np.int64)[None]

    def state(self, entries: list[Entry]) -> Any:
        return ["phantom", self._site, [entry.name for entry in entries]]


@lru_cache(maxsize=_KEPT_SITES)
def _generated(site: str) -> dict[str, phantom.Photograph]:
    """A site's photographs by name; half a second to generate, a megabyte to keep."""
    return {photograph.name: photograph for photograph in phantom.photographs(site)}


def decoded_once(site: str, task: TaskConfig, source: Source, entries: list[Entry], cache: Path | None) -> Decoded:
    """The decoded images of `entries`: from memory, else from the cache folder, else from the source."""
    key = _key(task, source, entries)
    decoded = _memory.pop(key, None)
    if decoded is None and cache is not None:
        decoded = _read_cache(cache, f"{task.name}-{site}", key)
    if decoded is None:
        decoded = decode(task, source, entries)
        if cache is not None:
            _write_cache(cache, f"{task.name}-{site}", key, decoded)
    _memory[key] = decoded
    while len(_memory) > _KEPT_SITES:
        _memory.popitem(last=False)
    return decoded


def decode(task: TaskConfig, source: Source, entries: list[Entry]) -> Decoded:
    """Every picture, and every kept slice of every volume, read, checked and resized."""
    preprocessing = Preprocessing(task)
    images, targets, rows, names = [], [], [], []
    for number, entry in enumerate(entries):
        image = source.image(entry)
        target = target_of(task, source, entry, image)
        for name, picture, label in _pictures(task, entry.name, image, target):
            images.append(preprocessing.image(picture))
            targets.append(preprocessing.mask(label) if task.kind == "segmentation" else torch.as_tensor(label))
            rows.append(number)
            names.append(name)
    if not images:
        empty = torch.zeros(0, task.channels, *task.size)
        return Decoded(empty, torch.zeros(0, len(task.labels), *task.size), rows, names)
    stacked = torch.stack(targets)
    if task.target == "multilabel":
        stacked = stacked.to(torch.float32)
    elif task.kind == "segmentation":
        stacked = stacked[:, 0]
    return Decoded(torch.stack(images), stacked, rows, names)


def target_of(task: TaskConfig, source: Source, entry: Entry, image: np.ndarray) -> np.ndarray:
    """The entry's target at its stored size.

    Raises:
        DataError: a label or mask that does not fit the task or the image.
    """
    if task.kind == "classification":
        target = encode_label(entry.label, task, entry.place)
        assert target is not None  # entries without a target were left out before
        return target
    mask = source.mask(entry)
    place = _label_place(entry)
    if mask.shape[1:] != image.shape[1:]:
        raise DataError(f"{place}: the mask is {_size(mask)}, its image {entry.image} is {_size(image)}; store both at one size")
    return encode_mask(mask, task, place)


def _pictures(task: TaskConfig, name: str, image: np.ndarray, target: np.ndarray) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The picture itself, or the kept slices of a volume, with their targets."""
    if image.ndim == 3:
        yield name, image, target
        return
    axis = task.slices["axis"] + 1
    segmentation = task.kind == "segmentation"
    for position in range(image.shape[axis]):
        label = np.take(target, position, axis=axis) if segmentation else target
        if task.slices["keep"] == "all" or label.any():
            yield f"{name}[{position}]", np.take(image, position, axis=axis), label


def _files(entry: Entry, task: TaskConfig) -> list[Path]:
    if task.kind == "classification":
        return [entry.image]
    return [entry.image, *(entry.label if isinstance(entry.label, list) else [entry.label])]


def _label_place(entry: Entry) -> str:
    return str(entry.label[0] if isinstance(entry.label, list) else entry.label)


def _size(array: np.ndarray) -> str:
    return " x ".join(map(str, array.shape[1:]))


def _file_state(file: Path) -> list[Any]:
    try:
        found = file.stat()
        return [str(file), found.st_size, found.st_mtime_ns]
    except OSError:
        return [str(file), None, None]


def _key(task: TaskConfig, source: Source, entries: list[Entry]) -> str:
    settings = task.to_dict()
    used = ("kind", "target", "labels", "channels", "size", "intensity", "slices", "label_values", "unlisted_labels")
    labels = [str(entry.label) for entry in entries]
    content = [_FORMAT, {name: settings[name] for name in used}, source.state(entries), labels]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def _read_cache(folder: Path, name: str, key: str) -> Decoded | None:
    try:
        message = StateStore(folder).load(name)
    except StateError as error:
        _log.warning("data cache is read anew: %s", error)
        return None
    if message is None or message.facts.get("key") != key:
        return None
    data = message.states["data"]
    return Decoded(data["images"], data["targets"], message.facts["entries"], message.facts["names"])


def _write_cache(folder: Path, name: str, key: str, decoded: Decoded) -> None:
    facts = {"key": key, "entries": decoded.entries, "names": decoded.names}
    try:
        StateStore(folder).save(name, Message({"data": {"images": decoded.images, "targets": decoded.targets}}, facts))
    except OSError as error:
        _log.warning("data cache %s cannot be written (%s); the next process decodes the images again", folder, error)
