"""The images, masks and tables of a downloaded folder.

Which mask belongs to which image, and which folder is a class.
"""

import json
import math
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import nibabel
import numpy as np

from medflare.core.errors import DataError
from medflare.core.text import read_json
from medflare.data.attributes import NO_ATTRIBUTES, Attributes
from medflare.data.datalist import FILE, patient_id
from medflare.data.dicom import SEGMENTATION, is_other_object, kind_of, tags_of
from medflare.data.local import FOLDERS, allowed_folders
from medflare.data.reading import (
    NIFTI,
    PICTURES,
    explained,
    image_suffixes,
    is_dicom,
    read_stored,
    stem,
    suffix,
)
from medflare.data.targets import plain_name

LAYOUTS = (
    "an image and its mask by name (a.png, a_mask.png), images/ and masks/, a folder per class, "
    "or a table (CSV, Excel)"
)
MAX_CLASSES = 30  # more folders or values are probably not classes
_IMAGES_OF_CLASS = 2.5  # folders with fewer, in the mean, are probably patients
WORKBOOK = ".xlsx"
TABLES = (".csv", ".tsv", WORKBOOK)
_NEARLY_ALL = 0.9
_STRIDE = 16  # between the pixels that are looked at first
_SAMPLE = 3  # pictures of a folder that are read to tell masks from photographs
_TAGS = (
    "Rows",
    "SOPClassUID",
    "Modality",
    "SeriesInstanceUID",
    "PatientID",
    "ReferencedSeriesSequence",
    "ImagePositionPatient",
)
PATIENT = re.compile(r"\d\d|[^\W\d_]\d")  # in the name of a patient's folder
# Modalities whose files are pictures, also in one series: radiographs, ultrasound and photographs.
_PICTURES = ("CR", "DX", "MG", "IO", "PX", "RF", "XA", "US", "OP", "XC", "ES", "GM")
_HEADER = "dataset.json"  # of the Medical Segmentation Decathlon and of nnU-Net

# Words in the names of files and folders, of which `other` ones say nothing of an image; column ->
# names that it usually has, the most likely first. In dermoscopy the images of one lesion stay
# together where there is no patient.
WORDS: dict[str, Any] = json.loads(
    (resources.files(__package__) / "words.json").read_text(encoding="utf-8")
)
# Words before the numbers of classes, and names of eyes.
_GRADES = {*WORDS["label_column_end"], "birads", "category", "kl", "score", "type"}
_EYES = {"od", "os", "ou", "l", "r", "left", "right"}
_MASK = frozenset(WORDS["mask"])
_MASK_WORDS = _MASK | {"ground"}
_IMAGE = frozenset(WORDS["image"])
_SPLITS: dict[str, str] = WORDS["split"]
_IGNORED_WORDS = _IMAGE | _MASK_WORDS.union(WORDS["other"])
_NO_NAMES = _IGNORED_WORDS | _SPLITS.keys()
_TEXTS = (".txt", ".lst", ".json", ".xml")
_LOWER = r"[^\W\d_A-Z]"  # a letter, but A to Z
_WORD = re.compile(rf"[A-Z]?{_LOWER}+|[A-Z]+(?!{_LOWER})|\d+")
# Ends in a number (nnU-Net), or in NIfTI files in a word (`_flair`).
_CHANNEL = re.compile(r"^(.*[^_-])[_-]+(\d{4}|[a-z][a-z0-9]*)$")
_ENTITY = re.compile(r"_(seg|label|desc|space|res)-[^_]+")  # of BIDS; two are of masks
_LABEL = re.compile(r"_label-([^_]+)")
# A folder called so, also behind images or labels, as of nnU-Net; Va of AMOS.
_SHORT_SPLITS = {"Tr": "train", "Ts": "test", "Va": "val"}


@dataclass(frozen=True)
class Item:
    """One image to import."""

    # Of the image, one per channel, None for a missing channel; a single file has all channels.
    files: tuple[Path | None, ...]
    # A class number or a list of 0 and 1 (classification), a mask file or a list of them
    # (segmentation).
    label: Any
    patient: str = ""  # ID of the patient; "" if unknown
    split: str = ""  # "training", "validation", "test", or "" if it is to be drawn
    site: str = ""  # name of the site; "" if unknown
    # Files that do not exist yet -> a function that makes their pixels, uint8 (H, W) or (H, W, 3);
    # written as PNG.
    rendered: Mapping[Path, Callable[[], np.ndarray]] = field(default_factory=dict, compare=False)
    attributes: Attributes = NO_ATTRIBUTES  # for results by group

    @property
    def first(self) -> Path:
        """The first file of the image."""
        return next(filter(None, self.files))

    @property
    def masks(self) -> list[Path]:
        """The mask files; empty in classification."""
        labels = self.label if isinstance(self.label, list) else [self.label]
        return [label for label in labels if isinstance(label, Path)]

    @property
    def paths(self) -> list[Path]:
        """The files of the image and of its masks."""
        return [*filter(None, self.files), *self.masks]

    @property
    def stratum(self) -> str:
        """The class, or the first positive finding, for stratified splits; "" in segmentation."""
        if self.masks:
            return ""
        if not isinstance(self.label, list):
            return str(self.label)
        return str(self.label.index(1)) if 1 in self.label else "-1"


@dataclass(frozen=True)
class Dataset:
    """The images of a folder with their labels."""

    kind: str  # "segmentation" or "classification"
    items: tuple[Item, ...]
    # {"0": name} as in Decathlon, or {name: 0} as in nnU-Net; empty if unknown.
    labels: Mapping[str, Any]
    layout: str  # in words, for the report
    # Number of a channel as text -> its name; empty if unknown.
    channels: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # files that are not used, one line each
    # Images without mask or label, and masks without image, one line each.
    missing: tuple[str, ...] = ()
    options: str = "--kind, --table or --label-column"  # against a wrong guess
    labelled_by: tuple[str, ...] = ()  # columns of the labels or masks, if they are of tables
    # Column of the table that may name the sites -> how many names it has.
    site_columns: Mapping[str, int] = field(default_factory=dict)
    # Name of the only structure, whose value in the masks is unknown; "" if there is none.
    structure: str = ""


