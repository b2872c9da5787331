"""A site's images as tensors of the network's size: the stages from a file to a `DecodedRow`.

`loading.load_site_data` calls `decoded_once`. It takes each item of the datalist through these
stages, in the order of this file:

1. reading: `Source` reads the item's image and masks, volumes in the task's spacing.
2. decoding: `decoded_rows` checks and cuts them, scales intensities and size; every picture, volume
   or slice of a volume is one `DecodedRow`.
3. caching: `decoded_once` keeps the rows in memory or in a cache folder.

`loading` then asks `Decoded.tensors` for the rows of each split.

The cache has one safetensors file for each image, named by a hash of everything that its tensors
depend on. Files are written atomically and never changed. They may be deleted at any time: an image
without a file is decoded again.
"""

import errno
import hashlib
import json
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from medflare.core.errors import DataError
from medflare.core.files import write_atomically
from medflare.core.packages import code_versions, versions
from medflare.core.text import format_shape
from medflare.data import mechanisms, phantom
from medflare.data.acquisition import Acquisition, acquisition_of
from medflare.data.class_counts import LazyTensors, class_counts
from medflare.data.datalist import (
    LISTS,
    DatalistItem,
    annotated_names,
    class_numbers,
    read_content,
    read_datalist,
)
from medflare.data.local import CacheSettings, ImageBounds
from medflare.data.progress import with_progress
from medflare.data.reading import READERS, Image, channel_files, read_image, read_mask, suffix
from medflare.data.targets import (
    annotation_of,
    encode_label,
    encode_mask,
    plain_name,
    stored_values,
    with_empty_masks,
)
from medflare.data.transforms import Preprocessing
from medflare.tasks.allowed_transforms import TRANSFORMS
from medflare.tasks.config import TaskConfig, draws_images
from medflare.tasks.metrics import Images, Spacing

_FORMAT = 16  # increase when the meaning of cached tensors or the checks of images change
_CACHED_SITES = 16  # whose decoded images one process has in memory
_GB = 10**9
_IN_MEMORY = _GB // 2  # of images that are otherwise decoded when they are used
_ENDING = ".safetensors"
# Metadata of a cache file: name, spacing, acquisition, class counts and bytes of each row.
_ROWS = "rows"
# Another release of these may read a file differently.
_DECODERS = ("torch", "monai", "numpy", "pillow", "pydicom", "nibabel")
_SETTINGS = (
    "kind",
    "target",
    "labels",
    "channels",
    "size",
    "intensity",
    "slices",
    "label_values",
    "unlisted_labels",
    "spatial_dims",
    "image_mode",
    "orientation",
    "spacing",
    "missing_channels",
    "pick",
)
_log = logging.getLogger(__name__)


# -- 1. reading ------------------------------------------------------------------------------------


