"""Image files as arrays: pictures by Pillow, NIfTI by nibabel, DICOM files and series by pydicom,
other files by extensions.

A stored image is (C, i, j) or (C, i, j, k), i along the columns of a picture or DICOM slice, or
along the first axis of a NIfTI file. 3-D tasks take it in their orientation and spacing, 2-D tasks
as slices (C, rows, columns, slices). NIfTI volumes that are cut into slices are turned to LPS
first: rows run to posterior and columns to the patient's left, as in DICOM slices of the same scan.
"""

import gzip
import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from medflare.core.errors import DataError, UnreadableError, one_line
from medflare.core.extensions import Extensions, check_callable
from medflare.core.packages import require
from medflare.core.text import format_shape
from medflare.data import dicom
from medflare.data.geometry import Grid, apply_turn, check_same_grid, to_task_grid
from medflare.data.local import ImageBounds
from medflare.tasks.config import TaskConfig

JPEG = (".jpg", ".jpeg", ".jpe", ".jfif")
PICTURES = (".png", *JPEG, ".bmp", ".tif", ".tiff", ".gif", ".webp", ".ppm", ".pgm")
NIFTI = (".nii", ".nii.gz")
DICOM = (".dcm", ".dicom", ".ima")
_BUILTIN = frozenset(ending[1:] for ending in (*PICTURES, *NIFTI, *DICOM))
READERS = Extensions("reader", "readers", lambda: _BUILTIN, check_callable)
# Pillow's modes, I;16 too, that are read without conversion; every other becomes RGB.
GREY = ("1", "L", "I", "F")
LUMA = (0.299, 0.587, 0.114)  # of red, green and blue (ITU-R BT.601)
SLICES = "LPS"  # orientation of volumes that are cut into slices
# Mean difference of the channels of a coloured picture, as a fraction of the brightest value.
_COLOURED = 0.02
# NIfTI's codes of lengths that are not millimetres.
_OTHER_UNITS = {1: "metres", 3: "micrometres"}
# Pillow's formats, by content: of others it may read 8 bits a channel where more are stored.
_FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "GIF", "WEBP", "PPM")
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # first bytes of a TIFF and a BigTIFF
# Tags of TIFF 6.0; PhotometricInterpretation is 0 if the lowest number is white.
_BITS, _COMPRESSION, _PHOTOMETRIC, _EXTRA_SAMPLES, _SAMPLE_FORMAT = 258, 259, 262, 338, 339
_CHUNK = 2**20  # bytes
_LOSS = 48  # by which JPEG may move black and white
_EDGE = 3  # half the width, in pixels, of the greys that JPEG makes at an edge
_WHOLE = 1e-3  # distance of a label from the whole number that is meant
_COARSE = 0.1  # slope of a header beyond which a value near a whole number may be a fraction

# nibabel names no file where it repairs a header; what it cannot repair is an exception.
logging.getLogger("nibabel.global").addFilter(lambda record: False)


class Image(NamedTuple):
    """An image before its intensities and size are changed."""

    array: np.ndarray  # float32 (C, H, W[, slices]), or a volume (C, X, Y, Z) along the task's axes
    stored_grid: Grid | None = None  # of the voxels in the file; None for pictures
    grid: Grid | None = None  # of the voxels of `array`; None for pictures
    coloured: bool = False  # whether `array` is the luminance of a picture in colours


class Stored(NamedTuple):
    """The content of a file or series: (C, i, j[, k]), its grid, and whether channels are red,
    green and blue.
    """

    array: np.ndarray
    grid: Grid | None = None
    colours: bool = False
    nifti: bool = False

    @property
    def slice_grid(self) -> Grid | None:
        """The grid of the slices of a 2-D task; a DICOM series keeps its own axes."""
        if self.grid is None or not self.grid.has_affine:
            return None
        if self.nifti:
            return self.grid.turned(SLICES)
        return self.grid

    def as_slices(self, array: np.ndarray) -> np.ndarray:
        """(C, i, j[, k]) on this grid as pictures (C, rows, columns[, slices])."""
        if self.nifti and self.grid is not None:
            array = apply_turn(array, self.grid.turn(SLICES))
        return array.swapaxes(1, 2)


# -- files -----------------------------------------------------------------------------------------


