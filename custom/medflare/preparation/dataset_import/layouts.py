"""Which layout a folder has: tables, masks or folders of classes; and its images with labels."""

import filecmp
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, takewhile
from pathlib import Path

from medflare.core.errors import ConfigError, DataError
from medflare.data.reading import PICTURES, read_stored, stem, suffix
from medflare.preparation.dataset_import.chosen_structures import with_chosen_structures
from medflare.preparation.dataset_import.class_folders import class_folders
from medflare.preparation.dataset_import.columns import (
    ColumnError,
    UnlabelledTableError,
    usual_columns,
)
from medflare.preparation.dataset_import.folders import (
    MAX_CLASSES,
    NEARLY_ALL,
    Dataset,
    ImageFolder,
    common_folder,
    prefixed,
)
from medflare.preparation.dataset_import.frames import UnrelatedTableError, table_columns
from medflare.preparation.dataset_import.image_table import ImageTable
from medflare.preparation.dataset_import.listed_splits import (
    refuse_flags_of_splits,
    refuse_split_tables,
    with_listed_splits,
)
from medflare.preparation.dataset_import.masks import (
    SAMPLE_SIZE,
    are_masks,
    count_values,
    pair_masks,
    refuse_masks_of_slices,
)
from medflare.preparation.dataset_import.names import (
    IMAGE_WORDS,
    MASK_WORDS,
    WORDS,
    first_split,
    parse_name,
    shortened,
    words,
)
from medflare.preparation.dataset_import.options import GUESSED, Columns, ImportOptions
from medflare.preparation.dataset_import.patients import NO_PATIENT
from medflare.preparation.dataset_import.structures import (
    are_in_structures,
    structure_files,
    structure_folders,
    structure_suffixes,
)
from medflare.preparation.dataset_import.tables import (
    check_table,
    described,
    patients_of_table,
    read_tables,
)

_VERSIONS = frozenset(WORDS["version"])
_NO_STRUCTURE = IMAGE_WORDS | MASK_WORDS.union(WORDS["no_structure"], WORDS["version"])
_COPIES = frozenset(WORDS["copy"])
_START = 2**16  # bytes of a file that tell copies from others


def find_dataset(
    folder: ImageFolder, options: ImportOptions, *, several_tables: bool = False
) -> Dataset:
    """A folder's images with labels: by a table, masks by name or folder, or a folder per class.

    DataError if it is unclear, or if a folder beside those of splits may be a split, too. With
    `several_tables`, all tables are of these images.
    """
    columns = options.columns
    folder, tables = _with_patients_of_tables(folder, options)
    used = [table for table in tables if table.problem is None]
    describes = _related(tables) and not (columns.label or columns.mask)
    requested = options.table is not None or columns != GUESSED
    if requested and len(tables) == 1 and not describes:
        used = tables
    if not several_tables:
        _refuse_several_tables(folder, used, options)
    if requested and not used and not describes:
        problem = f"{folder.root}: no table (CSV or Excel) for the columns; name it with --table"
        raise DataError("; ".join((problem, *_problems(tables), *_shared_columns(folder))))
    others = [table for table in tables if table not in used]
    if used:
        others += _with_requested_columns(folder, options)
        if options.structures:
            raise ConfigError("--structure: a table names the masks; choose with --mask-column")
        dataset = _by_tables(folder, options, used, others)
    else:
        dataset = _by_names(folder, options, tables)
    _refuse_masks_as_images(folder, dataset, options)
    notes = [*prefixed("not used", _problems(others)), *dataset.notes]
    if options.table is not None:
        with_columns = [table.path for table in others]
        for path in _other_tables(folder, options.table):
            if path not in with_columns:
                notes.append(f"not used, as --table names another: {folder.relative(path)}")
    return replace(dataset, notes=tuple(notes))


def _with_patients_of_tables(
    folder: ImageFolder, options: ImportOptions
) -> tuple[ImageFolder, list[ImageTable]]:
    """The folder, and its tables with their problems; some may be of the patients of others."""
    tables = _judged_tables(folder, options)
    labelled = [table for table in tables if not table.problem]
    sources = labelled or _related(tables)
    if not sources or len(labelled) == len(tables):
        return folder, tables
    with_patients = _with_patients(folder, sources, options.columns)
    again = _judged_tables(with_patients, options)
    if not labelled:
        return with_patients, again
    for row, table in enumerate(again):
        named = isinstance(tables[row].problem, ColumnError)
        if isinstance(table.problem, ColumnError) and not named:
            tables[row] = table
    return folder, tables


