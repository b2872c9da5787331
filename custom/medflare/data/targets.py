"""Stored labels as training targets: which stored value means which label; and how often each class occurs."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from medflare.core.errors import ConfigError, DataError
from medflare.data.datalist import FILE, mask_names
from medflare.tasks.annotation import Annotation
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Images

_REMEDY: Final = "correct the file, or the task's labels or label_values"
_WHITE: Final = 255  # of pictures, as which many programs write 1
_SCARCE: Final = 3  # training images; a class with fewer is hardly learnt


def encode_mask(masks: np.ndarray, task: TaskConfig, place: str, places: Sequence[str] = ()) -> np.ndarray:
    """Target of one picture or volume.

    A mask of one structure has 0 and 1, or 0 and 255, unless `TaskConfig.label_values` says otherwise.

    Args:
        masks: int64 (M, ...): stored values, M = 1 for one mask file, or one per label (multilabel).
        place: of the masks, for messages.
        places: of each of several masks, where they are files of their own.

    Returns:
        int64 (1, ...) label indices (binary: 0 or 1; multiclass), or (C, ...) of 0/1 (multilabel).

    Raises:
        DataError: a value that no label lists (see `TaskConfig.unlisted_labels`), or a wrong number of masks.
    """
    if task.target == "multilabel" and not task.label_values:
        if len(masks) != len(task.labels):
            found = f"{len(masks)} mask(s) or channel(s) for {len(task.labels)} labels ({', '.join(task.labels)})"
            remedy = "give one mask file per label, or say in the task's label_values which values mean which label"
            raise DataError(f"{place}: {found}; {remedy}")
        target = np.zeros_like(masks)
        for row, mask in enumerate(masks):
            values = _zeros_and_ones(mask, task)
            mask_place = places[row] if len(places) == len(masks) else place
            _check_listed(values, [0, 1], task, mask_place, "store 0 and 1, or 0 and 255, in each structure's mask")
            target[row] = values == 1
        return target
    if len(masks) != 1:
        raise DataError(f"{place}: {len(masks)} masks or colour channels where one is expected; store label values in one grey mask")
    if task.target == "binary" and not task.label_values:
        masks = _zeros_and_ones(masks, task)
    stored_by_label = stored_values(task)
    background = [] if task.target == "multiclass" else [0]
    _check_listed(masks, [*background, *(value for stored in stored_by_label for value in stored)], task, place)
    if task.target == "multiclass":
        target = np.zeros_like(masks)
        for index, stored in enumerate(stored_by_label):
            target[np.isin(masks, stored)] = index
        return target
    return np.concatenate([np.isin(masks, stored) for stored in stored_by_label]).astype(np.int64)


def _zeros_and_ones(mask: np.ndarray, task: TaskConfig) -> np.ndarray:
    """The mask of one structure, with 1 for the 255 of a mask of 0 and 255 alone.

    Unchanged where the task drops values that it does not list: 255 may mean unknown there.
    """
    if task.unlisted_labels == "drop" or not (mask == _WHITE).any():
        return mask
    return mask // _WHITE if np.isin(mask, (0, _WHITE)).all() else mask


def encode_label(label: Any, task: TaskConfig, place: str) -> np.ndarray | None:
    """A label as int64 (), or (C,) of 0/1 (multilabel); None for a value that the task drops, DataError for another that is not listed."""
    if task.target == "multilabel":
        if not isinstance(label, list) or len(label) != len(task.labels) or any(item not in (0, 1) for item in label):
            names = ", ".join(task.labels)
            raise DataError(f"{place}: the label must be a list of {len(task.labels)} zeros and ones ({names}), got {label!r}")
        return np.array(label, np.int64)
    if not isinstance(label, int) or isinstance(label, bool):
        raise DataError(f"{place}: the label must be a whole number, as the task classifies, got {label!r}")
    values = stored_values(task) if task.target == "multiclass" else [[0], stored_values(task)[0]]
    for index, stored in enumerate(values):
        if label in stored:
            return np.array(index, np.int64)
    _check_listed(np.array(label), [value for stored in values for value in stored], task, place)
    return None


def _check_listed(values: np.ndarray, allowed: list[int], task: TaskConfig, place: str, remedy: str = _REMEDY) -> None:
    if task.unlisted_labels == "drop" or np.isin(values, allowed).all():
        return
    strange = np.setdiff1d(values, allowed).tolist()
    shown = ", ".join(map(str, strange[:4])) + (", ..." if len(strange) > 4 else "")
    known = ", ".join(map(str, sorted(set(allowed))))
    raise DataError(f"{place}: label value {shown} out of range, the task knows {known}; {remedy}")


def stored_values(task: TaskConfig) -> list[list[int]]:
    """The values that files use, by label (not for multilabel tasks without `label_values`, which have a mask per label)."""
    if task.label_values:
        return [task.label_values[label] for label in task.labels]
    return [[1]] if task.target == "binary" else [[index] for index in range(len(task.labels))]


def plain_name(name: str) -> str:
    """A label's name for comparison: lower case, "_" as a space."""
    return " ".join(name.replace("_", " ").split()).casefold()


# -- names of a site -------------------------------------------------------------------------------------------------------