def suffix(path: PurePath) -> str:
    """A file's suffix in lower case; ".nii.gz" is one suffix."""
    if path.name.lower().endswith(".nii.gz"):
        return ".nii.gz"
    return path.suffix.lower()


def image_suffixes() -> tuple[str, ...]:
    """The suffixes of all image files but DICOM's, those of extensions too."""
    return (*PICTURES, *NIFTI, *(f".{name}" for name in READERS.names()))


def stem(path: PurePath) -> str:
    """A file's name without the suffix of an image; the end of a DICOM file's number is none.

    Examples:
        >>> stem(Path("a/scan.1.NII.gz")), stem(Path("1.2.840.10008")), stem(Path(".png"))
        ('scan.1', '1.2.840.10008', '.png')
    """
    ending = suffix(path)
    if ending not in (*image_suffixes(), *DICOM):
        return path.name
    return path.name[: len(path.name) - len(ending)]


def is_dicom(path: Path) -> bool:
    """Whether a file is DICOM: by its suffix, without a known suffix by its content."""
    if suffix(path) in DICOM:
        return True
    if suffix(path) in image_suffixes() or not path.is_file():
        return False
    return dicom.is_object(path)


def dicom_images(files: Iterable[Path], *, segmentations: bool = True) -> Iterator[Path]:
    """The files that are DICOM images, with or without segmentation objects: directories, reports
    and presentation states have no rows.
    """
    for file in files:
        if file.is_file() and is_dicom(file) and _is_image(file, segmentations):
            yield file


def dicom_files(path: Path) -> list[Path]:
    """The DICOM images of a folder without segmentation objects, by name (DataError if there is
    none); or the file itself.
    """
    if not path.is_dir():
        return [path]
    listed = [file for file in path.iterdir() if not file.name.startswith(".")]
    files = sorted(dicom_images(listed, segmentations=False))
    if not files:
        raise DataError(
            f"{path}: a folder without DICOM images; "
            "name the image's own file, or the folder of one series"
        )
    return files


def _is_image(path: Path, segmentations: bool) -> bool:
    header = {}
    with suppress(Exception):  # `read_stored` will raise the error
        header = dicom.tags_of(path, "Rows", "SOPClassUID")
    # A slice whose header is cut off is one, lest the volume lack it.
    if not dicom.has_image(header):
        return not dicom.is_other_object(path)
    return segmentations or header.get("SOPClassUID") != dicom.SEGMENTATION


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Errors while a file is read as a DataError of one line that names the file; pipes and devices
    are not opened.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise DataError(
                f"{path}: neither a regular file nor a folder; replace it or leave it out"
            )
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        remedy = "correct the path (upper case counts) or restore the file"
        if not str(path).isprintable():
            remedy = "in JSON, write / for \\ in a path"
        raise DataError(f"{path}: file not found; {remedy}") from error
    except Exception as error:  # decoders raise any exception on a damaged file
        problem = one_line(error)
        if isinstance(error, AttributeError) and error.name and is_dicom(path):
            problem = f"its attribute {error.name} is missing"
        raise UnreadableError(
            f"{path}: cannot be read as an image ({problem}); replace the file or leave it out"
        ) from error


# -- what a file holds -----------------------------------------------------------------------------


