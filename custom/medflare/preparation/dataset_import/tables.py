"""A table of images (CSV or TSV): the columns, and the file that each row names."""

import csv
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from io import StringIO
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, TypeAlias

import pandas as pd

from medflare.core.errors import DataError, one_line
from medflare.core.settings import no_such
from medflare.core.text import read_text
from medflare.data.attributes import age_problem, parse_attributes
from medflare.data.datalist import patient_id
from medflare.data.reading import image_suffixes, stem, suffix
from medflare.preparation.dataset_import.folders import (
    MAX_CLASSES,
    WORDS,
    Dataset,
    ImageFolder,
    Item,
    composed,
    numbered,
    parse_name,
    refuse_variants,
    sorted_labels,
    split_name,
    words,
)

_BINARY: Final = ("0", "1", "0.0", "1.0")
# How programs write a missing value, in lower case (those that pandas knows).
_MISSING: Final[list[str]] = WORDS["missing_value"]


@dataclass(frozen=True)
class Columns:
    """Names of the columns; "" is recognised by its usual names.

    Labels and masks may be several, separated by commas.
    """

    image: str = ""  # path of the file, its name, or its name without suffix
    label: str = ""  # the class; or one column of 0 and 1 per finding
    mask: str = ""  # the mask file; or one column per structure
    patient: str = ""  # ID of the patient
    site: str = ""  # name of the site; never guessed
    split: str = ""  # training, validation or test


GUESSED: Final = Columns()
# Attribute of `Columns`, sex, age and scanner -> the columns of the table; empty if there is none.
_Used: TypeAlias = dict[str, list[str]]


def read_frame(path: Path, columns: Sequence[str] = ()) -> pd.DataFrame:
    """A table of text without spaces at the ends, "" for empty cells; None and NA can be names.

    DataError if it is unreadable, empty, or lacks one of `columns`.
    """
    try:
        text = read_text(path)
        head = next(iter(text.splitlines()), "")
        form: dict[str, Any] = {"sep": max(",;\t|", key=head.count), "index_col": False}
        if head.casefold().startswith("sep=") and len(head) == len("sep=;"):  # a line for Excel
            form |= {"sep": head[-1], "skiprows": 1}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pd.errors.ParserWarning)  # rows that end in a separator
            frame = pd.read_csv(StringIO(text), dtype=str, keep_default_na=False, **form)
        _check_widths(text, form["sep"], form.get("skiprows", 0))
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(
            f"{path}: cannot be read as a table ({one_line(error)}); "
            "save it as CSV in UTF-8, or give another --table"
        ) from error
    frame = frame.fillna("").rename(columns=_clean)  # a short row lacks cells
    frame = frame.map(_clean)
    frame = frame[frame.ne("").any(axis=1)]  # Excel writes rows of separators
    if frame.empty:
        raise DataError(f"{path}: a table without rows; give another --table")
    for name in columns:
        if name not in frame:
            raise DataError(no_such("column", name, frame.columns, str(path)))
    return frame


def _check_widths(text: str, separator: str, skipped: int) -> None:
    """Raise ValueError for a row with more cells than the first one, whose cells pandas would
    shift or drop.
    """
    width = 0
    rows = csv.reader(StringIO(text, newline=None), delimiter=separator)
    for cells in islice(rows, skipped, None):
        width = width or len(cells)
        if any(cell.strip() for cell in cells[width:]):
            raise ValueError(
                f"line {rows.line_num} has {len(cells)} cells, the first one {width}; "
                "put texts with the separator in quotes"
            )


def _clean(text: str) -> str:
    return composed(text.strip())


