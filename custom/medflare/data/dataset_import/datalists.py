"""From a downloaded folder to the datalists of one or several sites: patients, sites and splits, and the files of each site."""

import filecmp
import os
import re
import shutil
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pandas as pd
from PIL import Image
from sklearn.model_selection import StratifiedGroupKFold

from medflare.core.errors import ConfigError, DataError
from medflare.core.rng import numpy_random_state
from medflare.core.store import write_atomically, write_json
from medflare.data.datalist import FILE, SHARES, SPLITS
from medflare.data.dataset_import.folders import Dataset, ImageFolder, Item, class_folders, pair_masks, scan_folder
from medflare.data.dataset_import.tables import GUESSED, Columns, read_tables, split_of_table
from medflare.data.progress import counted

_EYE: Final = re.compile(r"[ _-](?:left|right|od|os|l|r)$", re.IGNORECASE)  # end of the name of a photograph
_SITES, _IMAGES = 30, 5  # maximum of folders, and minimum of images in each, for which they may be sites


@dataclass(frozen=True)
class ImportOptions:
    """Options of `import_folder`."""

    kind: str = ""  # "segmentation", "classification", or "" for what the folder has
    table: Path | None = None  # the table with the labels
    columns: Columns = GUESSED  # of the table
    patient: str = ""  # regular expression, see `assign_patients`
    sites: int | None = None  # number of simulated sites that the patients are distributed over; None: one site
    shares: Mapping[str, float] | None = None  # split -> its share of the patients; None: `datalist.SHARES`
    seed: int = 0  # of the random splits and sites
    redraw: bool = False  # ignore the splits that the folder names
    skip: bool = False  # leave out images without mask or label
    site_folders: bool = False  # each folder in the folder is a site
    out: Path | None = None  # folder for the datalists and hard links to the files; None: the folder of the images
    copy: bool = False  # copy the files to `out`
    force: bool = False  # replace existing datalists


@dataclass(frozen=True)
class ImportReport:
    """The datalists that were written."""

    dataset: Dataset  # the content of the folder
    sites: Mapping[str, Sequence[Item]]  # site, or "" if there is one folder -> its images with their splits
    home: Path  # a site's folder, or the folder of all sites
    warnings: tuple[str, ...]  # one line each

    def render(self) -> str:
        """The layout, and a table of images and patients by site and split."""
        names = list(self.dataset.labels.values()) if self.dataset.kind == "classification" else []
        lines = [f"{sum(map(len, self.sites.values()))} images, {self.dataset.kind} ({self.dataset.layout})", ""]
        lines += [_counts(self.sites, names).to_string(index=False), ""]
        lines += [f"note: {note}" for note in self.dataset.notes]
        lines += [f"left out: {line}" for line in self.dataset.missing]
        lines += [f"WARNING: {warning}" for warning in self.warnings]
        return "\n".join([*lines, *(f"written: {self.home / site / FILE}" for site in self.sites)])


def _counts(sites: Mapping[str, Sequence[Item]], classes: Sequence[str]) -> pd.DataFrame:
    rows = []
    for site, items in sites.items():
        for split in SPLITS:
            chosen = [item for item in items if item.split == split]
            row = {"split": split, "images": len(chosen), "patients": len(set(map(_patient, chosen)))}
            for number, name in enumerate(classes):
                row[name] = sum(item.label[number] if isinstance(item.label, list) else item.label == number for item in chosen)
            rows.append(({"site": site} if site else {}) | row)
    return pd.DataFrame(rows)


def find_dataset(folder: ImageFolder, *, kind: str = "", table: Path | None = None, columns: Columns = GUESSED) -> Dataset:
    """A folder's images with labels: of a table that names them, else masks by name, else a folder per class; DataError if unclear."""
    candidates = [table] if table else list(folder.tables)
    splits: dict[Path, str] = {}
    unused: dict[Path, str] = {}
    for path in candidates:
        try:
            splits[path] = split_of_table(path, folder, columns, kind)
        except DataError as error:
            unused[path] = str(error)
    requested = table is not None or columns != GUESSED
    tables = candidates if requested and len(candidates) == 1 else list(splits)
    if len(tables) > 1 and len({*splits.values()} - {""}) < len(tables):
        listed = ", ".join(map(folder.relative, tables))
        raise DataError(f"{folder.root}: {len(tables)} tables ({listed}); choose one with --table, or give --site-folders")
    if requested and not tables:
        reasons = "".join(f"; {reason}" for reason in unused.values())
        raise DataError(f"{folder.root}: no table (CSV or TSV) for the columns; name it with --table{reasons}")
    if tables:
        return read_tables(tables, folder, columns, kind=kind)
    names = folder.names()
    notes = [f"not used: {reason}" for reason in unused.values()]
    masks = sum(name.mask for name in names.values())
    if kind == "segmentation" or (masks and kind != "classification"):
        dataset = pair_masks(folder, names)
    else:
        try:
            images = [image for image in folder.images if not names[image].mask]
            dataset = class_folders(folder, images, any_number=kind == "classification")
        except DataError as error:
            raise DataError("; ".join([str(error), *unused.values()])) from error
        notes += [f"{masks} masks are not used"] if masks else []
    return replace(dataset, notes=(*notes, *dataset.notes))


