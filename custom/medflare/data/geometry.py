"""The grid of a volume's voxels, whose affine maps voxel indices (i, j, k) to millimetres in RAS,
as in NIfTI.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from medflare.core.errors import DataError
from medflare.core.text import format_shape
from medflare.tasks.config import TaskConfig

# Degrees between an axis and the nearest axis of the patient; tilted scans have up to that.
_OBLIQUE = 30.0
_SHEARED = 1e-3  # cosine between two axes; below it, headers are rounded
_ROUNDED = 1e-3  # relative difference of two lengths that are equal, but for rounding
_SAME = 0.5  # of the shortest side of a voxel: grids whose corners are closer count as equal


@dataclass(frozen=True)
class Grid:
    """The positions of a volume's voxels."""

    shape: tuple[int, ...]  # voxels along each axis
    affine: np.ndarray  # float64 (4, 4), voxel indices to millimetres in RAS
    has_affine: bool = True  # whether the file gives the affine; else it is the identity
    has_spacing: bool = True  # whether the file gives all lengths; else some of the affine are 1
    # Whether the file gives the directions of the axes; else nibabel assumes them.
    has_directions: bool = True

    @property
    def spacing(self) -> tuple[float, ...] | None:
        """Millimetres between voxels along each axis; None where the file gives none."""
        if not (self.has_affine and self.has_spacing):
            return None
        return tuple(map(float, self._sides))

    @property
    def cell(self) -> tuple[float, ...] | None:
        """The spacing; of a sheared grid, then cosines between axes 0 and 1, 0 and 2, 1 and 2."""
        if self.spacing is None:
            return None
        cosines = self._cosines
        if np.abs(cosines).max() <= _SHEARED:
            return self.spacing
        return (*self.spacing, *map(float, cosines))

    @property
    def voxel_volume(self) -> float | None:
        """Cubic millimetres of a voxel; None where the spacing is unknown."""
        if self.spacing is None:
            return None
        return float(abs(np.linalg.det(self.affine[:3, :3])))

    @property
    def codes(self) -> str:
        """The patient's axes along which the voxels run, for example "RAS"."""
        from nibabel import orientations

        return "".join(map(str, orientations.aff2axcodes(self.affine)))

    @property
    def axes(self) -> str:
        """Spacing and orientation as a text."""
        return f"{format_shape(round(float(side), 4) for side in self._sides)} mm {self.codes}"

    def has_axes_of(self, other: "Grid") -> bool:
        """Whether another grid has this spacing and orientation, but for rounding and for the shear
        of this grid, which may change lengths.
        """
        tolerance = _ROUNDED + np.abs(self._cosines).max()
        ratios = other._sides / self._sides
        return self.codes == other.codes and bool((np.abs(ratios - 1) <= tolerance).all())

    @property
    def _cosines(self) -> np.ndarray:
        """The cosines between axes 0 and 1, 0 and 2, 1 and 2."""
        axes = self.affine[:3, :3] / self._sides
        return (axes.T @ axes)[np.triu_indices(3, k=1)]

    @property
    def _sides(self) -> np.ndarray:
        return np.sqrt(np.square(self.affine[:3, :3]).sum(axis=0))

    def turn(self, orientation: str) -> Any:
        """The permutation and flips of axes to an orientation, for `apply_orientation`."""
        from nibabel import orientations

        present = orientations.io_orientation(self.affine)
        return orientations.ornt_transform(present, orientations.axcodes2ornt(tuple(orientation)))

    def turned(self, orientation: str) -> "Grid":
        """The same positions with axes along an orientation; unchanged without an affine."""
        from nibabel import orientations

        if not self.has_affine:
            return self
        turn = self.turn(orientation)
        shape = tuple(self.shape[int(axis)] for axis in np.argsort(turn[:, 0]))
        affine = self.affine @ orientations.inv_ornt_aff(turn, self.shape)
        return replace(self, shape=shape, affine=affine)

    def difference(self, other: "Grid") -> str:
        """How another grid differs; "" if no corner is half a voxel away."""
        if self.shape != other.shape:
            return f"{format_shape(other.shape)} voxels, not {format_shape(self.shape)}"
        if self.has_affine != other.has_affine:
            return "only one of them has an affine"
        last_voxel = np.subtract(self.shape, 1)
        corners = np.array([[*np.multiply(ends, last_voxel), 1] for ends in np.ndindex(2, 2, 2)])
        distance = np.abs(corners @ (self.affine - other.affine).T).max()
        if distance > _SAME * self._sides.min():
            return f"up to {distance:.3g} mm away"
        return ""

    def check(self, path: Path) -> None:
        """Raise DataError for an axis without length, with NaN, or more than 30 degrees away from
        each of the patient's.
        """
        sides = self._sides
        if not (np.isfinite(self.affine).all() and (sides > 0).all()):
            raise DataError(
                f"{path}: spacing {format_shape(sides)} mm, each must be above 0; "
                "correct the file's header"
            )
        cosines = np.abs(self.affine[:3, :3] / sides)
        angle = math.degrees(float(np.arccos(cosines.max(axis=0).clip(max=1)).max()))
        if angle > _OBLIQUE or len(set(cosines.argmax(axis=0))) < 3:
            raise DataError(
                f"{path}: oblique affine, an axis leans {angle:.0f} degrees away from the "
                "patient's; resample the volume along the patient's axes, for example with "
                "nibabel.processing.conform"
            )


