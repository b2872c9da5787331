"""Stored labels as training targets: which stored value means which label, and a clear refusal of any other value; targets counted."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from medflare.core.errors import ConfigError, DataError
from medflare.tasks.annotation import Annotation
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Images


def encode_mask(masks: np.ndarray, task: TaskConfig, place: str) -> np.ndarray:
    """Target of one picture or volume.

    Args:
        masks: int64 (M, ...): stored values, M = 1 for one mask file, or one per label (multilabel).
        task: a segmentation task.
        place: the mask file, for messages.

    Returns:
        int64 (1, ...) label indices (binary: 0 or 1; multiclass), or (C, ...) of 0/1 (multilabel).

    Raises:
        DataError: a value that no label lists (see `TaskConfig.unlisted_labels`), or a wrong number of masks.
    """
    if task.target == "multilabel" and not task.label_values:
        if len(masks) != len(task.labels):
            raise DataError(
                f"{place}: {len(masks)} mask(s) or channel(s) for {len(task.labels)} labels ({', '.join(task.labels)}); "
                "give one mask file per label, or say in the task's label_values which values mean which label"
            )
        _refuse_unlisted(masks, [0, 1], task, place)
        return (masks == 1).astype(np.int64)
    if len(masks) != 1:
        raise DataError(f"{place}: {len(masks)} masks or colour channels where one is expected; store label values in one grey mask")
    values = stored_values(task)
    background = [] if task.target == "multiclass" else [0]
    _refuse_unlisted(masks, [*background, *(value for listed in values for value in listed)], task, place)
    if task.target == "multiclass":
        target = np.zeros_like(masks)
        for index, listed in enumerate(values):
            target[np.isin(masks, listed)] = index
        return target
    return np.concatenate([np.isin(masks, listed) for listed in values]).astype(np.int64)


def encode_label(label: Any, task: TaskConfig, place: str) -> np.ndarray | None:
    """Target of one image of a classification task: int64 () or, for multilabel, (C,) of 0/1; None where it is left out.

    Args:
        label: as the datalist has it.
        task: gives target, labels and their stored values.
        place: the beginning of a message.

    Raises:
        DataError: not a whole number (multilabel: a list of 0/1), or a value that no label lists.
    """
    if task.target == "multilabel":
        if not isinstance(label, list) or len(label) != len(task.labels) or any(item not in (0, 1) for item in label):
            names = ", ".join(task.labels)
            raise DataError(f"{place}: the label must be a list of {len(task.labels)} zeros and ones ({names}), got {label!r}")
        return np.array(label, np.int64)
    if not isinstance(label, int) or isinstance(label, bool):
        raise DataError(f"{place}: the label must be a whole number, as the task classifies, got {label!r}")
    values = stored_values(task) if task.target == "multiclass" else [[0], stored_values(task)[0]]
    for index, listed in enumerate(values):
        if label in listed:
            return np.array(index, np.int64)
    if task.unlisted_labels == "drop":
        return None
    raise _out_of_range([label], sorted({value for listed in values for value in listed}), place)


def stored_values(task: TaskConfig) -> list[list[int]]:
    """The values that files use, by label (not for multilabel tasks without `label_values`, which have a mask per label)."""
    if task.label_values:
        return [task.label_values[label] for label in task.labels]
    return [[1]] if task.target == "binary" else [[index] for index in range(len(task.labels))]


def annotation_of(names: Sequence[str] | None, task: TaskConfig, place: str) -> Annotation | None:
    """The structures that a site says it annotated; None where it does not say.

    Args:
        names: "annotated" of its datalist; case and "_" for a space do not matter.
        task: gives the structures.
        place: the beginning of a message.

    Raises:
        DataError: the task has no such structure, or classifies.
    """
    if names is None:
        return None
    labels = {plain_name(label): label for label in task.labels}
    try:
        return Annotation(task, [labels.get(plain_name(name), name) for name in names])
    except ConfigError as error:
        raise DataError(f"{place}: {error}") from error


def with_empty_masks(masks: np.ndarray, annotation: Annotation) -> np.ndarray:
    """Masks of the annotated structures, one each, with an empty one for each of the others.

    Args:
        masks: (M, ...); as many as were annotated, in the task's order, or others, which stay as they are.
        annotation: of a task that takes a mask for every label.
    """
    if annotation.complete or len(masks) != len(annotation.names):
        return masks
    whole = np.zeros((len(annotation.task.labels), *masks.shape[1:]), masks.dtype)
    whole[list(annotation.outputs)] = masks
    return whole


def plain_name(name: str) -> str:
    """A label's name as it is compared: without case, "_" a space."""
    return " ".join(name.replace("_", " ").split()).casefold()


