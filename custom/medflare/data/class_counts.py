"""How often each class occurs in the training targets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Images

_SCARCE = 3  # training images; a class with fewer is hardly learnt


@dataclass(eq=False)
class LazyTensors(Sequence[Tensor]):
    """Images or targets that are read from the disk when they are used; `counts` of targets: int64
    (size, classes), see `class_counts`.
    """

    size: int
    read: Callable[[int], Tensor]
    counts: Tensor | None = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: Any) -> Any:
        return self.read(range(self.size)[row])


def class_counts(targets: Images, task: TaskConfig) -> Tensor:
    """Images (classification) or pixels (segmentation; multilabel: positives) of every class in a
    `loading.Split`, int64 (classes,).
    """
    if not isinstance(targets, Tensor):
        return counts_by_image(targets, task).sum(dim=0)
    if task.target == "multilabel":
        return targets.transpose(0, 1).flatten(1).count_nonzero(dim=1)
    return torch.bincount(targets.flatten(), minlength=len(task.classes))


def counts_by_image(targets: Images, task: TaskConfig) -> Tensor:
    """`class_counts` of every image, int64 (images, classes)."""
    if isinstance(targets, LazyTensors) and targets.counts is not None:
        return targets.counts
    if not len(targets):
        return torch.zeros(0, len(task.classes), dtype=torch.int64)
    return torch.stack([class_counts(target[None], task) for target in targets])


def scarce_classes(
    targets: Images, task: TaskConfig, annotated: Sequence[str] | None = None
) -> dict[str, int]:
    """Classes (of structures those `annotated`; None: all) in fewer than three training images ->
    images; empty without training images.
    """
    if not len(targets):
        return {}
    images = (counts_by_image(targets, task) > 0).sum(dim=0).tolist()
    counts = dict(zip(task.classes, images, strict=True))
    if task.kind == "segmentation" and task.target != "multilabel":
        del counts[task.classes[0]]  # the background
    if annotated is not None:
        counts = {name: count for name, count in counts.items() if name in annotated}
    return scarce(counts)


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
