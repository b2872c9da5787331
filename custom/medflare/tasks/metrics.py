"""Metrics per patient from probabilities; what is undefined is None with its reason, never 0 or 1."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from medflare.core.packages import installed
from medflare.tasks.config import TaskConfig


@dataclass
class Scores:
    """Metrics of one model on one split.

    Attributes:
        values: metric -> value; None where it is undefined.
        undefined: metric -> why it is None.
        left_out: (patient, class) pairs whose Dice and IoU are 0/0: neither truth nor prediction has a pixel.
        hd95_left_out: (patient, class) pairs without a slice on which truth and prediction both have pixels.
    """

    values: dict[str, float | None]
    undefined: dict[str, str] = field(default_factory=dict)
    left_out: int = 0
    hd95_left_out: int = 0

    def set(self, metric: str, value: float, reason: str) -> None:
        """Record a value, or None with the reason where it is NaN.

        Args:
            metric: its name.
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


def score(probabilities: Tensor, targets: Tensor, patients: Sequence[str], task: TaskConfig, metrics: Sequence[str]) -> Scores:
    """The named metrics of `task.metrics`.

    Args:
        probabilities: what `task.probabilities` gives: (N, outputs, H, W) or (N, outputs).
        targets: as in `data.splits.Split`.
        patients: patient of every image; segmentation is scored per patient, classification per image.
        task: what the split is for.
        metrics: names, of `TaskConfig.metrics`.
    """
    if not len(patients):
        return Scores(dict.fromkeys(metrics), dict.fromkeys(metrics, "the split holds no image"))
    if not torch.isfinite(probabilities).all():
        return Scores(dict.fromkeys(metrics), dict.fromkeys(metrics, "the model's output holds NaN or infinite values"))
    if task.kind == "segmentation":
        return _score_segmentation(probabilities, targets, patients, task, metrics)
    return _score_classification(probabilities.double().cpu(), targets.cpu(), task, metrics)


def foreground(probabilities: Tensor, task: TaskConfig) -> Tensor:
    """Predicted masks of the foreground classes, bool (N, C, H, W).

    A binary or multilabel structure is where its probability exceeds one half; multiclass takes the most probable class and
    leaves class 0, the background, out.

    Args:
        probabilities: (N, outputs, H, W).
        task: gives the target.

    Examples:
        >>> from types import SimpleNamespace
        >>> foreground(torch.tensor([[[[0.2, 0.5, 0.7]]]]), SimpleNamespace(target="binary"))
        tensor([[[[False, False,  True]]]])
    """
    return structures(probabilities.argmax(dim=1), task) if task.target == "multiclass" else probabilities > 0.5


def structures(targets: Tensor, task: TaskConfig) -> Tensor:
    """True masks of the foreground classes, bool (N, C, H, W), from targets as in `data.splits.Split`.

    Args:
        targets: (N, H, W), multilabel (N, C, H, W).
        task: gives target and labels.

    Examples:
        >>> from types import SimpleNamespace
        >>> structures(torch.tensor([[[0, 1, 2]]]), SimpleNamespace(target="multiclass", labels=("background", "disc", "cup")))
        tensor([[[[False,  True, False]],
                 [[False, False,  True]]]])
    """
    if task.target == "multiclass":
        return targets[:, None] == torch.arange(1, len(task.labels), device=targets.device).view(1, -1, 1, 1)
    return (targets[:, None] if task.target == "binary" else targets) > 0.5


