"""Where the voxels of a volume lie, and a clear refusal of an affine that is none. Arrays are (channels, i, j, k).

An affine maps voxel numbers (i, j, k) to millimetres in RAS, as NIfTI has it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from medflare.core.errors import DataError

if TYPE_CHECKING:  # a site's own settings are read without torch
    from medflare.tasks.metrics import Spacing

_ALIGNED: Final = 30.0  # degrees that an axis may lean away from the patient's and still count as one of them, as tilted scans do
_SAME: Final = 1e-2  # millimetres between two grids that count as one: files round their affines


@dataclass(frozen=True)
class Grid:
    """Where the voxels of a volume lie.

    Attributes:
        shape: voxels along each axis.
        affine: float64 (4, 4), voxel numbers to millimetres in RAS.
        known: whether the file says so; else the affine is the identity.
    """

    shape: tuple[int, ...]
    affine: np.ndarray
    known: bool = True

    @property
    def spacing(self) -> "Spacing | None":
        """Millimetres between voxels along each axis; None where nobody knows."""
        return tuple(float(side) for side in sides_of(self.affine)) if self.known else None

    @property
    def codes(self) -> str:
        """The patient's axes along which the voxels run, as "RAS"."""
        from nibabel import orientations

        return "".join(map(str, orientations.aff2axcodes(self.affine)))

    def along(self, orientation: str) -> tuple[int, ...]:
        """The axis that runs along each axis of an orientation, as "RAS"."""
        nearest = np.abs(self.affine[:3, :3] / sides_of(self.affine)).argmax(axis=0).tolist()
        return tuple(nearest.index(next(row for row, pair in enumerate(("LR", "AP", "IS")) if letter in pair)) for letter in orientation)

    def turn(self, orientation: str) -> Any:
        """How axes are exchanged and flipped to run along an orientation, as nibabel's `apply_orientation` takes it."""
        from nibabel import orientations

        return orientations.ornt_transform(orientations.io_orientation(self.affine), orientations.axcodes2ornt(tuple(orientation)))

    def turned(self, orientation: str) -> "Grid":
        """The same places in space, numbered along an orientation; itself where nobody knows them."""
        from nibabel import orientations

        if not self.known:
            return self
        turn = self.turn(orientation)
        shape = tuple(self.shape[int(axis)] for axis in np.argsort(turn[:, 0]))
        return Grid(shape, self.affine @ orientations.inv_ornt_aff(turn, self.shape))

    def difference(self, other: "Grid", most: float = _SAME) -> str:
        """How another grid differs, in words; "" where it is the same.

        Args:
            other: the other one.
            most: millimetres that a corner may lie away, a hundredth unless said otherwise.
        """
        if self.shape != other.shape:
            return f"{by(other.shape)} voxels, not {by(self.shape)}"
        if self.known != other.known:
            return "only one of them says where it lies"
        corners = np.array([[*np.multiply(place, np.subtract(self.shape, 1)), 1] for place in np.ndindex(2, 2, 2)])
        apart = np.abs(corners @ (self.affine - other.affine).T).max()
        return f"up to {apart:.3g} mm away" if apart > most else ""


def apply_turn(array: np.ndarray, turn: Any) -> np.ndarray:
    """A volume with its axes exchanged and flipped.

    Args:
        array: (C, i, j, k).
        turn: see `Grid.turn`.
    """
    from nibabel import orientations

    return np.stack([orientations.apply_orientation(part, turn) for part in array])


def sides_of(affine: np.ndarray) -> np.ndarray:
    """Millimetres between voxels along each axis.

    Args:
        affine: (4, 4).
    """
    return np.sqrt(np.square(affine[:3, :3]).sum(axis=0))


def check_affine(affine: np.ndarray, path: Path) -> None:
    """Nothing where a volume can be turned along the patient's axes; else which of its axes is which would be a guess.

    Args:
        affine: (4, 4), voxel numbers to millimetres.
        path: of the file, for the message.

    Raises:
        DataError: an axis without length, a number that is none, or an axis that leans too far away from each of the patient's.
    """
    sides = sides_of(affine)
    check_spacing(sides if np.isfinite(affine).all() else np.full(3, np.nan), path)
    leaning = math.degrees(float(np.arccos(np.abs(affine[:3, :3] / sides).max(axis=0).clip(max=1)).max()))
    if leaning > _ALIGNED or len(set(np.abs(affine[:3, :3]).argmax(axis=0))) < 3:
        raise DataError(
            f"{path}: oblique affine, an axis leans {leaning:.0f} degrees away from the patient's; "
            "resample the volume along the patient's axes, for example with nibabel.processing.conform"
        )


def check_spacing(sides: np.ndarray, path: Path) -> None:
    """Nothing where voxels lie apart along every axis.

    Args:
        sides: millimetres between them, by axis.
        path: of the file, for the message.

    Raises:
        DataError: a side that is 0, negative or no number.
    """
    if not (np.isfinite(sides) & (sides > 0)).all():
        found = " x ".join(f"{side:g}" for side in sides)
        raise DataError(f"{path}: spacing {found} mm, each must be above 0; correct the file's header")


def by(sides: Sequence[Any]) -> str:
    """ "64 x 48", for messages."""
    return " x ".join(map(str, sides))
