"""A site's `datalist.json` (MONAI / Decathlon layout) and its splits, which no patient ever crosses."""

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from stat import S_ISDIR
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from medflare.core.errors import DataError
from medflare.core.rng import numpy_generator
from medflare.core.settings import STRICT, checked, takes
from medflare.core.text import printable

FILE = "datalist.json"
SPLITS = ("training", "validation", "test")
SHARES = {"training": 7, "validation": 1, "test": 2}  # of the patients, where splits are drawn and nobody says otherwise
_REMEDY = 'an entry is an object {"image": FILE, "label": ...}; complete it or take it out'


@checked_dataclass(frozen=True, config=STRICT)
class _Listed:
    """What the file says of an image that is classified."""

    image: Annotated[
        str | Annotated[tuple[str | None, ...], Field(min_length=1)],
        takes("an image file, or a list of files, one a channel, null for none"),
    ]
    label: Any  # see `targets.encode_label`
    patient: str | int | float = ""


@checked_dataclass(frozen=True, config=STRICT)
class _ListedWithMasks(_Listed):
    """What the file says of an image that is segmented."""

    label: Annotated[str | Annotated[tuple[str, ...], Field(min_length=1)], takes("a mask file or a list of them, as the task segments")]


@dataclass(frozen=True)
class DatalistItem:
    """One line of the datalist."""

    image: Path
    label: Any  # Path or list of Paths (segmentation), int or list of 0/1 (classification)
    patient: str  # the file's own name where the datalist names no patient
    split: str  # the list that it stands in, until `assign_splits` has drawn another
    place: str  # "DIR/datalist.json training[3]", for messages
    channels: tuple[Path | None, ...] = ()  # a file for every channel, None for one that is missing; empty where one file holds all

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
        """Its mask files, where the task segments."""
        return self.label if isinstance(self.label, list) else [self.label]


def site_folders(root: Path) -> list[Path]:
    """The folders of the sites below a data root: itself where it is one's, else those within it, sorted.

    Raises:
        DataError: there is none.
    """
    folders = [root] if (root / FILE).is_file() else sorted(path.parent for path in root.glob(f"*/{FILE}"))
    if not root.is_dir():
        raise DataError(f"{root}: not a folder; give a site's folder or the folder of several sites")
    if not folders:
        raise DataError(
            f"{root}: neither a {FILE} nor folders that hold one; give a site's folder or the folder of several sites, "
            f"or write a {FILE} with: medflare data init {shlex.quote(str(root))}"
        )
    return folders


def site_name(folder: Path) -> str:
    """What the site of a folder is called: as the folder is, be it a link, since links of several sites may lead to folders of one name.

    Args:
        folder: of the site; one that ends without a name, as "." does, is called as the folder that it means.
    """
    return folder.resolve().name if folder.name in ("", "..") else folder.name


def read_datalist(folder: Path, kind: str, folders: Sequence[Path] = ()) -> list[DatalistItem]:
    """All entries, in file order.

    Args:
        folder: holds datalist.json.
        kind: of the task, "segmentation" or "classification".
        folders: where files may lie beside `folder`; links are followed before it is judged where a file lies.

    Raises:
        DataError: the file is missing, not JSON or without any of the three lists (they may be empty), or an entry lacks its image or
            label, or names a file elsewhere.
    """
    path = folder / FILE
    homes = [home.resolve() for home in (folder, *folders)]
    try:
        content = content_of(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; a site's folder needs a datalist.json that the site's account may read") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON in UTF-8 ({error}); write it again") from error
    if not isinstance(content, Mapping) or not any(split in content for split in SPLITS):
        raise DataError(f"{path}: no list named training, validation or test; use the MONAI / Decathlon layout")
    entries: dict[str, DatalistItem] = {}
    for entry in _listed_entries(folder, content, kind):
        if (first := entries.setdefault(str(entry.image), entry)) is not entry:  # before a long list is looked up on the disk
            raise _twice(entry, first)
    places: dict[Path, str] = {}
    for entry in entries.values():
        for file in filter(None, (*entry.files, *(entry.masks if kind == "segmentation" else []))):
            places.setdefault(file, entry.place)
    for file, place in places.items():
        _refuse_elsewhere(file, homes, place)
    return list(entries.values())


def _listed_entries(folder: Path, content: Mapping[str, Any], kind: str) -> Iterator[DatalistItem]:
    path = folder / FILE
    for split in SPLITS:
        listed = content.get(split)
        if listed is None:
            continue
        if not isinstance(listed, list):
            raise DataError(f"{path}: {split!r} must be a list of entries, found {type(listed).__name__}")
        yield from (_entry(folder, item, split, f"{path} {split}[{number}]", kind) for number, item in enumerate(listed))


