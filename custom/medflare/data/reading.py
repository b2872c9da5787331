"""Image files as arrays: pictures by Pillow, NIfTI by nibabel, DICOM files and series by pydicom. There is one reader for all.

A stored image is (C, i, j) or (C, i, j, k), with i along the columns of a picture or of a DICOM slice, or along a NIfTI file's first axis.
A task of volumes takes it along its own orientation and spacing, a task of pictures as slices (C, rows, columns, slices). Then NIfTI
volumes are turned to LPS, so that rows run to posterior and columns to the patient's left, as DICOM slices of the same scan lie.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from medflare.core.errors import ConfigError, DataError, one_line
from medflare.core.packages import require
from medflare.core.settings import STRICT
from medflare.data import dicom
from medflare.data.geometry import Grid, apply_turn, by
from medflare.tasks.config import TaskConfig

if TYPE_CHECKING:  # a site's own settings are read without torch
    from torch import Tensor

PICTURES: Final = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
NIFTI: Final = (".nii", ".nii.gz")
DICOM: Final = (".dcm", ".dicom", ".ima")
GREY: Final = ("1", "L", "I", "F")  # Pillow's modes, I;16 too, that are read as they are; every other becomes RGB
LUMA: Final = (0.299, 0.587, 0.114)  # of red, green and blue (ITU-R BT.601)
_SLICES: Final = "LPS"  # how volumes lie that are cut into slices
_COLOURED: Final = 0.02  # share of the brightest value by which channels differ from which a picture counts as coloured
_PILLOW: Final = 178_956_970  # pixels beyond which Pillow opens no picture
_OTHER_UNITS: Final = {1: "metres", 3: "micrometres"}  # NIfTI's codes of lengths that are not millimetres
_RAISE: Final = "raise bounds.{0} in local/medflare.json, or --max-{0} of predict"


@dataclass(frozen=True, config=STRICT)
class ImageBounds:
    """The most that one image may be, as stored: a file of a megabyte can hold many gigabytes.

    Attributes:
        pixels: of a picture, 8192 x 8192 unless a site says otherwise.
        voxels: of a volume with all its channels, 512 x 512 x 1024 unless a site says otherwise.
    """

    pixels: Annotated[int, Field(ge=1, le=_PILLOW)] = 2**26
    voxels: Annotated[int, Field(ge=1)] = 2**28

    def check(self, path: Path, shape: Sequence[int], *, volume: bool) -> None:
        """Refuse an image by the size that its header gives, before anything is unpacked.

        Raises:
            DataError: it is larger.
        """
        unit, most = ("voxels", self.voxels) if volume else ("pixels", self.pixels)
        if math.prod(shape) > most:
            memory = math.prod(shape) * 4 / 2**30  # float32
            raise DataError(
                f"{path}: {by(shape)} {unit}, {memory:.3g} GiB once unpacked, above the bound of {most}; "
                f"store the image smaller, or {_RAISE.format(unit)}"
            )

    def check_task(self, task: TaskConfig, place: str) -> None:
        """Refuse a task by the size of the images that it feeds its network.

        Raises:
            ConfigError: they are larger.
        """
        unit, most = ("pixels", self.pixels) if task.spatial_dims == 2 else ("voxels", self.voxels)
        if math.prod(task.size) > most:
            raise ConfigError(f"{place}: task {task.name} has size {by(task.size)}, more than {most} {unit}; {_RAISE.format(unit)}")

    def check_resampled(self, path: Path, grid: Grid, task: TaskConfig) -> None:
        """Refuse a volume by the size that it has with the task's spacing, as where the header's millimetres are none.

        Raises:
            DataError: it would be larger, or an axis would be left with one voxel.
        """
        if task.spacing is None or not grid.known:
            return
        here = grid.turned(task.orientation)
        assert here.spacing is not None
        pairs = zip(here.spacing, here.shape, task.spacing, strict=True)
        shape = [math.floor(side * (count - 1) / wanted + 0.5) + 1 for side, count, wanted in pairs]
        stored = f"with the task's spacing it has {by(shape)} voxels; its header says {by(grid.spacing or ())} mm"
        if task.image_channels * math.prod(shape) > self.voxels:
            raise DataError(f"{path}: {stored}; correct one of them, or {_RAISE.format('voxels')}")
        if any(new == 1 < old for old, new in zip(here.shape, shape, strict=True)):
            raise DataError(f"{path}: {stored}; correct one of them")


class Image(NamedTuple):
    """An image as a task takes it, before its intensities and size are changed.

    Attributes:
        array: float32 (C, H, W[, slices]), or a volume (C, X, Y, Z) along the task's axes.
        stored: where the voxels lie as stored; None of pictures.
        here: where those of the array lie; None of pictures.
        coloured: whether it is one grey channel of a picture in colours.
    """

    array: np.ndarray
    stored: Grid | None = None
    here: Grid | None = None
    coloured: bool = False


class Stored(NamedTuple):
    """What a file or a series holds: (C, i, j[, k]), the place of its voxels, and whether channels are red, green and blue."""

    array: np.ndarray
    grid: Grid | None = None
    colours: bool = False
    nifti: bool = False


# -- files -----------------------------------------------------------------------------------------------------------------


def suffix(path: PurePath) -> str:
    """A file's suffix in lower case, ".nii.gz" as a whole."""
    return ".nii.gz" if path.name.lower().endswith(".nii.gz") else path.suffix.lower()