def read_tables(
    paths: Sequence[Path],
    folder: ImageFolder,
    columns: Columns,
    *,
    kind: str = "",
    redraw: bool = False,
) -> Dataset:
    """The images of a table, or of one for each split.

    Without a `kind` the columns decide whether they are of masks or classes.

    DataError for a missing column, a cell that names several files, values that are no labels, and
    splits that are not known; with `redraw`, splits are ignored.
    """
    items = []
    missing = []
    notes = []
    labelled_by: list[str] = []
    for path in paths:
        frame = read_frame(path)
        find = _FileFinder(folder, path)
        used = _used_columns(path, frame, columns, kind, find)
        if labelled_by and (used["mask"] or used["label"]) != labelled_by:
            raise DataError(f"{path}: has other labels than {paths[0]}; choose one with --table")
        labelled_by = used["mask"] or used["label"]
        notes += _missing_words(path, frame, used)
        notes += _without_wrong_ages(path, frame, used)
        read, incomplete = _read_rows(path, frame, used, find, redraw)
        if len(paths) > 1:
            read = [replace(item, split=item.split or find.split) for item in read]
        items += read
        missing += incomplete
    used_files = {file for item in items for file in item.paths}
    unlisted = [image for image in folder.images if image not in used_files]
    if unlisted:
        notes.append(
            f"{len(unlisted)} of {len(folder.images)} files are in no complete row, "
            f"the first: {folder.relative(unlisted[0])}"
        )
    unsplit = sum(not item.split for item in items)
    names = labelled_by if len(labelled_by) > 1 else []
    labels = [item.label for item in items]
    if items and not used["mask"]:
        cells = pd.DataFrame(labels, columns=labelled_by)
        labels, names = _encode_labels(" and ".join(map(str, paths)), cells)
    elif len(labelled_by) == 1:
        labels = [label[0] for label in labels]
    items = [replace(item, label=label) for item, label in zip(items, labels, strict=True)]
    if 0 < unsplit < len(items) and not redraw:
        notes.append(
            f"{unsplit} of {len(items)} images have no split and count as training; "
            "--redraw draws all splits"
        )
    layout = [f"{name} {'+'.join(listed)}" for name, listed in used.items() if listed]
    return Dataset(
        "segmentation" if used["mask"] else "classification",
        tuple(items),
        numbered(names),
        f"{' and '.join(path.name for path in paths)}: {', '.join(layout)}",
        notes=tuple(notes),
        missing=tuple(missing),
        options="--image-column, --label-column and the other columns",
    )


def _read_rows(
    path: Path, frame: pd.DataFrame, used: _Used, find: "_FileFinder", redraw: bool
) -> tuple[list[Item], list[str]]:
    """The images of a table with a list of labels each, and a line for each incomplete row."""
    items = []
    missing = []
    for line, row in zip(frame.index + 2, frame.to_dict("records"), strict=True):
        location = f"{path} line {line}"
        cell = dict.fromkeys(used, "")
        for name, listed in used.items():
            if listed:
                cell[name] = row[listed[0]]
        label = _label_of_row(row, used, find, location)
        image = find(cell["image"], location)
        if image is None:
            missing.append(f"{location}: no file for {cell['image']!r}")
        elif not all(label):
            missing.append(f"{location}: no mask" if used["mask"] else f"{location}: no label")
        else:
            split = "" if redraw else _split_of(cell["split"], location)
            patient = str(patient_id(cell["patient"]))
            attributes = parse_attributes(cell["sex"], cell["age"], cell["scanner"])
            site = str(patient_id(cell["site"]))
            item = Item((image,), label, patient, split, site, attributes=attributes)
            items.append(item)
    return items, missing


def _label_of_row(
    row: Mapping[Any, Any], used: _Used, find: "_FileFinder", location: str
) -> list[Any]:
    """The mask files of a row, or its labels; a missing one is None or ""."""
    if used["mask"]:
        return [find(row[name], location) for name in used["mask"]]
    labels = [row[name] for name in used["label"]]
    if len(labels) > 1:  # 0 or 1, which no word can be
        for number, text in enumerate(labels):
            if text.lower() in _MISSING:
                labels[number] = ""
    return labels


def _split_of(text: str, location: str) -> str:
    """The split of a row, "" for an empty cell; DataError for another word."""
    split = split_name(text)
    if text and not split:
        raise DataError(
            f"{location}: split {text!r} is not train, val or test; "
            "rename it, give another --split-column, or draw new splits with --redraw"
        )
    return split


def _missing_words(path: Path, frame: pd.DataFrame, used: _Used) -> list[str]:
    """A line for each column of names with words such as NA, which may mean a missing value."""
    lines = []
    columns = [*used["patient"], *used["site"]]
    if len(used["label"]) == 1:
        columns = [*used["label"], *columns]
    for column in columns:
        found = sorted({text for text in frame[column] if text.lower() in _MISSING})
        if found:
            lines.append(
                f"{path.name}: {' and '.join(found)} in column {column} count as names; "
                "empty the cells if values are missing"
            )
    return lines


