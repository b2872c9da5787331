"""From a downloaded folder to the datalists of one or several sites.

Patients, sites and splits of the images, and the files of each site.
"""

import filecmp
import os
import re
import shlex
import shutil
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pandas as pd
from PIL import ExifTags, Image
from sklearn.model_selection import StratifiedGroupKFold

from medflare.core.errors import ConfigError, DataError
from medflare.core.rng import numpy_random_state
from medflare.core.store import write_atomically, write_json
from medflare.core.text import read_text
from medflare.data.datalist import FILE, SHARES, SPLITS, check_folder
from medflare.data.local import allowed_folders
from medflare.data.progress import counted
from medflare.data.reading import JPEG, PICTURES, explained, read_stored, stem, suffix
from medflare.preparation.dataset_import.class_folders import class_folders
from medflare.preparation.dataset_import.folders import (
    NEARLY_ALL,
    TABLES,
    Dataset,
    ImageFolder,
    Item,
    is_system_folder,
    prefixed,
    scan_folder,
    walk,
)
from medflare.preparation.dataset_import.masks import pair_masks
from medflare.preparation.dataset_import.names import (
    PATIENT,
    WORDS,
    composed,
    numbered,
    refuse_variants,
    sorted_labels,
    split_folder,
    split_name,
    words,
)
from medflare.preparation.dataset_import.shared_patients import Sites, across_sites, shared_warning
from medflare.preparation.dataset_import.structures import (
    are_in_structures,
    structure_files,
    structure_folders,
    structure_suffixes,
)
from medflare.preparation.dataset_import.tables import (
    GUESSED,
    Columns,
    UnlabelledTableError,
    UnrelatedTableError,
    described,
    patients_of_table,
    read_frame,
    read_tables,
    split_of_table,
    table_columns,
    usual_columns,
)

_FLAGS = {"0", "1", "true", "false", "yes", "no"}
_SUBJECT = re.compile(r"(?:^|/)(sub-[A-Za-z0-9]+)")  # of BIDS
# The end of the name of a photograph.
_EYE = re.compile(rf"(?:[ _-](?:{'|'.join(WORDS['eye'])})|(?<=\d)[lr])$", re.IGNORECASE)
_FIRST_PART = re.compile("^([^_-]+)[_-]")  # of a file name
_SPLIT_WORDS = frozenset((*WORDS["split"], "split", "splits"))
_NO_PATIENT = _SPLIT_WORDS.union(WORDS["image"], WORDS["mask"], ("fold", "input"))
# Maximum of folders, and minimum of images in each, for which they may be sites.
_MAX_SITES = 30
_MIN_IMAGES = 5
_VERSIONS = frozenset(WORDS["version"])
_SHOWN = 10  # lines about incomplete images
_LISTED = 4  # names in a message


@dataclass(frozen=True)
class ImportOptions:
    """Options of `import_folder`."""

    kind: str = ""  # "segmentation", "classification", or "" for what the folder has
    table: Path | None = None  # the table with the labels
    columns: Columns = GUESSED  # of the table
    patient: str = ""  # regular expression, see `assign_patients`
    # Number of simulated sites that the patients are distributed over; None: one site.
    sites: int | None = None
    # Split -> its share of the patients; None: `datalist.SHARES`.
    shares: Mapping[str, float] | None = None
    seed: int = 0  # of the random splits and sites
    redraw: bool = False  # ignore the splits that the folder names
    skip: bool = False  # leave out images without mask or label
    site_folders: bool = False  # each folder in the folder is a site
    # Folder for the datalists and hard links to the files; None: the folder of the images.
    out: Path | None = None
    copy: bool = False  # copy the files to `out`
    force: bool = False  # replace existing datalists


@dataclass(frozen=True)
class ImportReport:
    """The datalists that were written."""

    dataset: Dataset  # the content of the folder
    # Site, or "" if there is one folder -> its images with their splits.
    sites: Sites
    home: Path  # a site's folder, or the folder of all sites
    warnings: tuple[str, ...]  # one line each
    guessed: str = ""  # one line: what was guessed, and the options that say otherwise

    def render(self) -> str:
        """The layout, and a table of images and patients by site and split."""
        dataset = self.dataset
        classes = list(dataset.labels.values()) if dataset.kind == "classification" else []
        images = sum(map(len, self.sites.values()))
        lines = [f"{images} images, {dataset.kind} ({dataset.layout})", ""]
        lines += [_counts(self.sites, classes).to_string(index=False), ""]
        if self.guessed:
            lines.append(f"guessed: {self.guessed}")
        lines += prefixed("note", dataset.notes)
        lines += prefixed("left out", dataset.missing[:_SHOWN])
        if len(dataset.missing) > _SHOWN:
            lines.append(f"left out: {len(dataset.missing) - _SHOWN} more")
        lines += prefixed("WARNING", self.warnings)
        for site in self.sites:
            lines.append(f"written: {self.home / site / FILE}")
        return "\n".join(lines)


def _counts(sites: Sites, classes: Sequence[str]) -> pd.DataFrame:
    rows = []
    for site, items in sites.items():
        for split in SPLITS:
            listed = [item for item in items if item.split == split]
            row = [site, split, len(listed), len(set(map(patient_of, listed)))]
            for number in range(len(classes)):
                row.append(sum(_shows(item, number) for item in listed))
            rows.append(row)
    table = pd.DataFrame(rows, columns=["site", "split", "images", "patients", *classes])
    if any(sites):
        return table
    return table.iloc[:, 1:]  # not by name: a class may be called site


def _shows(item: Item, number: int) -> bool:
    """Whether an image is of a class, or has a finding."""
    if isinstance(item.label, list):
        return bool(item.label[number])
    return bool(item.label == number)


