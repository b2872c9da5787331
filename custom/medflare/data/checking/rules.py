"""The rules by which nnU-Net configures itself, as pure functions (Isensee et al., "nnU-Net: a self-configuring method for deep
learning-based biomedical image segmentation", Nature Methods 18, 203-211, 2021, "rule-based parameters").

Where the paper leaves a number open, it is that of the program beside it: github.com/MIC-DKFZ/nnUNet, version 2, commits 017de4a
(experiment planner) and 04f3cfc (network topology). What differs from either says so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

Sides = tuple[int, ...]

ANISOTROPY: Final = 3  # from which an axis is treated by itself
LEAST_SIDE: Final = 4  # of the smallest feature map
LEAST_BATCH: Final = 2
BATCH_SHARE: Final = 0.05  # of all voxels, that one batch may show
CROPPED: Final = 0.25  # share of zeros from which intensities are normalised without them; nnU-Net asks what a box around the rest cuts off
_LARGEST: Final = {2: 2048**2, 3: 256**3}  # pixels or voxels of the patch that is made smaller until it fits
_MOST_FEATURES: Final = {2: 512, 3: 320}


def target_spacing(median: Sequence[float], tenth: Sequence[float], extent: Sequence[float]) -> tuple[float, ...]:
    """Millimetres between voxels to which volumes are resampled.

    The median of each axis. Where the coarsest axis is more than three times as coarse as the next one, and has less than a third of the
    voxels of any other, it takes the 10th percentile of its spacings, though none finer than the next axis: thick slices would
    otherwise decide about thin ones.

    Args:
        median: of the spacings, by axis.
        tenth: 10th percentile of the spacings, by axis.
        extent: median extent of the volumes in millimetres, by axis.

    Examples:
        >>> target_spacing((0.8, 0.8, 1.5), (0.7, 0.7, 1.0), (320, 320, 150))
        (0.8, 0.8, 1.5)
        >>> target_spacing((0.8, 0.8, 5.0), (0.7, 0.7, 3.0), (320, 320, 150))
        (0.8, 0.8, 3.0)
        >>> target_spacing((0.8, 0.8, 5.0), (0.7, 0.7, 0.6), (320, 320, 150))
        (0.8, 0.8, 0.8)
    """
    if not anisotropic(median, extent):
        return tuple(median)
    coarsest = max(range(len(median)), key=lambda axis: median[axis])
    next_one = max(side for axis, side in enumerate(median) if axis != coarsest)
    return tuple(max(tenth[axis], next_one) if axis == coarsest else side for axis, side in enumerate(median))


def anisotropic(spacing: Sequence[float], extent: Sequence[float]) -> bool:
    """Whether one axis is so coarse, and so short in voxels, that `target_spacing` treats it by itself.

    Examples:
        >>> anisotropic((1, 1, 5), (200, 200, 100)), anisotropic((1, 1, 5), (200, 200, 1000)), anisotropic((4, 4, 1), (200, 200, 100))
        (True, False, False)
    """
    coarsest = max(range(len(spacing)), key=lambda axis: spacing[axis])
    others = [axis for axis in range(len(spacing)) if axis != coarsest]
    voxels = [length / side for length, side in zip(extent, spacing, strict=True)]
    coarse = spacing[coarsest] > ANISOTROPY * max(spacing[axis] for axis in others)
    return coarse and ANISOTROPY * voxels[coarsest] < min(voxels[axis] for axis in others)


@dataclass(frozen=True)
class Topology:
    """The levels of a U-Net.

    Attributes:
        kernels: of the convolutions, by level and axis.
        strides: with which a level begins, by level and axis; 1 everywhere for the first.
    """

    kernels: tuple[Sides, ...]
    strides: tuple[Sides, ...]

    @property
    def divisors(self) -> Sides:
        """What the sides of a patch must be divisible by: 2 ** poolings, by axis."""
        return tuple(math.prod(column) for column in zip(*self.strides, strict=True))

    def padded(self, size: Sequence[int]) -> Sides:
        """The next larger size that the network takes."""
        return tuple(math.ceil(side / divisor) * divisor for side, divisor in zip(size, self.divisors, strict=True))


def topology(size: Sequence[int], spacing: Sequence[float]) -> Topology:
    """How often each axis is pooled, and with which kernels.

    A level more while an axis can be halved and still has 4 voxels. Of those axes only the ones are pooled whose spacing is within a
    factor of 2 of their finest; one that would be pooled alone, only where it has 12. A kernel is 3 wide along an axis from the level on
    where its spacing comes within a factor of 2 of the finest, 1 before, and 3 at the bottom. It is 3 wide behind a pooling of its axis
    too, which the published program leaves out: volumes that are coarse in two axes and short in the third would have kernels of 1.

    Args:
        size: sides of a patch.
        spacing: millimetres between its voxels (1 each where nobody knows).

    Examples:
        >>> topology((32, 32), (1, 1)).strides
        ((1, 1), (2, 2), (2, 2), (2, 2))
        >>> topology((32, 32, 8), (1, 1, 3)).strides
        ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 1))
        >>> topology((32, 32, 8), (1, 1, 3)).kernels
        ((3, 3, 1), (3, 3, 3), (3, 3, 3), (3, 3, 3))
        >>> topology((32, 32, 12), (8, 8, 1)).kernels
        ((1, 1, 3), (1, 1, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3))
        >>> topology((10, 10), (1, 4)).strides
        ((1, 1),)
    """
    sides, gaps, axes = list(size), list(spacing), range(len(size))
    kernel: Sides = (1,) * len(size)
    kernels, strides = [], [(1,) * len(size)]
    while True:
        kernel = tuple(3 if kernel[axis] == 3 or gaps[axis] < 2 * min(gaps) else 1 for axis in axes)
        kernels.append(kernel)
        large = [axis for axis in axes if sides[axis] >= 2 * LEAST_SIDE]
        pooled = [axis for axis in large if gaps[axis] < 2 * min(gaps[other] for other in large)]
        if not pooled or (len(pooled) == 1 and sides[pooled[0]] < 3 * LEAST_SIDE):
            return Topology((*kernels[:-1], (3,) * len(size)), tuple(strides))
        strides.append(tuple(2 if axis in pooled else 1 for axis in axes))
        for axis in pooled:
            sides[axis], gaps[axis] = math.ceil(sides[axis] / 2), 2 * gaps[axis]
        kernel = tuple(max(width, 3 if axis in pooled else 1) for axis, width in enumerate(kernel))


def first_patch(median: Sequence[float], spacing: Sequence[float]) -> Sides:
    """The patch to begin with: equally long in millimetres along all axes, 256 ** 3 voxels or 2048 ** 2 pixels, within the median image.

    Examples:
        >>> first_patch((512, 512, 100), (0.8, 0.8, 5.0)), first_patch((3000, 500), (1, 1))
        ((472, 472, 75), (2048, 500))
    """
    dense = [1 / side for side in spacing]
    scale = (_LARGEST[len(dense)] / math.prod(dense)) ** (1 / len(dense))
    return tuple(min(round(scale * side), round(full)) for side, full in zip(dense, median, strict=True))


def smaller(size: Sequence[int], median: Sequence[float], spacing: Sequence[float]) -> Sides:
    """The next smaller patch, where one does not fit into memory: the axis that is longest for its median loses a step.

    A step is what the network of the smaller patch divides that axis by, so that no size which it takes is skipped.

    Examples:
        >>> smaller((128, 128, 128), (150, 190, 160), (1, 1, 1)), smaller((256, 64, 64), (256, 64, 64), (1, 1, 1))
        ((112, 128, 128), (256, 64, 56))
    """
    longest = max(range(len(size)), key=lambda axis: (size[axis] / median[axis], axis))

    def shortened(step: int) -> Sides:
        return tuple(max(1, side - step) if axis == longest else side for axis, side in enumerate(size))

    step = topology(shortened(topology(size, spacing).divisors[longest]), spacing).divisors[longest]
    return topology(shortened(step), spacing).padded(shortened(step))


def features(levels: int, dimensions: int) -> Sides:
    """Feature maps by level: 32, doubled from level to level, at most 320 (3-D) or 512 (2-D).

    Examples:
        >>> features(5, 3)
        (32, 64, 128, 256, 320)
    """
    return tuple(min(32 * 2**level, _MOST_FEATURES[dimensions]) for level in range(levels))


def batch_size(fitting: int, images: int, median: Sequence[float], patch: Sequence[int]) -> int:
    """What memory leaves room for, as long as one batch shows about 5 % of all voxels at most; 2 at least.

    Args:
        fitting: the most patches that fit into memory.
        images: training images; of the smallest site, since a batch is drawn at one (nnU-Net: of all, which lie in one place).
        median: sides of the median image.
        patch: sides of a patch.

    Examples:
        >>> batch_size(40, 100, (100, 100), (50, 50)), batch_size(7, 100, (100, 100), (50, 50)), batch_size(7, 3, (100, 100), (50, 50))
        (20, 7, 2)
    """
    share = BATCH_SHARE * images * math.prod(median) / math.prod(patch)
    return max(LEAST_BATCH, min(fitting, round(share)))