def _without_wrong_ages(path: Path, frame: pd.DataFrame, used: _Used) -> list[str]:
    """Take a column with other values than ages in years from the used ones; a line about it."""
    for column in used["age"]:
        problem = age_problem(frame[column])
        if problem:
            used["age"] = []
            return [f"{path.name}: column {column} is not read as the age: {problem}"]
    return []


def split_of_table(path: Path, folder: ImageFolder, columns: Columns, kind: str) -> str:
    """The split that the name of a table has, or "".

    DataError if it names no image of the folder in its first rows, or has no labels.
    """
    frame = read_frame(path)
    find = _FileFinder(folder, path)
    if not any(find.count(frame[name]) for name in frame):
        for name in _usual_column(WORDS["column"]["image"], list(frame)):
            for cell in frame[name].head(20):
                find(cell, f"{folder.relative(path)} column {name}")  # raises if it can be several
        raise DataError(f"{folder.relative(path)} names no image of the folder")
    _used_columns(path, frame, columns, kind, find)
    return find.split


def _used_columns(
    path: Path, frame: pd.DataFrame, columns: Columns, kind: str, find: "_FileFinder"
) -> _Used:
    """The columns of the table.

    An image column without a usual name is the one that names the most files; a label column by the
    last word of its name, or several that hold 0 and 1.
    """
    header = list(frame.columns)
    used = {}
    for name, requested in asdict(columns).items():
        used[name] = [_clean(part) for part in requested.split(",") if part.strip()]
        missing = [column for column in used[name] if column not in header]
        if missing:
            raise DataError(no_such("column", missing[0], header, f"{path}: --{name}-column"))
        if not used[name]:
            used[name] = _usual_column(WORDS["column"][name], header)
    taken = set(chain(*used.values()))
    others = [column for column in header if column not in taken]
    for name, usual_names in WORDS["attribute_column"].items():
        used[name] = _usual_column(usual_names, others)  # see `data.attributes`
    if not used["image"]:
        used["image"] = _image_columns(path, frame, find)
    if not used["label"]:
        used["label"] = _label_columns(frame, used)
    if not used["split"]:
        used["split"] = _split_columns(frame, used)
    if kind == "classification" or (columns.label and not columns.mask):
        used["mask"] = []
    if used["mask"] or kind == "segmentation":
        used["label"] = []
    needed = {"image": used["image"]}
    needed["mask" if kind == "segmentation" else "label"] = used["label"] or used["mask"]
    for name, listed in needed.items():
        if not listed:
            raise DataError(
                f"{path}: no column is recognized as the {name}; "
                f"give --{name}-column, one of {', '.join(header)}"
            )
    return used


def _image_columns(path: Path, frame: pd.DataFrame, find: "_FileFinder") -> list[str]:
    """The column that names the most files, if there is one; of equals one whose cells have an
    image's suffix.
    """
    counts = {}
    for name, cells in frame.items():
        counts[name] = find.count(cells), suffix(Path(cells.iloc[0])) in image_suffixes()
    most = max(counts, key=counts.__getitem__)
    if not counts[most][0]:
        return []
    if find.count(pd.Series([most])):
        raise DataError(f"{path}: its first line names an image; put the names of columns above it")
    return [most]


def _split_columns(frame: pd.DataFrame, used: _Used) -> list[str]:
    """The first other column whose cells all name splits, at least two."""
    for name, cells in frame.items():
        splits = set(map(split_name, cells))
        if len(splits) > 1 and "" not in splits and [name] not in used.values():
            return [name]
    return []


def _usual_column(usual_names: Sequence[str], header: Sequence[str]) -> list[str]:
    """The first column with the likeliest of its usual names, if there is one."""
    by_words = {" ".join(words(name)): name for name in reversed(header)}
    for usual in usual_names:
        if usual in by_words:
            return [by_words[usual]]
    return []


def _label_columns(frame: pd.DataFrame, used: _Used) -> list[str]:
    """The first column whose name ends in a word for labels, or several that hold 0 and 1."""
    binary = []
    for name in frame.columns:
        last = words(name)[-1:]
        if last and last[0] in WORDS["label_column_end"]:
            return [name]
        if [name] not in used.values() and frame[name].isin(_BINARY).all():
            binary.append(name)
    return binary if len(binary) > 1 else []


