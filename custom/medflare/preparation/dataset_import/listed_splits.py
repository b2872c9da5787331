"""Splits that lists of names, the names of files or tables tell."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from medflare.core.errors import DataError
from medflare.core.text import read_json, read_text
from medflare.data.reading import stem, suffix
from medflare.preparation.dataset_import.columns import usual_columns
from medflare.preparation.dataset_import.folders import HEADER, Dataset, ImageFolder, Item
from medflare.preparation.dataset_import.image_table import ImageTable
from medflare.preparation.dataset_import.names import (
    SPLIT_WORDS,
    WORDS,
    composed,
    first_split,
    split_name,
    words,
)

_MOST_BYTES = 2**24  # of a list of names
_FLAGS = {"0", "1", "true", "false", "yes", "no"}


def with_listed_splits(
    folder: ImageFolder, dataset: Dataset, unused: Iterable[ImageTable]
) -> Dataset:
    """The images with the splits of lists of names such as train.txt or MONAI's dataset.json, or of
    their own names such as train0_1.png (MedMNIST), if no folder names splits.

    DataError for files that may name the splits, if not every image is in one list.
    """
    if not {item.split for item in dataset.items} <= {"", "training"}:
        return dataset
    images = [composed(stem(item.first)) for item in dataset.items]
    counts = _counts_of_names(dataset.items)
    folders = {item.first.parent.name for item in dataset.items}
    lists_of = {}  # file -> split -> names
    for path in [*folder.texts, *folder.root.rglob(HEADER)]:
        lists = _listed_names(path, counts, folders)
        if len(lists) > 1 or _names_split(path, images):
            lists_of[path] = lists
    tables = []
    for table in unused:
        named_so = _names_split(table.path, images) and not _is_of_its_folder(table)
        if named_so or _split_columns(table):
            tables.append(table)
    if not lists_of and len(tables) == 1 and _is_of_objects(tables[0]):
        tables = []
    files = [*lists_of, *(table.path for table in tables)]
    if files:
        problems = [str(table.problem) for table in tables if table.problem]
        splits = _listed_splits(dataset.items, counts, lists_of.values(), files[0], problems)
        source = ", ".join(map(folder.relative, files))
    else:
        splits = [first_split("".join(words(name)[:1])) for name in images]
        source = "the names of files"
        if "" in splits or len({*splits}) < 2:
            return dataset
    items = []
    for item, split in zip(dataset.items, splits, strict=True):
        items.append(replace(item, split=split))
    return dataset.with_items(items, layout=f"{dataset.layout}, splits by {source}")


def refuse_split_tables(
    folder: ImageFolder, tables: Iterable[ImageTable], unused: Iterable[ImageTable]
) -> None:
    """Raise DataError for tables of training and test rows that are not used, as
    train_indexes.csv.
    """
    if any(first_split(table.path.stem) for table in tables):
        return
    lists = {first_split(table.path.stem): table.path for table in unused}
    if {"training", "test"} <= lists.keys():
        raise DataError(
            f"{folder.relative(lists['training'])} seems to list a split, but names no image; give "
            "--split-column with a column of train, val and test, or draw splits with --redraw"
        )


def refuse_flags_of_splits(tables: Iterable[ImageTable]) -> None:
    """Raise DataError for a column such as is_test, of yes and no."""
    for table in tables:
        for name, texts in table.frame.items():
            of_split = any(map(split_name, words(name)))
            cells = {text.lower() for text in texts}
            if of_split and len(cells) == 2 and cells < _FLAGS:
                flags = " and ".join(sorted(cells))
                raise DataError(
                    f"{table.path}: column {name} seems to tell the splits by {flags}; "
                    "write train, val or test in it, or draw splits with --redraw"
                )


def _names_split(path: Path, images: Sequence[str]) -> bool:
    """Whether a file is named after splits, and not like an image."""
    return composed(path.stem) not in images and not SPLIT_WORDS.isdisjoint(words(path.stem))


def _is_of_objects(table: ImageTable) -> bool:
    """Whether a table that is called like one split has several rows for an image, as of fractures:
    no column names each row.
    """
    named = [*map(split_name, SPLIT_WORDS.intersection(words(table.path.stem)))]
    if len(named) != 1 or not named[0] or _split_columns(table) or not table.header:
        return False
    return not any(texts.is_unique for _, texts in table.frame.items())


def _is_of_its_folder(table: ImageTable) -> bool:
    """Whether a table that is called like a split names images in folders of this split."""
    names = table.folder.names
    for _, cells in table.frame.items() if table.header else ():
        images = table.named_by(cells)
        if images:
            return all(names[image].split == table.split for image in images)
    return False


def _split_columns(table: ImageTable) -> list[str]:
    """The columns with a usual name of splits."""
    return usual_columns(WORDS["column"]["split"], table.header)


def _counts_of_names(items: Iterable[Item]) -> Counter[str]:
    """Name of an image -> how many are called so; and of a folder of images, if no image is."""
    images = {item.first for item in items}
    counts = Counter(composed(stem(image)) for image in images)
    folders = {image.parent for image in images}
    of_folders = Counter(composed(stem(folder)) for folder in folders)
    for name in counts:
        of_folders.pop(name, None)
    return counts + of_folders


def _listed_names(path: Path, counts: Counter[str], folders: set[str]) -> dict[str, set[str]]:
    """Split -> the images that a text or JSON file lists for it, or their folders if images are
    called alike; "fold" -> those with a fold. `counts`: see `_counts_of_names`.

    Files in other `folders` are other images, as imagesTs/1.nii.gz and imagesTr/1.nii.gz.
    """
    content: Any = None
    with suppress(ValueError, OSError):  # of the encoding
        if suffix(path) == ".json" and path.stat().st_size < _MOST_BYTES:
            content = read_json(path)
        elif first_split(path.stem):
            content = read_text(path).splitlines()
    if isinstance(content, list):
        content = {first_split(path.stem): content}
    name_of = {name.lstrip("0"): name for name in counts if name.isdecimal()}
    names = defaultdict(set)
    for key, entries in content.items() if isinstance(content, dict) else ():
        split = split_name(key)
        for entry in entries if split and isinstance(entries, list) else ():
            fields = entry if isinstance(entry, dict) else {"image": entry}
            files = fields.get("image")
            for file in files if isinstance(files, list) else [files]:
                listed = path.parent / composed(str(file).strip()).replace("\\", "/")
                name = stem(listed)
                if name not in counts and name.isdecimal():  # 7 for 0007.png
                    name = name_of.get(name.lstrip("0"), name)
                if counts[name] > 1 and counts[listed.parent.name] == 1:  # P1/image.nii.gz
                    name = listed.parent.name
                if counts[name] and (listed.parent.name in folders or not listed.is_file()):
                    names[split].add(name)
                    names["fold" if "fold" in fields else split].add(name)
    return names


def _listed_splits(
    items: Iterable[Item],
    counts: Counter[str],
    lists: Iterable[Mapping[str, Iterable[str]]],
    first: Path,
    problems: Iterable[str],
) -> list[str]:
    """The split of each image by lists of names; DataError for an image that is not in one.

    Args:
        counts: see `_counts_of_names`.
        lists: split -> names, of each file.
        first: of the files that may name the splits, also of tables, which are not read.
        problems: why the tables are not used.
    """
    splits = defaultdict(set)
    for names_of in lists:
        for split, names in names_of.items():
            for name in names:
                splits[name].add(split)
    found: list[str] = []
    for item in items:
        name, folder = (composed(stem(path)) for path in (item.first, item.first.parent))
        listed = name if counts[name] == 1 and splits[name] else folder
        if len(splits[listed]) != 1 or counts[listed] > 1:
            fold = ", as it has a fold" if "fold" in splits[listed] else ""
            problem = (
                f"{first}: seems to name the splits, but no list of train, val and test names "
                f"{name} alone{fold}; correct the lists, give a table with a column split, or draw "
                "the splits with --redraw"
            )
            raise DataError("; ".join((problem, *problems)))
        found += splits[listed]
    return found
