"""How large an image may be, judged by its header before anything is unpacked: a file of a megabyte can hold many gigabytes."""

import math
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field
from pydantic.dataclasses import dataclass

from medflare.core.errors import ConfigError, DataError
from medflare.core.packages import installed
from medflare.core.settings import STRICT
from medflare.data.files.geometry import Grid, by
from medflare.data.files.kinds import NIFTI, PICTURES, dicom_files, explained, kind_of
from medflare.data.files.readers import quiet_nifti
from medflare.tasks.config import TaskConfig

OF_A_SITE: Final = "bounds.{} in local/medflare.json"
_PILLOW: Final = 178_956_970  # pixels beyond which Pillow opens no picture
_DECODED: Final = 4  # bytes of a float32
_DICOM_TAGS: Final = ["Rows", "Columns", "NumberOfFrames"]


@dataclass(frozen=True, config=STRICT)
class ImageBounds:
    """The most that one image may be, as stored.

    Attributes:
        pixels: of a picture, 8192 x 8192 unless a site says otherwise.
        voxels: of a volume with all its channels, 512 x 512 x 1024 unless a site says otherwise.
    """

    pixels: Annotated[int, Field(ge=1, le=_PILLOW)] = 2**26
    voxels: Annotated[int, Field(ge=1)] = 2**28


def refuse_large(files: Iterable[Path | None], bounds: ImageBounds, setting: str = OF_A_SITE) -> None:
    """Nothing where every file, by its header, holds an image within the bounds. Nothing is unpacked.

    Args:
        files: of an image or of masks; None is passed over.
        bounds: the site's.
        setting: where they can be raised; {} stands for "pixels" or "voxels".

    Raises:
        DataError: an image is larger, with the size that it would have, or a header that cannot be read.
    """
    for file in files:
        if file is None:
            continue
        kind = kind_of(file)
        with explained(file):
            shape, volume = _stored(file, kind)
        most, unit = (bounds.voxels, "voxels") if volume else (bounds.pixels, "pixels")
        if math.prod(shape) > most:
            size, memory = by(shape), math.prod(shape) * _DECODED / 2**30
            raise DataError(
                f"{file}: {size} {unit}, {memory:.3g} GiB once unpacked; this site takes {most} {unit} "
                f"({setting.format(unit)}): store the image smaller, or raise the bound"
            )


def refuse_large_size(task: TaskConfig, bounds: ImageBounds, place: str, setting: str = OF_A_SITE) -> None:
    """Nothing where the images that a task feeds its network are within the bounds.

    Args:
        task: gives their size.
        bounds: of whoever is to read them.
        place: the beginning of the message.
        setting: as for `refuse_large`.

    Raises:
        ConfigError: they are larger.
    """
    unit, most = ("pixels", bounds.pixels) if task.spatial_dims == 2 else ("voxels", bounds.voxels)
    if math.prod(task.size) > most:
        remedy = f"make it smaller, or raise {setting.format(unit)}"
        raise ConfigError(f"{place}: task {task.name} has size {by(task.size)}, more than {most} {unit}; {remedy}")


def refuse_resampled(path: Path, grid: Grid, task: TaskConfig, bounds: ImageBounds, setting: str = OF_A_SITE) -> None:
    """Nothing where a volume, with the task's spacing, is within the bounds and keeps every axis.

    Args:
        path: of the volume, for the message.
        grid: as stored.
        task: gives orientation, spacing and channels.
        bounds: the site's.
        setting: as for `refuse_large`.

    Raises:
        DataError: it would be larger, or an axis would be left with one voxel, as where millimetres are none.
    """
    if task.spacing is None or grid.spacing is None:
        return
    axes = grid.along(task.orientation)
    sides = [grid.spacing[axis] * (grid.shape[axis] - 1) / wanted for axis, wanted in zip(axes, task.spacing, strict=True)]
    shape = [math.floor(side + 0.5) + 1 for side in sides]
    size = f"with the task's spacing it has {' x '.join(map(str, shape))} voxels"
    stored = f"the file says {' x '.join(f'{side:g}' for side in grid.spacing)} mm; correct its header or the task's spacing"
    if task.image_channels * math.prod(shape) > bounds.voxels:
        raise DataError(f"{path}: {size}, this site takes {bounds.voxels} ({setting.format('voxels')}); {stored}")
    if any(side == 1 < grid.shape[axis] for axis, side in zip(axes, shape, strict=True)):
        raise DataError(f"{path}: {size}; {stored}")


def _stored(path: Path, kind: str) -> tuple[tuple[int, ...], bool]:
    """(sides, whether they are a volume's), by the header; none where only the reader can say what is wrong with the file."""
    if kind in PICTURES and installed("PIL"):
        return _picture(path), False
    if kind in NIFTI and installed("nibabel"):
        import nibabel

        with quiet_nifti():
            return tuple(map(int, nibabel.load(path).shape)), True
    if kind == "folder" and installed("pydicom"):
        slices = [_dicom(file) for file in dicom_files(path)]
        same = len(set(slices)) == 1
        return ((len(slices), *slices[0]) if same else (sum(map(math.prod, slices)),)), True
    if kind == ".dcm" and installed("pydicom"):
        shape = _dicom(path)
        return shape, len(shape) > 2
    return (), False


def _picture(path: Path) -> tuple[int, ...]:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the site's own bound decides
        try:
            with Image.open(path) as image:
                return image.height, image.width
        except Image.DecompressionBombError as error:
            raise DataError(f"{path}: {str(error).rstrip('.')}; store the picture smaller") from error


def _dicom(path: Path) -> tuple[int, ...]:
    from pydicom import dcmread

    header: Any = dcmread(path, stop_before_pixels=True, specific_tags=_DICOM_TAGS)
    frames = int(header.get("NumberOfFrames") or 1)
    plane = (int(header.get("Rows") or 0), int(header.get("Columns") or 0))
    return (frames, *plane) if frames > 1 else plane
