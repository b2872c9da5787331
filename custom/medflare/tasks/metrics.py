"""Metrics per patient from probabilities; an undefined one is None with its reason, never 0 or 1.
The table is in `metrics_table`.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medflare.tasks.annotation import Annotation
from medflare.tasks.class_metrics import of_outputs
from medflare.tasks.classes import Cases
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics_table import known_metric, metric_table

# A Tensor (N, ...) of images of one size, or a sequence of Tensors (...) of different sizes.
Images = Any
# Distance of neighboring pixels or voxels along every axis.
# Of a sheared volume the cosines between its axes follow, see `data.geometry.Grid.cell`.
Spacing = tuple[float, ...]
Portion = tuple[Tensor, Tensor, Spacing | None]
_COUNTS = "counts"  # entry of `MetricParts.parts` beside the metrics of masks


@dataclass
class Scores:
    """Metrics of one model on one split; (patient, class) pairs are left out where a metric is
    undefined.
    """

    values: dict[str, float | None]  # None where it is undefined
    undefined: dict[str, str] = field(default_factory=dict)  # metric -> why it is None
    # Metric -> pairs; Dice and IoU are 0/0 where neither truth nor prediction has a pixel, a
    # distance is undefined where no image has pixels in both.
    left_out: dict[str, int] = field(default_factory=dict)
    # Predictions of single patients; empty where nothing could be scored.
    cases: Cases = field(default_factory=Cases, repr=False, compare=False)

    def set(self, metric: str, value: float) -> None:
        """Record a value; for NaN, None and the reason."""
        self.values[metric] = value
        if math.isnan(value):
            self.values[metric] = None
            self.undefined[metric] = metric_table()[metric].undefined


@dataclass(frozen=True)
class MetricParts:
    """What metrics are computed from, image by image: counts and distances of masks, probabilities
    of classes. It holds no mask.
    """

    task: TaskConfig
    metrics: Sequence[str]  # names, of `TaskConfig.metrics`
    parts: dict[str, Tensor]  # name -> a row (N, ...) for every image
    finite: Tensor  # bool (N,), whether the model's output is finite
    structures: tuple[str, ...] = ()  # names of the measured structures; empty for classification

    def of(self, rows: Sequence[int] | Tensor) -> "MetricParts":
        """The parts of some of the images, in this order."""
        index = torch.as_tensor(rows, dtype=torch.long)
        parts = {name: part[index] for name, part in self.parts.items()}
        return replace(self, parts=parts, finite=self.finite[index])

    def constant_outputs(self) -> tuple[str, ...]:
        """What the model predicts for every image although the truth differs in some; empty if its
        output varies.

        Returns:
            Classification: the class (multilabel: all labels that every image is given, or "no
                label"), of at least two images.
            Segmentation: of every structure "no pixel of NAME", where some image has it, or "all
                pixels as NAME".

        Examples:
            >>> from types import SimpleNamespace
            >>> task = SimpleNamespace(kind="classification", target="multiclass",
            ...                        labels=("mild", "severe"), classes=("mild", "severe"))
            >>> grades = {"probabilities": torch.tensor([[0.4, 0.6], [0.3, 0.7]]),
            ...           "targets": torch.tensor([0, 1])}
            >>> MetricParts(task, (), grades, torch.ones(2, dtype=torch.bool)).constant_outputs()
            ('severe',)
        """
        if not len(self.finite) or not self.finite.all():
            return ()
        if self.task.kind == "segmentation":
            return self._constant_masks()
        probabilities = self.parts["probabilities"]
        truth = self.parts["targets"].reshape(len(probabilities), -1)
        if self.task.target == "multiclass":
            predicted = probabilities.argmax(dim=1, keepdim=True)
        else:
            predicted = probabilities > 0.5
            truth = truth > 0.5
        varies = bool((predicted != predicted[0]).any())
        if len(predicted) < 2 or varies or bool((predicted == truth).all()):
            return ()
        if self.task.target == "multilabel":
            columns = predicted[0].nonzero().flatten().tolist()
            return (", ".join(self.task.labels[column] for column in columns) or "no label",)
        return (self.task.classes[int(predicted[0, 0])],)

    def _constant_masks(self) -> tuple[str, ...]:
        counts = self.parts[_COUNTS].sum(dim=0)
        never = []
        everywhere = []
        for name, (tp, fp, tn, fn) in zip(self.structures, counts.tolist(), strict=True):
            if tp + fp == 0 and fn > 0:
                never.append(f"no pixel of {name}")
            if tn + fn == 0 and fp > 0:
                everywhere.append(f"all pixels as {name}")
        return (*never, *everywhere)

    def scores(self, patients: Sequence[str]) -> Scores:
        """The metrics; `patients` has the patient of every image."""
        if not len(patients):
            return self._all_undefined("the split holds no image")
        if not self.finite.all():
            return self._all_undefined("the model's output holds NaN or infinite values")
        if self.task.kind == "segmentation":
            return self._of_masks(patients)
        probabilities = self.parts["probabilities"]
        targets = self.parts["targets"]
        scores = Scores({}, cases=Cases(tuple(patients), {}, probabilities, targets))
        outputs = probabilities.numpy(), targets.numpy(), np.ones(len(targets))
        for metric in self.metrics:
            scores.set(metric, float(of_outputs(metric_table()[metric].compute, *outputs)))
        return scores

    def _of_masks(self, patients: Sequence[str]) -> Scores:
        """Counts are summed, distances averaged over a patient's images; a metric is the mean of
        its patients' means over defined classes.
        """
        numbers = {patient: number for number, patient in enumerate(dict.fromkeys(patients))}
        groups = torch.tensor([numbers[patient] for patient in patients])

        def by_patient(values: Tensor) -> Tensor:
            """The sum over each patient's images, float64 (patients, ...)."""
            sums = torch.zeros(len(numbers), *values.shape[1:], dtype=torch.float64)
            return sums.index_add_(0, groups, values.double())

        counts = by_patient(self.parts[_COUNTS])
        per_patient: dict[str, Tensor] = {}
        by_structure: dict[str, dict[str, Tensor]] = {name: {} for name in self.structures}
        shown = counts[..., [0, 3]].sum(dim=-1) > 0  # true positives or false negatives
        cases = Cases(tuple(numbers), per_patient, structures=by_structure, shown=shown)
        scores = Scores({}, cases=cases)
        for metric in self.metrics:
            if metric_table()[metric].source == "counts":
                values = metric_table()[metric].compute(counts)
            else:
                part = self.parts[metric]
                values = by_patient(part.nan_to_num()) / by_patient(~part.isnan())
            scores.left_out[metric] = int(values.isnan().sum())
            per_patient[metric] = values.nanmean(dim=1)
            for column, name in enumerate(self.structures):
                by_structure[name][metric] = values[:, column]
            scores.set(metric, float(per_patient[metric].nanmean()))
        return scores

    def _all_undefined(self, reason: str) -> Scores:
        return Scores(dict.fromkeys(self.metrics), dict.fromkeys(self.metrics, reason))


def measure(
    portions: Iterable[Portion],
    task: TaskConfig,
    metrics: Sequence[str],
    annotation: Annotation | None = None,
) -> MetricParts:
    """What the named metrics are computed from; only one portion of images is in memory.

    Args:
        portions: (probabilities (B, ...), targets (B, ...), spacing) in the order of the images;
            one image each where there is a spacing.
        annotation: the structures that count; None: all of the task.

    Raises:
        ConfigError: an unknown metric.
    """
    annotation = annotation or Annotation(task)
    table = {metric: known_metric(metric, f"task {task.name}") for metric in metrics}
    is_segmentation = task.kind == "segmentation"
    of_masks = [metric for metric in metrics if table[metric].source == "masks"]
    parts = defaultdict(list)
    finite = [torch.ones(0, dtype=torch.bool)]
    for probabilities, targets, spacing in portions:
        finite.append(torch.isfinite(probabilities).flatten(1).all(dim=1).cpu())
        if is_segmentation:
            predicted = annotation.masks(foreground(probabilities.cpu(), task))
            truth = annotation.masks(structures(targets, task))
            portion = {_COUNTS: pixel_counts(predicted, truth)}
            for metric in of_masks:
                portion[metric] = table[metric].compute(predicted, truth, spacing, task)
        else:
            portion = {"probabilities": probabilities.double().cpu(), "targets": targets.cpu()}
        for name, part in portion.items():
            parts[name].append(part)
    joined = {name: torch.cat(of_portions) for name, of_portions in parts.items()}
    names = annotation.names if is_segmentation else ()
    return MetricParts(task, metrics, joined, torch.cat(finite), names)


def pixel_counts(predicted: Tensor, truth: Tensor) -> Tensor:
    """Pixels of every image and class, int64 (N, C, 4): true positive, false positive, true
    negative, false negative; of masks, bool (N, C, ...). MONAI's are float32, which is exact up to
    2**24 pixels.
    """
    tp = (predicted & truth).flatten(2).sum(dim=2)
    fp = predicted.flatten(2).sum(dim=2) - tp
    fn = truth.flatten(2).sum(dim=2) - tp
    tn = math.prod(truth.shape[2:]) - tp - fp - fn
    return torch.stack([tp, fp, tn, fn], dim=2)


def foreground(probabilities: Tensor, task: TaskConfig) -> Tensor:
    """Predicted masks of the foreground classes, bool (N, C, ...), from probabilities (N, outputs,
    ...).

    Binary and multilabel: probability above 0.5. Multiclass: the most probable class, without class
    0, the background.

    Examples:
        >>> from types import SimpleNamespace
        >>> foreground(torch.tensor([[[[0.2, 0.5, 0.7]]]]), SimpleNamespace(target="binary"))
        tensor([[[[False, False,  True]]]])
    """
    if task.target == "multiclass":
        return structures(probabilities.argmax(dim=1), task)
    return probabilities > 0.5


def structures(targets: Tensor, task: TaskConfig) -> Tensor:
    """True masks of the foreground classes, bool (N, C, ...), from targets (N, ...), multilabel
    (N, C, ...).

    Examples:
        >>> from types import SimpleNamespace
        >>> task = SimpleNamespace(target="multiclass", labels=("background", "disc", "cup"))
        >>> structures(torch.tensor([[[0, 1, 2]]]), task)
        tensor([[[[False,  True, False]],
                 [[False, False,  True]]]])
    """
    if task.target == "multilabel":
        return targets > 0.5
    if task.target == "binary":
        return targets[:, None] > 0.5
    classes = torch.arange(1, len(task.labels), device=targets.device)
    return targets[:, None] == classes.view(-1, *[1] * (targets.ndim - 1))
