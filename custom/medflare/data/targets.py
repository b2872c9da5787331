"""Stored labels as training targets: which stored value means which label."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from medflare.core.errors import ConfigError, DataError
from medflare.data.datalist import FILE, mask_names
from medflare.tasks.config import TaskConfig

if TYPE_CHECKING:
    from medflare.tasks.annotation import Annotation

_REMEDY = "correct the file, or the task's labels or label_values"
_WHITE = 255  # of pictures, as which many programs write 1


def encode_mask(masks: np.ndarray, task: TaskConfig, files: Sequence[Path | str]) -> np.ndarray:
    """Target of one picture or volume.

    A structure's only mask has 0 and 1, or 0 and 255, unless `TaskConfig.label_values` says
    otherwise; one of several masks has 0 and any other number.

    Args:
        masks: int64 (M, ...): stored values, M = 1 for one mask file, or one per label
            (multilabel).
        files: of the masks, for messages; one for all, or one for each.

    Returns:
        int64 (1, ...) label indices (binary: 0 or 1; multiclass), or (C, ...) of 0/1 (multilabel).

    Raises:
        DataError: a value that no label lists (see `TaskConfig.unlisted_labels`), or a wrong number
            of masks.
    """
    if task.mask_per_label:
        return _encode_mask_per_label(masks, task, files)
    location = str(files[0])
    if len(masks) != 1:
        raise DataError(
            f"{location}: {len(masks)} masks or colour channels where one is expected; "
            "store label values in one grey mask"
        )
    if task.target == "binary" and not task.label_values:
        masks = _zeros_and_ones(masks, task, _WHITE)
    stored_by_label = stored_values(task)
    allowed = list(chain(*stored_by_label))
    if task.target == "multiclass":
        _check_listed(masks, allowed, task, location)
        target = np.zeros_like(masks)
        for index, stored in enumerate(stored_by_label):
            target[np.isin(masks, stored)] = index
        return target
    _check_listed(masks, [0, *allowed], task, location)
    return np.concatenate([np.isin(masks, stored) for stored in stored_by_label]).astype(np.int64)


def _encode_mask_per_label(
    masks: np.ndarray, task: TaskConfig, files: Sequence[Path | str]
) -> np.ndarray:
    if len(masks) != len(task.labels):
        raise DataError(
            f"{files[0]}: {len(masks)} mask(s) or channel(s) for {len(task.labels)} labels "
            f"({', '.join(task.labels)}); give one mask file per label, "
            "or say in the task's label_values which values mean which label"
        )
    target = np.zeros_like(masks)
    for row, mask in enumerate(masks):
        file = files[row] if len(files) == len(masks) else files[0]
        if task.unlisted_labels != "drop":
            check_structure(mask, file)
        target[row] = _zeros_and_ones(mask, task, max(1, int(mask.max()))) == 1
    return target


def check_structure(mask: np.ndarray, file: Path | str) -> None:
    """Raise DataError if a structure's own mask has several values beside 0, or one below 0."""
    others = mask[(mask != 0) & (mask != max(1, mask.max()))]
    if others.size:
        shown = _shortened(np.union1d(others, mask.max()).tolist())
        raise DataError(
            f"{file}: a structure's own mask holds {shown}; store 0 and one number above it, or "
            "say which values are the structure: data init --threshold 128"
        )


def _zeros_and_ones(mask: np.ndarray, task: TaskConfig, shown: int) -> np.ndarray:
    """The mask of one structure, with 1 for the number `shown` of a mask of 0 and this one alone.

    Unchanged where the task drops values that it does not list: 255 may mean unknown there.
    """
    if task.unlisted_labels == "drop" or not np.isin(mask, (0, shown)).all():
        return mask
    return mask // shown


def encode_label(label: Any, task: TaskConfig, location: str) -> np.ndarray | None:
    """A label as int64 (), or (C,) of 0/1 (multilabel); None for a value that the task drops,
    DataError for another that is not listed. Zero for None, at a site without labels.
    """
    if label is None:
        return np.zeros(len(task.labels) if task.target == "multilabel" else (), np.int64)
    if task.target == "multilabel":
        is_list = isinstance(label, list) and len(label) == len(task.labels)
        if not is_list or any(item not in (0, 1) for item in label):
            raise DataError(
                f"{location}: the label must be a list of {len(task.labels)} zeros and ones "
                f"({', '.join(task.labels)}), got {label!r}"
            )
        return np.array(label, np.int64)
    if not isinstance(label, int) or isinstance(label, bool):
        raise DataError(
            f"{location}: the label is {label!r}, but the task needs a whole number, as of a class"
        )
    stored_by_class = stored_values(task)
    if task.target == "binary":
        stored_by_class = [[0], stored_by_class[0]]
    for index, stored in enumerate(stored_by_class):
        if label in stored:
            return np.array(index, np.int64)
    _check_listed(np.array(label), list(chain(*stored_by_class)), task, location)
    return None


