"""Images whose channels may lie in files of their own: which files stand for which channel, and the image that they make."""

from pathlib import Path
from typing import Final

import numpy as np

from medflare.core.errors import DataError
from medflare.data.files.acquisition import differ
from medflare.data.files.geometry import by
from medflare.data.files.kinds import PICTURES, suffix
from medflare.data.files.readers import read_image
from medflare.data.files.volumes import slices_apart
from medflare.tasks.config import TaskConfig

Files = tuple[Path | None, ...]  # one a channel, None for zeros; or one that holds all


def files_of(listed: Files, task: TaskConfig, place: str) -> Files:
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
            remedy = "list each channel's own, or null for one that is missing"
            raise DataError(f"{place}: channels {other} and {name} are one file, {file}; {remedy}")
    return found


def refuse_empty(image: np.ndarray, files: Files) -> None:
    """Nothing where some channel of an image varies; one that does not may stand in for what was not taken.

    Args:
        image: (C, ...), as stored.
        files: that it was read from.

    Raises:
        DataError: every channel is one number, as an export leaves it that went wrong.
    """
    if any(channel.min() < channel.max() for channel in image):
        return
    place, file = next((place, file) for place, file in enumerate(files) if file is not None)
    values = ", ".join(f"{channel.flat[0]:g}" for channel in (image if len(files) == 1 else image[[place]]))
    unit = "pixel" if image.ndim == 3 else "voxel"
    raise DataError(f"{file}: empty, every {unit} is {values}; export the image again or leave it out")


def read_picture(files: Files, task: TaskConfig) -> np.ndarray:
    """A picture, or a volume that is cut into slices, as stored: float32 (C, H, W) or (C, H, W, slices).

    Args:
        files: see `Files`.
        task: gives the number of channels.

    Raises:
        DataError: a file that cannot be read, or channels of different sizes or places.
    """
    if len(files) == 1 and files[0] is not None:
        return read_image(files[0], task.image_channels, task.pick)
    arrays = {file: read_image(file, 1) for file in files if file is not None}
    name, first = next(iter(arrays.items()))
    for file, array in arrays.items():
        if array.shape != first.shape:
            raise DataError(f"{file}: {by(array.shape[1:])}, {name.name} is {by(first.shape[1:])}; store all channels at one size")
        if file != name and (difference := slices_apart(name, file)):
            raise DataError(f"{file}: lies on another grid than {name.name} ({difference}); resample one to the other first")
    return np.concatenate([np.zeros_like(first) if file is None else arrays[file] for file in files])


def in_colour(files: Files, task: TaskConfig) -> bool:
    """Whether a picture that a task reads as one grey channel is stored in colours; of a small copy, since it is read once more for it.

    Args:
        files: of the picture.
        task: gives the channels.
    """
    if task.image_channels != 1 or len(files) != 1 or files[0] is None or suffix(files[0]) not in PICTURES:
        return False
    from PIL import Image

    with Image.open(files[0]) as picture:
        if len(picture.getbands()) < 3 and picture.mode != "P":
            return False
        colours = np.asarray(picture.convert("RGB").resize((_SMALL, _SMALL)), np.float64)
    return differ(colours.reshape(-1, 3).T)


_SMALL: Final = 64  # pixels
