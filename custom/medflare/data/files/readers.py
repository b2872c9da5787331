"""Image files as arrays: PNG, JPEG, BMP, TIFF, NIfTI and DICOM (a file, or a folder with one series).

A DICOM file needs no suffix: many archives give it none.

Every array is laid out `(rows, columns[, slices][, channels])`. Oriented volumes (NIfTI) are turned to LPS and their first
two axes swapped, so that slices along the third axis look like the DICOM pictures of the same scan: rows run to posterior,
columns to the patient's left, whatever orientation a site stores.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from medflare.core.errors import DataError
from medflare.core.packages import require
from medflare.data.files.dicom import read_dicom
from medflare.data.files.geometry import check_affine, check_spacing, sides_of
from medflare.data.files.kinds import DICOM, NIFTI, PICTURES, dicom_files, explained, kind_of, suffix, unknown_format

LPS: Final = "LPS"  # how volumes lie that are cut into slices
LABELS: Final = (("L", "R"), ("P", "A"), ("I", "S"))
_MILLIMETRES: Final = {"meter": 1000.0, "micron": 0.001}  # of NIfTI's units; one that says none means millimetres
COLOURS: Final = ("CMYK", "YCbCr", "HSV", "LAB", "PA")  # Pillow's modes that are turned into RGB; P is, too, of images
_BITS, _PHOTOMETRIC = 258, 262  # TIFF's tags: bits of each channel, and 0 where the lowest number is white
LUMA: Final = (0.299, 0.587, 0.114)  # of red, green and blue (ITU-R BT.601)


def read_image(path: Path, channels: int, pick: Sequence[int] = ()) -> np.ndarray:
    """Intensities as stored, float32 (channels, H, W) or (channels, H, W, slices).

    Colour becomes luminance where one channel is wanted; grey is repeated where it is three. A picture's transparency is dropped. The
    volumes of a 4-D NIfTI file are no colours: they are the channels, or those of them that are picked.

    Args:
        path: of a picture, or of a volume that is to be cut into slices.
        channels: how many are wanted.
        pick: which volumes of a 4-D file are the channels; none for all.

    Raises:
        DataError: the file is missing, unreadable, of an unknown format, not an image or volume, of other channels, or holds NaN
            or infinity.
    """
    array, has_channels = _read(path, colour=True)
    array = finite(array, path)
    array = np.moveaxis(array, -1, 0) if has_channels else array[None]
    if suffix(path) in PICTURES and len(array) == 4 and channels != 4:
        array = array[:3]
    if suffix(path) in NIFTI and (has_channels or pick):
        return of_channels(picked(array, pick, path), channels, path)
    if len(array) == 3 and channels == 1:
        return np.tensordot(np.array(LUMA, np.float32), array, axes=1)[None].astype(np.float32)
    if len(array) == 1 and channels == 3:
        return np.repeat(array, channels, axis=0)
    return of_channels(array, channels, path)


def finite(array: np.ndarray, path: Path) -> np.ndarray:
    """The array as float32.

    Args:
        array: intensities.
        path: of their file, for the message.

    Raises:
        DataError: it holds NaN or infinity, or no numbers that are one each.
    """
    _refuse_compound(array, path)
    with np.errstate(over="ignore"):  # what float32 does not hold becomes infinite
        array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise DataError(f"{path}: the image holds NaN or infinite values; repair it or leave it out")
    return array


def _refuse_compound(array: np.ndarray, path: Path) -> None:
    """Some NIfTI files hold three colours or a complex number in every voxel; numpy would give up, or drop the imaginary part."""
    if array.dtype.fields or np.iscomplexobj(array):
        held = "colours" if array.dtype.fields else "complex numbers"
        raise DataError(f"{path}: its voxels are {held}, not one number each; store each part as a channel")


def picked(array: np.ndarray, pick: Sequence[int], path: Path) -> np.ndarray:
    """Some of the volumes of a file.

    Args:
        array: (C, ...).
        pick: their numbers from 0; none for all.
        path: of the file, for the message.

    Raises:
        DataError: the file has fewer.
    """
    if not pick:
        return array
    if max(pick) >= len(array):
        raise DataError(f"{path}: the image has {len(array)} channels, the task picks number {max(pick)} (from 0); correct the task's pick")
    return array[list(pick)]


def of_channels(array: np.ndarray, channels: int, path: Path) -> np.ndarray:
    """The array itself.

    Args:
        array: (C, ...).
        channels: how many it must have.
        path: of its file, for the message.

    Raises:
        DataError: it has another number.
    """
    if len(array) != channels:
        more = ", or say in the task which of them it means (pick)" if len(array) > channels else ""
        raise DataError(
            f"{path}: the image has {len(array)} channels, the task takes {channels}; correct the file or the task's channels{more}"
        )
    return array


def read_mask(path: Path, *, several: bool = False) -> np.ndarray:
    """Label values, int64 (M, H, W) or (M, H, W, slices); M is 1, or the number of channels where they differ from each other.

    Args:
        path: of a picture, or of a volume that is to be cut into slices.
        several: whether each channel is a structure's own mask; M is their number then, also where all of them are alike, as without
            a finding.

    Raises:
        DataError: as `read_image`, or values that are not whole numbers, or a picture drawn in its transparency alone.
    """
    array, has_channels = _read(path, colour=False)
    masks = np.moveaxis(array, -1, 0) if has_channels else array[None]
    return whole_numbers(masks if several else _one_if_alike(masks, path), path)


def _one_if_alike(masks: np.ndarray, path: Path) -> np.ndarray:
    """A grey mask that was saved in colours is one mask, and its transparency none."""
    colours = masks
    if suffix(path) in PICTURES and len(masks) == 4:
        colours = masks[:3]
        _refuse_transparent(masks, path)
    return masks[:1] if (colours == masks[:1]).all() else masks


def _refuse_transparent(channels: np.ndarray, path: Path) -> None:
    """Nothing where a mask is drawn in grey or colours; in its transparency alone, the last of its channels, it would be read as empty."""
    *colours, alpha = channels
    if alpha.min() < alpha.max() and all(colour.min() == colour.max() for colour in colours):
        raise DataError(f"{path}: the mask is drawn in its transparency alone; store label values in one grey mask")


def whole_numbers(array: np.ndarray, path: Path) -> np.ndarray:
    """Label values as int64.

    Args:
        array: of a mask.
        path: of its file, for the message.

    Raises:
        DataError: values that are not whole numbers.
    """
    _refuse_compound(array, path)
    whole = np.nan_to_num(array, nan=0.5, posinf=0.5, neginf=0.5).round().astype(np.int64)
    if not (whole == array).all():
        raise DataError(f"{path}: the mask holds values that are not whole numbers; store label values 0, 1, 2, ...")
    return whole


@contextmanager
def quiet_nifti() -> Iterator[None]:
    """nibabel logs what it repairs in a header; what matters of it is told by the error of whoever reads the file."""
    from nibabel.imageglobals import logger

    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _read(path: Path, colour: bool) -> tuple[np.ndarray, bool]:
    """(rows, columns[, slices][, channels]), and whether the last axis holds channels."""
    kind = kind_of(path)
    with explained(path):
        if kind in PICTURES:
            require("PIL", f"{path}: a picture", DataError)
            array = _read_picture(path, colour)
            has_channels = array.ndim == 3
        elif kind in NIFTI:
            require("nibabel", f"{path}: a NIfTI image", DataError)
            array = _read_nifti(path)
            has_channels = array.ndim == 4
        elif kind in DICOM or kind == "folder":
            require("pydicom", f"{path}: a DICOM image", DataError)
            array, has_channels, *_ = read_dicom(path, dicom_files(path), colour=colour)
        else:
            raise unknown_format(path, kind)
    if array.ndim not in (2, 3, 4) or not array.size:
        raise DataError(f"{path}: expected a picture or a volume, found an array of shape {array.shape}")
    return array, has_channels


def _read_picture(path: Path, colour: bool) -> np.ndarray:
    from monai.data.image_reader import PILReader
    from PIL import ImageOps

    image = PILReader().read(path)
    if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":  # a camera's: a preview follows
        raise DataError(f"{path}: the file holds {image.n_frames} pages; store pages as separate files or as a NIfTI volume")
    tags = getattr(image, "tag_v2", {})
    stored = str(image.tile[:1])
    deep = len(image.getbands()) > 1 and (16 in tags.get(_BITS, ()) or ";16" in stored)
    if deep and (not colour or "LA;16" in stored):  # 8 bits of a colour are enough, of a label, or of grey beside grey of 16, they are not
        raise DataError(f"{path}: channels of 16 bits, of which Pillow reads 8; store channels of 8 bits, or grey without transparency")
    inverse = colour and image.mode.startswith("I;16") and tags.get(_PHOTOMETRIC) == 0
    image = ImageOps.exif_transpose(image)  # a camera held upright says so in the file, and stores the picture lying
    if image.mode == "LA":
        if not colour:
            _refuse_transparent(np.moveaxis(np.asarray(image), -1, 0), path)
        image = image.convert("L")
    elif image.mode in COLOURS or (image.mode == "P" and colour):
        image = image.convert("RGB")
    array = PILReader(reverse_indexing=False).get_data(image)[0]
    return np.iinfo(np.uint16).max - array if inverse else array  # of 8 bits Pillow turns them around by itself


def _read_nifti(path: Path) -> np.ndarray:
    from monai.data.meta_tensor import MetaTensor
    from monai.transforms.spatial.array import Orientation

    array, affine = stored_nifti(path)
    if array.ndim == 2:
        return array.T
    check_affine(affine, path)
    last_is_channel = array.ndim == 4
    channel_first = np.moveaxis(array, -1, 0) if last_is_channel else array[None]
    turned = Orientation(axcodes=LPS, labels=LABELS)(MetaTensor(np.ascontiguousarray(channel_first), affine=affine)).numpy()
    turned = np.swapaxes(turned, 1, 2)
    return np.moveaxis(turned, 0, -1) if last_is_channel else turned[0]


def stored_nifti(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """What a NIfTI file holds, (i, j), (i, j, k) or (i, j, k, channels), and its affine to millimetres, float64 (4, 4).

    Args:
        path: of the file.

    Raises:
        DataError: a volume whose header says that its voxels do not lie apart, or voxels that are no numbers.
    """
    import nibabel
    from monai.data.image_reader import NibabelReader
    from nibabel.openers import ImageOpener

    reader = NibabelReader(squeeze_non_spatial_dims=True)
    with quiet_nifti():
        image = reader.read(path)
        array, meta = reader.get_data(image)
    _refuse_compound(array, path)
    affine = np.asarray(meta["affine"], np.float64)
    if array.ndim > 2 and isinstance(image.header, nibabel.Nifti1Header):
        with ImageOpener(path) as file:  # as it is stored: nibabel repairs the spacing, and MONAI gives up an affine that disagrees with it
            header = type(image.header).from_fileobj(file, check=False)
        affine = header.get_best_affine()
        for sides in (header["pixdim"][1:4], sides_of(affine)):
            check_spacing(sides, path)
    return array, in_millimetres(affine, image.header)


def in_millimetres(affine: np.ndarray, header: Any) -> np.ndarray:
    """A NIfTI file's affine in millimetres, whatever its unit of length.

    Args:
        affine: (4, 4), in that unit.
        header: nibabel's, of the file.
    """
    scaled = affine.copy()
    if hasattr(header, "get_xyzt_units"):
        scaled[:3] *= _MILLIMETRES.get(header.get_xyzt_units()[0], 1.0)
    return scaled