@dataclass
class Source:
    """A site's images and masks before they are resized: its folder with datalist.json, which may
    name files in further `folders`.
    """

    root: Path
    task: TaskConfig
    folders: Sequence[str | Path] = ()
    bounds: ImageBounds = ImageBounds()
    splits_are_fixed = False  # True: the task's `resplit` does not draw splits of these images

    @cached_property
    def _content(self) -> Mapping[str, Any]:
        return read_content(self.root)

    def listed_items(self) -> list[DatalistItem]:
        """The items of datalist.json."""
        return read_datalist(self.root, self.task.kind, self.folders)

    def listed_splits(self) -> tuple[str, ...]:
        """Those of `LISTS` that datalist.json has; they may be empty."""
        return tuple(split for split in LISTS if self._content.get(split) is not None)

    def class_numbers(self) -> Mapping[str, Sequence[int]]:
        """Name -> numbers of classes or structures, by "labels" of datalist.json."""
        return class_numbers(self._content.get("labels"))

    def annotated(self) -> tuple[str, ...] | None:
        """The structures that datalist.json calls annotated."""
        return annotated_names(self._content, self.root)

    def image(self, item: DatalistItem) -> Image:
        """The item's image, see `reading.read_image`; DataError for a constant one, too."""
        task = self.task
        files = item.files
        if item.channels:
            files = channel_files(item.channels, task, item.location)
        image = read_image(files, task, self.bounds)
        # One slice may be empty, for example above the head.
        may_be_constant = image.array.ndim == 3 and task.kind == "segmentation"
        if not may_be_constant and all(channel.min() == channel.max() for channel in image.array):
            raise DataError(
                f"{item.image}: empty, all pixels have one value; "
                "export the image again or leave it out"
            )
        return image

    def mask(self, item: DatalistItem, image: Image) -> np.ndarray:
        """The item's mask or masks, see `reading.read_mask`; DataError for one of another size than
        its image, too.
        """
        task = self.task
        sides = image.array.shape[1:]
        # All structures are channels of one file.
        several = task.mask_per_label and len(item.masks) == 1 < len(task.labels)
        masks = []
        for file in item.masks:
            mask, segments = read_mask(file, item.image, image, task, self.bounds, several=several)
            if several and segments:
                mask = self._by_name(mask, segments, file)
            elif segments and not task.mask_per_label:
                mask = self._single_mask(mask, segments, file)
            if mask.shape[1:] != sides:
                turned = ""
                if mask.shape[1:] == sides[::-1]:
                    turned = ", and turned alike: medflare turns a photograph as its EXIF tag says"
                raise DataError(
                    f"{file}: the mask is {format_shape(mask.shape[1:])}, its image {item.image} "
                    f"is {format_shape(sides)}; store both at one size{turned}"
                )
            masks.append(mask)
        return np.concatenate(masks)

    def _single_mask(
        self, masks: np.ndarray, segments: list[tuple[str, int]], path: Path
    ) -> np.ndarray:
        """Segments as one mask of label values: that of the label of a segment's name, which means
        the fewest other labels, or the segments' numbers if no segment is named like a label.
        """
        task = self.task
        if (masks.sum(axis=0) > 1).any():
            problem = f"a {task.target} task has one label a voxel"
            remedy = "make it multilabel"
            if task.target == "multilabel":
                problem = "with label_values a voxel has one value"
                remedy = "leave label_values out"
            raise DataError(f"{path}: segments overlap, {problem}; separate them, or {remedy}")
        value_of = {}
        labels_of = Counter(chain.from_iterable(map(set, stored_values(task))))
        for label, stored in zip(task.labels, stored_values(task), strict=True):
            value_of[plain_name(label)] = min(stored, key=labels_of.__getitem__)
        values = []
        unnamed = set()
        for label, number in segments:
            name = plain_name(label)
            values.append(value_of.get(name, number))
            if name not in value_of:
                unnamed.add(number)
        if len(unnamed) < len(segments) and not unnamed.isdisjoint(value_of.values()):
            raise _wrong_segments(path, segments, task.labels)
        return np.einsum("m...,m->...", masks, np.array(values))[None]

    def _by_name(
        self, masks: np.ndarray, segments: list[tuple[str, int]], path: Path
    ) -> np.ndarray:
        """The masks in the order of the structures of their names; as they are, if no segment is
        named like a structure.
        """
        names = [plain_name(label) for label, _ in segments]
        structures = self.annotated() or self.task.labels
        wanted = [plain_name(label) for label in structures]
        if set(names).isdisjoint(wanted):
            return masks
        if not set(wanted) <= set(names):
            raise _wrong_segments(path, segments, structures)
        ordered = []
        for structure in wanted:
            of_structure = [name == structure for name in names]
            ordered.append(masks[of_structure].max(axis=0))
        return np.stack(ordered)

    def state(self, item: DatalistItem) -> Any:
        """The bounds of an image, and name, size and modification time of each of its files; None
        for a channel without one.
        """
        bounds = [self.bounds.pixels, self.bounds.voxels]
        states = [None if file is None else file_state(file) for file in item.files]
        states += map(file_state, item.masks)
        return [bounds, [states]]


@dataclass
class EmbeddedSource(Source):
    """A site of a generated federation, see `data.phantom` and `data.mechanisms`."""

    def __post_init__(self) -> None:
        embedded = self.task.embedded
        self.splits_are_fixed = draws_images(embedded)
        draw = self.task.resplit if self.splits_are_fixed else None
        self._key = embedded, str(self.root), draw or 0

    @cached_property
    def _content(self) -> Mapping[str, Any]:
        return dict.fromkeys(LISTS, ())

    def listed_items(self) -> list[DatalistItem]:
        """The site's generated images, with their label for classification."""
        location = f"{self.task.embedded} {self.root}"
        items = []
        for picture in _generated(*self._key).values():
            path = Path(picture.name)
            label = picture.grade if self.task.kind == "classification" else path
            items.append(DatalistItem(path, label, picture.patient, picture.split, location))
        return items

    def image(self, item: DatalistItem) -> Image:
        """float32 (channels, height, width); the mean of the colours for one channel."""
        picture = _generated(*self._key)[item.name].image.astype(np.float32)
        channels = picture.transpose(2, 0, 1)
        if self.task.image_channels != 3:
            channels = picture.mean(axis=2)[None]
        return Image(channels, coloured=picture.shape[2] == 3)

    def mask(self, item: DatalistItem, image: Image) -> np.ndarray:
        """int64 (1, height, width)."""
        return _generated(*self._key)[item.name].mask.astype(np.int64)[None]

    def state(self, item: DatalistItem) -> Any:
        """What decides the image."""
        return [*self._key, [item.name]]


