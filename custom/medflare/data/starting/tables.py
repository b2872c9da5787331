"""A table of images: which column says what, and which file each row means."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Final, TypeAlias

from medflare.core.errors import DataError
from medflare.core.settings import no_such
from medflare.data.datalist import patient_id
from medflare.data.reading import stem
from medflare.data.starting.finding import Holdings, Item
from medflare.data.starting.words import says_images, split_folder, split_named, words

Folders: TypeAlias = tuple[str, ...]

_WHOLE: Final = "/"  # no folder's name
_MOST_CLASSES: Final = 30  # a column with more different values says something else
_EMPTY: Final = frozenset(("", "na", "nan", "none", "null"))
# Column -> names that it goes by, the likelier first; compared as words.
_GUESSES: Final[dict[str, tuple[str, ...]]] = {
    "image": (
        *("image", "image path", "image file", "image name", "image id", "img", "img path", "filename", "file name", "file"),
        *("path", "filepath", "file path", "id"),
    ),
    "label": ("label", "labels", "class", "class name", "diagnosis", "dx", "category", "target", "grade", "retinopathy grade", "finding"),
    "mask": ("mask", "mask path", "mask file", "mask name", "segmentation", "seg", "annotation"),
    "patient": (
        *("patient", "patient id", "subject", "subject id", "participant", "participant id", "case", "case id", "person"),
        *("lesion", "lesion id"),  # of dermoscopy, where no patient is told: pictures of one lesion stay together
    ),
    "split": ("split", "set", "subset", "partition"),
}


@dataclass(frozen=True)
class Columns:
    """Which column says what; "" is guessed by its name. Labels and masks may be several, one a structure or finding.

    Attributes:
        image: the file, by path, name or name without suffix.
        label: its class.
        mask: its mask file.
        patient: whose it is.
        site: where it is from; never guessed.
        split: training, validation or test.
    """

    image: str = ""
    label: str = ""
    mask: str = ""
    patient: str = ""
    site: str = ""
    split: str = ""


GUESSED: Final = Columns()


@dataclass(frozen=True)
class Table:
    """A table that was read.

    Attributes:
        items: an image for every row that has all it needs.
        labels: the names of the classes or structures, in the order of their numbers; empty where the table names none.
        missing: rows that lack a file or a label, one line each.
        by: the columns that were used, for people.
    """

    items: tuple[Item, ...]
    labels: tuple[str, ...]
    missing: tuple[str, ...]
    by: str


def read_table(path: Path, held: Holdings, columns: Columns, *, kind: str = "") -> Table:
    """The images of a table.

    Args:
        path: a CSV or TSV file.
        held: the folder's files.
        columns: as far as they were said.
        kind: "segmentation", "classification", or "" for what the columns suggest.

    Raises:
        DataError: no such column, none that can be guessed, or values that are no labels.
    """
    header, rows = _rows(path)
    used = _used(path, header, columns, kind)
    find = _Finder(held, path.parent)
    items: list[tuple[str, Item]] = []
    missing: list[str] = []
    values = "mask" if used["mask"] else "label"
    for line, row in enumerate(rows, start=2):
        place = f"{path} line {line}"
        image = find(row[used["image"][0]], place)
        cells = [row[column].strip() for column in used[values]]
        masks = [find(cell, place) for cell in cells] if values == "mask" else []
        if image is None or None in masks or any(cell.lower() in _EMPTY for cell in cells):
            lacks = f"no file for {row[used['image'][0]]!r}" if image is None else f"no {values}"
            missing.append(f"{place}: {lacks}")
            continue
        patient = patient_id(row[used["patient"][0]]) if used["patient"] else ""
        site = row[used["site"][0]].strip() if used["site"] else ""
        split = split_named(row[used["split"][0]]) if used["split"] else ""
        label = (masks[0] if len(masks) == 1 else masks) if values == "mask" else cells
        items.append((place, Item((image,), label, patient, split, site)))
    labels: tuple[str, ...] = tuple(used["mask"]) if len(used["mask"]) > 1 else ()
    named = tuple(item for _, item in items)
    if values == "label" and named:
        named, labels = _labelled(path, items, used["label"])
    return Table(named, labels, tuple(missing), ", ".join(f"{name} {'+'.join(found)}" for name, found in used.items() if found))


def suits(path: Path, held: Holdings) -> bool:
    """Whether a table speaks of the folder's images: columns that can be guessed, and a file for one of its first rows.

    Args:
        path: of the table.
        held: the folder's files.
    """
    try:
        header, rows = _rows(path)
        used, find = _used(path, header, Columns(), ""), _Finder(held, path.parent)
        return any(find(row[used["image"][0]], str(path)) for row in rows[:20])
    except DataError:
        return False


def read_rows(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a table that must have some columns.

    Args:
        path: a CSV or TSV file.
        columns: names that it has beside others.

    Raises:
        DataError: not readable, or a column is missing.
    """
    header, rows = _rows(path)
    for name in columns:
        if name not in header:
            raise DataError(no_such("column", name, header, str(path)))
    return rows