def _refuse_elsewhere(file: Path, homes: Sequence[Path], place: str) -> None:
    """A datalist that came from somebody else must not read what else the account can read."""
    try:
        found = file.resolve()
        inside = any(found.is_relative_to(home) for home in homes)
        there = inside and found.exists()
    except (OSError, RuntimeError, ValueError) as error:  # not allowed, a name that is none, or links in a circle
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"{place}: {str(file)!r:.300} cannot be opened ({reason}); correct the path, or let the site's account read it"
        ) from error
    if not inside:
        raise DataError(
            f"{place}: {file} lies outside the site's folder; move it there, or allow its folder in data_folders of local/medflare.json "
            "(without one: in MEDFLARE_DATA_FOLDERS)"
        )
    if not there and "\\" in file.name:
        raise DataError(f"{place}: {file.name} is one name here, not a path; write / between folders, and paths relative to the datalist")


def content_of(path: Path) -> Any:
    """What a datalist holds, unchecked, but with every patient's id written one way, see `patient_id`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON, or no UTF-8.
        RecursionError: it is nested too deep.
    """
    return json.loads(path.read_text(encoding="utf-8-sig"), object_hook=_with_one_id)


def _with_one_id(found: dict[str, Any]) -> dict[str, Any]:
    return found | {"patient": patient_id(found["patient"])} if "patient" in found else found


def patient_id(value: Any) -> Any:
    """A patient's id without what programs add to it: spaces around it, and the ".0" of whole numbers that pandas reads beside empty cells.

    Examples:
        >>> patient_id(7.0), patient_id(" 7"), patient_id("7.0"), patient_id("v7.0"), patient_id(7.5)
        (7, '7', '7', 'v7.0', 7.5)
    """
    if isinstance(value, str):
        text = printable(value)
        return text.removesuffix(".0") if re.fullmatch(r"\d+\.0", text) else text
    return int(value) if isinstance(value, float) and value.is_integer() else value


def names_in(labels: Any) -> dict[str, list[int]]:
    """What "labels" of a datalist call the numbers of classes or structures: name -> its numbers.

    Args:
        labels: {"1": "liver"}, as Decathlon has it, or {"liver": 1, "organ": [1, 2]}, as nnU-Net has it; what is neither is left out.

    Examples:
        >>> names_in({"0": "background", "1": "liver"}), names_in({"liver": 1, "organ": [1, 2]}), names_in(None)
        ({'background': [0], 'liver': [1]}, {'liver': [1], 'organ': [1, 2]}, {})
    """
    names: defaultdict[str, list[int]] = defaultdict(list)
    for key, value in labels.items() if isinstance(labels, Mapping) else ():
        if isinstance(value, str) and key.isdecimal():
            names[printable(value)].append(int(key))
        elif not isinstance(value, str):
            names[printable(key)] += [number for number in (value if isinstance(value, list) else [value]) if type(number) is int]
    return {name: numbers for name, numbers in names.items() if numbers}


def names_of_masks(names: Mapping[str, Sequence[int]]) -> list[str]:
    """Structures that have a mask file each, in the order of the files: that of their numbers, without a background.

    Examples:
        >>> names_of_masks({"cup": [2], "disc": [1], "background": [0]})
        ['disc', 'cup']
    """
    return [name for name in sorted(names, key=lambda name: min(names[name])) if name.lower() != "background"]


def listed_splits(folder: Path) -> tuple[str, ...]:
    """Splits that the datalist gives, be they empty."""
    content = content_of(folder / FILE)
    return tuple(split for split in SPLITS if content.get(split) is not None)


def listed_names(folder: Path) -> dict[str, list[int]]:
    """What the datalist's "labels" call the numbers of classes or structures, see `names_in`."""
    return names_in(content_of(folder / FILE).get("labels"))


def listed_annotated(folder: Path) -> tuple[str, ...] | None:
    """The structures that the site annotated, by the task's names for them; None where the datalist does not say.

    Raises:
        DataError: "annotated" is no list of names.
    """
    content = content_of(folder / FILE)
    if "annotated" not in content:
        return None
    names = content["annotated"]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        remedy = "list the structures that somebody annotated here, or leave it out"
        raise DataError(f'{folder / FILE}: "annotated" must be a list of names, got {json.dumps(names)[:80]}; {remedy}')
    return tuple(names)


def _entry(folder: Path, item: Any, split: str, place: str, kind: str) -> DatalistItem:
    if not isinstance(item, Mapping):
        raise DataError(f"{place}: {_REMEDY}, found {json.dumps(item)[:80]}")
    layout = _ListedWithMasks if kind == "segmentation" else _Listed
    given = {field.name: item[field.name] for field in fields(layout) if field.name in item}
    if given.get("label") is None:
        given.pop("label", None)
    listed = checked(layout, given, place, error=DataError, remedy=_REMEDY)
    label = item["label"]
    if kind == "segmentation":
        label = [folder / name for name in label] if isinstance(label, list) else folder / label
    named = (listed.image,) if isinstance(listed.image, str) else listed.image
    files = tuple(None if name is None else folder / name for name in named)
    first = next((name for name in named if name is not None), None)
    if first is None:
        raise DataError(f"{place}: every channel of the image is null; {_REMEDY}")
    channels = () if isinstance(listed.image, str) else files
    return DatalistItem(folder / first, label, str(listed.patient) if "patient" in item else printable(first), split, place, channels)


