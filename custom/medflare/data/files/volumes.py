"""Volumes and their place in space: NIfTI and DICOM read with their affine, turned and resampled as a task says, and brought back.

Arrays are laid out (channels, i, j, k) and an affine maps voxel numbers (i, j, k) to millimetres in RAS, as NIfTI has it.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medflare.core.errors import DataError
from medflare.core.packages import require
from medflare.data.files.readers import (
    DICOM,
    LABELS,
    LPS,
    NIFTI,
    PICTURES,
    bad_spacing,
    bright_is_high,
    dicom_files,
    explained,
    finite,
    kind_of,
    of_channels,
    picked,
    quiet_nifti,
    refuse_no_spacing,
    sides_of,
    unknown_format,
)
from medflare.data.files.series import number_by_place, refuse_lost, refuse_mixed, refuse_uneven
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Spacing

_ALIGNED = 30.0  # degrees that an axis may lean away from the patient's and still count as one of them, as tilted scans do
_MILLIMETRES = {"meter": 1000.0, "micron": 0.001}  # of NIfTI's units; one that says none means millimetres
_SAME = 1e-2  # millimetres between two grids that count as one: files round their affines


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
    def spacing(self) -> Spacing | None:
        """Millimetres between voxels along each axis; None where nobody knows."""
        return tuple(float(side) for side in sides_of(self.affine)) if self.known else None

    def along(self, orientation: str) -> tuple[int, ...]:
        """The axis that runs along each axis of an orientation, as "RAS"."""
        nearest = np.abs(self.affine[:3, :3] / sides_of(self.affine)).argmax(axis=0).tolist()
        return tuple(nearest.index(next(row for row, pair in enumerate(("LR", "AP", "IS")) if letter in pair)) for letter in orientation)

    def difference(self, other: "Grid", most: float = _SAME) -> str:
        """How another grid differs, in words; "" where it is the same.

        Args:
            other: the other one.
            most: millimetres that a corner may lie away, a hundredth unless said otherwise.
        """
        if self.shape != other.shape:
            return f"{_by(other.shape)} voxels, not {_by(self.shape)}"
        if not (self.known and other.known):
            return ""
        corners = np.array([[*np.multiply(place, np.subtract(self.shape, 1)), 1] for place in np.ndindex(2, 2, 2)])
        apart = np.abs(corners @ (self.affine - other.affine).T).max()
        return f"up to {apart:.3g} mm away" if apart > most else ""


def read_volume(path: Path) -> tuple[np.ndarray, Grid]:
    """A volume as stored, (C, i, j, k), and its grid.

    Args:
        path: of a NIfTI file, a DICOM series (a folder) or a DICOM segmentation.

    Raises:
        DataError: the file is missing, unreadable or no volume, or its grid is none that can be turned to the patient's axes.
    """
    kind = kind_of(path)
    with explained(path):
        if kind in NIFTI:
            require("nibabel", f"{path}: a NIfTI image", DataError)
            array, affine, known = _read_nifti(path)
        elif kind in DICOM or kind == "folder":
            require("pydicom", f"{path}: a DICOM image", DataError)
            array, affine, known = _read_dicom(path)
        elif kind not in PICTURES:
            raise unknown_format(path, kind)
        else:
            raise DataError(f"{path}: a picture, the task has spatial_dims 3; give NIfTI files or folders with a DICOM series")
    array = np.moveaxis(array, -1, 0) if array.ndim == 4 else array[None]
    if array.ndim != 4 or not array.size:
        found = _by(array.shape[1:])
        raise DataError(f"{path}: {found} is no volume, the task has spatial_dims 3; give all slices together, or take a task of pictures")
    _check_affine(affine, path)
    return array, Grid(array.shape[1:], affine, known)


def slices_apart(file: Path, other: Path) -> str:
    """How far the slices lie apart that `readers` cuts two volumes into, in words; "" within half a voxel, and where nobody knows.

    Args:
        file: of a volume, or a folder with a series; pictures lie nowhere.
        other: the same.

    Raises:
        DataError: a series that has lost slices, or a spacing that is none.
    """
    there = _as_slices(other)
    here = None if there is None else _as_slices(file)
    return "" if here is None or there is None else here.difference(there, sides_of(here.affine).min() / 2)


def _as_slices(path: Path) -> Grid | None:
    """Where a volume lies as `readers` turns it, by the header alone where that says it; None where nobody knows."""
    kind = kind_of(path)
    if kind not in (*NIFTI, "folder"):
        return None
    with explained(path):
        if kind == "folder":
            array, affine, known = _read_dicom(path)
            return Grid(array.shape[:3], affine) if known else None
        import nibabel
        from nibabel import orientations

        with quiet_nifti():
            image: Any = nibabel.load(path)
        shape, affine = image.shape[:3], np.asarray(image.affine, np.float64)
        if len(shape) < 3 or not (image.get_sform(coded=True)[1] or image.get_qform(coded=True)[1]):
            return None
        refuse_no_spacing(affine, path)
        turn = orientations.ornt_transform(orientations.io_orientation(affine), orientations.axcodes2ornt(tuple(LPS)))
        turned_shape = tuple(shape[int(axis)] for axis in np.argsort(turn[:, 0]))
        return Grid(turned_shape, _in_millimetres(affine @ orientations.inv_ornt_aff(turn, shape), image.header))


def read_channels(files: Sequence[Path | None], channels: int, pick: Sequence[int] = ()) -> tuple[np.ndarray, Grid]:
    """The channels of one image, as stored, float32 (channels, i, j, k): one file with all of them, or a file for each.

    Args:
        files: in the order of the channels; None stands for zeros. At least one is a file.
        channels: how many the task takes.
        pick: which volumes of one file are the channels; none for all.

    Raises:
        DataError: a file that cannot be read, of other channels, of another grid than the first one, or with NaN or infinity.
    """
    arrays: list[np.ndarray | None] = []
    first: tuple[Path, Grid] | None = None
    for file in files:
        if file is None:
            arrays.append(None)
            continue
        array, grid = read_volume(file)
        array = picked(finite(array, file), pick if len(files) == 1 else (), file)
        arrays.append(of_channels(array, channels if len(files) == 1 else 1, file))
        if first is None:
            first = (file, grid)
        elif difference := first[1].difference(grid):
            raise DataError(f"{file}: lies on another grid than {first[0].name} ({difference}); resample one to the other first")
    assert first is not None  # the caller has seen to it
    zeros = np.zeros((1, *first[1].shape), np.float32)
    return np.concatenate([zeros if array is None else array for array in arrays]), first[1]


def turned(array: np.ndarray, grid: Grid, task: TaskConfig, *, labels: bool = False) -> tuple[np.ndarray, Grid]:
    """A volume along the task's axes and with its spacing.

    Args:
        array: (C, i, j, k) as stored.
        grid: where it lies.
        task: gives orientation and spacing.
        labels: take the nearest voxel where it is resampled, and give back the same type; else interpolate.

    Returns:
        The volume, and where it lies now.
    """
    from monai.data.meta_tensor import MetaTensor
    from monai.transforms.spatial.array import Orientation, Spacing

    if not grid.known:
        return array, grid
    volume: Any = MetaTensor(torch.as_tensor(np.ascontiguousarray(array), dtype=torch.float32), affine=torch.as_tensor(grid.affine))
    volume = Orientation(axcodes=task.orientation, labels=LABELS)(volume)
    if task.spacing is not None:
        volume = Spacing(task.spacing, mode="nearest" if labels else "bilinear", padding_mode="border")(volume)
    values = volume.numpy().round().astype(array.dtype) if labels else volume.numpy()
    return values, Grid(tuple(values.shape[1:]), volume.affine.numpy().astype(np.float64))


def turned_back(values: Tensor, here: Grid, stored: Grid, task: TaskConfig) -> Tensor:
    """What `turned` did to a volume undone, exactly but for what resampling loses.

    Args:
        values: float32 (C, ...) on the grid that `turned` gave.
        here: that grid.
        stored: where the volume was.
        task: as for `turned`.

    Returns:
        float32 (C, i, j, k) on the stored grid.
    """
    from monai.data.meta_tensor import MetaTensor
    from monai.transforms.spatial.array import SpatialResample
    from nibabel import orientations

    if not stored.known:
        return values
    wanted = orientations.axcodes2ornt(tuple(task.orientation))
    to_task = orientations.ornt_transform(orientations.io_orientation(stored.affine), wanted)
    if task.spacing is not None:
        affine = stored.affine @ orientations.inv_ornt_aff(to_task, stored.shape)
        shape = tuple(stored.shape[int(axis)] for axis in np.argsort(to_task[:, 0]))
        volume = MetaTensor(values, affine=torch.as_tensor(here.affine))
        resample = SpatialResample(mode="bilinear", padding_mode="border")
        values = torch.as_tensor(resample(volume, dst_affine=torch.as_tensor(affine), spatial_size=shape)).as_subclass(Tensor)
    back = orientations.ornt_transform(wanted, orientations.io_orientation(stored.affine))
    return torch.as_tensor(np.stack([orientations.apply_orientation(part, back) for part in values.cpu().numpy()]))


def _read_nifti(path: Path) -> tuple[np.ndarray, np.ndarray, bool]:
    import nibabel
    from monai.data.image_reader import NibabelReader
    from nibabel.openers import ImageOpener

    reader = NibabelReader(squeeze_non_spatial_dims=True)
    with quiet_nifti():
        image = reader.read(path)
    if isinstance(image.header, nibabel.Nifti1Header):
        with ImageOpener(path) as file:  # nibabel repairs a spacing that is 0 or negative and says nothing
            stored = type(image.header).from_fileobj(file, check=False)["pixdim"][1:4]
        if not (stored > 0).all():
            raise bad_spacing(path, stored)
    array, meta = reader.get_data(image)
    return array, _in_millimetres(np.asarray(meta["affine"], np.float64), image.header), True


def _in_millimetres(affine: np.ndarray, header: Any) -> np.ndarray:
    scaled = affine.copy()
    if hasattr(header, "get_xyzt_units"):
        scaled[:3] *= _MILLIMETRES.get(header.get_xyzt_units()[0], 1.0)
    return scaled


def _read_dicom(path: Path) -> tuple[np.ndarray, np.ndarray, bool]:
    from monai.data.image_reader import PydicomReader

    reader = PydicomReader()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what MONAI warns of, `known` and `_check_series` tell
        stored = reader.read(path)
        if isinstance(stored, list):
            refuse_mixed(stored, path)
            number_by_place(stored)
        array, meta = reader.get_data(stored)
    first = stored[0] if isinstance(stored, list) else stored
    if not hasattr(first, "SegmentSequence") and (not isinstance(stored, list) or int(first.get("NumberOfFrames") or 1) > 1):
        raise DataError(f"{path}: one DICOM file is no volume here; give the folder of its series, or convert it to NIfTI")
    placed = hasattr(first, "ImagePositionPatient") and hasattr(first, "ImageOrientationPatient")
    if placed and isinstance(stored, list):
        _check_series(stored, array.shape[2], path)
    return bright_is_high(array, first), np.asarray(meta["affine"], np.float64), placed or hasattr(first, "SegmentSequence")


def _check_series(slices: Sequence[Any], read: int, path: Path) -> None:
    """Refuse what MONAI would stack all the same: slices that are lost or not evenly spaced."""
    refuse_lost(read, dicom_files(path), path)
    refuse_uneven(slices, path)


def _check_affine(affine: np.ndarray, path: Path) -> None:
    refuse_no_spacing(affine, path)
    sides = sides_of(affine)
    leaning = math.degrees(float(np.arccos(np.abs(affine[:3, :3] / sides).max(axis=0).clip(max=1)).max()))
    if leaning > _ALIGNED or len(set(np.abs(affine[:3, :3]).argmax(axis=0))) < 3:
        raise DataError(
            f"{path}: oblique affine, an axis leans {leaning:.0f} degrees away from the patient's; "
            "resample the volume along the patient's axes, for example with nibabel.processing.conform"
        )


def _by(sides: Sequence[Any]) -> str:
    return " x ".join(map(str, sides))