@lru_cache(maxsize=_CACHED_SITES)
def _generated(embedded: str, site: str, draw: int) -> dict[str, phantom.Photograph]:
    """A site's images by name; they take up to half a second and a megabyte."""
    if embedded == "phantom":
        images = phantom.photographs(site)
    else:
        images = mechanisms.photographs(embedded, site, draw)
    return {image.name: image for image in images}


def _wrong_segments(
    path: Path, segments: Sequence[tuple[str, int]], labels: Sequence[str]
) -> DataError:
    names = ", ".join(label for label, _ in segments)
    return DataError(
        f"{path}: its segments are {names}, of which some are called as the task's labels "
        f"({', '.join(labels)}); give all of them these names, or none"
    )


def file_state(file: Path) -> list[Any]:
    """Name, size and modification time of a file; of a folder those of its slices too, which change
    without the folder.
    """
    states = []
    paths = [file]
    try:
        if file.is_dir():
            paths += sorted(file.iterdir())
        for path in paths:
            status = path.stat()
            states.append([str(path), status.st_size, status.st_mtime_ns])
    except OSError:
        return [str(file), None, None]
    return states


# -- 2. decoding -----------------------------------------------------------------------------------


class DecodedRow(NamedTuple):
    """A picture, a volume, or a slice of a volume, with its target."""

    image: Any  # float32 (C, ...); None where it stays on the disk
    target: Any  # see `loading.Split.targets`; None where it stays on the disk
    item_index: int  # of its item in the datalist
    row_index: int  # its index among the rows of that item
    name: str  # file name; slices end in "[number]"
    spacing: Spacing | None  # of a volume, see `geometry.Grid.cell`; None where it is unknown
    acquired: Acquisition  # of its file
    counts: list[int]  # of its classes, see `class_counts`
    nbytes: int  # of image and target


class Decoded(NamedTuple):
    """All images of a site in the order of its datalist."""

    rows: list[DecodedRow]  # see `DecodedRow`
    failed: dict[int, str]  # index of an item that cannot be used -> why
    # Reads "image" or "target" of a row whose tensors stay on the disk.
    read: Callable[[DecodedRow, str], Tensor] | None = None

    def tensors(self, rows: Sequence[DecodedRow], name: str, task: TaskConfig) -> Images:
        """Field "image" or "target" of some of the rows: one tensor if all images of the task have
        one size, else a sequence.
        """
        read = self.read
        if read and any(getattr(row, name) is None for row in self.rows):
            counts = None
            if name == "target":
                counts = torch.tensor([row.counts for row in rows], dtype=torch.int64)
                counts = counts.reshape(len(rows), len(task.classes))  # of no rows, too
            return LazyTensors(len(rows), lambda index: read(rows[index], name), counts)
        values = [getattr(row, name) for row in rows]
        one_size = task.spatial_dims == 2 and task.image_mode == "resize"
        if one_size or (name == "target" and task.kind == "classification"):
            return torch.stack(values) if values else no_images_like(getattr(self.rows[0], name))
        return tuple(values)


def no_images_like(first: Tensor) -> Tensor:
    """A batch (0, ...) of the size of a site's first image or target."""
    return first.new_empty(0, *first.shape)