def read_stored(path: Path, bounds: ImageBounds = ImageBounds(), *, mask: bool = False) -> Stored:
    """The content of a file, or of a folder with one DICOM series. Its size is checked before its
    pixels are read.

    A `mask`'s numbers are labels, to which no palette and no inversion applies.

    Raises:
        DataError: it is missing, unreadable, too large, of an unknown format or no image.
        ConfigError: its reader is an extension that cannot be used.
    """
    reader = READERS.foreign(suffix(path).removeprefix("."))
    with explained(path):
        if reader is not None and path.is_file():
            stored = reader(path)
            if not isinstance(stored, Stored):
                raise TypeError(
                    f"its reader returns a {type(stored).__name__}, no {__name__}.Stored"
                )
            bounds.check(path, stored.array.shape[1:], volume=stored.array.ndim == 4)
        elif path.is_dir() or is_dicom(path):
            require("pydicom", f"{path}: a DICOM image", DataError)
            with warnings.catch_warnings():
                # Of what pydicom repairs in a header.
                warnings.filterwarnings("ignore", module="pydicom")
                stored = _read_dicom(path, bounds, mask)
        elif suffix(path) in NIFTI:
            require("nibabel", f"{path}: a NIfTI image", DataError)
            stored = _read_nifti(path, bounds, mask)
        elif suffix(path) in PICTURES:
            require("PIL", f"{path}: a picture", DataError)
            stored = _read_picture(path, bounds, mask)
        else:
            path.stat()
            formats = ", ".join((*image_suffixes(), *DICOM))
            raise DataError(
                f"{path}: unknown image format {suffix(path)!r}; "
                f"known are {formats} and folders with a DICOM series"
            )
    array = stored.array
    if array.ndim not in (3, 4) or not array.size:
        raise DataError(
            f"{path}: expected a picture or a volume, found an array of shape {array.shape}"
        )
    if array.dtype.fields or np.iscomplexobj(array):
        raise DataError(
            f"{path}: its voxels are colours or complex numbers, not one number each; "
            "store each part as a channel"
        )
    return stored


def _read_picture(path: Path, bounds: ImageBounds, mask: bool) -> Stored:
    from PIL import Image as Pillow
    from PIL import ImageOps

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Pillow.DecompressionBombWarning)  # `bounds` decides
        with _opened(path) as image:
            bounds.check(path, (image.height, image.width), volume=False)
            # Of a camera's MPO, the other pictures are previews or for the other eye.
            pages = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
            if pages > 1:
                raise DataError(
                    f"{path}: the file holds {pages} pages or frames; "
                    "store pages as files or as a NIfTI volume"
                )
            image_format = image.format
            tags = image.tag_v2 if image_format == "TIFF" else {}
            _check_channels(image, tags, path, mask)
            image = ImageOps.exif_transpose(_grey_of_gif(image))
            _check_transparency(image, path, mask)
            if mask and image.mode == "P":
                _check_palette(image, path)
            if image.mode == "LA" or (image.mode == "1" and not mask):  # white is 255
                image = image.convert("L")
            elif image.mode.split(";")[0] not in GREY and not (mask and image.mode == "P"):
                image = image.convert("RGB")
            array = np.asarray(image)
            if mask and image_format == "JPEG":
                array = _black_and_white(image, path)
    if tags:
        array = _as_tagged(array, tags, path, mask)
    if array.ndim == 2:
        return Stored(array.T[None])
    return Stored(np.moveaxis(array, -1, 0).swapaxes(1, 2), colours=True)


def _opened(path: Path) -> Any:
    """The file as Pillow's image; DataError for one whose content Pillow does not know."""
    from PIL import Image as Pillow
    from PIL import UnidentifiedImageError

    try:
        image = Pillow.open(path, formats=_FORMATS)
        # Pillow maps a file of this name into memory, with wrong sides where a TIFF is turned.
        image.filename = ""
        return image
    except UnidentifiedImageError as error:
        with path.open("rb") as file:
            begin = file.read(4)
        if begin in _TIFF:
            problem = "a kind of TIFF, as of float16, float64 or big-endian uint32"
            remedy = "save it little-endian, with numbers of 8 or 16 bits, int32 or float32"
        else:
            problem = f"its content is none of {', '.join(_FORMATS)}" if begin else "it is empty"
            remedy = "save it as PNG, or leave it out"
        raise UnreadableError(
            f"{path}: cannot be read as a picture ({problem}); {remedy}"
        ) from error


def _check_channels(image: Any, tags: Mapping[int, Any], path: Path, mask: bool) -> None:
    """Refuse what Pillow drops: bits beyond 8 of several channels, and a mask's extra channel."""
    bits = max(tags.get(_BITS, (1,))) if tags else 8
    if image.format == "PNG":
        with path.open("rb") as file:
            bits = file.read(25)[-1]  # of the header, the first chunk (PNG, Sec. 11.2.2)
    if image.format == "PPM":
        bits = _bits_of_ppm(path)
    if bits > 8 and len(image.getbands()) > 1:
        raise DataError(
            f"{path}: colours or transparency with {bits} bits, only 8 can be read; "
            "save it in grey without transparency, or with 8 bits"
        )
    if mask and 0 in tags.get(_EXTRA_SAMPLES, ()):
        raise DataError(f"{path}: the mask has a channel beside its colours; save it in grey")


