"""Slices of a DICOM series in the order in which they lie, and a clear refusal of slices that make no volume together."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from medflare.core.errors import DataError
from medflare.data.files.geometry import Grid

_UNEVEN: Final = 0.1  # of the distance of slices, by which it may vary, and by which a slice may lie beside the line through the others
_CLOSE: Final = 1e-3  # between numbers of two slices that mean the same: devices round them
_ONE: Final = {"PatientID": "patients", "SeriesInstanceUID": "series"}
_SAME: Final = {
    "ImageOrientationPatient": "orientations",
    "PixelSpacing": "pixel spacings",
    "Rows": "numbers of rows",
    "Columns": "numbers of columns",
}
HEADER: Final = (*_SAME, "ImagePositionPatient", "InstanceNumber")  # what order and place of slices follow from
_RAS: Final = np.diag([-1.0, -1.0, 1.0, 1.0])  # DICOM's coordinates run to left and posterior


def refuse_mixed(slices: Sequence[Any], path: Path) -> None:
    """Nothing where all slices come from one series of one patient and look the same way; others could be stacked all the same.

    Args:
        slices: of pydicom; what does not stand in one of them is not compared.
        path: of their folder, for the message.

    Raises:
        DataError: slices of several patients or series, or of other orientations, pixel spacings or sizes.
    """
    for tag, several in _ONE.items():
        if len(found := {str(one.get(tag)) for one in slices if one.get(tag) is not None}) > 1:
            raise DataError(f"{path}: slices of {len(found)} {several} lie in one folder; give every series a folder of its own")
    for tag, several in _SAME.items():
        values = [np.array(one.get(tag), np.float64) for one in slices if one.get(tag) is not None]
        if any(value.shape != values[0].shape or np.abs(value - values[0]).max() > _CLOSE for value in values[1:]):
            raise DataError(f"{path}: the slices have different {several}; take those that do not belong there out of the folder")


def refuse_lost(read: int, files: int, path: Path) -> None:
    """Nothing where every file of a series was read; a volume without the others would pass for a whole one.

    Args:
        read: slices.
        files: DICOM files of the folder.
        path: of the folder, for the message.

    Raises:
        DataError: there are more files than slices.
    """
    if read != files:
        raise DataError(
            f"{path}: {files - read} of {files} files make no slice of the series; repair them, DICOM files have DICM behind their first "
            "128 bytes, or give every series a folder"
        )


def is_placed(slices: Sequence[Any]) -> bool:
    """Whether all slices, of pydicom, say where they lie."""
    return all("ImagePositionPatient" in one and "ImageOrientationPatient" in one for one in slices)


def number_by_place(slices: Sequence[Any], path: Path) -> None:
    """Give slices the numbers of their places, in memory, where their own run otherwise: they are stacked by number.

    Args:
        slices: of pydicom; changed in place where all of them say where they lie.
        path: of their folder, for the message.

    Raises:
        DataError: neither places nor numbers say how the slices follow each other.
    """
    numbers = [one.get("InstanceNumber") for one in slices]
    if not is_placed(slices):
        if len(slices) > 1 and (None in numbers or len(set(numbers)) < len(numbers)):
            raise DataError(
                f"{path}: neither places (ImagePositionPatient) nor numbers (InstanceNumber) say how its slices follow each other; "
                "export the series again"
            )
        return
    places = _places(slices) @ _normal(slices)
    if None not in numbers:
        gaps = np.diff(places[np.argsort(np.array(numbers, np.int64), kind="stable")])
        if (gaps > 0).all() or (gaps < 0).all():
            return
    for number, row in enumerate(np.argsort(places, kind="stable")):
        slices[row].InstanceNumber = number + 1


def grid_of(slices: Sequence[Any]) -> Grid:
    """Where the voxels (column, row, slice) of a series lie, stacked by number; not known where a slice does not say where it lies.

    Args:
        slices: of pydicom, numbered by `number_by_place`.
    """
    ordered = sorted(slices, key=lambda one: one.get("InstanceNumber") or 0)
    first, last = ordered[0], ordered[-1]
    shape = (int(first.Columns), int(first.Rows), len(ordered))
    if not is_placed(ordered):
        return Grid(shape, np.eye(4), known=False)
    right, down = np.split(np.array(first.ImageOrientationPatient, np.float64), 2)
    between_rows, between_columns = map(float, first.get("PixelSpacing") or (1, 1))
    start, end = np.array([first.ImagePositionPatient, last.ImagePositionPatient], np.float64)
    affine = np.eye(4)
    affine[:3] = np.column_stack([right * between_columns, down * between_rows, [0, 0, 1], start])
    if len(ordered) > 1:
        affine[:3, 2] = (end - start) / (len(ordered) - 1)
    return Grid(shape, _RAS @ affine)


def refuse_uneven(slices: Sequence[Any], path: Path) -> None:
    """Nothing where the slices lie behind each other at even distances.

    Args:
        slices: of pydicom, with their positions.
        path: of their folder, for the message.

    Raises:
        DataError: slices that are lost, lie twice at one place, or lie beside the line through the others.
    """
    corners = _places(slices)
    places = corners @ _normal(slices)
    corners, places = corners[np.argsort(places)], np.sort(places)
    gaps = np.diff(places)
    if len(gaps) and np.ptp(gaps) > _UNEVEN * np.median(gaps):
        raise DataError(f"{path}: slices lie {gaps.min():g} to {gaps.max():g} mm apart; restore what is missing, or resample the volume")
    line = corners[0] + np.linspace(0, 1, len(corners))[:, None] * (corners[-1] - corners[0])
    beside = np.linalg.norm(corners - line, axis=1).max()
    if len(gaps) and beside > _UNEVEN * np.median(gaps):
        raise DataError(f"{path}: a slice lies {beside:.3g} mm beside the line through the others; take it out, or resample the volume")


def _places(slices: Sequence[Any]) -> np.ndarray:
    return np.array([one.ImagePositionPatient for one in slices], np.float64)


def _normal(slices: Sequence[Any]) -> np.ndarray:
    right, down = np.split(np.array(slices[0].ImageOrientationPatient, np.float64), 2)
    return np.cross(right, down)
