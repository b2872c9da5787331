"""A site's `datalist.json` (MONAI / Decathlon layout) and its splits.

All images of a patient are in one split.
"""

import json
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from medflare.core.errors import DataError
from medflare.core.rng import numpy_generator
from medflare.core.settings import checked, strict_dataclass, takes
from medflare.core.text import printable, read_json
from medflare.data.attributes import NO_ATTRIBUTES, OLDEST, Attributes, parse_attributes
from medflare.data.local import DATA_FOLDERS_VARIABLE, PLACE, allowed_folders

FILE = "datalist.json"
# Of the patients, where splits are drawn by default.
SHARES = {"training": 7, "validation": 1, "test": 2}
LISTS = tuple(SHARES)
# The data that `load_site_data` makes of them.
SPLITS = ("train", "validation", "test")
_REMEDY = 'an entry is an object {"image": FILE, "label": ...}; complete it or take it out'

_TextOrNull = Annotated[str | int | float | None, takes("a text, or null")]


@strict_dataclass
class _Listed:
    """An entry of the file for classification."""

    image: Annotated[
        str | Annotated[tuple[str | None, ...], Field(min_length=1)],
        takes("an image file, or a list of files, one a channel, null for none"),
    ]
    label: Any  # see `targets.encode_label`
    patient: str | int | float = ""
    # See `attributes`; null where it is unknown.
    sex: _TextOrNull = None
    age: Annotated[str | int | float | None, takes("a number of years, or null")] = None
    scanner: _TextOrNull = None


@strict_dataclass
class _ListedWithMasks(_Listed):
    """An entry of the file for segmentation."""

    label: Annotated[
        str | Annotated[tuple[str, ...], Field(min_length=1)],
        takes("a mask file or a list of them, as the task segments"),
    ]


@dataclass(frozen=True)
class DatalistItem:
    """An image of the datalist."""

    image: Path
    # Path or list of Paths (segmentation), int or list of 0/1 (classification); None at a site
    # without labels
    label: Any
    patient: str  # the image's file name where the datalist names no patient
    split: str  # of `LISTS`: the list that it is in, or that `assign_splits` has drawn
    location: str  # "DIR/datalist.json training[3]", for messages
    # a file for every channel, None for one that is missing; empty where one file holds all
    channels: tuple[Path | None, ...] = ()
    attributes: Attributes = NO_ATTRIBUTES  # for results by group

    @property
    def name(self) -> str:
        """The image's file name, printable."""
        return printable(self.image.name)

    @property
    def files(self) -> tuple[Path | None, ...]:
        """The files of the image, in the order of the channels."""
        return self.channels or (self.image,)

    @property
    def masks(self) -> list[Path]:
        """Its mask files; empty in classification."""
        labels = self.label if isinstance(self.label, list) else [self.label]
        return [label for label in labels if isinstance(label, Path)]

    @property
    def paths(self) -> list[Path]:
        """The files of the image and of its masks."""
        return [*filter(None, self.files), *self.masks]


# -- folders ---------------------------------------------------------------------------------------


def site_folders(root: Path) -> list[Path]:
    """The sites' folders: `root` if it holds a datalist.json, else its subfolders that do, sorted;
    DataError if there is none.
    """
    if not root.is_dir():
        raise DataError(
            f"{root}: not a folder; give a site's folder or the folder of several sites"
        )
    if (root / FILE).is_file():
        return [root]
    folders = sorted(path.parent for path in root.glob(f"*/{FILE}"))
    if not folders:
        raise DataError(
            f"{root}: neither a {FILE} nor folders that hold one; "
            f"give a site's folder or the folder of several sites, or write a {FILE} with: "
            f"medflare data init {shlex.quote(str(root))}"
        )
    return folders


def folders_without_datalist(root: Path) -> list[Path]:
    """Subfolders beside the sites that hold no datalist.json, sorted, without hidden ones."""
    folders = []
    for path in sorted(root.iterdir()):
        hidden = path.name.startswith(".")
        if path.is_dir() and not hidden and not (path / FILE).is_file():
            folders.append(path)
    return folders


def site_name(folder: Path) -> str:
    """A site's name: that of its folder. A link keeps its own name; "." and ".." are resolved."""
    if folder.name in ("", ".."):
        return folder.resolve().name
    return folder.name


def has_test_only(folder: Path) -> bool:
    """Whether a site has test images only, so that it can only be an outside site."""
    return {entry.split for entry in read_datalist(folder, "classification")} == {"test"}


# -- the file --------------------------------------------------------------------------------------


def read_content(folder: Path) -> Mapping[str, Any]:
    """The JSON object of a site's datalist.json; its entries are not checked.

    Raises:
        DataError: the file is missing, not JSON, or has none of the three lists.
    """
    path = folder / FILE
    try:
        content = read_json(path)
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; "
            "a site's folder needs a datalist.json that the site's account may read"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error}); write it again") from error
    if not isinstance(content, Mapping) or content.keys().isdisjoint(LISTS):
        raise DataError(
            f"{path}: no list named training, validation or test; use the MONAI / Decathlon layout"
        )
    return content


