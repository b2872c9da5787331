"""A table (CSV, TSV or Excel) as a frame of texts."""

import csv
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pandas as pd

from medflare.core.errors import DataError, one_line
from medflare.core.files import refuse_bomb
from medflare.core.packages import require
from medflare.core.settings import no_such
from medflare.core.text import read_text
from medflare.data.reading import suffix
from medflare.preparation.dataset_import.folders import WORKBOOK
from medflare.preparation.dataset_import.names import composed

_COLUMNS = 2000  # most of a sheet of Excel
# Of a sheet's XML: a hidden row with a value.
_HIDDEN_ROW = re.compile(
    rb'<(\w+:)?row [^>]*hidden="(?:1|true)"[^>]*(?<!/)>(?:(?!</(\w+:)?row>).)*?<(\w+:)?(?:v|is)>',
    re.DOTALL,
)
_UNNAMED = "unnamed "  # with its number, the name of a column without one
SAMPLED_ROWS = 20  # rows by which columns and separators are recognized


class UnrelatedTableError(DataError):
    """A table names no image, and has fewer rows than there are images; or cannot be read here."""


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
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; correct the path") from error
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(
            f"{path}: cannot be read as a table ({one_line(error)}); "
            "save it as CSV, or give another --table"
        ) from error
    if not rows:
        raise DataError(f"{path}: a table without rows; give another --table")
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=header, dtype=object)
    for name in columns:
        if name not in frame:
            raise DataError(no_such("column", name, frame.columns, str(path)))
    return frame


def table_columns(path: Path) -> list[str]:
    """The names of a table's columns; [] if it cannot be read."""
    try:
        return list(read_frame(path).columns)
    except DataError:
        return []


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
    """The number and the cells of each row of the only visible sheet that is not empty.

    ValueError for several sheets, none, hidden rows, and a damaged file.
    """
    from openpyxl import load_workbook

    sheets = {}
    try:
        with warnings.catch_warnings(), path.open("rb") as file:
            warnings.filterwarnings("ignore", module="openpyxl")  # of styles that it does not know
            with ZipFile(file) as archive:
                refuse_bomb(archive)
            workbook: Any = load_workbook(file, read_only=True, data_only=True)
            hidden = False
            for sheet in workbook.worksheets:
                if sheet.sheet_state != "visible":  # of choices for cells
                    continue
                content = workbook._archive.read(sheet._worksheet_path)
                hidden = hidden or _HIDDEN_ROW.search(content) is not None
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
    if hidden:
        raise ValueError("rows are hidden, as a filter does; show them, or delete them")
    if len(sheets) != 1:
        raise ValueError(
            f"{len(sheets)} visible sheets with cells ({', '.join(sheets)}), where one counts"
        )
    [(title, rows)] = sheets.items()
    if any(None in row for row in rows):
        _refuse_formulas(path, title)
    for number, row in enumerate(rows, start=1):
        yield number, list(map(_text_of_cell, row))


def _refuse_formulas(path: Path, sheet: str) -> None:
    """Raise ValueError for a formula that a program wrote and that nobody has computed."""
    from openpyxl import load_workbook

    with warnings.catch_warnings(), path.open("rb") as file:
        warnings.filterwarnings("ignore", module="openpyxl")
        values, formulas = (
            load_workbook(file, read_only=True, data_only=only)[sheet].iter_rows()
            for only in (True, False)
        )
        for rows in zip(values, formulas, strict=True):
            for cell, formula in zip(*rows, strict=True):
                # An empty text that was computed has the type str.
                without = cell.value is None and cell.data_type != "str"
                if without and formula.data_type == "f":
                    raise ValueError(
                        f"cell {formula.coordinate} is a formula without a value; open the file in "
                        "Excel and save it"
                    )


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
        cells = list(map(clean_text, texts))
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
        header[number] = name or f"{_UNNAMED}{number + 1}"
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
    reader = csv.reader(lines[:SAMPLED_ROWS], delimiter=separator, skipinitialspace=True)
    widths = Counter(len(cells) for cells in reader if len(cells) > 1)
    return max(((rows, width) for width, rows in widths.items()), default=(0, 0))


def named_columns(frame: pd.DataFrame) -> list[str]:
    """The columns without the first one, if it has no name, as the index that pandas writes."""
    return [name for name in frame if name != f"{_UNNAMED}1"]


def first_text(cells: "pd.Series[str]") -> str:
    """The first cell that is not empty, or ""."""
    return next(filter(None, cells), "")


def clean_text(text: str) -> str:
    return composed(text.strip())
