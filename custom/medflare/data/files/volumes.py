"""Volumes and their place in space: NIfTI and DICOM read with their affine, turned and resampled as a task says, and brought back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from medflare.core.errors import DataError
from medflare.core.packages import require
from medflare.data.files.dicom import read_dicom
from medflare.data.files.geometry import Grid, apply_turn, by, check_affine, sides_of
from medflare.data.files.kinds import DICOM, NIFTI, PICTURES, dicom_files, explained, kind_of, unknown_format
from medflare.data.files.readers import LABELS, LPS, finite, in_millimetres, of_channels, picked, quiet_nifti, stored_nifti
from medflare.data.files.series import HEADER, grid_of, number_by_place, refuse_uneven
from medflare.tasks.config import TaskConfig

_UNCODED: Final = "LAS"  # how nibabel takes a header that has no code for where its axes run


def read_volume(path: Path, *, colour: bool = False) -> tuple[np.ndarray, Grid]:
    """A volume as stored, (C, i, j, k), and its grid.

    Args:
        path: of a NIfTI file, a DICOM series (a folder) or a DICOM segmentation.
        colour: take the colours of a palette, as an image has them; else the numbers of its entries, as a mask has them.

    Raises:
        DataError: the file is missing, unreadable or no volume, or its grid is none that can be turned to the patient's axes.
    """
    kind = kind_of(path)
    with explained(path):
        if kind in NIFTI:
            require("nibabel", f"{path}: a NIfTI image", DataError)
            array, affine = stored_nifti(path)
            grid = Grid(array.shape[:3], affine)
        elif kind in DICOM or kind == "folder":
            require("pydicom", f"{path}: a DICOM image", DataError)
            array, grid = _read_dicom(path, colour=colour)
        elif kind not in PICTURES:
            raise unknown_format(path, kind)
        else:
            raise DataError(f"{path}: a picture, the task has spatial_dims 3; give NIfTI files or folders with a DICOM series")
    array = np.moveaxis(array, -1, 0) if array.ndim == 4 else array[None]
    if array.ndim != 4 or not array.size:
        found = by(array.shape[1:])
        raise DataError(f"{path}: {found} is no volume, the task has spatial_dims 3; give all slices together, or take a task of pictures")
    check_affine(grid.affine, path)
    return array, grid


def series_grid(path: Path) -> Grid:
    """Where the voxels (column, row, slice) of a DICOM file or series lie, by its headers alone.

    Args:
        path: of a file, or of a folder with one series.

    Raises:
        DataError: slices of which nothing says how they follow each other, or that are not evenly spaced.
    """
    from pydicom import dcmread

    with explained(path):
        slices = [dcmread(file, stop_before_pixels=True, specific_tags=list(HEADER)) for file in dicom_files(path)]
        number_by_place(slices, path)
        grid = grid_of(slices)
        if grid.known:
            refuse_uneven(slices, path)
    return grid


def slices_apart(file: Path, other: Path) -> str:
    """How far the slices lie apart that `readers` cuts two volumes into, in words; "" within half a voxel, and where nobody knows.

    Of flat NIfTI images, and where only one volume says where it lies, it is the direction of the stored axes that is compared.

    Args:
        file: of an image or volume, or a folder with a series; pictures lie nowhere.
        other: the same.

    Raises:
        DataError: a series that has lost slices.
    """
    there = _as_slices(other)
    here = None if there is None else _as_slices(file)
    if here is None or there is None:
        return ""
    if here.grid and there.grid:
        return here.grid.difference(there.grid, sides_of(here.grid.affine).min() / 2)
    if here.codes == there.codes or len(here.codes) != len(there.codes):  # of a flat image and a volume the sizes tell
        return ""
    assumed = f"; {_UNCODED} is assumed of a header without sform and qform code" if _UNCODED in (here.codes, there.codes) else ""
    return f"stored along {there.codes}, not {here.codes}{assumed}"


class _Slices(NamedTuple):
    """Where an image that has been read lies, by the header alone."""

    codes: str  # the patient's axes along which it is stored, as "RAS"
    grid: Grid | None  # as `readers` turns it; None where the file does not say, and of a flat image, which is not turned


def _as_slices(path: Path) -> _Slices | None:
    """None where nobody knows."""
    kind = kind_of(path)
    if kind == "folder":
        grid = series_grid(path)
        return _Slices(LPS, grid) if grid.known else None  # its own axes, whichever they are, are taken for these
    if kind not in NIFTI:
        return None
    import nibabel

    with quiet_nifti():
        image: Any = nibabel.load(path)
    coded = image.get_sform(coded=True)[1] or image.get_qform(coded=True)[1]
    grid = Grid(image.shape[:3], in_millimetres(np.asarray(image.affine, np.float64), image.header))
    if len(image.shape) < 3:
        return _Slices(grid.codes[:2], None) if coded else None
    return _Slices(grid.codes, grid.turned(LPS)) if coded else _Slices(_UNCODED, None)


def read_channels(files: Sequence[Path | None], channels: int, pick: Sequence[int] = ()) -> tuple[np.ndarray, Grid]:
    """The channels of one image, as stored, float32 (channels, i, j, k): one file with all of them, or a file for each.

    Args:
        files: in the order of the channels; None stands for zeros. At least one is a file, and the others are turned as the first one is.
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
        array, grid = read_volume(file, colour=True)
        array = picked(finite(array, file), pick if len(files) == 1 else (), file)
        array = of_channels(array, channels if len(files) == 1 else 1, file)
        if first is None:
            first = (file, grid)
        elif difference := first[1].difference(grid.turned(first[1].codes)):
            raise DataError(f"{file}: lies on another grid than {first[0].name} ({difference}); resample one to the other first")
        else:
            array = apply_turn(array, grid.turn(first[1].codes))
        arrays.append(array)
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

    if not stored.known:
        return values
    there = stored.turned(task.orientation)
    if task.spacing is not None:
        volume = MetaTensor(values, affine=torch.as_tensor(here.affine))
        resample = SpatialResample(mode="bilinear", padding_mode="border")
        values = torch.as_tensor(resample(volume, dst_affine=torch.as_tensor(there.affine), spatial_size=there.shape)).as_subclass(Tensor)
    return torch.as_tensor(apply_turn(values.cpu().numpy(), there.turn(stored.codes)))


def _read_dicom(path: Path, *, colour: bool) -> tuple[np.ndarray, Grid]:
    """(i, j, k[, channels]), and where they lie."""
    array, _, slices, grid = read_dicom(path, dicom_files(path), colour=colour)
    if not hasattr(slices[0], "SegmentSequence"):
        if len(slices) == 1:
            raise DataError(f"{path}: one DICOM file is no volume here; give the folder of its series, or convert it to NIfTI")
        if grid.known:
            refuse_uneven(slices, path)
    return np.ascontiguousarray(np.swapaxes(array, 0, 1)), grid
