"""The images of a table, with their labels, patients and splits."""

import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, permutations
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd

from medflare.core.errors import DataError
from medflare.data.attributes import age_problem, parse_attributes
from medflare.data.datalist import patient_id
from medflare.data.reading import stem
from medflare.preparation.dataset_import.columns import (
    UsedColumns,
    columns_but_labels,
    key_columns,
    patient_columns,
    used_columns,
    usual_columns,
)
from medflare.preparation.dataset_import.folders import (
    MAX_CLASSES,
    Dataset,
    ImageFolder,
    Item,
    prefixed,
    split_above,
)
from medflare.preparation.dataset_import.frames import (
    SAMPLED_ROWS,
    UnrelatedTableError,
    first_text,
    named_columns,
)
from medflare.preparation.dataset_import.image_table import ImageTable, is_path
from medflare.preparation.dataset_import.names import (
    SPLIT_WORDS,
    WORDS,
    composed,
    is_a_class,
    number_of,
    numbered,
    refuse_variants,
    shortened,
    sorted_labels,
    split_name,
    ungraded,
    words,
)
from medflare.preparation.dataset_import.options import DEFAULTS, Columns, ImportOptions

# Findings as Python and JSON write them, and what is between two: ['effusion', 'mass']
_LIST = r"\[(['\"]).*\1\]"
_BETWEEN = r"['\"], *['\"]"
_DATE = re.compile(r"\d{4}-\d\d-\d\d 00:00:00")  # of a cell of Excel
_EXCEL_ERROR = re.compile(r"#(N/A|NV|[A-ZÀ-Ü/0]+[!?])")  # as #REF! and #BEZUG!
_MASK_COLUMNS: list[str] = WORDS["column"]["mask"]  # usual names
_SPLIT_OR_FOLD = SPLIT_WORDS | {"fold", "folds"}
_OF_PREDICTIONS = "outside_training"  # column of the predictions.csv of `medflare predict`
_MAX_LEVELS = 8  # more numbers with decimals are a measurement, and no classes
# How programs write a missing value, in lower case (those that pandas knows).
_MISSING: list[str] = WORDS["missing_value"]


# Table and line of a row, and what it says of an image, with a list of labels.
_Row: TypeAlias = tuple[str, Item]


def read_tables(tables: Sequence[ImageTable], options: ImportOptions = DEFAULTS) -> Dataset:
    """The images of a table, or of one for each split.

    Without a kind the columns decide whether they are of masks or classes.

    DataError for a missing column, a cell that names several files, values that are no labels, and
    splits that are not known.
    """
    folder = tables[0].folder
    columns = options.columns
    items = []
    missing = []
    notes = []
    labelled_by: list[str] = []
    folder_column = ""
    patient_column = ""
    listed: dict[Path, _Row] = {}
    names_of_sites: defaultdict[str, set[str]] = defaultdict(set)  # column -> its names
    for table in tables:
        path = table.path
        used = used_columns(table, columns, options.kind)
        _refuse_labels_in_other_rows(table, used)
        of_labels = used["mask"] or used["label"]
        labelled_by = labelled_by or of_labels
        # One column may have another name in each table.
        if of_labels != labelled_by and not len(of_labels) == len(labelled_by) == 1:
            raise DataError(
                f"{path}: has other columns of labels than {tables[0].path}; write the same in "
                "both, or choose one table with --table"
            )
        for column in _site_columns(table, used):
            names_of_sites[column].update(filter(None, table.frame[column]))
        of_patient = _columns_of_a_patients_images(table, used)
        notes += _unused_columns(table, used, of_patient, options.redraw)
        notes += _missing_words(table, used)
        patient_column = patient_column or _patient_column(table, used)
        notes += _without_wrong_ages(table, used)
        if used["label"] and not (options.kind or columns.label):
            _refuse_masks_beside(table, used["label"])
        folder_column = folder_column or _folder_column(table, used)
        notes += prefixed(path.name, map(_tells_apart, of_patient))
        used["split"] = [] if options.redraw else used["split"]
        others = [name for name in table.frame if [name] not in used.values()]
        unfound = [] if columns.image else usual_columns(WORDS["part_column"], others)
        rows, incomplete = _read_rows(table, used, of_patient, unfound)
        _refuse_other_sides(table, used["label"], (item.first for _, item in rows))
        read, repeated = _each_once(rows, listed)
        if repeated:
            notes.append(f"{path.name}: {repeated} rows repeat the image and the cells of another")
        if not options.redraw:
            of_table = table.split if len(tables) > 1 else ""
            read = [_in_split_of_folder(item, of_table, table) for item in read]
        items += read
        missing += incomplete
    location = " and ".join(str(table.path) for table in tables)
    used_files = {file for item in items for file in item.paths}
    unlisted = [image for image in folder.images if image not in used_files]
    if unlisted:
        notes.append(
            f"{len(unlisted)} of {len(folder.images)} files have no complete row and are "
            f"not used, the first: {folder.relative(unlisted[0])}"
        )
    _refuse_other_masks(location, items, [] if columns.mask else unlisted, folder)
    unsplit = sum(not item.split for item in items)
    names = labelled_by if len(labelled_by) > 1 else []
    labels = [item.label for item in items]
    if items and not used["mask"]:
        cells = pd.DataFrame(labels, columns=labelled_by)
        confirmed = options.kind == "classification"
        labels, names = _encode_labels(location, cells, confirmed=confirmed)
        notes += _line_of_findings(labels, labelled_by, columns)
    elif len(labelled_by) == 1:
        labels = [label[0] for label in labels]
    items = [replace(item, label=label) for item, label in zip(items, labels, strict=True)]
    guessed = not (used["mask"] or columns.label)
    if items and guessed and len(labelled_by) == 1 and isinstance(labels[0], int):
        _refuse_other_class(location, items, names, folder)
    if 0 < unsplit < len(items) and not options.redraw:
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
        f"{' and '.join(table.path.name for table in tables)}: {', '.join(layout)}{findings}",
        structure=_structure_of(used["mask"]),
        folder_column=folder_column,
        patient_column=patient_column,
        notes=tuple(notes),
        missing=tuple(missing),
        options="--image-column, --label-column and the other columns",
        labelled_by=tuple(labelled_by),
        site_columns={column: len(names) for column, names in names_of_sites.items()},
    )


