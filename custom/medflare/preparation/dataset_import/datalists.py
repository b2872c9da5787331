"""From a downloaded folder to the datalists of one or several sites."""

import re
import shlex
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from PIL import ExifTags, Image

from medflare.core.errors import DataError
from medflare.data.datalist import FILE, LISTS, SHARES, check_folder, class_numbers
from medflare.data.local import allowed_folders
from medflare.data.reading import (
    JPEG,
    PICTURES,
    explained,
    is_segmentation,
    read_stored,
    stem,
    suffix,
)
from medflare.data.targets import SiteStructures, check_structure, differing_structures, same_names
from medflare.preparation.dataset_import.alike_sites import (
    mixed_warning,
    with_all_channels,
    with_all_classes,
    with_classes,
)
from medflare.preparation.dataset_import.chosen_structures import can_be_written, with_two_values
from medflare.preparation.dataset_import.columns import ColumnError
from medflare.preparation.dataset_import.folders import (
    NEARLY_ALL,
    Dataset,
    ImageFolder,
    Item,
    check_patterns,
    common_folder,
    is_system_folder,
    is_table,
    lines_of_unread,
    prefixed,
    scan_folder,
    walk,
)
from medflare.preparation.dataset_import.layouts import find_dataset
from medflare.preparation.dataset_import.masks import WITHOUT_IMAGE, with_masks_of_cases
from medflare.preparation.dataset_import.names import (
    IMAGE_WORDS,
    MASK_WORDS,
    first_split,
    shortened,
    sorted_labels,
    split_folder,
    words,
)
from medflare.preparation.dataset_import.options import DEFAULTS, ImportOptions
from medflare.preparation.dataset_import.patients import assign_patients, patient_of, patient_option
from medflare.preparation.dataset_import.site_files import (
    check_files,
    check_target,
    place_files,
    write_datalist,
)
from medflare.preparation.dataset_import.splits import (
    Sites,
    across_sites,
    draw_splits,
    items_by_site,
    shared_warning,
)

# Maximum of folders, and minimum of images in each, for which they may be sites; maximum of folders
# with fewer, which may be splits.
_MAX_SITES = 30
_MIN_IMAGES = 5
_MAX_SPLITS = 4
T = TypeVar("T")
_SHOWN = 10  # lines about incomplete images


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
        classes = _classes_of(dataset)
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
        for split in LISTS:
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


def import_folder(root: Path, options: ImportOptions = DEFAULTS) -> ImportReport:
    """Write the datalists of a folder of images.

    Nothing of a site is written before all its checks pass.

    DataError for an unknown layout, incomplete images, a patient in two splits, or datalists that
    exist; ConfigError for a wrong option.
    """
    if options.site_folders:
        return _import_site_folders(root, options)
    if (options.sites is not None or options.columns.site) and options.out is None:
        raise DataError(f"{root}: several sites need a folder of their own; name it with --out")
    _check_out(root, options.out)
    folder, dataset = _read_folder(root, options)
    report = _with_splits(folder, dataset, options)
    _write_sites(folder, report, options)
    return report


