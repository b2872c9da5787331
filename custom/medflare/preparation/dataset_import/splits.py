"""Patients distributed over sites and over training, validation and test, also those who are at
several sites.
"""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from sklearn.model_selection import StratifiedGroupKFold

from medflare.core.errors import ConfigError, DataError
from medflare.core.rng import numpy_random_state
from medflare.data.datalist import LISTS
from medflare.preparation.dataset_import.folders import Item
from medflare.preparation.dataset_import.names import refuse_variants
from medflare.preparation.dataset_import.options import ImportOptions
from medflare.preparation.dataset_import.patients import patient_of

Sites: TypeAlias = Mapping[str, Sequence[Item]]  # site -> its images


def parse_shares(text: str) -> dict[str, float]:
    """Split -> share of the patients, from three numbers above 0 such as "70,10,20".

    ConfigError for another text.
    """
    try:
        numbers = list(map(float, text.split(",")))
    except ValueError:
        numbers = []
    if len(numbers) != len(LISTS) or not all(0 < number < float("inf") for number in numbers):
        raise ConfigError(
            f"--shares {text!r}: give three numbers above 0 for {', '.join(LISTS)}, "
            "for example 70,10,20"
        )
    return dict(zip(LISTS, numbers, strict=True))


def items_by_site(items: Sequence[Item], options: ImportOptions) -> dict[str, list[Item]]:
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

    A split that no image has is drawn from the training patients, stratified by class. What a
    datalist lacks is drawn when a run reads it, by the older rule of `datalist.assign_splits`.

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
        chosen = _even_fold(list(pool.values()), numbers)
        for row, fold in zip(pool, numbers, strict=True):
            if fold == chosen:
                drawn[row] = replace(drawn[row], split=split)
    return drawn


def _even_fold(items: Sequence[Item], numbers: np.ndarray) -> int:
    """The first fold, of those of the images, (n,), with an equal part of the patients, then of the
    images, as far as whole patients allow. Fold 0 may have one patient with many images.
    """
    fold_of = dict(zip(map(patient_of, items), numbers.tolist(), strict=True))
    patients = np.bincount([*fold_of.values()])
    images = np.bincount(numbers) * len(fold_of) / len(items)  # in patients
    equal = len(fold_of) / len(patients)
    off = [(abs(counts - equal)).astype(int) for counts in (images, patients)]
    return int(np.lexsort(off)[0])


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
            f"no images for {key.strip()}: {found}; add patients, {remedy}, or if it has more "
            "patients, name them by --patient '^(p\\d+)' (of the file name, or of its path)"
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


def across_sites(
    sites: Sites, draw: Callable[[str, Sequence[Item]], list[Item]]
) -> dict[str, list[Item]]:
    """The images of all sites with their splits, each site drawn alone by `draw` (site, images).

    Then a patient who is at an earlier site, too, gets the split of this site; sites with named
    splits come first.
    """
    named = {site for site, items in sites.items() if any(item.split for item in items)}
    split_of: dict[str, str] = {}
    drawn: dict[str, list[Item]] = {}
    for site in [*sorted(named), *sorted(sites.keys() - named)]:
        drawn[site] = []
        for item in draw(site, sites[site]):
            if site not in named:
                item = replace(item, split=split_of.get(item.patient, item.split))
            drawn[site].append(item)
        split_of = {item.patient: item.split for item in drawn[site]} | split_of
        split_of.pop("", None)
    return {site: drawn[site] for site in sites}


def shared_warning(sites: Sites, group: str, lists: Sequence[str] = LISTS) -> str:
    """A line about patients who are at two sites; "" if there is none.

    Args:
        group: what the download calls a patient, see `Preparation.group`.
        lists: the splits that are written; without "test", each site draws one later.

    Examples:
        >>> from pathlib import Path
        >>> a, b = (Item((Path(site),), 0, "p1", "training", site) for site in ("A", "B"))
        >>> shared_warning({"A": [a], "B": [b]}, "patient")
        'patients at two sites: 1, for example p1 at A and B; each is in one split at all sites'
    """
    splits_of: dict[str, dict[str, set[str]]] = {}  # patient -> site -> splits
    for site, items in sites.items():
        for item in items:
            splits_of.setdefault(item.patient, {}).setdefault(site, set()).add(item.split)
    splits_of.pop("", None)
    shared = {patient: splits for patient, splits in splits_of.items() if len(splits) > 1}
    if not shared:
        return ""
    example = next(iter(shared))
    places = " and ".join(shared[example])
    line = f"{group}s at two sites: {len(shared)}, for example {example} at {places}"
    apart = sum(len(set().union(*splits.values())) > 1 for splits in shared.values())
    if apart:
        crossing = _tested_and_trained_on(sites, shared)
        return (
            f"{line}; in different splits: {apart}; test images that show a {group} on which "
            f"another site trains: {crossing}; --redraw draws splits by {group} across sites"
        )
    if "test" not in lists:
        return (
            f"{line}; each site draws its test list when it reads the data, "
            "so a site can test what another trains on"
        )
    return f"{line}; each is in one split at all sites"


def _tested_and_trained_on(sites: Sites, shared: Mapping[str, Mapping[str, set[str]]]) -> int:
    """The number of test images whose patient another site has in training or validation."""
    number = 0
    for site, items in sites.items():
        for item in items:
            trained = False
            for other, splits in shared.get(item.patient, {}).items():
                trained = trained or (other != site and splits != {"test"})
            number += item.split == "test" and trained
    return number