def _judged_tables(folder: ImageFolder, options: ImportOptions) -> list[ImageTable]:
    """The tables that may have the labels, with their problems."""
    tables = []
    for path in [options.table] if options.table else folder.tables:
        table = ImageTable(path, folder)
        try:
            check_table(table, options.columns, options.kind)
        except DataError as error:
            table.problem = error
        tables.append(table)
    return tables


def _related(tables: Iterable[ImageTable]) -> list[ImageTable]:
    """Those that have a problem, though they seem to be of these images."""
    return [table for table in tables if table.problem and table.may_be_related]


def _problems(tables: Iterable[ImageTable]) -> list[str]:
    """Why tables are not used."""
    return [str(table.problem) for table in tables if table.problem]


def _refuse_several_tables(
    folder: ImageFolder, tables: Sequence[ImageTable], options: ImportOptions
) -> None:
    """Raise DataError for several tables, unless each is of a split."""
    splits = {table.split for table in tables} - {""}
    if len(tables) > 1 and len(splits) < len(tables):
        names = ", ".join(folder.relative(table.path) for table in tables)
        remedy = "choose one with --table, unite them, or give --site-folders"
        if options.site_folders:
            remedy = "choose one with --table NAME, as all sites call it, or unite them"
        raise DataError(f"{folder.root}: {len(tables)} tables ({names}); {remedy}")


def _by_tables(
    folder: ImageFolder,
    options: ImportOptions,
    tables: Sequence[ImageTable],
    others: Sequence[ImageTable],
) -> Dataset:
    """The images by tables, with what the others say of them."""
    problems = [(table, str(table.problem)) for table in _related(others)]
    try:
        dataset = read_tables(tables, options)
    except ColumnError as error:
        raise tables[0].problem or error from None  # that it names no image, if so
    for table in _related((*tables, *others)):
        if {*dataset.labelled_by} <= {*table.header}:
            raise DataError(f"{table.problem}, or choose one table with --table")
    _refuse_without_training(folder, dataset)
    dataset = _described_by(dataset, [table for table in others if table.may_be_related], options)
    _refuse_part(folder, tables, problems)
    if not options.redraw:
        dataset = with_listed_splits(folder, dataset, ())
        if not any(item.split for item in dataset.items):
            refuse_split_tables(folder, tables, [table for table in others if table.problem])
            refuse_flags_of_splits(tables)
    return dataset


def _refuse_masks_as_images(folder: ImageFolder, dataset: Dataset, options: ImportOptions) -> None:
    """Raise DataError if the images of classes are called as masks are, and look so."""
    images = [item.first for item in dataset.items]
    if dataset.kind == "segmentation" or options.kind:
        return
    called_so = all(parse_name(image.relative_to(folder.root)).mask for image in images)
    if called_so and are_masks(images):
        found = (
            f"{folder.root}: all images have two values, as masks have, as "
            f"{folder.relative(images[0])}; if they are the images, give --kind classification"
        )
        raise DataError("; ".join((found, *folder.notes)))


def _refuse_without_training(folder: ImageFolder, dataset: Dataset) -> None:
    """Raise DataError if tables are of validation, and images in a folder of training have no
    row.
    """
    used = {item.first for item in dataset.items}
    others = [image for image in folder.images if image not in used]
    of_training = [image for image in others if folder.names[image].split == "training"]
    splits = {folder.names[image].split for image in used}
    if of_training and "validation" in splits and splits <= {"validation", "test"}:
        raise DataError(
            f"{folder.root}: {len(of_training)} training images have no row, the first: "
            f"{folder.relative(of_training[0])}; add their rows, or if their folders tell the "
            "labels, leave the table out with --leave-out"
        )


def _with_requested_columns(folder: ImageFolder, options: ImportOptions) -> list[ImageTable]:
    """The other tables that have a column of patients, sites or splits that the user names, and
    that --table lacks.
    """
    if options.table is None:
        return []
    columns = options.columns
    named = {columns.patient, columns.site, columns.split} - {"", *table_columns(options.table)}
    tables = [ImageTable(path, folder) for path in _other_tables(folder, options.table)]
    return [table for table in tables if not named.isdisjoint(table.header)]


def _other_tables(folder: ImageFolder, chosen: Path) -> list[Path]:
    """The tables of the folder but the chosen one, whose path may be written in another way."""
    return [path for path in folder.tables if path.resolve() != chosen.resolve()]


