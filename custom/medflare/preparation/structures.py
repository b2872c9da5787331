"""How structures lie in the masks of a site: what resizing loses of them, and along which axes they
keep an order.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from medflare.core.settings import strict_dataclass
from medflare.tasks.config import TaskConfig
from medflare.tasks.optimizers import Fraction

# Longest sides, in pixels or voxels, to which masks are resized.
SIDES = {2: (32, 48, 64, 96, 128, 160, 192, 256, 384, 512), 3: (16, 24, 32, 48, 64, 80, 96, 128)}
_MAX_SIDE = 1024  # larger masks are thinned out first
_SAME_ORDER = 0.95  # share of images
_APART = 1.0  # distance of two centres, in deviations of their pixels


@strict_dataclass
class Layout:
    """Numbers of all masks together."""

    # Longest side -> Dice of a mask and the same mask after resizing to this side and back: the
    # mean over the images that show a structure, of the structure that loses most. Sides above
    # those of all images are left out.
    detail: dict[int, Fraction]
    # By axis: whether one structure lies before another one in nearly all images.
    ordered: tuple[bool, ...]


class LayoutOfImages:
    """Collects the structures of one image after the other."""

    def __init__(self, task: TaskConfig):
        self._task = task
        # (side, structure) or (structure, structure) -> patient and number of an image each
        self._dice: dict[tuple[int, str], list[tuple[str, float]]] = {}
        self._distances: dict[tuple[str, str], list[tuple[str, np.ndarray]]] = {}  # (axes,) each

    def add(self, target: np.ndarray, patient: str) -> None:
        """Add the structures of an image; `target` as `decoding.target_of` returns it."""
        centres = {}
        for name, mask in structure_masks(target, self._task).items():
            if mask.any():
                self._add_detail(name, mask, patient)
                centres[name] = _centre_and_variance(mask)
        for first, second in combinations(centres, 2):
            distances = standardised_distance(centres[first], centres[second])
            self._distances.setdefault((first, second), []).append((patient, distances))

    def _add_detail(self, name: str, mask: np.ndarray, patient: str) -> None:
        step = -(-max(mask.shape) // _MAX_SIDE)
        mask = mask[(slice(None, None, step),) * mask.ndim]
        for side in SIDES[mask.ndim]:
            if side < max(mask.shape):
                dice = dice_after_resizing(mask, side)
                self._dice.setdefault((side, name), []).append((patient, dice))

    def summary(self, minimum: int = 0) -> Layout:
        """The numbers of the images that were added, without those of fewer than `minimum`
        patients.
        """
        detail: dict[int, float] = {}
        suppressed = set()
        for (side, _), rows in sorted(self._dice.items()):
            if _patients(rows) < minimum:
                suppressed.add(side)
            mean = float(np.mean([dice for _, dice in rows]))
            detail[side] = min(mean, detail.get(side, 1.0))
        for side in suppressed:
            del detail[side]
        ordered = np.zeros(self._task.spatial_dims, bool)
        for pairs in self._distances.values():
            if _patients(pairs) >= minimum:
                ordered |= keeps_order(np.array([distances for _, distances in pairs]))
        return Layout(detail, tuple(ordered.tolist()))


def structure_masks(target: np.ndarray, task: TaskConfig) -> dict[str, np.ndarray]:
    """Structure -> its pixels or voxels; `target` of a segmentation, see `decoding.target_of`."""
    masks = {}
    for name in task.structures:
        index = task.labels.index(name)
        masks[name] = target[0] == index if task.target == "multiclass" else target[index] > 0
    return masks


def _patients(rows: Sequence[tuple[str, object]]) -> int:
    return len({patient for patient, _ in rows})


def dice_after_resizing(mask: np.ndarray, side: int) -> float:
    """Dice of a mask and the same mask resized to a longest side of `side` and back, both by the
    nearest pixel.

    Examples:
        >>> dots = np.zeros((4, 4), bool)
        >>> dots[1, 1] = True
        >>> dice_after_resizing(dots, 4), dice_after_resizing(dots, 2)
        (1.0, 0.4)
        >>> dice_after_resizing(np.ones((4, 4), bool), 2)
        1.0
    """
    scale = side / max(mask.shape)
    small = _resized(mask, [max(1, round(full * scale)) for full in mask.shape])
    back = _resized(small, mask.shape)
    return float(2 * (mask & back).sum() / (mask.sum() + back.sum()))


def _resized(mask: np.ndarray, sides: Sequence[int]) -> np.ndarray:
    """The mask with these sides; each pixel is the old one in which its centre lies."""
    for axis, side in enumerate(sides):
        nearest = np.floor((np.arange(side) + 0.5) * mask.shape[axis] / side)
        mask = mask.take(nearest.astype(int), axis)
    return mask


def _centre_and_variance(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of the coordinates of a mask's pixels, (axes,) each."""
    centres = []
    variances = []
    for axis in range(mask.ndim):
        pixels = np.moveaxis(mask, axis, 0).sum(axis=tuple(range(1, mask.ndim)))
        coordinates = np.arange(len(pixels))
        centre = np.average(coordinates, weights=pixels)
        centres.append(centre)
        variances.append(np.average((coordinates - centre) ** 2, weights=pixels))
    return np.array(centres), np.array(variances)


def standardised_distance(
    first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """The distance from the centre of one structure to that of another by axis, over the root of
    their summed variances.

    Two halves of a bar are 2.4 apart; a cup in the middle of its disc is 0 apart. A pixel adds a
    variance of 1 / 12.
    """
    centre, variance = first
    other_centre, other_variance = second
    return (other_centre - centre) / np.sqrt(variance + other_variance + 2 / 12)


def keeps_order(distances: np.ndarray) -> np.ndarray:
    """Whether one structure lies before the other in nearly all images, by axis.

    Args:
        distances: (images, axes), see `standardised_distance`.

    Examples:
        >>> keeps_order(np.array([[2.4, 0.1, 3.0], [2.2, 0.1, -3.0]])).tolist()
        [True, False, False]
    """
    before = (distances > 0).mean(axis=0)
    same = np.maximum(before, 1 - before) >= _SAME_ORDER
    return same & (np.median(np.abs(distances), axis=0) >= _APART)