def _rows(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not readable as text ({error}); save it as CSV in UTF-8") from error
    try:
        dialect: type[csv.Dialect] = csv.Sniffer().sniff(text[:4096], delimiters=",;\t")
    except csv.Error:
        dialect = csv.excel
    reader = csv.DictReader(StringIO(text, newline=""), dialect=dialect, restval="")
    try:
        return [name for name in reader.fieldnames or [] if name], list(reader)
    except csv.Error as error:
        remedy = "close its quotation marks, take longer cells out, or name another table with --table"
        raise DataError(f"{path} line {reader.reader.line_num}: not readable as a table ({error}); {remedy}") from error


def _used(path: Path, header: list[str], columns: Columns, kind: str) -> dict[str, list[str]]:
    """What -> the columns that say it."""
    used: dict[str, list[str]] = {}
    for what in ("image", "label", "mask", "patient", "site", "split"):
        said = [name.strip() for name in getattr(columns, what).split(",") if name.strip()]
        for name in said:
            if name not in header:
                raise DataError(no_such("column", name, header, f"{path}: --{what}-column"))
        used[what] = said or _guessed(what, header)
    for what, other in (("label", "mask"), ("mask", "label")):  # one of them is enough, and what was asked for counts
        if (getattr(columns, other) and not getattr(columns, what)) or kind == {"mask": "classification", "label": "segmentation"}[what]:
            used[what] = []
    if used["mask"]:
        used["label"] = []
    for what, found in (("image", used["image"]), ("label", used["label"] or used["mask"])):
        if not found:
            raise DataError(f"{path}: no column is named like the {what}; say --{what}-column, there are {', '.join(header)}")
    return used


def _guessed(what: str, header: list[str]) -> list[str]:
    spelt = {" ".join(words(name)): name for name in reversed(header)}
    return [spelt[guess] for guess in _GUESSES.get(what, ()) if guess in spelt][:1]


class _Finder:
    """The file that a cell means: by its path, else its name, else its name without suffix.

    A path may begin above or below the folder that was given: of the shorter one all folders must be the last of the other. A path of
    another machine (`D:\\export\\001.png`) says nothing about folders here: there a file in a folder such as "images" fits as well.
    """

    def __init__(self, held: Holdings, home: Path):
        self._root, self._home, self._images = held.root, home, frozenset(held.images)
        self._names: dict[str, list[Path]] = {}
        self._ends: dict[str, dict[Folders, list[Path]]] = {}  # of the names that were asked for, see `_by_end`
        for image in held.images:
            for name in {image.name, stem(image)}:
                self._names.setdefault(name, []).append(image)

    def __call__(self, cell: str, place: str) -> Path | None:
        text = cell.strip().replace("\\", "/").removeprefix("./")
        if text.lower() in _EMPTY:
            return None
        for folder in (self._home, self._root):
            if (folder / text) in self._images:
                return folder / text
        found = self._fitting(text)
        if len(found) > 1:
            both = " and ".join(path.relative_to(self._root).as_posix() for path in found[:2])
            raise DataError(f"{place}: {cell!r} may be {both}; write the path in the table")
        return found[0] if found else None

    def _fitting(self, text: str) -> list[Path]:
        """The files of that name whose folders fit best; all of them where the cell names no folder."""
        parent, _, name = text.rpartition("/")
        folders = tuple(part for part in parent.casefold().split("/") if part not in ("", ".", ".."))
        named = self._names.get(name, [])
        if not folders:
            return named
        ends = self._by_end(name)
        above = (ends.get((_WHOLE, *folders[start:])) for start in range(1, len(folders) + 1))
        found = ends.get(folders) or next(filter(None, above), [])
        if not found and (text.startswith("/") or text[1:2] == ":"):
            found = [path for path in named if all(part in folders or says_images(part) for part in self._inner(path))]
        return [path for path in found if _of_one_split(folders, (self._root.resolve().name, *self._inner(path)))]

    def _by_end(self, name: str) -> dict[Folders, list[Path]]:
        """The last folders of a path -> the files of that name in such; all its folders below the root with _WHOLE before them."""
        if name not in self._ends:
            ends = self._ends[name] = {}
            for path in self._names.get(name, []):
                inner = self._inner(path)
                below = (self._root.resolve().name.casefold(), *inner)
                for key in ((_WHOLE, *inner), *(below[start:] for start in range(len(below)))):
                    ends.setdefault(key, []).append(path)
        return self._ends[name]

    def _inner(self, path: Path) -> Folders:
        return tuple(part.casefold() for part in path.parent.relative_to(self._root).parts)


def _of_one_split(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether the folders of two paths name the same split, or one of them none; the innermost that names one counts."""
    first, second = (next(filter(None, map(split_folder, reversed(parts))), "") for parts in (one, other))
    return not first or not second or first == second


def _labelled(path: Path, items: Sequence[tuple[str, Item]], columns: Sequence[str]) -> tuple[tuple[Item, ...], tuple[str, ...]]:
    """Cells as numbers, and the names of the numbers."""
    cells = [item.label for _, item in items]
    if len(columns) == 1:
        names = sorted_labels({row[0] for row in cells})
        if len(names) > _MOST_CLASSES:
            many = f"column {columns[0]} has {len(names)} different values, for example {names[0]!r} and {names[-1]!r}"
            raise DataError(f"{path}: {many}; say which column holds the class with --label-column")
        place = {name: number for number, name in enumerate(names)}
        return _with(items, [place[row[0]] for row in cells]), tuple(names)
    for (where, _), row in zip(items, cells, strict=True):
        if wrong := next((cell for cell in row if cell not in _TRUTH), None):
            raise DataError(f"{where}: {wrong!r} in a column of {', '.join(columns)}; several label columns hold 0 or 1 each")
    rows = [[_TRUTH[cell] for cell in row] for row in cells]
    single = all(sum(row) == 1 for row in rows)
    return _with(items, [row.index(1) for row in rows] if single else rows), tuple(columns)


_TRUTH: Final[Mapping[str, int]] = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "False": 0, "True": 1, "false": 0, "true": 1}


def sorted_labels(names: Iterable[str]) -> list[str]:
    """Names of classes in the order of their numbers: as numbers where they are some, else by the alphabet.

    Args:
        names: as the table or the folders have them.

    Examples:
        >>> sorted_labels({"10", "9"}), sorted_labels({"nv", "mel"})
        (['9', '10'], ['mel', 'nv'])
    """
    try:
        return sorted(names, key=float)
    except ValueError:
        return sorted(names)


def _with(items: Sequence[tuple[str, Item]], labels: Sequence[int | list[int]]) -> tuple[Item, ...]:
    return tuple(replace(item, label=label) for (_, item), label in zip(items, labels, strict=True))
