"""How images come to the network's size (`TaskConfig.image_mode`): resized as a whole, or cut into
patches and windows.

Training, scoring, `predict` and the checks of exports use these classes and functions, so that a
model gets the same windows everywhere.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from medflare.data.loading import Split
from medflare.data.transforms import plain_tensors
from medflare.tasks.config import TaskConfig
from medflare.training.batches import in_order, read_ahead

# Images (N, C, ...) -> probabilities (N, outputs, ...) or (N, outputs).
Predictor = Callable[[Tensor], Tensor]
# Images (B, C, *size) and targets (B, ...).
Samples = tuple[Tensor, Tensor]
Batches = Iterator[tuple[Tensor, Samples]]  # rows (B,) and their samples
OVERLAP = 0.25  # of neighbouring windows, as a fraction of a side; MONAI's default


class WholeImages:
    """Images that have the task's size (`image_mode` "resize")."""

    per_image = 1  # samples of an image in an epoch

    def read(self, data: Split, rows: Tensor) -> Any:
        """The images of rows, long (B,), read without random numbers, so that a thread may read
        ahead.
        """
        return data.take(rows)

    def samples(self, images: Any, random: np.random.RandomState) -> Samples:
        """One sample of each image that `read` returned, with random numbers from `random`."""
        return images

    def in_order(self, data: Split, size: int) -> Batches:
        """All samples of a split in fixed order: rows and samples, `size` at a time."""
        return self.whole(data, size)

    def whole(self, data: Split, size: int) -> Batches:
        """All images of a split in fixed order, as a final model gets them, see `windowed`."""
        return read_ahead(data, in_order(len(data), size), data.take)


class DrawnImages(NamedTuple):
    """Image and target of every row, and `like`, those of any image: they give an empty batch
    (DP-SGD) its shape.
    """

    pairs: list[Samples]
    like: Samples


class Patches(WholeImages):
    """Patches of images at their own size (`image_mode` "patch"); smaller images are padded with
    zeros.
    """

    def __init__(self, task: TaskConfig):
        self.size = task.size
        self.per_image = task.patches_per_image

    def read(self, data: Split, rows: Tensor) -> DrawnImages:
        """The images of rows; each is read once, however often it is drawn."""
        order = rows.tolist()
        pairs = {row: data[row] for row in dict.fromkeys(order or [0])}
        return DrawnImages([pairs[row] for row in order], next(iter(pairs.values())))

    def samples(self, images: DrawnImages, random: np.random.RandomState) -> Samples:
        """A patch of every image, as often centred on a foreground as on a background voxel."""
        from monai.transforms.croppad.dictionary import RandCropByPosNegLabeld

        crop = RandCropByPosNegLabeld(
            ["image", "target"], label_key="foreground", spatial_size=self.size
        )
        crop.set_random_state(state=random)
        count = len(images.pairs)
        like, label = images.like
        patches = like.new_empty(count, len(like), *self.size)
        targets = label.new_empty(count, *label.shape[: -len(self.size)], *self.size)
        with plain_tensors(), warnings.catch_warnings():
            # Images without foreground are expected.
            warnings.filterwarnings("ignore", "Num foregrounds")
            for row, (image, target) in enumerate(images.pairs):
                target = padded_to(target.reshape(-1, *image.shape[1:]).float(), self.size)
                sample = {
                    "image": padded_to(image, self.size),
                    "target": target,
                    "foreground": target.amax(dim=0, keepdim=True),
                }
                (patch,) = crop(sample)
                patches[row] = patch["image"]
                targets[row] = patch["target"].reshape(targets.shape[1:])
        return patches, targets

    def in_order(self, data: Split, size: int) -> Batches:
        """Adjacent windows that cover every image, `size` at a time."""
        waiting: list[tuple[int, Tensor, Tensor]] = []
        for (row,), (images, targets) in self.whole(data, size):
            image = images[0]
            target = targets[0]
            windows = windows_of(image, self.size)
            masks = windows_of(target.reshape(-1, *image.shape[1:]).float(), self.size)
            masks = masks.reshape(len(masks), *target.shape[: -len(self.size)], *self.size)
            masks = masks.to(target.dtype)
            waiting += zip([int(row)] * len(windows), windows, masks, strict=True)
            while len(waiting) >= size or (waiting and row == len(data) - 1):
                rows, pictures, labels = zip(*waiting[:size], strict=True)
                del waiting[:size]
                yield torch.tensor(rows), (torch.stack(pictures), torch.stack(labels))

    def whole(self, data: Split, size: int) -> Batches:
        """Row (1,), image (1, C, ...) and target (1, ...) of every image: sizes differ."""
        return super().whole(data, 1)


def padded_to(image: Tensor, size: tuple[int, ...]) -> Tensor:
    """An image (C, ...) with zeros on both sides where it is smaller than `size`.

    Examples:
        >>> padded_to(torch.ones(1, 2, 1), (1, 3))
        tensor([[[0., 1., 0.],
                 [0., 1., 0.]]])
    """
    from monai.transforms.croppad.array import SpatialPad

    sides = [max(pair) for pair in zip(size, image.shape[1:], strict=True)]
    with plain_tensors():
        return SpatialPad(sides)(image)


def windows_of(image: Tensor, size: tuple[int, ...]) -> Tensor:
    """Adjacent windows (n, C, *size) that cover an image (C, ...), padded if smaller; the last ones
    are shifted back to its border.

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
    """A predictor of whole images: with `image_mode` "patch", a sliding window of at most `batch`
    windows at once, whose predictions are blended (MONAI, Gaussian).
    """
    if task.image_mode == "resize":
        return predictor
    from monai.inferers.inferer import SlidingWindowInferer

    inferer = SlidingWindowInferer(task.size, batch, overlap=OVERLAP, mode="gaussian")
    return lambda images: inferer(images, predictor)