def _find_dataset(
    folder: ImageFolder, options: ImportOptions, *, several_tables: bool = False
) -> Dataset:
    """A folder's images with labels: by a table, masks by name or folder, or a folder per class.

    DataError if it is unclear, or if a folder beside those of splits may be a split, too. With
    `several_tables`, all tables are of these images.
    """
    kind = options.kind
    columns = options.columns
    splits, unused, related = _usable_tables(folder, options)
    if not splits and related:
        folder = _with_patients(folder, related, columns)
        splits, unused, related = _usable_tables(folder, options)
    requested = options.table is not None or columns != GUESSED
    tables = list(splits)
    describes = bool(related) and not (columns.label or columns.mask)
    describes = describes and any(name.mask for name in folder.names.values())
    if requested and len(splits) + len(unused) == 1 and not describes:
        tables = [*splits, *unused]
    of_splits = len({*splits.values()} - {""}) == len(tables)
    if len(tables) > 1 and not of_splits and not several_tables:
        names = ", ".join(map(folder.relative, tables))
        raise DataError(
            f"{folder.root}: {len(tables)} tables ({names}); "
            "choose one with --table, unite them, or give --site-folders"
        )
    if requested and not tables and not describes:
        problem = f"{folder.root}: no table (CSV or Excel) for the columns; name it with --table"
        raise DataError("; ".join((problem, *unused.values())))
    if tables:
        others = {path: unused[path] for path in related if path not in tables}
        _refuse_part(folder, splits, others)
        requested_ones = _with_requested_columns(folder, options)
        unused |= requested_ones
        others |= requested_ones
        dataset = read_tables(tables, folder, columns, kind=kind, redraw=options.redraw)
        for path in related:
            if {*dataset.labelled_by} <= {*table_columns(path)}:
                raise DataError(f"{unused[path]}, or choose one table with --table")
        dataset, not_used = _described_by(dataset, [*others], unused, folder, options)
        if not options.redraw:
            dataset = _with_listed_splits(folder, dataset, ())
            if not any(item.split for item in dataset.items):
                _refuse_split_tables(folder, tables, not_used)
                _refuse_flags_of_splits(tables)
        reasons = [reason for path, reason in not_used.items() if path not in tables]
        return replace(dataset, notes=(*prefixed("not used", reasons), *dataset.notes))
    dataset = _by_names(folder, options, unused, related)
    strange = _beside_splits(folder, dataset)
    classes = dataset.kind == "classification"
    if strange and kind != "classification" and (classes or not options.redraw):
        remedy = "give --kind classification if it is a class" if classes else "draw with --redraw"
        raise DataError(
            f"{folder.root}: {len(strange)} images are in no folder of a split, but others are: "
            f"{folder.relative(strange[0])}; rename its folder train, val or test, take it out, or "
            f"{remedy}"
        )
    return dataset


def _with_requested_columns(folder: ImageFolder, options: ImportOptions) -> dict[Path, str]:
    """The other tables that have a column of patients, sites or splits that the user names, and
    that --table lacks; each without a reason why it is not used.
    """
    if options.table is None:
        return {}
    columns = options.columns
    named = {columns.patient, columns.site, columns.split} - {"", *table_columns(options.table)}
    tables = [path for path in folder.tables if path != options.table]
    return {path: "" for path in tables if not named.isdisjoint(table_columns(path))}


def _refuse_part(
    folder: ImageFolder, splits: Mapping[Path, str], unused: Mapping[Path, str]
) -> None:
    """Raise DataError for a table of another split that is `unused`, with this reason, though it
    cannot be read or has as many columns as those of `splits`.
    """
    if not any(splits.values()):
        return
    width = min(len(table_columns(path)) for path in splits)
    for path, reason in unused.items():
        columns = table_columns(path)
        if _first_split(path.stem) and (not columns or len(columns) >= width):
            used = ", ".join(map(folder.relative, splits))
            raise DataError(
                f"{reason}; correct this table, or choose one of the others with --table ({used})"
            )


def _by_names(
    folder: ImageFolder,
    options: ImportOptions,
    unused: Mapping[Path, str],
    related: Mapping[Path, bool],
) -> Dataset:
    """The images by the names of files and folders; DataError for classes beside `related` tables,
    without a kind.
    """
    kind = options.kind
    with_labels = [path for path, has_labels in related.items() if has_labels] or [*related]
    _refuse_versions(folder)
    try:
        dataset = _by_folders(folder, kind)
    except DataError as error:
        if related and not any(name.mask for name in folder.names.values()):
            reasons = _reasons(with_labels, unused)
            raise DataError("; ".join((*reasons, *folder.notes))) from error
        hints = [*unused.values(), *folder.notes]
        if folder.texts:
            hints.append(
                f"text files are not read ({folder.relative(folder.texts[0])}); if they have "
                "outlines or labels, make masks or a table of them"
            )
        raise DataError("; ".join((str(error), *hints))) from error
    if related and dataset.kind == "classification" and not kind:
        raise DataError(
            f"{folder.root}: are the folders {', '.join(dataset.labels.values())} the classes? if "
            f"so, give --kind classification; if not: {unused[with_labels[0]]}"
        )
    dataset, unused = _described_by(dataset, [*related], unused, folder, options)
    if not options.redraw:
        dataset = _with_listed_splits(folder, dataset, unused)
    return replace(dataset, notes=(*prefixed("not used", unused.values()), *dataset.notes))


def _reasons(tables: Iterable[Path], unused: Mapping[Path, str]) -> list[str]:
    """Why tables are not used, once for those of the same columns, as of train and test."""
    reason_of: dict[object, str] = {}
    for path in tables:
        columns = tuple(table_columns(path))
        reason_of.setdefault(columns or path, unused[path])
    return [*reason_of.values()]


def _described_by(
    dataset: Dataset,
    tables: Sequence[Path],
    unused: Mapping[Path, str],
    folder: ImageFolder,
    options: ImportOptions,
) -> tuple[Dataset, dict[Path, str]]:
    """The images with what these tables without labels say of them, and the tables that are still
    `unused`.
    """
    unused = dict(unused)
    columns = options.columns
    requested = options.table is not None or columns.patient or columns.site or columns.split
    for path in tables:
        try:
            items, read = described(
                dataset.items, path, folder, options.columns, redraw=options.redraw
            )
        except DataError as error:
            if requested:
                raise
            unused[path] = str(error)
            continue
        if read:
            del unused[path]
            dataset = replace(dataset, items=tuple(items), layout=f"{dataset.layout}; {read}")
    return dataset, unused


def _refuse_versions(folder: ImageFolder) -> None:
    """Raise DataError for images of one name in folders that are called as versions of one picture
    are: Images/1.png and Images_Cropped/1.png.
    """
    first_of: dict[tuple[bool, str, tuple[str, ...]], Path] = {}
    for image, name in folder.names.items():
        listed = words(folder.relative(image.parent))
        others = tuple(word for word in listed if word not in _VERSIONS | _NO_PATIENT)
        other = first_of.setdefault((name.mask, image.name, others), image)
        differ = {*listed} ^ {*words(folder.relative(other.parent))}
        if not _VERSIONS.isdisjoint(differ):
            both = " and ".join(map(folder.relative, (other, image)))
            raise DataError(
                f"{both} seem to be versions of one picture; give the folder of one version, or "
                "take the other out"
            )


