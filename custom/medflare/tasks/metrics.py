"""Metrics per patient from probabilities; what is undefined is None with its reason, never 0 or 1."""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from medflare.core.packages import installed
from medflare.core.settings import unknown
from medflare.tasks.annotation import Annotation
from medflare.tasks.cases import Cases
from medflare.tasks.config import TaskConfig

Images: TypeAlias = Any  # a Tensor (N, ...) of images of one size, or a sequence of Tensors (...) of sizes of their own
Spacing: TypeAlias = tuple[float, ...]
Portion: TypeAlias = tuple[Tensor, Tensor, Spacing | None]


@dataclass
class Scores:
    """Metrics of one model on one split.

    Attributes:
        values: metric -> value; None where it is undefined.
        undefined: metric -> why it is None.
        left_out: (patient, class) pairs whose Dice and IoU are 0/0: neither truth nor prediction has a pixel.
        hd95_left_out: (patient, class) pairs without an image in which truth and prediction both have pixels.
        cases: what the values are made of, patient by patient; none where nothing could be scored.
    """

    values: dict[str, float | None]
    undefined: dict[str, str] = field(default_factory=dict)
    left_out: int = 0
    hd95_left_out: int = 0
    cases: Cases = field(default_factory=Cases, repr=False, compare=False)

    def set(self, metric: str, value: float, reason: str) -> None:
        """Record a value, or None with the reason where it is NaN.

        Args:
            value: NaN where it is undefined.
            reason: why it would be.

        Examples:
            >>> scores = Scores({})
            >>> scores.set("dice", math.nan, "no foreground")
            >>> scores
            Scores(values={'dice': None}, undefined={'dice': 'no foreground'}, left_out=0, hd95_left_out=0)
        """
        self.values[metric] = None if math.isnan(value) else value
        if math.isnan(value):
            self.undefined[metric] = reason


@dataclass(frozen=True)
class Measured:
    """What metrics are made of, image by image: counts and distances of masks, probabilities of classes. It holds no mask.

    Attributes:
        task: what the images are for.
        metrics: names, of `TaskConfig.metrics`.
        found: parts of the metrics by name, a row (N, ...) for every image.
        finite: bool (N,), whether the model answered with numbers.
    """

    task: TaskConfig
    metrics: Sequence[str]
    found: dict[str, Tensor]
    finite: Tensor

    def of(self, rows: Sequence[int] | Tensor) -> "Measured":
        """Some of the images, in this order."""
        index = torch.as_tensor(rows, dtype=torch.long)
        return replace(self, found={name: part[index] for name, part in self.found.items()}, finite=self.finite[index])

    def constant_outputs(self, measured: Sequence[str] = ()) -> tuple[str, ...]:
        """What the model says of every image alike, though the truth is another in some; empty where it tells images apart.

        Args:
            measured: structures that the parts are of, where they are not all of the task's.

        Returns:
            Classification: the class (multilabel: all labels that every image is given, or "no label"), of at least two images.
            Segmentation: of every structure "no pixel of NAME", where it is true of some image, or "all pixels as NAME".

        Examples:
            >>> from types import SimpleNamespace
            >>> task = SimpleNamespace(kind="classification", target="multiclass", labels=("mild", "severe"), classes=("mild", "severe"))
            >>> grades = {"probabilities": torch.tensor([[0.4, 0.6], [0.3, 0.7]]), "targets": torch.tensor([0, 1])}
            >>> Measured(task, (), grades, torch.ones(2, dtype=torch.bool)).constant_outputs()
            ('severe',)
        """
        if not len(self.finite) or not self.finite.all():
            return ()
        if self.task.kind == "segmentation":
            structures = self.task.labels[1:] if self.task.target == "multiclass" else self.task.labels
            return _constant_structures(self.found[_OVERLAP], measured or structures)
        return _constant_class(self.found["probabilities"], self.found["targets"], self.task)

    def scores(self, patients: Sequence[str]) -> Scores:
        """The metrics.

        Args:
            patients: patient of every image.
        """
        if not len(patients):
            return Scores(dict.fromkeys(self.metrics), dict.fromkeys(self.metrics, "the split holds no image"))
        if not self.finite.all():
            return Scores(dict.fromkeys(self.metrics), dict.fromkeys(self.metrics, "the model's output holds NaN or infinite values"))
        if self.task.kind == "segmentation":
            return _score_segmentation(dict(self.found), patients, self.metrics)
        return _score_classification(self.found["probabilities"], self.found["targets"], patients, self.task, self.metrics)


