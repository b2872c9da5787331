"""DICOM files as arrays of what their pixels mean: slope, intercept and tables applied, whichever part of a file says them."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from medflare.core.errors import DataError
from medflare.data.files.geometry import Grid
from medflare.data.files.series import grid_of, number_by_place, refuse_lost, refuse_mixed

_RESCALED: Final = "PixelValueTransformationSequence"


class Stored(NamedTuple):
    """What the files of an image hold."""

    array: np.ndarray  # (rows, columns[, slices][, channels])
    has_channels: bool  # whether the last axis holds colours, or the segments of a segmentation
    slices: list[Any]  # of pydicom, one a file
    grid: Grid  # where the voxels (column, row, slice) lie


def read_dicom(path: Path, files: Sequence[Path], *, colour: bool) -> Stored:
    """One image of one file, or of the files of a series, in the order in which they lie.

    Args:
        path: of the file or the folder, for messages.
        files: of the image; MONAI would take the name of a folder for a pattern, and one with [ ] in it stands for another folder.
        colour: read an image, in the colours of a palette, and turned around where the lowest number is white; else a mask, whose numbers
            are those of labels and stay.

    Raises:
        DataError: files that make no image together.
    """
    slices = _datasets(path, files)
    first = slices[0]
    if len(slices) == 1 and hasattr(first, "SegmentSequence"):
        return _segmentation(files[0], first)
    if len(slices) > 1:
        if any(_frames(one) > 1 for one in slices):
            raise DataError(f"{path}: {len(slices)} files lie in the folder, of several frames each; name the one that is meant")
        refuse_mixed(slices, path)
        number_by_place(slices, path)
        slices.sort(key=lambda one: int(one.InstanceNumber))
    arrays = [intensities(one, colour=colour) for one in slices]
    array = np.stack(arrays, axis=-1) if len(arrays) > 1 else arrays[0]
    has_colours = int(first.get("SamplesPerPixel", 1)) > 1 or (colour and _has_palette(first))
    if len(slices) > 1 and has_colours:
        array = np.moveaxis(array, 2, -1)  # slices were stacked behind the channels
    elif _frames(first) > 1:
        array = np.moveaxis(array, 0, 2)  # frames come first
    return Stored(array, has_colours, slices, grid_of(slices))


def intensities(dataset: Any, *, colour: bool) -> np.ndarray:
    """What the pixels of a file mean, (rows, columns), frames before them and colours behind.

    Args:
        dataset: of pydicom.
        colour: see `read_dicom`. A palette's colours have 8 or 16 bits.

    Raises:
        ValueError: a palette that pydicom misreads.
    """
    from pydicom.pixels import apply_modality_lut

    stored, inverse = dataset.pixel_array, colour and _is_inverse(dataset)
    if colour and _has_palette(dataset):
        return _coloured(stored, dataset)
    if dataset.get("ModalityLUTSequence"):
        meant, ends = apply_modality_lut(stored, dataset), apply_modality_lut(_ends(dataset), dataset).sum(dtype=np.int64)
        return ends - meant if inverse else meant
    rescale = _rescale(dataset, stored.ndim)
    slope, intercept = rescale or (np.ones(1), np.zeros(1))
    meant = stored.astype(np.float32) * slope + intercept if rescale else stored
    return slope * _ends(dataset).sum() + 2 * intercept - meant if inverse else meant


def functional_group(frame: Any, shared: Any, name: str) -> Any:
    """A functional group of a frame of an enhanced object, or of all its frames together (PS3.3, Sec. C.7.6.16).

    Args:
        frame: the frame's own groups.
        shared: those of all frames.
        name: of the sequence.
    """
    return (frame if name in frame else shared)[name][0]


def _datasets(path: Path, files: Sequence[Path]) -> list[Any]:
    """The files as pydicom reads them, at least one."""
    from pydicom import dcmread
    from pydicom.errors import InvalidDicomError

    if not path.is_dir():
        return [dcmread(path)]
    found = []
    for file in files:
        try:
            found.append(dcmread(file))
        except InvalidDicomError:
            continue  # counted below
    refuse_lost(len(found), len(files), path)
    return found


def _segmentation(file: Path, dataset: Any) -> Stored:
    """Its frames, by slice and segment."""
    from monai.data.image_reader import PydicomReader

    reader = PydicomReader()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PydicomReader: ImageOrientationPatient")  # MONAI looks for it in one place of several
        array, meta = reader.get_data(reader.read(file))  # (columns, rows, slices, segments)
    grid = Grid(array.shape[:3], np.asarray(meta["affine"], np.float64))
    return Stored(np.swapaxes(array, 0, 1), True, [dataset], grid)


def _rescale(dataset: Any, axes: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Slope and intercept, of the file or of each frame of an enhanced object, with so many axes; None where neither says any."""
    shared = (dataset.get("SharedFunctionalGroupsSequence") or [{}])[0]
    frames = dataset.get("PerFrameFunctionalGroupsSequence") or [shared]
    if any(_RESCALED in groups for groups in (shared, *frames)):
        said = [functional_group(frame, shared, _RESCALED) for frame in frames]
    elif "RescaleSlope" in dataset or "RescaleIntercept" in dataset:
        said = [dataset]
    else:
        return None
    pairs = np.array([[one.get("RescaleSlope", 1), one.get("RescaleIntercept", 0)] for one in said], np.float64)
    pairs = pairs[:1] if (pairs == pairs[0]).all() else pairs
    slope, intercept = pairs.T.reshape(2, -1, *[1] * (axes - 1))
    return slope, intercept


def _coloured(stored: np.ndarray, dataset: Any) -> np.ndarray:
    """The colours of a palette's entries, without their transparency."""
    from pydicom.pixels import apply_color_lut

    colours = apply_color_lut(stored, dataset)[..., :3]
    if colours.dtype == np.uint8 and (dataset.RedPaletteColorLookupTableDescriptor[0] or 2**16) > 2**8:
        raise ValueError("a palette of more than 256 entries of 8 bits")  # pydicom counts such entries from 0 again after each 256
    return colours


def _is_inverse(dataset: Any) -> bool:
    """Whether the lowest number is white. Such an image is turned around, so that intensities rise with brightness.

    Within the range of the stored numbers, so that all images of a device stay comparable (PS3.3, Sec. C.7.6.3.1.2).
    """
    return str(dataset.get("PhotometricInterpretation", "")) == "MONOCHROME1"


def _ends(dataset: Any) -> np.ndarray:
    """Lowest and highest number that a pixel can hold, int64 (2,)."""
    numbers = 2 ** int(dataset.BitsStored)
    lowest = -(numbers // 2) if int(dataset.get("PixelRepresentation", 0)) else 0
    return np.array([lowest, lowest + numbers - 1], np.int64)


def _has_palette(dataset: Any) -> bool:
    return str(dataset.get("PhotometricInterpretation", "")) == "PALETTE COLOR"


def _frames(dataset: Any) -> int:
    return int(dataset.get("NumberOfFrames") or 1)