def _usable_tables(
    folder: ImageFolder, options: ImportOptions
) -> tuple[dict[Path, str], dict[Path, str], dict[Path, bool]]:
    """Table -> the split that its name has; table -> why it is not used; and those of the second
    that are of these images, as it seems -> whether they may have labels.
    """
    splits = {}
    unused = {}
    related = {}
    for path in [options.table] if options.table else folder.tables:
        try:
            splits[path] = split_of_table(path, folder, options.columns, options.kind)
        except DataError as error:
            unused[path] = str(error)
            if not isinstance(error, UnrelatedTableError):
                related[path] = not isinstance(error, UnlabelledTableError)
    return splits, unused, related


def _with_patients(folder: ImageFolder, tables: Iterable[Path], columns: Columns) -> ImageFolder:
    """The folder with the patients of images by tables without labels, whose labels another table
    may have for each patient.
    """
    patients: dict[Path, str] = {}
    for path in tables:
        with suppress(DataError):  # as said where it is read
            patients |= patients_of_table(path, folder, replace(columns, label="", mask=""))
    return replace(folder, patients={**patients, **folder.patients})


def _with_listed_splits(folder: ImageFolder, dataset: Dataset, unused: Collection[Path]) -> Dataset:
    """The images with the splits of lists of names such as train.txt, or of their own names such as
    train0_1.png (MedMNIST), if no folder names splits.

    DataError for files that may name the splits, if not every image is in one list.
    """
    if not {item.split for item in dataset.items} <= {"", "training"}:
        return dataset
    images = [stem(item.first) for item in dataset.items]
    lists = _split_lists(folder, images, unused)
    if lists:
        splits = _listed_splits(images, lists, unused)
        source = ", ".join(map(folder.relative, lists))
    else:
        splits = [_first_split("".join(words(name)[:1])) for name in images]
        source = "the names of files"
        if "" in splits or len({*splits}) < 2:
            return dataset
    items = []
    for item, split in zip(dataset.items, splits, strict=True):
        items.append(replace(item, split=split))
    return replace(dataset, items=tuple(items), layout=f"{dataset.layout}, splits by {source}")


def _refuse_split_tables(
    folder: ImageFolder, tables: Iterable[Path], unused: Iterable[Path]
) -> None:
    """Raise DataError for tables of training and test rows that are not used, as
    train_indexes.csv.
    """
    if any(_first_split(path.stem) for path in tables):
        return
    lists = {_first_split(path.stem): path for path in unused}
    if {"training", "test"} <= lists.keys():
        raise DataError(
            f"{folder.relative(lists['training'])} seems to list a split, but names no image; give "
            "--split-column with a column of train, val and test, or draw splits with --redraw"
        )


def _refuse_flags_of_splits(tables: Iterable[Path]) -> None:
    """Raise DataError for a column such as is_test, of yes and no."""
    for path in tables:
        frame = read_frame(path)
        for name in frame:
            of_split = any(map(split_name, words(name)))
            cells = {text.lower() for text in frame[name]}
            if of_split and len(cells) == 2 and cells < _FLAGS:
                flags = " and ".join(sorted(cells))
                raise DataError(
                    f"{path}: column {name} seems to tell the splits by {flags}; "
                    "write train, val or test in it, or draw splits with --redraw"
                )


def _split_lists(
    folder: ImageFolder, images: Sequence[str], unused: Collection[Path]
) -> list[Path]:
    """Text files and unused tables that name splits in their names, tables also in a column."""
    lists = []
    for path in (*folder.texts, *unused):
        named = path.stem not in images and not _SPLIT_WORDS.isdisjoint(words(path.stem))
        if named or (path in unused and _has_splits(path)):
            lists.append(path)
    return lists


def _listed_splits(
    images: Sequence[str], lists: Sequence[Path], unused: Collection[Path]
) -> list[str]:
    """The split of each image by the lists of names; DataError for an image that is not in one."""
    splits = defaultdict(set)
    for path in lists:
        if path in unused:
            _refuse_split_words(path)
        split = _first_split(path.stem)
        if split and path not in unused and path.suffix.lower() in (".txt", ".lst"):
            with suppress(ValueError):  # of the encoding
                for line in read_text(path).splitlines():
                    name = stem(PurePath(line.strip().replace("\\", "/")))
                    splits[name].add(split)
    for name, count in Counter(images).items():
        if len(splits[name]) != 1 or count > 1:
            raise DataError(
                f"{lists[0]}: seems to name the splits, but no list of train, val and test names "
                f"{name} alone; correct the lists, give a table with a column split, or draw the "
                "splits with --redraw"
            )
    return [min(splits[name]) for name in images]


def _first_split(name: str) -> str:
    """The split that the first such word of a name means, or ""."""
    return next(filter(None, map(split_name, words(name))), "")


def _refuse_split_words(table: Path) -> None:
    """Raise DataError for a table whose column of splits has other words."""
    for column in usual_columns(WORDS["column"]["split"], table_columns(table)):
        for text in read_frame(table)[column]:
            if not split_name(text):
                raise DataError(
                    f"{table}: {text!r} in column {column} is not train, val or test; rename it, "
                    "or draw the splits with --redraw"
                )


def _has_splits(table: Path) -> bool:
    """Whether a table has a column with a usual name of splits; False if it cannot be read."""
    return bool(usual_columns(WORDS["column"]["split"], table_columns(table)))


def _beside_splits(folder: ImageFolder, dataset: Dataset) -> list[Path]:
    """Images without a split that have a folder more than others, other folders, or a class that no
    split has.
    """
    names = folder.names
    depth = 0
    classes = set()
    inner: set[str] = set()  # folders in those of splits
    without = []
    for item in dataset.items:
        if not item.split:
            without.append(item)
            continue
        depth = max(depth, len(names[item.first].folders))
        inner.update(names[item.first].folders)
        if dataset.kind == "classification":
            classes.add(item.label)
    if len(without) == len(dataset.items):
        return []
    strange = []
    for item in without:
        folders = names[item.first].folders
        elsewhere = dataset.kind == "segmentation" and inner.isdisjoint(folders) and folders
        if len(folders) > depth or elsewhere or (classes and item.label not in classes):
            strange.append(item.first)
    return strange


