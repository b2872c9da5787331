"""The columns of a table that name images, labels, masks, patients, sites and splits."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, product
from pathlib import Path
from typing import TypeAlias

import pandas as pd

from medflare.core.errors import DataError
from medflare.core.settings import no_such
from medflare.data.reading import image_suffixes, suffix
from medflare.preparation.dataset_import.frames import (
    SAMPLED_ROWS,
    clean_text,
    first_text,
    named_columns,
    table_columns,
)
from medflare.preparation.dataset_import.image_table import ImageTable
from medflare.preparation.dataset_import.names import PATIENT, WORDS, number_of, split_name, words
from medflare.preparation.dataset_import.options import Columns

_FINDINGS = 5  # least columns of 0 and 1 that are findings without a question
# Start and length of each run of a mask, as of Kaggle's competitions.
_RUN_LENGTHS = r"\d+ \d+(?: \d+ \d+)+"
_OUTLINE = r'.*"(?:all_points_x|points|cx|height)".*'  # JSON of annotation tools

# Attribute of `Columns`, sex, age and scanner -> the columns of the table; empty if there is none.
UsedColumns: TypeAlias = dict[str, list[str]]


class ColumnError(DataError):
    """A column of a table is missing, unclear, or does not have what it should have."""


class UnlabelledTableError(ColumnError):
    """No column of a table can be the label or the mask."""


def used_columns(table: ImageTable, columns: Columns, kind: str) -> UsedColumns:
    """The columns of the table.

    An image column without a usual name is the one that names the most files; a label column by the
    last word of its name, or several that hold 0 and 1.
    """
    frame = table.frame
    used = columns_but_labels(table, columns)
    if kind == "classification" or (columns.label and not columns.mask):
        used["mask"] = []
    if not used["label"] and not used["mask"] and kind != "segmentation":
        used["label"] = _label_columns(table, used)
    if used["mask"] or kind == "segmentation":
        used["label"] = []
    _refuse_outlines(table, used["mask"] or used["label"] or table.header)
    for name in used["label"]:
        if _names_files(frame[name]):
            raise ColumnError(
                f"{table.path}: column {name} names files, as {first_text(frame[name])!r}; give "
                f"--mask-column {name} if they are masks, otherwise another --label-column"
            )
    needed = {"image": used["image"]}
    needed["mask" if kind == "segmentation" else "label"] = used["label"] or used["mask"]
    for name, listed in needed.items():
        if not listed:
            of_files = [column for column in frame if _names_files(frame[column])]
            masks = [column for column in of_files if column not in used["image"]]
            choice = f"give --{name}-column, one of {', '.join(named_columns(frame))}"
            if masks and name != "image":
                choice = f"give --mask-column, of {', '.join(masks)}, or --label-column"
            choice = _names_below(frame) or choice
            kind_of_error = ColumnError if name == "image" else UnlabelledTableError
            raise kind_of_error(f"{table.path}: no column is recognized as the {name}; {choice}")
    return used


def _names_below(frame: pd.DataFrame) -> str:
    """The remedy for titles above the names of columns, or "" if no line has usual names."""
    usual = [*WORDS["column"]["image"], *WORDS["column"]["label"], *WORDS["column"]["mask"]]
    for line, row in frame.head(SAMPLED_ROWS).iterrows():
        if len(usual_columns(usual, list(row))) > 1:
            names = ", ".join(filter(None, row))
            return f"if line {line} has the names of the columns ({names}), take out what is above"
    return ""


def _refuse_outlines(table: ImageTable, columns: Iterable[str]) -> None:
    """Raise ColumnError if one of the columns has masks as run lengths or outlines."""
    kinds = {_RUN_LENGTHS: "lists of numbers, as run lengths of masks", _OUTLINE: "outlines"}
    for name, (pattern, kind) in product(columns, kinds.items()):
        if table.frame[name].str.fullmatch(pattern).any():
            raise ColumnError(
                f"{table.path}: column {name} has {kind}, which are not read; save each mask as a "
                "picture and give --mask-column, or give another --label-column"
            )


def _names_files(cells: "pd.Series[str]") -> bool:
    """Whether the first text has the suffix of an image."""
    return suffix(Path(first_text(cells))) in image_suffixes()


def columns_but_labels(table: ImageTable, columns: Columns) -> UsedColumns:
    """The columns of the table; those of labels only as far as they are requested."""
    frame = table.frame
    header = list(frame)
    used = _requested_columns(table, columns)
    for name in ("mask", "split"):
        used[name] = used[name] or usual_columns(WORDS["column"][name], header)[:1]
    used["patient"] = used["patient"] or patient_columns(frame)[:1]
    taken = set(chain(*used.values()))
    others = [column for column in header if column not in taken]
    for name, usual_names in WORDS["attribute_column"].items():
        used[name] = usual_columns(usual_names, others)[:1]  # see `data.attributes`
    used["image"] = used["image"] or _image_columns(table, used)
    used["split"] = used["split"] or _split_columns(table.frame, used)
    return used


def _requested_columns(table: ImageTable, columns: Columns) -> UsedColumns:
    """The columns that options name; ColumnError for one that the table lacks, if it is not one of
    patients, sites or splits that another table has.
    """
    header = table.header
    used = {}
    for name, requested in asdict(columns).items():
        names = [requested] if clean_text(requested) in header else requested.split(",")
        used[name] = [clean_text(part) for part in names if part.strip()]
        missing = [column for column in used[name] if column not in header]
        if not missing:
            continue
        others = []
        if name in ("patient", "site", "split"):
            others = [*map(table_columns, table.folder.tables)]
        if not any(missing[0] in other for other in others):
            raise ColumnError(
                no_such("column", missing[0], header, f"{table.path}: --{name}-column")
            )
        used[name] = []
    return used


def _image_columns(table: ImageTable, used: UsedColumns) -> list[str]:
    """The column with the likeliest of its usual names that names files, otherwise the one that
    names the most, of equals one whose cells have an image's suffix; or the one of the patients.
    """
    path = table.path
    frame = table.frame.drop(columns=used["mask"])
    usual = usual_columns(WORDS["column"]["image"], list(frame))
    nameless = {*used["label"], *used["age"], *used["sex"]}
    images = {}
    for name, cells in frame.items():
        names_none = name in nameless or table.repeats_numbers(cells)
        images[name] = set[Path]() if names_none else table.named_by(cells)
    for name in usual:
        if images[name]:
            return [name]
    most = max(frame, key=lambda name: (len(images[name]), _names_files(frame[name])))
    if not images[most]:
        _refuse_several_files(table, usual, used["patient"])
        named = list(filter(table.names_patients, [*used["patient"], *key_columns(frame)]))
        named.sort(key=lambda name: (not table.names_each(name), not table.frame[name].is_unique))
        if named and PATIENT.search(named[0]) and table.of_patient(named[0]):
            raise _without_header(path)
        for name in frame:
            cells = frame[name]
            names_images = _names_files(cells) or (name in usual and cells.is_unique)
            is_other = bool(named) and names_images and name not in named
            if is_other and not _tells_apart(table, name, named):
                raise ColumnError(
                    f"{path}: column {name} names no image of the folder, as "
                    f"{first_text(cells)!r}; correct the names, or give --image-column {named[0]} "
                    f"if a row is of all images of its {named[0]}"
                )
        return named[:1] or usual[:1]
    if table.named_by(pd.Series([most])):
        raise _without_header(path)
    for name, others in images.items():
        apart = others and others.isdisjoint(images[most])
        if apart and not others.issubset(table.folder.masks):
            raise ColumnError(
                f"{path}: {most} and {name} both name images; write a row for each image, or give "
                "--image-column, and --mask-column if one has masks"
            )
    table.refuse_some_numbers(most)
    return [most]


def _tells_apart(table: ImageTable, column: str, patients: Iterable[str]) -> bool:
    """Whether the first cells of a column are one image each of the patient of their row, in one
    of the columns of patients.
    """
    frame = table.frame.head(SAMPLED_ROWS)
    for name in patients:
        counts = {
            len(table.with_word(cell, column, table.of_patient(patient)))
            for cell, patient in zip(frame[column], frame[name], strict=True)
        }
        if counts == {1}:
            return True
    return False


def _refuse_several_files(
    table: ImageTable, columns: Iterable[str], patients: Sequence[str]
) -> None:
    """Raise DataError for columns of files, or with another name in each row, that can be several
    files, as raw/1.png and clahe/1.png; "left" may be in each patient's folder.
    """
    for name in columns:
        of_files = table.frame[name].is_unique or _names_files(table.frame[name])
        if of_files and not _tells_apart(table, name, patients):
            for cell in table.frame[name].head(SAMPLED_ROWS):
                table.image(cell, f"{table.path} column {name}")


def _without_header(path: Path) -> DataError:
    return DataError(f"{path}: its first line names images; put the names of columns above it")


def key_columns(frame: pd.DataFrame) -> list[str]:
    """The columns with another text in each row, which may name the folder of a patient."""
    keys = []
    for name in frame:
        are_names = all(map(PATIENT.search, frame[name]))
        if are_names and frame[name].is_unique and len(frame) > 1:
            keys.append(name)
    return keys


def _split_columns(frame: pd.DataFrame, used: UsedColumns) -> list[str]:
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


def patient_columns(frame: pd.DataFrame) -> list[str]:
    """The columns that may name the patients, the likeliest first; cases and lesions, of which a
    patient may have several, last.
    """
    header = list(frame)
    columns = usual_columns(WORDS["column"]["patient"], header)
    for name in header:
        if _is_called_patient(name) and frame[name][frame[name] != ""].duplicated().any():
            columns.append(name)
    return [*columns, *usual_columns(WORDS["column"]["case"], header)]


def _is_called_patient(column: str) -> bool:
    """Whether a column's name is a word for a patient, with words for an identifier or alone.

    Examples:
        >>> list(map(_is_called_patient, ["Patienten-Nr", "record_id", "Patient Age"]))
        [True, True, False]
    """
    rest = [word for word in words(column) if word not in WORDS["identifier"]]
    return len(rest) == 1 and rest[0].removesuffix("id") in WORDS["patient_word"]


def _label_columns(table: ImageTable, used: UsedColumns) -> list[str]:
    """The column with a usual name, otherwise the one whose name ends in a word for labels,
    otherwise several that hold 0 and 1.

    ColumnError if two columns are called so, and divide the rows in different classes, or as of
    `_columns_of_flags`.
    """
    others = [name for name in table.frame if [name] not in used.values()]
    named = usual_columns(WORDS["column"]["label"], others)
    if not named:
        named = [name for name in others if {*words(name)[-1:]} & {*WORDS["label_column_end"]}]
        usual = {*WORDS["column"]["label"]}  # education_level beside diagnosis_sc
        named += [name for name in others if named and name not in named and usual & {*words(name)}]
    for name in named[1:]:
        pairs = table.frame[[named[0], name]].drop_duplicates()
        if pairs[named[0]].duplicated().any() or pairs[name].duplicated().any():
            raise ColumnError(
                f"{table.path}: {named[0]} and {name} can both be the label; give --label-column"
            )
    if named:
        return named[:1]
    return _columns_of_flags(table, others)


def _columns_of_flags(table: ImageTable, others: Sequence[str]) -> list[str]:
    """Columns of 0 and 1: classes, of which each row has one, or many findings side by side.

    ColumnError for others, as a clinical table has 0 and 1 for much that is no label, and for empty
    cells and -1 beside 0 and 1, as CheXpert has them.
    """
    frame = table.frame
    values_of = {name: {*map(number_of, frame[name].unique())} for name in others}
    flags = [name for name, values in values_of.items() if values <= {0, 1}]
    varying = [name for name in flags if len(values_of[name]) > 1]
    if len(flags) < 2 or not varying:
        _refuse_unfinished_flags(table.path, values_of)
        return []
    if _classes_among(frame, flags) == flags:
        return flags
    classes = _classes_among(frame, varying)
    first = list(frame).index(flags[0])
    side_by_side = list(frame)[first : first + len(flags)] == flags
    of_people = any("".join(words(name)) in ("male", "female") for name in flags)
    if side_by_side and len(flags) >= _FINDINGS and not (classes or of_people):
        return flags
    _refuse_unfinished_flags(table.path, values_of)
    example = ",".join(classes or flags[:2])
    raise ColumnError(
        f"{table.path}: which of {', '.join(flags)} are labels? all hold 0 and 1; give "
        f"--label-column with one of them, or with several, as {example}"
    )


def _classes_among(frame: pd.DataFrame, flags: list[str]) -> list[str]:
    """The most neighbours of these columns that are classes: each row has one 1 in them."""
    numbers = frame[flags].map(number_of).to_numpy(bool)
    for width in range(len(flags), 1, -1):
        for start in range(len(flags) - width + 1):
            if (numbers[:, start : start + width].sum(axis=1) == 1).all():
                return flags[start : start + width]
    return []


def _refuse_unfinished_flags(path: Path, values_of: Mapping[str, set[float | None]]) -> None:
    """Raise ColumnError for several columns that have other cells beside 0 and 1; `values_of`:
    column -> its numbers, None for other texts.
    """
    unfinished = []
    for name, values in values_of.items():
        if {0, 1} < values <= {None, -1, 0, 1}:
            unfinished.append(name)
    if len(unfinished) > 1:
        raise ColumnError(
            f"{path}: {unfinished[0]}, {unfinished[1]}, ... have empty cells, -1 or words beside 0 "
            "and 1; write 0 or 1 in each (CheXpert: an empty cell is no mention, -1 is uncertain), "
            "and name the findings with --label-column a,b,c"
        )
