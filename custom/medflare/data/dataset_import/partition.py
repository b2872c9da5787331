"""Whose image is whose, which site it goes to, and which split: by patient, with like shares of every class, drawn from a seed."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from medflare.core.errors import ConfigError, DataError
from medflare.core.rng import numpy_random_state
from medflare.data.datalist import SPLITS
from medflare.data.dataset_import.finding import Holdings, Item


def with_patients(items: Sequence[Item], held: Holdings, pattern: str = "") -> tuple[list[Item], str]:
    """The images with their patients.

    The pattern counts first, then what the table said, then DICOM's PatientID.

    Args:
        items: the images.
        held: the folder's files.
        pattern: regular expression on the file name, on the path within the folder where it holds a "/"; its first group is the patient,
            or all of it.

    Returns:
        The images, and a warning where nobody says whose they are; else "".

    Raises:
        ConfigError: no regular expression.
        DataError: names that it does not fit, or rows of a table without a patient.
    """
    if pattern:
        return _matched(items, held, pattern), ""
    known = [replace(item, patient=item.patient or held.patients.get(item.first, "")) for item in items]
    unknown = [item for item in known if not item.patient]
    if not unknown:
        return known, ""
    if len(unknown) < len(known):
        some = f"{len(unknown)} of {len(known)} images have no patient, the first is {held.named(unknown[0].first)}"
        raise DataError(f"{some}; complete them, or name patients by file name: --patient '^(p\\d+)'")
    return known, (
        "nobody says whose the images are: each counts as a patient, and two of one person may be on both sides of the split; "
        "name patients with --patient '^(p\\d+)' or --patient-column"
    )


def _matched(items: Sequence[Item], held: Holdings, pattern: str) -> list[Item]:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"--patient '{pattern}': no regular expression ({error}); write for example '^(p\\d+)'") from error
    found, failed = [], []
    for item in items:
        text = held.named(item.first) if "/" in pattern else item.first.name
        match = expression.search(text)
        patient = "" if match is None else match[1 if expression.groups else 0] or ""
        found.append(replace(item, patient=patient))
        failed += [] if patient else [text]
    if failed:
        raise DataError(f"--patient '{pattern}' fits {len(items) - len(failed)} of {len(items)} names, not {failed[0]!r}; widen it")
    return found


def shares_in(text: str) -> dict[str, float]:
    """The share of patients of each split, which add up to 1.

    Args:
        text: three numbers in any unit, for example "70,10,20".

    Raises:
        ConfigError: not three numbers above 0.
    """
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != len(SPLITS) or not all(0 < number < float("inf") for number in numbers):
        raise ConfigError(f"--shares {text!r}: give three numbers above 0 for {', '.join(SPLITS)}, for example 70,10,20")
    return {split: number / sum(numbers) for split, number in zip(SPLITS, numbers, strict=True)}


def deal(items: Sequence[Item], sites: int, seed: int) -> dict[str, list[Item]]:
    """The images of simulated sites, each patient at one.

    Raises:
        ConfigError: fewer than one site.
        DataError: fewer patients than sites.
    """
    if sites < 1:
        raise ConfigError(f"--sites {sites}: deal patients to one site or more")
    numbers = _folds(items, sites, [f"{item.split} {item.stratum}" for item in items], seed, "sites")
    return {f"site-{site + 1}": [item for item, number in zip(items, numbers, strict=True) if number == site] for site in range(sites)}


def draw_splits(items: Sequence[Item], site: str, shares: Mapping[str, float], seed: int) -> list[Item]:
    """The images with their splits: those that the folder names, and whatever it does not name drawn from the training patients.

    A split is one fold of as many as come nearest to its share.

    Args:
        items: of one site, with their patients.
        site: its name, a key of the draw.
        shares: split -> its share of the patients, in any unit; a split without one is not drawn.
        seed: of the draw.

    Raises:
        DataError: a patient in two splits, or too few patients to draw from.
    """
    named = [replace(item, split=item.split or "training") for item in items]
    _refuse_crossing(named)
    if all(item.split == "test" for item in named):
        return named  # of a site that never trains
    missing = [split for split in ("test", "validation") if split in shares and not any(item.split == split for item in named)]
    rest = sum(shares[split] for split in ("training", *missing))
    for split in missing:
        pool = [number for number, item in enumerate(named) if item.split == "training"]
        chosen = [named[number] for number in pool]
        folds = max(2, min(round(rest / shares[split]), len({_patient(item) for item in chosen})))
        drawn = _folds(chosen, folds, [item.stratum for item in chosen], seed, f"{site} {split}")
        rest -= shares[split]
        for number, fold in zip(pool, drawn, strict=True):
            if fold == 0:
                named[number] = replace(named[number], split=split)
    return named


def _refuse_crossing(items: Sequence[Item]) -> None:
    home: dict[str, Item] = {}
    for item in items:
        first = home.setdefault(_patient(item), item)
        if first.split != item.split:
            both = f"{first.first.name} ({first.split}) and {item.first.name} ({item.split})"
            raise DataError(f"patient {item.patient} is in two splits: {both}; draw the split anew with --redraw")


def _folds(items: Sequence[Item], folds: int, strata: Sequence[str], seed: int, key: str) -> np.ndarray:
    """The fold of every image, (n,): all of a patient in one, every stratum in like shares as far as patients allow."""
    from sklearn.model_selection import StratifiedGroupKFold

    patients = [_patient(item) for item in items]
    if len(set(patients)) < folds:
        remedy = "add patients, ask for fewer --sites, or name patients otherwise (--patient)"
        raise DataError(f"{key}: {len(set(patients))} patient(s) cannot be split in {folds}; {remedy}")
    if folds == 1:
        return np.zeros(len(items), np.int64)
    names, classes = np.unique(strata, return_inverse=True)
    if np.bincount(classes, minlength=len(names)).max() < folds:  # too few of any to be in every fold
        classes = np.zeros_like(classes)
    splitter = StratifiedGroupKFold(folds, shuffle=True, random_state=numpy_random_state(seed, "data init", key))
    numbers = np.zeros(len(items), np.int64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The least populated class", UserWarning)  # the table shows how many each split has
        for fold, (_, rows) in enumerate(splitter.split(np.zeros(len(items)), classes, patients)):
            numbers[rows] = fold
    if len(set(numbers.tolist())) < folds:
        raise DataError(f"{key}: the patients' images are too uneven for {folds} parts; ask for fewer, or other --shares")
    return numbers


def _patient(item: Item) -> str:
    return item.patient or str(item.first)