def _read_folder(
    root: Path,
    options: ImportOptions,
    *,
    several_tables: bool = False,
    all_sites: Path | None = None,
) -> tuple[ImageFolder, Dataset]:
    """The files of a folder, and its images with labels; DataError as of `import_folder`.

    `several_tables`: see `find_dataset`; `all_sites`: see `scan_folder`.
    """
    folder = with_masks_of_cases(
        scan_folder(root, options.leave_out, all_sites), options.structures
    )
    dataset = find_dataset(folder, options, several_tables=several_tables)
    dataset = with_two_values(dataset, options.structures, options.threshold)
    return folder, _checked(folder, dataset, options)


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
        notes += ("JPEG changes the values of masks: 128 and above are read as the structure",)
    notes += _turned_notes(dataset.items)
    dataset = replace(dataset, notes=notes, missing=missing)
    companion = _companion(folder, dataset)
    if companion:
        raise DataError(
            f"{root}: nearly every image has another one that is called like it and a word, as "
            f"{folder.relative(companion)}, and no mask for it; if these are the masks, call them "
            "NAME_mask and take other masks out; otherwise take them out"
        )
    dataset = with_classes(dataset, options.classes, root)
    only = {*_classes_of(dataset)}
    if len(only) == 1 and not (missing and not options.skip) and not options.site_folders:
        raise DataError(
            f"{root}: all images are of the class {only.pop()}; give images of another; if other "
            "sites have them, --classes with the names of all; if an empty cell means none, write "
            "0; if folders tell the classes, leave the table out with --leave-out"
        )
    if missing and not (options.skip and dataset.items):
        listed = len(missing) + len(dataset.items)
        remedy = _remedy_of_missing(missing[0], options)
        if missing[-1].endswith(WITHOUT_IMAGE) and not missing[0].endswith(WITHOUT_IMAGE):
            remedy = (
                f"the last: {missing[-1]}; if the numbers of masks and images are shifted, rename "
                f"them; otherwise {remedy}"
            )
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
    if out is None and any(item.rendered for item in dataset.items):
        raise DataError(f"{root}: masks are written anew, no file of yours is; give --out for them")
    check_files(dataset.items, root, folder.slices)
    _check_pictures(dataset.items[0])
    if out is None:
        _refuse_links(dataset.items, root)
    else:
        dataset = replace(dataset, notes=dataset.notes + _outside_notes(dataset.items, root))
    return dataset


def _remedy_of_missing(line: str, options: ImportOptions) -> str:
    """What helps where images lack a mask or a label; `line`: the first of them."""
    if options.skip:
        return "no image is left"
    remedy = "complete them, or --skip"
    image, without_mask, _ = line.partition(": no mask")
    if without_mask and can_be_written(Path(image)):
        remedy = "complete them, --skip, or --empty-masks if they show no structure"
    if ": no mask of " in line:
        remedy += "; to use other structures alone, --structure NAME for each"
    return remedy


def _check_pictures(item: Item) -> None:
    """Raise DataError for pictures of an image that cannot be used."""
    for file in item.paths:
        if suffix(file) in PICTURES and file not in item.rendered:
            stored = read_stored(file, mask=file in item.masks)
            if file in item.masks and isinstance(item.label, list):
                check_structure(stored.array, file)


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


def _outside_notes(items: Iterable[Item], root: Path) -> tuple[str, ...]:
    """A line about files that are links to files elsewhere: who has packed the folder may have
    chosen those of other people.
    """
    allowed = [path.resolve() for path in (root, *allowed_folders())]
    outside = []
    for file in chain.from_iterable(item.paths for item in items):
        if not any(file.resolve().is_relative_to(folder) for folder in allowed):
            outside.append(file)
    if not outside:
        return ()
    first = f"{outside[0].relative_to(root).as_posix()} to {outside[0].resolve()}"
    note = (
        f"{len(outside)} files are links to files outside of {root}, the first: {first}; "
        "they are imported, so look whether they may be"
    )
    return (note,)


def _with_splits(folder: ImageFolder, dataset: Dataset, options: ImportOptions) -> ImportReport:
    """The images of a folder with patients, sites and splits, before anything is written."""
    root = folder.root
    items, warning = assign_patients(dataset.items, folder, options.patient, dataset.patient_column)
    if options.redraw:
        items = [replace(item, split="") for item in items]
    sites = across_sites(
        items_by_site(items, options),
        lambda site, listed: draw_splits(listed, site, options.shares or SHARES, options.seed),
    )
    drawn = list(chain.from_iterable(sites.values()))
    _refuse_test_alone(dataset, drawn, folder)
    warnings = [warning, shared_warning(sites, "patient"), _twice_warning(items, folder)]
    if options.columns.site:
        warnings.append(_apart_warning(dataset, sites))
    if dataset.folder_column and not options.patient:
        choice = patient_option(items, root)
        warnings.append(
            f"each cell of column {dataset.folder_column} counts as a patient, with the images "
            f"that it begins; if a patient has several, give {choice} or --patient-column"
        )
    if not (options.sites or options.columns.site):
        warnings.append(_site_warning(dataset.items))
    if options.out is not None and (root / FILE).exists():
        warnings.append(
            f"patients and splits of the {FILE} in the folder are not used; to keep them, take the "
            "folder as it is"
        )
    warnings.append(_split_warning(dataset, drawn, root, options))
    warnings += _lines_without_split(sites)
    home = options.out or root
    check_target(home, sites, force=options.force)
    guessed = _guessed(dataset, options)
    return ImportReport(dataset, sites, home, tuple(filter(None, warnings)), guessed)