def renumbering(names: Mapping[str, Sequence[int]], used: Collection[int], task: TaskConfig, place: str) -> tuple[dict[int, int], str]:
    """The task's class numbers for those of a site, by the names in the site's datalist.

    Sites number their classes independently: a site without one class gives others its number. So names decide where the datalist has
    them; `plain_name` compares them. If no name is the task's (a background aside) and every class has a name, the names count as
    translations and numbers stay. If only some names are the task's, the others are refused unless the task has `label_values`.
    Structures are never renumbered, since masks are not.

    Args:
        names: see `datalist.class_numbers`; empty where the datalist has none.
        used: the class numbers of the site's images.

    Returns:
        Number of the datalist -> number of the task, where they differ; and a note where a class has another name or number, else "".

    Raises:
        DataError: a name that the task has for another number, or does not have while it has others.
    """
    values = dict(zip(task.labels, stored_values(task), strict=True))
    labels = {number: label for label, numbers in values.items() for number in numbers}
    numbers_of: defaultdict[str, set[int]] = defaultdict(set)
    for label, numbers in values.items():
        numbers_of[plain_name(label)].update(numbers)
    mask_per_label = task.kind == "segmentation" and task.target == "multilabel" and not task.label_values
    named = list(enumerate(mask_names(names))) if mask_per_label else sorted((n, name) for name, numbers in names.items() for n in numbers)
    background = {0} if task.target == "binary" or (task.kind == "segmentation" and not mask_per_label) else set()
    classes = labels.keys() - background

    same = {number for number, name in named if number in numbers_of.get(plain_name(name), ())}
    moved = {number: name for number, name in named if plain_name(name) in numbers_of and number not in same}
    unknown = {number: name for number, name in named if plain_name(name) not in numbers_of and name != str(number) and number in classes}
    if moved and task.kind == "classification" and task.target == "multiclass" and set(used) & labels.keys() <= same | moved.keys():
        targets = {number: min(numbers_of[plain_name(name)]) for number, name in moved.items()}
        return targets, _renamed((number, name, targets[number], labels[targets[number]]) for number, name in moved.items())
    translated = same <= background and classes <= dict(named).keys()
    if not moved and (not unknown or translated or task.label_values):
        return {}, _renamed((number, name, number, labels[number]) for number, name in unknown.items())
    number, name = min((moved or unknown).items())
    expected = ", ".join(f"{number} {label}" for number, label in sorted(labels.items()))
    remedy = "write the task's name there if it means the same, or say in the task's label_values what numbers mean"
    raise DataError(f'{place}: "labels" of {FILE} call {number} {name!r}, task {task.name} has {expected}; {remedy}')


def _renamed(classes: Iterable[tuple[int, str, int, str]]) -> str:
    listed = ", ".join(f"{number} {name} as {target} {label}" for number, name, target, label in classes)
    return f'"labels" of {FILE} count so: {listed}' if listed else ""


def annotation_of(names: Sequence[str] | None, task: TaskConfig, place: str) -> Annotation | None:
    """The structures of "annotated", by `plain_name`; None without it, DataError for one that the task lacks, or if it classifies."""
    if names is None:
        return None
    labels = {plain_name(label): label for label in task.labels}
    try:
        return Annotation(task, [labels.get(plain_name(name), name) for name in names])
    except ConfigError as error:
        raise DataError(f"{place}: {error}") from error


def with_empty_masks(masks: np.ndarray, annotation: Annotation) -> np.ndarray:
    """Masks (M, ...) of the annotated structures, with an empty mask for each of the others; unchanged if M is another number."""
    if annotation.complete or len(masks) != len(annotation.names):
        return masks
    complete = np.zeros((len(annotation.task.labels), *masks.shape[1:]), masks.dtype)
    complete[list(annotation.outputs)] = masks
    return complete


# -- tensors ---------------------------------------------------------------------------------------------------------------


class LazyTensors(Sequence[Tensor]):
    """Images or targets that are read from the disk when they are used; `counts` of targets: int64 (size, classes), see `class_counts`."""

    def __init__(self, size: int, read: Callable[[int], Tensor], counts: Tensor | None = None):
        self._size, self._read, self.counts = size, read, counts

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, row: Any) -> Any:
        return self._read(range(self._size)[row])


def class_counts(targets: Images, task: TaskConfig) -> Tensor:
    """Images (classification) or pixels (segmentation; multilabel: positives) of every class in a `loading.Split`, int64 (classes,)."""
    if not isinstance(targets, Tensor):
        return counts_by_image(targets, task).sum(dim=0)
    if task.target == "multilabel":
        return targets.transpose(0, 1).flatten(1).sum(dim=1).to(torch.int64)
    return torch.bincount(targets.flatten(), minlength=len(task.classes))


def counts_by_image(targets: Images, task: TaskConfig) -> Tensor:
    """`class_counts` of every image, int64 (images, classes)."""
    if isinstance(targets, LazyTensors) and targets.counts is not None:
        return targets.counts
    counts = [class_counts(target[None], task) for target in targets]
    return torch.stack(counts) if counts else torch.zeros(0, len(task.classes), dtype=torch.int64)


def scarce_classes(targets: Images, task: TaskConfig, annotated: Sequence[str] | None = None) -> dict[str, int]:
    """Classes (of structures those `annotated`; None: all) in fewer than three training images -> images; empty without training images."""
    if not len(targets):
        return {}
    images = (counts_by_image(targets, task) > 0).sum(dim=0).tolist()
    background = task.kind == "segmentation" and task.target != "multilabel"
    counts = list(zip(task.classes, images, strict=True))[background:]
    return scarce({name: count for name, count in counts if annotated is None or name in annotated})


def scarce(images: Mapping[str, int]) -> dict[str, int]:
    """The classes with fewer than three training images, of class -> training images."""
    return {name: count for name, count in images.items() if count < _SCARCE}


def scarce_line(classes: Mapping[str, int]) -> str:
    """One line about `scarce_classes`.

    Examples:
        >>> scarce_line({"severe": 1, "mild": 0})
        "fewer than 3 training images of a class: 'severe' has 1, 'mild' has none"
    """
    shown = ", ".join(f"{name!r} has {count or 'none'}" for name, count in classes.items())
    return f"fewer than {_SCARCE} training images of a class: {shown}"