@dataclass(frozen=True)
class ImageFolder:
    """The files of a folder."""

    root: Path
    images: tuple[Path, ...]  # image files, and folders with one DICOM series, sorted
    tables: tuple[Path, ...]  # sorted
    patients: Mapping[Path, str]  # DICOM image -> its PatientID, if the header has one
    # DICOM segmentation -> the series of the folder that it refers to.
    segmented: Mapping[Path, Path] = field(default_factory=dict)
    # Folder to make for a DICOM series -> files beside others.
    slices: Mapping[Path, tuple[Path, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # folders that are left out, one line each
    unreadable: tuple[str, ...] = ()  # DICOM files, one line each
    texts: tuple[Path, ...] = ()  # text files that are no tables, such as outlines or lists

    def relative(self, path: Path) -> str:
        """The path of a file within the folder; of a table elsewhere, its path."""
        if not path.is_relative_to(self.root):
            return str(path)
        return path.relative_to(self.root).as_posix()

    @cached_property
    def names(self) -> "dict[Path, FileName]":
        """Image -> the parts of its name.

        A DICOM segmentation of a series has those of the series, as a mask.
        """
        # A folder of all images says nothing of masks, as Kvasir-SEG.
        common = _common_folder(self.images)
        names = {}
        for image in self.images:
            inner = parse_name(image.relative_to(common))
            names[image] = parse_name(image.relative_to(self.root))._replace(mask=inner.mask)
        of_masks = {}
        for mask, image in self.segmented.items():
            of_masks[mask] = names[image]._replace(mask=True)
        return names | of_masks


def scan_folder(root: Path) -> ImageFolder:
    """All images and tables below a folder, but hidden ones, those of the system and of sites.

    DataError if there is no image.
    """
    if not root.is_dir():
        raise DataError(f"{root}: not a folder; give the folder of the images, unpacked")
    images = []
    tables = []
    headers: dict[Path, _Header] = {}
    slices: dict[Path, tuple[Path, ...]] = {}
    left_out: LeftOut = {}
    unreadable = []
    others: dict[Path, str] = {}
    foreign = []
    texts = []
    for folder, files in walk(root, left_out, _reason_of_datalist):
        if not os.listdir(folder) and folder != root:
            left_out.setdefault("as they are empty", []).append(folder.name)
        pictures = [file for file in files if suffix(file) in image_suffixes()]
        tables_here = [file for file in files if suffix(file) in TABLES]
        dicom = [file for file in files if file.is_file() and is_dicom(file)]
        readable, damaged, without_image = _read_headers(dicom)
        others |= without_image
        unreadable += [line.removeprefix(f"{root}/") for line in damaged]
        only_slices = not pictures and not tables_here and folder != root
        series_headers, apart = _dicom_series(folder, readable, only_slices)
        headers |= series_headers
        slices |= apart
        images += pictures
        foreign += files
        texts += [
            file for file in files if suffix(file) in _TEXTS and file.name not in (_HEADER, FILE)
        ]
        tables += tables_here
    images += headers
    notes = left_out_lines(left_out)
    if others:
        notes.append(_line_of_objects(others, root))
    notes += _not_read(foreign, root)
    if not images:
        suffixes = ", ".join((*image_suffixes(), ".dcm"))
        remedy = "; ".join(("give the folder of the images", *notes, *unreadable[:1]))
        raise DataError(f"{root}: no image ({suffixes}); {remedy}")
    by_series = {header.series: image for image, header in headers.items()}
    patients = {}
    segmented = {}
    for image, header in headers.items():
        if header.patient:
            patients[image] = header.patient
        if header.segments in by_series:
            segmented[image] = by_series[header.segments]
    return ImageFolder(
        root,
        tuple(sorted(images)),
        tuple(sorted(tables)),
        patients,
        segmented,
        slices,
        tuple(notes),
        tuple(unreadable),
        tuple(texts),
    )


def _line_of_objects(kinds: Mapping[Path, str], root: Path) -> str:
    """A line about DICOM objects without an image; `kinds`: file -> its kind, "" if unknown."""
    line = f"left out, DICOM objects without an image: {len(kinds)}"
    named = sorted({*kinds.values()} - {""})
    if named:
        line += f" ({', '.join(named)})"
    if "RT Structure Set Storage" in named:
        line += "; make masks of their outlines"
    return f"{line}; the first: {next(iter(kinds)).relative_to(root).as_posix()}"


def _not_read(files: Iterable[Path], root: Path) -> list[str]:
    """A line for each kind of files that have to be converted or unpacked."""
    lines = []
    read = image_suffixes()  # also those of extensions
    for remedy, endings in WORDS["unread_suffix"].items():
        listed = [file for file in files if suffix(file) in endings and suffix(file) not in read]
        if listed:
            first = listed[0].relative_to(root).as_posix()
            lines.append(f"left out, files to {remedy}: {len(listed)}, the first: {first}")
    return lines


LeftOut = dict[str, list[str]]  # why folders are left out -> their names


def walk(
    root: Path, left_out: LeftOut, reason_of: Callable[[Path], str] = lambda folder: ""
) -> Iterator[tuple[Path, list[Path]]]:
    """Every folder below `root`, itself the first, and its files, sorted; hidden ones aside.

    Folders of systems are left out, and links to folders, unless MEDFLARE_DATA_FOLDERS allows what
    they name.

    Args:
        left_out: receives the folders that are left out.
        reason_of: why to leave out a folder, or "".
    """
    allowed = [path.resolve() for path in allowed_folders()]
    searched = {root.resolve()}
    for path, folders, names in os.walk(root, followlinks=True):
        folder = Path(path)
        used = []
        for name in sorted(folders):
            if name.startswith("."):
                continue
            inner = folder / name
            reason = _reason_to_leave_out(inner, allowed, searched) or reason_of(inner)
            if reason:
                left_out.setdefault(reason, []).append(name)
            else:
                used.append(name)
        folders[:] = used
        # Hidden ones, and Office's marks of files that are open somewhere.
        yield folder, [folder / name for name in sorted(names) if not name.startswith((".", "~$"))]


def left_out_lines(left_out: LeftOut) -> list[str]:
    """A line for each reason for which folders are left out; a name with how often it occurs."""
    lines = []
    for reason, names in left_out.items():
        listed = []
        for name, times in Counter(names).items():
            listed.append(f"{name} ({times} times)" if times > 1 else name)
        lines.append(f"left out, {reason}: {', '.join(listed)}")
    return lines


def prefixed(prefix: str, lines: Iterable[str]) -> list[str]:
    """The lines behind a prefix and a colon."""
    return [f"{prefix}: {line}" for line in lines]


def is_system_folder(name: str) -> bool:
    """Whether a folder is one that a drive or an operating system makes.

    Examples:
        >>> is_system_folder("@eaDir"), is_system_folder("Lost+Found"), is_system_folder("cat")
        (True, True, False)
    """
    return name.startswith(("@", "$")) or name.casefold() in WORDS["system_folder"]


def _reason_to_leave_out(folder: Path, allowed: Collection[Path], searched: set[Path]) -> str:
    """Why a folder is not searched, or ""; the folder that a link names is added to `searched`."""
    if is_system_folder(folder.name):
        return "as drives and systems make them"
    if not folder.is_symlink():
        return ""
    target = folder.resolve()
    twice = any(target.is_relative_to(path) or path.is_relative_to(target) for path in searched)
    if twice or not any(target.is_relative_to(path) for path in allowed):
        return (
            "as links to folders are not followed "
            f"(give the folders themselves, or allow them in {FOLDERS})"
        )
    searched.add(target)
    return ""


def _reason_of_datalist(folder: Path) -> str:
    if (folder / FILE).is_file():
        return f"as they have a {FILE} (remove it to import them)"
    return ""


class _Header(NamedTuple):
    """Of a DICOM image."""

    series: str  # UID of its series
    patient: str  # PatientID
    segments: str  # for a segmentation, the UID of the series that it refers to
    picture: bool  # whether it is no slice, see `_PICTURES`


def _read_headers(files: Iterable[Path]) -> tuple[dict[Path, _Header], list[str], dict[Path, str]]:
    """The headers of DICOM images, a line for each file that cannot be read, and the objects
    without an image with their kinds.
    """
    headers = {}
    damaged = []
    others = {}
    for file in files:
        problem = f"{file}: the file is cut off; export it again, or leave it out"
        tags = None
        try:
            with explained(file):
                tags = tags_of(file, *_TAGS)
        except DataError as error:
            problem = str(error)
        if tags is None or "Rows" not in tags:
            if is_other_object(file) or file.name.upper() == "DICOMDIR":
                others[file] = "" if tags is None else kind_of(tags)
            else:
                damaged.append(problem)
            continue
        series = str(tags.get("SeriesInstanceUID", file))
        patient = patient_id(str(tags.get("PatientID", "") or ""))
        segments = ""
        if tags.get("SOPClassUID") == SEGMENTATION:
            referenced = tags.get("ReferencedSeriesSequence") or [{}]
            segments = str(referenced[0].get("SeriesInstanceUID", ""))
        picture = tags.get("Modality") in _PICTURES and not tags.get("ImagePositionPatient")
        headers[file] = _Header(series, patient, segments, picture)
    return headers, damaged, others


def _dicom_series(
    folder: Path, headers: Mapping[Path, _Header], only_slices: bool
) -> tuple[dict[Path, _Header], dict[Path, tuple[Path, ...]]]:
    """DICOM images of a folder, and the series among them whose slices lie beside other files.

    Each of these series is the folder to make for it -> its files.
    """
    images = {}
    series = defaultdict(list)
    for file, header in headers.items():
        if header.segments or header.picture:
            images[file] = header
        else:
            series[header.series].append(file)
    apart = {}
    for uid, slices in series.items():
        if len(slices) == 1:
            image = slices[0]
        elif len(series) == 1 and only_slices:
            image = folder
        else:
            image = folder / _folder_name(uid)
            if image in headers:  # a slice has the name of its series
                image = image.with_name(f"{image.name}_series")
            apart[image] = tuple(slices)
        images[image] = headers[slices[0]]
    return images, apart


def _folder_name(uid: str) -> str:
    """A UID as the name of a folder, whatever a file has in its place.

    Examples:
        >>> _folder_name("1.2.840.1"), _folder_name("../../home"), _folder_name("..")
        ('1.2.840.1', '_.._home', 'series')
    """
    return re.sub(r"[^\w.-]", "_", uid).strip(".") or "series"


# -- names of files and folders --------------------------------------------------------------------


class FileName(NamedTuple):
    """The parts of an image's path."""

    # Its folders without the words for images, masks and splits; an image and its mask have them
    # in common.
    folders: tuple[str, ...]
    name: str  # its name in lower case without suffix and without the words for images and masks
    mask: bool  # whether it is a mask
    split: str  # the split that a folder names, or ""

    @property
    def names(self) -> tuple[str, str]:
        """The name, and without the word of a split: DRIVE has 21_training and 21_manual1."""
        return self.name, _without(self.name, _SPLITS)


def composed(text: str) -> str:
    """A name in the form of all systems: macOS stores "ä" as two letters (NFD), tables have one
    (NFC).

    Examples:
        >>> composed("La\u0308sion") == "L\u00e4sion"
        True
    """
    return unicodedata.normalize("NFC", text)


def words(name: str) -> list[str]:
    """The words of a name in lower case.

    Examples:
        >>> words("images train"), words("ISIC2018_Task1_Training_GroundTruth")
        (['images', 'train'], ['isic', '2018', 'task', '1', 'training', 'ground', 'truth'])
    """
    return [word.lower() for word in _WORD.findall(name)]


def split_name(text: str) -> str:
    """The split that a word means, or "".

    Examples:
        >>> split_name("Train"), split_name("val"), split_name("3")
        ('training', 'validation', '')
    """
    return _SPLITS.get(text.strip().lower(), "")


def split_folder(name: str) -> str:
    """The split that a folder is named after, or "" if its name has other words.

    Examples:
        >>> split_folder("train"), split_folder("b. Test Set"), split_folder("test positive")
        ('training', 'test', '')
    """
    splits = set()
    for word in words(_with_whole_split(name)):
        if len(word) > 1 and not word.isdecimal() and word not in _IGNORED_WORDS:
            splits.add(_SPLITS.get(word, ""))
    return splits.pop() if len(splits) == 1 else ""


def _with_whole_split(name: str) -> str:
    """The name of a folder with a short split spelt out.

    Examples:
        >>> _with_whole_split("imagesTs"), _with_whole_split("Tr"), _with_whole_split("Trauma")
        ('images test', ' train', 'Trauma')
    """
    for short, split in _SHORT_SPLITS.items():
        name = re.sub(f"^(images|labels|){short}$", rf"\1 {split}", name)
    return name


def parse_name(path: Path) -> FileName:
    """The parts of a path within the folder.

    Examples:
        >>> parse_name(Path("imagesTr/a_0001.nii.gz"))
        FileName(folders=(), name='a_0001', mask=False, split='training')
        >>> parse_name(Path("p1/IMG_01_mask.png"))
        FileName(folders=('p 1',), name='01', mask=True, split='')
        >>> parse_name(Path("case_7/segmentation.nii.gz"))
        FileName(folders=('case 7',), name='', mask=True, split='')
    """
    path = Path(composed(str(path)))
    mask = False
    split = ""
    folders = []
    for folder in path.parent.parts:
        folder_words = words(_with_whole_split(folder))
        mask = mask or not _MASK.isdisjoint(folder_words)
        splits = [_SPLITS[word] for word in folder_words if word in _SPLITS]
        if splits:
            split = splits[0]
        others = [word for word in folder_words if word not in _NO_NAMES]
        if others:
            folders.append(" ".join(others))
    name = stem(Path(stem(path)))  # a.jpg.png is of a.jpg
    mask = mask or not _MASK.isdisjoint(_ENTITY.findall(name))
    name = _ENTITY.sub("", name)
    if {*words(name)} <= _MASK_WORDS:  # the mask of the images of its folder
        return FileName(tuple(folders), "", True, split)
    without_mask = _without(name, _MASK, r"(?:[ _.-]?\d{1,2})?")  # masks may be numbered
    short = _without(without_mask, _IMAGE).lower()
    return FileName(tuple(folders), short, mask or without_mask != name, split)


def _without(name: str, affixes: Iterable[str], number: str = "") -> str:
    """The name without one of the words at its start or end, there with a `number`."""
    listed = "|".join(sorted(affixes, key=len, reverse=True))
    affix = rf"^(?:{listed})(?:[ _.-]+(?=.)|(?=\d))|(?<=.)[ _.-]+(?:{listed}){number}$"
    return re.sub(affix, "", name, count=1, flags=re.IGNORECASE)


# -- images and masks ------------------------------------------------------------------------------


def _several_series(folder: ImageFolder) -> str:
    """The end of an error about images without masks, if a DICOM series shares its folder."""
    if not folder.slices:
        return ""
    files = next(iter(folder.slices.values()))
    return (
        f"; {folder.relative(files[0].parent)} holds several series or other files, "
        "give each series a folder of its own"
    )


def _hold_classes(inner: Mapping[str, Collection[str]]) -> bool:
    """Whether folders may be of patients, and those in them classes; `inner`: folder -> those in
    it. As 8863/0, 8863/1, 8864/0 of IDC's patches.
    """
    counts = Counter(chain.from_iterable(inner.values()))
    if not 1 < len(counts) <= len(inner) / 4 or min(counts.values()) < 2:
        return False
    if not all(map(PATIENT.search, inner)) or any(map(PATIENT.search, counts)):
        return False
    no_patients = {"fold", *WORDS["site_column"]}
    return no_patients.isdisjoint(chain.from_iterable(map(words, inner)))


def _classes_of_patients(
    folder: ImageFolder, below: Mapping[Path, Sequence[str]], *, confirmed: bool
) -> Dataset:
    """Images whose first folder is their patient, and whose second one is their class; DataError
    unless this is `confirmed`. `below`: image -> its folders.
    """
    names = sorted_labels({folders[1] for folders in below.values() if len(folders) > 1})
    first = min(folders[0] for folders in below.values() if folders)
    if not confirmed:
        raise DataError(
            f"{folder.root}: {first}, ... hold the folders {', '.join(names)}; if these are "
            f"classes, and {first}, ... patients, give --kind classification; if {first}, ... are "
            "sites, give --site-folders; otherwise keep one of the folders in each, or rename them"
        )
    refuse_variants(names, f"{folder.root}: the class folders")
    items = []
    missing = []
    for image, folders in below.items():
        if len(folders) < 2:
            missing.append(f"{folder.relative(image)}: in no class folder")
            continue
        split = split_above(folder, image)
        items.append(Item((image,), names.index(folders[1]), folders[0], split))
    return Dataset(
        "classification",
        tuple(items),
        numbered(names),
        f"folders of patients, with a folder per class: {', '.join(names)}",
        missing=tuple(missing),
    )


def _refuse_equal_folders(
    folder: ImageFolder, inner: Mapping[str, Collection[str]], *, confirmed: bool
) -> None:
    """Raise DataError if all folders of classes hold folders of the same names, unless `confirmed`
    of them are patients; `inner`: class -> the folders in it.
    """
    names = sorted_labels(inner)
    shared = set.intersection(*map(set, inner.values()))
    patients = all(map(PATIENT.search, shared))
    if len(shared) < 2 or (confirmed and patients):
        return
    listed = ", ".join(sorted(shared)[:3])
    remedy = "give --kind classification" if patients else "rename the folders in them"
    several = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    raise DataError(
        f"{folder.root}: each of {several} holds the folders {listed}; if {names[0]}, ... "
        "are sites, give --site-folders; if they are splits, rename them train, val or test; "
        f"if they are patients, keep one of the folders in each; otherwise {remedy}"
    )


def _refuse_sites(folder: ImageFolder, inner: Mapping[str, Collection[str]]) -> None:
    """Raise DataError if the folders of classes hold folders that may be the classes: some of the
    same name in all, or several without a number; `inner`: class -> the folders in it.
    """
    counts = Counter(chain.from_iterable(inner.values()))
    repeated = [name for name, count in counts.items() if count > 1]
    several = max(map(len, inner.values())) > 1 and not any(map(PATIENT.search, counts))
    if len(counts) > 1 and all(inner.values()) and (repeated or several):
        names = sorted(inner)
        raise DataError(
            f"{folder.root}: {', '.join(names)} hold folders, as {min(repeated or counts)}; if "
            f"{names[0]}, ... are sites, give --site-folders; if they are classes and the folders "
            "in them patients, give --kind classification; if the folders in them are the classes, "
            "move them up"
        )


def _refuse_names_of_splits(folder: ImageFolder, names: Sequence[str]) -> None:
    """Raise DataError if names of classes differ in the word of a split alone."""
    first_of: dict[tuple[str, ...], str] = {}
    for name in names:
        without = tuple(word for word in words(name) if word not in _SPLITS)
        other = first_of.setdefault(without, name)
        if other != name:
            raise DataError(
                f"{folder.root}: {other} and {name} differ in the split alone; "
                "move them into folders train, val and test"
            )


def _refuse_masks(folder: ImageFolder, images: Sequence[Path]) -> None:
    """Raise DataError if some of the images, and not all, look like masks."""
    masks = [image for image in images if _are_masks([image])]
    others = [image for image in images if image not in masks]
    if masks and others and _is_of_slices(masks[0], others[0]):
        raise _masks_of_slices(folder, masks[0].parent)
    if masks and others:
        raise DataError(
            f"{folder.root}: {folder.relative(masks[0])} has two values, as masks have, beside "
            f"{folder.relative(others[0])}; if it is a mask, call it NAME_mask, or give a table "
            "with --mask-column; otherwise give --kind classification"
        )


def _is_of_slices(mask: Path, image: Path) -> bool:
    """Whether a mask is a picture, and its image a volume."""
    return suffix(mask) in PICTURES and (image.is_dir() or suffix(image) in NIFTI)


def _masks_of_slices(folder: ImageFolder, masks: Path) -> DataError:
    return DataError(
        f"{folder.relative(masks)} has a mask for each slice of a volume; stack the masks of each "
        "volume in one NIfTI file on its grid, called like the volume or its folder and _mask"
    )


def _refuse_companions(folder: ImageFolder, images: Iterable[Path]) -> None:
    """Raise DataError if nearly every picture has a companion, or nearly every one of a folder: a
    file called like it and a word, as overlays are, or one of its name in a folder below, as
    thumbnails are.
    """
    by_name = {(image.parent, stem(image)): image for image in images}
    companions: defaultdict[str, list[Path]] = defaultdict(list)  # kind -> pictures that have one
    found = set()
    for (parent, name), image in by_name.items():
        picture = by_name.get((parent.parent, name))
        if picture:
            companions[f"in {parent.name}/"].append(picture)
            found.add(image)
        for match in re.finditer("[ _.-]+", name):
            picture = by_name.get((parent, name[: match.start()]))
            end = name[match.start() :]
            if picture and not end.strip(" _.-").isdecimal():
                companions[f"called NAME{end}"].append(picture)
                found.add(image)
    alone = Counter(image.parent for image in by_name.values() if image not in found)
    for kind, listed in companions.items():
        nearly_all = len(listed) > _NEARLY_ALL * alone.total()
        for parent, count in Counter(picture.parent for picture in listed).items():
            of_folder = count >= _SAMPLE and count > _NEARLY_ALL * alone[parent]
            nearly_all = nearly_all or of_folder
        if nearly_all:
            raise DataError(
                f"{folder.root}: images have companions {kind}, as {folder.relative(min(listed))} "
                "has; take these out, or if they are images of their own, give --kind "
                "classification"
            )


def _refuse_patients(folder: ImageFolder, names: Sequence[str], items: Sequence[Item]) -> None:
    """Raise DataError if the folders of all classes hold volumes of the same names."""
    volumes = [set[str]() for _ in names]
    for item in items:
        if suffix(item.first) in NIFTI:
            volumes[names.index(item.label)].add(item.first.name)
    same = sorted(set.intersection(*volumes))
    if len(same) > 1:
        raise DataError(
            f"{folder.root}: each of {names[0]}, ... holds {', '.join(same)}, as folders of "
            "patients do; call masks NAME_seg, or give a table with --mask-column; if the folders "
            "are classes, give --kind classification"
        )


def _refuse_other_groups(folder: ImageFolder, names: Sequence[str], images: int) -> None:
    """Raise DataError if the folders seem to be patients, years, parts of an export or eyes."""
    most = min(MAX_CLASSES, max(4, images / _IMAGES_OF_CLASS))
    if len(names) > most:
        raise DataError(
            f"{folder.root}: {len(names)} folders ({names[0]}, ...) for {images} images are "
            "many classes; if they are classes and no patients, give --kind classification"
        )
    stems = {re.sub(r"[\d_.-]+", " ", name).lower() for name in names}
    numbers = [int(number) for name in names for number in re.findall(r"\d+", name)]
    of_grades = {*words(" ".join(stems))} & _GRADES or (stems <= {"", " "} and max(numbers) < 100)
    numbered_alike = bool(numbers) and len(stems) == 1 and not of_grades
    if numbered_alike or {name.lower() for name in names} <= _EYES:
        raise DataError(
            f"{folder.root}: are the folders {', '.join(names[:3])} the classes? if so, give "
            "--kind classification; otherwise give a table with the classes"
        )


def pair_masks(folder: ImageFolder) -> Dataset:
    """Every mask with its image; the channels of an image may be in separate files.

    An image has the mask of the same folders, name and split; otherwise the mask without a name of
    its folder (`segmentation.nii.gz`), otherwise the only unused mask of its name and split. A
    DICOM series has the segmentation that refers to it. DataError without pairs, for two masks of
    one image, and for two images of one mask.
    """
    names = folder.names
    files_of, without = _assign_masks(folder)
    channels = sorted(set[str]().union(*files_of.values()))
    items = []
    missing_images = []
    for mask, files in files_of.items():
        if files:
            first = next(iter(files.values()))
            split = names[first].split or names[mask].split
            items.append(Item(tuple(map(files.get, channels)), mask, split=split))
        else:
            missing_images.append(f"{folder.relative(mask)}: a mask without an image")
    if not items:
        raise DataError(f"{folder.root}: {_without_pairs(folder, [*files_of], without)}")
    if len(channels) > 1 and "" in channels:
        raise DataError(
            f"{folder.root}: some images have a file per channel ({channels[1]}), others do not; "
            "list them in a table"
        )
    _refuse_slices_beside_volumes(folder, items)
    has_test = any(item.split == "test" for item in items)
    missing = []
    for path in without:
        if has_test or names[path].split != "test":
            missing.append(_line_without_mask(folder, path))
    unlabelled = len(without) - len(missing)
    notes = [f"{unlabelled} test images without masks are not used"] if unlabelled else []
    notes += _lines_without_channel(items, channels)
    layout = "images and masks by name"
    if len(channels) > 1:
        layout += f", a file per channel ({', '.join(channels)})"
    labels, channel_names = _read_header(folder)
    channel_names = channel_names or _named_channels(channels)
    labels = labels or _segment_labels(folder.segmented)
    return Dataset(
        "segmentation",
        tuple(items),
        labels,
        layout,
        channel_names,
        tuple(notes),
        (*missing, *missing_images),
        structure="" if labels else _structure_of(folder),
    )


def _refuse_slices_beside_volumes(folder: ImageFolder, items: Iterable[Item]) -> None:
    """Raise DataError if a folder of several images has volumes and single slices of them."""
    in_folder = defaultdict(list)
    for item in items:
        in_folder[item.first.parent].append(item.first)
    images = max(in_folder.values(), key=len)
    if not 1 < len(images) <= _SAMPLE:
        return
    depths = {}
    for image in images:
        if suffix(image) in NIFTI:
            with explained(image):
                depths[min(nibabel.load(image).shape[:3])] = image
    if len(depths) > 1 and min(depths) == 1:
        raise DataError(
            f"{folder.relative(depths[1])} is one slice, beside the volume "
            f"{folder.relative(depths[max(depths)])}; take the slices out, or the volumes"
        )


def _named_channels(channels: Sequence[str]) -> dict[str, str]:
    """Number of a channel as text -> the word at the end of its files' names."""
    named = {}
    for number, name in enumerate(channels):
        if name and not name.isdecimal():
            named[str(number)] = name
    return named


def _lines_without_channel(items: Sequence[Item], channels: Sequence[str]) -> list[str]:
    """A line for each channel of which some images have no file."""
    lines = []
    for number, channel in enumerate(channels):
        lacking = sum(item.files[number] is None for item in items)
        if lacking:
            lines.append(f"{lacking} images lack a file of channel {channel} (null in datalist)")
    return lines


def _structure_of(folder: ImageFolder) -> str:
    """The structure in the names of all masks, as _label-lesion of BIDS, or of their folders."""
    masks = [path for path, name in folder.names.items() if name.mask]
    labels = {match[1] for match in map(_LABEL.search, map(stem, masks)) if match}
    if len(labels) == 1:
        return labels.pop()
    return _structure_of_folders(folder.names.values())


def _structure_of_folders(names: Iterable[FileName]) -> str:
    """The words that the folders of all masks have, and those of no image: "vessels" of
    images/1.png and masks/vessels/1.png; "" without any.
    """
    of_images = set()
    of_masks = []
    for name in names:
        listed = " ".join(name.folders).split()
        if name.mask:
            of_masks.append(listed)
        else:
            of_images.update(listed)
    shared = set.intersection(*map(set[str], of_masks)) - of_images
    return _structure_name(word for word in of_masks[0] if word in shared)


def _structure_name(listed: Iterable[str]) -> str:
    """The words that can name a structure: no numbers, initials and formats of files."""
    named = []
    for word in listed:
        if len(word) > 2 and word.isalpha() and word not in WORDS["no_structure"]:
            named.append(word)
    return " ".join(named)


def _without_pairs(folder: ImageFolder, masks: Sequence[Path], images: Sequence[Path]) -> str:
    """That no mask belongs to an image, with an example, and the remedy."""
    if not masks:
        return (
            f"none of {len(images)} images is called as masks are{_several_series(folder)}; call "
            "masks like their image and mask (a_mask.png), or give a table with --mask-column"
        )
    several, count = Counter(mask.parent for mask in masks).most_common(1)[0]
    images_there = [image for image in images if image.is_relative_to(several.parent)]
    if count > 1 and len(images_there) == 1:
        if _is_of_slices(masks[0], images_there[0]):
            return str(_masks_of_slices(folder, several))
        return (
            f"{folder.relative(several)} holds {count} masks of one image; unite the masks of each "
            "image in one file"
        )
    problem = f"none of {len(masks)} masks belongs to an image by its name"
    if images and len(_fitting_masks(folder, images[0])) > 1:
        return _line_without_mask(folder, images[0])
    if images:
        problem += f", as {folder.relative(masks[0])} beside {folder.relative(images[0])}"
    return f"{problem}{_several_series(folder)}; rename them, or give a table with --mask-column"


def _assign_masks(folder: ImageFolder) -> tuple[dict[Path, dict[str, Path]], list[Path]]:
    """Mask -> channel -> image file; and the images without a mask."""
    names = folder.names
    files_of: dict[Path, dict[str, Path]] = {}
    by_name = defaultdict(list)
    images = []
    for path, name in names.items():
        if name.mask:
            files_of[path] = {}
            by_name[name.name].append(path)
        else:
            images.append(path)
    in_folder = Counter(image.parent for image in images)
    modalities = _modality_folders(images)

    def assign(image: Path, free: Collection[Path], same_folders: bool) -> bool:
        name = names[image].name
        # Names that the mask may have, with the channel of the image.
        own = modalities.get(image.parent, "")
        candidates = [(name, own)]
        channel = _CHANNEL.match(name)
        if channel and (channel[2].isdecimal() or suffix(image) in NIFTI):
            candidates.append((channel[1], channel[2]))
        candidates.append((names[image].names[1], own))
        if same_folders and names[image].folders:
            candidates.append(("", "" if in_folder[image.parent] == 1 else name))
        for name, part in candidates:
            masks = [mask for mask in by_name[name] if mask in free]
            masks = _masks_without_contradiction(folder, image, masks, same_folders)
            if len(masks) > 1 and same_folders:
                raise _two_masks(folder, masks)
            if len(masks) == 1:
                other = files_of[masks[0]].setdefault(part, image)
                if other is not image:
                    if (other.parent, stem(other)) == (image.parent, stem(image)):
                        both = " and ".join(map(folder.relative, (other, image)))
                        raise DataError(f"{both} seem to be one image twice; take one out")
                    raise _two_images(folder, [other, image], masks[0])
                return True
        return False

    for same_folders in (True, False):
        free = {mask for mask, files in files_of.items() if same_folders or not files}
        images = [image for image in images if not assign(image, free, same_folders)]
    images = _assign_below(folder, files_of, images)
    _refuse_second_masks(folder, files_of)
    return files_of, images


def _modality_folders(images: Iterable[Path]) -> dict[Path, str]:
    """Folder -> its name, if each is called like a modality and holds files of the same names."""
    names = defaultdict(set)
    for image in images:
        names[image.parent].add(image.name)
    are_modalities = all("".join(words(path.name)) in WORDS["modality"] for path in names)
    first = next(iter(names.values()), set())
    if len(names) < 2 or not are_modalities or any(names[path] != first for path in names):
        return {}
    return {path: path.name for path in names}


def _assign_below(
    folder: ImageFolder, files_of: Mapping[Path, dict[str, Path]], images: Sequence[Path]
) -> list[Path]:
    """Add the volumes of a folder to the only mask of the folder above, as channels; the other
    images. As 0/wmh_seg.nii.gz and 0/pre/FLAIR.nii.gz, in two folders at least.

    DataError if a mask has images in two folders below.
    """
    in_folder = Counter(mask.parent for mask in files_of)
    mask_of = {}
    for mask, files in files_of.items():
        if not files and in_folder[mask.parent] == 1 and suffix(mask) in NIFTI:
            mask_of[mask.parent] = mask
    volumes: defaultdict[Path, list[Path]] = defaultdict(list)  # folder of a mask -> images
    others = []
    for image in images:
        if image.parent.parent in mask_of and suffix(image) in NIFTI:
            volumes[image.parent.parent].append(image)
        else:
            others.append(image)
    if len(volumes) < 2:
        return [*images]
    for above, listed in volumes.items():
        for image in listed:
            if image.parent != listed[0].parent:
                raise _two_images(folder, [listed[0], image], mask_of[above])
            files_of[mask_of[above]][folder.names[image].name] = image
    return others


def _two_images(folder: ImageFolder, images: Sequence[Path], mask: Path) -> DataError:
    return DataError(
        f"{' and '.join(map(folder.relative, images))} would both have the mask "
        f"{folder.relative(mask)}; if they are channels of one image, call them NAME_0000 and "
        "NAME_0001; otherwise take one out, use the same folder names for images and masks, or "
        "list them in a table"
    )


def _two_masks(folder: ImageFolder, masks: Sequence[Path]) -> DataError:
    return DataError(
        f"{' and '.join(map(folder.relative, masks[:2]))}: two masks of one image; unite them, "
        "take one out (as a field of view), or list them in a table, with --mask-column and a "
        "column for each"
    )


def _refuse_second_masks(folder: ImageFolder, files_of: Mapping[Path, Mapping[str, Path]]) -> None:
    """Raise DataError for an unused mask with the name of an image that has another one."""
    names = folder.names
    unused = defaultdict(list)
    for mask, files in files_of.items():
        if not files:
            unused[names[mask].split, names[mask].name].append(mask)
    for mask, files in files_of.items():
        for image in [names[file] for file in files.values()]:
            for name in image.names:
                for other in unused[image.split, name]:
                    if {*image.folders} <= {*names[other].folders}:
                        raise _two_masks(folder, [mask, other])


def _masks_without_contradiction(
    folder: ImageFolder, image: Path, masks: Iterable[Path], same_folders: bool
) -> list[Path]:
    """The masks in the split of the image, otherwise those that may be in it.

    With `same_folders`, only masks in folders of the same names.
    """
    name = folder.names[image]
    same_split = []
    no_split = []
    for mask in masks:
        of_mask = folder.names[mask]
        if same_folders and of_mask.folders != name.folders:
            continue
        if of_mask.split == name.split:
            same_split.append(mask)
        elif not name.split or not of_mask.split:
            no_split.append(mask)
    return same_split or no_split


def _fitting_masks(folder: ImageFolder, image: Path) -> list[Path]:
    """The masks with the name of an image, in any folder."""
    possible = folder.names[image].names
    return [mask for mask, name in folder.names.items() if name.mask and name.name in possible]


def _line_without_mask(folder: ImageFolder, image: Path) -> str:
    """An image without a mask, and why: none has its name, or several have."""
    fitting = _fitting_masks(folder, image)
    if len(fitting) < 2:
        return f"{folder.relative(image)}: no mask"
    both = " and ".join(map(folder.relative, fitting[:2]))
    return (
        f"{folder.relative(image)}: {both} can be its mask (give --site-folders if the folders are "
        "sites, or a table with --mask-column, and a column for each structure)"
    )


def _segment_labels(masks: Iterable[Path]) -> dict[str, str]:
    """Number -> label of the segments of DICOM segmentations, numbered as they are met."""
    names: dict[str, None] = {}
    for mask in sorted(masks):
        with explained(mask):
            segments = tags_of(mask, "SegmentSequence").SegmentSequence
        for segment in segments:
            names[str(segment.SegmentLabel)] = None
    return numbered(names, start=1)


def _read_header(folder: ImageFolder) -> tuple[dict[str, Any], dict[str, str]]:
    """Labels and channel names of a dataset.json; empty if there is none."""
    headers = []
    paths = sorted(folder.root.rglob(_HEADER))
    for path in paths:
        try:
            content = read_json(path)
            channels = content.get("channel_names", content.get("modality")) or {}
            names = {str(number): str(name) for number, name in channels.items()}
            headers.append((dict(content.get("labels") or {}), names))
        except (AttributeError, ValueError) as error:
            raise DataError(
                f"{path}: not a header of Decathlon or nnU-Net ({error}); correct or delete it"
            ) from error
        if "ignore" in headers[-1][0]:
            raise DataError(
                f"{path}: voxels with the label ignore cannot be left out of training; annotate "
                "them, or give them a label of their own"
            )
        if headers[-1] != headers[0]:
            raise DataError(
                f"{path} and {paths[0]} name other labels or channels, as of two data sets; "
                "give the folder of one of them, or --site-folders if they are sites"
            )
    return headers[0] if headers else ({}, {})


_NamedFiles = dict[tuple[str, ...], Path]  # split, folders and name of an image -> the file


def structure_folders(folder: ImageFolder, kind: str) -> Dataset | None:
    """Images beside a folder of masks for each structure.

    For example images/, disc/, cup/, or images/, masks/disc/, masks/cup/. A mask has two values,
    and the name of its image. None without such folders. DataError if only some names fit, or,
    without a `kind`, if the folder of the images is not called so.
    """
    common = _common_folder(folder.images)
    files: defaultdict[str, _NamedFiles] = defaultdict(dict)  # folder -> its files
    for image in folder.images:
        folders = _folders_below(common, image) or [""]
        if len(folders) > 1 and {*words(folders[0])} <= _MASK_WORDS:
            del folders[0]  # masks/disc is disc
        top, *inner = folders
        name = parse_name(image).names[1].removesuffix(f"_{top.lower()}")
        key = (split_above(folder, image), *inner, name)
        files[top][key] = image
    if len(files) > MAX_CLASSES:
        return None
    structures = sorted(top for top in files if _are_masks(files[top].values()))
    homes = [top for top in files if top not in structures]
    pairs = product(homes, structures)
    if not any(_share_names(files[home], files[top]) for home, top in pairs):
        return None
    home = homes[0]
    photographs = files[home]
    listed = ", ".join(structures)
    if len(homes) > 1 or not any(photographs.keys() & files[top] for top in structures):
        remedy = "give all masks two values" if kind else "give --kind classification"
        raise DataError(
            f"{folder.root}: {listed} have pictures of two values only, as masks do, beside "
            f"{', '.join(homes)}; list them in a table with --mask-column, or {remedy}"
        )
    if not kind and home and not {*words(home)} <= _IMAGE:
        raise DataError(
            f"{folder.root}: {listed} have pictures of two values only, with the names of {home}; "
            "give --kind segmentation if they are masks, --kind classification if not"
        )
    masks_of: defaultdict[Path, dict[str, Path]] = defaultdict(dict)
    missing = []
    for structure in structures:
        for key, mask in sorted(files[structure].items()):
            if key in photographs:
                masks_of[photographs[key]][structure] = mask
            else:
                missing.append(f"{folder.relative(mask)}: a mask without an image")
    splits = {image: key[0] for key, image in photographs.items()}
    layout = f"images in {home or common.name}, masks in a folder for each structure: {listed}"
    return _of_structures(folder, splits, masks_of, structures, layout, missing)


def _of_structures(
    folder: ImageFolder,
    splits: Mapping[Path, str],
    masks_of: Mapping[Path, Mapping[str, Path]],
    structures: Sequence[str],
    layout: str,
    missing: Iterable[str] = (),
) -> Dataset:
    """Images with a mask of each structure; those that lack one are `missing`, beside those given.

    Args:
        splits: image -> its split.
        masks_of: image -> structure -> mask.
    """
    items = []
    incomplete = []
    for image, split in splits.items():
        masks = masks_of.get(image, {})
        lacking = [structure for structure in structures if structure not in masks]
        if lacking:
            incomplete.append(
                f"{folder.relative(image)}: no mask of {lacking[0]} (save an empty one if the "
                "image does not show it)"
            )
            continue
        of_image = [masks[structure] for structure in structures]
        label = of_image if len(of_image) > 1 else of_image[0]
        items.append(Item((image,), label, split=split))
    labels = {}
    only = ""
    if len(structures) > 1:
        labels = numbered(structures)
    else:  # its values decide
        only = structures[0]
    return Dataset(
        "segmentation",
        tuple(items),
        labels,
        layout,
        missing=(*incomplete, *missing),
        structure=only,
    )


def structure_files(folder: ImageFolder) -> Dataset | None:
    """Folders of one image each and a mask of every structure, or None.

    As TotalSegmentator's case/ct.nii.gz, case/segmentations/liver.nii.gz.
    """
    masks: defaultdict[tuple[Any, ...], dict[str, Path]] = defaultdict(dict)
    images = defaultdict(list)
    for path, name in folder.names.items():
        if name.mask:
            masks[name.split, name.folders][name.name] = path
        else:
            images[name.split, name.folders].append(path)
    shared = set.intersection(*map(set[str], masks.values()))
    if len(shared) < 2 or any(len(images[key]) != 1 for key in masks):
        return None
    structures = sorted(set[str]().union(*masks.values()))
    splits = {}
    masks_of = {}
    for key, listed in images.items():
        for image in listed:
            splits[image] = key[0]
            masks_of[image] = masks[key]
    layout = f"a folder for each image, with a mask for each structure: {', '.join(structures)}"
    return _of_structures(folder, splits, masks_of, structures, layout)


def structure_suffixes(folder: ImageFolder) -> Dataset | None:
    """Masks called like their image and a few words, the same for each structure; or None.

    As RIM-ONE's im1.png, im1-Cup.png and im1-Disc.png, or IDRiD's Microaneurysms/IDRiD_01_MA.tif.
    """
    masks = [path for path, name in folder.names.items() if name.mask]
    by_name = defaultdict(list)
    for path, name in folder.names.items():
        if not name.mask:
            by_name[name.name].append(path)
    masks_of: defaultdict[Path, dict[str, Path]] = defaultdict(dict)
    for mask in masks:
        image, rest = _image_of_longer_name(folder, mask, by_name)
        if image is None or rest in masks_of[image]:
            return None
        masks_of[image][rest] = mask
    without = sum(map(len, by_name.values())) - len(masks_of)
    if without > len(masks_of):
        return None
    names = _structures_of_suffixes(masks_of.values())
    distinct = {*names.values()}
    some_unnamed = len(names) > 1 and "" in distinct
    if some_unnamed or len(distinct) < len(names) or len(names) > MAX_CLASSES:
        return None
    splits = {}
    of_structure: defaultdict[Path, dict[str, Path]] = defaultdict(dict)
    for image in chain.from_iterable(by_name.values()):
        splits[image] = folder.names[image].split
        for rest, mask in masks_of.get(image, {}).items():
            of_structure[image][names[rest]] = mask
    structures = list(names.values())
    layout = f"masks called like their image, and for the structure: {', '.join(structures)}"
    dataset = _of_structures(folder, splits, of_structure, structures, layout)
    return replace(dataset, structure=_structure_name(dataset.structure.split()))


def _image_of_longer_name(
    folder: ImageFolder, mask: Path, by_name: Mapping[str, Sequence[Path]]
) -> tuple[Path | None, str]:
    """The image whose name begins a mask's, and the rest of the mask's name; None without one, for
    several, and if the rest is empty.
    """
    name = folder.names[mask]
    ends = [match.start() for match in re.finditer(r"[ _.-]+", name.name)]
    for end in reversed([*ends, len(name.name)]):
        images = by_name.get(name.name[:end], ())
        if not images:
            continue
        beside = [image for image in images if folder.names[image].folders == name.folders]
        images = beside or images
        allowed = [image for image in images if folder.names[image].split == name.split]
        allowed = allowed or [image for image in images if not name.split]
        rest = name.name[end:]
        return (allowed[0] if len(allowed) == 1 and rest else None), rest
    return None, ""


def _structures_of_suffixes(masks: Iterable[Mapping[str, Path]]) -> dict[str, str]:
    """End of a mask's name -> its structure: the name of the masks' folder, if each has its own,
    otherwise the words that not all ends have.
    """
    folders = defaultdict(set)
    for of_image in masks:
        for rest, mask in of_image.items():
            folders[rest].add(" ".join(filter(str.isalpha, words(mask.parent.name))))
    by_folder = {rest: min(names) for rest, names in folders.items() if len(names) == 1}
    if len({*by_folder.values()}) == len(folders) > 1:
        return dict(sorted(by_folder.items()))
    parts = {rest: [part for part in re.split("[ _.-]+", rest) if part] for rest in sorted(folders)}
    shared = set.intersection(*map(set[str], parts.values())) if len(parts) > 1 else set[str]()
    named = {}
    for rest, all_parts in parts.items():
        named[rest] = " ".join(part for part in all_parts if part not in shared)
    return named


def are_in_structures(names: Iterable[FileName]) -> bool:
    """Whether folders of masks hold a folder for each structure.

    One name occurs in several of them, and in no such folder of images.
    """
    inner = set()
    of_images: set[str] = set()
    folders_of = defaultdict(set)
    for name in names:
        if not name.mask:
            of_images.update(name.folders)
        elif name.folders:
            last = name.folders[-1]
            inner.add(last)
            short = name.name.removesuffix(f"_{last}")
            folders_of[name.split, short].add(last)
    several = any(len(folders) > 1 for folders in folders_of.values())
    return several and inner.isdisjoint(of_images)


def _share_names(images: _NamedFiles, masks: _NamedFiles) -> bool:
    """Whether a mask is called like an image, or like it with one more word."""
    for *folders, name in masks:
        shorter = name, name.rpartition("_")[0], name.rpartition("-")[0]
        if any((*folders, short) in images for short in shorter):
            return True
    return False


def _are_masks(files: Iterable[Path]) -> bool:
    """Whether the first files are grey pictures or volumes of two values; some may be empty."""
    most = 1
    for file in sorted(files)[:_SAMPLE]:
        try:
            array = read_stored(file, mask=True).array
        except DataError:
            return False
        few = array[..., ::_STRIDE]  # of a large photograph, all would take seconds
        if not (_is_grey_of_two(few) and _is_grey_of_two(array)):
            return False
        most = max(most, len(np.unique(array)))
    return most == 2


def _is_grey_of_two(array: np.ndarray) -> bool:
    return len(np.unique(array)) <= 2 and bool((array == array[:1]).all())


# -- a folder per class ----------------------------------------------------------------------------


def class_folders(folder: ImageFolder, images: Sequence[Path], *, confirmed: bool) -> Dataset:
    """Images whose class is the name of a folder below the folder that all share.

    Folders of splits do not count. DataError for fewer than two classes; unless they are
    `confirmed` by --kind classification, also for what may be patients, sites or versions.
    """
    common = _common_folder(images)
    items = []
    missing = []
    inner = defaultdict(set)  # class -> folders in it
    deeper = defaultdict(set)  # class -> all folders below it
    below = {image: _folders_below(common, image) for image in images}
    shared_by_all = os.path.commonpath(["/".join(folders) for folders in below.values()])
    for image, folders in below.items():
        classes = folders[len(Path(shared_by_all).parts) :]  # without images of train/images/cat
        below[image] = classes
        if classes:
            items.append(Item((image,), classes[0], split=split_above(folder, image)))
            inner[classes[0]].update(classes[1:2])
            deeper[classes[0]].update(classes[1:])
        else:
            missing.append(f"{folder.relative(image)}: in no class folder")
    names = sorted_labels(inner)
    if len(names) < 2:
        raise DataError(
            f"{folder.root}: {len(images)} images without masks or classes; supported: {LAYOUTS}"
        )
    if _hold_classes(inner):
        return _classes_of_patients(folder, below, confirmed=confirmed)
    _refuse_equal_folders(folder, inner, confirmed=confirmed)
    if not confirmed:
        _refuse_sites(folder, inner)
    for name in names:
        same = sorted(deeper[name] & {*names})
        if same:
            raise DataError(
                f"{folder.root}: {name} holds {' and '.join(same)}, as classes are called; "
                f"if {name} is a split, rename it train, val or test; otherwise take it out"
            )
    if not confirmed:
        _refuse_patients(folder, names, items)
    photographs = [name for name in names if {*words(name)} <= _IMAGE]
    if photographs and not confirmed:
        others = ", ".join(name for name in names if name != photographs[0])
        raise DataError(
            f"{folder.root}: is {photographs[0]} a class, beside {others}? if some folders hold "
            "masks, give a table with --mask-column; otherwise give --kind classification"
        )
    refuse_variants(names, f"{folder.root}: the class folders")
    _refuse_names_of_splits(folder, names)
    if not confirmed:
        _refuse_companions(folder, images)
        _refuse_masks(folder, [item.first for item in items[: 2 * _SAMPLE]])
        _refuse_other_groups(folder, names, len(items))
    return Dataset(
        "classification",
        tuple(replace(item, label=names.index(item.label)) for item in items),
        numbered(names),
        f"a folder per class: {', '.join(names)}",
        missing=tuple(missing),
    )


def _common_folder(images: Iterable[Path]) -> Path:
    return Path(os.path.commonpath([image.parent for image in images]))


def _folders_below(common: Path, image: Path) -> list[str]:
    """The folders of an image below a common one, without those of splits."""
    parts = map(composed, image.relative_to(common).parent.parts)
    return [part for part in parts if not split_folder(part)]


def split_above(folder: ImageFolder, image: Path) -> str:
    """The split that a folder of the image names, or ""."""
    parts = image.relative_to(folder.root).parent.parts
    return next(filter(None, map(split_folder, parts)), "")


def refuse_variants(names: Iterable[str], location: str) -> None:
    """Raise DataError for two names of one class, as "1" and "1.00", or "Mild" and "mild"."""
    written: dict[object, str] = {}
    for name in sorted(names):
        number = number_of(name)
        key = plain_name(name) if number is None else number
        other = written.setdefault(key, name)
        if other != name:
            raise DataError(
                f"{location}: {other!r} and {name!r} are one name, written in two ways; "
                "write it in one"
            )


def number_of(text: str) -> float | None:
    """The number that a text is, with a point or a comma, or None."""
    try:
        number = float(text.replace(",", "."))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def sorted_labels(names: Iterable[str]) -> list[str]:
    """Class names in the order of their numbers: numerical if all are numbers, or alphabetical.

    Examples:
        >>> sorted_labels({"10", "9"}), sorted_labels({"nv", "mel"})
        (['9', '10'], ['mel', 'nv'])
    """
    ordered = sorted(names)
    rows = []
    for name in ordered:
        number = number_of(name)
        if number is None:
            return ordered
        rows.append((number, name))
    return [name for _, name in sorted(rows)]


def numbered(names: Iterable[str], start: int = 0) -> dict[str, str]:
    """Number as text -> name, in this order."""
    return {str(number): name for number, name in enumerate(names, start)}
