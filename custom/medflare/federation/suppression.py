"""Small-cell suppression: a site does not send values that describe fewer patients than its
`minimum_patients`.

A method declares what its values describe (`TensorSpec` and `MetaSpec`: `measured`, `per_class`);
the participant suppresses them here. What a site says about how many images or patients it has is
decided here, too.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from medflare.core.message import Message
from medflare.core.phases import Items, Phase
from medflare.core.specs import MetaSpec, PerClass, TensorSpec
from medflare.data.class_counts import counts_by_image
from medflare.data.datalist import SPLITS
from medflare.methods.base import Plan
from medflare.tasks.classes import Cases, class_names, patients_of_cells, patients_of_classes
from medflare.tasks.config import TaskConfig
from medflare.training.site import Site

# Events that describe test patients.
OF_TEST = ("constant_output", "at_chance", "reverted", "undefined")


def small_splits(site: Site) -> tuple[str, ...]:
    """The splits that have patients, but fewer than the site's `minimum_patients`.

    A minimum of 0 or 1 suppresses nothing.
    """
    small = []
    for split in SPLITS:
        if 0 < len(set(site.data.split(split).patients)) < site.minimum_patients:
            small.append(split)
    return tuple(small)


def counts_of_splits(site: Site) -> dict[str, int]:
    """Images by split, without `small_splits`."""
    small = small_splits(site)
    return {split: count for split, count in site.n.items() if split not in small}


def count_in_words(patients: Collection[str], minimum: int) -> str:
    """The number of images, given the patient of each; "some" if these are fewer than `minimum`
    patients.

    Examples:
        >>> count_in_words(["a", "a", "b"], 0), count_in_words(["a", "a", "b"], 3)
        ('3', 'some')
    """
    return "some" if 0 < len(set(patients)) < minimum else str(len(patients))


def small_report(report: Any, least: int) -> bool:
    """Whether a count in a report, a table of any depth, is above 0 and below `least`."""
    if isinstance(report, Mapping):
        return any(small_report(value, least) for value in report.values())
    return isinstance(report, int) and 0 < report < least


def count_values(value: Any) -> int:
    """How many values are in JSON values; an undefined one counts, as it tells of images, too.

    Examples:
        >>> count_values({"A": 0.5, "B": None, "C": [0.1, 0.2]})
        4
    """
    if isinstance(value, Mapping):
        return sum(count_values(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return sum(count_values(inner) for inner in value)
    return 1


def most_images(patients: Sequence[str]) -> int:
    """The number of images of the patient with the most; 0 without patients."""
    return max(Counter(patients).values(), default=0)


def has_small_cell(cases: Cases, task: TaskConfig, minimum: int) -> bool:
    """Whether a cell of a confusion matrix has patients, but fewer than `minimum`.

    If so, no cell is sent: the sums of rows follow from the metrics of classes.
    """
    return any(
        patients < minimum for patients in patients_of_cells(cases, task.target, task.labels)
    )


def has_small_class(cases: Cases, task: TaskConfig, minimum: int) -> bool:
    """Whether a class, its complement or a structure has test patients, but fewer than `minimum`:
    in true masks, or where a metric is defined.

    If so, no numbers by class or structure are sent: those of one could be computed from the others
    and the mean.
    """
    if cases.targets is not None:
        counts = patients_of_classes(cases.patients, cases.targets.numpy(), len(task.labels))
    else:
        counts = [] if cases.shown is None else cases.shown.sum(dim=0).tolist()
        for by_metric in cases.structures.values():
            counts += [int((~values.isnan()).sum()) for values in by_metric.values()]
    return any(0 < patients < minimum for patients in counts)


def small_classes(site: Site, split: str) -> frozenset[str]:
    """The classes (see `tasks.classes.class_names`) that some patients of a split have, but fewer
    than `minimum_patients`.

    In a multilabel segmentation task every patient has the negative class: its images have
    background.
    """
    if site.minimum_patients < 2:
        return frozenset()
    data = site.data.split(split)
    task = site.task
    present = counts_by_image(data.targets, task) > 0
    images = dict(zip(task.classes, present.T, strict=True))
    if task.target == "multilabel":
        everywhere = task.kind == "segmentation"
        for label, rows in list(images.items()):
            images[f"not {label}"] = torch.ones_like(rows) if everywhere else ~rows
    small = set()
    for name, rows in images.items():
        patients = {data.patients[row] for row in rows.nonzero().flatten().tolist()}
        if 0 < len(patients) < site.minimum_patients:
            small.add(name)
    return frozenset(small)


@dataclass
class Suppression:
    """Suppresses values of too few patients in a site's replies."""

    site: Site
    _small: dict[str, frozenset[str]] = field(default_factory=dict)  # by split

    def suppressed(self, reply: Message, phase: Phase, plan: Plan) -> Message:
        """A new reply without these values; suppressed tensors keep their shapes and are zero."""
        splits = small_splits(self.site)
        specs = phase.replied(plan)
        sent = Message({}, dict(reply.meta))
        for entry, state in reply.states.items():
            spec = specs.get(entry)
            if spec is not None and (spec.measured in splits or self._small_of(spec)):
                state = {name: self._tensor(tensor, spec, splits) for name, tensor in state.items()}
            sent.states[entry] = state
        suppress_splits(sent, phase.meta, splits)
        for item in phase.meta:
            small = self._small_of(item)
            if item in sent and small:
                sent[item] = self._without_classes(sent[item], item.per_class, small)
        return sent

    def _small_of(self, spec: TensorSpec | MetaSpec) -> frozenset[str]:
        """The classes whose values are suppressed for this spec."""
        if not spec.per_class:
            return frozenset()
        split = spec.measured or "train"
        if split not in self._small:
            self._small[split] = small_classes(self.site, split)
        return self._small[split]

    def _tensor(self, tensor: Tensor, spec: TensorSpec, splits: tuple[str, ...]) -> Tensor:
        rows = self._rows(len(tensor), self._small_of(spec)) if tensor.dim() else None
        integers = not tensor.is_floating_point() and tensor.dtype != torch.bool
        counts = spec.per_class == "counts" or integers
        if rows is None or counts or spec.measured in splits:
            return torch.zeros_like(tensor)
        filtered = tensor.clone()
        filtered[rows] = 0
        return filtered

    def _rows(self, length: int, small: frozenset[str]) -> list[int] | None:
        """The indices of small classes in an axis of this length; None if it is not an axis of
        classes.
        """
        names = list(chain(*class_names(self.site.task)))
        for axis in (names, list(self.site.task.labels)):
            if len(axis) == length:
                return [index for index, name in enumerate(axis) if name in small]
        return None

    def _without_classes(self, value: Any, kind: PerClass, small: frozenset[str]) -> Any:
        if kind == "counts":
            return _without_numbers(value)
        if isinstance(value, dict):
            names = set(chain(*class_names(self.site.task)))
            table = {}
            for name, inner in value.items():
                if name in small:
                    continue
                if name not in names:
                    inner = self._without_classes(inner, kind, small)
                table[name] = inner
            return table
        rows = self._rows(len(value), small) if isinstance(value, list) else None
        if rows is None:
            return _without_numbers(value)
        filtered = list(value)
        for row in rows:
            filtered[row] = _without_numbers(filtered[row])
        return filtered


def suppress_splits(message: Message, declared: Items, splits: tuple[str, ...]) -> None:
    """Remove the numbers of every item that was measured on one of these splits, in place."""
    for item in declared:
        if item.measured in splits and item in message:
            message[item] = _without_numbers(message[item])


def _without_numbers(value: Any) -> Any:
    """JSON values without their numbers: tables keep their names, lists become empty, any other
    value becomes None, also NaN, which one image can cause.
    """
    if isinstance(value, dict):
        return {name: _without_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return []
    return None
