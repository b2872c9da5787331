"""DICOM files and series as arrays of pixel values, in the order of their slices; DICOM
segmentations as masks.
"""

import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from medflare.core.errors import DataError, UnreadableError
from medflare.data.geometry import Grid

_PIXELS = ("PixelData", "FloatPixelData", "DoubleFloatPixelData")
_NEEDED = (
    "BitsAllocated",
    "BitsStored",
    "PixelRepresentation",
    "SamplesPerPixel",
    "PhotometricInterpretation",
)
SEGMENTATION = "1.2.840.10008.5.1.4.1.1.66.4"  # SOP class (PS3.4, Sec. B.5)
_IMAGES = "Image Storage"  # in the names of SOP classes whose objects have pixels
# SOP classes whose pixels are not read: a dose, and the tiles of a slide.
_NO_IMAGES = ("RT Dose Storage", "VL Whole Slide Microscopy Image Storage")
# Tolerance of slice distances and of offsets from the line through the slices, as a fraction of the
# distance.
_UNEVEN = 0.1
_CLOSE = 1e-3  # tolerance of equal numbers in two slices: devices round them
_ONE = {"PatientID": "patients", "SeriesInstanceUID": "series"}
_SAME = {
    "ImageOrientationPatient": "orientations",
    "PixelSpacing": "pixel spacings",
    "Rows": "rows",
    "Columns": "columns",
}
# In the functional groups of a frame (PS3.3, Sec. C.7.6.16.2).
_PLANE = {
    "ImagePositionPatient": "PlanePositionSequence",
    "ImageOrientationPatient": "PlaneOrientationSequence",
    "PixelSpacing": "PixelMeasuresSequence",
}
_GROUPS = ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence")
# Tags that order and positions of slices and frames depend on.
_RESCALED = "RescaleIntercept"
HEADER = (*_SAME, "ImagePositionPatient", "InstanceNumber", "NumberOfFrames", _RESCALED, *_GROUPS)
_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])  # DICOM's coordinates run to left and posterior
_OFFSET = 0.1  # voxels between a frame of a segmentation and the grid
# Bytes of a file without DICOM's mark: the tag of its first element is of group 2, or of group 8 in
# either byte order, and one of the next elements is a UID of DICOM.
_FIRST_GROUPS = (b"\2\0", b"\x08\0", b"\0\x08")
_ROOT = "1.2.840.10008."
_BEGIN = 1024
_DEFLATED = b"1.2.840.10008.1.2.1.99"  # transfer syntax: the data set is compressed as a whole
_MOST_INFLATED = 2**28  # bytes of such a data set


def is_object(path: Path) -> bool:
    """Whether a file is DICOM by its content: it has the mark (PS3.10, Sec. 7.1), or begins as a
    DICOM object without preamble and mark, as old archives export them.
    """
    begin = _begin(path)
    return begin[128:132] == b"DICM" or _is_unmarked(begin)


def _begin(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_BEGIN)


def _is_unmarked(begin: bytes) -> bool:
    """No text, picture, archive or NIfTI file begins with these bytes."""
    return begin[:2] in _FIRST_GROUPS and _ROOT.encode() in begin


def read(path: Path, **options: Any) -> Any:
    """A file as pydicom's dataset, with a transfer syntax; DataError for one that is no DICOM."""
    from pydicom import dcmread
    from pydicom.errors import InvalidDicomError

    begin = _begin(path)
    if _DEFLATED in begin:
        _refuse_bomb(path)
    try:
        dataset = dcmread(path, **{"force": _is_unmarked(begin), **options})
    except InvalidDicomError as error:
        raise DataError(
            f"{path}: no DICOM file, since the mark DICM is not at byte 128, nor does it begin "
            "with a group of DICOM; export it again, or leave it out"
        ) from error
    except (EOFError, struct.error) as error:
        raise UnreadableError(
            f"{path}: the file is cut off; export it again, or leave it out"
        ) from error
    if not dataset.file_meta.get("TransferSyntaxUID"):
        dataset.file_meta.TransferSyntaxUID = _guessed_syntax(dataset)
    return dataset


