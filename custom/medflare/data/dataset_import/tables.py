"""A table of images: which column says what, and which file each row means."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from medflare.core.errors import DataError
from medflare.core.settings import no_such
from medflare.data.datalist import patient_id
from medflare.data.dataset_import.finding import Holdings, Item, split_folder, split_named, words
from medflare.data.reading import stem

_MOST_CLASSES: Final = 30  # a column with more different values says something else
_EMPTY: Final = frozenset(("", "na", "nan", "none", "null"))
_TRUTH: Final[Mapping[str, int]] = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "False": 0, "True": 1, "false": 0, "true": 1}
# Column -> names that it goes by, the likelier first; compared as words.
_GUESSES: Final[dict[str, tuple[str, ...]]] = {
    "image": ("image", "image path", "image file", "image name", "image id", "filename", "file name", "file", "path", "file path", "id"),
    "label": ("label", "class", "diagnosis", "dx", "category", "target", "grade", "retinopathy grade", "finding"),
    "mask": ("mask", "mask path", "mask file", "mask name", "segmentation"),
    # lesions are of dermoscopy, where no patient is told: pictures of one lesion stay together
    "patient": ("patient", "patient id", "subject", "subject id", "participant id", "case", "case id", "lesion", "lesion id"),
    "split": ("split", "set", "subset"),
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
    rows = read_rows(path)
    used = _used(path, list(rows[0]), columns, kind)
    find = _Finder(held, path.parent)
    items: list[Item] = []
    missing: list[str] = []
    masked = bool(used["mask"])
    for line, row in enumerate(rows, start=2):
        cell = {what: row[names[0]].strip() if names else "" for what, names in used.items()}
        cells = [row[column].strip() for column in used["mask"] or used["label"]]
        image = find(cell["image"], f"{path} line {line}")
        label: list[Any] = [find(name, f"{path} line {line}") for name in cells] if masked else cells
        if image is None or None in label or any(text.lower() in _EMPTY for text in cells):
            lacks = f"no file for {cell['image']!r}" if image is None else f"no {'mask' if masked else 'label'}"
            missing.append(f"{path} line {line}: {lacks}")
            continue
        patient, split = str(patient_id(cell["patient"])), split_named(cell["split"])
        items.append(Item((image,), label[0] if masked and len(label) == 1 else label, patient, split, cell["site"]))
    names = tuple(used["mask"]) if len(used["mask"]) > 1 else ()
    if items and not masked:
        labels, names = _labelled(path, [item.label for item in items], used["label"])
        items = [replace(item, label=label) for item, label in zip(items, labels, strict=True)]
    return Table(tuple(items), names, tuple(missing), ", ".join(f"{what} {'+'.join(found)}" for what, found in used.items() if found))


def suits(path: Path, held: Holdings) -> bool:
    """Whether a table speaks of the folder's images: columns that can be guessed, and a file for one of its first rows."""
    try:
        rows = read_rows(path)
        used, find = _used(path, list(rows[0]), GUESSED, ""), _Finder(held, path.parent)
        return any(find(row[used["image"][0]], str(path)) for row in rows[:20])
    except DataError:
        return False