def import_folder(root: Path, options: ImportOptions = ImportOptions()) -> ImportReport:
    """Write the datalists of a folder of images; nothing of a site is written before all its checks pass.

    DataError for an unknown layout, incomplete images, a patient in two splits, or datalists that exist; ConfigError for a wrong option.
    """
    if options.site_folders:
        return _import_site_folders(root, options)
    if (options.sites is not None or options.columns.site) and options.out is None:
        raise DataError(f"{root}: several sites need a folder of their own; name it with --out")
    if options.out is not None and options.out.resolve().is_relative_to(root.resolve()):
        raise DataError(f"{options.out} is in {root}, so its files would be imported again; take another --out")
    folder = scan_folder(root)
    dataset = find_dataset(folder, kind=options.kind, table=options.table, columns=options.columns)
    if dataset.missing and not (options.skip and dataset.items):
        found = f"{len(dataset.missing)} of {len(dataset.missing) + len(dataset.items)} are incomplete, the first: {dataset.missing[0]}"
        raise DataError(f"{root}: {found}; complete them, or --skip")
    if folder.slices and options.out is None:
        slices = next(iter(folder.slices.values()))
        found = f"{folder.relative(slices[0])} is one of {len(slices)} slices of a series beside other files"
        raise DataError(f"{root}: {found}; give --out, where each series gets a folder of its own")
    check_files(dataset.items, root, folder.slices)
    items, warning = assign_patients(dataset.items, folder, options.patient)
    if options.redraw:
        items = [replace(item, split="") for item in items]
    sites = {
        site: draw_splits(of_site, site, options.shares or SHARES, options.seed) for site, of_site in _items_by_site(items, options).items()
    }
    home = options.out or root
    check_target(home, sites, force=options.force)
    header = {"labels": dataset.labels, "channel_names": dataset.channels}
    for site, site_items in sites.items():
        if options.out is not None:
            place_files(home / site, site_items, root, copy=options.copy, slices=folder.slices)
        write_datalist(home / site, site_items, root, header=header)
    warnings = (warning, "" if options.sites or options.columns.site else _site_warning(dataset.items, root))
    return ImportReport(dataset, sites, home, tuple(filter(None, warnings)))


def _site_warning(items: Sequence[Item], root: Path) -> str:
    """A line if every image and its masks are in one of a few folders that may be sites, otherwise ""."""
    tops = [{file.relative_to(root).parts[0] for file in (item.first, *item.masks)} for item in items]
    counts = Counter(next(iter(top)) for top in tops if len(top) == 1)
    if counts.total() < len(items) or not 1 < len(counts) <= _SITES or min(counts.values()) < _IMAGES or not any(i.masks for i in items):
        return ""
    return f"all images are in the folders {', '.join(sorted(counts))}; if each is a site, give --site-folders"


def _import_site_folders(root: Path, options: ImportOptions) -> ImportReport:
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")) if root.is_dir() else []
    if not folders:
        raise DataError(f"{root}: no folder of a site in it; correct the path, or leave out --site-folders")
    outs = {folder: options.out and options.out / folder.name for folder in folders}
    reports = {folder.name: import_folder(folder, replace(options, site_folders=False, out=out)) for folder, out in outs.items()}
    warnings = tuple(f"{site}: {warning}" for site, report in reports.items() for warning in report.warnings)
    first = next(iter(reports.values())).dataset
    notes = tuple(f"{site}: {note}" for site, report in reports.items() for note in report.dataset.notes)
    missing = tuple(f"{site}: {line}" for site, report in reports.items() for line in report.dataset.missing)
    sites = {site: report.sites[""] for site, report in reports.items()}
    return ImportReport(replace(first, notes=notes, missing=missing), sites, options.out or root, warnings)


# -- patients, sites and splits --------------------------------------------------------------------------------------------