def _refuse_part(
    folder: ImageFolder, used: Sequence[ImageTable], others: Iterable[tuple[ImageTable, str]]
) -> None:
    """Raise DataError for a table of a split that is not used, though it cannot be read or has as
    many columns as those that are; `others`: tables with the problems that they had at first.
    """
    splits = {table.split for table in used}
    width = min(len(table.header) for table in used)
    for table, problem in others:
        describes = table.problem is None and table.split in splits
        as_wide = not table.header or len(table.header) >= width
        if splits != {""} and first_split(table.path.stem) and as_wide and not describes:
            names = ", ".join(folder.relative(other.path) for other in used)
            raise DataError(
                f"{problem}; correct this table, or choose one of the others with --table ({names})"
            )


def _by_names(folder: ImageFolder, options: ImportOptions, tables: Sequence[ImageTable]) -> Dataset:
    """The images by the names of files and folders, with what the tables say of them; DataError for
    classes beside tables of these images, without a kind.
    """
    kind = options.kind
    folder, missing = _without_loose(folder, skip=options.skip)
    related = _related(tables)
    with_labels = [t for t in related if not isinstance(t.problem, UnlabelledTableError)] or related
    _refuse_versions(folder)
    _refuse_copies(folder)
    try:
        dataset = _by_folders(folder, options)
    except DataError as error:
        if related and not folder.masks:
            reasons = [*_problems(_of_one_header_each(with_labels)), *_shared_columns(folder)]
            of_columns = isinstance(with_labels[0].problem, ColumnError)
            kind_of_error = ColumnError if of_columns else DataError
            raise kind_of_error("; ".join((*reasons, *folder.notes))) from error
        if options.structures:
            raise
        hints = [*_problems(_of_one_header_each(tables)), *folder.notes]
        if folder.texts:
            hints.append(
                f"text files are not read ({folder.relative(folder.texts[0])}); if they have "
                "outlines or labels, make masks or a table of them"
            )
        raise DataError("; ".join((str(error), *hints))) from error
    if related and dataset.kind == "classification" and not kind:
        raise DataError(
            f"{folder.root}: are the folders {', '.join(dataset.labels.values())} the classes? if "
            f"so, give --kind classification; if not: {with_labels[0].problem}"
        )
    dataset = _described_by(dataset, related, options)
    if not options.redraw:
        dataset = with_listed_splits(folder, dataset, [t for t in tables if t.problem])
    strange = _beside_splits(folder, dataset)
    classes = dataset.kind == "classification"
    if strange and kind != "classification" and (classes or not options.redraw):
        remedy = "give --kind classification if it is a class" if classes else "draw with --redraw"
        raise DataError(
            f"{folder.root}: {len(strange)} images are in no folder of a split, but others are: "
            f"{folder.relative(strange[0])}; rename its folder train, val or test, take it out, or "
            f"{remedy}"
        )
    notes = [] if kind else _line_of_classes(folder, dataset)
    return replace(dataset, notes=(*dataset.notes, *notes), missing=(*missing, *dataset.missing))


def _line_of_classes(folder: ImageFolder, dataset: Dataset) -> list[str]:
    """A line about folders above images and masks that may be classes."""
    images = [item.first for item in dataset.items]
    images = [image for image in images if folder.names[image].split == "training"] or images
    with suppress(DataError):
        if dataset.kind == "segmentation":
            names = class_folders(folder, images, confirmed=False).labels.values()
            line = f"the folders {shortened([*names])} are not used; if they are classes, give"
            return [f"{line} --kind classification, if sites, --site-folders"]
    return []


def _without_loose(folder: ImageFolder, *, skip: bool) -> tuple[ImageFolder, list[str]]:
    """The folder without a few pictures beside the folders of all other images, as a cover, and a
    line for each; DataError unless one may `skip` them.
    """
    images = folder.no_masks
    common = common_folder(folder.images)
    loose = [image for image in images if image.parent == common]
    names = Counter(name.name for name in folder.names.values())
    alone = all(names[folder.names[image].name] == 1 for image in loose)
    few = 0 < len(loose) <= (1 - NEARLY_ALL) * len(images)
    if not (few and alone and suffix(loose[0]) in PICTURES):
        return folder, []
    others = [image for image in folder.images if image not in loose]
    if not skip:
        raise DataError(
            f"{folder.root}: {folder.relative(loose[0])} is beside the folder "
            f"{others[0].relative_to(common).parts[0]} of other images; give this folder, or leave "
            f"the file out with --leave-out {shlex.quote(loose[0].name)}"
        )
    lines = [f"{folder.relative(image)}: beside the folders of other images" for image in loose]
    return replace(folder, images=tuple(others)), lines


