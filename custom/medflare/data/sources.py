"""Where a site's images and masks come from, at their stored size: its files, or the embedded federation that is generated."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cached_property, lru_cache
from pathlib import Path
from stat import S_ISDIR
from typing import Any, Protocol

import numpy as np

from medflare.core.errors import DataError
from medflare.data import phantom
from medflare.data.datalist import SPLITS, DatalistItem, listed_annotated, listed_names, listed_splits, read_datalist
from medflare.data.geometry import by
from medflare.data.reading import Image, ImageBounds, files_of, read_image, read_mask
from medflare.data.targets import stored_values
from medflare.tasks.config import TaskConfig

_KEPT_SITES = 16  # of the embedded federation, in one process


class Source(Protocol):
    """Where a site's images come from."""

    def entries(self) -> list[DatalistItem]:
        """What the datalist names, in its order."""

    def listed(self) -> tuple[str, ...]:
        """Splits that are given, be they empty."""

    def names(self) -> Mapping[str, Sequence[int]]:
        """What the site calls the numbers of its classes or structures, see `datalist.names_in`."""

    def annotated(self) -> tuple[str, ...] | None:
        """Structures that the site annotated, see `datalist.listed_annotated`."""

    def image(self, entry: DatalistItem) -> Image:
        """The entry's image."""

    def mask(self, entry: DatalistItem, image: Image) -> np.ndarray:
        """int64 (M, ...), laid out as the image."""

    def state(self, entries: list[DatalistItem]) -> Any:
        """JSON that changes whenever an image or a mask does, or what is refused of them."""


class FileSource:
    """A site's folder with its datalist.json.

    Args:
        root: the folder.
        task: what the images are for.
        folders: further folders that the datalist may name files in, see `datalist.read_datalist`.
        bounds: how large an image may be.
    """

    def __init__(self, root: Path, task: TaskConfig, folders: Sequence[Path] = (), bounds: ImageBounds = ImageBounds()):
        self._root, self._task = root, task
        self._folders, self._bounds = tuple(folders), bounds

    def entries(self) -> list[DatalistItem]:
        """The entries of datalist.json."""
        return read_datalist(self._root, self._task.kind, self._folders)

    def listed(self) -> tuple[str, ...]:
        """Splits that datalist.json gives, be they empty."""
        return listed_splits(self._root)

    def names(self) -> Mapping[str, Sequence[int]]:
        """What datalist.json calls the numbers of classes or structures."""
        return listed_names(self._root)

    def annotated(self) -> tuple[str, ...] | None:
        """The structures that datalist.json says were annotated; it is read once."""
        return self._annotated

    @cached_property
    def _annotated(self) -> tuple[str, ...] | None:
        return listed_annotated(self._root)

    def image(self, entry: DatalistItem) -> Image:
        """The entry's image, see `reading.read_image`.

        Raises:
            DataError: it cannot be read, is larger than this site allows, all one value, or its channels are not those of the task.
        """
        task = self._task
        image = read_image(files_of(entry.channels, task, entry.place) if entry.channels else entry.files, task, self._bounds)
        slice_alone = image.array.ndim == 3 and task.kind == "segmentation"  # it may show nothing, as at the top of a head
        if not slice_alone and all(channel.min() == channel.max() for channel in image.array):
            raise DataError(f"{entry.image}: empty, all its values are one; export the image again or leave it out")
        return image

    def mask(self, entry: DatalistItem, image: Image) -> np.ndarray:
        """The entry's mask or masks, see `reading.read_mask`.

        Raises:
            DataError: one cannot be read, lies on another grid than its image, or the masks differ in size.
        """
        a_mask_each = self._task.target == "multilabel" and not self._task.label_values
        several = a_mask_each and len(entry.masks) == 1 < len(self._task.labels)
        masks = []
        for file in entry.masks:
            mask, segments = read_mask(file, entry.image, image, self._task, self._bounds, several=several)
            masks.append(self._one_mask(mask, segments, file) if segments and not a_mask_each else mask)
            if mask.shape[1:] != masks[0].shape[1:]:
                first = f"{entry.masks[0].name} is {by(masks[0].shape[1:])}"
                raise DataError(f"{file}: the mask is {by(mask.shape[1:])}, {first}; store masks of one size")
        return np.concatenate(masks)

    def _one_mask(self, masks: np.ndarray, segments: list[tuple[str, int]], path: Path) -> np.ndarray:
        """A value for each segment: that of the label which it is named after, else its number."""
        task = self._task
        if (masks.sum(axis=0) > 1).any():
            raise DataError(f"{path}: segments overlap, a {task.target} task has one label a voxel; separate them, or make it multilabel")
        named = {label: values[0] for label, values in zip(task.labels, stored_values(task), strict=True)}
        return np.einsum("m...,m->...", masks, np.array([named.get(label, number) for label, number in segments]))[None]

    def state(self, entries: list[DatalistItem]) -> Any:
        """How large an image may be, and size and time of change of every file of these entries."""
        masks = self._task.kind == "segmentation"
        files = [[_file_state(file) for file in [*filter(None, entry.files), *(entry.masks if masks else [])]] for entry in entries]
        bounds = [getattr(self._bounds, field.name) for field in fields(ImageBounds)]  # a site's have more, which concern no image
        return [bounds, files]


class PhantomSource:
    """The embedded federation: generated images, see `data.phantom`."""

    def __init__(self, site: str, task: TaskConfig):
        self._site, self._task = site, task

    def entries(self) -> list[DatalistItem]:
        """The site's generated images, graded for classification."""
        place = f"phantom {self._site}"
        return [
            DatalistItem(
                Path(item.name), item.grade if self._task.kind == "classification" else Path(item.name), item.patient, item.split, place
            )
            for item in _generated(self._site).values()
        ]

    def listed(self) -> tuple[str, ...]:
        """All three splits."""
        return SPLITS

    def names(self) -> Mapping[str, Sequence[int]]:
        """None: their numbers are the task's."""
        return {}

    def annotated(self) -> tuple[str, ...] | None:
        """None: all are."""
        return None

    def image(self, entry: DatalistItem) -> Image:
        """float32 (3, 64, 64), or their mean (1, 64, 64) for a task with one channel."""
        picture = _generated(self._site)[entry.name].image.astype(np.float32)
        array = picture.transpose(2, 0, 1) if self._task.image_channels == 3 else picture.mean(axis=2)[None]
        return Image(array, coloured=True)

    def mask(self, entry: DatalistItem, image: Image) -> np.ndarray:
        """int64 (1, 64, 64): 0 background, 1 disc rim, 2 cup."""
        return _generated(self._site)[entry.name].mask.astype(np.int64)[None]

    def state(self, entries: list[DatalistItem]) -> Any:
        """The names that decide the images."""
        return ["phantom", self._site, [entry.name for entry in entries]]


@lru_cache(maxsize=_KEPT_SITES)
def _generated(site: str) -> dict[str, phantom.Photograph]:
    """A site's photographs by name; half a second to generate, a megabyte to keep."""
    return {photograph.name: photograph for photograph in phantom.photographs(site)}


def _file_state(file: Path) -> list[Any]:
    """Name, size and time of change; of a folder, those of the slices in it too, which change without it."""
    try:
        found = file.stat()
        slices = sorted(file.iterdir()) if S_ISDIR(found.st_mode) else []
        inner = [[one.name, (known := one.stat()).st_size, known.st_mtime_ns] for one in slices]
        return [str(file), found.st_size, found.st_mtime_ns, *inner]
    except OSError:
        return [str(file), None, None]