def _check_listed(values: np.ndarray, allowed: list[int], task: TaskConfig, location: str) -> None:
    if task.unlisted_labels == "drop" or np.isin(values, allowed).all():
        return
    shown = _shortened(np.setdiff1d(values, allowed).tolist())
    known = ", ".join(map(str, sorted(set(allowed))))
    raise DataError(
        f"{location}: label value {shown} out of range, the task knows {known}; {_REMEDY}"
    )


def _shortened(values: Sequence[int]) -> str:
    """The first values as text."""
    shown = ", ".join(map(str, values[:4]))
    return shown if len(values) <= 4 else f"{shown}, ..."


def stored_values(task: TaskConfig) -> list[list[int]]:
    """The values that files use, by label (not for multilabel tasks without `label_values`, which
    have a mask per label).
    """
    if task.label_values:
        return [task.label_values[label] for label in task.labels]
    if task.target == "binary":
        return [[1]]
    return [[index] for index in range(len(task.labels))]


def plain_name(name: str) -> str:
    """A label's name for comparison: lower case, "_" as a space."""
    return " ".join(name.replace("_", " ").split()).casefold()


# -- names of a site -------------------------------------------------------------------------------


def renumbering(
    names: Mapping[str, Sequence[int]], used: Collection[int], task: TaskConfig, location: str
) -> tuple[dict[int, int], str]:
    """The task's class numbers for those of a site, by the names in the site's datalist.

    Sites number their classes independently: a site without one class gives others its number. So
    names decide where the datalist has them; `plain_name` compares them. If no name is the task's
    (a background aside) and every class has a name, the names count as translations and numbers
    stay. If only some names are the task's, the others are refused unless the task has
    `label_values`. Structures are never renumbered, since masks are not.

    Args:
        names: see `datalist.class_numbers`; empty where the datalist has none.
        used: the class numbers of the site's images.

    Returns:
        Number of the datalist -> number of the task, where they differ; and a note where a class
        has another name or number, else "".

    Raises:
        DataError: a name that the task has for another number, or does not have while it has
            others.
    """
    # The task's names and numbers.
    label_of: dict[int, str] = {}
    numbers_of = defaultdict(set)
    for label, numbers in zip(task.labels, stored_values(task), strict=True):
        label_of |= dict.fromkeys(numbers, label)
        numbers_of[plain_name(label)].update(numbers)
    segmentation = task.kind == "segmentation"
    has_background = task.target == "binary" or (segmentation and not task.mask_per_label)
    background = {0} if has_background else set()
    classes = label_of.keys() - background

    # The site's: classes with the task's number, with another one of the task, or with a name that
    # the task does not have.
    if task.mask_per_label:
        named = list(enumerate(mask_names(names)))
    else:
        named = sorted((n, name) for name, numbers in names.items() for n in numbers)
    same = {number for number, name in named if number in numbers_of.get(plain_name(name), ())}
    moved = {}
    unknown = {}
    for number, name in named:
        if plain_name(name) in numbers_of:
            if number not in same:
                moved[number] = name
        elif name != str(number) and number in classes:
            unknown[number] = name

    multiclass = task.kind == "classification" and task.target == "multiclass"
    if moved and multiclass and set(used) & label_of.keys() <= same | moved.keys():
        targets = {number: min(numbers_of[plain_name(name)]) for number, name in moved.items()}
        return targets, _renamed(moved, targets, label_of)
    translated = same <= background and classes <= dict(named).keys()
    if not moved and (not unknown or translated or task.label_values):
        return {}, _renamed(unknown, {}, label_of)
    number, name = min((moved or unknown).items())
    expected = ", ".join(f"{number} {label}" for number, label in sorted(label_of.items()))
    remedy = (
        "write the task's name there if it means the same, or say in the task's label_values what "
        "numbers mean"
    )
    if moved and segmentation:
        remedy = "number them so in its masks and labels (DICOM segments in its labels alone)"
        if task.mask_per_label:
            remedy = "list its masks and labels in this order"
    raise DataError(
        f'{location}: "labels" of {FILE} call {number} {name!r}, task {task.name} has {expected}; '
        f"{remedy}"
    )


