"""What a site keeps back of its own reply: numbers that were measured on fewer patients than it lets them be told of.

Small-cell suppression. A method declares what its numbers describe (`TensorSpec` and `MetaSpec`: `measured`, `per_class`); the
participant of every engine suppresses it here.
"""

import math
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor

from medflare.core.manifest import MetaSpec, PerClass, Phase, TensorSpec
from medflare.core.message import Message
from medflare.data.targets import counts_by_image
from medflare.tasks.classes import Cases, class_names, patients_of_classes
from medflare.tasks.config import TaskConfig
from medflare.training.site import Site

SPLITS: Final = ("train", "validation", "test")
_OF_TEST: Final = ("constant_output", "at_chance", "reverted")


def too_few(site: Site, minimum: int) -> tuple[str, ...]:
    """The splits with patients, but fewer than a site's minimum.

    Args:
        site: whose patients are counted, not its images.
        minimum: "minimum_patients" of its own settings; 0 and 1 keep nothing back.
    """
    patients = {split: len(set(site.data.split(split).patients)) for split in SPLITS}
    return tuple(split for split in SPLITS if 0 < patients[split] < minimum)


def tells_of_few(cases: Cases, task: TaskConfig, minimum: int) -> bool:
    """Whether confusion counts and curves would tell of few patients: a class, or all others together, has some, but too few.

    All of them stay then: what one class keeps back could be reckoned from the others and the accuracy.
    """
    if cases.targets is None:
        return False
    counts = patients_of_classes(cases.patients, cases.targets.numpy(), task.target, len(task.labels))
    return any(0 < patients < minimum for patients in counts)


def rare_classes(site: Site, minimum: int) -> bool:
    """Whether counts of the training images by class would tell of few patients: a class is shown by some, but too few.

    All counts stay then, as in `tells_of_few`.
    """
    return bool(small_classes(site, "train", minimum))


def small_classes(site: Site, split: str, minimum: int) -> frozenset[str]:
    """The classes, of those that `tasks.classes.class_names` names, that some patients show, but fewer than a site's minimum.

    Every patient of a segmentation task shows the negative class of a multilabel task: its images have background.
    """
    if minimum < 2:
        return frozenset()
    data, task = site.data.split(split), site.task
    shown = counts_by_image(data.targets, task) > 0
    images = dict(zip(task.classes, shown.T, strict=True))
    if task.target == "multilabel":
        everywhere = task.kind == "segmentation"
        images |= {f"not {label}": torch.ones_like(rows) if everywhere else ~rows for label, rows in images.items()}
    patients = {name: {data.patients[row] for row in rows.nonzero().flatten().tolist()} for name, rows in images.items()}
    return frozenset(name for name, names in patients.items() if 0 < len(names) < minimum)


class Suppression:
    """What of a site's replies speaks of too few patients.

    Args:
        site: whose patients are counted.
        minimum: "minimum_patients" of its own settings; 0 and 1 suppress nothing.
    """

    def __init__(self, site: Site, minimum: int):
        self.site, self.minimum = site, minimum
        self._small: dict[str, frozenset[str]] = {}

    def suppressed(self, reply: Message, phase: Phase) -> Message:
        """The reply without what speaks of too few patients; tensors keep their shapes and are zero there.

        Args:
            reply: its tensors are left as they are: the method may remember them.
            phase: declares what entries and meta speak of.
        """
        splits = too_few(self.site, self.minimum)
        entries = {str(entry): entry for entry in phase.reply if entry.measured in splits or self._small_of(entry)}
        states = {
            name: state if name not in entries else {key: self._tensor(tensor, entries[name], splits) for key, tensor in state.items()}
            for name, state in reply.states.items()
        }
        meta = dict(reply.meta)
        withhold(meta, phase.reply_meta, splits)
        for item in phase.reply_meta:
            if item in meta and (small := self._small_of(item)):
                meta[item] = self._without(meta[item], item.per_class, small)
        return Message(states, meta)

    def _small_of(self, declared: TensorSpec | MetaSpec) -> frozenset[str]:
        """The classes whose numbers are suppressed."""
        if not declared.per_class:
            return frozenset()
        split = declared.measured or "train"
        if split not in self._small:
            self._small[split] = small_classes(self.site, split, self.minimum)
        return self._small[split]

    def _tensor(self, tensor: Tensor, entry: TensorSpec, splits: tuple[str, ...]) -> Tensor:
        rows = self._rows(len(tensor), self._small_of(entry)) if tensor.dim() else None
        counts = entry.per_class == "counts" or not (tensor.is_floating_point() or tensor.dtype == torch.bool)
        if rows is None or counts or entry.measured in splits:
            return torch.zeros_like(tensor)
        kept = tensor.clone()
        kept[rows] = 0
        return kept

    def _rows(self, length: int, small: frozenset[str]) -> list[int] | None:
        """The places of the classes in an axis of this length; None where it is not an axis of classes."""
        names = [name for group in class_names(self.site.task) for name in group]
        for axis in (names, list(self.site.task.labels)):
            if len(axis) == length:
                return [place for place, name in enumerate(axis) if name in small]
        return None

    def _without(self, value: Any, kind: PerClass, small: frozenset[str]) -> Any:
        if kind == "counts":
            return _without_numbers(value)
        if isinstance(value, dict):
            names = {name for group in class_names(self.site.task) for name in group}
            return {
                name: inner if name in names else self._without(inner, kind, small) for name, inner in value.items() if name not in small
            }
        rows = self._rows(len(value), small) if isinstance(value, list) else None
        if rows is None:
            return _without_numbers(value)
        return [_without_numbers(inner) if row in rows else inner for row, inner in enumerate(value)]


def withhold(meta: dict[str, Any], declared: Iterable[MetaSpec], splits: tuple[str, ...]) -> None:
    """Take the numbers out of every item that was measured on one of these splits, in place."""
    for item in declared:
        if item.measured in splits and item in meta:
            meta[item] = _without_numbers(meta[item])


def withhold_doubts(events: list[dict[str, Any]], splits: tuple[str, ...]) -> None:
    """Take out the events that tell how the deployed model does on test patients, in place, where these are too few to be told of."""
    if "test" in splits:
        events[:] = [event for event in events if event["kind"] not in _OF_TEST]


def _without_numbers(value: Any) -> Any:
    """Tables keep their names, lists become empty. What is not finite tells of a failure and of no patient, and stays."""
    if isinstance(value, dict):
        return {name: _without_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return []
    return value if isinstance(value, float) and not math.isfinite(value) else None