def read_rows(path: Path, columns: Sequence[str] = ()) -> list[dict[str, str]]:
    """The rows of a table, one at least.

    Raises:
        DataError: not readable, empty, or a column is missing.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            head = file.readline()
            file.seek(0)
            rows = list(csv.DictReader(file, delimiter=max(",;\t", key=head.count), restval=""))
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{path}: not readable as a table ({error}); save it as CSV in UTF-8, or name another with --table") from error
    if not rows:
        raise DataError(f"{path}: a table without rows; name another with --table")
    for row in rows:
        row.pop(None, None)  # cells beyond the header
    for name in columns:
        if name not in rows[0]:
            raise DataError(no_such("column", name, list(rows[0]), str(path)))
    return rows


def _used(path: Path, header: list[str], columns: Columns, kind: str) -> dict[str, list[str]]:
    """What -> the columns that say it."""
    used: dict[str, list[str]] = {}
    spelt = {" ".join(words(name)): name for name in reversed(header)}
    for what in ("image", "label", "mask", "patient", "site", "split"):
        said = [name.strip() for name in getattr(columns, what).split(",") if name.strip()]
        for name in said:
            if name not in header:
                raise DataError(no_such("column", name, header, f"{path}: --{what}-column"))
        used[what] = said or [spelt[guess] for guess in _GUESSES.get(what, ()) if guess in spelt][:1]
    if kind == "classification" or (columns.label and not columns.mask):
        used["mask"] = []
    if used["mask"] or kind == "segmentation":
        used["label"] = []
    for what, found in (("image", used["image"]), ("label", used["label"] or used["mask"])):
        if not found:
            raise DataError(f"{path}: no column is named like the {what}; say --{what}-column, there are {', '.join(header)}")
    return used


class _Finder:
    """The file that a cell means: by its path from the table or the folder, else by its name, with or without suffix.

    Where the cell names folders, too, they must be the last ones of the file, or those of the file below the folder that was given the
    last ones of the cell, and no other split may be named: `test/1.png` is not `train/1.png`.
    """

    def __init__(self, held: Holdings, home: Path):
        self._root, self._home, self._images = held.root, home, frozenset(held.images)
        self._names: dict[str, list[Path]] = {}
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
        parent, _, name = text.rpartition("/")
        folders = [part for part in parent.casefold().split("/") if part not in ("", ".", "..")]
        found = [(common, path) for path in self._names.get(name, []) if (common := self._common(folders, path)) is not None]
        best = [path for common, path in found if common == max(found)[0]]
        if len(best) > 1:
            both = " and ".join(path.relative_to(self._root).as_posix() for path in best[:2])
            raise DataError(f"{place}: {cell!r} may be {both}; write the path in the table")
        return best[0] if best else None

    def _common(self, folders: Sequence[str], path: Path) -> int | None:
        """How many folders cell and file have in common from the end; None where they contradict each other."""
        inner = [part.casefold() for part in path.parent.relative_to(self._root).parts]
        below = [self._root.resolve().name.casefold(), *inner]
        for shorter, longer in ((folders, below), (below, folders), (inner, folders)):
            if list(shorter) == list(longer)[len(longer) - len(shorter) :] and len(shorter) <= len(longer):
                first, second = (next(filter(None, map(split_folder, reversed(parts))), "") for parts in (folders, below))
                return len(shorter) if not first or not second or first == second else None
        return None


def _labelled(path: Path, cells: Sequence[Sequence[str]], columns: Sequence[str]) -> tuple[list[Any], tuple[str, ...]]:
    """Cells as numbers, and the names of the numbers."""
    if len(columns) == 1:
        names = sorted_labels({row[0] for row in cells})
        if len(names) > _MOST_CLASSES:
            many = f"column {columns[0]} has {len(names)} different values, for example {names[0]!r} and {names[-1]!r}"
            raise DataError(f"{path}: {many}; say which column holds the class with --label-column")
        return [names.index(row[0]) for row in cells], tuple(names)
    if wrong := next((cell for row in cells for cell in row if cell not in _TRUTH), None):
        raise DataError(f"{path}: {wrong!r} in a column of {', '.join(columns)}; several label columns hold 0 or 1 each")
    rows = [[_TRUTH[cell] for cell in row] for row in cells]
    return ([row.index(1) for row in rows] if all(sum(row) == 1 for row in rows) else rows), tuple(columns)


def sorted_labels(names: Iterable[str]) -> list[str]:
    """Names of classes in the order of their numbers: as numbers where they are some, else by the alphabet.

    Examples:
        >>> sorted_labels({"10", "9"}), sorted_labels({"nv", "mel"})
        (['9', '10'], ['mel', 'nv'])
    """
    try:
        return sorted(names, key=float)
    except ValueError:
        return sorted(names)