def _refuse_other_masks(
    location: str, items: Iterable[Item], unlisted: Iterable[Path], folder: ImageFolder
) -> None:
    """Raise DataError for a file that is called like the mask of an image that has another one."""
    names = folder.names
    mask_of = {names[item.first][:2]: mask for item in items for mask in item.masks}
    for file in unlisted:
        mask = mask_of.get(names[file][:2])
        if mask and names[file].mask:
            raise DataError(
                f"{location}: {folder.both(mask, file)} seem to be masks of one image; leave the "
                "wrong ones or the table out with --leave-out, or choose with --mask-column"
            )


def _refuse_labels_in_other_rows(table: ImageTable, used: UsedColumns) -> None:
    """Raise DataError if rows have an image or a label, and none has both: an export of REDCap has
    a row for the baseline, and one for each photo.
    """
    has_image = table.frame[used["image"][0]] != ""
    has_label = (table.frame[used["mask"] or used["label"]] != "").all(axis=1)
    if has_image.any() and has_label.any() and not (has_image & has_label).any():
        raise DataError(
            f"{table.path}: no row has both an image and its label; write the label in the row of "
            "the image"
        )


def _read_rows(
    table: ImageTable, used: UsedColumns, of_patient: Sequence[str], unfound: Iterable[str]
) -> tuple[list[_Row], list[str]]:
    """The images of a table with a list of labels each, and a line for each incomplete row.

    `of_patient`: see `_columns_of_a_patients_images`; `unfound`: other columns that may tell these
    images apart.
    """
    frame = table.frame
    rows = []
    missing = []
    of_files = bool(table.named_by(frame[used["image"][0]]))
    patient_of = _patients_of_folders(frame[used["image"][0]])
    for line, row in zip(frame.index, frame.to_dict("records"), strict=True):
        location = f"{table.path} line {line}"
        cell = dict.fromkeys(used, "")
        for name, listed in used.items():
            if listed:
                cell[name] = row[listed[0]]
        label = _label_of_row(row, used, table, location)
        images = table.images(cell["image"], location, of_patient=used["patient"] == used["image"])
        if not images and not of_files:
            images = table.beginning_with(cell["image"])
        for column in of_patient:
            images = table.with_word(row[column], column, images)
        _refuse_unfound(table, row, unfound, images, location)
        if not images:
            missing.append(f"{location}: no file for {cell['image']!r}")
        elif not all(label):
            missing.append(f"{location}: {_lacking(used, label, row)}")
        elif used["site"] and not cell["site"]:
            missing.append(f"{location}: no site")
        else:
            split = _split_of(cell["split"], location)
            patient = str(patient_id(cell["patient"]))
            if table.is_patient(cell["image"]):
                patient = patient or patient_of[cell["image"]]
            elif used["patient"] == used["image"] and is_path(patient):
                patient = ""  # of one of the patient's images
            attributes = parse_attributes(cell["sex"], cell["age"], cell["scanner"])
            site = str(patient_id(cell["site"]))
            for image in images:
                item = Item((image,), label, patient, split, site, attributes=attributes)
                rows.append((location, item))
    return rows, missing