class _FileFinder:
    """The image that a cell names.

    Relative to the table or the folder, otherwise by the end of its path, with or without suffix.
    The shorter path must be the end of the longer one: `test/1.png` is not `train/1.png`. Of
    several images, it is the one below the table's folder, or that of the `split` that the table is
    named after ("" if it names none).
    """

    def __init__(self, folder: ImageFolder, table: Path):
        self._folder = folder
        self._homes = (table.parent, folder.root)
        self._images = frozenset(folder.images)
        self.split = next(filter(None, map(split_name, words(table.stem))), "")
        if not self.split and table.is_relative_to(folder.root):
            self.split = parse_name(table.relative_to(folder.root)).split
        self._by_end: defaultdict[str, list[Path]] = defaultdict(list)  # end of the path -> images
        self._by_path: defaultdict[str, list[Path]] = defaultdict(list)
        for image in folder.images:
            parts = _folded(image.relative_to(folder.root).parent.parts)
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

    def __call__(self, cell: str, location: str) -> Path | None:
        text = cell.replace("\\", "/")
        for home in self._homes:
            if text and home / text in self._images:
                return home / text
        *folders, name = [part for part in text.split("/") if part not in ("", ".", "..")] or [""]
        parts = (*_folded(folders), name)
        whole = "/".join(parts)
        images = self._by_path.get(whole) or self._nearest(self._by_end.get(whole, []))
        for start in range(1, len(parts)):
            images = images or self._by_path.get("/".join(parts[start:]), [])
        if len(images) > 1:
            both = " and ".join(map(self._folder.relative, images[:2]))
            raise DataError(
                f"{location}: {cell!r} can be {both}; write the whole path in the table"
            )
        return images[0] if images else None

    def _nearest(self, images: list[Path]) -> list[Path]:
        """Of images with the same end, those below the table's folder and in its split."""
        images = [image for image in images if image.is_relative_to(self._homes[0])] or images
        if len(images) < 2 or not self.split:
            return images
        of_split = []
        for image in images:
            if parse_name(image.relative_to(self._folder.root)).split == self.split:
                of_split.append(image)
        return of_split or images


def _folded(parts: Sequence[str]) -> list[str]:
    """Names of folders for a comparison without regard to case."""
    return [composed(part).casefold() for part in parts]


def _encode_labels(location: str, cells: pd.DataFrame) -> tuple[list[Any], list[str]]:
    """Labels as class numbers or lists of 0 and 1, and the names of the classes."""
    if cells.shape[1] == 1:
        column = cells.iloc[:, 0].map(patient_id)  # "1.0" of a table with empty cells is 1
        location = f"{location}: column {column.name}"
        if column.str.contains("|", regex=False).any():
            findings = column.str.get_dummies("|")
            names = [name for name in findings if name.lower() not in WORDS["no_finding"]]
            if not names:
                raise DataError(f"{location}: names no finding; give another --label-column")
            refuse_variants(names, location)
            return findings[names].to_numpy().tolist(), names
        names = sorted_labels(column.unique())
        if len(names) > MAX_CLASSES:
            raise DataError(
                f"{location} has {len(names)} values, for example {names[0]!r}; "
                "name the class with --label-column"
            )
        refuse_variants(names, location)
        for mark in ";,/+&":
            for name in names:
                if mark in name and {part.strip() for part in name.split(mark)} <= {*names}:
                    raise DataError(
                        f"{location}: {name!r} joins other labels; if they are findings of one "
                        "image, write | between them, otherwise rename it"
                    )
        return column.map(names.index).tolist(), names
    columns = list(cells.columns)
    texts = cells.replace({"True": "1", "False": "0", "true": "1", "false": "0"})
    numbers = texts.apply(pd.to_numeric, errors="coerce")
    if not numbers.isin((0, 1)).all(axis=None):
        wrong = cells[~numbers.isin((0, 1))].stack().iloc[0]
        raise DataError(
            f"{location}: {wrong!r} in a column of {', '.join(columns)}; "
            "several label columns hold 0 or 1 each"
        )
    rows = numbers.astype(int).to_numpy()
    if (rows.sum(axis=1) == 1).all():
        return rows.argmax(axis=1).tolist(), columns
    return rows.tolist(), columns