def _by_folders(folder: ImageFolder, kind: str) -> Dataset:
    """The images by the names of files and folders."""
    names = folder.names
    notes = []
    images = [image for image in folder.images if not names[image].mask]
    if kind == "classification" and not images:  # the classes are called like masks
        images = list(folder.images)
    masks = len(names) - len(images)
    structures = None
    if kind != "classification" and (not masks or are_in_structures(names.values())):
        structures = structure_folders(folder, "segmentation" if masks else kind)
    elif kind != "classification":
        structures = structure_files(folder)
    if structures is not None:
        dataset = structures
        if not kind:
            _refuse_readers(dataset, folder)
    elif kind == "segmentation" or (masks and kind != "classification"):
        by_suffix = structure_suffixes(folder) if masks else None
        dataset = by_suffix or pair_masks(folder)
        if by_suffix and not kind:
            _refuse_readers(dataset, folder)
    else:
        dataset = class_folders(folder, images, confirmed=kind == "classification")
        if masks:
            notes.append(f"{masks} masks are not used")
    return replace(dataset, notes=(*notes, *dataset.notes))


def _refuse_readers(dataset: Dataset, folder: ImageFolder) -> None:
    """Raise DataError for one or two structures that several names with a number may mean, as
    those of readers do; more are vertebrae, or ribs.
    """
    names_of = defaultdict(list)
    for name in dataset.labels.values():
        words_of_name = words(name)
        initials = len(words_of_name) == 2 and len(words_of_name[1]) == 2
        if initials and words_of_name[0] in WORDS["mask"]:  # labels-ah, labels-vk
            name_of_all = words_of_name[0]
        else:
            name_of_all = re.sub(r"\d+(st|nd|rd|th)?", "", name).strip(" _-")
        names_of[name_of_all].append(name)
    several = max(names_of.values(), key=len, default=[])
    if len(several) > 1 and len(names_of) <= 2:
        raise DataError(
            f"{folder.root}: are {several[0]}, {several[1]}, ... structures? if so, give --kind "
            "segmentation; if they are of several readers or objects, leave one, or unite them, or "
            "give a table with --mask-column"
        )


def import_folder(root: Path, options: ImportOptions = ImportOptions()) -> ImportReport:
    """Write the datalists of a folder of images.

    Nothing of a site is written before all its checks pass.

    DataError for an unknown layout, incomplete images, a patient in two splits, or datalists that
    exist; ConfigError for a wrong option.
    """
    if options.site_folders:
        return _import_site_folders(root, options)
    folder, dataset = _read_folder(root, options)
    return _write_sites(folder, dataset, options)


def _read_folder(root: Path, options: ImportOptions) -> tuple[ImageFolder, Dataset]:
    """The files of a folder, and its images with labels; DataError as of `import_folder`."""
    if (options.sites is not None or options.columns.site) and options.out is None:
        raise DataError(f"{root}: several sites need a folder of their own; name it with --out")
    _check_out(root, options.out)
    folder = scan_folder(root)
    return folder, _checked(folder, _find_dataset(folder, options), options)


def _check_out(root: Path, out: Path | None) -> None:
    if out is not None and out.resolve().is_relative_to(root.resolve()):
        raise DataError(
            f"{out} is in {root}, so its files would be imported again; take another --out"
        )


def _checked(folder: ImageFolder, dataset: Dataset, options: ImportOptions) -> Dataset:
    """The images of a folder with its notes; DataError for incomplete ones and wrong files."""
    root = folder.root
    out = options.out
    missing = (*folder.unreadable, *dataset.missing)
    notes = (*folder.notes, *dataset.notes)
    if options.sites is None and not options.site_folders:
        notes += _site_column_notes(dataset)
    if any(suffix(mask) in JPEG for item in dataset.items for mask in item.masks):
        notes += ("masks are JPEG, which moves values: 128 and more is the structure",)
    notes += _turned_notes(dataset.items)
    dataset = replace(dataset, notes=notes, missing=missing)
    companion = _companion(folder, dataset)
    if companion:
        raise DataError(
            f"{root}: nearly every image has another one that is called like it and a word, as "
            f"{folder.relative(companion)}, and no mask for it; if these are the masks, call them "
            "NAME_mask and take other masks out; otherwise take them out"
        )
    if missing and not (options.skip and dataset.items):
        listed = len(missing) + len(dataset.items)
        remedy = "complete them, or --skip"
        if dataset.kind == "segmentation" and not options.kind and 2 * len(missing) > listed:
            remedy += "; if the masks are not the labels, give --kind classification"
        raise DataError(
            f"{root}: {len(missing)} of {listed} are incomplete, the first: {missing[0]}; {remedy}"
        )
    if folder.slices and out is None:
        slices = next(iter(folder.slices.values()))
        raise DataError(
            f"{root}: {folder.relative(slices[0])} is one of {len(slices)} slices of a series "
            "beside other files; give --out, where each series gets a folder of its own"
        )
    check_files(dataset.items, root, folder.slices)
    for file in dataset.items[0].paths:
        if suffix(file) in PICTURES and file not in dataset.items[0].rendered:
            read_stored(file, mask=file in dataset.items[0].masks)
    if out is None:
        _refuse_links(dataset.items, root)
    return dataset


def _companion(folder: ImageFolder, dataset: Dataset) -> Path | None:
    """The first image without a mask that is called like one with a mask and a word, as the lesions
    of PH2, if nearly all images with a mask have such a one; otherwise None.
    """
    names = {folder.names[item.first].name for item in dataset.items if item.masks}
    used = {path for item in dataset.items for path in item.paths}
    companions = {}
    for image in folder.images:
        name = folder.names[image]
        beginning = re.match(r"(.*[^ _.-])[ _.-]+[^\W\d]+$", name.name)
        if beginning and image not in used and not name.mask and beginning[1] in names:
            companions[beginning[1]] = image
    nearly_all = len(companions) > NEARLY_ALL * len(names)
    return min(companions.values()) if names and nearly_all else None


def _turned_notes(items: Iterable[Item]) -> tuple[str, ...]:
    """A line about photographs that EXIF turns, and whose masks it does not, at no other size."""
    turned = []
    for item in items:
        if item.masks and _is_turned(item.first) and not any(map(_is_turned, item.masks)):
            turned.append(item.first.name)
    if not turned:
        return ()
    found = f"{len(turned)} photographs are turned by their EXIF orientation, their masks are not"
    return (f"{found}; look at {turned[0]} and its mask with medflare data check DATA --out check",)


def _is_turned(path: Path) -> bool:
    """Whether EXIF turns a photograph, and leaves its size; False if it cannot be read."""
    if suffix(path) not in JPEG:
        return False
    with warnings.catch_warnings(), suppress(DataError), explained(path):
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with Image.open(path, formats=["JPEG"]) as image:
            orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
            square = image.width == image.height
            return orientation in (2, 3, 4) or (square and orientation > 4)
    return False