def _refuse_unfound(
    table: ImageTable,
    row: Mapping[Any, str],
    columns: Iterable[str],
    images: Sequence[Path],
    location: str,
) -> None:
    """Raise DataError for the cell of a column such as eye that none of several images has."""
    for column in columns:
        if len(images) > 1 and not table.with_word(row[column], column, images):
            raise DataError(
                f"{location}: {column} {row[column]!r} is in no name of {len(images)} images, as "
                f"{table.folder.both(*images[:2])}; write the name of the file in a column image, "
                "or if the row is of all of these, name the column of its patient by --image-column"
            )


def _folder_column(table: ImageTable, used: UsedColumns) -> str:
    """The column that names folders of images in place of files; "" if it is one of patients."""
    column = used["image"][0]
    return (
        column if not used["patient"] and table.is_patient(first_text(table.frame[column])) else ""
    )


def _patient_column(table: ImageTable, used: UsedColumns) -> str:
    """The unused column whose cells repeat as patients of several images may; "" if none does."""
    taken = {*chain(*used.values()), *_site_columns(table, used)}
    rows = len(table.frame)
    counts = {}
    for name, cells in table.frame.items():
        measured = cells.str.fullmatch(r"\d+[.,]\d+").any() or cells.str.fullmatch(r"-?\d").all()
        if name not in taken and not measured and _SPLIT_OR_FOLD.isdisjoint(words(name)):
            counts[name] = cells.nunique()
    likely = [name for name, count in counts.items() if max(3, rows / 10) < count < rows]
    return max(likely, key=counts.__getitem__, default="")


def _columns_of_a_patients_images(table: ImageTable, used: UsedColumns) -> list[str]:
    """The columns that tell the images of a row's patient apart, as eye, visit or session: most
    cells are a word in the path of one of them, and some not of all.
    """
    frame = table.frame
    image_names = frame[used["image"][0]]
    taken = set(chain(*used.values()))
    if table.named_by(image_names):
        return []
    columns = []
    for name in frame:
        if name in taken:
            continue
        rows = 0
        named = 0
        tells_apart = False
        for cell, word in zip(image_names, frame[name], strict=True):
            images = table.of_patient(cell) if word else []
            with_word = table.with_word(word, name, images)
            rows += bool(images)
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
    folder_of = {cell: cell.replace("\\", "/").strip("/") for cell in cells}
    names = Counter(folder.rpartition("/")[2] for folder in {*folder_of.values()})
    patients = {}
    for cell, folder in folder_of.items():
        parent = folder.rpartition("/")[0]
        patients[cell] = parent if max(names.values()) > 1 and parent else folder
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


def _lacking(used: UsedColumns, label: Sequence[Any], row: Mapping[Any, str]) -> str:
    """What an incomplete row lacks."""
    if used["mask"]:
        cell = row[used["mask"][label.index(None)]]
        if re.search("[;,|]", cell):
            cell += "; if these are several, unite them in one file, or write a column for each"
        return f"no mask {cell}".strip()
    if len(label) == 1:
        return "no label"
    empty = [name for name, text in zip(used["label"], label, strict=True) if not text]
    return f"no label in column {empty[0]}"


def _refuse_masks_beside(table: ImageTable, labels: Sequence[str]) -> None:
    """Raise DataError if masks lie beside the images of a table of classes."""
    masks = table.folder.masks
    if masks:
        raise DataError(
            f"{table.path}: column {labels[0]} can be the class, but masks lie beside the images, "
            f"as {table.folder.relative(masks[0])}; give --kind classification or "
            "--kind segmentation"
        )


def _refuse_other_sides(table: ImageTable, labels: Sequence[str], images: Iterable[Path]) -> None:
    """Raise DataError for a label of one eye, as a column OD, in a row of an image of the other."""
    named = {*chain.from_iterable(map(words, labels))}
    others: set[str] = set()
    for side, other in permutations(WORDS["side"]):
        if named.intersection(side) and named.isdisjoint(other):
            others.update(other)
    for image in images if others else ():
        if others.intersection(words(stem(image))):
            raise DataError(
                f"{table.path}: {' and '.join(labels)} can be of one side alone, but "
                f"{table.folder.relative(image)} is of the other; write a row for each image, with "
                "its own label"
            )