def measure(portions: Iterable[Portion], task: TaskConfig, metrics: Sequence[str], annotation: Annotation | None = None) -> Measured:
    """What the named metrics are made of, of probabilities and targets that come portion by portion, each of which is then forgotten.

    Args:
        portions: (probabilities (B, ...), targets (B, ...), spacing) in the order of the images; one image each where there is a spacing.
        annotation: the structures that count; None: all of the task.
    """
    counted = annotation or Annotation(task)
    measured: list[dict[str, Tensor]] = []
    finite = [torch.ones(0, dtype=torch.bool)]
    for probabilities, targets, spacing in portions:
        finite.append(torch.isfinite(probabilities).flatten(1).all(dim=1).cpu())
        if task.kind == "segmentation":
            measured.append(_overlaps_and_distances(probabilities.cpu(), targets, spacing, counted, metrics))
        else:
            measured.append({"probabilities": probabilities.double().cpu(), "targets": targets.cpu()})
    found = {name: torch.cat([part[name] for part in measured]) for name in (measured[0] if measured else ())}
    return Measured(task, metrics, found, torch.cat(finite))


def foreground(probabilities: Tensor, task: TaskConfig) -> Tensor:
    """Predicted masks of the foreground classes, bool (N, C, ...).

    A binary or multilabel structure is where its probability exceeds one half; multiclass takes the most probable class and
    leaves class 0, the background, out.

    Args:
        probabilities: (N, outputs, ...).
        task: gives the target.

    Examples:
        >>> from types import SimpleNamespace
        >>> foreground(torch.tensor([[[[0.2, 0.5, 0.7]]]]), SimpleNamespace(target="binary"))
        tensor([[[[False, False,  True]]]])
    """
    return structures(probabilities.argmax(dim=1), task) if task.target == "multiclass" else probabilities > 0.5


def structures(targets: Tensor, task: TaskConfig) -> Tensor:
    """True masks of the foreground classes, bool (N, C, ...), from targets as in `data.splits.Split`.

    Args:
        targets: (N, ...), multilabel (N, C, ...).
        task: gives target and labels.

    Examples:
        >>> from types import SimpleNamespace
        >>> structures(torch.tensor([[[0, 1, 2]]]), SimpleNamespace(target="multiclass", labels=("background", "disc", "cup")))
        tensor([[[[False,  True, False]],
                 [[False, False,  True]]]])
    """
    if task.target == "multiclass":
        return targets[:, None] == torch.arange(1, len(task.labels), device=targets.device).view(-1, *[1] * (targets.ndim - 1))
    return (targets[:, None] if task.target == "binary" else targets) > 0.5


def overlap_counts(predicted: Tensor, truth: Tensor) -> Tensor:
    """Pixels of every image and class: true positive, false positive, true negative, false negative, float (N, C, 4).

    Args:
        predicted: bool (N, C, ...).
        truth: bool (N, C, ...).
    """
    from monai.metrics.confusion_matrix import get_confusion_matrix

    return get_confusion_matrix(predicted.float(), truth.float(), include_background=True)