def _shared_columns(folder: ImageFolder) -> list[str]:
    """A line about two tables that share a column, as a key of pseudonyms and their diagnoses."""
    for first, second in combinations(folder.tables, 2):
        columns = table_columns(first)
        shared = [name for name in columns if name in table_columns(second)]
        names_images = usual_columns(WORDS["column"]["image"], shared)
        if shared and shared != columns and not names_images:
            remedy = "write the label beside the name of the image or patient, in one table"
            both = folder.both(first, second)
            return [f"{both} share {shared[0]}, but tables are not joined: {remedy}"]
    return []


def _of_one_header_each(tables: Iterable[ImageTable]) -> Iterable[ImageTable]:
    """The first of tables with the same columns, as of train and test."""
    first_of: dict[object, ImageTable] = {}
    for table in tables:
        first_of.setdefault(tuple(table.header) or table.path, table)
    return first_of.values()


def _described_by(
    dataset: Dataset, tables: Iterable[ImageTable], options: ImportOptions
) -> Dataset:
    """The images with what tables without labels say of them; those that say something have no
    problem any more.
    """
    columns = options.columns
    named = {columns.patient, columns.site, columns.split} - {""}
    for table in tables:
        try:
            items, read = described(dataset.items, table, options)
        except DataError as error:
            of_others = isinstance(error, UnrelatedTableError) and named.isdisjoint(table.header)
            if table.path == options.table or (named and not of_others):
                raise
            table.problem = error
            continue
        if read is not None:
            table.problem = None
            layout = "; ".join(filter(None, (dataset.layout, read)))
            dataset = dataset.with_items(items, layout=layout)
    return dataset


def _refuse_versions(folder: ImageFolder) -> None:
    """Raise DataError for images of one name in folders that are called as versions of one picture
    are: Images/1.png and Images_Cropped/1.png, PNG/1.png and TIF/1.tif.
    """
    first_of: dict[tuple[bool, str, tuple[str, ...]], Path] = {}
    for image, name in folder.names.items():
        listed = words(folder.relative(image.parent))
        others = tuple(word for word in listed if word not in _VERSIONS | NO_PATIENT)
        other = first_of.setdefault((name.mask, stem(image), others), image)
        differ = {*listed} ^ {*words(folder.relative(other.parent))}
        if not _VERSIONS.isdisjoint(differ) and are_masks([other]) == are_masks([image]):
            raise DataError(
                f"{folder.both(other, image)} seem to be versions of one picture; give the folder "
                "of one version, or take the other out"
            )


def _refuse_copies(folder: ImageFolder) -> None:
    """Raise DataError if all pictures of a folder are also in another one, as of a data set that is
    divided in two ways, or lies in itself.
    """
    times = Counter(image.name for image in folder.images)
    repeated = [image for image in folder.images if times[image.name] > 1]
    first_of: dict[tuple[str, int, int], Path] = {}
    alike = defaultdict(list)  # folders -> pairs of their files
    for image in filter(Path.is_file, repeated):
        with image.open("rb") as opened:
            key = (image.name, image.stat().st_size, hash(opened.read(_START)))
        other = first_of.setdefault(key, image)
        if other.parent != image.parent:
            alike[_where_they_part(other, image)].append((other, image))
    for tops, files in alike.items():
        listed = [both for both in files if _is_picture(tops[0], both[0])]
        if not listed or not all(filecmp.cmp(*both, shallow=False) for both in listed):
            continue
        likely = []  # copies, the less likely first
        for top in tops:
            pictures = sum(_is_picture(top, image) for image in folder.images)
            called_so = not _COPIES.isdisjoint(words(top.name))
            likely.append((-pictures, called_so, len(top.parts), top))
        *_, original = min(likely)
        fewest, *_, inner = max(likely)
        if len(listed) >= -fewest and count_values(listed[0][0]) > MAX_CLASSES:
            copy = folder.relative(inner)
            raise DataError(
                f"{original} and {copy} hold the same {len(listed)} pictures; leave one folder "
                f"out, as with --leave-out {shlex.quote(copy)}"
            )


def _is_picture(top: Path, image: Path) -> bool:
    """Whether an image is below a folder, and there not called as a mask is."""
    return image.is_relative_to(top) and not parse_name(image.relative_to(top)).mask