def assign_patients(items: Sequence[Item], folder: ImageFolder, pattern: str = "") -> tuple[list[Item], str]:
    """The images with their patients: by the pattern, otherwise by the table, otherwise by DICOM's PatientID.

    Args:
        pattern: regular expression on the file name (on the path within the folder if it has a "/"); its first group is the patient.

    Returns:
        The images, and a warning if no patient is known, otherwise "".

    Raises:
        ConfigError: not a regular expression.
        DataError: it does not match a name, or some images have no patient.
    """
    if pattern:
        try:
            expression = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"--patient '{pattern}': not a regular expression ({error}); for example '^(p\\d+)'") from error
        assigned = []
        for item in items:
            name = folder.relative(item.first) if "/" in pattern else item.first.name
            match = expression.search(name)
            patient = match[1 if expression.groups else 0] if match else ""
            if not patient:
                raise DataError(f"--patient '{pattern}' does not match {name!r}; correct the expression")
            assigned.append(replace(item, patient=patient))
        return assigned, ""
    assigned = [replace(item, patient=item.patient or folder.patients.get(item.first, "")) for item in items]
    without = [item for item in assigned if not item.patient]
    if without and len(without) < len(items):
        found = f"{len(without)} of {len(items)} images have no patient, the first: {folder.relative(without[0].first)}"
        raise DataError(f"{found}; complete them, or give --patient '^(p\\d+)'")
    eyes = [_EYE.sub("", item.first.stem) for item in items]
    if len(without) == len(items) > len({*eyes}) and all(_EYE.search(item.first.stem) for item in items):
        pairs = [replace(item, patient=name) for item, name in zip(items, eyes, strict=True)]
        return pairs, "patients are the file names without left and right; if they are not, give --patient '^(p\\d+)' or --patient-column"
    if not without:
        return assigned, ""
    warning = "patients are unknown: each image counts as a patient, and two images of one person may be in different splits"
    return assigned, f"{warning}; give --patient '^(p\\d+)' or --patient-column"