def _each_once(rows: Iterable[_Row], listed: dict[Path, _Row]) -> tuple[list[Item], int]:
    """The images that are not `listed` yet, and the number of rows that repeat another one, as of
    several boxes in an image; DataError for a row that says something else of its image.
    """
    items = []
    repeated = 0
    for location, item in rows:
        earlier, other = listed.setdefault(item.first, (location, item))
        if other is item:
            items.append(item)
            continue
        repeated += 1
        if other != item:
            raise DataError(
                f"{location}: image {item.first.name} is also in {earlier}, with other cells; if "
                "the rows are of several images, write the name of each in a column image; "
                "otherwise keep one row (slices have no own labels), and join several findings in "
                "its label by |"
            )
    return items, repeated


def _in_split_of_folder(item: Item, of_table: str, table: ImageTable) -> Item:
    """The image with the split that its row, the name of its table or one of its folders names.

    DataError for a row and a folder of which one says test.
    """
    split = item.split or of_table
    of_folder = split_above(table.folder, item.first)
    if of_folder and split not in ("", of_folder) and "test" in (split, of_folder):
        raise DataError(
            f"{table.path}: {table.folder.relative(item.first)} is in the split {split}, but in a "
            f"folder of {of_folder}; correct one, give another --split-column, or draw new splits "
            "with --redraw"
        )
    return replace(item, split=split or of_folder)


def _refuse_other_class(
    location: str, items: Sequence[Item], names: Sequence[str], folder: ImageFolder
) -> None:
    """Raise DataError for an image in the folder of another class than its row has, if every image
    is in a folder that is called like a class.
    """
    class_of = {name.casefold(): name for name in names}
    of_folders = [class_of.get(composed(item.first.parent.name).casefold()) for item in items]
    if None in of_folders or len({*of_folders}) < 2:
        return
    for item, of_folder in zip(items, of_folders, strict=True):
        if names[item.label] != of_folder:
            raise DataError(
                f"{location}: {folder.relative(item.first)} is {names[item.label]}, but in the "
                f"folder of {of_folder}; correct one, or give --label-column"
            )


def _label_of_row(
    row: Mapping[Any, Any], used: UsedColumns, table: ImageTable, location: str
) -> list[Any]:
    """The mask files of a row, or its labels; a missing one is None or ""."""
    if used["mask"]:
        return [table.image(row[name], location) for name in used["mask"]]
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


def _missing_words(table: ImageTable, used: UsedColumns) -> list[str]:
    """A line for each column of names with words such as NA, which may mean a missing value;
    DataError for such a word among numbers of classes, and for an error of Excel.
    """
    lines = []
    columns = [*used["patient"], *used["site"]]
    if len(used["label"]) == 1:
        columns = [*used["label"], *columns]
    for column in columns:
        cells = table.frame[column]
        for line, text in cells.items():
            if _EXCEL_ERROR.fullmatch(text):
                raise DataError(
                    f"{table.path} line {line}: {text} in column {column} is an error of Excel; "
                    "correct the cell, or empty it if the value is missing"
                )
        found = sorted({text for text in cells if text.lower() in _MISSING})
        others = [text for text in cells if text and text not in found]
        if found and column in used["label"] and others and None not in map(number_of, others):
            raise DataError(
                f"{table.path}: {' and '.join(found)} in column {column}, whose other cells are "
                "numbers; empty these cells if values are missing, otherwise write words in all"
            )
        if found:
            lines.append(
                f"{table.path.name}: {' and '.join(found)} in column {column} count as names; "
                "empty the cells if values are missing"
            )
    return lines


def _unused_columns(
    table: ImageTable, used: UsedColumns, of_patient: Sequence[str], redraw: bool
) -> list[str]:
    """A line about the other columns that divide the rows, but those that may name the sites."""
    taken = {*chain(*used.values()), *of_patient, *_site_columns(table, used)}
    rows = len(table.frame)
    varying = [name for name, cells in table.frame.items() if 1 < cells.nunique() < rows]
    others = [name for name in varying if name not in taken]
    if not others:
        return []
    # Those of splits and folds first.
    others.sort(key=lambda name: _SPLIT_OR_FOLD.isdisjoint(words(name)))
    line = f"{table.path.name}: columns not used: {shortened(others)}"
    if not (_SPLIT_OR_FOLD.isdisjoint(words(others[0])) or used["split"] or redraw):
        option = f"give --split-column {shlex.quote(others[0])}"
        line += f"; if {others[0]} tells the splits, write train, val and test in it, and {option}"
    return [line]