def _renamed(
    names: Mapping[int, str], targets: Mapping[int, int], label_of: Mapping[int, str]
) -> str:
    """One line about the site's classes that have another name or number in the task."""
    pairs = []
    for number, name in names.items():
        target = targets.get(number, number)
        pairs.append(f"{number} {name} as {target} {label_of[target]}")
    if not pairs:
        return ""
    return f"classes of {FILE} that have another name in the task: {', '.join(pairs)}"


def same_names(names: Mapping[str, Sequence[int]], others: Mapping[str, Sequence[int]]) -> bool:
    """Whether two sites give the same names the same numbers, see `datalist.class_numbers`.

    Examples:
        >>> same_names({"liver": [1]}, {"Liver": [1]}), same_names({"liver": [1]}, {"liver": [2]})
        (True, False)
    """
    plain = {plain_name(name): numbers for name, numbers in names.items()}
    return plain == {plain_name(name): numbers for name, numbers in others.items()}


class SiteStructures(NamedTuple):
    """What a site's datalist says of its structures."""

    site: str
    names: Mapping[str, Sequence[int]]  # see `datalist.class_numbers`
    structure: str  # name of the only one, where `names` is empty; "" if unknown
    mask_each: bool  # whether each structure has its own mask
    segments: bool  # whether the masks are DICOM segmentations, in which names decide

    def __str__(self) -> str:
        return ", ".join(self.names) or self.structure or "no names"


def differing_structures(site: SiteStructures, other: SiteStructures) -> str:
    """One line on how a site names its structures, unlike another site, and the remedy."""
    numbers_there = {plain_name(name): numbers for name, numbers in other.names.items()}
    shared = {name: numbers_there.get(plain_name(name)) for name in site.names}
    moved = [name for name, numbers in shared.items() if numbers not in (None, site.names[name])]
    if site.mask_each and numbers_there.keys() != {*map(plain_name, site.names)}:
        moved = []  # one of the sites lacks some, so that others have their numbers
    if moved and not site.segments and site.mask_each == other.mask_each:
        change = "list its masks so" if site.mask_each else "renumber its masks"
        return (
            f"it numbers its structures {_numbered(site)}, {other.site} {_numbered(other)}; "
            f"{change}, then write the labels of {other.site} into its {FILE}"
        )
    return (
        f"its structures: {site}; those of {other.site}: {other}; give data init --structure "
        f"NAME=OTHER,... for each that you use, or write the same labels into each {FILE}, and "
        'those that the site has as "annotated"'
    )


def _numbered(site: SiteStructures) -> str:
    """The structures with their numbers."""
    parts = []
    for name, numbers in sorted(site.names.items(), key=lambda pair: list(pair[1])):
        parts.append(f"{' and '.join(map(str, numbers))} {name}")
    return ", ".join(parts)


def annotation_of(
    names: Sequence[str] | None, task: TaskConfig, location: str
) -> "Annotation | None":
    """The structures of "annotated", by `plain_name`; None without it, DataError for one that the
    task lacks, if it classifies, or for another order where each structure has a mask.
    """
    from medflare.tasks.annotation import Annotation

    if names is None:
        return None
    label_of = {plain_name(label): label for label in task.labels}
    labels = [label_of.get(plain_name(name), name) for name in names]
    try:
        annotation = Annotation(task, labels)
    except ConfigError as error:
        raise DataError(f"{location}: {error}") from error
    if task.mask_per_label and tuple(labels) != annotation.names:
        raise DataError(
            f"{location}: annotated is {', '.join(labels)}; list it, and the masks of each image, "
            f"in the order of task {task.name}: {', '.join(annotation.names)}"
        )
    return annotation


def with_empty_masks(masks: np.ndarray, annotation: "Annotation") -> np.ndarray:
    """Masks (M, ...) of the annotated structures, with an empty mask for each of the others;
    unchanged if M is another number.
    """
    if annotation.complete or len(masks) != len(annotation.names):
        return masks
    complete = np.zeros((len(annotation.task.labels), *masks.shape[1:]), masks.dtype)
    complete[list(annotation.outputs)] = masks
    return complete
