"""The patients of images, by an option, a table, DICOM, or the names of files."""

import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from medflare.core.errors import ConfigError, DataError
from medflare.preparation.dataset_import.folders import ImageFolder, Item
from medflare.preparation.dataset_import.names import (
    PATIENT,
    SPLIT_WORDS,
    WORDS,
    composed,
    patient_key,
    words,
)

_SUBJECT = re.compile(r"(?:^|/)(sub-[A-Za-z0-9]+)")  # of BIDS
# The end of the name of a photograph.
_EYE = re.compile(rf"(?:[ _-](?:{'|'.join(WORDS['eye'])})|(?<=\d)[lr])$", re.IGNORECASE)
_FIRST_PART = re.compile("^([^_-]+)[_-]")  # of a file name
NO_PATIENT = SPLIT_WORDS.union(WORDS["image"], WORDS["mask"], ("fold", "input"))


def assign_patients(
    items: Sequence[Item], folder: ImageFolder, pattern: str = "", column: str = ""
) -> tuple[list[Item], str]:
    """The images with their patients.

    By the pattern, otherwise by the table, otherwise by DICOM's PatientID.

    Args:
        pattern: regular expression on the file name (on the path within the folder if it has a
            "/", or does not match all names); its first group is the patient.
        column: of a table that may name the patients, for the warning.

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
    of_bids = None not in subjects
    for item, subject in zip(items, subjects, strict=True):
        patient = item.patient or folder.patients.get(item.first, "")
        if subject and of_bids and not patient:
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
            f"{folder.relative(without[0])}; complete them, leave them out, or give --patient "
            "'^(p\\d+)', which names the patients of all"
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
    choice = f"{patient_option(items, folder.root)} or --patient-column"
    if column:
        choice += f" {shlex.quote(column)} (if it names patients)"
    return assigned, f"{warning}give {choice}"


def _refuse_spellings(items: Iterable[Item]) -> None:
    """Raise DataError for a patient whose name is written in two ways, as 7 and 007."""
    written: dict[str, str] = {}
    for item in items:
        patient = item.patient
        other = written.setdefault(patient_key(patient), patient)
        if other != patient:
            raise DataError(
                f"patients {other} and {patient} are one name, written in two ways; write it in one"
            )


def patient_option(items: Sequence[Item], root: Path) -> str:
    """The option that reads the patient from file names, or from the folders of several images; its
    pattern fits them, as far as some have the same first part of their name, which is no class.
    """
    images = [item.first for item in items]
    inner = [image.relative_to(root).parent.parts for image in images]
    for level in range(min(map(len, inner))):
        folders = Counter(parts[level] for parts in inner)
        paths = {parts[: level + 1] for parts in inner}
        are_classes = _are_classes([parts[level] for parts in inner], items)
        several = max(folders.values()) > 1 and len(paths) == len(folders)
        if several and _may_be_patients(folders) and not are_classes:
            above = "[^/]+/" * level
            return f"--patient '^{above}([^/]+)/' (if the folders {min(folders)}, ... are patients)"
    first_parts = [_FIRST_PART.match(path.stem) for path in images]
    patients = {part[1] for part in first_parts if part}
    are_classes = _are_classes([part[1] for part in first_parts if part], items)
    if None in first_parts or not 1 < len(patients) < len(images) or are_classes:
        return "--patient REGEX (its first group is the patient in the file's name or path)"
    return f"--patient '{_FIRST_PART.pattern}' (if {min(patients)}, ... are patients)"


def _are_classes(names: Sequence[str], items: Sequence[Item]) -> bool:
    """Whether each name stands for one class, and each class for one name."""
    labels = [item.label for item in items]
    if len(names) < len(items) or not all(isinstance(label, int) for label in labels):
        return False
    pairs = {*zip(names, labels, strict=True)}
    return len(pairs) == len({*names}) == len({*labels}) > 1


def _may_be_patients(folders: Collection[str]) -> bool:
    """Whether folders have names with numbers, and no word of a split, of images or of masks."""
    for name in folders:
        if not PATIENT.search(name) or not NO_PATIENT.isdisjoint(words(name)):
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
                f"--patient '{pattern}' does not match {name!r}; correct the expression "
                "(as '^(p\\d+|q\\d+)' for two ways to write patients)"
            )
        assigned.append(replace(item, patient=match[group]))
    return assigned


def patient_of(item: Item) -> str:
    """The patient; if it is unknown, the image counts as one."""
    return item.patient or str(item.first)
