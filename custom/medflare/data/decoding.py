"""Images of a site as tensors of the network's size: read, checked and resized once, then kept in memory or in a cache folder.

The cache has one safetensors file for each image, named by a hash of everything that its tensors depend on. Files are written atomically
and never changed. They may be deleted at any time: an image without a file is decoded again.
"""

import errno
import hashlib
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from medflare.core.errors import DataError
from medflare.core.packages import versions
from medflare.core.store import write_atomically
from medflare.core.text import format_shape
from medflare.data import mechanisms, phantom
from medflare.data.acquisition import acquisition_of
from medflare.data.datalist import SPLITS, DatalistItem, annotated_names, class_numbers, read_content, read_datalist
from medflare.data.local import CacheSettings, ImageBounds
from medflare.data.progress import counted
from medflare.data.reading import Image, channel_files, read_image, read_mask
from medflare.data.targets import LazyTensors, annotation_of, class_counts, encode_label, encode_mask, stored_values, with_empty_masks
from medflare.data.transforms import Preprocessing
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Images, Spacing

_FORMAT: Final = 11  # increase when the meaning of cached tensors or the checks of images change
_KEPT_SITES: Final = 16  # sites whose decoded images one process keeps
_GB: Final = 10**9
_ENDING: Final = ".safetensors"
_ROWS: Final = "rows"  # metadata of a cache file: name, spacing, acquisition, class counts and bytes of each row
_DECODERS: Final = ("torch", "monai", "numpy", "pillow", "pydicom", "nibabel")  # another release may read a file differently
_SETTINGS: Final = (
    *("kind", "target", "labels", "channels", "size", "intensity", "slices", "label_values", "unlisted_labels", "spatial_dims"),
    *("image_mode", "orientation", "spacing", "missing_channels", "pick"),
)
_log = logging.getLogger(__name__)


# -- where images come from ------------------------------------------------------------------------------------------------


class Source:
    """A site's images and masks at their stored size: its folder with datalist.json, which may name files in further `folders`."""

    splits_are_fixed = False  # True: the task's `resplit` does not draw splits of these images

    def __init__(self, root: Path, task: TaskConfig, folders: Sequence[Path] | None = None, bounds: ImageBounds = ImageBounds()):
        self._root, self._task = root, task
        self._folders, self._bounds = folders, bounds

    @cached_property
    def _content(self) -> Mapping[str, Any]:
        return read_content(self._root)

    def entries(self) -> list[DatalistItem]:
        """The items of datalist.json."""
        return read_datalist(self._root, self._task.kind, self._folders)

    def listed(self) -> tuple[str, ...]:
        """Splits that datalist.json has; they may be empty."""
        return tuple(split for split in SPLITS if self._content.get(split) is not None)

    def names(self) -> Mapping[str, Sequence[int]]:
        """Name -> numbers of classes or structures, by "labels" of datalist.json."""
        return class_numbers(self._content.get("labels"))

    def annotated(self) -> tuple[str, ...] | None:
        """The structures that datalist.json calls annotated."""
        return annotated_names(self._content, self._root)

    def image(self, entry: DatalistItem) -> Image:
        """The item's image, see `reading.read_image`; DataError for a constant one, too."""
        task = self._task
        image = read_image(channel_files(entry.channels, task, entry.place) if entry.channels else entry.files, task, self._bounds)
        single_slice = image.array.ndim == 3 and task.kind == "segmentation"  # may be empty, for example above the head
        if not single_slice and all(channel.min() == channel.max() for channel in image.array):
            raise DataError(f"{entry.image}: empty, all pixels have one value; export the image again or leave it out")
        return image

    def mask(self, entry: DatalistItem, image: Image) -> np.ndarray:
        """The item's mask or masks, see `reading.read_mask`; DataError for masks of different sizes, too."""
        mask_per_label = self._task.target == "multilabel" and not self._task.label_values
        several = mask_per_label and len(entry.masks) == 1 < len(self._task.labels)
        masks = []
        for file in entry.masks:
            mask, segments = read_mask(file, entry.image, image, self._task, self._bounds, several=several)
            masks.append(self._single_mask(mask, segments, file) if segments and not mask_per_label else mask)
            if mask.shape[1:] != masks[0].shape[1:]:
                first = f"{entry.masks[0].name} is {format_shape(masks[0].shape[1:])}"
                raise DataError(f"{file}: the mask is {format_shape(mask.shape[1:])}, {first}; store masks of one size")
        return np.concatenate(masks)

    def _single_mask(self, masks: np.ndarray, segments: list[tuple[str, int]], path: Path) -> np.ndarray:
        """Segments as one mask of label values: a segment named like a label has that label's value, others their number."""
        task = self._task
        if (masks.sum(axis=0) > 1).any():
            raise DataError(f"{path}: segments overlap, a {task.target} task has one label a voxel; separate them, or make it multilabel")
        values = {label: stored[0] for label, stored in zip(task.labels, stored_values(task), strict=True)}
        return np.einsum("m...,m->...", masks, np.array([values.get(label, number) for label, number in segments]))[None]

    def state(self, entry: DatalistItem) -> Any:
        """The bounds of an image, and name, size and modification time of every file of the item."""
        masks = entry.masks if self._task.kind == "segmentation" else []
        bounds = [getattr(self._bounds, field.name) for field in fields(ImageBounds)]  # without those of `local.Bounds`
        return [bounds, [[_file_state(file) for file in [*filter(None, entry.files), *masks]]]]


