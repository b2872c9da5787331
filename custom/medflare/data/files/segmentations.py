"""DICOM segmentation objects (PS3.3, A.51) as masks of the series that they refer to.

An object holds frames for those slices alone that show a structure, in any order, each with its place in space. They are laid onto the
grid of the series; what refers to another series, or lies elsewhere, is refused.
"""

from pathlib import Path
from typing import Any, Final

import numpy as np

from medflare.core.errors import DataError
from medflare.core.packages import installed
from medflare.data.files.dicom import functional_group
from medflare.data.files.geometry import Grid
from medflare.data.files.kinds import dicom_files, explained, is_dicom
from medflare.data.targets import stored_values
from medflare.tasks.config import TaskConfig

_CLASS: Final = "1.2.840.10008.5.1.4.1.1.66.4"  # Segmentation Storage
_ALIGNED: Final = 0.1  # voxels by which a frame may lie beside the grid
_RAS: Final = np.array([-1.0, -1.0, 1.0])  # DICOM's coordinates run to left and posterior


def is_segmentation(path: Path) -> bool:
    """Whether a file is a DICOM segmentation object."""
    if not (path.is_file() and is_dicom(path) and installed("pydicom")):
        return False
    from pydicom import dcmread

    with explained(path):
        return str(dcmread(path, stop_before_pixels=True, specific_tags=["SOPClassUID"]).get("SOPClassUID", "")) == _CLASS


def read_segmentation(path: Path, series: Path, grid: Grid, task: TaskConfig) -> np.ndarray:
    """The object's masks on the grid of its series, as `targets.encode_mask` takes them.

    Args:
        path: of the object.
        series: folder with the files of the series.
        grid: where the voxels of the series lie, see `volumes.series_grid`.
        task: a multilabel task has a mask for every segment, others a label value for each: that of the label which the segment is
            named after, else the segment's number.

    Returns:
        int64 (M, i, j, k).

    Raises:
        DataError: it refers to another series, lies elsewhere, or segments overlap where only one value fits.
    """
    from pydicom import dcmread

    with explained(path):
        found = dcmread(path)
        _refuse_other_series(found, path, series)
        segments = {int(segment.SegmentNumber): number for number, segment in enumerate(found.SegmentSequence)}
        masks = np.zeros((len(segments), *grid.shape), np.int64)
        frames = found.pixel_array.reshape(-1, int(found.Rows), int(found.Columns))
        half = int(found.get("MaximumFractionalValue", 1)) / 2
        for frame, group in zip(frames, found.PerFrameFunctionalGroupsSequence, strict=True):
            number = int(group.SegmentIdentificationSequence[0].ReferencedSegmentNumber)
            mask, place = masks[segments[number]], _voxels(found, group, grid, path)
            mask[place] |= (frame > half).astype(np.int64)  # a view
    return masks if task.target == "multilabel" and not task.label_values else _one_mask(masks, found, task, path)


def _refuse_other_series(found: Any, path: Path, series: Path) -> None:
    from pydicom import dcmread

    referred = {str(one.SeriesInstanceUID) for one in found.get("ReferencedSeriesSequence", ())}
    first = dicom_files(series)[0]
    own = str(dcmread(first, stop_before_pixels=True, specific_tags=["SeriesInstanceUID"]).SeriesInstanceUID)
    if referred and own not in referred:
        raise DataError(f"{path}: segments the series {', '.join(sorted(referred))}, its image {series} is {own}; correct the datalist")


def _voxels(found: Any, group: Any, grid: Grid, path: Path) -> tuple[np.ndarray, ...]:
    """Voxel numbers along the grid's three axes of every pixel of a frame, each (rows, columns)."""
    shared = found.SharedFunctionalGroupsSequence[0]
    right, down = np.split(np.array(functional_group(group, shared, "PlaneOrientationSequence").ImageOrientationPatient, np.float64), 2)
    between_rows, between_columns = map(float, functional_group(group, shared, "PixelMeasuresSequence").PixelSpacing)
    start = np.array(functional_group(group, shared, "PlanePositionSequence").ImagePositionPatient, np.float64)
    rows, columns = np.mgrid[: int(found.Rows), : int(found.Columns)][..., None].astype(np.float64)
    places = (start + columns * between_columns * right + rows * between_rows * down) * _RAS
    inverse = np.linalg.inv(grid.affine)
    exact = places @ inverse[:3, :3].T + inverse[:3, 3]
    voxels = exact.round().astype(int)
    if np.abs(exact - voxels).max() > _ALIGNED or (voxels < 0).any() or (voxels >= grid.shape).any():
        raise DataError(f"{path}: a frame lies beside the slices of its series; give the series that was segmented")
    return tuple(np.moveaxis(voxels, -1, 0))


def _one_mask(masks: np.ndarray, found: Any, task: TaskConfig, path: Path) -> np.ndarray:
    if (masks.sum(axis=0) > 1).any():
        raise DataError(f"{path}: segments overlap, a {task.target} task has one label a voxel; separate them, or make the task multilabel")
    named = {label: values[0] for label, values in zip(task.labels, stored_values(task), strict=True)}
    values = [named.get(str(segment.SegmentLabel), int(segment.SegmentNumber)) for segment in found.SegmentSequence]
    return np.einsum("m...,m->...", masks, np.array(values))[None]
