"""A table of images (CSV, TSV or Excel): the columns, and the file that each row names."""

import csv
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias
from zipfile import ZipFile

import numpy as np
import pandas as pd

from medflare.core.errors import DataError, one_line
from medflare.core.packages import require
from medflare.core.settings import no_such
from medflare.core.store import refuse_bomb
from medflare.core.text import read_text
from medflare.data.attributes import age_problem, parse_attributes
from medflare.data.datalist import patient_id
from medflare.data.reading import NIFTI, image_suffixes, stem, suffix
from medflare.preparation.dataset_import.folders import (
    MAX_CLASSES,
    NEARLY_ALL,
    WORKBOOK,
    Dataset,
    ImageFolder,
    Item,
    prefixed,
    split_above,
)
from medflare.preparation.dataset_import.names import (
    PATIENT,
    WORDS,
    composed,
    number_of,
    numbered,
    parse_name,
    refuse_variants,
    sorted_labels,
    split_name,
    words,
)

_MASK_COLUMNS: list[str] = WORDS["column"]["mask"]  # usual names
_COLUMNS = 2000  # most of a sheet of Excel
_MAX_LEVELS = 8  # more numbers with decimals are a measurement, and no classes
_FINDINGS = 5  # least columns of 0 and 1 that are findings without a question
_LETTER_AND_NUMBER = re.compile(r"[A-Za-z](\d{5,})")  # s50414267 is study 50414267 of MIMIC-CXR
# Start and length of each run of a mask, as of Kaggle's competitions.
_RUN_LENGTHS = r"\d+ \d+(?: \d+ \d+)+"
_SAMPLE = 20  # rows by which columns and separators are recognized
# How programs write a missing value, in lower case (those that pandas knows).
_MISSING: list[str] = WORDS["missing_value"]


@dataclass(frozen=True)
class Columns:
    """Names of the columns; "" is recognised by its usual names.

    Labels and masks may be several, separated by commas. Patient, site and split may be in another
    table than the labels.
    """

    image: str = ""  # path of the file, its name, or its name without suffix
    label: str = ""  # the class; or one column of 0 and 1 per finding
    mask: str = ""  # the mask file; or one column per structure
    patient: str = ""  # ID of the patient
    site: str = ""  # name of the site; never guessed
    split: str = ""  # training, validation or test


GUESSED = Columns()


@dataclass(frozen=True)
class _Row:
    """What a row of a table says of an image."""

    location: str  # table and line
    item: Item  # with a list of labels


# Attribute of `Columns`, sex, age and scanner -> the columns of the table; empty if there is none.
_Used: TypeAlias = dict[str, list[str]]


class UnrelatedTableError(DataError):
    """A table names no image, and has fewer rows than there are images; or cannot be read here."""


class UnlabelledTableError(DataError):
    """No column of a table can be the label or the mask."""


def read_frame(path: Path, columns: Sequence[str] = ()) -> pd.DataFrame:
    """A table of text without spaces at the ends, "" for empty cells; None and NA can be names.

    DataError if it is unreadable, empty, or lacks one of `columns`.
    """
    is_workbook = suffix(path) == WORKBOOK
    if is_workbook:
        require("openpyxl", f"{path}: a table of Excel", UnrelatedTableError)
    try:
        lines = _lines_of_workbook(path) if is_workbook else _lines_of_text(read_text(path))
        header, rows = _header_and_rows(lines)
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(
            f"{path}: cannot be read as a table ({one_line(error)}); "
            "save it as CSV in UTF-8, or give another --table"
        ) from error
    if not rows:
        raise DataError(f"{path}: a table without rows; give another --table")
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=header, dtype=object)
    for name in columns:
        if name not in frame:
            raise DataError(no_such("column", name, frame.columns, str(path)))
    return frame


def _lines_of_text(text: str) -> Iterator[tuple[int, list[str]]]:
    """The number of each row's first line, and its cells."""
    lines = list(StringIO(text, newline=None))
    head = next(iter(lines), "").rstrip("\n")
    if head.casefold().startswith("sep=") and len(head) == len("sep=;"):  # a line for Excel
        separator = head[-1]
        lines[0] = "\n"
    else:
        separator = max(",;\t|", key=lambda mark: (*_rows_alike(lines, mark), head.count(mark)))
    first_line = 1
    reader = csv.reader(lines, delimiter=separator, skipinitialspace=True)
    for cells in reader:
        yield first_line, cells
        first_line = reader.line_num + 1


