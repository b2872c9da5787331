"""Metrics per patient from probabilities; what is undefined is None with its reason, never 0 or 1."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

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
        """Record a value, or None with the reason where it is NaN."""
        self.values[metric] = None if math.isnan(value) else value
        if math.isnan(value):
            self.undefined[metric] = reason


def score(probabilities: Tensor, targets: Tensor, patients: Sequence[str], task: TaskConfig, metrics: Sequence[str]) -> Scores:
    """The named metrics of `task.metrics`.

    Args:
        probabilities: what `task.probabilities` gives: (N, outputs, H, W) or (N, outputs).
        targets: as in `data.Split`.
        patients: patient of every image; segmentation is scored per patient, classification per image.
    """
    if not len(patients):
        return Scores(dict.fromkeys(metrics), dict.fromkeys(metrics, "the split holds no image"))
    if not torch.isfinite(probabilities).all():
        return Scores(dict.fromkeys(metrics), dict.fromkeys(metrics, "the model's output holds NaN or infinite values"))
    if task.kind == "segmentation":
        return _score_segmentation(probabilities, targets, patients, task, metrics)
    return _score_classification(probabilities.double().cpu().numpy(), targets.cpu().numpy(), task, metrics)


def foreground(probabilities: Tensor, task: TaskConfig) -> Tensor:
    """Predicted masks of the foreground classes, bool (N, C, H, W).

    A binary or multilabel structure is where its probability exceeds one half; multiclass takes the most probable class and
    leaves class 0, the background, out.
    """
    return structures(probabilities.argmax(dim=1), task) if task.target == "multiclass" else probabilities > 0.5


def structures(targets: Tensor, task: TaskConfig) -> Tensor:
    """True masks of the foreground classes, bool (N, C, H, W), from targets as in `data.Split`."""
    if task.target == "multiclass":
        return targets[:, None] == torch.arange(1, len(task.labels), device=targets.device).view(1, -1, 1, 1)
    return (targets[:, None] if task.target == "binary" else targets) > 0.5


def pooled_overlap(predicted: Tensor, truth: Tensor, groups: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Dice and IoU per patient and class, over all pixels of a patient's images together.

    Args:
        predicted, truth: bool (N, C, H, W).
        groups: long (N,), the patient of every image, 0 to number - 1.

    Returns:
        float64 (number, C) each; NaN where truth and prediction are both empty (0/0).
    """
    from monai.metrics.confusion_matrix import get_confusion_matrix

    counts = get_confusion_matrix(predicted.float(), truth.float(), include_background=True)  # (N, C, [TP, FP, TN, FN])
    pooled = torch.zeros(number, *counts.shape[1:], dtype=torch.float64).index_add_(0, groups.cpu(), counts.cpu().double())
    hit, wrong = pooled[..., 0], pooled[..., 1] + pooled[..., 3]
    return 2 * hit / (2 * hit + wrong), hit / (hit + wrong)


def boundary_distance(predicted: Tensor, truth: Tensor, groups: Tensor, number: int) -> Tensor:
    """95th percentile Hausdorff distance per patient and class in pixels of the network's grid, float64 (number, C).

    The larger of the two directed 95th percentiles, averaged over the patient's images on which truth and prediction both
    have pixels (elsewhere there is no distance); NaN where a patient has no such image.
    """
    images, classes = torch.nonzero(predicted.flatten(2).any(2) & truth.flatten(2).any(2), as_tuple=True)
    total = torch.zeros(number, predicted.shape[1], dtype=torch.float64)
    count = torch.zeros_like(total)
    if len(images):
        pairs = zip(predicted[images, classes].cpu(), truth[images, classes].cpu(), strict=True)
        distances = torch.tensor([hausdorff_95(*pair) for pair in pairs], dtype=torch.float64)
        place = (groups.cpu()[images.cpu()], classes.cpu())
        total.index_put_(place, distances, accumulate=True)
        count.index_put_(place, torch.ones_like(distances), accumulate=True)
    return total / count