def kind_of_labels(entries: Sequence[DatalistItem]) -> str:
    """The kind of a task, "segmentation" or "classification", by the label of the first of some
    items that were read for classification: mask files are texts.
    """
    label = entries[0].label
    parts = label if isinstance(label, list) else [label]
    if all(isinstance(part, str) for part in parts):
        return "segmentation"
    return "classification"


def read_datalist(
    folder: Path, kind: str, folders: Sequence[str | Path] = ()
) -> list[DatalistItem]:
    """All items, in the order of the file.

    Args:
        kind: of the task, "segmentation" or "classification".
        folders: further folders in which files may be, see `local.allowed_folders`. Links are
            resolved first.

    Raises:
        DataError: see `read_content`; or an entry lacks its image or label, is listed twice, or
            names a file in another folder.
    """
    path = folder / FILE
    content = read_content(folder)
    unlabelled = annotated_names(content, folder) == ()
    entries = []
    for split in LISTS:
        listed = content.get(split)
        if listed is None:
            continue
        if not isinstance(listed, list):
            raise DataError(
                f"{path}: {split!r} must be a list of entries, found {type(listed).__name__}"
            )
        for number, item in enumerate(listed):
            location = f"{path} {split}[{number}]"
            entries.append(_entry(folder, item, split, location, kind, unlabelled))
    allowed = [path.resolve() for path in (folder, *allowed_folders(folders))]
    images: dict[Path, DatalistItem] = {}
    for entry in entries:
        for file in entry.paths:
            check_folder(file, allowed, entry.location)
            for inner in os.scandir(file) if file.is_dir() else ():
                if inner.is_symlink():  # a slice
                    check_folder(Path(inner.path), allowed, entry.location)
        same = images.setdefault(entry.image.resolve(), entry)
        if same is not entry:
            raise DataError(
                f"{entry.location}: image {entry.name} is also in {same.location}; list it once"
            )
    return entries


def check_folder(
    file: Path, allowed: Sequence[Path], location: str, remedy: str = "move it there"
) -> None:
    """Raise DataError for a file, or the file that a link names, in no `allowed` folder (resolved).

    A datalist that another party wrote must not read other files that the account can read.
    """
    try:
        resolved = file.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        # No permission, no valid name, or a circle of links.
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"{location}: {str(file)!r:.300} cannot be opened ({reason}); "
            "correct the path, or let the site's account read it"
        ) from error
    if any(resolved.is_relative_to(folder) for folder in allowed):
        return
    linked = f"is a link to {resolved}," if file.is_symlink() else "lies"
    raise DataError(
        f"{location}: {file} {linked} outside the site's folder; {remedy}, "
        f"or allow its folder in data_folders of {PLACE} (without one: in {DATA_FOLDERS_VARIABLE})"
    )


def _entry(
    folder: Path, item: Any, split: str, location: str, kind: str, unlabelled: bool
) -> DatalistItem:
    if not isinstance(item, Mapping):
        raise DataError(f"{location}: {_REMEDY}, found {json.dumps(item)[:80]}")
    if unlabelled:
        item = {**item, "label": "not read"}
    layout = _ListedWithMasks if kind == "segmentation" else _Listed
    values = {field.name: item[field.name] for field in fields(layout) if field.name in item}
    if values.get("label") is None:
        values.pop("label", None)
    listed = checked(layout, values, location, error=DataError, remedy=_REMEDY)
    label = item["label"]
    if unlabelled:
        label = None
    elif kind == "segmentation":
        if isinstance(label, list):
            label = [_file(folder, name) for name in label]
        else:
            label = _file(folder, label)
    channels: tuple[Path | None, ...] = ()
    if isinstance(listed.image, str):
        first = listed.image
    else:
        present = [name for name in listed.image if name is not None]
        if not present:
            raise DataError(f"{location}: every channel of the image is null; {_REMEDY}")
        first = present[0]
        channels = tuple(None if name is None else _file(folder, name) for name in listed.image)
    patient = str(patient_id(listed.patient)).strip() or printable(first)
    try:
        attributes = parse_attributes(listed.sex, listed.age, listed.scanner)
    except ValueError:  # its text has the age, and this error may leave the site
        raise DataError(
            f"{location}: age is no number of years from 0 to {OLDEST}; correct it or take it out"
        ) from None
    return DatalistItem(_file(folder, first), label, patient, split, location, channels, attributes)


def _file(folder: Path, name: str) -> Path:
    """A file of the datalist, also with the "\\" of Windows, unless a file has it in its name."""
    file = folder / name
    if "\\" in name and not file.exists():
        return folder / name.replace("\\", "/")
    return file


