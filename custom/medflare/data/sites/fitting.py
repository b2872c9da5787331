"""How images of a split come to the network's size: whole, or as patches, with a window that slides over whole images.

`Whole` is for `fit` "resize", where every image has the task's size already, `Patches` for "patch". Training, scoring, `predict` and
the checks of exports go through here, so that a model sees the same windows everywhere.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from medflare.data.sites.batches import in_order
from medflare.data.splits import Samples
from medflare.data.transforms import plain_tensors
from medflare.tasks.config import TaskConfig

Predictor = Callable[[Tensor], Tensor]  # images (N, C, ...) -> probabilities (N, outputs, ...) or (N, outputs)
Taken = tuple[Tensor, Tensor]  # images (B, C, *size) and targets (B, ...)
OVERLAP = 0.25  # of neighbouring windows, as a share of a side; MONAI's default


class Fitting(Protocol):
    """Rows of a split as what the network is fed with."""

    per_image: int  # samples that an image gives in an epoch

    def take(self, data: Samples, rows: Tensor, random: np.random.RandomState) -> Taken:
        """One sample for every row, long (B,), with draws from `random`."""

    def in_order(self, data: Samples, size: int) -> Iterator[tuple[Tensor, Taken]]:
        """Everything of a split in fixed order: rows, and samples, `size` at a time."""


class Whole:
    """Images of the task's size, as they are."""

    per_image = 1

    def take(self, data: Samples, rows: Tensor, random: np.random.RandomState) -> Taken:
        """The images of some rows.

        Args:
            data: the split.
            rows: long (B,).
            random: not read.
        """
        return data.take(rows)

    def in_order(self, data: Samples, size: int) -> Iterator[tuple[Tensor, Taken]]:
        """All images.

        Args:
            data: the split.
            size: of a batch.
        """
        for rows in in_order(len(data), size):
            yield rows, data.take(rows)


class Patches:
    """Patches of images that are used at their own size; an image that is smaller is padded with zeros."""

    def __init__(self, task: TaskConfig):
        self.size, self.per_image = task.size, task.patches_per_image

    def take(self, data: Samples, rows: Tensor, random: np.random.RandomState) -> Taken:
        """A patch of every row, around a voxel of the foreground as often as around one of the background.

        Args:
            data: the split.
            rows: long (B,); of none, an empty batch, as DP-SGD may draw it.
            random: source of the draws.
        """
        from monai.transforms.croppad.dictionary import RandCropByPosNegLabeld

        like, label = data.image(0), data.targets[0]
        crop = RandCropByPosNegLabeld(["image", "target"], label_key="foreground", spatial_size=self.size).set_random_state(state=random)
        images, targets = [like.new_zeros(0, len(like), *self.size)], [label.new_zeros(0, *label.shape[: -len(self.size)], *self.size)]
        with plain_tensors(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Num foregrounds")  # an image of background alone gives patches of background
            for row in rows.tolist():
                (sample,) = crop(self._padded(data, row))
                images.append(sample["image"][None])
                targets.append(sample["target"].reshape(1, *targets[0].shape[1:]).to(label.dtype))
        return torch.cat(images), torch.cat(targets)

    def in_order(self, data: Samples, size: int) -> Iterator[tuple[Tensor, Taken]]:
        """Every image cut into windows side by side that cover it.

        Args:
            data: the split.
            size: of a batch.
        """
        waiting: list[tuple[int, Tensor, Tensor]] = []
        for row in range(len(data)):
            image, target = data.image(row), data.targets[row]
            windows = windows_of(image, self.size)
            cut = windows_of(target.reshape(-1, *image.shape[1:]).float(), self.size).to(target.dtype)
            waiting += zip([row] * len(windows), windows, cut.reshape(len(cut), *target.shape[: -len(self.size)], *self.size), strict=True)
            while len(waiting) >= size or (waiting and row == len(data) - 1):
                rows, images, targets = zip(*waiting[:size], strict=True)
                del waiting[:size]
                yield torch.tensor(rows), (torch.stack(images), torch.stack(targets))

    def _padded(self, data: Samples, row: int) -> dict[str, Tensor]:
        image, target = data.image(row), data.targets[row]
        target = target.reshape(-1, *image.shape[1:]).float()
        padded = {"image": padded_to(image, self.size), "target": padded_to(target, self.size)}
        return {**padded, "foreground": padded["target"].amax(dim=0, keepdim=True)}


def of_task(task: TaskConfig) -> Fitting:
    """How the task's images come to the network's size."""
    return Patches(task) if task.fit == "patch" else Whole()


def whole_images(data: Samples) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Row (1,), image (1, C, ...) and target (1, ...) of every image, one by one.

    Args:
        data: the split.
    """
    for row in range(len(data)):
        rows = torch.tensor([row])
        yield (rows, *data.take(rows))


def padded_to(image: Tensor, size: tuple[int, ...]) -> Tensor:
    """An image (C, ...) with zeros on both sides where it is smaller than `size`.

    Args:
        image: of any size.
        size: the least sides.

    Examples:
        >>> padded_to(torch.ones(1, 2, 1), (1, 3))
        tensor([[[0., 1., 0.],
                 [0., 1., 0.]]])
    """
    from monai.transforms.croppad.array import SpatialPad

    with plain_tensors():
        return SpatialPad([max(pair) for pair in zip(size, image.shape[1:], strict=True)])(image)


def windows_of(image: Tensor, size: tuple[int, ...]) -> Tensor:
    """Windows (n, C, *size) side by side that cover an image (C, ...); the last ones are moved back to its border.

    Args:
        image: padded where it is smaller than a window.
        size: of the window.

    Examples:
        >>> windows_of(torch.arange(5.0)[None], (3,))
        tensor([[[0., 1., 2.]],
        <BLANKLINE>
                [[2., 3., 4.]]])
    """
    from monai.data.utils import dense_patch_slices

    padded = padded_to(image, size)
    places = [(slice(None), *place) for place in dense_patch_slices(padded.shape[1:], size, size)]
    return torch.stack([padded[place] for place in places])


def windowed(predictor: Predictor, task: TaskConfig, batch: int) -> Predictor:
    """A predictor of whole images: with `fit` "patch", a window slides over them and its answers are blended (MONAI, Gaussian weights).

    Args:
        predictor: of what the network is fed with.
        task: gives `fit` and the window's size.
        batch: most windows at once.
    """
    if task.fit == "resize":
        return predictor
    from monai.inferers.inferer import SlidingWindowInferer

    inferer = SlidingWindowInferer(task.size, batch, overlap=OVERLAP, mode="gaussian")
    return lambda images: inferer(images, predictor)
