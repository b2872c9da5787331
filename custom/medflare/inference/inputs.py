"""The inputs of `medflare predict`: files, and folders with images and DICOM series."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from medflare.core.errors import ConfigError
from medflare.data.dicom import tags_of
from medflare.data.reading import DICOM, dicom_images, image_suffixes, stem, suffix
from medflare.preparation.dataset_import.folders import LeftOut, left_out_lines, walk

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Input:
    """One image or volume."""

    # A file, or a folder with one DICOM series; with a file for every channel, the first of them.
    path: Path
    # Path of its outputs in the output folder: unique, without suffix, with its subfolders.
    name: str
    # A file for every channel, None for a missing one; empty if one file has all channels.
    channels: tuple[Path | None, ...] = ()


def find_inputs(
    paths: Sequence[Path], out: Path, channels: Sequence[str] = ()
) -> tuple[list[Input], list[str]]:
    """All inputs, and a line for every folder without images.

    Inputs are in the order of `paths`, and sorted within a folder. A folder is searched with its
    subfolders except `out`, without segmentation objects; a warning names subfolders that are left
    out (see `folders.walk`). Its DICOM files are one volume if they are the slices of one series.
    With named channels, P07_flair.nii.gz and P07_post.nii.gz (or P07/flair and P07/post) are
    channels of one image, P07; so are nnU-Net's P07_0000.nii.gz and P07_0001.nii.gz.

    Raises:
        ConfigError: an input folder is the output folder.
    """
    # Image -> its name, and channel -> file.
    channels_of: dict[Path, tuple[str, dict[str, Path]]] = {}
    problems = []
    names = set[str]()
    prefixed = sum(path.is_dir() for path in paths) > 1
    for path in paths:
        if path.resolve() == out.resolve():
            raise ConfigError(
                f"{path} is both an input folder and the output folder; "
                "use another folder for --out"
            )
        images = list(_search(path, out.resolve())) if path.is_dir() else [path]
        if not images:
            problems.append(
                f"{path}: no images in this folder; known are "
                f"{', '.join((*image_suffixes(), *DICOM))}"
            )
        for image in images:
            whole, channel = _part_of(image, channels)
            key = whole.resolve()
            if key not in channels_of:
                root = path if path.is_dir() else whole
                name = _unique(_relative_name(whole, root, prefixed), names)
                channels_of[key] = name, {}
            first = channels_of[key][1].setdefault(channel, image)
            if first != image:
                problems.append(
                    f"{image}: {first.name} is channel {channel or 'image'} of this image, too; "
                    "take one of them out"
                )
    inputs = []
    for name, files in channels_of.values():
        listed = tuple(files.get(channel) for channel in channels)
        if set(files) == {""}:  # one file has all channels
            listed = ()
        file = next(filter(None, (*listed, *files.values())))
        inputs.append(Input(file, name, listed))
    return inputs, problems


def _part_of(image: Path, channels: Sequence[str]) -> tuple[Path, str]:
    """The image of a file, and the channel in the file's name; "" if there is none."""
    named = stem(image)
    for name in sorted(channels, key=len, reverse=True):
        if named == name:
            return image.parent, name
        if named.endswith((f"_{name}", f"-{name}")):
            return image.with_name(named[: -len(name) - 1]), name
    case, _, number = named.rpartition("_")
    if channels and case and number in _numbers(image, case, len(channels)):
        return image.with_name(case), channels[int(number)]
    return image, ""


def _numbers(image: Path, case: str, count: int) -> list[str]:
    """The numbers of nnU-Net's files of `count` channels; [] unless the files beside `image` are
    just these, as images in a row are not.
    """
    numbers = [f"{number:04d}" for number in range(count + 1)]
    ending = image.name.removeprefix(stem(image))
    *files, beyond = (image.with_name(f"{case}_{number}{ending}") for number in numbers)
    if all(file.exists() for file in files) and not beyond.exists():
        return numbers[:-1]
    return []


def _search(folder: Path, out: Path) -> Iterator[Path]:
    left_out: LeftOut = {}
    for subfolder, files in walk(folder, left_out):
        if subfolder.resolve().is_relative_to(out):
            continue
        dicom = list(dicom_images(files, segmentations=False))
        if is_series(dicom):
            yield subfolder
        else:
            yield from dicom
        yield from (file for file in files if suffix(file) in image_suffixes())
    for line in left_out_lines(left_out):
        _log.warning("%s: %s", folder, line)


def is_series(files: Sequence[Path]) -> bool:
    """Whether these DICOM files are the slices of one volume: of one series and size, with
    different numbers and positions.
    """
    tags = ["SeriesInstanceUID", "Rows", "Columns", "InstanceNumber", "ImagePositionPatient"]
    series = set()
    places = set()
    for file in files:
        try:
            header = tags_of(file, *tags)
            *same, number, position = (header[tag].value for tag in tags)
            places.add((str(number), *map(float, position)))
        except Exception:  # no attribute, or no readable file: the reader reports the problem
            return False
        series.add(tuple(map(str, same)))
    return len(files) > 1 and len(series) == 1 and len(places) == len(files)


def _relative_name(image: Path, root: Path, prefixed: bool) -> Path:
    """The name without suffix, relative to the folder `root`, below that folder's name if
    `prefixed` (for several folders).
    """
    if image == root:
        return Path(stem(image) or image.resolve().name)
    below = image.relative_to(root).with_name(stem(image))
    return Path(root.resolve().name) / below if prefixed else below


def _unique(name: Path, used: set[str]) -> str:
    """The name, with a number if it is in use."""
    unique = str(name)
    number = 1
    while unique in used:
        number += 1
        unique = f"{name}-{number}"
    used.add(unique)
    return unique