def _lines_of_workbook(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The number and the cells of each row of the only sheet that is not empty.

    ValueError for several sheets, none, and a damaged file.
    """
    from openpyxl import load_workbook

    sheets = {}
    try:
        with warnings.catch_warnings(), path.open("rb") as file:
            warnings.filterwarnings("ignore", module="openpyxl")  # of styles that it does not know
            with ZipFile(file) as archive:
                refuse_bomb(archive)
            for sheet in load_workbook(file, read_only=True, data_only=True).worksheets:
                rows = []
                for row in sheet.iter_rows(values_only=True):
                    if len(row) > _COLUMNS:
                        raise ValueError(
                            f"sheet {sheet.title} has {len(row)} columns, more than {_COLUMNS}; "
                            "delete empty ones"
                        )
                    rows.append(row)
                if any(map(any, rows)):
                    sheets[sheet.title] = rows
    except Exception as error:  # of zip, zlib and XML
        raise ValueError(f"no file of Excel, or a damaged one: {one_line(error)}") from error
    if len(sheets) != 1:
        raise ValueError(f"{len(sheets)} sheets with cells ({', '.join(sheets)}), where one counts")
    [rows] = sheets.values()
    for number, row in enumerate(rows, start=1):
        yield number, list(map(_text_of_cell, row))


def _text_of_cell(value: Any) -> str:
    """The text of a cell of Excel, where every number may be stored as a float.

    Examples:
        >>> _text_of_cell(3.0), _text_of_cell(None), _text_of_cell(0.5), _text_of_cell("007")
        ('3', '', '0.5', '007')
    """
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _header_and_rows(
    lines: Iterable[tuple[int, list[str]]],
) -> tuple[list[str], dict[int, list[str]]]:
    """The names of the columns, and line -> its cells without spaces at the ends; rows of empty
    cells are left out.

    ValueError for a row with more cells than the first one, two columns of one name, and names in
    several lines.
    """
    header: list[str] = []
    rows = {}
    for line, texts in lines:
        cells = list(map(_clean, texts))
        if not any(cells):  # Excel writes rows of separators
            continue
        if not header:
            if cells[0].startswith("#"):
                raise ValueError("its first line begins with #; take it out")
            header = cells
            continue
        if any(cells[len(header) :]):
            raise ValueError(
                f"line {line} has {len(cells)} cells, the first one {len(header)}; put texts "
                "with the separator in quotes, and take lines above the names of columns out"
            )
        rows[line] = [*cells, *[""] * len(header)][: len(header)]
    width = len(header)  # without empty columns at the end
    while width and not header[width - 1] and not any(cells[width - 1] for cells in rows.values()):
        width -= 1
    header = header[:width]
    rows = {line: cells[:width] for line, cells in rows.items()}
    named = sum(map(bool, header))
    _refuse_names_in_several_lines(header, rows)
    if rows and len(header) > 2 * named:
        raise ValueError(
            f"its first line has {named} names for {len(header)} columns; take lines above the "
            "names of columns out"
        )
    for number, name in enumerate(header):
        if name in header[:number] and name:
            raise ValueError(f"two columns are called {name!r}; rename one")
        header[number] = name or f"unnamed {number + 1}"
    return header, rows


def _refuse_names_in_several_lines(header: Sequence[str], rows: Mapping[int, list[str]]) -> None:
    """Raise ValueError if the name of the first column stands below the first line."""
    first = next(iter(rows.values()), header)
    used = any(cells[0] for cells in rows.values())
    if header[0] or first[0] or not used:
        return
    of_names = []
    for line, cells in rows.items():
        if 2 * sum(map(bool, cells)) >= len(header):
            break
        of_names.append(str(line))
    raise ValueError(
        "the names of its columns stand in several lines; write them all in the first one, and "
        f"take lines {', '.join(of_names) or 'below it'} out"
    )


def _rows_alike(lines: Sequence[str], separator: str) -> tuple[int, int]:
    """Of the first lines, how many have the same number of cells, and how many cells these are; a
    line of one cell does not count.
    """
    reader = csv.reader(lines[:_SAMPLE], delimiter=separator, skipinitialspace=True)
    widths = Counter(len(cells) for cells in reader if len(cells) > 1)
    return max(((rows, width) for width, rows in widths.items()), default=(0, 0))


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
    folder_column = ""
    listed: dict[Path, _Row] = {}
    names_of_sites: defaultdict[str, set[str]] = defaultdict(set)  # column -> its names
    for path in paths:
        frame = read_frame(path)
        find = _FileFinder(folder, path)
        used = _used_columns(path, frame, columns, kind, find)
        of_labels = used["mask"] or used["label"]
        labelled_by = labelled_by or of_labels
        # One column may have another name in each table.
        if of_labels != labelled_by and not len(of_labels) == len(labelled_by) == 1:
            raise DataError(
                f"{path}: has other columns of labels than {paths[0]}; write the same in both, or "
                "choose one table with --table"
            )
        for column in _site_columns(frame, used):
            names_of_sites[column].update(filter(None, frame[column]))
        notes += _missing_words(path, frame, used)
        notes += _without_wrong_ages(path, frame, used)
        if used["label"] and not (kind or columns.label):
            _refuse_masks_beside(folder, path, used["label"])
        folder_column = folder_column or _folder_column(frame, used, find)
        of_patient = _columns_of_a_patients_images(frame, used, find)
        notes += prefixed(path.name, map(_tells_apart, of_patient))
        rows, incomplete = _read_rows(path, frame, used, find, redraw, of_patient)
        read, repeated = _each_once(rows, listed)
        if repeated:
            notes.append(f"{path.name}: {repeated} rows repeat the image and the cells of another")
        if not redraw:
            of_table = find.split if len(paths) > 1 else ""
            read = [_in_split_of_folder(item, of_table, folder, path) for item in read]
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
        notes += _line_of_findings(labels, labelled_by, columns)
    elif len(labelled_by) == 1:
        labels = [label[0] for label in labels]
    items = [replace(item, label=label) for item, label in zip(items, labels, strict=True)]
    guessed = not (used["mask"] or columns.label)
    if items and guessed and len(labelled_by) == 1 and isinstance(labels[0], int):
        _refuse_other_class(" and ".join(map(str, paths)), items, names, folder)
    if 0 < unsplit < len(items) and not redraw:
        notes.append(
            f"{unsplit} of {len(items)} images have no split and count as training; "
            "--redraw draws all splits"
        )
    several = any(isinstance(item.label, list) for item in items) and not used["mask"]
    findings = ", several findings in an image" if several else ""
    layout = [f"{name} {'+'.join(listed)}" for name, listed in used.items() if listed]
    return Dataset(
        "segmentation" if used["mask"] else "classification",
        tuple(items),
        numbered(names),
        f"{' and '.join(path.name for path in paths)}: {', '.join(layout)}{findings}",
        structure=_structure_of(used["mask"]),
        folder_column=folder_column,
        notes=tuple(notes),
        missing=tuple(missing),
        options="--image-column, --label-column and the other columns",
        labelled_by=tuple(labelled_by),
        site_columns={column: len(names) for column, names in names_of_sites.items()},
    )


def _read_rows(
    path: Path,
    frame: pd.DataFrame,
    used: _Used,
    find: "_FileFinder",
    redraw: bool,
    of_patient: Sequence[str],
) -> tuple[list["_Row"], list[str]]:
    """The images of a table with a list of labels each, and a line for each incomplete row;
    `of_patient`: see `_columns_of_a_patients_images`.
    """
    rows = []
    missing = []
    of_files = bool(find.named_by(frame[used["image"][0]]))
    patient_of = _patients_of_folders(frame[used["image"][0]])
    for line, row in zip(frame.index, frame.to_dict("records"), strict=True):
        location = f"{path} line {line}"
        cell = dict.fromkeys(used, "")
        for name, listed in used.items():
            if listed:
                cell[name] = row[listed[0]]
        label = _label_of_row(row, used, find, location)
        images = find.images(cell["image"], location)
        if not images and not of_files:
            images = find.beginning_with(cell["image"])
        for column in of_patient:
            images = find.with_word(row[column], images)
        if not images:
            missing.append(f"{location}: no file for {cell['image']!r}")
        elif not all(label):
            missing.append(f"{location}: {_lacking(used, label)}")
        elif used["site"] and not cell["site"]:
            missing.append(f"{location}: no site")
        else:
            split = "" if redraw else _split_of(cell["split"], location)
            patient = str(patient_id(cell["patient"]))
            if find.is_patient(cell["image"]):
                patient = patient or patient_of[cell["image"]]
            elif used["patient"] == used["image"] and _is_path(patient):
                patient = ""  # of one of the patient's images
            attributes = parse_attributes(cell["sex"], cell["age"], cell["scanner"])
            site = str(patient_id(cell["site"]))
            for image in images:
                item = Item((image,), label, patient, split, site, attributes=attributes)
                rows.append(_Row(location, item))
    return rows, missing


def _folder_column(frame: pd.DataFrame, used: _Used, find: "_FileFinder") -> str:
    """The column that names folders of images in place of files; "" if it is one of patients."""
    column = used["image"][0]
    return column if not used["patient"] and find.is_patient(frame[column].iloc[0]) else ""


def _columns_of_a_patients_images(
    frame: pd.DataFrame, used: _Used, find: "_FileFinder"
) -> list[str]:
    """The columns that tell the images of a row's patient apart, as eye, visit or session: most
    cells are a word in the path of one of them, and some not of all.
    """
    image_column = used["image"][0]
    taken = set(chain(*used.values()))
    if find.named_by(frame[image_column]):
        return []
    columns = []
    for name in frame:
        if name in taken:
            continue
        rows = 0
        named = 0
        tells_apart = False
        for cell, word in zip(frame[image_column], frame[name], strict=True):
            images = find.of_patient(cell)
            with_word = find.with_word(word, images) if word else []
            rows += bool(images and word)
            named += bool(with_word)
            tells_apart = tells_apart or 0 < len(with_word) < len(images)
        if tells_apart and 2 * named > rows:
            columns.append(name)
    return columns


def _tells_apart(column: str) -> str:
    return f"{column} tells the images of a patient apart"


def _patients_of_folders(cells: Iterable[str]) -> dict[str, str]:
    """Folder -> its patient: the folder above, if folders of several patients are called alike.

    Examples:
        >>> _patients_of_folders(["a/p1/study1/", "a/p1/study2/", "a/p2/study1/"])["a/p1/study2/"]
        'a/p1'
        >>> _patients_of_folders(["data/p1", "data/p2"])["data/p1"]
        'data/p1'
    """
    parts = {}
    for cell in cells:
        parts[cell] = cell.replace("\\", "/").strip("/").rpartition("/")
    above = {(parent, name) for parent, _, name in parts.values()}
    studies = Counter(name for _, name in above)
    called_alike = any(count > 1 for count in studies.values())
    patients = {}
    for cell, (parent, _, name) in parts.items():
        whole = f"{parent}/{name}" if parent else name
        patients[cell] = parent if called_alike and parent else whole
    return patients


def _line_of_findings(
    labels: Sequence[Any], labelled_by: Sequence[str], columns: Columns
) -> list[str]:
    """A line about findings that no option names."""
    if columns.label or len(labelled_by) == 1 or isinstance(labels[0], int):
        return []
    listed = f"{len(labelled_by)} columns of 0 and 1, {labelled_by[0]} to {labelled_by[-1]}"
    remedy = "if some are none, name the findings with --label-column a,b,c"
    return [f"{listed}, count as findings; {remedy}"]


def _lacking(used: _Used, label: Sequence[Any]) -> str:
    """What an incomplete row lacks."""
    if used["mask"]:
        return "no mask"
    if len(label) == 1:
        return "no label"
    empty = [name for name, text in zip(used["label"], label, strict=True) if not text]
    return f"no label in column {empty[0]}"


def _refuse_masks_beside(folder: ImageFolder, table: Path, labels: Sequence[str]) -> None:
    """Raise DataError if masks lie beside the images of a table of classes."""
    masks = [path for path, name in folder.names.items() if name.mask]
    if masks:
        raise DataError(
            f"{table}: column {labels[0]} can be the class, but masks lie beside the images, as "
            f"{folder.relative(masks[0])}; give --kind classification or --kind segmentation"
        )


def _each_once(rows: Iterable["_Row"], listed: dict[Path, "_Row"]) -> tuple[list[Item], int]:
    """The images that are not `listed` yet, and the number of rows that repeat another one, as of
    several boxes in an image; DataError for a row that says something else of its image.
    """
    items = []
    repeated = 0
    for row in rows:
        earlier = listed.setdefault(row.item.first, row)
        if earlier is row:
            items.append(row.item)
            continue
        repeated += 1
        if earlier.item != row.item:
            raise DataError(
                f"{row.location}: image {row.item.first.name} is also in {earlier.location}, with "
                "other cells; keep one row of an image, and join several findings in its label by |"
            )
    return items, repeated


def _in_split_of_folder(item: Item, of_table: str, folder: ImageFolder, table: Path) -> Item:
    """The image with the split that its row, the name of its table or one of its folders names.

    DataError for a row and a folder of which one says test.
    """
    split = item.split or of_table
    of_folder = split_above(folder, item.first)
    if of_folder and split not in ("", of_folder) and "test" in (split, of_folder):
        raise DataError(
            f"{table}: {folder.relative(item.first)} is in the split {split}, but in a folder of "
            f"{of_folder}; correct one, give another --split-column, or draw new splits with "
            "--redraw"
        )
    return replace(item, split=split or of_folder)


def _refuse_other_class(
    table: str, items: Sequence[Item], names: Sequence[str], folder: ImageFolder
) -> None:
    """Raise DataError for an image in the folder of another class than its row has, if every image
    is in a folder that is called like a class.
    """
    class_of = {name.casefold(): name for name in names}
    of_folders = [class_of.get(item.first.parent.name.casefold()) for item in items]
    if None in of_folders or len({*of_folders}) < 2:
        return
    for item, of_folder in zip(items, of_folders, strict=True):
        if names[item.label] != of_folder:
            raise DataError(
                f"{table}: {folder.relative(item.first)} is {names[item.label]}, but in the folder "
                f"of {of_folder}; correct one, or give --label-column"
            )


def _is_path(cell: str) -> bool:
    return "/" in cell or "\\" in cell


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


def _structure_of(columns: Sequence[str]) -> str:
    """The structure that the only column of masks is named for, "" if it has no such name.

    Examples:
        >>> _structure_of(["vessel_mask"]), _structure_of(["mask file"]), _structure_of(["a", "b"])
        ('vessel', '', '')
    """
    if len(columns) != 1:
        return ""
    other = {*WORDS["mask"], *WORDS["image"], *chain.from_iterable(map(words, _MASK_COLUMNS))}
    return "_".join(word for word in words(columns[0]) if word not in other)


def _missing_words(path: Path, frame: pd.DataFrame, used: _Used) -> list[str]:
    """A line for each column of names with words such as NA, which may mean a missing value;
    DataError for such a word among numbers of classes.
    """
    lines = []
    columns = [*used["patient"], *used["site"]]
    if len(used["label"]) == 1:
        columns = [*used["label"], *columns]
    for column in columns:
        found = sorted({text for text in frame[column] if text.lower() in _MISSING})
        others = [text for text in frame[column] if text and text not in found]
        if found and column in used["label"] and others and None not in map(number_of, others):
            raise DataError(
                f"{path}: {' and '.join(found)} in column {column}, whose other cells are numbers; "
                "empty these cells if values are missing, otherwise write words in all"
            )
        if found:
            lines.append(
                f"{path.name}: {' and '.join(found)} in column {column} count as names; "
                "empty the cells if values are missing"
            )
    return lines


def _site_columns(frame: pd.DataFrame, used: _Used) -> list[str]:
    """The columns that may name the sites, the likeliest first; none if the user names one."""
    if used["site"]:
        return []
    taken = set(chain(*used.values()))
    others = [column for column in frame if column not in taken]
    return usual_columns(WORDS["site_column"], others)


def _without_wrong_ages(path: Path, frame: pd.DataFrame, used: _Used) -> list[str]:
    """Take a column with other values than ages in years from the used ones; a line about it."""
    for column in used["age"]:
        problem = age_problem(frame[column])
        if problem:
            used["age"] = []
            return [f"{path.name}: column {column} is not read as the age: {problem}"]
    return []


def described(
    items: Sequence[Item], path: Path, folder: ImageFolder, columns: Columns, *, redraw: bool
) -> tuple[list[Item], str]:
    """The images with what a table without labels says of them, as participants.tsv of BIDS: their
    patients, sites, splits, sex, age and scanner.

    Returns:
        The images, and the columns that were read, in words, "" for none.

    Raises:
        DataError: two rows that say different things of an image, or as of `read_tables`.
    """
    frame = read_frame(path)
    find = _FileFinder(folder, path)
    used = _columns_but_labels(path, frame, replace(columns, label="", mask=""), find)
    used["split"] = used["split"] or _split_columns(frame, used)
    _without_wrong_ages(path, frame, used)
    named = ("patient", "site", "split", "sex", "age", "scanner")
    read = {name: used[name][0] for name in named if used[name]}
    of_table = "" if redraw or used["split"] else find.split
    if not (read or of_table) or not used["image"]:
        return [*items], ""
    cells_of: dict[Path, dict[str, str]] = {}
    for line, row in zip(frame.index, frame.to_dict("records"), strict=True):
        cells = {name: row[column] for name, column in read.items()}
        for image in find.described(row[used["image"][0]]):
            other = cells_of.setdefault(image, cells)
            if other != cells:
                raise DataError(
                    f"{path} line {line}: says something else of {folder.relative(image)} than "
                    "another row; keep one row of an image"
                )
    complete = []
    for item in items:
        if item.first not in cells_of:
            complete.append(item)
            continue
        cells = cells_of[item.first]
        site = str(patient_id(cells.get("site", "")))
        if site and item.site not in ("", site):
            raise DataError(
                f"{path}: {folder.relative(item.first)} is at site {site}, in another table at "
                f"{item.site}; choose one with --table"
            )
        attributes = parse_attributes(*map(cells.get, ("sex", "age", "scanner")))
        split = "" if redraw else _split_of(cells.get("split", of_table), str(path))
        with_cells = replace(
            item,
            patient=item.patient or str(patient_id(cells.get("patient", ""))),
            site=site or item.site,
            split=split or item.split,
            attributes=attributes.completed(item.attributes),
        )
        complete.append(with_cells if redraw else _in_split_of_folder(with_cells, "", folder, path))
    if of_table:
        read["split"] = of_table
    listed = ", ".join(f"{name} {column}" for name, column in read.items())
    return complete, f"{folder.relative(path)}: {listed}"


def patients_of_table(path: Path, folder: ImageFolder, columns: Columns) -> dict[Path, str]:
    """Image -> its patient in a table that names both; {} for another table."""
    frame = read_frame(path)
    find = _FileFinder(folder, path)
    used = _columns_but_labels(path, frame, columns, find)
    patients: dict[Path, str] = {}
    if not used["image"] or not used["patient"] or used["patient"] == used["image"]:
        return patients
    names = frame[[*used["image"], *used["patient"]]].to_numpy()
    for image_name, patient in names:
        for image in find.described(image_name):
            patients[image] = str(patient_id(patient))
    return patients


def split_of_table(path: Path, folder: ImageFolder, columns: Columns, kind: str) -> str:
    """The split that the name of a table has, or "".

    DataError if it names no image of the folder in its first rows, or has no labels.
    """
    frame = read_frame(path)
    find = _FileFinder(folder, path)
    patients = [columns.patient] if columns.patient in frame else []
    patients = patients or usual_columns(WORDS["column"]["patient"], list(frame))
    patients += [columns.image] if columns.image in frame else []
    named = any(find.named_by(frame[name]) for name in frame)
    if not named and not find.names_patients(frame, [*patients, *_keys(frame)]):
        names = usual_columns(WORDS["column"]["image"], list(frame)) or list(frame)
        for cell in frame[names[0]].head(_SAMPLE):
            find(cell, f"{folder.relative(path)} column {names[0]}")  # raises if it can be several
        kind_of_error = UnrelatedTableError if len(frame) < len(folder.images) else DataError
        first = frame[names[0]].iloc[0]
        remedy = "correct the names, or give --image-column"
        if find.named_by(frame[names[0]].str.rpartition("_")[0]):
            remedy = "write a row for each image, and a column for each finding"
        elif names == list(frame):
            remedy = f"write the names of images in a column image, as {folder.images[0].name}"
        raise kind_of_error(
            f"{folder.relative(path)} names no image of the folder, as {first!r} in column "
            f"{names[0]}; {remedy}"
        )
    _used_columns(path, frame, columns, kind, find)
    return find.split


def table_columns(path: Path) -> list[str]:
    """The names of a table's columns; [] if it cannot be read."""
    try:
        return list(read_frame(path).columns)
    except DataError:
        return []


def _used_columns(
    path: Path, frame: pd.DataFrame, columns: Columns, kind: str, find: "_FileFinder"
) -> _Used:
    """The columns of the table.

    An image column without a usual name is the one that names the most files; a label column by the
    last word of its name, or several that hold 0 and 1.
    """
    header = list(frame.columns)
    used = _columns_but_labels(path, frame, columns, find)
    if kind == "classification" or (columns.label and not columns.mask):
        used["mask"] = []
    if not used["label"] and not used["mask"] and kind != "segmentation":
        used["label"] = _label_columns(path, frame, used)
    used["split"] = used["split"] or _split_columns(frame, used)
    if used["mask"] or kind == "segmentation":
        used["label"] = []
    if not used["mask"]:
        _refuse_run_lengths(path, frame, used["label"] or header)
    for name in used["label"]:
        if _names_files(frame[name]):
            raise DataError(
                f"{path}: column {name} names files, as {frame[name].iloc[0]!r}; give "
                f"--mask-column {name} if they are masks, otherwise another --label-column"
            )
    needed = {"image": used["image"]}
    needed["mask" if kind == "segmentation" else "label"] = used["label"] or used["mask"]
    for name, listed in needed.items():
        if not listed:
            of_files = [column for column in header if _names_files(frame[column])]
            masks = [column for column in of_files if column not in used["image"]]
            choice = f"give --{name}-column, one of {', '.join(header)}"
            if masks and name != "image":
                choice = f"give --mask-column, of {', '.join(masks)}, or --label-column"
            kind_of_error = DataError if name == "image" else UnlabelledTableError
            raise kind_of_error(f"{path}: no column is recognized as the {name}; {choice}")
    return used


def _refuse_run_lengths(path: Path, frame: pd.DataFrame, columns: Iterable[str]) -> None:
    """Raise DataError if one of the columns has masks as run lengths."""
    for name in columns:
        if frame[name].str.fullmatch(_RUN_LENGTHS).any():
            raise DataError(
                f"{path}: column {name} has lists of numbers, as run lengths of masks, which are "
                "not read; save each mask as a picture and give --mask-column, or give another "
                "--label-column"
            )


def _names_files(cells: "pd.Series[str]") -> bool:
    """Whether the first cell has the suffix of an image."""
    return suffix(Path(cells.iloc[0])) in image_suffixes()


def _columns_but_labels(
    path: Path, frame: pd.DataFrame, columns: Columns, find: "_FileFinder"
) -> _Used:
    """The columns of the table; those of labels only as far as they are requested."""
    header = list(frame.columns)
    used = _requested_columns(path, columns, header, find.other_tables)
    for name in {*used} - {"image", "label"}:
        used[name] = used[name] or usual_columns(WORDS["column"][name], header)[:1]
    taken = set(chain(*used.values()))
    others = [column for column in header if column not in taken]
    for name, usual_names in WORDS["attribute_column"].items():
        used[name] = usual_columns(usual_names, others)[:1]  # see `data.attributes`
    used["image"] = used["image"] or _image_columns(path, frame, find, used)
    return used


def _requested_columns(
    path: Path, columns: Columns, header: Sequence[str], others: Iterable[Path]
) -> _Used:
    """The columns that options name; DataError for one that the table lacks, if it is not one of
    patients, sites or splits that one of the `others` has.
    """
    used = {}
    for name, requested in asdict(columns).items():
        names = [requested] if _clean(requested) in header else requested.split(",")
        used[name] = [_clean(part) for part in names if part.strip()]
        missing = [column for column in used[name] if column not in header]
        may_be_elsewhere = missing and name in ("patient", "site", "split")
        if may_be_elsewhere and any(missing[0] in table_columns(other) for other in others):
            used[name] = []
        elif missing:
            raise DataError(no_such("column", missing[0], header, f"{path}: --{name}-column"))
    return used


def _image_columns(path: Path, frame: pd.DataFrame, find: "_FileFinder", used: _Used) -> list[str]:
    """The column with the likeliest of its usual names that names files, otherwise the one that
    names the most, of equals one whose cells have an image's suffix; or the one of the patients.
    """
    usual = usual_columns(WORDS["column"]["image"], list(frame))
    images = {name: find.named_by(cells) for name, cells in frame.items()}
    counts = {}
    for name, cells in frame.items():
        counts[name] = len(images[name]), _names_files(cells)
    for name in usual:
        if counts[name][0]:
            return [name]
    most = max(counts, key=counts.__getitem__)
    if not counts[most][0]:
        named = [*used["patient"], *_keys(frame)]
        named = [name for name in named if find.names_patients(frame, [name])]
        named.sort(key=lambda name: (not find.names_each(frame[name]), not frame[name].is_unique))
        if named and _is_path(named[0]) and find.is_patient(named[0]):
            raise _without_header(path)
        return named[:1] or usual[:1]
    if find.named_by(pd.Series([most])):
        raise _without_header(path)
    for name, others in images.items():
        if others and others.isdisjoint(images[most]) and not find.are_masks(others):
            raise DataError(
                f"{path}: {most} and {name} both name images; write a row for each image, or give "
                "--image-column, and --mask-column if one has masks"
            )
    find.refuse_some_numbers(path, frame[most])
    return [most]


def _without_header(path: Path) -> DataError:
    return DataError(f"{path}: its first line names an image; put the names of columns above it")


def _keys(frame: pd.DataFrame) -> list[str]:
    """The columns with another text in each row, which may name the folder of a patient."""
    keys = []
    for name in frame:
        are_names = all(map(PATIENT.search, frame[name]))
        if are_names and frame[name].is_unique and len(frame) > 1:
            keys.append(name)
    return keys


def _split_columns(frame: pd.DataFrame, used: _Used) -> list[str]:
    """The first other column whose cells name splits, at least two, and most of them do."""
    for name, cells in frame.items():
        splits = list(filter(None, map(split_name, cells)))
        named_by_most = 2 * len(splits) > len(cells)
        if named_by_most and len({*splits}) > 1 and [name] not in used.values():
            return [name]
    return []


def usual_columns(usual_names: Sequence[str], header: Sequence[str]) -> list[str]:
    """The columns with usual names, the likeliest first."""
    by_words = {" ".join(words(name)): name for name in reversed(header)}
    return [by_words[usual] for usual in usual_names if usual in by_words]


def _label_columns(path: Path, frame: pd.DataFrame, used: _Used) -> list[str]:
    """The column with a usual name, otherwise the one whose name ends in a word for labels,
    otherwise several that hold 0 and 1.

    DataError if two columns are called so, and divide the rows in different classes, or as of
    `_columns_of_flags`.
    """
    others = [name for name in frame.columns if [name] not in used.values()]
    named = usual_columns(WORDS["column"]["label"], others)
    if not named:
        named = [name for name in others if {*words(name)[-1:]} & {*WORDS["label_column_end"]}]
    for name in named[1:]:
        pairs = frame[[named[0], name]].drop_duplicates()
        if pairs[named[0]].duplicated().any() or pairs[name].duplicated().any():
            raise DataError(
                f"{path}: {named[0]} and {name} can both be the label; give --label-column"
            )
    if named:
        return named[:1]
    return _columns_of_flags(path, frame, others)


def _columns_of_flags(path: Path, frame: pd.DataFrame, others: Sequence[str]) -> list[str]:
    """Columns of 0 and 1: classes, of which each row has one, or many findings side by side.

    DataError for others, as a clinical table has 0 and 1 for much that is no label, and for empty
    cells and -1 beside 0 and 1, as CheXpert has them.
    """
    values_of = {name: {*map(number_of, frame[name].unique())} for name in others}
    flags = [name for name, values in values_of.items() if values <= {0, 1}]
    varying = [name for name in flags if len(values_of[name]) > 1]
    if len(flags) < 2 or not varying:
        _refuse_unfinished_flags(path, values_of)
        return []
    if _classes_among(frame, flags) == flags:
        return flags
    classes = _classes_among(frame, varying)
    first = list(frame).index(flags[0])
    side_by_side = list(frame)[first : first + len(flags)] == flags
    if side_by_side and len(flags) >= _FINDINGS and not classes:
        return flags
    _refuse_unfinished_flags(path, values_of)
    example = ",".join(classes or flags[:2])
    raise DataError(
        f"{path}: which of {', '.join(flags)} are labels? all hold 0 and 1; give --label-column "
        f"with one of them, or with several, as {example}"
    )


def _classes_among(frame: pd.DataFrame, flags: list[str]) -> list[str]:
    """The most neighbours of these columns that are classes: each row has one 1 in them."""
    numbers = frame[flags].map(number_of).astype(int).to_numpy()
    sums = np.pad(numbers.cumsum(axis=1), ((0, 0), (1, 0)))  # of the columns before each
    for width in range(len(flags), 1, -1):
        for start in range(len(flags) - width + 1):
            if (sums[:, start + width] - sums[:, start] == 1).all():
                return flags[start : start + width]
    return []


def _refuse_unfinished_flags(path: Path, values_of: Mapping[str, set[float | None]]) -> None:
    """Raise DataError for several columns that have other cells beside 0 and 1; `values_of`: column
    -> its numbers, None for other texts.
    """
    unfinished = []
    for name, values in values_of.items():
        if {0, 1} < values <= {None, -1, 0, 1}:
            unfinished.append(name)
    if len(unfinished) > 1:
        raise DataError(
            f"{path}: {unfinished[0]}, {unfinished[1]}, ... have empty cells, -1 or words beside 0 "
            "and 1; write 0 or 1 in each (CheXpert: an empty cell is no mention, -1 is uncertain), "
            "and name the findings with --label-column a,b,c"
        )


class _FileFinder:
    """The image that a cell names.

    Relative to the table or the folder, otherwise by the end of its path, with or without suffix.
    The shorter path must be the end of the longer one: `test/1.png` is not `train/1.png`. Of
    several images, it is the one below the table's folder, or that of the `split` that the table is
    named after ("" if it names none).
    """

    def __init__(self, folder: ImageFolder, table: Path):
        self._folder = folder
        self.other_tables = [other for other in folder.tables if other != table]
        self._homes = (table.parent, folder.root)
        self._images = frozenset(folder.images)
        self.split = next(filter(None, map(split_name, words(table.stem))), "")
        if not self.split and table.is_relative_to(folder.root):
            self.split = parse_name(table.relative_to(folder.root)).split
        self._by_end: defaultdict[str, list[Path]] = defaultdict(list)  # end of the path -> images
        self._by_path: defaultdict[str, list[Path]] = defaultdict(list)
        self._by_number: defaultdict[str, list[Path]] = defaultdict(list)  # 7 of 007.png
        # PatientID, or a folder or several, as p1 and p1/study2; and of DICOM, the study -> images.
        self._by_patient: defaultdict[str, list[Path]] = defaultdict(list)
        self._by_beginning: defaultdict[str, list[Path]] = defaultdict(list)  # P7 of P7_left.png
        self._studies = set(chain.from_iterable(folder.studies.values()))
        for image in folder.images:
            inner = image.relative_to(folder.root).parent.parts
            parts = _folded(inner)
            for name in {*_folded((image.name, stem(image)))}:
                for start in range(len(parts) + 1):
                    self._by_end["/".join((*parts[start:], name))].append(image)
                self._by_path["/".join((*parts, name))].append(image)
            if stem(image).isdecimal():
                self._by_number[stem(image).lstrip("0")].append(image)
            for beginning in _beginnings(stem(image)):
                self._by_beginning[beginning].append(image)
            patient = folder.patients.get(image, "")
            owners = [patient] if patient else _folders_of(inner)
            for name in {*owners, *folder.studies.get(image, ())}:
                self._by_patient[name].append(image)
                with_letter = _LETTER_AND_NUMBER.fullmatch(name)
                if with_letter:
                    self._by_patient[with_letter[1]].append(image)

    def named_by(self, cells: "pd.Series[str]") -> set[Path]:
        """The images that the first rows of a column name; none if a cell can be several."""
        named: set[Path] = set()
        for cell in cells.head(_SAMPLE):
            images = self._without_masks(self._named(cell))
            if len(images) > 1:
                return set()
            named.update(images)
        return named

    def names_patients(self, frame: pd.DataFrame, columns: Sequence[str]) -> bool:
        """Whether one of the columns names patients of images, see `images`."""
        for name in columns:
            for cell in frame[name]:
                if self._of_patient(cell) or self.beginning_with(cell):
                    return True
        return False

    def names_each(self, cells: "pd.Series[str]") -> bool:
        """Whether no cell names several volumes."""
        try:
            for cell in cells:
                self.images(cell, "")
        except DataError:
            return False
        return True

    def _of_patient(self, cell: str) -> list[Path]:
        """The images of a patient, or below a folder, whose path may begin with the whole one's."""
        path = cell.replace("\\", "/").strip("/")
        inner = path.removeprefix(f"{self._folder.root.resolve().name}/")
        return self._by_patient.get(path) or self._by_patient.get(inner, [])

    def images(self, cell: str, location: str) -> Sequence[Path]:
        """The image that a cell names, otherwise those of a patient: of DICOM's PatientID, or in
        folders of this name. DataError for several volumes that may be of different kinds.
        """
        named = self._without_masks(self._named(cell))
        self._refuse_several(named, cell, location)
        if named:
            return named
        images = self._without_masks(self._of_patient(cell))
        kinds = {re.split("[_-]", stem(image))[-1] for image in images}  # T1w of sub-1_ses-2_T1w
        are_series = any(not image.is_file() for image in images)
        are_volumes = any(suffix(image) in NIFTI for image in images)
        if are_series or (are_volumes and len(kinds) > 1):
            self._refuse_several(images, cell, location)
        return images

    def refuse_some_numbers(self, path: Path, cells: "pd.Series[str]") -> None:
        """Raise DataError for a column of numbers that name a part of the images, as those of
        patients would by accident.
        """
        images = len(self._without_masks(self._folder.images))
        if cells.str.isdecimal().all() and len(cells) < NEARLY_ALL * images and not self.split:
            raise DataError(
                f"{path}: column {cells.name} has numbers that name {len(cells)} of {images} "
                f"images; if they are images, give --image-column {cells.name}; if they are "
                "patients, write names of images, or of the patients' folders, in a column"
            )

    def _without_masks(self, images: Sequence[Path]) -> Sequence[Path]:
        """Those that are not called as masks are, unless all are."""
        return [image for image in images if not self._folder.names[image].mask] or images

    def are_masks(self, images: Iterable[Path]) -> bool:
        """Whether files are called as masks are."""
        return all(self._folder.names[image].mask for image in images)

    def _refuse_several(self, images: Sequence[Path], cell: str, location: str) -> None:
        if len(images) > 1:
            both = " and ".join(map(self._folder.relative, images[:2]))
            raise DataError(
                f"{location}: {cell!r} can be {both}; write the whole path in the table"
            )

    def __call__(self, cell: str, location: str) -> Path | None:
        images = self._named(cell)
        self._refuse_several(images, cell, location)
        return images[0] if images else None

    def is_patient(self, cell: str) -> bool:
        """Whether a cell names the images of a patient, and no image and no study."""
        if cell in self._studies or self._named(cell):
            return False
        return bool(self._of_patient(cell) or self.beginning_with(cell))

    def of_patient(self, cell: str) -> Sequence[Path]:
        """The images of the patient that a cell names, by folders or the beginning of names."""
        return self._without_masks(self._of_patient(cell)) or self.beginning_with(cell)

    def with_word(self, word: str, images: Sequence[Path]) -> Sequence[Path]:
        """The images that have a word in their path, or as a part of it; all for ""."""
        if not word:
            return images
        found = []
        for image in images:
            folders = image.relative_to(self._folder.root).parent.parts
            parts = _folded([*folders, stem(image)])
            parts += chain.from_iterable(re.split("[ _.-]+", part) for part in list(parts))
            if composed(word).casefold() in parts:
                found.append(image)
        return found

    def beginning_with(self, cell: str) -> Sequence[Path]:
        """The images whose file names begin with a cell that is no word, as P7_left.png with P7."""
        return self._without_masks(self._by_beginning.get(composed(cell), []))

    def described(self, cell: str) -> list[Path]:
        """All images that a cell may name, of a patient or by their names."""
        return self._of_patient(cell) or self._named(cell)

    def _named(self, cell: str) -> list[Path]:
        """The images that have the name in a cell."""
        text = cell.replace("\\", "/")
        for home in self._homes:
            if text and home / text in self._images:
                return [home / text]
        parts = _folded([part for part in text.split("/") if part not in ("", ".", "..")])
        whole = "/".join(parts)
        images = self._by_path.get(whole) or self._nearest(self._by_end.get(whole, []))
        for start in range(1, len(parts)):
            images = images or self._by_path.get("/".join(parts[start:]), [])
        name = composed(text).rpartition("/")[2]
        images = [image for image in images if composed(image.name) == name] or images
        if not images and text.isdecimal():  # Excel stores 007 as 7
            images = self._by_number.get(text.lstrip("0"), [])
        return images

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


def _beginnings(name: str) -> list[str]:
    """The beginnings of a file's name, up to a mark between its words, that may be a patient.

    Examples:
        >>> _beginnings("P07_left_2"), _beginnings("img_a")
        (['P07', 'P07_left'], [])
    """
    name = composed(name)
    beginnings = []
    for match in re.finditer("[ _.-]+", name):
        beginning = name[: match.start()]
        if PATIENT.search(beginning):
            beginnings.append(beginning)
    return beginnings


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
        numbers = list(map(number_of, names))
        measured = None not in numbers and any(number % 1 for number in filter(None, numbers))
        rarely_twice = None not in numbers and 2 * len(names) > len(column)
        measured = measured or rarely_twice
        if len(names) > (_MAX_LEVELS if measured else MAX_CLASSES):
            remedy = "name the class with --label-column"
            if measured:
                remedy = "measurements cannot be predicted (regression), write classes instead"
            raise DataError(
                f"{location} has {len(names)} values, for example {names[0]!r}; {remedy}"
            )
        refuse_variants(names, location)
        _refuse_joined(names, location)
        return column.map(names.index).tolist(), names
    columns = list(cells.columns)
    numbers = cells.map(_flag)
    for name in columns:
        for text in cells[name][numbers[name].isna()]:
            raise DataError(
                f"{location}: {text!r} in column {name}; several label columns hold 0 or 1 each, "
                "write one of them, or empty the cell and give --skip"
            )
    rows = numbers.astype(int).to_numpy()
    if (rows.sum(axis=1) == 1).all():
        return rows.argmax(axis=1).tolist(), columns
    return rows.tolist(), columns


def _flag(text: str) -> float | None:
    """The 0 or 1 of a finding, or None for another text."""
    number = {"true": 1.0, "false": 0.0}.get(text.lower(), number_of(text))
    return number if number in (0, 1) else None


def _refuse_joined(names: Sequence[str], location: str) -> None:
    """Raise DataError for a class that lists several labels, as JSON and Python write them too."""
    for name in names:
        joined = name.startswith(("[", "{"))
        for mark in ";,/+&":
            parts = {part.strip() for part in name.split(mark)}
            joined = joined or (len(parts) > 1 and (mark == ";" or parts <= {*names}))
        if joined:
            raise DataError(
                f"{location}: {name!r} joins other labels; if they are findings of one image, "
                "write | between them, otherwise rename it, or give another --label-column"
            )