def _write_sites(folder: ImageFolder, report: ImportReport, options: ImportOptions) -> None:
    """Write the datalists of the images of a folder, and link the files."""
    root = folder.root
    dataset = report.dataset
    header: dict[str, Any] = {"labels": dataset.labels, "channel_names": dataset.channels}
    header["structure"] = dataset.structure
    header["annotated"] = dataset.annotated
    for site, listed in report.sites.items():
        if options.out is not None:
            place_files(report.home / site, listed, root, copy=options.copy, slices=folder.slices)
        write_datalist(report.home / site, listed, root, header=header)


def _refuse_test_alone(dataset: Dataset, items: Sequence[Item], folder: ImageFolder) -> None:
    """Raise DataError where all images are test images, and others are there."""
    used = {path for item in items for path in item.paths}
    if all(item.split == "test" for item in items) and not used.issuperset(folder.images):
        problem = f"{folder.root}: no image to train on, all {len(items)} are of the split test"
        remedy = "list the others in the table, move it away, or give --redraw"
        raise DataError("; ".join((problem, *dataset.notes, remedy)))


def _guessed(dataset: Dataset, options: ImportOptions) -> str:
    """What the options leave to the names in the folder, and the options that say otherwise."""
    guesses = []
    if not options.kind and not (options.columns.label or options.columns.mask):
        guesses.append(f"the layout (otherwise give {dataset.options})")
    if not options.redraw and len({item.split for item in dataset.items}) > 1:
        guesses.append("the splits, by their names (otherwise give --redraw)")
    return " and ".join(guesses)


def _twice_warning(items: Iterable[Item], folder: ImageFolder) -> str:
    """A line about images of two patients that differ in the suffix alone, as a.png and a.jpg."""
    first_of: dict[tuple[Path, str], Item] = {}
    twice = []
    for item in items:
        other = first_of.setdefault((item.first.parent, stem(item.first)), item)
        if patient_of(other) != patient_of(item):
            twice.append(folder.both(other.first, item.first))
    if not twice:
        return ""
    found = f"images that differ in the suffix alone: {len(twice)}, the first: {twice[0]}"
    return f"{found}; if they are copies, take one of each out, as they may be in different splits"


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
    read = {"" if options.redraw else item.split for item in dataset.items}
    if "test" in read:
        _refuse_classes_of_one_split(dataset, splits, root)
    found = f"classes stand in one split only: {shortened(alone)}"
    if len(alone) == len(splits) and options.kind != "classification":
        problem = (
            f"{root}: all {found}; if they are patients or splits, give {dataset.options}; "
            "otherwise --kind classification"
        )
        raise DataError("; ".join((problem, *dataset.notes)))
    draw = "--redraw" if any(read) else "another --seed"
    return f"{found}; add patients of these classes, or give {draw}"


def _refuse_classes_of_one_split(
    dataset: Dataset, splits: Mapping[int, set[str]], root: Path
) -> None:
    """Raise DataError if test and training images have no class in common, or each a class of its
    own, of which one begins with the other, as malign and malign_T2.
    """
    only_in = defaultdict(list)  # whether training and test images are of them -> classes
    for number, present in splits.items():
        is_in = ("training" in present, "test" in present)
        only_in[is_in].append(dataset.labels[str(number)])
    trained = only_in[True, False]
    tested = only_in[False, True]
    none_in_common = not only_in[True, True] and len(trained) + len(tested) > 2
    pairs = [sorted(map(words, pair), key=len) for pair in product(trained, tested)]
    begins = any(short and short == long[: len(short)] for short, long in pairs)
    if trained and tested and (none_in_common or begins):
        raise DataError(
            f"{root}: only training images have the classes {shortened(trained)}, only test images "
            f"{shortened(tested)}; write each class in one way, or if all differ, draw new splits "
            "with --redraw"
        )