def stem(path: PurePath) -> str:
    """A file's name without its suffix, ".nii.gz" as a whole; one that is no image's stays, as the end of a DICOM file's number does.

    Examples:
        >>> stem(Path("a/scan.1.NII.gz")), stem(Path("1.2.840.10008")), stem(Path(".png"))
        ('scan.1', '1.2.840.10008', '.png')
    """
    return path.name[: len(path.name) - len(suffix(path))] if suffix(path) in (*PICTURES, *NIFTI, *DICOM) else path.name


def is_dicom(path: Path) -> bool:
    """Whether a file is DICOM: by its suffix, and where that says nothing (many archives give none), by its content."""
    if suffix(path) in DICOM:
        return True
    if suffix(path) in (*PICTURES, *NIFTI) or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"  # PS3.10, Sec. 7.1


def dicom_images(files: Iterable[Path]) -> Iterator[Path]:
    """Those that are DICOM and hold rows of pixels: directories, reports and presentation states hold none. Opened when asked for."""
    return (file for file in files if file.is_file() and is_dicom(file) and _has_rows(file))


def dicom_files(path: Path) -> list[Path]:
    """The DICOM images of a folder, by name; or the file itself."""
    return sorted(dicom_images(path.iterdir())) if path.is_dir() else [path]


def _has_rows(path: Path) -> bool:
    from pydicom import dcmread

    try:
        return "Rows" in dcmread(path, stop_before_pixels=True, specific_tags=["Rows"])
    except Exception:  # its reader will say what is wrong with the file
        return True


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Whatever goes wrong while a file is read, as one line that names it. A pipe or a device, which may never end, is not opened.

    Raises:
        DataError: something did, or it is neither a file nor a folder.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise DataError(f"{path}: is neither a regular file nor a folder (a pipe, a socket or a device); replace it or leave it out")
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path}: file not found; correct the path (upper case counts) or restore the file") from error
    except PermissionError as error:
        raise DataError(f"{path}: may not be read; let the account that runs the site read it, and the folders above it") from error
    except Exception as error:  # decoders raise whatever they like on a damaged file
        raise DataError(f"{path}: cannot be read as an image ({one_line(error)}); replace the file or leave it out") from error


# -- what a file holds -----------------------------------------------------------------------------------------------------


def read_stored(path: Path, bounds: ImageBounds = ImageBounds(), *, mask: bool = False) -> Stored:
    """What a file, or a folder with one DICOM series, holds. Its header is checked before its pixels are unpacked.

    Args:
        path: of the file or folder.
        bounds: how large it may be.
        mask: whether its numbers are labels, which no palette and no inversion changes.

    Raises:
        DataError: it is missing, unreadable, too large, of an unknown format or no image.
    """
    with explained(path):
        if path.is_dir() or is_dicom(path):
            require("pydicom", f"{path}: a DICOM image", DataError)
            stored = _read_dicom(path, bounds, mask)
        elif suffix(path) in NIFTI:
            require("nibabel", f"{path}: a NIfTI image", DataError)
            stored = _read_nifti(path, bounds)
        elif suffix(path) in PICTURES:
            require("PIL", f"{path}: a picture", DataError)
            stored = _read_picture(path, bounds, mask)
        else:
            path.stat()
            known = ", ".join((*PICTURES, *NIFTI, *DICOM))
            raise DataError(f"{path}: unknown image format {suffix(path)!r}; known are {known} and folders with a DICOM series")
    array = stored.array
    if array.ndim not in (3, 4) or not array.size:
        raise DataError(f"{path}: expected a picture or a volume, found an array of shape {array.shape}")
    if array.dtype.fields or np.iscomplexobj(array):
        raise DataError(f"{path}: its voxels are colours or complex numbers, not one number each; store each part as a channel")
    return stored