def check_patients(entries: Iterable[DatalistItem]) -> None:
    """Refuse what would let training see a test patient.

    Raises:
        DataError: a patient stands in two splits, or an image is listed twice, be it as channels of another patient's.
    """
    home: dict[str, DatalistItem] = {}
    firsts: dict[Any, DatalistItem] = {}
    listed, files = list(entries), []
    for entry in listed:
        first = home.setdefault(entry.patient, entry)
        if first.split != entry.split:
            raise DataError(f"{entry.place}: patient {entry.patient} is also in {first.place}; keep all of a patient's images in one split")
        files.append([_one_file(file) for file in entry.files if file is not None])
        if firsts.setdefault(files[-1][0], entry) is not entry:
            raise _twice(entry, firsts[files[-1][0]])
    owners: defaultdict[Any, set[int]] = defaultdict(set)  # file -> the numbers of the images that have it as a channel
    for number, found in enumerate(files):
        for file in found:
            owners[file].add(number)
    for entry, found in zip(listed, files, strict=True):
        within = sorted(set.intersection(*sorted((owners[file] for file in found), key=len)))
        if other := next((listed[number] for number in within if listed[number].patient != entry.patient), None):
            raise _twice(entry, other)


def _one_file(file: Path) -> Any:
    """The same for all names of one file: where links lead, and of a file with hard links its place on the disk."""
    found = file.resolve()
    try:
        known = found.stat()
    except OSError:  # said when it is read
        return found
    return (known.st_dev, known.st_ino) if known.st_nlink > 1 and known.st_ino and not S_ISDIR(known.st_mode) else found


def _twice(entry: DatalistItem, other: DatalistItem) -> DataError:
    return DataError(f"{entry.place}: image {entry.name} is also in {other.place}; list it once")


def assign_splits(
    entries: list[DatalistItem], listed: tuple[str, ...], site: str, *, outside: bool = False, resplit: int | None = None
) -> list[DatalistItem]:
    """Entries with the split they are used for.

    A missing list is drawn from the training patients, 70 / 10 / 20 % or what of these shares is missing; `resplit` draws
    all lists anew with as many patients in each as before. An outside site, which never trains, needs a test list only;
    where it gives none it is tested on all its images.

    Args:
        entries: all entries of a site.
        listed: the splits that the datalist gives.
        site: its name, one key of the random draws.
        outside: whether the site never trains.
        resplit: seed of a new draw, or None.

    Raises:
        DataError: a patient in two splits, no training list, or too few patients to draw from.
    """
    check_patients(entries)
    if outside and "test" not in listed:
        return [replace(entry, split="test") for entry in entries]
    missing = [split for split in SPLITS if split not in listed]
    if missing and not outside:
        if "training" in missing:
            raise DataError(f"site {site}: datalist.json has no list 'training'; add it, or give the site the role outside")
        entries = _draw_missing(entries, missing, site, resplit or 0)
    return entries if resplit is None else _redraw(entries, site, resplit)


def _draw_missing(entries: list[DatalistItem], missing: list[str], site: str, seed: int) -> list[DatalistItem]:
    drawn = ["training", *missing]
    patients = sorted({entry.patient for entry in entries if entry.split == "training"})
    if len(patients) < len(drawn):
        raise DataError(
            f"site {site}: {len(patients)} patient(s) in 'training' cannot be split in {', '.join(drawn)}; "
            f"list {' and '.join(missing)} in datalist.json or add patients"
        )
    total = sum(SHARES[split] for split in drawn)
    counts = {split: max(1, round(len(patients) * SHARES[split] / total)) for split in missing}
    order = [patients[index] for index in numpy_generator(seed, site, "splits").permutation(len(patients))]
    home = dict.fromkeys(order, "training")
    start = 0
    for split in missing:
        home.update(dict.fromkeys(order[start : start + counts[split]], split))
        start += counts[split]
    return [replace(entry, split=home[entry.patient]) if entry.split == "training" else entry for entry in entries]


def _redraw(entries: list[DatalistItem], site: str, seed: int) -> list[DatalistItem]:
    home = {entry.patient: entry.split for entry in entries}
    patients = sorted(home)
    places = sorted(home.values(), key=SPLITS.index)  # as many patients in each split as before
    order = numpy_generator(seed, site, "resplit").permutation(len(patients))
    new = {patients[index]: split for index, split in zip(order, places, strict=True)}
    return [replace(entry, split=new[entry.patient]) for entry in entries]