def _where_they_part(first: Path, second: Path) -> tuple[Path, ...]:
    """The outermost folders that hold one of two files each, or one of them that holds both and a
    copy in it.
    """
    common = common_folder([first, second])
    inner, other = (file.relative_to(common).parts for file in (first, second))
    tops = []
    for own, longer in ((inner, other), (other, inner)):
        holds_copy = longer[-len(own) :] == own
        tops.append(common if holds_copy else common.joinpath(*own[:-1][:1]))
    return tuple(tops)


def _with_patients(
    folder: ImageFolder, tables: Iterable[ImageTable], columns: Columns
) -> ImageFolder:
    """The folder with the patients of images by tables, of which another table may have the labels
    or describe the patients.
    """
    patients: dict[Path, str] = {}
    for table in tables:
        with suppress(DataError):  # as said where it is read
            patients |= patients_of_table(table, columns)
    return replace(folder, patients={**patients, **folder.patients})


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


def _by_folders(folder: ImageFolder, options: ImportOptions) -> Dataset:
    """The images by the names of files and folders."""
    kind = options.kind
    masks = folder.masks
    structures = None
    if kind != "classification":
        refuse_masks_of_slices(folder)
        if not masks or are_in_structures(folder.names.values()):
            of_masks = replace(options, kind="segmentation" if masks else kind)
            structures = structure_folders(folder, of_masks)
        else:
            structures = structure_files(folder, options)
        if masks and not structures:
            structures = structure_suffixes(folder, options)
    if structures:
        if not (kind or options.structures):
            _refuse_readers(structures, folder)
        return structures
    if kind == "segmentation" or (masks and kind != "classification"):
        return with_chosen_structures(folder, pair_masks(folder, options), options.structures)
    images = folder.no_masks
    names = {folder.names[image].name for image in images}
    note = f"{len(masks)} masks are not used"
    if masks and names.isdisjoint(folder.names[mask].name for mask in masks):
        images = [*folder.images]
        note = (
            f"{len(masks)} images have a class, though they are called as masks are, as "
            f"{folder.relative(masks[0])}; if they are masks, give --leave-out"
        )
    dataset = class_folders(
        folder, images, confirmed=kind == "classification", classes_of_sites=options.classes
    )
    return replace(dataset, notes=(note, *dataset.notes)) if masks else dataset


def _refuse_readers(dataset: Dataset, folder: ImageFolder) -> None:
    """Raise DataError for one or two structures that several names with a number may mean, as
    those of readers do (more are vertebrae, or ribs), or that are drawn at one place.
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
    unnamed = [name for name in dataset.labels.values() if _NO_STRUCTURE.issuperset(words(name))]
    if _are_drawn_twice(dataset):
        several = [*dataset.labels.values()]
    elif len(several) < 2 or len(names_of) > 2:
        others = [name for name in dataset.labels.values() if name not in unnamed]
        several = [*unnamed, *others] if unnamed else []
    if len(several) > 1:
        kept, other = (
            [item.masks[row] for item in dataset.items]
            for row, name in enumerate(dataset.labels.values())
            if name in several[:2]
        )
        listed = [name or "the masks without a name" for name in several]
        pattern = f", as with --leave-out {shlex.quote(_pattern_of(other, kept))}" if kept else ""
        raise DataError(
            f"{folder.root}: are {shortened(listed)} structures? if so, give --kind segmentation; "
            "if they are of several readers or versions, use one and leave the others out"
            f"{pattern}; if they are of several objects, unite them"
        )


def _are_drawn_twice(dataset: Dataset) -> bool:
    """Whether the masks of two structures are mostly the same in the first images, and none lies in
    the other, as a cup in its disc.
    """
    for item in dataset.items[:SAMPLE_SIZE]:
        if len(item.masks) != 2 or item.rendered:
            return False
        first, second = (read_stored(mask, mask=True).array > 0 for mask in item.masks)
        if first.shape != second.shape:
            return False
        both = (first & second).sum()
        if not (first | second).sum() / 2 < both < min(first.sum(), second.sum()):
            return False
    return True


def _pattern_of(masks: Sequence[Path], others: Sequence[Path]) -> str:
    """A pattern of the masks of a structure: their folder, if others have not its name, or the end
    of their names.
    """
    folders = {mask.parent.name for mask in masks}
    if len(folders) == 1 and folders.isdisjoint(mask.parent.name for mask in others):
        return folders.pop()
    letters = zip(*(mask.name[::-1] for mask in masks), strict=False)  # from the end
    shared = takewhile(lambda of_each: len({*of_each}) == 1, letters)
    end = "".join(of_each[0] for of_each in shared)[::-1]
    return end if end == masks[0].name else f"*{end}"