def _bits_of_ppm(path: Path) -> int:
    """The bits of a number in a PGM or PPM, by the number of white, the third one of its header.

    Raises:
        DataError: white is not 255 or 65535, to which Pillow scales all numbers.
    """
    with path.open("rb") as file:
        header = re.sub(rb"#[^\n]*", b"", file.read(1000)).split(maxsplit=4)
    bits = {b"255": 8, b"65535": 16}.get(b"".join(header[3:4]))
    if bits is None:
        raise DataError(
            f"{path}: white is neither 255 nor 65535 in its header, and other numbers would be "
            "scaled; save it as PNG"
        )
    return bits


def _black_and_white(image: Any, path: Path) -> np.ndarray:
    """A JPEG mask (rows, columns) as 0 and 255: compression moved its values, and made greys at its
    edges.

    Raises:
        DataError: it has other values than black and white.
    """
    from scipy.ndimage import binary_erosion

    values = np.asarray(image.convert("L"))
    highest = int(values.max())
    grey = (values > _LOSS) & (values < 255 - _LOSS)
    wide_grey = bool(binary_erosion(grey, iterations=_EDGE).any())
    coloured = image.mode == "RGB" and np.ptp(np.asarray(image), axis=2).max() > _LOSS
    if coloured or wide_grey or 0 < highest < 255 - _LOSS:
        raise DataError(
            f"{path}: a JPEG mask with other values than black and white; compression changes "
            "values, save it as PNG"
        )
    return np.where(values > 127, np.uint8(255), np.uint8(0))


def _check_palette(image: Any, path: Path) -> None:
    """Refuse a mask of black and white whose palette has white first: numbers are labels."""
    used = sorted(number for _, number in image.getcolors())
    palette = np.array(image.getpalette("RGB"), np.uint8).reshape(-1, 3)
    shown = palette[[number for number in used if number < len(palette)]]
    grey = palette[:2] if len(used) == 1 and used[0] < 2 <= len(palette) else shown
    if len(grey) == 2 and (grey[0] == 255).all() and (grey[1] == 0).all():
        raise DataError(
            f"{path}: the mask's palette has white as a lower number than black; "
            "save the mask in grey, without a palette"
        )


def _grey_of_gif(image: Any) -> Any:
    """The image, of a GIF with a palette of greys in grey: GIF has no other way to store it."""
    if image.format == "GIF" and image.mode == "P":
        palette = np.array(image.getpalette("RGB")).reshape(-1, 3)
        if (palette == palette[:, :1]).all():
            return image.convert("L")
    return image


def palette_of(path: Path) -> dict[int, tuple[int, ...]]:
    """Used number -> red, green and blue of a picture with a palette; {} for other files."""
    if suffix(path) not in PICTURES:
        return {}
    with explained(path), _opened(path) as file:
        image = _grey_of_gif(file)
        palette = image.getpalette("RGB") if image.mode == "P" else []
        numbers = [number for _, number in image.getcolors()] if palette else []
    return {number: tuple(palette[3 * number : 3 * number + 3]) for number in numbers}


def _check_transparency(image: Any, path: Path, mask: bool) -> None:
    """Refuse a picture whose transparency says something else than its colours."""
    if not mask and isinstance(image.info.get("transparency"), bytes):  # of a palette's colours
        image = image.convert("RGBA")
    if image.getbands()[-1] != "A":
        return
    array = np.asarray(image)
    if mask:
        _check_alpha(array, path)
        return
    hidden = array[array[..., -1] == 0]
    if (hidden != hidden[:1]).any():
        raise DataError(
            f"{path}: its transparency hides colours, which would be read; "
            "save it without transparency, as it is meant to be seen"
        )


def _check_alpha(array: np.ndarray, path: Path) -> None:
    """Refuse a mask (rows, columns, channels) whose alpha, the last channel, has structures.

    Alpha may repeat the colours: transparent where they are 0, and only there.
    """
    colours = array[..., :-1]
    alpha = array[..., -1]
    constant = (colours == colours[0, 0]).all()
    same = ((alpha > 0) == colours.any(axis=-1)).all()
    if alpha.min() < alpha.max() and (constant or not same):
        raise DataError(
            f"{path}: the mask's transparency (alpha) shows other structures than its colours; "
            "save the structures in grey, without transparency"
        )