def pooled_overlap(counts: Tensor, groups: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Dice and IoU per patient and class, over all pixels of a patient's images together.

    Args:
        counts: (N, C, 4), see `overlap_counts`.
        groups: long (N,), the patient of every image, 0 to number - 1.

    Returns:
        float64 (number, C) each; NaN where truth and prediction are both empty (0/0).

    Examples:
        >>> predicted, truth = torch.tensor([[[[True, True, False]]]]), torch.tensor([[[[True, False, False]]]])
        >>> pooled_overlap(overlap_counts(predicted, truth), torch.tensor([0]), 1)  # 2/3 and 1/2
        (tensor([[0.6667]], dtype=torch.float64), tensor([[0.5000]], dtype=torch.float64))
        >>> pooled_overlap(overlap_counts(predicted & False, truth & False), torch.tensor([0]), 1)[0]
        tensor([[nan]], dtype=torch.float64)
    """
    pooled = torch.zeros(number, *counts.shape[1:], dtype=torch.float64).index_add_(0, groups.cpu(), counts.cpu().double())
    hit, wrong = pooled[..., 0], pooled[..., 1] + pooled[..., 3]
    return 2 * hit / (2 * hit + wrong), hit / (hit + wrong)


def boundary_distance(predicted: Tensor, truth: Tensor, spacing: Spacing | None = None) -> Tensor:
    """95th percentile Hausdorff distance of every image and class, float64 (N, C).

    The larger of the two directed 95th percentiles; NaN where truth and prediction do not both have pixels, since there is no
    distance. The parts of MONAI's `compute_hausdorff_distance`, which needs SciPy, without its slow way of cropping.

    Args:
        predicted: bool (N, C, ...).
        truth: bool (N, C, ...).
        spacing: length of a pixel's or voxel's sides; None measures in pixels of the network's grid.

    Examples:
        >>> predicted, truth = torch.tensor([[[[1, 0, 0, 0]]]]) > 0, torch.tensor([[[[0, 0, 0, 1]]]]) > 0
        >>> boundary_distance(predicted, truth), boundary_distance(predicted, truth, (1.0, 0.5))
        (tensor([[3.]], dtype=torch.float64), tensor([[1.5000]], dtype=torch.float64))
    """
    from monai.metrics.utils import get_mask_edges, get_surface_distance
    from monai.transforms.utils import generate_spatial_bounding_box

    distances = torch.full(predicted.shape[:2], math.nan, dtype=torch.float64)
    images, classes = torch.nonzero(predicted.flatten(2).any(2) & truth.flatten(2).any(2), as_tuple=True)
    for place in zip(images.tolist(), classes.tolist(), strict=True):
        masks = [part[place].cpu() for part in (predicted, truth)]
        box = tuple(map(slice, *generate_spatial_bounding_box((masks[0] | masks[1])[None])))
        one, other = get_mask_edges(masks[0][box], masks[1][box], crop=False)
        directed = [get_surface_distance(*edges, spacing=spacing) for edges in ((one, other), (other, one))]
        distances[place] = max(torch.quantile(values, 0.95) for values in directed)
    return distances


def surface_dice(predicted: Tensor, truth: Tensor, spacing: Spacing, tolerance: float) -> Tensor:
    """Share of the surfaces of truth and prediction that lie within `tolerance` of each other, float64 (N, C).

    NaN where neither has a voxel, 0 where one of them has none.

    Args:
        predicted: bool (N, C, X, Y, Z).
        truth: bool (N, C, X, Y, Z).
        spacing: millimetres between voxels.
        tolerance: in millimetres.

    Examples:
        >>> predicted, truth = torch.zeros(2, 1, 1, 4, 4, 4, dtype=torch.bool)
        >>> predicted[..., 1, 1, 1], truth[..., 1, 1, 2] = True, True
        >>> [surface_dice(predicted, truth, (1.0, 1.0, 3.0), tolerance).item() for tolerance in (2.0, 3.0)]
        [0.0, 1.0]
    """
    from monai.metrics.surface_dice import compute_surface_dice

    masks = [part.cpu() for part in (predicted, truth)]
    thresholds = [tolerance] * predicted.shape[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MONAI warns of every empty mask, which is told as undefined here
        found = compute_surface_dice(*masks, class_thresholds=thresholds, include_background=True, spacing=spacing)
    return found.double()


def by_patient(values: Tensor, groups: Tensor, number: int) -> Tensor:
    """Mean over each patient's images, float64 (number, C); NaN where a patient has none that is defined.

    Args:
        values: float64 (N, C); NaN where undefined.
        groups: long (N,), the patient of every image, 0 to number - 1.

    Examples:
        >>> values = torch.tensor([[1.0], [math.nan], [3.0]], dtype=torch.float64)
        >>> by_patient(values, torch.tensor([0, 1, 0]), 2)
        tensor([[2.],
                [nan]], dtype=torch.float64)
    """
    total = torch.zeros(number, values.shape[1], dtype=torch.float64)
    count = total.index_add(0, groups.cpu(), (~values.isnan()).double())
    return total.index_add(0, groups.cpu(), values.nan_to_num()) / count


def patient_mean(values: Tensor) -> float:
    """Mean over each patient's defined classes, then over patients with any; NaN where nothing is defined.

    Args:
        values: (patients, C); NaN where undefined.

    Examples:
        >>> patient_mean(torch.tensor([[1.0, 0.0], [math.nan, 0.75], [math.nan, math.nan]]))
        0.625
    """
    per_patient = values.nanmean(dim=1)
    return float(per_patient.nanmean())


def _overlaps_and_distances(
    probabilities: Tensor, targets: Tensor, spacing: Spacing | None, annotation: Annotation, metrics: Sequence[str]
) -> dict[str, Tensor]:
    """What the metrics of masks are made of, for every image and class that was annotated."""
    task = annotation.task
    predicted, truth = (annotation.masks(masks) for masks in (foreground(probabilities, task), structures(targets, task)))
    surfaces = [metric for metric in metrics if metric not in ("dice", "iou")] if installed("scipy") else []
    distances = {metric: _surface(metric, predicted, truth, spacing, task) for metric in surfaces}
    return {_OVERLAP: overlap_counts(predicted, truth), **distances}


def _constant_structures(counts: Tensor, names: Sequence[str]) -> tuple[str, ...]:
    """See `Measured.constant_outputs`; counts (N, C, 4) as of `overlap_counts`, of C names."""
    hit, false, right, missed = counts.sum(dim=0).unbind(dim=-1)
    none = [f"no pixel of {name}" for name, lost in zip(names, (hit + false == 0) & (missed > 0), strict=True) if lost]
    return (*none, *(f"all pixels as {name}" for name, full in zip(names, (right + missed == 0) & (false > 0), strict=True) if full))


def _constant_class(probabilities: Tensor, targets: Tensor, task: TaskConfig) -> tuple[str, ...]:
    """See `Measured.constant_outputs`; probabilities (N, outputs)."""
    if task.target == "multiclass":
        chosen, truth = probabilities.argmax(dim=1, keepdim=True), targets.reshape(-1, 1)
    else:
        chosen, truth = probabilities > 0.5, targets.reshape(len(targets), -1) > 0.5
    if len(chosen) < 2 or bool((chosen != chosen[0]).any()) or bool((chosen == truth).all()):
        return ()
    if task.target == "multilabel":
        return (", ".join(name for name, shown in zip(task.labels, chosen[0], strict=True) if shown) or "no label",)
    return (task.classes[int(chosen[0, 0])],)


def _score_segmentation(measured: dict[str, Tensor], patients: Sequence[str], metrics: Sequence[str]) -> Scores:
    names = {patient: number for number, patient in enumerate(dict.fromkeys(patients))}
    groups = torch.tensor([names[patient] for patient in patients])
    dice, iou = pooled_overlap(measured.pop(_OVERLAP), groups, len(names))
    per_patient: dict[str, Tensor] = {}
    scores = Scores({}, left_out=int(dice.isnan().sum()), cases=Cases(tuple(names), per_patient))
    for metric, values in (("dice", dice), ("iou", iou)):
        if metric in metrics:
            per_patient[metric] = values.nanmean(dim=1)
            scores.set(metric, patient_mean(values), "no image has a foreground pixel, true or predicted (0/0)")
    for metric, parts in measured.items():
        values = by_patient(parts, groups, len(names))
        if metric != "surface_dice":
            scores.hd95_left_out = int(values.isnan().sum())
        per_patient[metric] = values.nanmean(dim=1)
        scores.set(metric, patient_mean(values), _UNDEFINED[metric])
    for metric in metrics:
        if metric not in scores.values:
            scores.set(metric, math.nan, "SciPy, with which MONAI measures it, is not installed at this site")
    return scores


def _surface(metric: str, predicted: Tensor, truth: Tensor, spacing: Spacing | None, task: TaskConfig) -> Tensor:
    """A metric of surfaces; NaN where it is in millimetres and nobody knows them.

    Raises:
        ConfigError: nobody computes a metric of this name.
    """
    if metric not in _SURFACES:
        raise unknown("metric", metric, ("dice", "iou", *_SURFACES), f"task {task.name}")
    if metric != "hd95" and spacing is None:
        return torch.full(predicted.shape[:2], math.nan, dtype=torch.float64)
    return _SURFACES[metric](predicted, truth, spacing, task)


_SURFACES: Final[dict[str, Callable[[Tensor, Tensor, Any, TaskConfig], Tensor]]] = {
    "hd95": lambda predicted, truth, spacing, task: boundary_distance(predicted, truth),
    "hd95_mm": lambda predicted, truth, spacing, task: boundary_distance(predicted, truth, spacing),
    "surface_dice": lambda predicted, truth, spacing, task: surface_dice(predicted, truth, spacing, task.surface_tolerance),
}
_OVERLAP: Final = "overlap"  # beside the metrics of surfaces
_NOT_TOGETHER: Final = "no image has true and predicted foreground together"
_UNDEFINED: Final = {
    "hd95": _NOT_TOGETHER,
    "hd95_mm": f"{_NOT_TOGETHER}, or no file says how many millimetres a voxel has",
    "surface_dice": "no image has a foreground voxel, true or predicted, or no file says how many millimetres a voxel has",
    "f1_macro": "no label occurs or is predicted (0/0)",
}


def _score_classification(
    probabilities: Tensor, targets: Tensor, patients: Sequence[str], task: TaskConfig, metrics: Sequence[str]
) -> Scores:
    scores = Scores({}, cases=Cases(tuple(patients), {}, probabilities, targets))
    for metric in metrics:
        if task.target == "multilabel":
            columns = [_of_classes(metric, _two_classes(probabilities[:, [c]]), targets[:, c], True) for c in range(len(task.labels))]
            value = float(torch.tensor(columns, dtype=torch.float64).nanmean())
        else:
            value = _of_classes(metric, _two_classes(probabilities) if task.target == "binary" else probabilities, targets)
        scores.set(metric, value, _UNDEFINED.get(metric, "the true labels hold a single class"))
    return scores


def _two_classes(positive: Tensor) -> Tensor:
    return torch.cat([1 - positive, positive], dim=1)


def _of_classes(metric: str, probabilities: Tensor, targets: Tensor, label: bool = False) -> float:
    """One metric of exclusive classes by MONAI, from probabilities (N, C) and numbers of classes (N,).

    Classes that neither occur nor are predicted do not count in macro-F1, absent ones not in balanced accuracy; AUC is one
    class against the rest, macro-averaged over the classes that occur, NaN where only one does. Of a `label`, yes or no, the F1 is
    that of yes (scikit-learn's macro average of multilabel targets), NaN where it neither occurs nor is predicted.
    """
    from monai.metrics.confusion_matrix import compute_confusion_matrix_metric, get_confusion_matrix
    from monai.metrics.rocauc import compute_roc_auc

    classes = probabilities.shape[1]
    truth, chosen = F.one_hot(targets.long(), classes), F.one_hot(probabilities.argmax(dim=1), classes)
    if metric == "accuracy":
        return int((truth * chosen).sum()) / len(targets)
    if metric == "auc_macro":
        areas = [compute_roc_auc(probabilities[:, c], truth[:, c]) for c in range(classes) if 0 < truth[:, c].sum() < len(targets)]
        return float(torch.tensor(areas, dtype=torch.float64).mean())
    counts = get_confusion_matrix(chosen, truth).sum(dim=0).double()  # (C, [TP, FP, TN, FN])
    counts = counts[1:] if label and metric == "f1_macro" else counts
    names = {"f1_macro": "f1 score", "balanced_accuracy": "sensitivity"}
    if metric not in names:
        raise unknown("metric", metric, ("accuracy", "auc_macro", *names))
    name = names[metric]
    return float(compute_confusion_matrix_metric(name, counts).nanmean())  # NaN is 0/0