def _refuse_bomb(path: Path) -> None:
    """Raise DataError for a deflated data set that is too large inflated; pydicom inflates it
    whole, also for a few tags.
    """
    from pydicom.filereader import read_file_meta_info

    meta_bytes = 144 + read_file_meta_info(path).get("FileMetaInformationGroupLength", 0)
    inflating = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
    inflated = 0
    with path.open("rb") as file, suppress(zlib.error):  # pydicom reports a damaged one
        file.seek(meta_bytes)
        while compressed := inflating.unconsumed_tail or file.read(_BEGIN):
            inflated += len(inflating.decompress(compressed, _MOST_INFLATED // 256))
            if inflated > _MOST_INFLATED:
                raise DataError(
                    f"{path}: its deflated data set has more than {_MOST_INFLATED >> 20} MiB; "
                    "leave it out"
                )


def _guessed_syntax(dataset: Any) -> Any:
    """The transfer syntax by which pydicom has read a file whose header gives none."""
    from pydicom.uid import ExplicitVRBigEndian, ExplicitVRLittleEndian, ImplicitVRLittleEndian

    implicit, little_endian = dataset.original_encoding
    if implicit:
        return ImplicitVRLittleEndian
    return ExplicitVRLittleEndian if little_endian else ExplicitVRBigEndian


def tags_of(path: Path, *tags: str) -> Any:
    """Some tags of a file, without its pixels."""
    return read(path, stop_before_pixels=True, specific_tags=list(tags))


def is_other_object(path: Path) -> bool:
    """Whether a file, also one without DICOM's mark, is a DICOM object without an image, as a
    report, or of `_NO_IMAGES`; an image whose header is cut off is none.
    """
    names = ["SOPClassUID", "Rows"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of what pydicom guesses
            tags = read(path, force=True, stop_before_pixels=True, specific_tags=names)
            kind = kind_of(tags)
    except Exception:  # of a damaged file; the reader reports it
        return False
    return kind in _NO_IMAGES or ("Rows" not in tags and kind != "" and _IMAGES not in kind)


def has_image(tags: Any) -> bool:
    """Whether a header, of Rows and SOPClassUID at least, is that of an image."""
    return "Rows" in tags and kind_of(tags) not in _NO_IMAGES


def kind_of(dataset: Any) -> str:
    """The name of an object's SOP class, for example "CT Image Storage", or a private UID; "" if
    none is given, or a part of one where the file is cut off.
    """
    uid = dataset.get("SOPClassUID") or dataset.file_meta.get("MediaStorageSOPClassUID")
    if uid is None:
        return ""
    private = uid.is_private and not _ROOT.startswith(uid)
    is_standard = uid.type == "SOP Class"
    return str(uid.name) if private or is_standard else ""


def check_image(dataset: Any, path: Path) -> None:
    """Raise DataError for an object that is no image, and for pixels that need a package which is
    not installed.
    """
    from pydicom.pixels import get_decoder
    from pydicom.uid import JPEGExtended12Bit

    kind = kind_of(dataset)
    has_sides = "Rows" in dataset and "Columns" in dataset
    if kind in _NO_IMAGES:
        raise DataError(f"{path}: {kind} is not read; leave it out")
    if not has_sides or not any(name in dataset for name in _PIXELS):
        if not kind or _IMAGES in kind:
            raise DataError(
                f"{path}: the file is cut off, or lacks Rows, Columns or pixels; "
                "export it again, or leave it out"
            )
        raise DataError(f"{path}: a DICOM object without pixels ({kind}); leave it out")
    syntax = dataset.file_meta.TransferSyntaxUID
    if syntax.is_private:
        return
    if not syntax.is_encapsulated:
        # Compressed pixels have no length (PS3.5, Sec. A.4).
        if "PixelData" in dataset and dataset["PixelData"].is_undefined_length:
            raise DataError(
                f"{path}: its pixels are compressed, and its header does not say how "
                "(TransferSyntaxUID); export it uncompressed"
            )
        return
    try:
        available = list(get_decoder(syntax).available_plugins)
    except NotImplementedError:
        raise DataError(
            f"{path}: its pixels are compressed as {syntax.name}; export it uncompressed"
        ) from None
    # Pillow has 8 bits alone.
    if syntax == JPEGExtended12Bit and dataset.get("BitsStored", 8) > 8 and "pillow" in available:
        available.remove("pillow")
    if not available:
        package = "pylibjpeg-openjpeg" if "2000" in syntax.name else "pylibjpeg-libjpeg"
        raise DataError(
            f"{path}: no installed package reads its compression ({syntax.name}); "
            f"pip install pylibjpeg {package}, or export it uncompressed"
        )


def pixels(dataset: Any, *, mask: bool = False) -> tuple[np.ndarray, bool]:
    """The pixel values of a file: (i, j), i along the columns, or (i, j, frames), then colours if
    any; and whether there are colours.

    Modality tables, slopes and palettes are applied. Windows are not: images stay comparable.
    MONOCHROME1 images, whose lowest number is white, are inverted within the range of the stored
    numbers (PS3.3, Sec. C.7.6.3.1.2). A mask's palette and inversion are ignored.
    """
    from pydicom.pixels import apply_color_lut

    array = _decoded(dataset)
    kind = str(dataset.get("PhotometricInterpretation", ""))
    colours = int(dataset.get("SamplesPerPixel", 1)) > 1
    if kind == "PALETTE COLOR" and not mask:
        array = apply_color_lut(array, dataset)[..., :3]
        colours = True
        if dataset.RedPaletteColorLookupTableDescriptor[2] == 16:
            array = array >> 8  # to the range of other colours
    else:
        array = _rescaled(array, dataset)
        if kind == "MONOCHROME1" and not mask:
            ends = np.array([0, 2 ** int(dataset.BitsStored) - 1], np.int64)
            ends -= (ends[1] + 1) // 2 * int(dataset.get("PixelRepresentation", 0))
            array = _rescaled(ends, dataset).sum(dtype=np.float64) - array
    if int(dataset.get("NumberOfFrames") or 1) > 1:
        array = np.moveaxis(array, 0, 2)
    return np.swapaxes(array, 0, 1), colours


def _decoded(dataset: Any) -> np.ndarray:
    """The stored numbers; ValueError with a text of our own for damaged or cut-off pixels."""
    try:
        array = dataset.pixel_array
    except Exception as error:
        for name in _NEEDED:
            if name not in dataset:
                raise ValueError(f"its header lacks {name}") from error
        syntax = getattr(dataset, "file_meta", {}).get("TransferSyntaxUID")
        if syntax is not None and syntax.is_encapsulated:
            raise ValueError(
                f"its compressed pixels, {syntax.name}, are damaged or of a rare kind"
            ) from error
        raise ValueError("its pixels are cut off, or do not fit its header") from error
    # pydicom reads the lowest bits (PS3.5, Sec. 8.1.1).
    below = (dataset.get("HighBit") or 0) + 1 - (dataset.get("BitsStored") or 64)
    if 0 < below <= dataset.BitsAllocated - dataset.BitsStored:
        compressed = dataset.file_meta.TransferSyntaxUID.is_encapsulated
        is_high = array.any() and not (array & (2**below - 1)).any()
        if is_high and not compressed:
            raise ValueError("its numbers do not end at the lowest bit (HighBit); export it again")
    return array


def _rescaled(array: np.ndarray, dataset: Any) -> np.ndarray:
    """Values after slope and intercept or table. pydicom does not read those of the frames of
    enhanced objects.
    """
    from pydicom.pixels import apply_modality_lut

    slopes = set()
    for name in _GROUPS:
        for group in dataset.get(name) or ():
            # PS3.3, Sec. C.7.6.16
            for item in group.get("PixelValueTransformationSequence") or ():
                slopes.add((float(item.RescaleSlope), float(item.RescaleIntercept)))
    if len(slopes) > 1:
        raise ValueError("its frames have different rescale slopes; convert it to NIfTI")
    for slope, intercept in slopes:
        return array.astype(np.float64) * slope + intercept
    return apply_modality_lut(array, dataset)


# -- series ----------------------------------------------------------------------------------------


def frames_of(dataset: Any) -> list[Any]:
    """The frames of an enhanced object (PS3.3, A.36 and A.38) as headers of slices, numbered from
    1; ValueError if it lacks some.

    Other objects have none, nor do frames of one position, as in time: they are no volume.
    """
    count = int(dataset.get("NumberOfFrames") or 1)
    if count < 2 or not all(dataset.get(name) for name in _GROUPS):
        return []
    if len(dataset.PerFrameFunctionalGroupsSequence) != count:
        raise ValueError("some of its frames have no functional groups")
    frames = []
    for number, groups in enumerate(dataset.PerFrameFunctionalGroupsSequence, start=1):
        header = _frame_header(dataset, groups)
        header.InstanceNumber = number
        frames.append(header)
    positions = {tuple(map(float, header.get("ImagePositionPatient", ()))) for header in frames}
    if len(positions) < 2:
        return []
    return frames


def _frame_header(dataset: Any, groups: Any) -> Any:
    """Size and plane of a frame with these functional groups, as in the header of a slice."""
    from pydicom import Dataset

    header = Dataset()
    header.Rows = dataset.Rows
    header.Columns = dataset.Columns
    for keyword, name in _PLANE.items():
        group = _group(dataset, groups, name)
        if group is not None and keyword in group:
            header[keyword] = group[keyword]
    return header


def _group(dataset: Any, groups: Any, name: str) -> Any:
    """A functional group of a frame: its own, or the one of all frames; None if there is none."""
    for part in (groups, dataset.SharedFunctionalGroupsSequence[0]):
        if part.get(name):
            return part[name][0]
    return None


def ordered_slices(slices: Sequence[Any], path: Path) -> list[Any]:
    """The slices (datasets, or `frames_of` one file) of a series in their order: by number if the
    positions agree, else by position.

    Raises:
        DataError: several patients or series, different orientations, spacings or sizes, a copied
            slice, no order, or uneven distances.
    """
    if len(slices) == 1:
        slices = frames_of(slices[0]) or slices
    if len(slices) == 1:
        return list(slices)
    _check_one_series(slices, path)
    numbers = [dataset.get("InstanceNumber") for dataset in slices]
    if None not in numbers:
        _refuse_copies(slices, path, "ImagePositionPatient", "InstanceNumber")
    by_number = None
    if None not in numbers and len(set(numbers)) == len(numbers):
        by_number = np.argsort(np.array(numbers, np.int64))
    if not _has_positions(slices):
        if by_number is None:
            problem = "some slices have none" if None in numbers else "two slices have the same"
            raise DataError(
                f"{path}: the order of its slices is unknown, without ImagePositionPatient, and "
                f"by InstanceNumber, of which {problem}; export the series again"
            )
        return [slices[row] for row in by_number]
    corners = np.array([dataset.ImagePositionPatient for dataset in slices], np.float64)
    right, down = np.split(np.array(slices[0].ImageOrientationPatient, np.float64), 2)
    positions = corners @ np.cross(right, down)
    order = np.argsort(positions, kind="stable")
    if by_number is not None:
        gaps = np.diff(positions[by_number])
        at_one_position = not gaps.any()  # as in time
        if (gaps > 0).all() or (gaps < 0).all() or at_one_position:
            order = by_number
    ordered = [slices[row] for row in order]
    gaps = np.abs(np.diff(positions[order]))
    if not _is_even(gaps):
        _refuse_copies(ordered, path, "ImagePositionPatient")
    _check_even(corners[order], gaps, path)
    return ordered


def _has_positions(slices: Sequence[Any]) -> bool:
    tags = ("ImagePositionPatient", "ImageOrientationPatient")
    return all(dataset.get(tag) for dataset in slices for tag in tags)


def _check_one_series(slices: Sequence[Any], path: Path) -> None:
    for tag, several in _ONE.items():
        ids = {str(dataset.get(tag)) for dataset in slices if dataset.get(tag) is not None}
        if len(ids) > 1:
            raise DataError(
                f"{path}: slices of {len(ids)} {several} lie in one folder; "
                "give every series a folder of its own"
            )
    if len({_RESCALED in dataset for dataset in slices}) > 1:
        raise DataError(
            f"{path}: some slices have a RescaleIntercept and others do not; export the series "
            "again, or take those slices out"
        )
    for tag, several in _SAME.items():
        values = []
        for dataset in slices:
            if dataset.get(tag) is not None:
                values.append(np.array(dataset.get(tag), np.float64))
        for value in values[1:]:
            if value.shape != values[0].shape or np.abs(value - values[0]).max() > _CLOSE:
                raise DataError(
                    f"{path}: the slices have different {several}; "
                    "take those that do not belong there out of the folder"
                )


def _refuse_copies(slices: Sequence[Any], path: Path, *tags: str) -> None:
    """Refuse copies of a slice among the files with equal values of some tags; and, of files at one
    position alone, echoes and times.
    """
    first: dict[str, Any] = {}
    for dataset in slices:
        if not getattr(dataset, "filename", None):  # a frame
            continue
        values = [np.array(dataset.get(tag)).tolist() for tag in tags]
        other = first.setdefault(str(values), dataset)
        if other is dataset:
            continue
        files = (Path(other.filename), Path(dataset.filename))
        names = " and ".join(file.name for file in files)
        one, two = map(read, files)  # of the headers alone, pixels are missing
        if all(one.get(name) == two.get(name) for name in _PIXELS):
            raise DataError(f"{path}: {names} are one slice, copied; take one of them out")
        if len(tags) == 1:
            raise DataError(
                f"{path}: {names} have one position, with different pixels; "
                "export echoes and times as series of their own, or take one of them out"
            )


def _is_even(gaps: np.ndarray) -> bool:
    return bool(np.ptp(gaps) <= _UNEVEN * np.median(gaps))


def _check_even(corners: np.ndarray, gaps: np.ndarray, path: Path) -> None:
    """Refuse lost slices, and slices beside the line through the others; `corners` (N, 3) in order,
    mm.
    """
    if not _is_even(gaps):
        raise DataError(
            f"{path}: slices lie {gaps.min():g} to {gaps.max():g} mm apart; "
            "restore what is missing, export echoes and times as series of their own, "
            "or resample the volume"
        )
    line = corners[0] + np.linspace(0, 1, len(corners))[:, None] * (corners[-1] - corners[0])
    offset = np.linalg.norm(corners - line, axis=1).max()
    if offset > _UNEVEN * np.median(gaps):
        raise DataError(
            f"{path}: a slice lies {offset:.3g} mm beside the line through the others; "
            "take it out, or resample the volume"
        )


def grid_of(slices: Sequence[Any]) -> Grid:
    """The grid of the voxels (column, row, slice) of a series in its order.

    It is not known if a slice has no position, or all have one. Without a pixel spacing only the
    directions are known.
    """
    first = slices[0]
    shape = (int(first.Columns), int(first.Rows), len(slices))
    if not _has_positions(slices):
        return Grid(shape, np.eye(4), has_affine=False)
    right, down = np.split(np.array(first.ImageOrientationPatient, np.float64), 2)
    spacing = _pixel_spacing(first)
    between_rows, between_columns = spacing or (1.0, 1.0)
    corners = [first.ImagePositionPatient, slices[-1].ImagePositionPatient]
    start, end = np.array(corners, np.float64)
    if len(slices) > 1 and (start == end).all():
        return Grid(shape, np.eye(4), has_affine=False)
    affine = np.eye(4)
    affine[:3] = np.column_stack([right * between_columns, down * between_rows, [0, 0, 1], start])
    if len(slices) > 1:
        affine[:3, 2] = (end - start) / (len(slices) - 1)
    return Grid(shape, _RAS @ affine, has_spacing=spacing is not None)


def _pixel_spacing(header: Any) -> tuple[float, float] | None:
    """Millimetres between rows and between columns; None unless they are two lengths above 0."""
    lengths = np.atleast_1d(np.array(header.get("PixelSpacing") or (), np.float64))
    if lengths.shape != (2,) or not (np.isfinite(lengths) & (lengths > 0)).all():
        return None
    return float(lengths[0]), float(lengths[1])


# -- segmentations ---------------------------------------------------------------------------------


def segment_codes(dataset: Any) -> dict[str, dict[str, Any]]:
    """Label of a segment -> its type, as in `TaskConfig.codes`; types of private schemes (99...)
    are left out.
    """
    codes = {}
    for segment in dataset.SegmentSequence:
        kind = _code(segment.get("SegmentedPropertyTypeCodeSequence"))
        category = _code(segment.get("SegmentedPropertyCategoryCodeSequence"))
        if kind and category:
            kind["category"] = category
        if kind:
            codes[str(segment.SegmentLabel)] = kind
    return codes


def _code(sequence: Any) -> dict[str, Any] | None:
    """The first coded concept of a sequence; None for a private one, or without a code."""
    item = sequence[0] if sequence else {}
    value = str(item.get("CodeValue", ""))
    scheme = str(item.get("CodingSchemeDesignator", ""))
    meaning = str(item.get("CodeMeaning", ""))
    if not (value and scheme and meaning) or scheme.startswith("99"):
        return None
    return {"value": value, "scheme": scheme, "meaning": meaning}


def segments(
    dataset: Any, path: Path, series: str, grid: Grid
) -> tuple[np.ndarray, list[tuple[str, int]]]:
    """The masks of a segmentation object (PS3.3, A.51) on the grid of its `series` (a UID): int64
    (M, i, j, k); label and number of each.

    An object has frames for slices with foreground alone, in any order, each with its position.
    DataError if it refers to another series, or a frame is at no position of a slice.
    """
    references = dataset.get("ReferencedSeriesSequence", ())
    referenced = {str(item.SeriesInstanceUID) for item in references}
    if referenced and series not in referenced:
        raise DataError(
            f"{path}: segments the series {', '.join(sorted(referenced))}, its image is {series}; "
            "correct the datalist"
        )
    labels = []
    rows = {}  # of the masks, by number of the segment
    for row, segment in enumerate(dataset.SegmentSequence):
        number = int(segment.SegmentNumber)
        rows[number] = row
        labels.append((str(segment.SegmentLabel), number))
    masks = np.zeros((len(labels), *grid.shape), np.int64)
    for groups, shown in _segment_frames(dataset):
        segment = _group(dataset, groups, "SegmentIdentificationSequence")
        mask = masks[rows[int(segment.ReferencedSegmentNumber)]]
        plane = grid_of([_frame_header(dataset, groups)])
        mask[_voxels(plane, grid, path)] |= shown
    return masks, labels


def segments_overlap(dataset: Any) -> bool:
    """Whether two frames of a segmentation object show one pixel."""
    shown_at: dict[tuple[float, ...], np.ndarray] = {}  # position -> pixels of the frames before
    for groups, shown in _segment_frames(dataset):
        plane = _group(dataset, groups, "PlanePositionSequence")
        position = tuple(np.array(plane.ImagePositionPatient, np.float64).round(2).tolist())
        before = shown_at.setdefault(position, np.zeros_like(shown))
        if (before & shown).any():
            return True
        before |= shown
    return False


def _segment_frames(dataset: Any) -> Iterator[tuple[Any, np.ndarray]]:
    """The functional groups of each frame, and which of its pixels (rows, columns) it shows."""
    frames = _decoded(dataset).reshape(-1, int(dataset.Rows), int(dataset.Columns))
    threshold = int(dataset.get("MaximumFractionalValue", 1)) / 2
    return zip(dataset.PerFrameFunctionalGroupsSequence, frames > threshold, strict=True)


def _voxels(plane: Grid, grid: Grid, path: Path) -> tuple[np.ndarray, ...]:
    """Voxel indices along the grid's three axes of every pixel of a plane, each (rows, columns)."""
    if plane.spacing is None:
        raise ValueError("a frame has no position, orientation or pixel spacing")
    columns, rows = np.mgrid[: plane.shape[0], : plane.shape[1]].swapaxes(1, 2)[..., None]
    to_grid = np.linalg.inv(grid.affine) @ plane.affine
    exact = columns * to_grid[:3, 0] + rows * to_grid[:3, 1] + to_grid[:3, 3]
    voxels = exact.round().astype(int)
    outside = (voxels < 0).any() or (voxels >= grid.shape).any()
    if outside or np.abs(exact - voxels).max() > _OFFSET:
        raise DataError(
            f"{path}: a frame lies beside the slices of its series; "
            "give the series that was segmented"
        )
    return tuple(np.moveaxis(voxels, -1, 0))