def _as_tagged(array: np.ndarray, tags: Any, path: Path, mask: bool) -> np.ndarray:
    """The pixels of a TIFF (rows, columns[, channels]) as its tags mean them, not Pillow's mode.

    Where the lowest number is white, images are inverted; Pillow does so up to 8 bits.
    """
    bits = max(tags.get(_BITS, (1,)))
    sample_format = max(tags.get(_SAMPLE_FORMAT, (1,)))
    compressed = tags.get(_COMPRESSION, 1) != 1
    inverted = tags.get(_PHOTOMETRIC) == 0
    if array.dtype.itemsize > 2 and tags.prefix == b"MM" and compressed:
        raise DataError(
            f"{path}: a compressed big-endian TIFF, whose bytes Pillow exchanges; "
            "save it little-endian, or uncompressed"
        )
    if inverted and (bits > 16 or (mask and bits > 1)):
        raise DataError(
            f"{path}: its tags say that the lowest number is white; "
            "save it with the lowest number as black"
        )
    if inverted and bits == 16:
        return np.iinfo(np.uint16).max - array
    if bits == 8 and sample_format == 2:  # signed
        return array.view(np.int8)
    if bits == 32 and sample_format == 1:  # unsigned
        return array.view(np.uint32)
    return array


def _read_nifti(path: Path, bounds: ImageBounds, mask: bool) -> Stored:
    import nibabel

    image = nibabel.load(path)
    # The three lowest bits are the unit of length.
    unit = _OTHER_UNITS.get(int(image.header["xyzt_units"]) & 7)
    if unit:
        raise DataError(
            f"{path}: the header gives lengths in {unit}, expected mm; "
            "convert spacing and affine to mm and set xyzt_units"
        )
    bounds.check(path, image.shape, volume=True)
    array, raw = _nifti_content(path, image)
    if mask and image.get_data_dtype().kind in "iu" and abs(image.dataobj.slope) <= _COARSE:
        # A step of the stored integers is a slope: the nearest to a label is half a step away.
        whole = array.round()
        array = np.where(np.abs(array - whole) <= abs(image.dataobj.slope) / 2, whole, array)
    empty_axes = tuple(axis for axis in range(3, array.ndim) if array.shape[axis] == 1)
    array = array.squeeze(axis=empty_axes)
    if array.ndim == 2:
        return Stored(array[None], nifti=True)
    # Without an sform the lengths are pixdim's. nibabel reads 0 as 1 mm, and -2 as 2 mm; other
    # programs differ. A header that nobody has filled in has 1, without a unit.
    sides = raw["pixdim"][1:4]
    directions = bool(max(raw["sform_code"], raw["qform_code"]) > 0)
    filled = directions or (sides != 1).any() or raw["xyzt_units"] & 7
    lengths = bool(raw["sform_code"] > 0 or (filled and (sides > 0).all()))
    matrix = np.asarray(image.affine, np.float64)
    grid = Grid(array.shape[:3], matrix, has_spacing=lengths, has_directions=directions)
    grid.check(path)
    _check_forms(image, raw, path)
    channels = np.moveaxis(array, -1, 0) if array.ndim == 4 else array[None]
    return Stored(channels, grid, nifti=True)


def _check_forms(image: Any, raw: Any, path: Path) -> None:
    """Refuse a header whose qform and sform give two spacings, or two orientations, of one space.

    They may differ in position, in a small rotation and in shear, which a qform cannot have; with
    two codes, as of the scanner and of an atlas, in everything.
    """
    lengths = bool((raw["pixdim"][1:4] > 0).all())  # of a qform
    if raw["qform_code"] <= 0 or raw["qform_code"] != raw["sform_code"] or not lengths:
        return
    try:
        matrix = image.get_qform()
    except ValueError:  # no rotation
        return
    sform = Grid(image.shape[:3], image.get_sform())
    qform = Grid(image.shape[:3], matrix)
    if not sform.has_axes_of(qform):
        raise DataError(
            f"{path}: its qform gives {qform.axes}, its sform {sform.axes}; remove the wrong one "
            "(nibabel: image.set_qform(None) or image.set_sform(None))"
        )