def _site_warning(items: Sequence[Item]) -> str:
    """A line if every image and its masks are in one of a few folders that may be sites or splits.

    Otherwise "".
    """
    counts: Counter[str] = Counter()
    root = common_folder(file for item in items for file in (item.first, *item.masks))
    for item in items:
        tops = {file.relative_to(root).parts[0] for file in (item.first, *item.masks)}
        if len(tops) > 1:
            return ""
        counts.update(tops)
    most = _MAX_SITES if min(counts.values()) >= _MIN_IMAGES else _MAX_SPLITS
    if not 1 < len(counts) <= most or len(counts) == len(items):
        return ""
    if any(map(first_split, counts)) or not any(item.masks for item in items):
        return ""
    folders = ", ".join(sorted(counts))
    return (
        f"all images are in the folders {folders}; if they are splits, rename them train, val and "
        f"test, if each is a site, give {root} --site-folders --out DATA, if each is a class, "
        "--kind classification"
    )


def _apart_warning(dataset: Dataset, sites: Sites) -> str:
    """A line about sites without a class that another site has; "" if there is none."""
    classes_of = {}
    for site, items in sites.items():
        numbers = sorted({item.label for item in items if isinstance(item.label, int)})
        classes_of[site] = [dataset.labels[str(number)] for number in numbers]
    sites_with = Counter(chain.from_iterable(classes_of.values()))
    apart = []
    for site, classes in classes_of.items():
        if classes and all(sites_with[name] == 1 for name in classes):
            apart.append(f"{site} ({shortened(classes)})")
    if not apart or len(classes_of) < 2:
        return ""
    found = f"sites without a class of another site: {shortened(apart)}"
    return f"{found}; if they are the same classes, write the same names at all sites"


def _site_column_notes(dataset: Dataset) -> tuple[str, ...]:
    """A line about the likeliest column that may name the sites, if there is one."""
    for column, names in dataset.site_columns.items():
        if 1 < names <= _MAX_SITES:
            option = f"--site-column {shlex.quote(column)} --out DATA"
            return (f"{option} makes a site of each of the {names} names in column {column}",)
    return ()


def _import_site_folders(root: Path, options: ImportOptions) -> ImportReport:
    paths = _folders_of_sites(root, options.leave_out)
    check_patterns(root, options.leave_out)
    of_site = {}
    table = options.table
    in_each = table is not None and not table.exists()
    for path in paths:
        own_table = path / table if table is not None and in_each else table
        out = options.out and options.out / path.name
        of_site[path.name] = replace(options, out=out, table=own_table)
        _check_out(path, of_site[path.name].out)
    of_all = None
    if not in_each and _has_tables_beside(root, paths, options):
        of_all = _read_folder(root, options, several_tables=options.table is None)
    read_of = _read_sites(root, of_site, of_all)
    datasets = {site: dataset for site, (_, dataset) in read_of.items()}
    datasets = with_all_channels(with_all_classes(datasets, root), root)

    def with_splits(site: str) -> ImportReport:
        try:
            return _with_splits(read_of[site][0], datasets[site], of_site[site])
        except DataError as error:
            raise DataError(f"{site}: {error}") from error

    reports = _for_each(of_site, with_splits)
    sites = {}
    of_warning = defaultdict(list)  # warning -> its sites
    notes = lines_of_unread([*root.iterdir()], root)
    missing = []
    guessed = ""
    first_site, first = next(iter(datasets.items()))
    for site, report in reports.items():
        dataset = datasets[site]
        _write_sites(read_of[site][0], report, of_site[site])
        sites[site] = report.sites[""]
        guessed = guessed or report.guessed
        for warning in report.warnings:
            of_warning[warning].append(site)
        notes += prefixed(site, dataset.notes)
        missing += prefixed(site, dataset.missing)
        if not same_names(class_numbers(dataset.labels), class_numbers(first.labels)):
            here = _structures_of(site, dataset)
            there = _structures_of(first_site, first)
            of_warning[differing_structures(here, there)].append(site)
    layouts = "; ".join(dict.fromkeys(dataset.layout for dataset in datasets.values()))
    if of_all is not None:
        notes += of_all[1].notes
        missing += of_all[1].missing
    dataset = replace(first, notes=tuple(notes), missing=tuple(missing), layout=layouts)
    warnings = [f"{', '.join(names)}: {warning}" for warning, names in of_warning.items()]
    warnings += [_apart_warning(dataset, sites), mixed_warning(datasets)]
    return ImportReport(dataset, sites, options.out or root, tuple(filter(None, warnings)), guessed)