class EmbeddedSource(Source):
    """A site of a generated federation, see `data.phantom` and `data.mechanisms`."""

    def __init__(self, site: str, task: TaskConfig):
        super().__init__(Path(site), task)
        phantoms = task.embedded == "phantom"
        self.splits_are_fixed = not phantoms  # there the draw of splits draws images
        self._key = task.embedded, site, 0 if phantoms else task.resplit or 0

    @cached_property
    def _content(self) -> Mapping[str, Any]:
        return dict.fromkeys(SPLITS, ())

    def entries(self) -> list[DatalistItem]:
        """The site's generated images, with their label for classification."""
        labels, place = self._task.kind == "classification", f"{self._task.embedded} {self._root}"
        return [
            DatalistItem(Path(item.name), item.grade if labels else Path(item.name), item.patient, item.split, place)
            for item in _generated(*self._key).values()
        ]

    def image(self, entry: DatalistItem) -> Image:
        """float32 (channels, height, width); the mean of the colours for a task with one channel."""
        picture = _generated(*self._key)[entry.name].image.astype(np.float32)
        array = picture.transpose(2, 0, 1) if self._task.image_channels == 3 else picture.mean(axis=2)[None]
        return Image(array, coloured=picture.shape[2] == 3)

    def mask(self, entry: DatalistItem, image: Image) -> np.ndarray:
        """int64 (1, height, width)."""
        return _generated(*self._key)[entry.name].mask.astype(np.int64)[None]

    def state(self, entry: DatalistItem) -> Any:
        """What decides the image."""
        return [*self._key, [entry.name]]


@lru_cache(maxsize=_KEPT_SITES)
def _generated(embedded: str, site: str, draw: int) -> dict[str, phantom.Photograph]:
    """A site's images by name; they take up to half a second and a megabyte."""
    images = phantom.photographs(site) if embedded == "phantom" else mechanisms.photographs(embedded, site, draw)
    return {image.name: image for image in images}


def _file_state(file: Path) -> list[Any]:
    """Name, size and modification time of a file; of a folder those of its slices too, which change without the folder."""
    try:
        files = [(path, path.stat()) for path in (file, *(sorted(file.iterdir()) if file.is_dir() else ()))]
    except OSError:
        return [str(file), None, None]
    return [[str(path), status.st_size, status.st_mtime_ns] for path, status in files]


# -- from images to tensors ------------------------------------------------------------------------------------------------


class DecodedRow(NamedTuple):
    """A picture, a volume, or a slice of a volume, with its target."""

    image: Any  # float32 (C, ...); None where it stays on the disk
    target: Any  # see `loading.Split.targets`; None where it stays on the disk
    entry: int  # index of its item in the datalist
    place: int  # its index among the rows of that item
    name: str  # file name; slices end in "[number]"
    spacing: Spacing | None  # of a volume, see `geometry.Grid.cell`; None where it is unknown
    acquired: list[float]  # of its file, see `acquisition.Acquisition.row`
    counts: list[int]  # of its classes, see `targets.class_counts`
    nbytes: int  # of image and target