def _read_picture(path: Path, bounds: ImageBounds, mask: bool) -> Stored:
    from PIL import Image as Pillow
    from PIL import ImageOps

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Pillow.DecompressionBombWarning)  # the site's own bound decides
        with Pillow.open(path) as image:
            bounds.check(path, (image.height, image.width), volume=False)
            if getattr(image, "n_frames", 1) > 1 and image.format == "TIFF":
                raise DataError(f"{path}: the file holds {image.n_frames} pages; store pages as files or as a NIfTI volume")
            image = ImageOps.exif_transpose(image)  # a camera held upright stores the picture lying
            if mask and "A" in image.getbands() and len(set(image.getchannel("A").getextrema())) > 1:
                raise DataError(f"{path}: the mask is drawn in its transparency; store label values in one grey mask")
            if image.mode == "LA":
                image = image.convert("L")
            elif image.mode.split(";")[0] not in GREY and not (mask and image.mode == "P"):
                image = image.convert("RGB")
            array = np.asarray(image)
    if array.ndim == 2:
        return Stored(array.T[None])
    return Stored(np.moveaxis(array, -1, 0).swapaxes(1, 2), colours=True)


def _read_nifti(path: Path, bounds: ImageBounds) -> Stored:
    with quiet_nibabel():
        import nibabel

        image: Any = nibabel.load(path)
        _check_unit(path, image.header)
        bounds.check(path, image.shape, volume=True)
        array = np.asanyarray(image.dataobj)
    array = array.squeeze(axis=tuple(axis for axis in range(3, array.ndim) if array.shape[axis] == 1))
    if array.ndim == 2:
        return Stored(array[None], nifti=True)
    grid = Grid(array.shape[:3], np.asarray(image.affine, np.float64))
    grid.check(path)
    return Stored(np.moveaxis(array, -1, 0) if array.ndim == 4 else array[None], grid, nifti=True)


def _check_unit(path: Path, header: Any) -> None:
    """Reject a file whose lengths are in metres or micrometres; an unknown unit counts as millimetres."""
    if unit := _OTHER_UNITS.get(int(header["xyzt_units"]) & 7):  # the three lowest bits: the unit of length
        raise DataError(f"{path}: the header gives lengths in {unit}, expected mm; convert spacing and affine to mm and set xyzt_units")


@contextmanager
def quiet_nibabel() -> Iterator[None]:
    """nibabel logs what it repairs in a header."""
    from nibabel.imageglobals import logger

    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _read_dicom(path: Path, bounds: ImageBounds, mask: bool) -> Stored:
    from pydicom import dcmread

    slices = []
    for file in _files_of_series(path):
        with explained(file):
            slices.append(dcmread(file))
    frames = [int(one.get("NumberOfFrames") or 1) for one in slices]
    if len(slices) > 1 and max(frames) > 1:
        raise DataError(f"{path}: {len(slices)} files lie in the folder, of several frames each; name the one that is meant")
    shape = (len(slices) * max(frames), int(slices[0].Rows), int(slices[0].Columns))
    bounds.check(path, shape if shape[0] > 1 else shape[1:], volume=shape[0] > 1)
    slices = dicom.in_order(slices, path)
    arrays, colours = zip(*(dicom.pixels(one, mask=mask) for one in slices), strict=True)
    array = arrays[0] if len(slices) == 1 else np.stack(arrays, axis=2)
    grid = dicom.grid_of(slices) if len(slices) > 1 else None
    return Stored(np.moveaxis(array, -1, 0) if colours[0] else array[None], grid, colours=colours[0])