def decoded_rows(
    task: TaskConfig,
    source: Source,
    items: Iterable[DatalistItem],
    failed: dict[int, str],
    start: int = 0,
) -> Iterator[DecodedRow]:
    """Every picture or volume, and every used slice of volumes that are cut, read, checked, scaled
    and resized, one by one; no more than one file is in memory.

    Args:
        start: index of the first item.
        failed: receives the index of every item that cannot be used, and why.

    Raises:
        DataError: an item cannot be used, and the task's `unreadable` is "error".
    """
    preprocessing = Preprocessing(task)
    for number, item in enumerate(items, start):
        # Reading: the item's files.
        try:
            image = source.image(item)
            target = target_of(task, source, item, image)
        except DataError as error:
            if task.unreadable == "error":
                raise
            failed[number] = str(error)
            continue
        # Decoding: pictures at the network's size.
        acquired = acquisition_of(image, task)
        pictures = pictures_of(task, item, image.array, target)
        for row_index, (name, picture, of_picture) in enumerate(pictures):
            resized = preprocessing.image(picture)
            encoded = _target_tensor(of_picture, task, preprocessing)
            yield DecodedRow(
                resized,
                encoded,
                number,
                row_index,
                name,
                spacing=_resized_spacing(image, task, picture.shape[1:], resized.shape[1:]),
                acquired=acquired,
                counts=class_counts(encoded[None], task).tolist(),
                nbytes=resized.nbytes + encoded.nbytes,
            )


def _target_tensor(array: np.ndarray, task: TaskConfig, preprocessing: Preprocessing) -> Tensor:
    """The target of one picture, see `target_of`, as losses take it: float32 for multilabel."""
    target = torch.as_tensor(array)
    if task.kind == "segmentation":
        target = preprocessing.mask(array)
        if task.target != "multilabel":
            return target[0]
    if task.target == "multilabel":  # a channel for each label
        return target.to(torch.float32)
    return target


def _resized_spacing(
    image: Image, task: TaskConfig, stored: Sequence[int], resized: Sequence[int]
) -> Spacing | None:
    """The spacing of a volume whose sides of `stored` voxels have become `resized` ones."""
    if task.spatial_dims != 3 or image.grid is None:
        return None
    cell = image.grid.cell
    if cell is None:
        return None
    sides = zip(cell[:3], stored, resized, strict=True)
    return (*(side * old / new for side, old, new in sides), *cell[3:])


def target_of(task: TaskConfig, source: Source, item: DatalistItem, image: Image) -> np.ndarray:
    """The item's target before it is resized, int64: masks (M, ...); or a label (), multilabel
    (C,). At a site without labels all is background or the first class.

    Raises:
        DataError: a label or mask that does not fit the task or the image.
    """
    if task.kind == "classification":
        target = encode_label(item.label, task, item.location)
        assert target is not None  # items without a target were left out before
        return target
    if item.label is None:
        masks = len(task.labels) if task.target == "multilabel" else 1
        return np.zeros((masks, *image.array.shape[1:]), np.int64)
    mask = source.mask(item, image)
    if task.mask_per_label:
        annotation = annotation_of(source.annotated(), task, item.location)
        if annotation is not None:
            mask = with_empty_masks(mask, annotation)
    return encode_mask(mask, task, item.masks)