def _site_columns(table: ImageTable, used: UsedColumns) -> list[str]:
    """The columns that may name the sites, the likeliest first; none if the user names one."""
    if used["site"]:
        return []
    taken = set(chain(*used.values()))
    others = [column for column in table.frame if column not in taken]
    return usual_columns(WORDS["site_column"], others)


def _without_wrong_ages(table: ImageTable, used: UsedColumns) -> list[str]:
    """Take a column with other values than ages in years from the used ones; a line about it."""
    for column in used["age"]:
        problem = age_problem(table.frame[column])
        if problem:
            used["age"] = []
            return [f"{table.path.name}: column {column} is not read as the age: {problem}"]
    return []


def described(
    items: Sequence[Item], table: ImageTable, options: ImportOptions
) -> tuple[list[Item], str | None]:
    """The images with what a table without labels says of them, as participants.tsv of BIDS: their
    patients, sites, splits, sex, age and scanner.

    Returns:
        The images, and the columns that were read, in words; "" if only the name of the table says
        something, or it is of images that are not used, None if nothing says something new.

    Raises:
        DataError: two rows that say different things of an image, no row says something, or as of
            `read_tables`.
    """
    frame = table.frame
    redraw = options.redraw
    used = columns_but_labels(table, replace(options.columns, label="", mask=""))
    _without_wrong_ages(table, used)
    used["split"] = [] if redraw else used["split"]
    named = ("patient", "site", "split", "sex", "age", "scanner")
    read = {name: used[name][0] for name in named if used[name]}
    of_table = "" if redraw or used["split"] else table.split
    if not (read or of_table) or not used["image"]:
        return [*items], None
    cells_of: dict[Path, dict[str, str]] = {}
    for line, row in zip(frame.index, frame.to_dict("records"), strict=True):
        cells = {name: row[column] for name, column in read.items()}
        for image in table.described(row[used["image"][0]]):
            other = cells_of.setdefault(image, cells)
            if other != cells:
                raise DataError(
                    f"{table.path} line {line}: says something else of "
                    f"{table.folder.relative(image)} than another row; keep one row of an image"
                )
    if cells_of.keys().isdisjoint(item.first for item in items):
        requested = {options.columns.patient, options.columns.site, options.columns.split}
        if cells_of and requested.isdisjoint(table.header):
            return [*items], ""  # of images without a mask or label
        name = used["image"][0]
        raise UnrelatedTableError(
            f"{table.path}: column {name} names no image with a mask or label, as "
            f"{first_text(frame[name])!r}; correct the names, or give another --image-column"
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
                f"{table.path}: {table.folder.relative(item.first)} is at site {site}, in another "
                f"table at {item.site}; choose one with --table"
            )
        attributes = parse_attributes(*map(cells.get, ("sex", "age", "scanner")))
        of_name = "" if item.split else of_table  # the item's own table knows better
        split = _split_of(cells.get("split", of_name), str(table.path))
        with_cells = replace(
            item,
            patient=item.patient or str(patient_id(cells.get("patient", ""))),
            site=site or item.site,
            split=split or item.split,
            attributes=attributes.completed(item.attributes),
        )
        complete.append(with_cells if redraw else _in_split_of_folder(with_cells, "", table))
    if complete == [*items]:
        table.problem = UnrelatedTableError(
            f"{table.folder.relative(table.path)}: says nothing new of the images, and leaves none "
            "out; if it lists some to leave out, give --leave-out with their names"
        )
        return complete, None
    if of_table and not all(item.split for item in items):
        read["split"] = of_table
    listed = ", ".join(f"{name} {column}" for name, column in read.items())
    name = table.folder.relative(table.path)
    return complete, f"{name}: {listed}" if listed else ""


def patients_of_table(table: ImageTable, columns: Columns) -> dict[Path, str]:
    """Image -> its patient in a table that names both; {} for another table."""
    used = columns_but_labels(table, replace(columns, label="", mask=""))
    patients: dict[Path, str] = {}
    if not used["image"] or not used["patient"] or used["patient"] == used["image"]:
        return patients
    names = table.frame[[*used["image"], *used["patient"]]].to_numpy()
    for image_name, patient in names:
        for image in table.described(image_name):
            patients[image] = str(patient_id(patient))
    return patients


