"""Where the voxels of a volume lie. An affine maps voxel numbers (i, j, k) to millimetres in RAS, as NIfTI has it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from medflare.core.errors import DataError

if TYPE_CHECKING:  # a site's own settings are read without torch
    from medflare.tasks.metrics import Spacing

_OBLIQUE: Final = 30.0  # degrees that an axis may lean away from the patient's; tilted scans do
_SAME: Final = 0.5  # of the shortest side of a voxel: two grids that lie this near are one, voxel by voxel


@dataclass(frozen=True)
class Grid:
    """Where the voxels of a volume lie.

    Attributes:
        shape: voxels along each axis.
        affine: float64 (4, 4), voxel numbers to millimetres in RAS.
        known: whether the file gives it; else the affine is the identity.
    """

    shape: tuple[int, ...]
    affine: np.ndarray
    known: bool = True

    @property
    def spacing(self) -> "Spacing | None":
        """Millimetres between voxels along each axis; None where the place is not known."""
        return tuple(float(side) for side in self._sides) if self.known else None

    @property
    def codes(self) -> str:
        """The patient's axes along which the voxels run, as "RAS"."""
        from nibabel import orientations

        return "".join(map(str, orientations.aff2axcodes(self.affine)))

    @property
    def _sides(self) -> np.ndarray:
        return np.sqrt(np.square(self.affine[:3, :3]).sum(axis=0))

    def turn(self, orientation: str) -> Any:
        """How axes are exchanged and flipped to run along an orientation, as nibabel's `apply_orientation` takes it."""
        from nibabel import orientations

        return orientations.ornt_transform(orientations.io_orientation(self.affine), orientations.axcodes2ornt(tuple(orientation)))

    def turned(self, orientation: str) -> "Grid":
        """The same places, numbered along an orientation; itself where they are not known."""
        from nibabel import orientations

        if not self.known:
            return self
        turn = self.turn(orientation)
        shape = tuple(self.shape[int(axis)] for axis in np.argsort(turn[:, 0]))
        return Grid(shape, self.affine @ orientations.inv_ornt_aff(turn, self.shape))

    def difference(self, other: "Grid") -> str:
        """How another grid differs, "" where its voxels are the same: no corner lies half a voxel away."""
        if self.shape != other.shape:
            return f"{by(other.shape)} voxels, not {by(self.shape)}"
        if self.known != other.known:
            return "only one of them says where it lies"
        corners = np.array([[*np.multiply(place, np.subtract(self.shape, 1)), 1] for place in np.ndindex(2, 2, 2)])
        distance = np.abs(corners @ (self.affine - other.affine).T).max()
        return f"up to {distance:.3g} mm away" if distance > _SAME * self._sides.min() else ""

    def check(self, path: Path) -> None:
        """Refuse an affine of which it would be a guess which axis is which.

        Raises:
            DataError: an axis without length, NaN, or an axis that leans too far away from each of the patient's.
        """
        sides = self._sides
        if not (np.isfinite(self.affine).all() and (sides > 0).all()):
            raise DataError(f"{path}: spacing {by(sides)} mm, each must be above 0; correct the file's header")
        leaning = math.degrees(float(np.arccos(np.abs(self.affine[:3, :3] / sides).max(axis=0).clip(max=1)).max()))
        if leaning > _OBLIQUE or len(set(np.abs(self.affine[:3, :3]).argmax(axis=0))) < 3:
            raise DataError(
                f"{path}: oblique affine, an axis leans {leaning:.0f} degrees away from the patient's; "
                "resample the volume along the patient's axes, for example with nibabel.processing.conform"
            )


def apply_turn(array: np.ndarray, turn: Any) -> np.ndarray:
    """A volume (C, i, j, k) with its axes exchanged and flipped by `Grid.turn`."""
    from nibabel import orientations

    return np.stack([orientations.apply_orientation(channel, turn) for channel in array])


def by(sides: Sequence[Any] | np.ndarray) -> str:
    """ "64 x 48", for messages."""
    return " x ".join(f"{side:g}" if isinstance(side, float) else str(side) for side in sides)