def _read_sites(
    root: Path, of_site: Mapping[str, ImportOptions], of_all: tuple[ImageFolder, Dataset] | None
) -> dict[str, tuple[ImageFolder, Dataset]]:
    """Site -> its folder and images; `of_all`: read from tables beside the sites."""

    def read(site: str) -> tuple[ImageFolder, Dataset]:
        if of_all is None:
            return _read_site(root / site, of_site[site])
        return _part_of(root / site, *of_all)

    first_read = {}
    for site in of_site:
        with suppress(DataError):
            first_read[site] = read(site)
    known = chain.from_iterable(_classes_of(dataset) for _, dataset in first_read.values())
    classes = tuple(sorted_labels({*known}))

    def read_with_known_classes(site: str) -> tuple[ImageFolder, Dataset]:
        if site in first_read:
            return first_read[site]
        if classes and of_all is None:
            with suppress(DataError):  # a site with one class, which another site has
                return _read_site(root / site, replace(of_site[site], classes=classes))
        return read(site)

    try:
        return _for_each(of_site, read_with_known_classes)
    except DataError as error:
        remedy = "give --leave-out with its name, or the folder that holds the sites"
        raise DataError(f"{error}; if a folder is no site, {remedy}") from error


def _for_each(sites: Iterable[str], result_of: Callable[[str], T]) -> dict[str, T]:
    """Site -> its result; DataError with the problems of all sites."""
    results = {}
    problems = []
    for site in sites:
        try:
            results[site] = result_of(site)
        except DataError as error:
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise DataError("; also ".join(map(str, problems)))
    return results


def _structures_of(site: str, dataset: Dataset) -> SiteStructures:
    first = dataset.items[0]
    return SiteStructures(
        site,
        class_numbers(dataset.labels),
        dataset.structure,
        mask_each=isinstance(first.label, list),
        segments=is_segmentation(first.masks[0]),
    )


def _classes_of(dataset: Dataset) -> list[str]:
    return [*dataset.labels.values()] if dataset.kind == "classification" else []


def _folders_of_sites(root: Path, leave_out: Sequence[str]) -> list[Path]:
    paths = []
    if root.is_dir():
        for path in sorted(root.iterdir()):
            left_out = path.name[0] == "." or any(map(path.match, leave_out))
            if path.is_dir() and not left_out and not is_system_folder(path.name):
                paths.append(path)
    if not paths:
        raise DataError(
            f"{root}: no folder of a site in it; correct the path, or leave out --site-folders"
        )
    for name in (path.name for path in paths):
        if split_folder(name) or IMAGE_WORDS.union(MASK_WORDS).issuperset(words(name)):
            raise DataError(
                f"{root}: {name} is called like a split, images or masks, and not like a site; "
                f"move what is in it into the folder of each site, as SITE/{name}, leave out "
                "--site-folders, or rename it if it is a site"
            )
    return paths


def _read_site(path: Path, options: ImportOptions) -> tuple[ImageFolder, Dataset]:
    """As `_read_folder`; errors about columns say that an option names them for all sites."""
    try:
        return _read_folder(path, options, all_sites=path.parent)
    except ColumnError as error:
        raise DataError(f"{error}; columns need the same names at all sites") from error


def _has_tables_beside(root: Path, sites: Sequence[Path], options: ImportOptions) -> bool:
    """Whether tables beside the sites' folders, or one that the user names, are of all sites."""
    if options.table is not None:
        return not any(options.table.is_relative_to(site) for site in sites)
    _, beside = next(walk(root, {}))
    if not any(map(is_table, beside)):
        return False
    for site in sites:
        for _, files in walk(site, {}):
            if any(map(is_table, files)):
                return False
    return True


def _part_of(site: Path, folder: ImageFolder, dataset: Dataset) -> tuple[ImageFolder, Dataset]:
    """What all sites' files and images have in a site's folder, without the notes of all."""
    items = tuple(item for item in dataset.items if item.first.is_relative_to(site))
    if not items:
        raise DataError(f"{site}: the table names no image in it; take the folder out")
    return replace(folder, root=site), replace(dataset, items=items, notes=(), missing=())