def _nifti_content(path: Path, image: Any) -> tuple[np.ndarray, Any]:
    """The voxels of a loaded image, and its header without nibabel's repairs.

    A compressed file is read to its end, where gzip compares the checksum.
    """
    compressed = suffix(path) == ".nii.gz"
    with gzip.open(path) if compressed else path.open("rb") as stream:
        raw = image.header_class.from_fileobj(stream, check=False)
        if not compressed:
            return np.asanyarray(image.dataobj), raw
        stream.seek(0)
        array = np.asanyarray(type(image).from_stream(stream).dataobj)
        while stream.read(_CHUNK):
            pass
        return array, raw


def _read_dicom(path: Path, bounds: ImageBounds, mask: bool) -> Stored:
    datasets = []
    for file in dicom_files(path):
        with explained(file):
            datasets.append(dicom.read(file))
            dicom.check_image(datasets[-1], file)
    first = datasets[0]
    one_file = len(datasets) == 1
    frames = max(int(dataset.get("NumberOfFrames") or 1) for dataset in datasets)
    if not one_file and frames > 1:
        raise DataError(
            f"{path}: {len(datasets)} files lie in the folder, of several frames each; "
            "name the one that is meant"
        )
    sides = (int(first.Rows), int(first.Columns))
    slices = len(datasets) * frames
    if slices > 1:
        bounds.check(path, (slices, *sides), volume=True)
    else:
        bounds.check(path, sides, volume=False)
    ordered = dicom.ordered_slices(datasets, path)
    if one_file:
        array, colours = dicom.pixels(first, mask=mask)
        if len(ordered) > 1:  # the frames of an enhanced object
            array = array[:, :, [int(frame.InstanceNumber) - 1 for frame in ordered]]
    else:
        pixels = [dicom.pixels(dataset, mask=mask) for dataset in ordered]
        array = np.stack([values for values, _ in pixels], axis=2)
        colours = pixels[0][1]
    grid = dicom.grid_of(ordered) if len(ordered) > 1 else None
    channels = np.moveaxis(array, -1, 0) if colours else array[None]
    return Stored(channels, grid, colours=colours)


def series_grid(path: Path) -> Grid:
    """The grid of the voxels (column, row, slice) of a DICOM file or series, by its headers alone;
    DataError as of `dicom.ordered_slices`.
    """
    with explained(path):
        headers = [dicom.tags_of(file, *dicom.HEADER) for file in dicom_files(path)]
        return dicom.grid_of(dicom.ordered_slices(headers, path))


# -- images ----------------------------------------------------------------------------------------


def channel_files(
    listed: Sequence[Path | None], task: TaskConfig, location: str
) -> tuple[Path | None, ...]:
    """The files of an image's channels, None for a channel of zeros: one that is missing, where
    `listed` has None or no file exists.

    Raises:
        DataError: the number of channels differs from the task's, a channel is missing, or two
            channels are one file.
    """
    names = task.channel_names or tuple(map(str, range(task.image_channels)))
    if len(listed) != len(names):
        raise DataError(
            f"{location}: {len(listed)} files for {len(names)} channels ({', '.join(names)}); "
            "list one for each"
        )
    files = list(listed)
    if task.missing_channels == "zeros":
        for number, file in enumerate(listed):
            if file is not None and not file.exists():
                files[number] = None
    elif None in files:
        missing = names[files.index(None)]
        raise DataError(
            f"{location}: channel {missing} is missing; "
            "add its file, or say missing_channels 'zeros' in the task"
        )
    resolved = [file.resolve() for file in files if file is not None]
    if not resolved:
        raise DataError(
            f"{location}: none of the image's files exists; correct the paths or restore the files"
        )
    for path in resolved:
        if resolved.count(path) > 1:
            raise DataError(
                f"{location}: two channels are one file, {path}; "
                "list each channel's own, or null for one that is missing"
            )
    return tuple(files)