def _refuse_links(items: Iterable[Item], root: Path) -> None:
    """Raise DataError for a link to a file outside the folder, as later commands do."""
    allowed = [path.resolve() for path in (root, *allowed_folders())]
    for item in items:
        for file in item.paths:
            check_folder(file, allowed, str(root), "give --out for links to the files")


def _write_sites(folder: ImageFolder, dataset: Dataset, options: ImportOptions) -> ImportReport:
    """Write the datalists of the images of a folder."""
    root = folder.root
    items, warning = assign_patients(dataset.items, folder, options.patient)
    if options.redraw:
        items = [replace(item, split="") for item in items]
    sites = across_sites(
        _items_by_site(items, options),
        lambda site, listed: draw_splits(listed, site, options.shares or SHARES, options.seed),
    )
    drawn = list(chain.from_iterable(sites.values()))
    warnings = [warning, shared_warning(sites, "patient")]
    if dataset.folder_column and not options.patient:
        choice = _patient_option([item.first for item in items], root)
        warnings.append(
            f"each cell of column {dataset.folder_column} counts as a patient, with the images "
            f"that it begins; if a patient has several, give {choice} or --patient-column"
        )
    if not (options.sites or options.columns.site):
        warnings.append(_site_warning(dataset.items, root))
    warnings.append(_split_warning(dataset, drawn, root, options))
    warnings += _lines_without_split(sites)
    home = options.out or root
    check_target(home, sites, force=options.force)
    header: dict[str, Any] = {"labels": dataset.labels, "channel_names": dataset.channels}
    header["structure"] = dataset.structure
    for site, listed in sites.items():
        if options.out is not None:
            place_files(home / site, listed, root, copy=options.copy, slices=folder.slices)
        write_datalist(home / site, listed, root, header=header)
    guessed = _guessed(dataset, options)
    return ImportReport(dataset, sites, home, tuple(filter(None, warnings)), guessed)


def _guessed(dataset: Dataset, options: ImportOptions) -> str:
    """What the options leave to the names in the folder, and the options that say otherwise."""
    guesses = []
    if not options.kind and not (options.columns.label or options.columns.mask):
        guesses.append(f"the layout (otherwise give {dataset.options})")
    if not options.redraw and len({item.split for item in dataset.items}) > 1:
        guesses.append("the splits, by their names (otherwise give --redraw)")
    return " and ".join(guesses)


def _lines_without_split(sites: Sites) -> list[str]:
    """A line for each site that trains and whose patients of a split are at another site, too, so
    that they have its split.
    """
    lines = []
    for site, items in sites.items():
        present = {item.split for item in items}
        for split in ("training", "validation"):
            if split not in present and present != {"test"}:
                lines.append(f"{site}: no {split} image, as patients have one split at all sites")
    return lines


def _split_warning(
    dataset: Dataset, items: Sequence[Item], root: Path, options: ImportOptions
) -> str:
    """A line about classes that stand in one split only; DataError if all classes do."""
    splits = defaultdict(set)
    for item in items:
        if isinstance(item.label, int):
            splits[item.label].add(item.split)
    alone = []
    for number, of_class in sorted(splits.items()):
        if len(of_class) == 1:
            alone.append(f"{dataset.labels[str(number)]} in {min(of_class)}")
    if not alone or len(set().union(*splits.values())) < 2:
        return ""
    _refuse_split_without_a_known_class(dataset, splits, root)
    found = f"classes stand in one split only: {_shortened(alone)}"
    if len(alone) == len(splits) and options.kind != "classification":
        problem = (
            f"{root}: all {found}; if they are patients or splits, give {dataset.options}; "
            "otherwise --kind classification"
        )
        raise DataError("; ".join((problem, *dataset.notes)))
    return f"{found}; add patients of these classes, or --redraw"


def _refuse_split_without_a_known_class(
    dataset: Dataset, splits: Mapping[int, set[str]], root: Path
) -> None:
    """Raise DataError if test and training images have no class in common."""
    names: dict[str, list[str]] = {"training": [], "test": []}
    for split, of_split in names.items():
        for number, present in splits.items():
            if split in present:
                of_split.append(dataset.labels[str(number)])
    trained = names["training"]
    tested = names["test"]
    if trained and tested and not {*trained} & {*tested} and len(trained) + len(tested) > 2:
        raise DataError(
            f"{root}: training images have the classes {_shortened(trained)}, test images "
            f"{_shortened(tested)}; write one class alike, or draw new splits with --redraw"
        )


def _shortened(names: Sequence[str]) -> str:
    """The first names, and how many more there are.

    Examples:
        >>> _shortened(["a", "b", "c", "d", "e", "f"])
        'a, b, c, d and 2 more'
    """
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"


def _site_warning(items: Sequence[Item], root: Path) -> str:
    """A line if every image and its masks are in one of a few folders that may be sites.

    Otherwise "".
    """
    counts: Counter[str] = Counter()
    for item in items:
        tops = {file.relative_to(root).parts[0] for file in (item.first, *item.masks)}
        if len(tops) > 1:
            return ""
        counts.update(tops)
    if not 1 < len(counts) <= _MAX_SITES or min(counts.values()) < _MIN_IMAGES:
        return ""
    if any(map(split_folder, counts)):
        return ""
    if not any(item.masks for item in items):
        return ""
    folders = ", ".join(sorted(counts))
    return (
        f"all images are in the folders {folders}; if each is a site, give --site-folders, if each "
        "is a class, --kind classification"
    )


def _site_column_notes(dataset: Dataset) -> tuple[str, ...]:
    """A line about the likeliest column that may name the sites, if there is one."""
    for column, names in dataset.site_columns.items():
        if 1 < names <= _MAX_SITES:
            option = f"--site-column {shlex.quote(column)}"
            return (f"{option} makes a site of each of the {names} names in column {column}",)
    return ()


