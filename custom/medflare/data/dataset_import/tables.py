"""A table of images (CSV or TSV): the columns, and the file that each row names."""

import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from io import StringIO
from pathlib import Path
from typing import Any, Final

import pandas as pd

from medflare.core.errors import DataError, one_line
from medflare.core.settings import no_such
from medflare.core.text import read_text
from medflare.data.datalist import patient_id
from medflare.data.dataset_import.folders import (
    MAX_CLASSES,
    Dataset,
    ImageFolder,
    Item,
    composed,
    parse_name,
    refuse_variants,
    sorted_labels,
    split_name,
    words,
)
from medflare.data.reading import stem

# Column -> names that it usually has, the most likely first; compared as words.
_USUAL_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "image": ("image", "image path", "image file", "image name", "image id", "filename", "file name", "file", "path", "file path", "id"),
    "label": ("label", "class", "diagnosis", "dx", "category", "target", "grade", "retinopathy grade", "finding"),
    "mask": ("mask", "mask path", "mask file", "mask name", "segmentation"),
    # dermoscopy: without a patient, the images of one lesion stay together
    "patient": ("patient", "patient id", "subject", "subject id", "participant id", "case", "case id", "lesion", "lesion id"),
    "split": ("split", "set", "subset"),
}
_LABEL_WORDS: Final = ("label", "labels", "class", "diagnosis", "grade", "level", "stage")  # the last word of other label columns
_BINARY: Final = ("0", "1", "0.0", "1.0")
# How programs write a missing value, in lower case (those that pandas knows).
_NO_NUMBER: Final = ("nan", "-nan", "1.#ind", "-1.#ind", "1.#qnan", "-1.#qnan")
_MISSING: Final = ("na", "n/a", "#na", "#n/a", "#n/a n/a", "<na>", "none", "null", *_NO_NUMBER)
_NORMAL: Final = ("no finding", "none", "normal")  # among findings that a cell separates by |


@dataclass(frozen=True)
class Columns:
    """Names of the columns; "" is recognised by its usual names. Labels and masks may be several, separated by commas."""

    image: str = ""  # path of the file, its name, or its name without suffix
    label: str = ""  # the class; or one column of 0 and 1 per finding
    mask: str = ""  # the mask file; or one column per structure
    patient: str = ""  # ID of the patient
    site: str = ""  # name of the site; never guessed
    split: str = ""  # training, validation or test


GUESSED: Final = Columns()


def read_frame(path: Path, columns: Sequence[str] = ()) -> pd.DataFrame:
    """A table of text without spaces at the ends, "" for empty cells; None and NA can be names.

    DataError if it is unreadable, empty, or lacks one of `columns`.
    """
    try:
        text = read_text(path)
        head = next(iter(text.splitlines()), "")
        separator = max(",;\t|", key=head.count)
        form: dict[str, Any] = {"sep": separator, "index_col": False}
        if head.casefold().startswith("sep=") and len(head) == len("sep=;"):  # a line for Excel
            form = {"sep": head[-1], "index_col": False, "skiprows": 1}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pd.errors.ParserWarning)  # rows that end in a separator
            frame = pd.read_csv(StringIO(text), dtype=str, keep_default_na=False, **form)
    except (OSError, ValueError) as error:
        remedy = "save it as CSV in UTF-8, or give another --table"
        raise DataError(f"{path}: cannot be read as a table ({one_line(error)}); {remedy}") from error
    frame = frame.fillna("").rename(columns=_clean)  # a short row lacks cells
    if frame.empty:
        raise DataError(f"{path}: a table without rows; give another --table")
    if unknown := next((name for name in columns if name not in frame), None):
        raise DataError(no_such("column", unknown, frame.columns, str(path)))
    return frame.map(_clean)


def _clean(text: str) -> str:
    return composed(text.strip())