def check_table(table: ImageTable, columns: Columns, kind: str) -> None:
    """Raise DataError if a table names no image of the folder in its first rows, or has no
    labels.
    """
    frame = table.frame
    folder = table.folder
    if _OF_PREDICTIONS in frame:
        raise UnrelatedTableError(f"{folder.relative(table.path)}: predictions are no labels")
    patients = [columns.patient] if columns.patient in frame else []
    patients = patients or patient_columns(frame)
    patients += [columns.image] if columns.image in frame else []
    named = any(table.named_by(frame[name]) for name in frame)
    if not named and not any(map(table.names_patients, [*patients, *key_columns(frame)])):
        names = usual_columns(WORDS["column"]["image"], list(frame)) or named_columns(frame)
        location = f"{folder.relative(table.path)} column {names[0]}"
        for cell in frame[names[0]].head(SAMPLED_ROWS):
            table.image(cell, location)  # raises if it can be several
        kind_of_error = UnrelatedTableError if len(frame) < len(folder.images) else DataError
        remedy = "correct the names, or give --image-column"
        if table.named_by(frame[names[0]].str.rpartition("_")[0]):
            remedy = "write a row for each image, and a column for each finding"
        elif names == named_columns(frame):
            first = folder.images[0]
            remedy = f"write the names of images in a column image, as {folder.relative(first)}"
            if first in folder.patients:
                remedy += f", or the PatientID in a column patient, as {folder.patients[first]}"
        first_name = first_text(frame[names[0]]).removesuffix(".dcm")
        if folder.studies and first_name in map(stem, folder.root.rglob("*")):
            remedy = "slices of a series have no own labels, write a row for each SeriesInstanceUID"
        raise kind_of_error(
            f"{folder.relative(table.path)} names no image of the folder, as "
            f"{first_text(frame[names[0]])!r} in column {names[0]}; {remedy}"
        )
    used_columns(table, columns, kind)


def _encode_labels(
    location: str, cells: pd.DataFrame, *, confirmed: bool
) -> tuple[list[Any], list[str]]:
    """Labels as class numbers or lists of 0 and 1, and the names of the classes.

    DataError for values that are no labels, and unless it is `confirmed` by --kind classification,
    for a class that may mean that an image has none.
    """
    if cells.shape[1] == 1:
        column = cells.iloc[:, 0].map(patient_id)  # "1.0" of a table with empty cells is 1
        location = f"{location}: column {column.name}"
        if column.str.fullmatch(_LIST).all():
            column = column.str[2:-2].str.replace(_BETWEEN, "|", regex=True)
        if column.str.contains("|", regex=False).any():
            findings = column.str.get_dummies("|")
            names = [name for name in findings if name.lower() not in WORDS["no_finding"]]
            if not names:
                raise DataError(f"{location}: names no finding; give another --label-column")
            refuse_variants(names, location)
            return findings[names].to_numpy().tolist(), names
        names = sorted_labels(column.unique())
        for name in filter(_DATE.fullmatch, names):
            raise DataError(
                f"{location}: class {name} is a date, as Excel makes of 3-4; format the column as "
                "text, and write these cells again"
            )
        numbers = [number_of(name.removesuffix("%")) for name in names]
        rarely_twice = 2 * len(names) > len(column)
        has_decimals = any(number % 1 for number in filter(None, numbers))
        measured = None not in numbers and (has_decimals or rarely_twice)
        most = _MAX_LEVELS if measured or rarely_twice else MAX_CLASSES
        if len(names) > most:
            remedy = "name the class with --label-column"
            if measured:
                remedy = "measurements cannot be predicted (regression), write classes instead"
            raise DataError(
                f"{location} has {len(names)} values, for example {names[0]!r}; {remedy}"
            )
        refuse_variants(names, location)
        _refuse_joined(names, location)
        if not confirmed:
            _refuse_ungraded(names, location)
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
    number = WORDS["flag"].get(text.lower(), number_of(text))
    return number if number in (0, 1) else None


def _refuse_ungraded(names: Sequence[str], location: str) -> None:
    without = ungraded(names)
    if without:
        raise DataError(
            f"{location}: {is_a_class(without, names)} if it means not graded, empty "
            "its cells and give --skip; otherwise give --kind classification"
        )


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
                "write | between them, otherwise write one name, or give another --label-column"
            )