def _import_site_folders(root: Path, options: ImportOptions) -> ImportReport:
    paths = []
    if root.is_dir():
        for path in sorted(root.iterdir()):
            if path.is_dir() and path.name[0] != "." and not is_system_folder(path.name):
                paths.append(path)
    if not paths:
        raise DataError(
            f"{root}: no folder of a site in it; correct the path, or leave out --site-folders"
        )
    of_site = {}
    folders = {}
    datasets = {}
    for path in paths:
        of_site[path.name] = replace(options, out=options.out and options.out / path.name)
        _check_out(path, of_site[path.name].out)
    of_all = _read_tables_beside(root, paths, options)
    for path in paths:
        if of_all is None:
            folders[path.name], datasets[path.name] = _read_folder(path, of_site[path.name])
        else:
            folders[path.name], datasets[path.name] = _part_of(path, *of_all)
    datasets = _with_all_channels(_with_all_classes(datasets, root), root)
    sites = {}
    of_warning = defaultdict(list)  # warning -> its sites
    notes = []
    missing = []
    guessed = ""
    first_site, first = next(iter(datasets.items()))
    for site, dataset in datasets.items():
        report = _write_sites(folders[site], dataset, of_site[site])
        sites[site] = report.sites[""]
        guessed = guessed or report.guessed
        for warning in report.warnings:
            of_warning[warning].append(site)
        notes += prefixed(site, dataset.notes)
        missing += prefixed(site, dataset.missing)
        if dataset.labels != first.labels:
            names = f"{_called(dataset)}, at {first_site} {_called(first)}"
            of_warning[f"its structures are called {names}"].append(site)
    layouts = "; ".join(dict.fromkeys(dataset.layout for dataset in datasets.values()))
    if of_all is not None:
        notes += of_all[1].notes
        missing += of_all[1].missing
    dataset = replace(first, notes=tuple(notes), missing=tuple(missing), layout=layouts)
    warnings = [f"{', '.join(names)}: {warning}" for warning, names in of_warning.items()]
    return ImportReport(dataset, sites, options.out or root, tuple(warnings), guessed)


def _read_tables_beside(
    root: Path, sites: Sequence[Path], options: ImportOptions
) -> tuple[ImageFolder, Dataset] | None:
    """The files of all sites' folders, and their images by the tables beside these folders; None
    without such tables.
    """
    if options.table is not None:
        if any(options.table.is_relative_to(site) for site in sites):
            return None
    elif not _has_table(root, below=False) or any(map(_has_table, sites)):
        return None
    folder = scan_folder(root)
    dataset = _find_dataset(folder, options, several_tables=options.table is None)
    return folder, _checked(folder, dataset, options)


def _has_table(folder: Path, *, below: bool = True) -> bool:
    """Whether a folder has a table, or one `below` it has."""
    for inner, files in walk(folder, {}):
        if inner != folder and not below:
            break
        if any(suffix(file) in TABLES for file in files):
            return True
    return False


def _part_of(site: Path, folder: ImageFolder, dataset: Dataset) -> tuple[ImageFolder, Dataset]:
    """What all sites' files and images have in a site's folder, without the notes of all."""
    items = tuple(item for item in dataset.items if item.first.is_relative_to(site))
    if not items:
        raise DataError(f"{site}: the table names no image in it; take the folder out")
    return replace(folder, root=site), replace(dataset, items=items, notes=(), missing=())


def _with_all_classes(datasets: Mapping[str, Dataset], root: Path) -> dict[str, Dataset]:
    """The sites' images with one list of classes, those of all sites.

    DataError if one site has masks and another classes, or if the findings of images differ.
    """
    first_site, first = next(iter(datasets.items()))
    names: set[str] = set()
    differ = False
    for site, dataset in datasets.items():
        if dataset.kind != first.kind:
            raise DataError(
                f"{root}: {first_site} is read as {first.kind}, {site} as {dataset.kind}; "
                "give --kind, or import them apart"
            )
        if dataset.kind == "classification":
            names.update(dataset.labels.values())
        if names and dataset.labels != first.labels:
            differ = True
            if any(isinstance(item.label, list) for item in dataset.items):
                raise DataError(
                    f"{root}: {first_site} has the findings {_called(first)}, "
                    f"{site} {_called(dataset)}; choose those of all sites with --label-column, "
                    "or import them apart"
                )
    if not differ:
        return dict(datasets)
    return _renumbered(datasets, sorted_labels(names), root)


def _with_all_channels(datasets: Mapping[str, Dataset], root: Path) -> dict[str, Dataset]:
    """The sites' images with the same channels in the same order, None for one without a file.

    DataError for sites whose images have all channels in one file, in different orders.
    """
    orders = {site: list(dataset.channels.values()) for site, dataset in datasets.items()}
    names = sorted(set(chain(*orders.values())))
    if not all(orders.values()) or len({*map(tuple, orders.values())}) == 1:
        return dict(datasets)
    complete = {}
    for site, dataset in datasets.items():
        lacking = sorted({*names} - {*orders[site]})
        items = []
        for item in dataset.items:
            if len(item.files) != len(orders[site]):
                raise DataError(
                    f"{root}: sites name different channels, {site} {', '.join(orders[site])}; "
                    "store the same ones in the same order, or a file for each channel"
                )
            file_of = dict(zip(orders[site], item.files, strict=True))
            items.append(replace(item, files=tuple(map(file_of.get, names))))
        notes = dataset.notes
        if lacking:
            notes = (*notes, f"no file of channel {', '.join(lacking)} (null in the datalist)")
        complete[site] = replace(dataset, items=tuple(items), channels=numbered(names), notes=notes)
    return complete


def _renumbered(
    datasets: Mapping[str, Dataset], names: list[str], root: Path
) -> dict[str, Dataset]:
    """The sites' images with these names of classes."""
    refuse_variants(names, f"{root}: the sites' classes")
    complete = {}
    for site, dataset in datasets.items():
        items = []
        for item in dataset.items:
            items.append(replace(item, label=names.index(dataset.labels[str(item.label)])))
        notes = dataset.notes
        lacking = [name for name in names if name not in dataset.labels.values()]
        if lacking:
            notes = (*notes, f"no image of {', '.join(lacking)}")
        complete[site] = replace(dataset, items=tuple(items), labels=numbered(names), notes=notes)
    return complete


def _called(dataset: Dataset) -> str:
    labels = dataset.labels
    names = labels.values() if dataset.kind == "classification" else labels.items()
    return ", ".join(map(str, names)) or "nothing"


# -- patients, sites and splits --------------------------------------------------------------------


