"""Where a site's pictures and masks come from, at their stored size: its files, or the embedded federation that is generated."""

from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from medflare.core.errors import DataError
from medflare.data import phantom
from medflare.data.datalist import SPLITS, Entry, listed_splits, read_datalist
from medflare.data.readers import read_image, read_mask
from medflare.tasks.config import TaskConfig

_KEPT_SITES = 16  # of the embedded federation, in one process


class Source(Protocol):
    """Where a site's pictures come from."""

    def entries(self) -> list[Entry]:
        """What the datalist names, in its order."""

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
        """The entries of datalist.json."""
        return read_datalist(self._root, self._task.kind)

    def listed(self) -> tuple[str, ...]:
        """Splits that datalist.json gives, be they empty."""
        return listed_splits(self._root)

    def image(self, entry: Entry) -> np.ndarray:
        """The entry's image, see `readers.read_image`."""
        return read_image(entry.image, self._task.channels)

    def mask(self, entry: Entry) -> np.ndarray:
        """The entry's masks one after the other, int64 (M, H, W[, slices]).

        Raises:
            DataError: masks of different sizes, or one that cannot be read.
        """
        masks = [read_mask(file) for file in entry.masks]
        for file, mask in zip(entry.masks, masks, strict=True):
            if mask.shape[1:] != masks[0].shape[1:]:
                first = f"{entry.masks[0].name} is {size_of(masks[0])}"
                raise DataError(f"{file}: the mask is {size_of(mask)}, {first}; store masks of one size")
        return np.concatenate(masks)

    def state(self, entries: list[Entry]) -> Any:
        """Size and time of change of every file of these entries."""
        masks = self._task.kind == "segmentation"
        return [[_file_state(file) for file in [entry.image, *(entry.masks if masks else [])]] for entry in entries]


class PhantomSource:
    """The embedded federation: generated images, see `data.phantom`."""

    def __init__(self, site: str, task: TaskConfig):
        self._site, self._task = site, task

    def entries(self) -> list[Entry]:
        """The site's generated images, graded for classification."""
        place = f"phantom {self._site}"
        return [
            Entry(Path(item.name), item.grade if self._task.kind == "classification" else Path(item.name), item.patient, item.split, place)
            for item in _generated(self._site).values()
        ]

    def listed(self) -> tuple[str, ...]:
        """All three splits."""
        return SPLITS

    def image(self, entry: Entry) -> np.ndarray:
        """float32 (3, 64, 64), or their mean (1, 64, 64) for a task with one channel."""
        picture = _generated(self._site)[entry.name].image.astype(np.float32)
        return picture.transpose(2, 0, 1) if self._task.channels == 3 else picture.mean(axis=2)[None]

    def mask(self, entry: Entry) -> np.ndarray:
        """int64 (1, 64, 64): 0 background, 1 disc rim, 2 cup."""
        return _generated(self._site)[entry.name].mask.astype(np.int64)[None]

    def state(self, entries: list[Entry]) -> Any:
        """The names that decide the images."""
        return ["phantom", self._site, [entry.name for entry in entries]]


@lru_cache(maxsize=_KEPT_SITES)
def _generated(site: str) -> dict[str, phantom.Photograph]:
    """A site's photographs by name; half a second to generate, a megabyte to keep."""
    return {photograph.name: photograph for photograph in phantom.photographs(site)}


def size_of(array: np.ndarray) -> str:
    """"64 x 48", of a picture (C, 64, 48), for messages.

    Args:
        array: with its channels first.
    """
    return " x ".join(map(str, array.shape[1:]))


def _file_state(file: Path) -> list[Any]:
    try:
        found = file.stat()
        return [str(file), found.st_size, found.st_mtime_ns]
    except OSError:
        return [str(file), None, None]