def read_tables(paths: Sequence[Path], folder: ImageFolder, columns: Columns, *, kind: str = "", redraw: bool = False) -> Dataset:
    """The images of a table, or of one for each split; without a `kind` the columns decide whether they are of masks or classes.

    DataError for a missing column, a cell that names several files, values that are no labels, and
    splits that are not known; with `redraw`, splits are ignored.
    """
    items: list[Item] = []
    missing: list[str] = []
    notes: list[str] = []
    labelled_by: list[str] = []
    for path in paths:
        frame, find = read_frame(path), _FileFinder(folder, path)
        used = _used_columns(path, frame, columns, kind, find)
        if labelled_by and (used["mask"] or used["label"]) != labelled_by:
            raise DataError(f"{path}: has other labels than {paths[0]}; choose one with --table")
        labelled_by = used["mask"] or used["label"]
        notes += _missing_words(path, frame, used)
        for line, row in enumerate(frame.to_dict("records"), start=2):
            cell = {name: row[listed[0]] if listed else "" for name, listed in used.items()}
            label: list[Any] = [row[name] for name in labelled_by]
            if used["mask"]:
                label = [find(name, f"{path} line {line}") for name in label]
            elif len(label) > 1:  # 0 or 1, which no word can be
                label = ["" if text.lower() in _MISSING else text for text in label]
            image = find(cell["image"], f"{path} line {line}")
            if image is None or not all(label):
                reason = f"no file for {cell['image']!r}" if image is None else f"no {'mask' if used['mask'] else 'label'}"
                missing.append(f"{path} line {line}: {reason}")
                continue
            split = "" if redraw else _split_of(cell["split"], f"{path} line {line}")
            split = split or (find.split if len(paths) > 1 else "")
            items.append(Item((image,), label, str(patient_id(cell["patient"])), split, cell["site"]))
    names: list[str] = labelled_by if len(labelled_by) > 1 else []
    labels: list[Any] = [item.label[0] if len(labelled_by) == 1 else item.label for item in items]
    if items and not used["mask"]:
        cells = pd.DataFrame([item.label for item in items], columns=labelled_by)
        labels, names = _encode_labels(" and ".join(map(str, paths)), cells)
    unsplit = sum(not item.split for item in items)
    if 0 < unsplit < len(items) and not redraw:
        found = f"{unsplit} of {len(items)} images have no split and count as training"
        notes.append(f"{found}; --redraw draws all splits")
    labelled = tuple(Item(item.files, label, item.patient, item.split, item.site) for item, label in zip(items, labels, strict=True))
    return Dataset(
        "segmentation" if used["mask"] else "classification",
        labelled,
        {str(number): name for number, name in enumerate(names)},
        f"{' and '.join(path.name for path in paths)}: "
        + ", ".join(f"{name} {'+'.join(listed)}" for name, listed in used.items() if listed),
        notes=tuple(notes),
        missing=tuple(missing),
        options="--image-column, --label-column and the other columns",
    )


def _split_of(text: str, place: str) -> str:
    """The split of a row, "" for an empty cell; DataError for another word."""
    split = split_name(text)
    if text and not split:
        remedy = "rename it, give another --split-column, or draw new splits with --redraw"
        raise DataError(f"{place}: split {text!r} is not train, val or test; {remedy}")
    return split


def _missing_words(path: Path, frame: pd.DataFrame, used: dict[str, list[str]]) -> list[str]:
    """A line for each column of names with words such as NA, which may mean a missing value."""
    lines = []
    label = used["label"] if len(used["label"]) == 1 else []
    for column in (*label, *used["patient"], *used["site"]):
        found = sorted({text for text in frame[column] if text.lower() in _MISSING})
        if found:
            read = f"{' and '.join(found)} in column {column} count as names"
            lines.append(f"{path.name}: {read}; empty the cells if values are missing")
    return lines


def split_of_table(path: Path, folder: ImageFolder, columns: Columns, kind: str) -> str:
    """The split that the name of a table has, or ""; DataError if it names no image of the folder in its first rows, or has no labels."""
    frame, find = read_frame(path), _FileFinder(folder, path)
    if not any(find.count(frame[name]) for name in frame):
        raise DataError(f"{folder.relative(path)} names no image of the folder")
    _used_columns(path, frame, columns, kind, find)
    return find.split


def _used_columns(path: Path, frame: pd.DataFrame, columns: Columns, kind: str, find: "_FileFinder") -> dict[str, list[str]]:
    """Attribute of `Columns` -> the columns of the table; empty if there is none.

    An image column without a usual name is the one that names the most files; a label column by the last word of its name, or
    several that hold 0 and 1.
    """
    header, used = list(frame.columns), dict[str, list[str]]()
    by_words = {" ".join(words(name)): name for name in reversed(header)}
    for name in (field.name for field in fields(Columns)):
        requested = [_clean(part) for part in getattr(columns, name).split(",") if part.strip()]
        if unknown := next((part for part in requested if part not in header), None):
            raise DataError(no_such("column", unknown, header, f"{path}: --{name}-column"))
        used[name] = requested or [by_words[usual] for usual in _USUAL_NAMES.get(name, ()) if usual in by_words][:1]
    if not used["image"]:
        counts = {name: find.count(frame[name]) for name in header}
        used["image"] = [name for name in header if counts[name] == max(counts.values()) > 0][:1]
    used["label"] = used["label"] or [name for name in header if words(name)[-1:] and words(name)[-1] in _LABEL_WORDS][:1]
    if not used["label"]:
        others = [name for name in header if [name] not in used.values() and frame[name].isin(_BINARY).all()]
        used["label"] = others if len(others) > 1 else []
    if kind == "classification" or (columns.label and not columns.mask):
        used["mask"] = []
    if used["mask"] or kind == "segmentation":
        used["label"] = []
    for name, listed in (("image", used["image"]), ("mask" if kind == "segmentation" else "label", used["label"] or used["mask"])):
        if not listed:
            raise DataError(f"{path}: no column is recognized as the {name}; give --{name}-column, one of {', '.join(header)}")
    return used