def assign_patients(
    items: Sequence[Item], folder: ImageFolder, pattern: str = ""
) -> tuple[list[Item], str]:
    """The images with their patients.

    By the pattern, otherwise by the table, otherwise by DICOM's PatientID.

    Args:
        pattern: regular expression on the file name (on the path within the folder if it has a
            "/", or does not match all names); its first group is the patient.

    Returns:
        The images, and a warning if no patient is known, otherwise "".

    Raises:
        ConfigError: not a regular expression.
        DataError: it does not match a name, or some images have no patient.
    """
    if pattern:
        of_table = {item.patient for item in items} - {""}
        replaced = f"--patient names the patients, in place of the {len(of_table)} of the table"
        matched = _match_patients(items, folder, pattern)
        _refuse_spellings(matched)
        return matched, replaced if of_table else ""
    assigned = []
    without = []
    subjects = [_SUBJECT.search(folder.relative(item.first)) for item in items]
    for item, subject in zip(items, subjects, strict=True):
        patient = item.patient or folder.patients.get(item.first, "")
        if subject and not patient and None not in subjects:
            patient = subject[1]
        assigned.append(replace(item, patient=patient))
        if not patient:
            without.append(item.first)
    _refuse_spellings(assigned)
    if not without:
        return assigned, ""
    if len(without) < len(items):
        raise DataError(
            f"{len(without)} of {len(items)} images have no patient, the first: "
            f"{folder.relative(without[0])}; complete them, or give --patient '^(p\\d+)', which "
            "names the patients of all"
        )
    warning = (
        "patients are unknown: each image counts as a patient, "
        "and two images of one person may be in different splits; "
    )
    people = [_EYE.sub("", path.stem) for path in without]
    if len({*people}) < len(items) and all(_EYE.search(path.stem) for path in without):
        for row, name in enumerate(people):
            assigned[row] = replace(assigned[row], patient=name)
        warning = "patients are the file names without left and right; if they are not, "
    return assigned, f"{warning}give {_patient_option(without, folder.root)} or --patient-column"


def _refuse_spellings(items: Iterable[Item]) -> None:
    """Raise DataError for a patient whose name is written in two ways, as 7 and 007."""
    written: dict[str, str] = {}
    for item in items:
        patient = item.patient
        key = (patient.lstrip("0") or "0") if patient.isdecimal() else patient.casefold()
        other = written.setdefault(key, patient)
        if other != patient:
            raise DataError(
                f"patients {other} and {patient} are one name, written in two ways; write it in one"
            )


def _patient_option(images: Sequence[Path], root: Path) -> str:
    """The option that reads the patient from file names, or from the folders of several images; its
    pattern fits them, as far as some have the same first part of their name.
    """
    inner = [image.relative_to(root).parent.parts for image in images]
    for level in range(min(map(len, inner))):
        folders = Counter(parts[level] for parts in inner)
        paths = {parts[: level + 1] for parts in inner}
        if max(folders.values()) > 1 and len(paths) == len(folders) and _may_be_patients(folders):
            above = "[^/]+/" * level
            return f"--patient '^{above}([^/]+)/' (if the folders {min(folders)}, ... are patients)"
    first_parts = [_FIRST_PART.match(path.stem) for path in images]
    patients = {part[1] for part in first_parts if part}
    if None in first_parts or not 1 < len(patients) < len(images):
        return "--patient REGEX (its first group is the patient in the file's name or path)"
    return f"--patient '{_FIRST_PART.pattern}' (if {min(patients)}, ... are patients)"


def _may_be_patients(folders: Collection[str]) -> bool:
    """Whether folders have names with numbers, and no word of a split, of images or of masks."""
    for name in folders:
        if not PATIENT.search(name) or not _NO_PATIENT.isdisjoint(words(name)):
            return False
    return len(folders) > 1


def _match_patients(items: Sequence[Item], folder: ImageFolder, pattern: str) -> list[Item]:
    """The images with the patients that a regular expression finds in their names."""
    try:
        expression = re.compile(composed(pattern))
    except re.error as error:
        raise ConfigError(
            f"--patient '{pattern}': not a regular expression ({error}); for example '^(p\\d+)'"
        ) from error
    group = min(expression.groups, 1)
    names = [composed(item.first.name) for item in items]
    if "/" in pattern or not all(map(expression.search, names)):
        names = [composed(folder.relative(item.first)) for item in items]
    assigned = []
    for item, name in zip(items, names, strict=True):
        match = expression.search(name)
        if not match or not match[group]:
            raise DataError(
                f"--patient '{pattern}' does not match {name!r}; correct the expression"
            )
        assigned.append(replace(item, patient=match[group]))
    return assigned


def parse_shares(text: str) -> dict[str, float]:
    """Split -> share of the patients, from three numbers above 0 such as "70,10,20".

    ConfigError for another text.
    """
    try:
        numbers = list(map(float, text.split(",")))
    except ValueError:
        numbers = []
    if len(numbers) != len(SPLITS) or not all(0 < number < float("inf") for number in numbers):
        raise ConfigError(
            f"--shares {text!r}: give three numbers above 0 for {', '.join(SPLITS)}, "
            "for example 70,10,20"
        )
    return dict(zip(SPLITS, numbers, strict=True))


def _items_by_site(items: Sequence[Item], options: ImportOptions) -> dict[str, list[Item]]:
    """Site -> images: by the column, or patients distributed over simulated sites.

    The site is "" if there is one.
    """
    by_site = {}
    if options.sites is not None:
        if options.sites < 1:
            raise ConfigError(f"--sites {options.sites}: give 1 or more")
        numbers = _folds(items, options.sites, options.seed, "sites")
        for number in range(options.sites):
            rows = np.flatnonzero(numbers == number).tolist()
            by_site[f"site-{number + 1}"] = [items[row] for row in rows]
        return by_site
    if not options.columns.site:
        return {"": list(items)}
    name_of: dict[str, str] = {}  # folder -> name in the table
    for item in items:
        folder = re.sub(r"[^\w-]+", "-", item.site).strip("-") or "unknown"
        other = name_of.setdefault(folder, item.site)
        if other != item.site:
            raise DataError(
                f"--site-column: {other!r} and {item.site!r} would both be the folder {folder}; "
                "write one name per site"
            )
        by_site.setdefault(folder, []).append(item)
    refuse_variants(by_site, "--site-column")
    return dict(sorted(by_site.items()))


def draw_splits(
    items: Sequence[Item], site: str, shares: Mapping[str, float], seed: int
) -> list[Item]:
    """The images with their splits.

    A split that no image has is drawn from the training patients, stratified by class.

    Args:
        items: of one site, with their patients.
        site: its name, a key of the random draw.
        shares: split -> its share of the patients; a split that is not in it is not drawn.

    Raises:
        DataError: a patient in two splits, or too few patients.
    """
    drawn = [replace(item, split=item.split or "training") for item in items]
    present = set()
    first_of: dict[str, Item] = {}
    for item in drawn:
        present.add(item.split)
        first = first_of.setdefault(patient_of(item), item)
        if first.split != item.split:
            raise DataError(
                f"patient {item.patient} is in two splits: {first.first.name} ({first.split}) and "
                f"{item.first.name} ({item.split}); draw new splits with --redraw"
            )
    if present <= {"test"}:
        return drawn  # a site that does not train
    if "training" not in present:
        raise DataError(
            f"{site or 'the images'}: no image is for training, as they are called "
            f"{' and '.join(sorted(present))}; add training images, or draw new splits with "
            "--redraw"
        )
    missing = [split for split in ("test", "validation") if split in shares.keys() - present]
    rest = sum(shares[split] for split in ("training", *missing))
    for split in missing:
        pool = {row: item for row, item in enumerate(drawn) if item.split == "training"}
        patients = set(map(patient_of, pool.values()))
        folds = max(2, min(round(rest / shares[split]), len(patients)))
        numbers = _folds(list(pool.values()), folds, seed, f"{site} {split}")
        rest -= shares[split]
        for row, fold in zip(pool, numbers, strict=True):
            if fold == 0:
                drawn[row] = replace(drawn[row], split=split)
    return drawn