class LazyTensors(Sequence[Tensor]):
    """Images or targets that are read when they are asked for.

    Args:
        size: how many.
        read: row -> image or target.
        counts: of targets, int64 (size, classes), see `class_counts`; None where nobody has counted yet.
    """

    def __init__(self, size: int, read: Callable[[int], Tensor], counts: Tensor | None = None):
        self._size, self._read, self.counts = size, read, counts

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, row: Any) -> Any:
        return self._read(range(self._size)[row])

    def part(self, rows: Sequence[int]) -> "LazyTensors":
        """Some of them."""
        return LazyTensors(len(rows), lambda row: self._read(rows[row]), None if self.counts is None else self.counts[list(rows)])


def class_counts(targets: Images, task: TaskConfig) -> Tensor:
    """Images (classification) or pixels (segmentation) of every class, int64 (len(task.classes),); multilabel: positives.

    Args:
        targets: as in `splits.Split`.
        task: gives classes and target.
    """
    if not isinstance(targets, Tensor):
        return counts_by_image(targets, task).sum(dim=0)
    if task.target == "multilabel":
        return targets.transpose(0, 1).flatten(1).sum(dim=1).to(torch.int64)
    return torch.bincount(targets.flatten(), minlength=len(task.classes))


def counts_by_image(targets: Images, task: TaskConfig) -> Tensor:
    """`class_counts` of every image by itself, int64 (images, classes).

    Args:
        targets: as in `splits.Split`.
        task: gives classes and target.
    """
    if isinstance(targets, LazyTensors) and targets.counts is not None:
        return targets.counts
    counts = [class_counts(target[None], task) for target in targets]
    return torch.stack(counts) if counts else torch.zeros(0, len(task.classes), dtype=torch.int64)


_SCARCE: Final = 3  # training images, below which a class is hardly learnt


def scarce_classes(targets: Images, task: TaskConfig, annotated: Sequence[str] | None = None) -> dict[str, int]:
    """Classes that fewer than three training images show: name -> images; empty of a site without training images.

    Args:
        targets: of the training images, as in `splits.Split`.
        task: gives classes and target; in segmentation only its structures count.
        annotated: the structures that the site annotated; None: all.

    Examples:
        >>> from types import SimpleNamespace
        >>> task = SimpleNamespace(kind="classification", target="multiclass", classes=("mild", "severe"), labels=("mild", "severe"))
        >>> scarce_classes(torch.tensor([0, 0, 0, 1]), task)
        {'severe': 1}
    """
    if not len(targets):
        return {}
    images = (counts_by_image(targets, task) > 0).sum(dim=0).tolist()
    background = task.kind == "segmentation" and task.target != "multilabel"
    counts = list(zip(task.classes, images, strict=True))[background:]
    return scarce({name: count for name, count in counts if annotated is None or name in annotated})


def scarce(images: Mapping[str, int]) -> dict[str, int]:
    """Those of the classes that too few training images show.

    Args:
        images: class -> training images that show it.
    """
    return {name: count for name, count in images.items() if count < _SCARCE}


def scarce_line(classes: Mapping[str, int]) -> str:
    """One line on `scarce_classes`.

    Args:
        classes: name -> images.

    Examples:
        >>> scarce_line({"severe": 1, "mild": 0})
        "fewer than 3 training images of a class: 'severe' has 1, 'mild' has none"
    """
    shown = ", ".join(f"{name!r} has {count or 'none'}" for name, count in classes.items())
    return f"fewer than {_SCARCE} training images of a class: {shown}"


def _refuse_unlisted(masks: np.ndarray, allowed: list[int], task: TaskConfig, place: str) -> None:
    if task.unlisted_labels == "drop" or np.isin(masks, allowed).all():
        return
    raise _out_of_range(np.setdiff1d(masks, allowed).tolist(), sorted(set(allowed)), place)


def _out_of_range(found: list[int], allowed: list[int], place: str) -> DataError:
    shown = ", ".join(map(str, found[:4])) + (", ..." if len(found) > 4 else "")
    return DataError(
        f"{place}: label value {shown} out of range, the task knows {', '.join(map(str, allowed))}; "
        "correct the file, or the task's labels or label_values"
    )
