"""Splits that lists of names, the names of files or tables tell."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePath

from medflare.core.errors import DataError
from medflare.core.text import read_text
from medflare.data.reading import stem
from medflare.preparation.dataset_import.columns import usual_columns
from medflare.preparation.dataset_import.folders import Dataset, ImageFolder
from medflare.preparation.dataset_import.frames import read_frame, table_columns
from medflare.preparation.dataset_import.names import (
    SPLIT_WORDS,
    WORDS,
    first_split,
    split_name,
    words,
)

_FLAGS = {"0", "1", "true", "false", "yes", "no"}


def with_listed_splits(folder: ImageFolder, dataset: Dataset, unused: Collection[Path]) -> Dataset:
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
        splits = [first_split("".join(words(name)[:1])) for name in images]
        source = "the names of files"
        if "" in splits or len({*splits}) < 2:
            return dataset
    items = []
    for item, split in zip(dataset.items, splits, strict=True):
        items.append(replace(item, split=split))
    return replace(dataset, items=tuple(items), layout=f"{dataset.layout}, splits by {source}")


def refuse_split_tables(
    folder: ImageFolder, tables: Iterable[Path], unused: Iterable[Path]
) -> None:
    """Raise DataError for tables of training and test rows that are not used, as
    train_indexes.csv.
    """
    if any(first_split(path.stem) for path in tables):
        return
    lists = {first_split(path.stem): path for path in unused}
    if {"training", "test"} <= lists.keys():
        raise DataError(
            f"{folder.relative(lists['training'])} seems to list a split, but names no image; give "
            "--split-column with a column of train, val and test, or draw splits with --redraw"
        )


def refuse_flags_of_splits(tables: Iterable[Path]) -> None:
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
        named = path.stem not in images and not SPLIT_WORDS.isdisjoint(words(path.stem))
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
        split = first_split(path.stem)
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
