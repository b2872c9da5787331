"""From files, or generated pictures, to tensors of the network's size."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from medflare.core.errors import DataError
from medflare.data.datalist import Entry
from medflare.data.sources import Source, size_of
from medflare.data.targets import encode_label, encode_mask
from medflare.data.transforms import Preprocessing
from medflare.tasks.config import TaskConfig


@dataclass(frozen=True)
class Decoded:
    """All images of a site in datalist order, before they are divided into splits."""

    images: Tensor  # float32 (N, C, H, W)
    targets: Tensor  # see `data.splits.Split`
    entries: list[int]  # row -> index of its entry (a volume gives many rows)
    names: list[str]  # row -> name


def decode(task: TaskConfig, source: Source, entries: list[Entry]) -> Decoded:
    """Every picture, and every kept slice of every volume, read, checked and resized.

    Args:
        task: decides kind, size, channels and slices.
        source: gives pictures and masks.
        entries: of the datalist.
    """
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

    Args:
        task: decides what a target is.
        source: gives the mask.
        entry: of the datalist, one that has a target.
        image: the entry's image (C, H, W[, slices]).

    Returns:
        int64: masks (M, H, W[, slices]); or a label (), multilabel (C,).

    Raises:
        DataError: a label or mask that does not fit the task or the image.
    """
    if task.kind == "classification":
        target = encode_label(entry.label, task, entry.place)
        assert target is not None  # entries without a target were left out before
        return target
    mask = source.mask(entry)
    place = str(entry.masks[0])
    if mask.shape[1:] != image.shape[1:]:
        raise DataError(f"{place}: the mask is {size_of(mask)}, its image {entry.image} is {size_of(image)}; store both at one size")
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