def patient_id(value: Any) -> Any:
    """A patient's id without what programs add to it: spaces around it, and the ".0" or ",0" of
    whole numbers in tables.

    Examples:
        >>> [patient_id(value) for value in (7.0, " 7", "7.0", "v7.0", 7.5)]
        [7, '7', '7', 'v7.0', 7.5]
    """
    if isinstance(value, str):
        return re.sub(r"\A(\d+)[.,]0\Z", r"\1", printable(value))
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def class_numbers(labels: Any) -> dict[str, list[int]]:
    """Name -> numbers of the classes or structures, by "labels" of a datalist.

    Args:
        labels: {"1": "liver"} (Decathlon) or {"liver": 1, "organ": [1, 2]} (nnU-Net); anything else
            is ignored.

    Examples:
        >>> class_numbers({"0": "background", "1": "liver"})
        {'background': [0], 'liver': [1]}
        >>> class_numbers({"liver": 1, "organ": [1, 2]})
        {'liver': [1], 'organ': [1, 2]}
        >>> class_numbers(None)
        {}
    """
    if not isinstance(labels, Mapping):
        return {}
    names: defaultdict[str, list[int]] = defaultdict(list)
    for key, value in labels.items():
        if not isinstance(value, str):
            numbers = value if isinstance(value, list) else [value]
            names[printable(key)] += [number for number in numbers if type(number) is int]
        elif key.isdecimal():
            names[printable(value)].append(int(key))
    return {name: numbers for name, numbers in names.items() if numbers}


def mask_names(names: Mapping[str, Sequence[int]]) -> list[str]:
    """Structures with a mask file each, in the order of their numbers, without a background.

    Examples:
        >>> mask_names({"cup": [2], "disc": [1], "background": [0]})
        ['disc', 'cup']
    """
    by_number = sorted(names, key=lambda name: min(names[name]))
    return [name for name in by_number if name.lower() != "background"]


def annotated_names(content: Mapping[str, Any], folder: Path) -> tuple[str, ...] | None:
    """The structures that the site annotated, by the task's names: "annotated" of its datalist;
    () at a site without labels, None where it is left out.

    Raises:
        DataError: it is no list of names.
    """
    if "annotated" not in content:
        return None
    names = content["annotated"]
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return tuple(names)
    raise DataError(
        f'{folder / FILE}: "annotated" must be a list of names, got {json.dumps(names)[:80]}; '
        "list the structures that were annotated here, or leave it out"
    )


# -- splits ----------------------------------------------------------------------------------------


def check_patients(entries: Iterable[DatalistItem]) -> None:
    """Raise DataError for a patient in two splits, who would leak into training."""
    patients: dict[str, DatalistItem] = {}
    for entry in entries:
        same = patients.setdefault(entry.patient, entry)
        if same.split != entry.split:
            raise DataError(
                f"{entry.location}: patient {entry.patient} is also in {same.location}; "
                "keep all of a patient's images in one split"
            )


def assign_splits(
    entries: list[DatalistItem],
    listed: tuple[str, ...],
    site: str,
    *,
    outside: bool = False,
    resplit: int | None = None,
) -> list[DatalistItem]:
    """The items with the splits that they are used for.

    A missing list is drawn from the training patients, 70 / 10 / 20 % or what of these shares is
    missing. Unlike `dataset_import.splits.draw_splits` of `medflare data init`, this older rule
    knows no classes; it stays, since finished runs used it. `resplit` draws all lists again with as
    many patients in each as before. An outside site, which never trains, needs a test list only;
    without one it is tested on all its images.

    Raises:
        DataError: a patient in two splits, no training list, or too few patients to draw from.
    """
    check_patients(entries)
    if outside and "test" not in listed:
        return [replace(entry, split="test") for entry in entries]
    missing = [split for split in LISTS if split not in listed]
    split_of = {entry.patient: entry.split for entry in entries}
    if missing and not outside:
        if "training" in missing:
            raise DataError(
                f"site {site}: datalist.json has no list 'training'; "
                "add it, or give the site the role outside"
            )
        _draw_missing(split_of, missing, site, resplit or 0)
    if resplit is not None:
        patients = sorted(split_of)
        splits = sorted(split_of.values(), key=LISTS.index)
        order = numpy_generator(resplit, site, "resplit").permutation(len(patients))
        for row, split in zip(order, splits, strict=True):
            split_of[patients[row]] = split
    return [replace(entry, split=split_of[entry.patient]) for entry in entries]


def _draw_missing(split_of: dict[str, str], missing: list[str], site: str, seed: int) -> None:
    """Give some of the training patients to the missing lists."""
    drawn = ["training", *missing]
    patients = sorted(patient for patient in split_of if split_of[patient] == "training")
    if len(patients) < len(drawn):
        raise DataError(
            f"site {site}: {len(patients)} patient(s) in 'training' cannot be split in "
            f"{', '.join(drawn)}; list {' and '.join(missing)} in datalist.json or add patients"
        )
    total = sum(SHARES[split] for split in drawn)
    order = numpy_generator(seed, site, "splits").permutation(len(patients))
    rest = iter(order)
    for split in missing:
        count = max(1, round(len(patients) * SHARES[split] / total))
        for row in islice(rest, count):
            split_of[patients[row]] = split
