"""Where a site's pictures and masks come from, at their stored size: its files, or the embedded federation that is generated."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cached_property, lru_cache
from pathlib import Path
from stat import S_ISDIR
from typing import Any, Protocol

import numpy as np

from medflare.core.errors import DataError
from medflare.data import phantom
from medflare.data.datalist import SPLITS, Entry, listed_annotated, listed_names, listed_splits, read_datalist
from medflare.data.files.acquisition import Acquisition, acquisition_of
from medflare.data.files.bounds import ImageBounds, refuse_large, refuse_resampled
from medflare.data.files.channels import files_of, in_colour, read_picture, refuse_empty
from medflare.data.files.geometry import Grid, by
from medflare.data.files.readers import read_mask, whole_numbers
from medflare.data.files.segmentations import is_segmentation, read_segmentation
from medflare.data.files.volumes import read_channels, read_volume, series_grid, slices_apart, turned
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Spacing

_KEPT_SITES = 16  # of the embedded federation, in one process


class Source(Protocol):
    """Where a site's pictures come from."""

    def entries(self) -> list[Entry]:
        """What the datalist names, in its order."""

    def listed(self) -> tuple[str, ...]:
        """Splits that are given, be they empty."""

    def names(self) -> Mapping[str, Sequence[int]]:
        """What the site calls the numbers of its classes or structures, see `datalist.names_in`."""

    def annotated(self) -> tuple[str, ...] | None:
        """Structures that the site annotated, see `datalist.listed_annotated`."""

    def image(self, entry: Entry) -> np.ndarray:
        """float32 (C, H, W[, slices]), or a volume (C, X, Y, Z) along the task's axes."""

    def mask(self, entry: Entry) -> np.ndarray:
        """int64 (M, ...), laid out as the image."""

    def spacing(self, entry: Entry) -> Spacing | None:
        """Millimetres between the voxels of a volume as `image` gives it; None for pictures and where nobody knows."""

    def acquisition(self, entry: Entry, image: np.ndarray) -> Acquisition:
        """How the entry's image, as `image` gives it, was acquired."""

    def state(self, entries: list[Entry]) -> Any:
        """JSON that changes whenever a picture or a mask does, or what is refused of them."""


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
        self._grids: tuple[Entry, Grid, Grid] | None = None  # of the volume that was read last, as stored and as given

    def entries(self) -> list[Entry]:
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

    def image(self, entry: Entry) -> np.ndarray:
        """The entry's image, see `channels.read_picture` and `volumes.turned`.

        Raises:
            DataError: it cannot be read, is larger than this site allows, all one value, or its channels are not those of the task.
        """
        files = files_of(entry.channels, self._task, entry.place) if entry.channels else entry.files
        refuse_large(files, self._bounds)
        if self._task.spatial_dims == 3:
            array, stored = read_channels(files, self._task.image_channels, self._task.pick)
            refuse_empty(array, files)
            refuse_resampled(entry.image, stored, self._task, self._bounds)
            array, here = turned(array, stored, self._task)
            self._grids = (entry, stored, here)
            return array
        array = read_picture(files, self._task)
        if array.ndim > 3 or self._task.kind == "classification":  # a slice stored by itself may show nothing, as at the top of a head
            refuse_empty(array, files)
        return array

    def spacing(self, entry: Entry) -> Spacing | None:
        """Millimetres between the voxels of the entry's volume along the task's axes."""
        return self._placed(entry)[1].spacing if self._task.spatial_dims == 3 else None

    def acquisition(self, entry: Entry, image: np.ndarray) -> Acquisition:
        """Size and spacing as stored, intensities and colours."""
        if self._task.spatial_dims == 3:
            return acquisition_of(image, self._task, self._placed(entry)[0])
        return acquisition_of(image, self._task, coloured=in_colour(entry.files, self._task))

    def _placed(self, entry: Entry) -> tuple[Grid, Grid]:
        """Where the entry's volume lies, as stored and as `image` gives it: that of the image that was read last, as a rule."""
        if self._grids is None or self._grids[0] is not entry:
            self.image(entry)
        assert self._grids is not None
        return self._grids[1:]

    def mask(self, entry: Entry) -> np.ndarray:
        """The entry's masks one after the other, int64 (M, ...), laid out as its image.

        Raises:
            DataError: masks of different sizes, on another grid than the image, or one that cannot be read or is too large.
        """
        if shared := set(entry.masks) & set(entry.files):
            raise DataError(f"{shared.pop()}: stands as image and as mask in one entry; correct the datalist")
        refuse_large(entry.masks, self._bounds)
        if self._task.spatial_dims == 3:
            return np.concatenate([self._volume_mask(file, entry) for file in entry.masks])
        masks = [self._picture_mask(file, entry) for file in entry.masks]
        for file, mask in zip(entry.masks, masks, strict=True):
            if mask.shape[1:] != masks[0].shape[1:]:
                first = f"{entry.masks[0].name} is {size_of(masks[0])}"
                raise DataError(f"{file}: the mask is {size_of(mask)}, {first}; store masks of one size")
        return np.concatenate(masks)

    def _picture_mask(self, file: Path, entry: Entry) -> np.ndarray:
        if not (entry.image.is_dir() and is_segmentation(file)):
            listed = self._task.target == "multilabel" and not self._task.label_values  # a mask for each label
            mask = read_mask(file, several=listed and len(entry.masks) == 1 < len(self._task.labels))
            _refuse_apart(file, entry, slices_apart(entry.image, file))
            return mask
        placed = read_segmentation(file, entry.image, series_grid(entry.image), self._task)
        return np.swapaxes(placed, 1, 2)  # a picture's rows come first

    def _volume_mask(self, file: Path, entry: Entry) -> np.ndarray:
        stored, _ = self._placed(entry)
        if entry.image.is_dir() and is_segmentation(file):
            placed = read_segmentation(file, entry.image, stored, self._task)
            return turned(placed, stored, self._task, labels=True)[0]
        array, grid = read_volume(file)
        orientation = self._task.orientation  # a mask may be stored along other axes than its image
        _refuse_apart(file, entry, stored.turned(orientation).difference(grid.turned(orientation)))
        return turned(whole_numbers(array, file), grid, self._task, labels=True)[0]

    def state(self, entries: list[Entry]) -> Any:
        """How large an image may be, and size and time of change of every file of these entries."""
        masks = self._task.kind == "segmentation"
        files = [[_file_state(file) for file in [*filter(None, entry.files), *(entry.masks if masks else [])]] for entry in entries]
        bounds = [getattr(self._bounds, field.name) for field in fields(ImageBounds)]  # a site's have more, which concern no image
        return [bounds, files]


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

    def names(self) -> Mapping[str, Sequence[int]]:
        """None: their numbers are the task's."""
        return {}

    def annotated(self) -> tuple[str, ...] | None:
        """None: all are."""
        return None

    def image(self, entry: Entry) -> np.ndarray:
        """float32 (3, 64, 64), or their mean (1, 64, 64) for a task with one channel."""
        picture = _generated(self._site)[entry.name].image.astype(np.float32)
        return picture.transpose(2, 0, 1) if self._task.image_channels == 3 else picture.mean(axis=2)[None]

    def mask(self, entry: Entry) -> np.ndarray:
        """int64 (1, 64, 64): 0 background, 1 disc rim, 2 cup."""
        return _generated(self._site)[entry.name].mask.astype(np.int64)[None]

    def spacing(self, entry: Entry) -> Spacing | None:
        """None: nobody knows how large a generated picture is."""
        return None

    def acquisition(self, entry: Entry, image: np.ndarray) -> Acquisition:
        """Of a generated picture, whose mean is as coloured as it is."""
        return acquisition_of(image, self._task, coloured=True)

    def state(self, entries: list[Entry]) -> Any:
        """The names that decide the images."""
        return ["phantom", self._site, [entry.name for entry in entries]]


@lru_cache(maxsize=_KEPT_SITES)
def _generated(site: str) -> dict[str, phantom.Photograph]:
    """A site's photographs by name; half a second to generate, a megabyte to keep."""
    return {photograph.name: photograph for photograph in phantom.photographs(site)}


def size_of(array: np.ndarray) -> str:
    """ "64 x 48", of a picture (C, 64, 48), for messages.

    Args:
        array: with its channels first.
    """
    return by(array.shape[1:])


def _refuse_apart(file: Path, entry: Entry, difference: str) -> None:
    if difference:
        raise DataError(f"{file}: the mask lies on another grid than its image {entry.image} ({difference}); resample it to the image")


def _file_state(file: Path) -> list[Any]:
    """Name, size and time of change; of a folder, those of the slices in it too, which change without it."""
    try:
        found = file.stat()
        slices = sorted(file.iterdir()) if S_ISDIR(found.st_mode) else []
        inner = [[one.name, (known := one.stat()).st_size, known.st_mtime_ns] for one in slices]
        return [str(file), found.st_size, found.st_mtime_ns, *inner]
    except OSError:
        return [str(file), None, None]