def _files_of_series(path: Path) -> list[Path]:
    files = dicom_files(path)
    if not files:
        raise DataError(f"{path}: a folder without DICOM images; name the image's own file, or the folder of one series")
    return files


def series_grid(path: Path) -> Grid:
    """Where the voxels (column, row, slice) of a DICOM file or series lie, by its headers alone.

    Raises:
        DataError: see `dicom.in_order`.
    """
    from pydicom import dcmread

    with explained(path):
        slices = [dcmread(file, stop_before_pixels=True, specific_tags=list(dicom.HEADER)) for file in _files_of_series(path)]
        return dicom.grid_of(dicom.in_order(slices, path))


# -- images and masks ------------------------------------------------------------------------------------------------------


def files_of(listed: Sequence[Path | None], task: TaskConfig, place: str) -> tuple[Path | None, ...]:
    """The files of an image's channels, None for a channel that is to be zeros.

    Args:
        listed: a file for each channel; None, or one that does not exist, for a channel that is missing.
        task: gives the channels, and what a missing one means.
        place: the beginning of a message.

    Raises:
        DataError: other channels than the task's, a missing one, one file for two of them, or none at all.
    """
    named, zeros = task.channel_names or tuple(map(str, range(task.image_channels))), task.missing_channels == "zeros"
    if len(listed) != len(named):
        raise DataError(f"{place}: {len(listed)} files for {len(named)} channels ({', '.join(named)}); list one for each")
    found = tuple(file if file is not None and (file.exists() or not zeros) else None for file in listed)
    if None in found and not zeros:
        missing = named[found.index(None)]
        raise DataError(f"{place}: channel {missing} is missing; add its file, or say missing_channels 'zeros' in the task")
    if not any(found):
        raise DataError(f"{place}: none of the image's files exists; correct the paths or restore the files")
    first: dict[Path, str] = {}
    for name, file in zip(named, found, strict=True):
        if file is not None and (other := first.setdefault(file.resolve(), name)) != name:
            raise DataError(
                f"{place}: channels {other} and {name} are one file, {file}; list each channel's own, or null for one that is missing"
            )
    return found


def read_image(files: Sequence[Path | None], task: TaskConfig, bounds: ImageBounds = ImageBounds()) -> Image:
    """An image of one file, or of a file for each channel, as the task takes it.

    Where a task of pictures takes one channel, colours become luminance; where it takes three, grey is repeated. Volumes of a 4-D file are
    no colours: they are the channels, or those of them that the task picks.

    Args:
        files: None stands for zeros. The other channels are turned as the first one lies.
        task: gives channels, orientation and spacing.
        bounds: how large an image may be.

    Raises:
        DataError: a file that cannot be read, is too large, holds NaN, or has other channels than the task; channels on different grids.
    """
    arrays: list[np.ndarray | None] = []
    path, first, coloured = Path(), Stored(np.zeros(0)), False
    for file in files:
        if file is None:
            arrays.append(None)
            continue
        stored = read_stored(file, bounds)
        if task.spatial_dims == 3:
            _check_volume(stored, file)
        array, seen = _channels(stored, task, 1 if len(files) > 1 else task.image_channels, file)
        if task.spatial_dims == 2:
            array = _as_slices(array, stored)
        coloured = coloured or seen
        if not first.array.size:
            path, first = file, stored
        elif task.spatial_dims == 3 and first.grid is not None and stored.grid is not None:
            refuse_apart(file, stored.grid.turned(first.grid.codes), path, first.grid)
            array = apply_turn(array, stored.grid.turn(first.grid.codes))
        else:
            refuse_apart(file, _grid_of_slices(stored), path, _grid_of_slices(first))
        like = next((one for one in arrays if one is not None), array)
        if array.shape[1:] != like.shape[1:]:
            raise DataError(f"{file}: {by(array.shape[1:])}, {path.name} is {by(like.shape[1:])}; store all channels at one size")
        arrays.append(array)
    like = next(array for array in arrays if array is not None)
    array = like if len(arrays) == 1 else np.concatenate([np.zeros_like(like[:1]) if one is None else one for one in arrays])
    if task.spatial_dims == 2:
        return Image(array, first.grid, _grid_of_slices(first), coloured)
    assert first.grid is not None
    bounds.check_resampled(path, first.grid, task)
    array, here = resampled(array, first.grid, task)
    return Image(array, first.grid, here, coloured)


