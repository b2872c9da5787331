"""How images of a split come to the network's size: whole, or as patches, with a window that slides over whole images.

`Whole` is for `image_mode` "resize", where every image has the task's size already, `Patches` for "patch". Training, scoring, `predict` and
the checks of exports go through here, so that a model sees the same windows everywhere.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from medflare.data.splits import Split
from medflare.data.transforms import plain_tensors
from medflare.tasks.config import TaskConfig
from medflare.training.batches import in_order, read_ahead

Predictor = Callable[[Tensor], Tensor]  # images (N, C, ...) -> probabilities (N, outputs, ...) or (N, outputs)
Validator = tuple[Tensor, Tensor]  # images (B, C, *size) and targets (B, ...)
OVERLAP = 0.25  # of neighbouring windows, as a share of a side; MONAI's default


class Fitting(Protocol):
    """Rows of a split as what the network is fed with."""

    per_image: int  # samples that an image gives in an epoch

    def read(self, data: Split, rows: Tensor) -> Any:
        """The images of some rows, long (B,), from where they are kept; draws nothing, so that another thread may do it ahead."""

    def samples(self, found: Any, random: np.random.RandomState) -> Validator:
        """One sample of each image that was read, with draws from `random`."""

    def in_order(self, data: Split, size: int) -> Iterator[tuple[Tensor, Validator]]:
        """Everything of a split in fixed order: rows, and samples, `size` at a time."""

    def whole(self, data: Split, size: int) -> Iterator[tuple[Tensor, Validator]]:
        """All images as a finished model is given them, see `windowed`."""


class Whole:
    """Images of the task's size, as they are."""

    per_image = 1

    def read(self, data: Split, rows: Tensor) -> Validator:
        """The images of some rows.

        Args:
            data: the split.
            rows: long (B,).
        """
        return data.take(rows)

    def samples(self, found: Validator, random: np.random.RandomState) -> Validator:
        """What was read.

        Args:
            found: see `read`.
            random: not read.
        """
        return found

    def in_order(self, data: Split, size: int) -> Iterator[tuple[Tensor, Validator]]:
        """All images.

        Args:
            data: the split.
            size: of a batch.
        """
        return read_ahead(data, in_order(len(data), size), data.take)

    whole = in_order


class Patches:
    """Patches of images that are used at their own size; an image that is smaller is padded with zeros."""

    def __init__(self, task: TaskConfig):
        self.size, self.per_image = task.size, task.patches_per_image

    def read(self, data: Split, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Image and target of every row, and those of the first image at the end: of no rows, they tell what an empty batch is of.

        Args:
            data: the split.
            rows: long (B,); none, as DP-SGD may draw it.
        """
        chosen = rows.tolist()
        known = {row: (data.image(row), data.targets[row]) for row in dict.fromkeys(chosen or [0])}  # each once, however often drawn
        return [known[row] for row in chosen] + [known[next(iter(known))]]

    def samples(self, found: list[tuple[Tensor, Tensor]], random: np.random.RandomState) -> Validator:
        """A patch of every image, around a voxel of the foreground as often as around one of the background.

        Args:
            found: see `read`.
            random: source of the draws.
        """
        from monai.transforms.croppad.dictionary import RandCropByPosNegLabeld

        *pairs, (like, label) = found
        crop = RandCropByPosNegLabeld(["image", "target"], label_key="foreground", spatial_size=self.size).set_random_state(state=random)
        images, targets = [like.new_zeros(0, len(like), *self.size)], [label.new_zeros(0, *label.shape[: -len(self.size)], *self.size)]
        with plain_tensors(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Num foregrounds")  # an image of background alone gives patches of background
            for image, target in pairs:
                (sample,) = crop(self._padded(image, target))
                images.append(sample["image"][None])
                targets.append(sample["target"].reshape(1, *targets[0].shape[1:]).to(label.dtype))
        return torch.cat(images), torch.cat(targets)

    def in_order(self, data: Split, size: int) -> Iterator[tuple[Tensor, Validator]]:
        """Every image cut into windows side by side that cover it.

        Args:
            data: the split.
            size: of a batch.
        """
        waiting: list[tuple[int, Tensor, Tensor]] = []
        for one, (images, targets) in self.whole(data, size):
            (row,), image, target = one.tolist(), images[0], targets[0]
            windows = windows_of(image, self.size)
            cut = windows_of(target.reshape(-1, *image.shape[1:]).float(), self.size).to(target.dtype)
            waiting += zip([row] * len(windows), windows, cut.reshape(len(cut), *target.shape[: -len(self.size)], *self.size), strict=True)
            while len(waiting) >= size or (waiting and row == len(data) - 1):
                rows, pictures, masks = zip(*waiting[:size], strict=True)
                del waiting[:size]
                yield torch.tensor(rows), (torch.stack(pictures), torch.stack(masks))

    def whole(self, data: Split, size: int) -> Iterator[tuple[Tensor, Validator]]:
        """Row (1,), and image (1, C, ...) and target (1, ...), of every image, one by one.

        Args:
            data: the split.
            size: not read.
        """
        return read_ahead(data, in_order(len(data), 1), data.take)

    def _padded(self, image: Tensor, target: Tensor) -> dict[str, Tensor]:
        target = target.reshape(-1, *image.shape[1:]).float()
        padded = {"image": padded_to(image, self.size), "target": padded_to(target, self.size)}
        return {**padded, "foreground": padded["target"].amax(dim=0, keepdim=True)}


def of_task(task: TaskConfig) -> Fitting:
    """How the task's images come to the network's size."""
    return Patches(task) if task.image_mode == "patch" else Whole()


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
    """A predictor of whole images: with `image_mode` "patch", a window slides over them and predictions are blended (MONAI, Gaussian).

    Args:
        predictor: of what the network is fed with.
        task: gives `image_mode` and the window's size.
        batch: most windows at once.
    """
    if task.image_mode == "resize":
        return predictor
    from monai.inferers.inferer import SlidingWindowInferer

    inferer = SlidingWindowInferer(task.size, batch, overlap=OVERLAP, mode="gaussian")
    return lambda images: inferer(images, predictor)