def check_same_grid(file: Path, grid: Grid | None, other: Path, other_grid: Grid | None) -> None:
    """Raise DataError for a mask or channel that lies on another grid than its image; files without
    a grid pass.
    """
    if grid is None or other_grid is None:
        return
    difference = other_grid.difference(grid)
    if difference and grid.has_directions != other_grid.has_directions:
        without, oriented = (other, file) if grid.has_directions else (file, other)
        raise DataError(
            f"{without}: its header gives no orientation (sform and qform code 0), that of "
            f"{oriented} does ({difference}); convert it again, or give it that sform if the "
            "voxels of both run alike"
        )
    if difference:
        raise DataError(
            f"{file}: lies on another grid than {other.name} ({difference}); "
            "resample one to the other"
        )


def apply_turn(array: np.ndarray, turn: Any) -> np.ndarray:
    """A volume (C, i, j, k) with its axes permuted and flipped by `Grid.turn`."""
    from nibabel import orientations

    return np.stack([orientations.apply_orientation(channel, turn) for channel in array])


def to_task_grid(
    array: np.ndarray, grid: Grid, task: TaskConfig, *, labels: bool = False
) -> tuple[np.ndarray, Grid]:
    """A stored volume (C, i, j, k) in the task's orientation and spacing, and its new grid.

    Labels are resampled by the nearest voxel and keep their dtype, intensities linearly.
    """
    if not grid.has_affine:
        return array, grid
    array = np.ascontiguousarray(apply_turn(array, grid.turn(task.orientation)))
    grid = grid.turned(task.orientation)
    if task.spacing is None:
        return array, grid
    import torch
    from monai.data.meta_tensor import MetaTensor
    from monai.transforms.spatial.array import Spacing

    affine = torch.as_tensor(grid.affine)
    volume = MetaTensor(torch.as_tensor(array, dtype=torch.float32), affine=affine)
    mode = "nearest" if labels else "bilinear"
    volume = Spacing(task.spacing, mode=mode, padding_mode="border")(volume)
    values = volume.numpy()
    if labels:
        values = values.round().astype(array.dtype)
    return values, Grid(tuple(values.shape[1:]), volume.affine.numpy().astype(np.float64))


def restore_grid(values: Any, grid: Grid, stored: Grid, task: TaskConfig) -> Any:
    """The inverse of `to_task_grid`, exact but for resampling: a float32 Tensor (C, ...) on `grid`
    to (C, i, j, k) on the stored grid.
    """
    import torch
    from monai.data.meta_tensor import MetaTensor
    from monai.transforms.spatial.array import SpatialResample

    if not stored.has_affine:
        return values
    turned = stored.turned(task.orientation)
    if task.spacing is not None:
        volume = MetaTensor(values, affine=torch.as_tensor(grid.affine))
        affine = torch.as_tensor(turned.affine)
        resample = SpatialResample(mode="bilinear", padding_mode="border")
        resampled = resample(volume, dst_affine=affine, spatial_size=turned.shape)
        values = torch.as_tensor(resampled).as_subclass(torch.Tensor)
    return torch.as_tensor(apply_turn(values.cpu().numpy(), turned.turn(stored.codes)))
