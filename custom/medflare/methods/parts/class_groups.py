"""A task as groups of classes: the logits, targets and counts of statistics by class.

A softmax is one group of C classes; each sigmoid is a group of two, without and with its label.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from medflare.core.errors import ConfigError
from medflare.core.states import StateDict
from medflare.data.class_counts import counts_by_image
from medflare.tasks.annotation import Annotation
from medflare.tasks.classes import class_names
from medflare.tasks.config import TaskConfig
from medflare.training.batches import drawn_counts
from medflare.training.site import Site


def groups_and_classes(task: TaskConfig) -> tuple[int, int]:
    """(G, C), the numbers of a task's groups and of their classes."""
    names = class_names(task)
    return len(names), len(names[0])


def class_logits(logits: Tensor, task: TaskConfig) -> Tensor:
    """Logits (N, outputs, ...) as (G, N, C, P) with P pixels, or 1; (0, z) for a sigmoid's z."""
    outputs = logits.reshape(len(logits), task.outputs, -1)
    if task.target == "multiclass":
        return outputs[None]
    positive = outputs.transpose(0, 1)
    return torch.stack([torch.zeros_like(positive), positive], dim=2)


def class_targets(targets: Tensor, task: TaskConfig) -> Tensor:
    """Targets as in `data.loading.Split` as class indices (G, N, P), for `class_logits`."""
    groups = task.outputs if task.target == "multilabel" else 1
    return targets.reshape(len(targets), groups, -1).transpose(0, 1).long()


def at_positions(targets: Tensor, features: Tensor) -> Tensor:
    """Targets at the positions of features (N, D, ...): label maps are resized (nearest)."""
    size = features.shape[2:]
    if not size or size == targets.shape[-len(size) :]:
        return targets
    maps = targets.reshape(len(targets), -1, *targets.shape[-len(size) :]).float()
    return functional.interpolate(maps, size, mode="nearest")


def check_counted(task: TaskConfig, remedy: str = "") -> None:
    """Raise ConfigError for a task of which not all classes can be counted: patches of several
    labels, in which the pixels without a label are unknown; `remedy`: another one, with "or".
    """
    if task.target == "multilabel" and task.image_mode == "patch":
        raise ConfigError(
            f"task {task.name}: pixels without a label are not counted in multilabel patches; "
            f"set {remedy}image_mode 'resize'"
        )


def class_totals(task: TaskConfig, enrolled: Mapping[str, Any]) -> Tensor:
    """A site's part in N_c of the conjoint objective: its training images or pixels of each class.

    Args:
        task: names the classes.
        enrolled: {"n": {"train": images, ...}, "class_counts": counts of `task.classes`; empty if
            the site sent none, which gives zeros}.

    Returns:
        (G, C) int64; float32 for counts with fractions.
    """
    shape = groups_and_classes(task)
    if not enrolled["class_counts"]:
        return torch.zeros(shape, dtype=torch.int64)
    counts = torch.tensor(enrolled["class_counts"])
    if task.target == "multilabel":
        # Only positives are counted; the other pixels are the negatives.
        pixels = math.prod(task.size) if task.kind == "segmentation" else 1
        negatives = (enrolled["n"]["train"] * pixels - counts).clamp(min=0)
        counts = torch.stack([negatives, counts], dim=1)
    return counts.reshape(shape)


def drawn_totals(task: TaskConfig, enrolled: Mapping[str, Any]) -> Tensor:
    """`class_totals` of an epoch's images as the task's sampling draws them, float64.

    They are those of all images where the draws do not follow from the counts: in segmentation, and
    with several labels of an image.
    """
    totals = class_totals(task, enrolled)
    if task.kind == "segmentation" or task.target == "multilabel":
        return totals.double()
    return drawn_counts(task, totals.flatten().tolist()).reshape(totals.shape)


def totals_of_site(site: Site) -> Tensor:
    """`class_totals` at the site itself, of an epoch's images as the task's sampling draws them."""
    train = site.data.train
    weights = site.sampling_weights["train"]
    if weights is None or not weights.any():
        counts = site.class_counts()
    else:
        of_images = counts_by_image(train.targets, site.task).double()
        counts = len(train) * (weights @ of_images) / weights.sum()
    return class_totals(site.task, {"n": site.n, "class_counts": counts.tolist()})


class PatientsOfClasses:
    """Which patients show each class in the images and at the positions of some statistics.

    They can be fewer than those with the class in their masks, which small-cell suppression counts:
    features have a lower resolution, and patches are parts of images.

    Args:
        patients: of every row of the split.
    """

    def __init__(self, patients: Sequence[str]):
        self._patients = patients
        self._shown: list[tuple[Tensor, Tensor]] = []

    def add(self, labels: Tensor, classes: int, rows: Tensor) -> None:
        """Add a batch: class indices (G, N, P) of rows (N,) of the split."""
        shown = [(labels == number).any(dim=2) for number in range(classes)]
        self._shown.append((rows, torch.stack(shown, dim=1).flatten(0, 1)))

    def few(self, minimum: int) -> Tensor:
        """(G C,) whether some patients show the class, but fewer than `minimum`."""
        counts = []
        for by_batch in zip(*(shown.cpu() for _, shown in self._shown), strict=True):
            rows = [rows[images] for (rows, _), images in zip(self._shown, by_batch, strict=True)]
            counts.append(len({self._patients[row] for row in torch.cat(rows).tolist()}))
        return torch.tensor([0 < count < minimum for count in counts], dtype=torch.bool)


def rows_not_annotated(annotation: Annotation) -> Tensor:
    """(G C,) whether a site did not annotate the class; of exclusive classes also the background,
    which holds the others.
    """
    task = annotation.task
    missing = [name not in annotation.names for name in task.classes]
    rows = torch.tensor(missing) & (not annotation.complete)
    return rows.repeat_interleave(2) if task.target == "multilabel" else rows


def without_rows(state: StateDict, hidden: Tensor) -> StateDict:
    """The state with zeros in the rows (K,) that are hidden."""
    changed = {}
    for name, tensor in state.items():
        changed[name] = tensor.clone()
        changed[name][hidden] = 0
    return changed