def pictures_of(
    task: TaskConfig, item: DatalistItem, image: np.ndarray, target: np.ndarray
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Name, picture (C, ...) and target, see `target_of`, of the picture or volume itself, or of
    each used slice of a volume.

    Slices without foreground are left out of training alone: predictions on them count where a
    model is measured.
    """
    if image.ndim == task.spatial_dims + 1:
        yield item.name, image, target
        return
    axis = task.slices.axis + 1
    use_all = task.slices.keep == "all" or item.split != "training"
    for position in range(image.shape[axis]):
        of_slice = target
        if task.kind == "segmentation":
            of_slice = np.take(target, position, axis=axis)
        if use_all or of_slice.any():
            yield f"{item.name}[{position}]", np.take(image, position, axis=axis), of_slice


# -- 3. caching ------------------------------------------------------------------------------------

_decoded_sites: OrderedDict[tuple[Any, ...], Decoded] = OrderedDict()


def decoded_once(
    site: str,
    task: TaskConfig,
    source: Source,
    items: list[DatalistItem],
    cache: CacheSettings | None,
) -> Decoded:
    """The decoded images of `items`: from this process, else from the cache folder, else from the
    source.

    Args:
        cache: the folder, and how much of it comes into memory; None decodes into memory.

    Raises:
        DataError: an image cannot be used, or the images fit neither into memory nor into the
            cache.
    """
    keys = _keys(task, source, items)
    key = (*keys, task.unreadable, cache)
    decoded = _decoded_sites.pop(key, None)
    if decoded is None:
        reading = with_progress(items, len(items), f"site {site}, images read")
        if cache is None:
            failed: dict[int, str] = {}
            decoded = Decoded(list(decoded_rows(task, source, reading, failed)), failed)
        else:
            paths = [Path(cache.folder) / f"{key}{_ENDING}" for key in keys]
            folder = CacheFolder(cache.folder, cache.limit_gb, set(paths))
            images = _CachedImages(task, source, items, paths, folder)
            decoded = images.decoded(site, reading, cache.memory_gb)
    _decoded_sites[key] = decoded
    while len(_decoded_sites) > _CACHED_SITES:
        _decoded_sites.popitem(last=False)
    return decoded


def decoded_when_used(
    site: str, task: TaskConfig, source: Source, items: list[DatalistItem]
) -> Decoded:
    """Every image is decoded and checked. The first ones stay in memory, up to half a gigabyte; of
    the others those of the last file that is used.
    """
    failed: dict[int, str] = {}
    reading = with_progress(items, len(items), f"site {site}, images read")
    rows = []
    free = _IN_MEMORY
    for row in decoded_rows(task, source, reading, failed):
        free -= row.nbytes
        rows.append(row if free >= 0 else _on_disk(row, task))

    @lru_cache(maxsize=1)
    def rows_of(index: int) -> list[DecodedRow]:
        failed_since: dict[int, str] = {}
        rows = list(decoded_rows(task, source, [items[index]], failed_since))
        if failed_since:
            raise DataError(failed_since[0])
        return rows

    def read(row: DecodedRow, name: str) -> Tensor:
        if getattr(row, name) is None:
            row = rows_of(row.item_index)[row.row_index]
        return getattr(row, name)

    return Decoded(rows, failed, read)


def _on_disk(row: DecodedRow, task: TaskConfig) -> DecodedRow:
    """The row without the tensors that are read again when they are used; labels stay."""
    if task.kind == "classification":
        return row._replace(image=None)
    return row._replace(image=None, target=None)


def reading_settings(task: TaskConfig) -> dict[str, Any]:
    """The settings of a task that its decoded images depend on."""
    settings = task.to_dict()
    return {name: settings[name] for name in _SETTINGS}


def _keys(task: TaskConfig, source: Source, items: list[DatalistItem]) -> list[str]:
    """For each item a hash of everything that its tensors depend on."""
    decoders = {**versions(_DECODERS), **code_versions(_extension_modules(task, items))}
    shared = [_FORMAT, decoders, reading_settings(task), source.annotated()]
    common = hashlib.blake2b(json.dumps(shared).encode(), digest_size=16)
    keys = []
    for item in items:
        parts = [source.state(item), str(item.label), item.name]
        if task.slices.keep == "foreground":  # slices are chosen for training alone
            parts.append(item.split)
        digest = common.copy()
        digest.update(json.dumps(parts).encode())
        keys.append(digest.hexdigest())
    return keys


def _extension_modules(task: TaskConfig, items: Iterable[DatalistItem]) -> set[str]:
    """The modules of other distributions that read and scale the images."""
    modules = {TRANSFORMS.module(task.intensity["name"])}
    for item in items:
        for file in item.paths:
            modules.add(READERS.module(suffix(file).removeprefix(".")))
    return modules - {""}


@dataclass
class CacheFolder:
    """A folder whose files take at most `limit_gb`: the least recently used ones of other sites and
    tasks make room for new ones.
    """

    folder: str
    limit_gb: float
    used: set[Path]  # files that stay
    write_error: str = ""  # of the first file that could not be written
    bytes_left: int | None = None  # that may still be written; None: not yet known
    unused: list[Path] = field(default_factory=list)  # least recently used first

    def write(self, path: Path, content: bytes) -> None:
        """Write a file; an error is logged and remembered."""
        try:
            self._make_room(len(content))
            write_atomically(path, content)
        except OSError as error:
            self.write_error = error.strerror or str(error)
            _log.warning(
                "cache %s cannot be written (%s); the next process decodes again",
                self.folder,
                self.write_error,
            )

    def _make_room(self, count: int) -> None:
        """Delete unused files until `count` more bytes fit."""
        if self.bytes_left is None:
            files: dict[Path, os.stat_result] = {}
            for path in Path(self.folder).glob(f"*{_ENDING}"):
                with suppress(FileNotFoundError):  # another job deleted it
                    files[path] = path.stat()
            by_age = sorted(files, key=lambda path: files[path].st_mtime)
            self.unused = [path for path in by_age if path not in self.used]
            used_bytes = sum(status.st_size for status in files.values())
            self.bytes_left = int(self.limit_gb * _GB) - used_bytes
        self.bytes_left -= count
        while self.bytes_left < 0:
            if not self.unused:
                raise OSError(errno.ENOSPC, f"more than cache.limit_gb = {self.limit_gb:g}")
            with suppress(OSError):
                oldest = self.unused.pop(0)
                size = oldest.stat().st_size
                oldest.unlink()
                self.bytes_left += size


@dataclass
class _CachedImages:
    """A site's images, read from the cache or decoded into it."""

    task: TaskConfig
    source: Source
    items: list[DatalistItem]
    paths: list[Path]  # of the cache's file of each item
    cache: CacheFolder
    failed: dict[int, str] = field(default_factory=dict)

    def decoded(self, site: str, reading: Iterable[DatalistItem], memory_gb: float) -> Decoded:
        """All images: in memory if they fit, else read when they are used."""
        task = self.task
        rows = []
        nbytes = 0
        fits = True
        for number, _ in enumerate(reading):
            item_rows = self._rows(number, images=fits)
            if not fits:
                item_rows = [_on_disk(row, task) for row in item_rows]
            rows += item_rows
            nbytes += sum(row.nbytes for row in item_rows)
            if fits and nbytes > memory_gb * _GB:
                fits = False
                rows = [_on_disk(row, task) for row in rows]
            if not fits and self.cache.write_error:
                raise DataError(
                    f"site {site}: its decoded images take more than "
                    f"memory_gb = {memory_gb:g}, "
                    f"and the cache {self.cache.folder} cannot take them "
                    f"({self.cache.write_error}); "
                    "give it room in local/medflare.json, or raise memory_gb"
                )
        return Decoded(rows, self.failed, None if fits else self._read)

    def _rows(self, number: int, *, images: bool) -> list[DecodedRow]:
        """The rows of an item: with their tensors if `images`, else with labels alone.

        An image without a file is decoded and cached.
        """
        names = []
        if images:
            names.append("image")
        if images or self.task.kind == "classification":
            names.append("target")
        try:
            with safe_open(self.paths[number], "pt") as file:
                described = json.loads(file.metadata()[_ROWS])
                tensors = {name: file.get_tensor(name).clone() for name in names if described}
            with suppress(OSError):
                os.utime(self.paths[number])
            nothing = [None] * len(described)
            pictures = tensors.get("image", nothing)
            targets = tensors.get("target", nothing)
            rows: list[DecodedRow] = []
            for picture, target, values in zip(pictures, targets, described, strict=True):
                name, spacing, acquired, *others = values
                row = DecodedRow(
                    picture,
                    self._unpacked(target),
                    number,
                    len(rows),
                    name,
                    tuple(spacing) if spacing else None,
                    Acquisition(*acquired),
                    *others,
                )
                rows.append(row)
            return rows
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            return self._decode(number)

    def _read(self, row: DecodedRow, name: str) -> Tensor:
        try:
            with safe_open(self.paths[row.item_index], "pt") as file:
                tensor = file.get_slice(name)[row.row_index].clone()
        except (OSError, SafetensorError):
            rows = self._decode(row.item_index)
            if not rows:
                raise DataError(self.failed[row.item_index]) from None
            tensor = getattr(rows[row.row_index], name)
        if name == "image":
            return tensor
        return self._unpacked(tensor)

    def _decode(self, number: int) -> list[DecodedRow]:
        """The rows of an item, written to the cache; none if it cannot be used."""
        item = self.items[number]
        rows = list(decoded_rows(self.task, self.source, [item], self.failed, number))
        if number not in self.failed and not self.cache.write_error:
            self.cache.write(self.paths[number], _file_content(rows))
        return rows

    def _unpacked(self, target: Tensor | None) -> Any:
        if target is None:
            return None
        if self.task.target == "multilabel":
            return target.to(torch.float32)
        return target.to(torch.int64)


def _file_content(rows: Sequence[DecodedRow]) -> bytes:
    """The content of a cache file."""
    tensors = {}
    if rows:
        tensors["image"] = torch.stack([row.image for row in rows])
        targets = torch.stack([row.target for row in rows])
        small = targets.to(torch.uint8)  # one byte for a label, where that loses nothing
        if torch.equal(small.to(targets.dtype), targets):
            targets = small
        tensors["target"] = targets
    described = [[row.name, row.spacing, row.acquired, row.counts, row.nbytes] for row in rows]
    return save(tensors, {_ROWS: json.dumps(described)})
