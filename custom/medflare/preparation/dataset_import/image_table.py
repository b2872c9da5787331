"""A table of a folder, and the images that its cells name."""

import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import pandas as pd

from medflare.core.errors import DataError
from medflare.data.datalist import patient_id
from medflare.data.reading import NIFTI, stem, suffix
from medflare.preparation.dataset_import.folders import NEARLY_ALL, ImageFolder
from medflare.preparation.dataset_import.frames import SAMPLED_ROWS, UnrelatedTableError, read_frame
from medflare.preparation.dataset_import.names import (
    PATIENT,
    WORDS,
    beginnings,
    composed,
    first_split,
    parse_name,
    patient_key,
    words,
)

_DAY_FIRST = re.compile(r"(\d{1,2})[./](\d{1,2})[./](\d{4})")
_YEAR_FIRST = re.compile(r"(\d{4})-0?(\d\d)-0?(\d\d)(?: \d\d:.*)?")  # a time may follow
_LETTER_AND_NUMBER = re.compile(r"[A-Za-z](\d{5,})")  # s50414267 is study 50414267 of MIMIC-CXR


_Index: TypeAlias = defaultdict[str, list[Path]]


class ImageTable:
    """A table of a folder, and the images that its cells name.

    A name is relative to the table or the folder, otherwise the end of a path, with or without
    suffix. The shorter path must be the end of the longer one: `test/1.png` is not `train/1.png`.
    Of several images, it is the one below the table's folder, or that of the `split` that the table
    is named after ("" if it names none).
    """

    def __init__(self, path: Path, folder: ImageFolder):
        self.path = path
        self.folder = folder
        self.problem: DataError | None = None  # why it is not used
        self.split = first_split(path.stem)
        if not self.split and path.is_relative_to(folder.root):
            self.split = parse_name(path.relative_to(folder.root)).split
        # End of the path -> images; the whole path begins with a slash.
        self._by_end: _Index = defaultdict(list)
        self._by_number: _Index = defaultdict(list)  # 7 of 007.png
        # PatientID, or a folder or several, as p1 and p1/study2; and of DICOM, the study -> images.
        self._by_patient: _Index = defaultdict(list)
        self._by_beginning: _Index = defaultdict(list)  # P7 of P7_left.png
        self._studies = set(chain.from_iterable(folder.studies.values()))
        for image in folder.images:
            inner = image.relative_to(folder.root).parent.parts
            parts = _folded(inner)
            for name in {*_folded((image.name, stem(image)))}:
                for start in range(len(parts) + 1):
                    self._by_end["/".join((*parts[start:], name))].append(image)
                self._by_end["/".join(("", *parts, name))].append(image)
            if stem(image).isdecimal():
                self._by_number[stem(image).lstrip("0")].append(image)
            for beginning in filter(PATIENT.search, beginnings(composed(stem(image)))[1:]):
                self._by_beginning[beginning].append(image)
            patient = folder.patients.get(image, "")
            owners = [patient] if patient else _folders_of(inner)
            for name in {*owners, *folder.studies.get(image, ())}:
                self._by_patient[name].append(image)
                with_letter = _LETTER_AND_NUMBER.fullmatch(name)
                if with_letter:
                    self._by_patient[with_letter[1]].append(image)
        self._spellings: defaultdict[str, list[str]] = defaultdict(list)  # of patients
        for name in self._by_patient.keys() | self._by_beginning.keys():
            self._spellings[patient_key(name)].append(name)

    @cached_property
    def frame(self) -> pd.DataFrame:
        return read_frame(self.path)

    @property
    def header(self) -> list[str]:
        """The names of the columns; [] if the table cannot be read."""
        with suppress(DataError):
            return list(self.frame)
        return []

    @property
    def may_be_related(self) -> bool:
        """Whether it seems to be of these images, also if it has another problem."""
        return not isinstance(self.problem, UnrelatedTableError)

    def named_by(self, cells: "pd.Series[str]") -> set[Path]:
        """The images that the first rows of a column name; none if a cell can be several."""
        named: set[Path] = set()
        for cell in cells.head(SAMPLED_ROWS):
            images = self._without_masks(self._named(cell))
            if len(images) > 1:
                return set()
            named.update(images)
        return named

    def names_patients(self, column: str) -> bool:
        """Whether a column names patients of images, see `of_patient`."""
        return any(map(self.of_patient, self.frame[column]))

    def names_each(self, column: str) -> bool:
        """Whether no cell names several volumes."""
        with suppress(DataError):
            for cell in self.frame[column]:
                self.images(cell, "")
            return True
        return False

    def _as_stored(self, name: str) -> str:
        """A patient's or study's name as files have it, if they have it in one other way."""
        spellings = self._spellings.get(patient_key(name), [])
        return spellings[0] if name not in spellings and len(spellings) == 1 else name

    def _of_patient(self, cell: str) -> list[Path]:
        """The images of a patient, or below a folder, whose path may begin as elsewhere."""
        path = self._as_stored(cell.replace("\\", "/").strip("/"))
        inner = path.removeprefix(f"{self.folder.root.resolve().name}/")
        images = self._by_patient.get(path) or self._by_patient.get(inner, [])
        while not images and "/" in inner:
            inner = inner.partition("/")[2]
            listed = self._by_patient.get(inner, [])
            names = [composed(self.folder.relative(image)) for image in listed]
            below = zip(listed, names, strict=True)
            images = [image for image, name in below if name.startswith(f"{inner}/")]
        return images

    def images(self, cell: str, location: str, *, of_patient: bool = False) -> Sequence[Path]:
        """The image that a cell names, otherwise those of a patient: of DICOM's PatientID, or in
        folders of this name; with `of_patient` the reverse. DataError for several volumes that may
        be of different kinds.
        """
        images = self._without_masks(self._of_patient(cell))
        named = self._without_masks(self._named(cell))
        if named and not (of_patient and images):
            self._refuse_several(named, cell, location)
            return named
        kinds = {re.split("[_-]", stem(image))[-1] for image in images}  # T1w of sub-1_ses-2_T1w
        are_series = any(not image.is_file() for image in images)
        are_volumes = any(suffix(image) in NIFTI for image in images)
        if are_series or (are_volumes and len(kinds) > 1):
            self._refuse_several(images, cell, location)
        return images

    def repeats_numbers(self, cells: "pd.Series[str]") -> bool:
        """Whether a column has numbers, which are fewer than half of the rows and of the images, as
        classes and ages are, which name images by accident.
        """
        if not cells.head(SAMPLED_ROWS).map(patient_id).str.isdecimal().all():
            return False
        images = len(self._without_masks(self.folder.images))
        return 2 * cells.nunique() < min(len(cells), images)

    def refuse_some_numbers(self, column: str) -> None:
        """Raise DataError for a column of numbers that name a part of the images, as those of
        patients would by accident.
        """
        cells = self.frame[column].map(patient_id)
        images = len(self._without_masks(self.folder.images))
        if cells.str.isdecimal().all() and len(cells) < NEARLY_ALL * images and not self.split:
            raise DataError(
                f"{self.path}: column {column} has numbers that name {len(cells)} of {images} "
                f"images; if they are images, give --image-column {column}; if they are "
                "patients, write names of images, or of the patients' folders, in a column"
            )

    def _without_masks(self, images: Sequence[Path]) -> Sequence[Path]:
        """Those that are not called as masks are, unless all are."""
        return [image for image in images if not self.folder.names[image].mask] or images

    def _refuse_several(self, images: Sequence[Path], cell: str, location: str) -> None:
        if len(images) > 1:
            remedy = "write the whole path in the table"
            if self._of_patient(cell):
                remedy += ", or if the column names patients, give --patient-column"
            raise DataError(
                f"{location}: {cell!r} can be {self.folder.both(*images[:2])}; {remedy}"
            )

    def image(self, cell: str, location: str) -> Path | None:
        """The image that a cell names; DataError if it can be several."""
        images = self._named(cell)
        self._refuse_several(images, cell, location)
        return images[0] if images else None

    def is_patient(self, cell: str) -> bool:
        """Whether a cell names the images of a patient, and no image and no study."""
        if self._as_stored(cell) in self._studies or self._named(cell):
            return False
        return bool(self.of_patient(cell))

    def of_patient(self, cell: str) -> Sequence[Path]:
        """The images of the patient that a cell names, by folders or the beginning of names."""
        return self._without_masks(self._of_patient(cell)) or self.beginning_with(cell)

    def with_word(self, word: str, column: str, images: Sequence[Path]) -> Sequence[Path]:
        """The images that have a word of a column in their path, or as a part of it; all for ""."""
        if not word:
            return images
        spellings = _spellings(word, column)
        found = []
        for image in images:
            folders = image.relative_to(self.folder.root).parent.parts
            parts = list(map(_with_short_dates, [*folders, stem(image)]))
            parts += chain.from_iterable(re.split("[ _.-]+", part) for part in list(parts))
            parts.append(_with_short_dates(image.name))
            if not spellings.isdisjoint(parts):
                found.append(image)
        return found

    def beginning_with(self, cell: str) -> Sequence[Path]:
        """The images whose file names begin with a cell that is no word, as P7_left.png with P7."""
        beginning = self._as_stored(composed(cell))
        return self._without_masks(self._by_beginning.get(beginning, []))

    def described(self, cell: str) -> list[Path]:
        """All images that a cell may name, of a patient or by their names."""
        listed = self._of_patient(cell) or self._named(cell)
        only_masks = all(self.folder.names[image].mask for image in listed)
        return [*listed, *self.beginning_with(cell)] if only_masks else listed

    def _named(self, cell: str) -> list[Path]:
        """The images that have the name in a cell."""
        text = cell.replace("\\", "/")
        for home in (self.path.parent, self.folder.root):
            if text and home / text in self.folder.names:
                return [home / text]
        parts = _folded([part for part in text.split("/") if part not in ("", ".", "..")])
        whole = "/".join(parts)
        images = self._by_end.get(f"/{whole}") or self._nearest(self._by_end.get(whole, []))
        for start in range(1, len(parts)):
            images = images or self._by_end.get("/".join(("", *parts[start:])), [])
        name = composed(text).rpartition("/")[2]
        images = [image for image in images if composed(image.name) == name] or images
        if not images and text:  # Excel stores 007 as 7, pandas as 7.0
            images = self._by_number.get(patient_id(text).lstrip("0"), [])
        return images

    def _nearest(self, images: list[Path]) -> list[Path]:
        """Of images with the same end, those below the table's folder and in its split."""
        images = [image for image in images if image.is_relative_to(self.path.parent)] or images
        if len(images) < 2 or not self.split:
            return images
        of_split = []
        for image in images:
            if parse_name(image.relative_to(self.folder.root)).split == self.split:
                of_split.append(image)
        return of_split or images


