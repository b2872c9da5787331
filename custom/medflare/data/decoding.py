"""From files, or generated pictures, to tensors of the network's size."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from medflare.core.errors import DataError
from medflare.data.acquisition import acquisition_of
from medflare.data.datalist import DatalistItem
from medflare.data.geometry import by
from medflare.data.reading import Image
from medflare.data.sources import Source
from medflare.data.targets import annotation_of, encode_label, encode_mask, with_empty_masks
from medflare.data.transforms import Preprocessing
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Images, Spacing


@dataclass(frozen=True)
class Decoded:
    """All images of a site in datalist order, before they are divided into splits."""

    images: Images  # see `data.splits.Split`, of all splits together
    targets: Images
    entries: list[int]  # row -> index of its entry (a volume that is cut into slices gives many rows)
    names: list[str]  # row -> name
    spacings: list[Spacing | None]  # row -> millimetres between the voxels of a volume; none at all for pictures
    failed: dict[int, str]  # index of an entry that cannot be used -> why
    acquired: Tensor  # float64 (rows, ...), `data.acquisition.Acquisition.row` of every row's file


class DecodedRow(NamedTuple):
    """A row of `Decoded`: float32 (C, ...) with its target."""

    image: Tensor
    target: Tensor
    entry: int
    name: str
    spacing: Spacing | None
    acquired: list[float]


def decode(task: TaskConfig, source: Source, entries: Iterable[DatalistItem]) -> Decoded:
    """Every picture, and every kept slice of every volume, read, checked and resized, in memory.

    Args:
        task: decides kind, size, channels and slices.
        source: gives pictures and masks.
        entries: of the datalist.
    """
    failed: dict[int, str] = {}
    return gathered(decoded_rows(task, source, entries, failed), task, failed)


def decoded_rows(task: TaskConfig, source: Source, entries: Iterable[DatalistItem], failed: dict[int, str]) -> Iterator[DecodedRow]:
    """The rows of `decode` one after the other, no more than one file's at a time.

    Args:
        task: see `decode`.
        source: see `decode`.
        entries: see `decode`.
        failed: takes the number of every entry that cannot be used, and why.
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
        for name, picture, label in pictures_of(task, entry, image.array, target):
            ready = preprocessing.image(picture)
            wanted = _for_loss(preprocessing.mask(label) if task.kind == "segmentation" else torch.as_tensor(label), task)
            here = image.here if task.spatial_dims == 3 else None
            spacing = resized_spacing(here.spacing if here else None, picture.shape[1:], ready.shape[1:])
            yield DecodedRow(ready, wanted, number, name, spacing, acquired)


def gathered(rows: Iterable[DecodedRow], task: TaskConfig, failed: dict[int, str]) -> Decoded:
    """Rows in memory, stacked where the task's images have one size.

    Args:
        rows: of `decoded_rows`.
        task: says so.
        failed: see `Decoded`; complete when the rows have come to their end.
    """
    kept = list(rows)
    images, targets = [row.image for row in kept], [row.target for row in kept]
    numbers, names = [row.entry for row in kept], [row.name for row in kept]
    spacings = [row.spacing for row in kept] if task.spatial_dims == 3 else []
    acquired = torch.tensor([row.acquired for row in kept], dtype=torch.float64)
    if task.spatial_dims == 3 or task.image_mode == "patch":
        return Decoded(images, targets, numbers, names, spacings, failed, acquired)
    if not images:
        empty = torch.zeros(0, task.image_channels, *task.size)
        return Decoded(empty, torch.zeros(0, len(task.labels), *task.size), numbers, names, spacings, failed, acquired)
    return Decoded(torch.stack(images), torch.stack(targets), numbers, names, spacings, failed, acquired)


def resized_spacing(spacing: Spacing | None, before: Sequence[int], after: Sequence[int]) -> Spacing | None:
    """Millimetres between voxels after a volume was resized.

    Args:
        spacing: before; None where nobody knows.
        before: the volume's sides in voxels.
        after: its sides now.

    Examples:
        >>> resized_spacing((1.0, 2.0), (10, 10), (5, 10))
        (2.0, 2.0)
    """
    if spacing is None:
        return None
    return tuple(side * old / new for side, old, new in zip(spacing, before, after, strict=True))


def _for_loss(target: Tensor, task: TaskConfig) -> Tensor:
    """A target of one image as losses take it: one float channel a label (multilabel), or numbers of classes."""
    if task.target == "multilabel":
        return target.to(torch.float32)
    return target[0] if task.kind == "segmentation" else target


def target_of(task: TaskConfig, source: Source, entry: DatalistItem, image: Image) -> np.ndarray:
    """The entry's target at its stored size.

    Args:
        task: decides what a target is.
        source: gives the mask.
        entry: of the datalist, one that has a target.
        image: the entry's image.

    Returns:
        int64: masks (M, ...); or a label (), multilabel (C,).

    Raises:
        DataError: a label or mask that does not fit the task or the image.
    """
    if task.kind == "classification":
        target = encode_label(entry.label, task, entry.place)
        assert target is not None  # entries without a target were left out before
        return target
    mask, place = source.mask(entry, image), str(entry.masks[0])
    if task.target == "multilabel" and not task.label_values and (annotation := annotation_of(source.annotated(), task, entry.place)):
        mask = with_empty_masks(mask, annotation)
    sides = image.array.shape[1:]
    if mask.shape[1:] != sides:
        raise DataError(f"{place}: the mask is {by(mask.shape[1:])}, its image {entry.image} is {by(sides)}; store both at one size")
    return encode_mask(mask, task, place)


def pictures_of(
    task: TaskConfig, entry: DatalistItem, image: np.ndarray, target: np.ndarray
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """The picture or volume itself, or the kept slices of a volume, with their targets.

    A label chooses slices for training alone: where a model is measured, what it finds on slices without a structure counts.

    Args:
        task: decides about slices.
        entry: of the datalist, with its split.
        image: (C, ...), at its stored size.
        target: see `target_of`.

    Yields:
        Name, picture (C, ...) and target of each.
    """
    if image.ndim == task.spatial_dims + 1:
        yield entry.name, image, target
        return
    axis = task.slices.axis + 1
    segmentation, every = task.kind == "segmentation", task.slices.keep == "all" or entry.split != "training"
    for position in range(image.shape[axis]):
        label = np.take(target, position, axis=axis) if segmentation else target
        if every or label.any():
            yield f"{entry.name}[{position}]", np.take(image, position, axis=axis), label