def _folds(items: Sequence[Item], folds: int, seed: int, key: str) -> np.ndarray:
    """The fold of every image, (n,): all images of a patient in one.

    Each class of a split has equal shares as far as patients allow.
    """
    patients = list(map(patient_of, items))
    counts = Counter(patients)
    if len(counts) < folds:
        found = f"{len(counts)} patient(s) cannot be split in {folds}"
        patient, count = counts.most_common(1)[0]
        if count > 1:
            found += f" ({count} images are of {patient!r})"
        remedy = "use fewer --sites" if key == "sites" else "unite the site with another"
        raise DataError(
            f"{key}: {found}; add patients, {remedy}, or if it has more patients, name them by "
            "--patient '^(p\\d+)' (of the file name, or of its path)"
        )
    numbers = np.zeros(len(items), np.int64)
    if folds == 1:
        return numbers
    strata = [f"{item.split} {item.stratum}" for item in items]
    classes = np.unique(strata, return_inverse=True)[1]
    if np.bincount(classes).max() < folds:  # no class has enough images for every fold
        classes = np.zeros_like(classes)
    random = numpy_random_state(seed, "data init", key)
    splitter = StratifiedGroupKFold(folds, shuffle=True, random_state=random)
    with warnings.catch_warnings():
        # The printed table shows the counts.
        warnings.filterwarnings("ignore", "The least populated class", UserWarning)
        for fold, (_, rows) in enumerate(splitter.split(numbers, classes, patients)):
            numbers[rows] = fold
    if len(np.unique(numbers)) < folds:
        raise DataError(
            f"{key}: the patients' numbers of images are too uneven for {folds} parts; "
            "use fewer, or other --shares"
        )
    return numbers


def patient_of(item: Item) -> str:
    """The patient; if it is unknown, the image counts as one."""
    return item.patient or str(item.first)


# -- files -----------------------------------------------------------------------------------------


def check_files(items: Iterable[Item], root: Path, made: Collection[Path] = ()) -> None:
    """Raise DataError for a file that does not exist, and for an image that is listed twice.

    Folders that will be `made` need not exist.
    """
    listed = set()
    for item in items:
        for file in item.paths:
            if file not in item.rendered and file not in made and not file.exists():
                raise DataError(
                    f"{file}: file not found; restore it, or take its link or its row out"
                )
        if item.first in listed:
            path = item.first.relative_to(root).as_posix()
            raise DataError(f"{root}: {path} is listed twice")
        listed.add(item.first)


def check_target(home: Path, sites: Iterable[str], *, force: bool) -> None:
    """Raise DataError for a datalist that would be overwritten, and for other sites in the folder.

    Their patients may be the same.
    """
    names = list(sites)
    for site in names:
        path = home / site / FILE
        if path.exists() and not force:
            raise DataError(f"{path} exists; keep it, or replace it with --force")
    if "" in names:
        return
    for path in sorted(home.glob(f"*/{FILE}")):
        if path.parent.name not in names:
            raise DataError(
                f"{path.parent} is a site of an earlier import; remove it, or take another folder"
            )


def write_datalist(
    folder: Path,
    items: Sequence[Item],
    root: Path,
    *,
    splits: Sequence[str] = SPLITS,
    header: Mapping[str, Any] | None = None,
) -> None:
    """Write a site's datalist.json.

    Args:
        folder: of the site; its files have the same relative paths as in `root`.
        splits: the lists to write; a list that is missing is drawn when the data are read.
        header: "labels" and "channel_names" of the Decathlon layout, "structure" of
            `Dataset.structure`; empty ones are left out.
    """

    def relative(path: Path | None) -> str | None:
        return None if path is None else path.relative_to(root).as_posix()

    def entry(item: Item) -> dict[str, Any]:
        files = list(map(relative, item.files))
        listed: dict[str, Any] = {"image": files, "label": item.label}
        if len(files) == 1:
            listed["image"] = files[0]
        if item.masks:
            masks = list(map(relative, item.masks))
            listed["label"] = masks if isinstance(item.label, list) else masks[0]
        if item.patient:
            listed["patient"] = item.patient
        listed |= item.attributes.to_dict()
        return listed

    content: dict[str, Any] = {"name": root.resolve().name}
    for name, values in (header or {}).items():
        if values:
            content[name] = values
    for split in splits:
        content[split] = [entry(item) for item in items if item.split == split]
    write_json(folder / FILE, content)


def place_files(
    folder: Path,
    items: Sequence[Item],
    root: Path,
    *,
    copy: bool,
    slices: Mapping[Path, Sequence[Path]],
) -> None:
    """Link or copy a site's files into its folder; DataError if another file is there.

    `Item.rendered` is written as PNG, `slices` in folders.
    """
    for item in counted(items, len(items), f"{folder}, images imported"):
        for file in item.paths:
            target = folder / file.relative_to(root)
            if file in item.rendered:
                content = BytesIO()
                Image.fromarray(item.rendered[file]()).save(content, format="PNG")
                write_atomically(target, content.getvalue())
            elif file in slices:
                for inner in slices[file]:
                    _place(inner, target / inner.name, copy)
            else:
                _place(file, target, copy)


def _place(source: Path, target: Path, copy: bool) -> None:
    """A hard link or a copy of a file, or of every file of a folder; links are followed.

    It never replaces another file.
    """
    if source.is_dir():
        for inner in sorted(source.iterdir()):
            _place(inner, target / inner.name, copy)
        return
    if target.exists():
        if not (target.samefile(source) or filecmp.cmp(source, target, shallow=False)):
            raise DataError(f"{target} exists and differs from {source}; take an empty folder")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if copy:
            shutil.copyfile(source.resolve(), target)
        else:
            os.link(source.resolve(), target)
    except OSError as error:
        raise DataError(
            f"{target}: {error.strerror}; "
            "take a folder on the disk of the images, or copy them with --copy"
        ) from error