@dataclass(frozen=True)
class Decoded:
    """All images of a site in the order of its datalist."""

    rows: list[DecodedRow]  # see `DecodedRow`
    failed: dict[int, str]  # index of an item that cannot be used -> why
    read: Callable[[DecodedRow, str], Tensor] | None = None  # reads "image" or "target" of a row whose tensors stay on the disk

    def tensors(self, rows: Sequence[DecodedRow], name: str, task: TaskConfig) -> Images:
        """Field "image" or "target" of some of the rows: one tensor if all images of the task have one size, else a sequence."""
        values = [getattr(row, name) for row in rows]
        if any(getattr(row, name) is None for row in self.rows):
            read, counts = self.read, None
            assert read is not None
            if name == "target":
                counts = torch.tensor([row.counts for row in rows], dtype=torch.int64)
                counts = counts.reshape(len(rows), len(task.classes))  # of no rows, too
            return LazyTensors(len(rows), lambda index: read(rows[index], name), counts)
        one_size = task.spatial_dims == 2 and task.image_mode == "resize"
        if one_size or (name == "target" and task.kind == "classification"):
            return torch.stack(values or [getattr(self.rows[0], name)])[: len(values)]
        return tuple(values)


def decode(task: TaskConfig, source: Source, entries: Iterable[DatalistItem]) -> Decoded:
    """Every picture or volume, and every used slice of volumes that are cut, read, checked and resized, in memory."""
    failed: dict[int, str] = {}
    return Decoded(list(decoded_rows(task, source, entries, failed)), failed)


def decoded_rows(task: TaskConfig, source: Source, entries: Iterable[DatalistItem], failed: dict[int, str]) -> Iterator[DecodedRow]:
    """The rows of `decode` one by one; no more than one file is in memory.

    Args:
        failed: receives the index of every item that cannot be used, and why.

    Raises:
        DataError: an item cannot be used, and the task's `unreadable` is "error".
    """
    preprocessing = Preprocessing(task)
    for number, entry in enumerate(entries):
        try:
            image = source.image(entry)
            target = target_of(task, source, entry, image)
        except DataError as error:
            if task.unreadable == "error":
                raise
            failed[number] = str(error)
            continue
        acquired = acquisition_of(image, task).row()
        for place, (name, picture, label) in enumerate(pictures_of(task, entry, image.array, target)):
            resized = preprocessing.image(picture)
            encoded = preprocessing.mask(label) if task.kind == "segmentation" else torch.as_tensor(label)
            if task.target == "multilabel":  # a float channel for each label, as losses take them
                encoded = encoded.to(torch.float32)
            elif task.kind == "segmentation":
                encoded = encoded[0]
            spacing = image.grid.cell if task.spatial_dims == 3 and image.grid else None
            if spacing is not None:
                sides = zip(spacing[:3], picture.shape[1:], resized.shape[1:], strict=True)
                spacing = (*(side * old / new for side, old, new in sides), *spacing[3:])
            counts = class_counts(encoded[None], task).tolist()
            yield DecodedRow(resized, encoded, number, place, name, spacing, acquired, counts, resized.nbytes + encoded.nbytes)


def target_of(task: TaskConfig, source: Source, entry: DatalistItem, image: Image) -> np.ndarray:
    """The item's target at its stored size, int64: masks (M, ...); or a label (), multilabel (C,).

    Raises:
        DataError: a label or mask that does not fit the task or the image.
    """
    if task.kind == "classification":
        target = encode_label(entry.label, task, entry.place)
        assert target is not None  # items without a target were left out before
        return target
    mask, place = source.mask(entry, image), str(entry.masks[0])
    if task.target == "multilabel" and not task.label_values and (annotation := annotation_of(source.annotated(), task, entry.place)):
        mask = with_empty_masks(mask, annotation)
    if mask.shape[1:] != image.array.shape[1:]:
        sides = format_shape(image.array.shape[1:])
        raise DataError(f"{place}: the mask is {format_shape(mask.shape[1:])}, its image {entry.image} is {sides}; store both at one size")
    return encode_mask(mask, task, place, [str(file) for file in entry.masks])


