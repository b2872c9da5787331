"""Volumes and their place in space: NIfTI and DICOM read with their affine, turned and resampled as a task says, and brought back."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medflare.core.errors import DataError
from medflare.core.packages import require
from medflare.data.files.geometry import Grid, apply_turn, by, check_affine, sides_of
from medflare.data.files.readers import (
    DICOM,
    LABELS,
    LPS,
    NIFTI,
    PICTURES,
    bright_is_high,
    dicom_files,
    explained,
    finite,
    in_millimetres,
    kind_of,
    of_channels,
    picked,
    quiet_nifti,
    slices_of,
    stored_nifti,
    unknown_format,
)
from medflare.data.files.series import HEADER, grid_of, is_placed, number_by_place, refuse_lost, refuse_mixed, refuse_uneven
from medflare.tasks.config import TaskConfig


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
            (array, affine), known = stored_nifti(path), True
        elif kind in DICOM or kind == "folder":
            require("pydicom", f"{path}: a DICOM image", DataError)
            array, affine, known = _read_dicom(path)
        elif kind not in PICTURES:
            raise unknown_format(path, kind)
        else:
            raise DataError(f"{path}: a picture, the task has spatial_dims 3; give NIfTI files or folders with a DICOM series")
    array = np.moveaxis(array, -1, 0) if array.ndim == 4 else array[None]
    if array.ndim != 4 or not array.size:
        found = by(array.shape[1:])
        raise DataError(f"{path}: {found} is no volume, the task has spatial_dims 3; give all slices together, or take a task of pictures")
    check_affine(affine, path)
    return array, Grid(array.shape[1:], affine, known)


def series_grid(path: Path) -> Grid:
    """Where the voxels (column, row, slice) of a DICOM file or series lie, by its headers alone.

    Args:
        path: of a file, or of a folder with one series.

    Raises:
        DataError: slices of which nothing says how they follow each other, or that are not evenly spaced.
    """
    from pydicom import dcmread

    with explained(path):
        files = slices_of(path) if path.is_dir() else [path]
        slices = [dcmread(file, stop_before_pixels=True, specific_tags=list(HEADER)) for file in files]
        number_by_place(slices, path)
        grid = grid_of(slices)
        if grid.known:
            refuse_uneven(slices, path)
    return grid


def slices_apart(file: Path, other: Path) -> str:
    """How far the slices lie apart that `readers` cuts two volumes into, in words; "" within half a voxel, and where nobody knows.

    Args:
        file: of a volume, or a folder with a series; pictures lie nowhere.
        other: the same.

    Raises:
        DataError: a series that has lost slices.
    """
    there = _as_slices(other)
    here = None if there is None else _as_slices(file)
    return "" if here is None or there is None else here.difference(there, sides_of(here.affine).min() / 2)


def _as_slices(path: Path) -> Grid | None:
    """Where a volume that has been read lies as `readers` turns it, by the header alone; None where nobody knows."""
    kind = kind_of(path)
    if kind == "folder":
        grid = series_grid(path)
        return grid if grid.known else None
    if kind not in NIFTI:
        return None
    import nibabel

    with quiet_nifti():
        image: Any = nibabel.load(path)
    if len(image.shape) < 3 or not (image.get_sform(coded=True)[1] or image.get_qform(coded=True)[1]):
        return None
    return Grid(image.shape[:3], in_millimetres(np.asarray(image.affine, np.float64), image.header)).turned(LPS)


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
        array, grid = read_volume(file)
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


def _read_dicom(path: Path) -> tuple[np.ndarray, np.ndarray, bool]:
    from monai.data.image_reader import PydicomReader

    reader = PydicomReader()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what MONAI warns of is refused, or the grid is not known
        stored = reader.read(path)
        if isinstance(stored, list):
            refuse_mixed(stored, path)
            number_by_place(stored, path)
        array, meta = reader.get_data(stored)
    slices = stored if isinstance(stored, list) else [stored]
    first, segmented = slices[0], hasattr(slices[0], "SegmentSequence")
    if not segmented and (len(slices) == 1 or int(first.get("NumberOfFrames") or 1) > 1):
        raise DataError(f"{path}: one DICOM file is no volume here; give the folder of its series, or convert it to NIfTI")
    if not segmented:
        refuse_lost(len(slices), dicom_files(path), path)
    if placed := not segmented and is_placed(slices):
        refuse_uneven(slices, path)
    return bright_is_high(array, first), np.asarray(meta["affine"], np.float64), segmented or placed