def pooled_overlap(predicted: Tensor, truth: Tensor, groups: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Dice and IoU per patient and class, over all pixels of a patient's images together.

    Args:
        predicted: bool (N, C, H, W).
        truth: bool (N, C, H, W).
        groups: long (N,), the patient of every image, 0 to number - 1.
        number: of patients.

    Returns:
        float64 (number, C) each; NaN where truth and prediction are both empty (0/0).

    Examples:
        >>> predicted, truth = torch.tensor([[[[True, True, False]]]]), torch.tensor([[[[True, False, False]]]])
        >>> pooled_overlap(predicted, truth, torch.tensor([0]), 1)  # 2/3 and 1/2
        (tensor([[0.6667]], dtype=torch.float64), tensor([[0.5000]], dtype=torch.float64))
        >>> pooled_overlap(predicted & False, truth & False, torch.tensor([0]), 1)[0]
        tensor([[nan]], dtype=torch.float64)
    """
    from monai.metrics.confusion_matrix import get_confusion_matrix

    counts = get_confusion_matrix(predicted.float(), truth.float(), include_background=True)  # (N, C, [TP, FP, TN, FN])
    pooled = torch.zeros(number, *counts.shape[1:], dtype=torch.float64).index_add_(0, groups.cpu(), counts.cpu().double())
    hit, wrong = pooled[..., 0], pooled[..., 1] + pooled[..., 3]
    return 2 * hit / (2 * hit + wrong), hit / (hit + wrong)


def boundary_distance(predicted: Tensor, truth: Tensor, groups: Tensor, number: int) -> Tensor:
    """95th percentile Hausdorff distance per patient and class in pixels of the network's grid, float64 (number, C).

    The larger of the two directed 95th percentiles, averaged over the patient's images on which truth and prediction both
    have pixels (elsewhere there is no distance); NaN where a patient has no such image. MONAI needs SciPy for it.

    Args:
        predicted: bool (N, C, H, W).
        truth: bool (N, C, H, W).
        groups: long (N,), the patient of every image, 0 to number - 1.
        number: of patients.

    Examples:
        >>> predicted, truth = torch.tensor([[[[1, 0, 0, 0]]]]) > 0, torch.tensor([[[[0, 0, 0, 1]]]]) > 0
        >>> boundary_distance(predicted, truth, torch.tensor([0]), 1)
        tensor([[3.]], dtype=torch.float64)
    """
    from monai.metrics.hausdorff_distance import compute_hausdorff_distance

    images, classes = torch.nonzero(predicted.flatten(2).any(2) & truth.flatten(2).any(2), as_tuple=True)
    total = torch.zeros(number, predicted.shape[1], dtype=torch.float64)
    count = torch.zeros_like(total)
    if len(images):
        pairs = [masks[images, classes][:, None].float().cpu() for masks in (predicted, truth)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # MONAI uses an argument that MONAI deprecates
            distances = compute_hausdorff_distance(*pairs, include_background=True, percentile=95)[:, 0].double()
        place = (groups.cpu()[images.cpu()], classes.cpu())
        total.index_put_(place, distances, accumulate=True)
        count.index_put_(place, torch.ones_like(distances), accumulate=True)
    return total / count


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


def _score_segmentation(
    probabilities: Tensor, targets: Tensor, patients: Sequence[str], task: TaskConfig, metrics: Sequence[str]
) -> Scores:
    predicted, truth = foreground(probabilities, task), structures(targets, task)
    names = {patient: number for number, patient in enumerate(dict.fromkeys(patients))}
    groups = torch.tensor([names[patient] for patient in patients])
    dice, iou = pooled_overlap(predicted, truth, groups, len(names))
    scores = Scores({}, left_out=int(dice.isnan().sum()))
    for metric, values in (("dice", dice), ("iou", iou)):
        if metric in metrics:
            scores.set(metric, patient_mean(values), "no image has a foreground pixel, true or predicted (0/0)")
    if "hd95" in metrics and not installed("scipy"):
        scores.set("hd95", math.nan, "SciPy, with which MONAI measures it, is not installed at this site")
    elif "hd95" in metrics:
        distances = boundary_distance(predicted, truth, groups, len(names))
        scores.hd95_left_out = int(distances.isnan().sum())
        scores.set("hd95", patient_mean(distances), "no image has true and predicted foreground together")
    return scores


def _score_classification(probabilities: Tensor, targets: Tensor, task: TaskConfig, metrics: Sequence[str]) -> Scores:
    scores = Scores({})
    for metric in metrics:
        if task.target == "multilabel":
            columns = [_of_classes(metric, _two_classes(probabilities[:, [c]]), targets[:, c]) for c in range(len(task.labels))]
            value = float(torch.tensor(columns, dtype=torch.float64).nanmean())
        else:
            value = _of_classes(metric, _two_classes(probabilities) if task.target == "binary" else probabilities, targets)
        scores.set(metric, value, "the true labels hold a single class")
    return scores


def _two_classes(positive: Tensor) -> Tensor:
    return torch.cat([1 - positive, positive], dim=1)


def _of_classes(metric: str, probabilities: Tensor, targets: Tensor) -> float:
    """One metric of exclusive classes, by MONAI.

    Classes that neither occur nor are predicted do not count in macro-F1, absent ones not in balanced accuracy; AUC is one
    class against the rest, macro-averaged over the classes that occur, NaN where only one does.

    Args:
        probabilities: (N, C).
        targets: (N,), numbers of classes.
    """
    from monai.metrics.confusion_matrix import compute_confusion_matrix_metric, get_confusion_matrix
    from monai.metrics.rocauc import compute_roc_auc

    classes = probabilities.shape[1]
    truth, chosen = F.one_hot(targets.long(), classes), F.one_hot(probabilities.argmax(dim=1), classes)
    if metric == "accuracy":
        return float((truth * chosen).sum() / len(targets))
    if metric == "auc_macro":
        areas = [compute_roc_auc(probabilities[:, c], truth[:, c]) for c in range(classes) if 0 < truth[:, c].sum() < len(targets)]
        return float(torch.tensor(areas, dtype=torch.float64).mean())
    counts = get_confusion_matrix(chosen, truth).sum(dim=0).double()  # (C, [TP, FP, TN, FN])
    name = {"f1_macro": "f1 score", "balanced_accuracy": "sensitivity"}[metric]
    return float(compute_confusion_matrix_metric(name, counts).nanmean())  # NaN is 0/0