def read_image(
    files: Sequence[Path | None], task: TaskConfig, bounds: ImageBounds = ImageBounds()
) -> Image:
    """An image of one file, or of a file for each channel, in the task's channels, orientation and
    spacing.

    In 2-D tasks colours become luminance for one channel, and grey is repeated for three. The
    volumes of a 4-D file are channels.

    Args:
        files: None stands for zeros. The other channels are turned to the orientation of the first
            one.

    Raises:
        DataError: a file cannot be read, is too large, contains NaN, or has other channels than the
            task; channels on different grids.
    """
    arrays: list[np.ndarray | None] = []
    coloured = False
    count = 1 if len(files) > 1 else task.image_channels
    first: _Channel | None = None  # that has a file
    for file in files:
        if file is None:
            arrays.append(None)
            continue
        stored = read_stored(file, bounds)
        if task.spatial_dims == 3:
            _volume_grid(stored, file, task)
        array, has_colours = _channels(stored, task, count, file)
        if task.spatial_dims == 2:
            array = stored.as_slices(array)
        coloured = coloured or has_colours
        channel = _Channel(file, stored, array)
        if first is None:
            first = channel
            arrays.append(array)
        else:
            arrays.append(_on_grid_of(first, channel, task))
    assert first is not None  # `Source.image` refuses an image without files
    array = first.array
    if len(arrays) > 1:
        zeros = np.zeros_like(array[:1])
        array = np.concatenate([zeros if channel is None else channel for channel in arrays])
    grid = first.stored.grid
    if task.spatial_dims == 2:
        return Image(array, grid, first.stored.slice_grid, coloured)
    assert grid is not None
    bounds.check_resampled(first.file, grid, task)
    array, task_grid = to_task_grid(array, grid, task)
    return Image(array, grid, task_grid, coloured)


class _Channel(NamedTuple):
    file: Path
    stored: Stored
    array: np.ndarray  # (1, ...) in the task's channels


def _on_grid_of(first: _Channel, other: _Channel, task: TaskConfig) -> np.ndarray:
    """The array of another channel, in the orientation of the first one; DataError for another grid
    or size.
    """
    array = other.array
    grid = first.stored.grid
    other_grid = other.stored.grid
    if task.spatial_dims == 3 and grid is not None and other_grid is not None:
        check_same_grid(other.file, other_grid.turned(grid.codes), first.file, grid)
        array = apply_turn(array, other_grid.turn(grid.codes))
    else:
        check_same_grid(other.file, other.stored.slice_grid, first.file, first.stored.slice_grid)
    sides = array.shape[1:]
    first_sides = first.array.shape[1:]
    if sides != first_sides:
        raise DataError(
            f"{other.file}: {format_shape(sides)}, {first.file.name} is "
            f"{format_shape(first_sides)}; store all channels at one size"
        )
    return array


def _volume_grid(stored: Stored, path: Path, task: TaskConfig) -> Grid:
    """The grid of a volume; DataError for one that the task cannot use, and for a picture."""
    if stored.grid is None:
        raise DataError(
            f"{path}: no volume, the task has spatial_dims 3; "
            "give NIfTI files, or DICOM series with positions, or set spatial_dims 2 "
            "(medflare task init --dims 2)"
        )
    stored.grid.check(path)
    if task.spacing is not None and stored.grid.spacing is None:
        raise DataError(
            f"{path}: its voxel spacing is unknown, the task's is {format_shape(task.spacing)} mm; "
            "correct the file's header"
        )
    return stored.grid


def _channels(stored: Stored, task: TaskConfig, count: int, path: Path) -> tuple[np.ndarray, bool]:
    """`count` channels as float32, and whether one of them is the luminance of colours."""
    with np.errstate(over="ignore"):  # beyond float32: infinite
        array = stored.array.astype(np.float32)
    if not np.isfinite(array).all():
        raise DataError(
            f"{path}: the image holds NaN or infinite values; repair it or leave it out"
        )
    one_of_colours = stored.colours and count == 1
    coloured = one_of_colours and is_coloured(array.reshape(len(array), -1))
    if task.pick and count == task.image_channels and stored.nifti:
        if max(task.pick) >= len(array):
            raise DataError(
                f"{path}: the image has {len(array)} channels, "
                f"the task picks number {max(task.pick)} (from 0)"
            )
        array = array[list(task.pick)]
    elif task.spatial_dims == 2 and one_of_colours:
        luma = np.array(LUMA, np.float32)
        luminance = np.tensordot(luma, array.swapaxes(1, 2), axes=1)[None]
        array = luminance.astype(np.float32).swapaxes(1, 2)
    elif task.spatial_dims == 2 and len(array) == 1 and count == 3:
        array = np.repeat(array, 3, axis=0)
    if len(array) != count:
        remedy = "correct the file or the task's channels"
        if len(array) > count:
            remedy += ", or say in the task which of them it means (pick)"
        raise DataError(
            f"{path}: the image has {len(array)} channels, the task takes {count}; {remedy}"
        )
    return array, coloured