class _FileFinder:
    """The image that a cell names: relative to the table or the folder, otherwise by the end of its path, with or without suffix.

    The shorter path must be the end of the longer one: `test/1.png` is not `train/1.png`. Of several images, it is the one below
    the table's folder, or that of the `split` that the table is named after ("" if it names none).
    """

    def __init__(self, folder: ImageFolder, table: Path):
        self._folder, self._homes, self._images = folder, (table.parent, folder.root), frozenset(folder.images)
        self.split = next(filter(None, map(split_name, words(table.stem))), "")
        self._by_end: defaultdict[str, list[Path]] = defaultdict(list)  # end of the path -> images
        self._by_path: defaultdict[str, list[Path]] = defaultdict(list)
        for image in folder.images:
            parts = [composed(part).casefold() for part in image.relative_to(folder.root).parts[:-1]]
            for name in {composed(image.name), composed(stem(image))}:
                for start in range(len(parts) + 1):
                    self._by_end["/".join((*parts[start:], name))].append(image)
                self._by_path["/".join((*parts, name))].append(image)

    def count(self, cells: "pd.Series[str]") -> int:
        """How many images the first rows of a column name; 0 if a cell can be several."""
        try:
            return len({self(cell, str(cells.name)) for cell in cells.head(20)} - {None})
        except DataError:
            return 0

    def __call__(self, cell: str, place: str) -> Path | None:
        text = cell.replace("\\", "/")
        exact = next((home / text for home in self._homes if text and home / text in self._images), None)
        if exact is not None:
            return exact
        *folders, name = [part for part in text.split("/") if part not in ("", ".", "..")] or [""]
        parts = (*(part.casefold() for part in folders), name)
        if whole := self._by_path.get("/".join(parts)):
            return self._only(whole, cell, place)
        ends = self._by_end.get("/".join(parts), [])
        ends = [image for image in ends if image.is_relative_to(self._homes[0])] or ends
        if len(ends) > 1 and self.split:
            ends = [image for image in ends if parse_name(image.relative_to(self._folder.root)).split == self.split] or ends
        if ends:
            return self._only(ends, cell, place)
        for start in range(1, len(parts)):
            if whole := self._by_path.get("/".join(parts[start:])):
                return self._only(whole, cell, place)
        return None

    def _only(self, images: Sequence[Path], cell: str, place: str) -> Path:
        if len(images) > 1:
            both = " and ".join(map(self._folder.relative, images[:2]))
            raise DataError(f"{place}: {cell!r} can be {both}; write the whole path in the table")
        return images[0]


def _encode_labels(place: str, cells: pd.DataFrame) -> tuple[list[Any], list[str]]:
    """Labels as class numbers or lists of 0 and 1, and the names of the classes."""
    if cells.shape[1] == 1:
        column = cells.iloc[:, 0].map(patient_id)  # "1.0" of a table with empty cells is 1
        if column.str.contains("|", regex=False).any():
            findings = column.str.get_dummies("|")
            findings = findings[[name for name in findings if name.lower() not in _NORMAL]]
            refuse_variants(findings.columns, f"{place}: column {column.name}")
            return findings.to_numpy().tolist(), list(findings.columns)
        names = sorted_labels(column.unique())
        if len(names) > MAX_CLASSES:
            found = f"column {column.name} has {len(names)} values, for example {names[0]!r}"
            raise DataError(f"{place}: {found}; name the class with --label-column")
        refuse_variants(names, f"{place}: column {column.name}")
        return column.map(names.index).tolist(), names
    numbers = cells.replace({"True": "1", "False": "0", "true": "1", "false": "0"}).apply(pd.to_numeric, errors="coerce")
    if not numbers.isin((0, 1)).all(axis=None):
        wrong = cells[~numbers.isin((0, 1))].stack().iloc[0]
        raise DataError(f"{place}: {wrong!r} in a column of {', '.join(cells.columns)}; several label columns hold 0 or 1 each")
    rows = numbers.astype(int).to_numpy()
    return (rows.argmax(axis=1).tolist() if (rows.sum(axis=1) == 1).all() else rows.tolist()), list(cells.columns)
