"""The images, masks and tables of a downloaded folder, before anything is paired."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from medflare.core.errors import DataError
from medflare.data.attributes import NO_ATTRIBUTES, Attributes
from medflare.data.datalist import FILE, patient_id
from medflare.data.dicom import SEGMENTATION, has_image, is_other_object, kind_of, tags_of
from medflare.data.local import DATA_FOLDERS_VARIABLE, allowed_folders
from medflare.data.reading import explained, image_suffixes, is_dicom, stem, suffix
from medflare.preparation.dataset_import.names import (
    IMAGE_WORDS,
    WORDS,
    FileName,
    beginnings,
    composed,
    parse_name,
    shortened,
    split_folder,
    words,
)

NEARLY_ALL = 0.9  # share of images from which something counts as said of all
MAX_CLASSES = 30  # more folders or values are probably not classes
WORKBOOK = ".xlsx"
_BLANK_BYTES = 1000  # of an empty table, at most
_TAGS = (
    "Rows",
    "SOPClassUID",
    "Modality",
    "SeriesInstanceUID",
    "PatientID",
    "StudyInstanceUID",
    "AccessionNumber",
    "ReferencedSeriesSequence",
    "ImagePositionPatient",
    "ImageType",
    "NumberOfFrames",
)
# Modalities whose files are pictures, also in one series: radiographs, ultrasound and photographs.
_PICTURES = ("CR", "DX", "MG", "IO", "PX", "RF", "XA", "US", "OP", "XC", "ES", "GM")
HEADER = "dataset.json"  # of the Medical Segmentation Decathlon and of nnU-Net
# First bytes of pictures -> their suffix.
_MARKS = {b"\xff\xd8\xff": ".jpg", b"\x89PNG": ".png", b"II*\0": ".tif", b"MM\0*": ".tif"}
_LINE = 10_000  # bytes of a line that are read
_TEXTS = (".txt", ".lst", ".json", ".geojson", ".xml", ".ndpa", ".svg", ".roi")


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
    # Files that do not exist yet -> a function that makes their content.
    rendered: Mapping[Path, Callable[[], bytes]] = field(default_factory=dict, compare=False)
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
    # The structures that it has, by names of `labels`; () if it has all.
    annotated: tuple[str, ...] = ()
    # Column of a table whose cells name folders, which count as patients; "" if there is none.
    folder_column: str = ""
    # Column of a table that may name the patients, but is not used; "" if there is none.
    patient_column: str = ""

    def with_items(self, items: Iterable[Item], *notes: str, **changes: Any) -> "Dataset":
        """With other images, more notes and other changes."""
        notes = (*self.notes, *notes)
        return replace(self, items=tuple(items), notes=notes, **changes)


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
    # DICOM image -> its AccessionNumber and the UIDs of its study and series.
    studies: Mapping[Path, tuple[str, ...]] = field(default_factory=dict)
    masks_of_cases: frozenset[Path] = frozenset()  # see `masks.with_masks_of_cases`

    def relative(self, path: Path) -> str:
        """The path of a file within the folder; of a table elsewhere, its path."""
        if not path.is_relative_to(self.root):
            return str(path)
        return path.relative_to(self.root).as_posix()

    def both(self, first: Path, second: Path) -> str:
        """Two files in words."""
        return f"{self.relative(first)} and {self.relative(second)}"

    @cached_property
    def names(self) -> "dict[Path, FileName]":
        """Image -> the parts of its name.

        A DICOM segmentation of a series has those of the series, as a mask.
        """
        of_both = self._folders_of_both()
        names = {}
        for image in self.images:
            outer = next(filter(of_both.__contains__, image.parents))
            is_mask = image in self.masks_of_cases or parse_name(image.relative_to(outer)).mask
            names[image] = parse_name(image.relative_to(self.root))._replace(mask=is_mask)
        of_masks = {}
        for mask, image in self.segmented.items():
            of_masks[mask] = names[image]._replace(mask=True)
        return names | of_masks

    def _folders_of_both(self) -> set[Path]:
        """The folder of all images, as Kvasir-SEG, and those that hold folders of images and of
        masks, as Segmentation/images and Segmentation/masks: their names say nothing of masks.
        """
        common = common_folder(self.images)
        of_images = {common}
        of_masks = {common}
        for folder in {image.parent for image in self.images}:
            for outer in folder.parents[: len(folder.relative_to(common).parts)]:
                inner = folder.relative_to(outer)
                if parse_name(inner / "1").mask:
                    of_masks.add(outer)
                elif any(words(part) and {*words(part)} <= IMAGE_WORDS for part in inner.parts):
                    of_images.add(outer)
        return of_images & of_masks

    @cached_property
    def masks(self) -> list[Path]:
        """The images that are called as masks are."""
        return [path for path, name in self.names.items() if name.mask]

    @cached_property
    def no_masks(self) -> list[Path]:
        """The other images."""
        return [path for path, name in self.names.items() if not name.mask]


def scan_folder(
    root: Path, leave_out: Sequence[str] = (), all_sites: Path | None = None
) -> ImageFolder:
    """All images and tables below a folder, but hidden ones, those of the system and of sites.

    Args:
        leave_out: patterns of files and folders that are not read, as "masks" or "*_preview.png".
        all_sites: the folder of the sites, if this is the folder of one.

    Raises:
        DataError: no image, or without `all_sites` a pattern that no file fits.
    """
    if not root.is_dir():
        raise DataError(f"{root}: not a folder; give the folder of the images, unpacked")
    all_files: list[Path] = []
    headers: dict[Path, _Header] = {}
    slices: dict[Path, tuple[Path, ...]] = {}
    left_out: LeftOut = {}
    unreadable = []
    others: dict[Path, str] = {}
    read = image_suffixes()
    matched: Counter[str] = Counter(dict.fromkeys(leave_out, 0))  # pattern -> files
    if all_sites is None:
        check_patterns(root, leave_out)
    for folder, every_file in walk(root, left_out, _reason_of_datalist):
        files = _without(every_file, all_sites or root, matched)
        empty = [folder] if not os.listdir(folder) and folder != root else []
        empty += filter(_is_empty_table, files)
        if empty:
            left_out.setdefault("as they are empty", []).extend(path.name for path in empty)
        files = [file for file in files if file not in empty]
        dicom = [file for file in files if file.is_file() and is_dicom(file)]
        readable, damaged, without_image = _read_headers(dicom)
        others |= without_image
        unreadable += [line.removeprefix(f"{root}/") for line in damaged]
        beside = any(is_table(file) or suffix(file) in read for file in files)
        series_headers, apart = _dicom_series(folder, readable, not beside and folder != root)
        headers |= series_headers
        slices |= apart
        all_files += files
    images = [file for file in all_files if suffix(file) in read]
    aside = _take_aside(headers, slices, alone=not images)
    images += headers
    texts = []
    for file in all_files:
        if suffix(file) in _TEXTS and file.name not in (HEADER, FILE):
            texts.append(file)
    notes = left_out_lines(left_out)
    notes += [
        f"left out by --leave-out {pattern}: {matched[pattern]} files" for pattern in +matched
    ]
    previews = _previews(images)
    images = [image for image in images if image not in previews]
    notes += _line_of_files("previews of other images", previews, root)
    notes += _line_of_files("localizers, screen saves and dose reports", aside, root)
    if others:
        notes.append(_line_of_objects(others, root))
    tables = [file for file in all_files if is_table(file)]
    forms = [file for file in tables if {"sample", "submission"} <= {*words(file.stem)}]
    notes += _line_of_files("forms for the answers to a challenge (--table reads one)", forms, root)
    notes += lines_of_unread(all_files, root)
    if not images:
        raise _without_image(root, [*notes, *unreadable[:1]], all_files)
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
        tuple(sorted({*tables} - {*forms})),
        patients,
        segmented,
        slices,
        tuple(notes),
        tuple(unreadable),
        tuple(texts),
        {image: header.study for image, header in headers.items()},
    )


def _without(files: Iterable[Path], root: Path, matched: Counter[str]) -> list[Path]:
    """The files that fit none of the patterns, themselves or by a folder above them.

    `matched`: pattern -> how many files fit, which is increased.
    """
    others = []
    for file in files:
        relative = Path(composed(str(file.relative_to(root))))
        fitting = [
            pattern
            for pattern in matched
            if any(path.match(composed(pattern)) for path in (relative, *relative.parents))
        ]
        matched.update(fitting)
        if not fitting:
            others.append(file)
    return others


def _without_image(root: Path, notes: Sequence[str], files: Iterable[Path]) -> DataError:
    """That a folder has no image; `notes`: what may be why, otherwise the suffixes of its files."""
    endings = sorted({*map(suffix, files)} - {""})
    if endings and not notes:
        notes = [f"files that are not read: {shortened(endings)}"]
    suffixes = ", ".join((*image_suffixes(), ".dcm"))
    remedy = "give the folder of the images"
    return DataError("; ".join((f"{root}: no image ({suffixes})", remedy, *notes)))


def check_patterns(root: Path, patterns: Iterable[str]) -> None:
    """Raise DataError for a pattern that no file or folder fits."""
    matched: Counter[str] = Counter(dict.fromkeys(patterns, 0))
    for folder, files in walk(root, {}) if matched else ():
        _without([folder, *files], root, matched)
    for pattern, number in matched.items():
        if not number:
            raise DataError(f"{root}: no file fits --leave-out {pattern}; correct the pattern")


def is_table(file: Path) -> bool:
    return suffix(file) in (".csv", ".tsv", WORKBOOK)


def _is_empty_table(file: Path) -> bool:
    """Whether a table has nothing but blank lines."""
    if not (is_table(file) and file.is_file()) or file.stat().st_size > _BLANK_BYTES:
        return False
    return not file.read_bytes().strip()


def _take_aside(
    headers: "dict[Path, _Header]", slices: dict[Path, tuple[Path, ...]], *, alone: bool
) -> list[Path]:
    """Take out localizers, and beside series of slices with positions single images without one, as
    screen saves; none if the images, `alone`, are all such.
    """
    several = any(
        header.placed and not (header.localizer or image.is_file())
        for image, header in headers.items()
    )
    aside = []
    for image, header in headers.items():
        is_slice = header.placed or header.picture or header.segments or not image.is_file()
        if header.localizer or (several and not is_slice):
            aside.append(image)
    if alone and len(aside) == len(headers):
        return []
    for image in aside:
        del headers[image]
        slices.pop(image, None)
    return aside


def _previews(images: Collection[Path]) -> set[Path]:
    """Images in folders that are called thumbnails or the like, whose names are those of others
    elsewhere, or begin with them.
    """
    in_folders = set()
    for image in images:
        folder = {*words(image.parent.name)}
        if folder and folder <= {*WORDS["preview"]}:
            in_folders.add(image)
    elsewhere = {stem(image) for image in images if image not in in_folders}
    return {image for image in in_folders if not elsewhere.isdisjoint(beginnings(stem(image)))}


def _line_of_objects(kinds: Mapping[Path, str], root: Path) -> str:
    """A line about DICOM objects that are no images; `kinds`: file -> its kind, "" if unknown."""
    line = f"left out, DICOM objects that are not read as images: {len(kinds)}"
    named = sorted({*kinds.values()} - {""})
    if named:
        line += f" ({', '.join(named)})"
    if "RT Structure Set Storage" in named:
        line += "; make masks of their outlines"
    if any("Whole Slide" in kind for kind in named):
        line += "; save regions of the slides as PNG"
    return f"{line}; the first: {next(iter(kinds)).relative_to(root).as_posix()}"


def lines_of_unread(files: Iterable[Path], root: Path) -> list[str]:
    """A line for each kind of files that have to be converted or unpacked."""
    lines = []
    read = image_suffixes()  # also those of extensions
    for remedy, endings in WORDS["unread_suffix"].items():
        listed = [file for file in files if _ending(file) in endings and suffix(file) not in read]
        lines += _line_of_files(f"files to {remedy}", listed, root)
    unnamed = defaultdict(list)  # kind of content -> files without a suffix
    for file in files:
        if not suffix(file) and file.is_file():
            unnamed[_kind_of_content(file)].append(file)
    for kind in sorted(unnamed.keys() - {""}):
        lines += _line_of_files(kind, unnamed[kind], root)
    return lines


def _ending(file: Path) -> str:
    """The suffix of a file, that of the archive for a part of one: train.zip.001."""
    return suffix(Path(file.stem) if file.suffix[1:].isdecimal() else file)


def _kind_of_content(file: Path) -> str:
    """What a file without a suffix seems to be, or "": a picture by its first bytes, or a table by
    the same number of commas or tabs in its first two lines, two or more.
    """
    first = second = b""
    with suppress(OSError), file.open("rb") as opened:  # no permission
        first, second = opened.readline(_LINE), opened.readline(_LINE)
    for mark, ending in _MARKS.items():
        if first.startswith(mark):
            return f"pictures without {ending} in their names"
    is_text = b"\0" not in first + second
    if is_text and any(first.count(sign) == second.count(sign) > 1 for sign in (b",", b"\t")):
        return "files without a suffix that may be tables (if so, give --table)"
    return ""


def _line_of_files(kind: str, files: Collection[Path], root: Path) -> list[str]:
    """A line about files that are left out, if there are some."""
    if not files:
        return []
    return [f"left out, {kind}: {len(files)}, the first: {min(files).relative_to(root).as_posix()}"]


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
            f"(give the folders themselves, or allow them in {DATA_FOLDERS_VARIABLE})"
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
    study: tuple[str, ...]  # its AccessionNumber and the UIDs of its study and series
    segments: str  # for a segmentation, the UID of the series that it refers to
    picture: bool  # whether it is no slice, see `_PICTURES`
    localizer: bool
    placed: bool  # whether it has a position in the patient, or several frames


def _read_headers(files: Iterable[Path]) -> tuple[dict[Path, _Header], list[str], dict[Path, str]]:
    """The headers of DICOM images, a line for each file that cannot be read, and the objects that
    are no images with their kinds.
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
        if tags is None or not has_image(tags):
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
        position = tags.get("ImagePositionPatient")
        picture = tags.get("Modality") in _PICTURES and not position
        localizer = "LOCALIZER" in (tags.get("ImageType") or ())
        placed = bool(position) or int(tags.get("NumberOfFrames") or 1) > 1
        names = (tags.get("AccessionNumber"), tags.get("StudyInstanceUID"), series)
        study = tuple(str(name) for name in names if name)
        headers[file] = _Header(series, patient, study, segments, picture, localizer, placed)
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


def common_folder(images: Iterable[Path]) -> Path:
    return Path(os.path.commonpath([image.parent for image in images]))


def folders_below(common: Path, image: Path) -> list[str]:
    """The folders of an image below a common one, without those of splits."""
    parts = map(composed, image.relative_to(common).parent.parts)
    return [part for part in parts if not split_folder(part)]


def split_above(folder: ImageFolder, image: Path) -> str:
    """The split that a folder of the image names, or ""."""
    parts = image.relative_to(folder.root).parent.parts
    return next(filter(None, map(split_folder, parts)), "")