def _check_volume(stored: Stored, path: Path) -> None:
    if stored.grid is None:
        raise DataError(f"{path}: no volume, the task has spatial_dims 3; give NIfTI files, or folders with a DICOM series")
    stored.grid.check(path)


def _channels(stored: Stored, task: TaskConfig, wanted: int, path: Path) -> tuple[np.ndarray, bool]:
    """So many channels as float32, and whether one of them stands for colours that differ."""
    with np.errstate(over="ignore"):  # what float32 does not hold becomes infinite
        array = stored.array.astype(np.float32)
    if not np.isfinite(array).all():
        raise DataError(f"{path}: the image holds NaN or infinite values; repair it or leave it out")
    coloured = stored.colours and wanted == 1 and differ(array.reshape(len(array), -1))
    if task.pick and wanted == task.image_channels and stored.nifti:
        if max(task.pick) >= len(array):
            raise DataError(f"{path}: the image has {len(array)} channels, the task picks number {max(task.pick)} (from 0)")
        array = array[list(task.pick)]
    elif task.spatial_dims == 2 and stored.colours and wanted == 1:
        array = np.tensordot(np.array(LUMA, np.float32), array.swapaxes(1, 2), axes=1)[None].astype(np.float32).swapaxes(1, 2)
    elif task.spatial_dims == 2 and len(array) == 1 and wanted == 3:
        array = np.repeat(array, 3, axis=0)
    if len(array) != wanted:
        more = ", or say in the task which of them it means (pick)" if len(array) > wanted else ""
        raise DataError(
            f"{path}: the image has {len(array)} channels, the task takes {wanted}; correct the file or the task's channels{more}"
        )
    return array, coloured


def _grid_of_slices(stored: Stored) -> Grid | None:
    """Where the voxels lie whose slices are pictures; a series' own axes are taken as they are."""
    if stored.grid is None or not stored.grid.known:
        return None
    return stored.grid.turned(_SLICES) if stored.nifti else stored.grid


def _as_slices(array: np.ndarray, stored: Stored) -> np.ndarray:
    """(C, i, j[, k]) as pictures (C, rows, columns[, slices])."""
    if stored.nifti and stored.grid is not None:
        array = apply_turn(array, stored.grid.turn(_SLICES))
    return array.swapaxes(1, 2)


def refuse_apart(file: Path, grid: Grid | None, other: Path, there: Grid | None) -> None:
    """Refuse a mask or channel that lies on another grid than its image, of those files that say where they lie.

    Raises:
        DataError: it does.
    """
    if grid is not None and there is not None and (difference := there.difference(grid)):
        raise DataError(f"{file}: lies on another grid than {other.name} ({difference}); resample one to the other")


def differ(channels: np.ndarray) -> bool:
    """Whether colour channels (C, P) differ by more than what compression does to a grey picture.

    Examples:
        >>> differ(np.array([[0, 100], [0, 100], [0, 101]])), differ(np.array([[0, 100], [0, 50], [0, 0]]))
        (False, True)
    """
    span = channels.max(axis=0) - channels.min(axis=0)
    return bool(span.mean() > _COLOURED * np.abs(channels).max())


def resampled(array: np.ndarray, grid: Grid, task: TaskConfig, *, labels: bool = False) -> tuple[np.ndarray, Grid]:
    """A volume (C, i, j, k) along the task's axes and with its spacing, and where it lies then.

    Args:
        array: as stored.
        grid: where it lies.
        task: gives orientation and spacing.
        labels: take the nearest voxel where it is resampled, and keep the type; else interpolate.
    """
    if not grid.known:
        return array, grid
    array, here = np.ascontiguousarray(apply_turn(array, grid.turn(task.orientation))), grid.turned(task.orientation)
    if task.spacing is None:
        return array, here
    import torch
    from monai.data.meta_tensor import MetaTensor
    from monai.transforms.spatial.array import Spacing

    volume: Any = MetaTensor(torch.as_tensor(array, dtype=torch.float32), affine=torch.as_tensor(here.affine))
    volume = Spacing(task.spacing, mode="nearest" if labels else "bilinear", padding_mode="border")(volume)
    values = volume.numpy().round().astype(array.dtype) if labels else volume.numpy()
    return values, Grid(tuple(values.shape[1:]), volume.affine.numpy().astype(np.float64))