def _spellings(word: str, column: str) -> set[str]:
    """The ways in which a path may have a cell: an eye in short, the number of a visit with a
    beginning of the column's name.

    Examples:
        >>> sorted(_spellings("02", "Visit"))[:4], "v2" in _spellings("2", "Visit ID")
        (['02', '2', 'v02', 'v2'], True)
        >>> "r" in _spellings("Right", "eye"), _spellings("2.3.2019", "day")
        (True, {'20190302'})
    """
    text = _with_short_dates(word)
    spellings = {text}
    for side in WORDS["side"]:
        if text in side:
            spellings.update(side)
    if text.isdecimal():
        name = words(column)[0] if " ".join(words(column)) in WORDS["part_column"] else ""
        for end in range(len(name) + 1):
            spellings |= {f"{name[:end]}{int(text)}", f"{name[:end]}{int(text):02}"}
    return spellings


def _with_short_dates(text: str) -> str:
    """A text for a comparison without regard to case, with dates as 20190302.

    Examples:
        >>> _with_short_dates("P7_2019-03-02"), _with_short_dates("2.3.2019")
        ('p7_20190302', '20190302')
    """
    with_year_first = _DAY_FIRST.sub(r"\3-0\2-0\1", composed(text).casefold())
    return _YEAR_FIRST.sub(r"\1\2\3", with_year_first)


def _folders_of(inner: Sequence[str]) -> list[str]:
    """The folders of an image, and those that lie in each other, as paths.

    Examples:
        >>> _folders_of(["data", "p1"])
        ['data', 'data/p1', 'p1']
    """
    parts = list(map(composed, inner))
    names: dict[str, None] = {}
    for start in range(len(parts)):
        for end in range(start, len(parts)):
            names["/".join(parts[start : end + 1])] = None
    return list(names)


def _folded(parts: Sequence[str]) -> list[str]:
    """Names of files and folders for a comparison without regard to case."""
    return [composed(part).casefold() for part in parts]


def is_path(cell: str) -> bool:
    return "/" in cell or "\\" in cell