def is_coloured(channels: np.ndarray) -> bool:
    """Whether colour channels (C, P) differ by more than what compression does to a grey picture.

    Examples:
        >>> is_coloured(np.array([[0, 100], [0, 100], [0, 101]]))
        False
        >>> is_coloured(np.array([[0, 100], [0, 50], [0, 0]]))
        True
    """
    span = channels.max(axis=0) - channels.min(axis=0)
    return bool(span.mean() > _COLOURED * np.abs(channels).max())


# -- masks -----------------------------------------------------------------------------------------


def read_mask(
    path: Path,
    image_path: Path,
    image: Image | None,
    task: TaskConfig,
    bounds: ImageBounds = ImageBounds(),
    *,
    several: bool = False,
) -> tuple[np.ndarray, list[tuple[str, int]]]:
    """Label values laid out as their image, int64 (M, ...); and label and number of every segment
    of a DICOM segmentation.

    Args:
        image: gives the grid to compare with; None: grids are not compared.
        several: whether each channel is a structure's own mask; else equal channels are one mask,
            saved in colours.

    Raises:
        DataError: as `read_image`, or values that are not whole numbers, or a mask on another grid
            than its image.
    """
    image_grid = None if image is None else image.stored_grid
    segments: list[tuple[str, int]] = []
    if is_segmentation(path):
        if image_grid is None or not (image_path.is_dir() or is_dicom(image_path)):
            raise DataError(
                f"{path}: a DICOM segmentation, "
                "whose image must be a folder with its series, or the series in one file"
            )
        with explained(path):
            header = dicom.tags_of(dicom_files(image_path)[0], "SeriesInstanceUID")
            series = str(header.SeriesInstanceUID)
            array, segments = dicom.segments(dicom.read(path), path, series, image_grid)
        stored = Stored(array, image_grid)
    else:
        stored = read_stored(path, bounds, mask=True)
    masks = label_values(stored.array, path, several=several or bool(segments))
    if task.spatial_dims == 2:
        if stored.nifti and stored.grid and image and image.grid and image.grid.has_affine:
            axes = image.grid.codes  # a DICOM series keeps its own
            masks = apply_turn(masks, stored.grid.turn(axes))
            stored = Stored(masks, stored.grid.turned(axes))
        if image is not None:
            check_same_grid(path, stored.slice_grid, image_path, image.grid)
        return stored.as_slices(masks), segments
    grid = _volume_grid(stored, path, task)
    if image_grid is not None:
        turned = grid.turned(task.orientation)
        check_same_grid(path, turned, image_path, image_grid.turned(task.orientation))
    return to_task_grid(masks, grid, task, labels=True)[0], segments


def label_values(array: np.ndarray, path: Path, *, several: bool = False) -> np.ndarray:
    """Masks (M, ...) of whole numbers as int64; one if all are equal, unless several are meant.

    A number not more than 0.001 beside a whole one is that one: rounding moved it.

    Raises:
        DataError: other numbers.
    """
    masks = np.nan_to_num(array, nan=0.5, posinf=0.5, neginf=0.5).round().astype(np.int64)
    near = np.abs(array - masks) <= _WHOLE
    if not near.all():
        raise DataError(
            f"{path}: the mask holds {array[~near][0]:.6g}; "
            "store whole numbers, label values 0, 1, ..."
        )
    if several or not (masks == masks[:1]).all():
        return masks
    return masks[:1]


def is_segmentation(path: Path) -> bool:
    """Whether a file is a DICOM segmentation object."""
    with explained(path):
        if not path.is_file() or not is_dicom(path):
            return False
        header = dicom.tags_of(path, "SOPClassUID")
        return bool(header.get("SOPClassUID") == dicom.SEGMENTATION)