def parse_shares(text: str) -> dict[str, float]:
    """Split -> share of the patients, from three numbers above 0 such as "70,10,20"; ConfigError for another text."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != len(SPLITS) or not all(0 < number < float("inf") for number in numbers):
        raise ConfigError(f"--shares {text!r}: give three numbers above 0 for {', '.join(SPLITS)}, for example 70,10,20")
    return dict(zip(SPLITS, numbers, strict=True))


def _items_by_site(items: Sequence[Item], options: ImportOptions) -> dict[str, list[Item]]:
    """Site -> images: by the column, or patients distributed over simulated sites; "" for one site."""
    if options.sites is not None:
        if options.sites < 1:
            raise ConfigError(f"--sites {options.sites}: give 1 or more")
        numbers = _folds(items, options.sites, [f"{item.split} {item.stratum}" for item in items], options.seed, "sites")
        placed = list(zip(items, numbers, strict=True))
        return {f"site-{site + 1}": [item for item, number in placed if number == site] for site in range(options.sites)}
    if not options.columns.site:
        return {"": list(items)}
    names: dict[str, str] = {}  # folder -> name in the table
    by_site: defaultdict[str, list[Item]] = defaultdict(list)
    for item in items:
        folder = re.sub(r"[^\w-]+", "-", item.site).strip("-") or "unknown"
        if (other := names.setdefault(folder, item.site)) != item.site:
            raise DataError(f"--site-column: {other!r} and {item.site!r} would both be the folder {folder}; write one name per site")
        by_site[folder].append(item)
    return dict(sorted(by_site.items()))


def draw_splits(items: Sequence[Item], site: str, shares: Mapping[str, float], seed: int) -> list[Item]:
    """The images with their splits; a split that no image has is drawn from the training patients, stratified by class.

    Args:
        items: of one site, with their patients.
        site: its name, a key of the random draw.
        shares: split -> its share of the patients; a split that is not in it is not drawn.

    Raises:
        DataError: a patient in two splits, or too few patients.
    """
    drawn = [replace(item, split=item.split or "training") for item in items]
    first_of: dict[str, Item] = {}
    for item in drawn:
        first = first_of.setdefault(_patient(item), item)
        if first.split != item.split:
            both = f"{first.first.name} ({first.split}) and {item.first.name} ({item.split})"
            raise DataError(f"patient {item.patient} is in two splits: {both}; draw new splits with --redraw")
    if all(item.split == "test" for item in drawn):
        return drawn  # a site that does not train
    missing = [split for split in ("test", "validation") if split in shares and not any(item.split == split for item in drawn)]
    rest = sum(shares[split] for split in ("training", *missing))
    for split in missing:
        pool = [row for row, item in enumerate(drawn) if item.split == "training"]
        chosen = [drawn[row] for row in pool]
        folds = max(2, min(round(rest / shares[split]), len(set(map(_patient, chosen)))))
        numbers = _folds(chosen, folds, [item.stratum for item in chosen], seed, f"{site} {split}")
        rest -= shares[split]
        for row, fold in zip(pool, numbers, strict=True):
            if fold == 0:
                drawn[row] = replace(drawn[row], split=split)
    return drawn


def _folds(items: Sequence[Item], folds: int, strata: Sequence[str], seed: int, key: str) -> np.ndarray:
    """The fold of every image, (n,): all images of a patient in one, each stratum with equal shares as far as patients allow."""
    patients = list(map(_patient, items))
    if len(set(patients)) < folds:
        remedy = "add patients, use fewer --sites, or another --patient"
        raise DataError(f"{key}: {len(set(patients))} patient(s) cannot be split in {folds}; {remedy}")
    numbers = np.zeros(len(items), np.int64)
    if folds == 1:
        return numbers
    classes = np.unique(strata, return_inverse=True)[1]
    if np.bincount(classes).max() < folds:  # no class has enough images for every fold
        classes = np.zeros_like(classes)
    splitter = StratifiedGroupKFold(folds, shuffle=True, random_state=numpy_random_state(seed, "data init", key))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The least populated class", UserWarning)  # the printed table shows the counts
        for fold, (_, rows) in enumerate(splitter.split(numbers, classes, patients)):
            numbers[rows] = fold
    if len(np.unique(numbers)) < folds:
        raise DataError(f"{key}: the patients' numbers of images are too uneven for {folds} parts; use fewer, or other --shares")
    return numbers


def _patient(item: Item) -> str:
    return item.patient or str(item.first)


# -- files -----------------------------------------------------------------------------------------------------------------


def check_files(items: Iterable[Item], root: Path, made: Collection[Path] = ()) -> None:
    """Raise DataError for a file that does not exist (folders that will be `made` aside), and for an image that is listed twice."""
    listed: set[Path] = set()
    for item in items:
        for file in (*filter(None, item.files), *item.masks):
            if file not in item.rendered and file not in made and not file.exists():
                raise DataError(f"{file}: file not found")
        if item.first in listed:
            raise DataError(f"{root}: {item.first.relative_to(root).as_posix()} is listed twice")
        listed.add(item.first)


def check_target(home: Path, sites: Iterable[str], *, force: bool) -> None:
    """Raise DataError for a datalist that would be overwritten, and for other sites in the folder: their patients may be the same."""
    names = list(sites)
    for site in names:
        path = home / site / FILE
        if path.exists() and not force:
            raise DataError(f"{path} exists; keep it, or replace it with --force")
    others = sorted(path.parent for path in home.glob(f"*/{FILE}") if path.parent.name not in names)
    if others and "" not in names:
        raise DataError(f"{others[0]} is a site of an earlier import; remove it, or take another folder")


def write_datalist(
    folder: Path, items: Sequence[Item], root: Path, *, splits: Sequence[str] = SPLITS, header: Mapping[str, Any] | None = None
) -> None:
    """Write a site's datalist.json.

    Args:
        folder: of the site; its files have the same relative paths as in `root`.
        splits: the lists to write; a list that is missing is drawn when the data are read.
        header: "labels" and "channel_names" of the Decathlon layout; empty ones are left out.
    """

    def relative(path: Path | None) -> str | None:
        return None if path is None else path.relative_to(root).as_posix()

    def entry(item: Item) -> dict[str, Any]:
        masks = [relative(mask) for mask in item.masks]
        label = (masks if isinstance(item.label, list) else masks[0]) if masks else item.label
        files = [relative(file) for file in item.files]
        return {"image": files[0] if len(files) == 1 else files, "label": label} | ({"patient": item.patient} if item.patient else {})

    content: dict[str, Any] = {"name": root.resolve().name}
    content |= {name: dict(values) for name, values in (header or {}).items() if values}
    content |= {split: [entry(item) for item in items if item.split == split] for split in splits}
    write_json(folder / FILE, content)


def place_files(
    folder: Path, items: Sequence[Item], root: Path, *, copy: bool, slices: Mapping[Path, Sequence[Path]] = MappingProxyType({})
) -> None:
    """Link or copy a site's files into its folder, `Item.rendered` as PNG, `slices` in folders; DataError if another file is there."""
    for item in counted(items, len(items), f"{folder}, images imported"):
        for file in (*filter(None, item.files), *item.masks):
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
    """A hard link or a copy of a file, or of every file of a folder; never replaces another file."""
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
        (shutil.copyfile if copy else os.link)(source, target)
    except OSError as error:
        raise DataError(f"{target}: {error.strerror}; take a folder on the disk of the images, or copy them with --copy") from error