def pictures_of(
    task: TaskConfig, entry: DatalistItem, image: np.ndarray, target: np.ndarray
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Name, picture (C, ...) and target, see `target_of`, of the picture or volume itself, or of each used slice of a volume.

    Slices without foreground are left out of training alone: predictions on them count where a model is measured.
    """
    if image.ndim == task.spatial_dims + 1:
        yield entry.name, image, target
        return
    axis = task.slices.axis + 1
    segmentation, use_all = task.kind == "segmentation", task.slices.keep == "all" or entry.split != "training"
    for position in range(image.shape[axis]):
        label = np.take(target, position, axis=axis) if segmentation else target
        if use_all or label.any():
            yield f"{entry.name}[{position}]", np.take(image, position, axis=axis), label


# -- decoded once ----------------------------------------------------------------------------------------------------------

_decoded_sites: OrderedDict[tuple[str, CacheSettings | None], Decoded] = OrderedDict()


def decoded_once(site: str, task: TaskConfig, source: Source, entries: list[DatalistItem], cache: CacheSettings | None) -> Decoded:
    """The decoded images of `entries`: from this process, else from the cache folder, else from the source.

    Args:
        cache: the folder, and how much of it comes into memory; None decodes into memory.

    Raises:
        DataError: an image cannot be used, or the images fit neither into memory nor into the cache.
    """
    keys = _keys(task, source, entries)
    key = hashlib.blake2b("".join([*keys, task.unreadable]).encode(), digest_size=16).hexdigest(), cache
    decoded = _decoded_sites.pop(key, None)
    if decoded is None:
        numbers = counted(range(len(entries)), len(entries), f"site {site}, images read")
        if cache is None:
            decoded = decode(task, source, (entries[number] for number in numbers))
        else:
            decoded = _CachedImages(task, source, entries, keys, cache).decoded(site, numbers)
    _decoded_sites[key] = decoded
    while len(_decoded_sites) > _KEPT_SITES:
        _decoded_sites.popitem(last=False)
    return decoded


def _keys(task: TaskConfig, source: Source, entries: list[DatalistItem]) -> list[str]:
    settings = task.to_dict()
    shared = [_FORMAT, versions(_DECODERS), {name: settings[name] for name in _SETTINGS}, source.annotated()]
    common = hashlib.blake2b(json.dumps(shared).encode(), digest_size=16)
    keys = []
    for entry in entries:
        split = [entry.split] if task.slices.keep == "foreground" else []  # slices are chosen for training alone
        digest = common.copy()
        digest.update(json.dumps([source.state(entry), str(entry.label), entry.name, *split]).encode())
        keys.append(digest.hexdigest())
    return keys


class _CachedImages:
    """The cached images of a site."""

    def __init__(self, task: TaskConfig, source: Source, entries: list[DatalistItem], keys: list[str], cache: CacheSettings):
        self._task, self._source, self._entries, self._cache = task, source, entries, cache
        self._paths = [Path(cache.folder) / f"{key}{_ENDING}" for key in keys]
        self._write_error = ""
        self._bytes_left: int | None = None  # that may still be written; None: not yet known
        self._unused: list[Path] = []  # files of other sites and tasks, least recently used first

    def decoded(self, site: str, numbers: Iterable[int]) -> Decoded:
        """All images: in memory if they fit, else read when they are used."""
        task, limit = self._task, self._cache.memory_gb * _GB
        failed: dict[int, str] = {}
        rows: list[DecodedRow] = []
        nbytes, fits = 0, True
        for number in numbers:
            try:
                new = self._rows(number, images=fits)
            except DataError as error:
                if task.unreadable == "error":
                    raise
                failed[number] = str(error)
                continue
            rows += new if fits else map(self._on_disk, new)
            nbytes += sum(row.nbytes for row in new)
            if fits and nbytes > limit:
                fits, rows = False, [self._on_disk(row) for row in rows]
            if not fits and self._write_error:
                full = f"its decoded images take more than memory_gb = {self._cache.memory_gb:g}"
                reason = f"the cache {self._cache.folder} cannot take them ({self._write_error})"
                raise DataError(f"site {site}: {full}, and {reason}; give it room in local/medflare.json, or raise memory_gb")
        return Decoded(rows, failed, None if fits else self._read)

    def _on_disk(self, row: DecodedRow) -> DecodedRow:
        return row._replace(image=None, target=row.target if self._task.kind == "classification" else None)

    def _rows(self, number: int, *, images: bool) -> list[DecodedRow]:
        """The rows of an item: with their tensors if `images`, else with labels alone. An image without a file is decoded and cached."""
        names = ["image", "target"] if images else ["target"] if self._task.kind == "classification" else []
        try:
            with safe_open(self._paths[number], "pt") as file:
                described = json.loads(file.metadata()[_ROWS])
                tensors = {name: file.get_tensor(name).clone() for name in names if described}
            with suppress(OSError):
                os.utime(self._paths[number])
            pictures, targets = (tensors.get(name, [None] * len(described)) for name in ("image", "target"))
            return [
                DecodedRow(picture, self._unpacked(target), number, place, name, tuple(spacing) if spacing else None, *others)
                for place, (picture, target, (name, spacing, *others)) in enumerate(zip(pictures, targets, described, strict=True))
            ]
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            return self._decode(number)

    def _read(self, row: DecodedRow, name: str) -> Tensor:
        try:
            with safe_open(self._paths[row.entry], "pt") as file:
                tensor = file.get_slice(name)[row.place].clone()
        except (OSError, SafetensorError):
            tensor = getattr(self._decode(row.entry)[row.place], name)
        return tensor if name == "image" else self._unpacked(tensor)

    def _decode(self, number: int) -> list[DecodedRow]:
        failed: dict[int, str] = {}
        rows = [row._replace(entry=number) for row in decoded_rows(self._task, self._source, [self._entries[number]], failed)]
        if failed:
            raise DataError(failed[0])
        if not self._write_error:
            try:
                self._write(self._paths[number], rows)
            except OSError as error:
                self._write_error = error.strerror or str(error)
                _log.warning("cache %s cannot be written (%s); the next process decodes again", self._cache.folder, self._write_error)
        return rows

    def _write(self, path: Path, rows: Sequence[DecodedRow]) -> None:
        stacked = {name: torch.stack([getattr(row, name) for row in rows]) for name in ("image", "target")} if rows else {}
        if rows:
            small = stacked["target"].to(torch.uint8)  # one byte for a label, where that loses nothing
            stacked["target"] = small if torch.equal(small.to(stacked["target"].dtype), stacked["target"]) else stacked["target"]
        content = save(stacked, {_ROWS: json.dumps([[row.name, row.spacing, row.acquired, row.counts, row.nbytes] for row in rows])})
        self._make_room(len(content))
        write_atomically(path, content)

    def _make_room(self, count: int) -> None:
        """Delete the least recently used files of other sites and tasks until `count` more bytes fit."""
        if self._bytes_left is None:
            used = {path.name for path in self._paths}
            files = [(path.stat(), path) for path in Path(self._cache.folder).glob(f"*{_ENDING}")]
            self._unused = [path for _, path in sorted(files, key=lambda item: item[0].st_mtime) if path.name not in used]
            self._bytes_left = int(self._cache.limit_gb * _GB) - sum(stat.st_size for stat, _ in files)
        self._bytes_left -= count
        while self._bytes_left < 0:
            if not self._unused:
                raise OSError(errno.ENOSPC, f"more than cache.limit_gb = {self._cache.limit_gb:g}")
            with suppress(OSError):
                oldest = self._unused.pop(0)
                size = oldest.stat().st_size
                oldest.unlink()
                self._bytes_left += size

    def _unpacked(self, target: Tensor | None) -> Any:
        return None if target is None else target.to(torch.float32 if self._task.target == "multilabel" else torch.int64)