def turned_back(values: "Tensor", here: Grid, stored: Grid, task: TaskConfig) -> "Tensor":
    """What `resampled` did to a volume undone, exactly but for what resampling loses.

    Args:
        values: float32 (C, ...) on the grid that `resampled` gave.
        here: that grid.
        stored: where the volume was.
        task: as for `resampled`.

    Returns:
        float32 (C, i, j, k) on the stored grid.
    """
    import torch
    from monai.data.meta_tensor import MetaTensor
    from monai.transforms.spatial.array import SpatialResample

    if not stored.known:
        return values
    there = stored.turned(task.orientation)
    if task.spacing is not None:
        volume = MetaTensor(values, affine=torch.as_tensor(here.affine))
        resample = SpatialResample(mode="bilinear", padding_mode="border")
        found = resample(volume, dst_affine=torch.as_tensor(there.affine), spatial_size=there.shape)
        values = torch.as_tensor(found).as_subclass(torch.Tensor)
    return torch.as_tensor(apply_turn(values.cpu().numpy(), there.turn(stored.codes)))


def read_mask(
    path: Path, image: Path, place: Image | None, task: TaskConfig, bounds: ImageBounds = ImageBounds(), *, several: bool = False
) -> tuple[np.ndarray, list[tuple[str, int]]]:
    """Label values as the task takes them, laid out as their image; and label and number of every segment of a DICOM segmentation.

    Args:
        path: of the mask.
        image: file of its image, for messages.
        place: where the image lies; None: it is not compared.
        task: gives axes, orientation and spacing.
        bounds: how large a mask may be.
        several: whether each channel is a structure's own mask; else channels that are alike are one mask, saved in colours.

    Returns:
        int64 (M, ...), and the segments; none of other files.

    Raises:
        DataError: as `read_image`, or values that are not whole numbers, or a mask on another grid than its image.
    """
    named: list[tuple[str, int]] = []
    if is_segmentation(path):
        stored, named = _read_segmentation(path, image, place)
    else:
        stored = read_stored(path, bounds, mask=True)
    whole = label_values(stored.array, path, several=several or bool(named))
    if task.spatial_dims == 2:
        if place is not None:
            refuse_apart(path, _grid_of_slices(stored), image, place.here)
        return _as_slices(whole, stored), named
    _check_volume(stored, path)
    assert stored.grid is not None
    if place is not None and place.stored is not None:
        refuse_apart(path, stored.grid.turned(task.orientation), image, place.stored.turned(task.orientation))
    return resampled(whole, stored.grid, task, labels=True)[0], named


def label_values(array: np.ndarray, path: Path, *, several: bool = False) -> np.ndarray:
    """Masks (M, ...) as int64; one of them where all are alike, unless several are meant.

    Raises:
        DataError: values that are not whole numbers.
    """
    whole = np.nan_to_num(array, nan=0.5, posinf=0.5, neginf=0.5).round().astype(np.int64)
    if not (whole == array).all():
        raise DataError(f"{path}: the mask holds values that are not whole numbers; store label values 0, 1, 2, ...")
    return whole[:1] if not several and (whole == whole[:1]).all() else whole


def is_segmentation(path: Path) -> bool:
    """Whether a file is a DICOM segmentation object."""
    with explained(path):
        if not path.is_file() or not is_dicom(path):
            return False
        from pydicom import dcmread

        return str(dcmread(path, stop_before_pixels=True, specific_tags=["SOPClassUID"]).get("SOPClassUID", "")) == dicom.SEGMENTATION


def _read_segmentation(path: Path, image: Path, place: Image | None) -> tuple[Stored, list[tuple[str, int]]]:
    from pydicom import dcmread

    if place is None or place.stored is None or not image.is_dir():
        raise DataError(f"{path}: a DICOM segmentation, whose image must be a folder with its series")
    with explained(path):
        series = dcmread(dicom_files(image)[0], stop_before_pixels=True, specific_tags=["SeriesInstanceUID"])
        masks, named = dicom.segments(dcmread(path), path, str(series.SeriesInstanceUID), place.stored)
    return Stored(masks, place.stored), named