def hausdorff_95(first: Tensor, second: Tensor) -> float:
    """The larger of the two directed 95th percentile distances between the boundaries of two masks, in pixels.

    As MONAI's `compute_hausdorff_distance` (the tests compare them), which needs SciPy for it.

    Args:
        first, second: bool (H, W), neither of them empty.
    """
    edges = _boundary(first), _boundary(second)
    return max(float(_distances(one, other).quantile(0.95)) for one, other in (edges, edges[::-1]))


def _distances(pixels: Tensor, others: Tensor) -> Tensor:
    """Distance of each of `pixels` to the nearest of `others`, float64 (n,); both bool (H, W) and not empty."""
    column = torch.arange(others.shape[1], dtype=torch.float32)
    before = torch.where(others, column, -math.inf).cummax(dim=1).values
    behind = torch.where(others, column, math.inf).flip(1).cummin(dim=1).values.flip(1)
    within_row = torch.minimum(column - before, behind - column) ** 2  # to the nearest one in the same row
    rows, columns = torch.nonzero(pixels, as_tuple=True)
    nearest = torch.full(rows.shape, math.inf)
    for row, squared in enumerate(within_row):
        nearest = torch.minimum(nearest, squared[columns] + (rows - row) ** 2)
    return nearest.double().sqrt()


def _boundary(mask: Tensor) -> Tensor:
    """The mask's pixels of which a neighbour, above, below, left or right, is not in the mask or not in the image."""
    padded = functional.pad(mask, (1, 1, 1, 1))
    return mask & ~(padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:])


def patient_mean(values: Tensor) -> float:
    """Mean over each patient's defined classes, then over patients with any; NaN where nothing is defined."""
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
    if "hd95" in metrics:
        distances = boundary_distance(predicted, truth, groups, len(names))
        scores.hd95_left_out = int(distances.isnan().sum())
        scores.set("hd95", patient_mean(distances), "no image has true and predicted foreground together")
    return scores


def _score_classification(probabilities: np.ndarray, targets: np.ndarray, task: TaskConfig, metrics: Sequence[str]) -> Scores:
    scores = Scores({})
    for metric in metrics:
        if task.target == "multilabel":
            columns = [_of_classes(metric, _two_classes(probabilities[:, [c]]), targets[:, c].astype(int)) for c in range(len(task.labels))]
            value = float(np.nanmean(columns)) if not np.isnan(columns).all() else math.nan
        else:
            spread = _two_classes(probabilities) if task.target == "binary" else probabilities
            value = _of_classes(metric, spread, targets)
        scores.set(metric, value, "the true labels hold a single class")
    return scores


def _two_classes(positive: np.ndarray) -> np.ndarray:
    return np.concatenate([1 - positive, positive], axis=1)


def _of_classes(metric: str, probabilities: np.ndarray, targets: np.ndarray) -> float:
    """One metric of exclusive classes, macro-averaged.

    Classes that neither occur nor are predicted do not count in macro-F1, absent ones not in balanced accuracy; AUC is one
    class against the rest over the classes that occur, NaN where only one does.
    """
    classes = np.arange(probabilities.shape[1])
    truth, chosen = targets[:, None] == classes, probabilities.argmax(axis=1)[:, None] == classes
    hits, occurs, predicted = (truth & chosen).sum(axis=0), truth.sum(axis=0), chosen.sum(axis=0)
    if metric == "accuracy":
        return float(hits.sum() / len(targets))
    if metric == "balanced_accuracy":
        return float(np.mean(hits[occurs > 0] / occurs[occurs > 0]))
    if metric == "f1_macro":
        either = occurs + predicted
        return float(np.mean(2 * hits[either > 0] / either[either > 0]))
    present = classes[occurs > 0]
    if len(present) < 2:
        return math.nan
    return float(np.mean([area_under_roc(truth[:, label], probabilities[:, label]) for label in present]))


def area_under_roc(positive: np.ndarray, ratings: np.ndarray) -> float:
    """Probability that a positive image is rated above a negative one, ties counting half (Hanley and McNeil, 1982, Sec. III).

    Args:
        positive: bool (N,), both kinds present.
        ratings: (N,).
    """
    _, place, counts = np.unique(ratings, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    above = ranks[positive].sum() - positive.sum() * (positive.sum() + 1) / 2
    return float(above / (positive.sum() * (~positive).sum()))
