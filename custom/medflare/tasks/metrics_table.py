"""The table of metrics: how each is named, computed and compared. Light to import.

A new metric is a function and a row of `METRICS`. NaN means that a metric is undefined.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from medflare.core.packages import installed

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Metric:
    """A row of the table.

    Attributes:
        source: what it is computed from:
            "counts": `compute(counts)`, pixel counts (patients, C, 4) -> float64 (patients, C);
            "masks": `compute(predicted, truth, spacing, task)`, bool (N, C, ...) -> float64 (N, C); costly;
            "classes": `compute(probabilities, targets, label)`, (N, classes) and (N,) -> a number; `label`: whether the two classes are
            no and yes of one label of a multilabel task.
        words: display name, with the unit.
        compute: see `source`.
        undefined: the reason that is reported where the metric is NaN.
        lower_is_better: whether lower values are better.
        spatial_dims: only for images of so many dimensions; None: for all.
    """

    source: Literal["counts", "masks", "classes"]
    words: str
    compute: Callable[..., Any]
    undefined: str
    lower_is_better: bool = False
    spatial_dims: int | None = None

    @property
    def kind(self) -> str:
        """The kind of tasks that it is for."""
        return "classification" if self.source == "classes" else "segmentation"


def dice(counts: "Tensor") -> "Tensor":
    """2 TP / (2 TP + FP + FN).

    Args:
        counts: (..., 4): true positive, false positive, true negative, false negative.
    """
    return 2 * counts[..., 0] / (2 * counts[..., 0] + counts[..., 1] + counts[..., 3])


def iou(counts: "Tensor") -> "Tensor":
    """TP / (TP + FP + FN), see `dice`."""
    return counts[..., 0] / (counts[..., 0] + counts[..., 1] + counts[..., 3])


def boundary_distance(predicted: "Tensor", truth: "Tensor", spacing: Sequence[float] | None = None) -> "Tensor":
    """95th percentile Hausdorff distance of every image and class, float64 (N, C).

    The larger of the two directed 95th percentiles; NaN unless truth and prediction both have pixels. The parts of MONAI's
    `compute_hausdorff_distance` without its slow cropping.

    Args:
        predicted: bool (N, C, ...).
        truth: bool (N, C, ...).
        spacing: None: distances in pixels.

    Examples:
        >>> import torch
        >>> predicted, truth = torch.tensor([[[[1, 0, 0, 0]]]]) > 0, torch.tensor([[[[0, 0, 0, 1]]]]) > 0
        >>> boundary_distance(predicted, truth), boundary_distance(predicted, truth, (1.0, 0.5))
        (tensor([[3.]], dtype=torch.float64), tensor([[1.5000]], dtype=torch.float64))
    """
    import torch
    from monai.metrics.utils import get_mask_edges, get_surface_distance
    from monai.transforms.utils import generate_spatial_bounding_box

    distances = torch.full(predicted.shape[:2], math.nan, dtype=torch.float64)
    images, classes = torch.nonzero(predicted.flatten(2).any(2) & truth.flatten(2).any(2), as_tuple=True)
    for image, label in zip(images.tolist(), classes.tolist(), strict=True):
        masks = [part[image, label].cpu() for part in (predicted, truth)]
        box = tuple(map(slice, *generate_spatial_bounding_box((masks[0] | masks[1])[None])))
        first, second = get_mask_edges(masks[0][box], masks[1][box], crop=False)
        directed = [get_surface_distance(*edges, spacing=spacing) for edges in ((first, second), (second, first))]
        distances[image, label] = max(torch.quantile(values, 0.95) for values in directed)
    return distances


def surface_dice(predicted: "Tensor", truth: "Tensor", spacing: Sequence[float], tolerance: float) -> "Tensor":
    """Share of the surfaces of truth and prediction that lie within `tolerance` of each other, float64 (N, C).

    NaN if both are empty, 0 if one is.

    Args:
        predicted: bool (N, C, X, Y, Z).
        truth: bool (N, C, X, Y, Z).
        spacing: in millimetres.
        tolerance: in millimetres.

    Examples:
        >>> import torch
        >>> predicted, truth = torch.zeros(2, 1, 1, 4, 4, 4, dtype=torch.bool)
        >>> predicted[..., 1, 1, 1], truth[..., 1, 1, 2] = True, True
        >>> [surface_dice(predicted, truth, (1.0, 1.0, 3.0), tolerance).item() for tolerance in (2.0, 3.0)]
        [0.0, 1.0]
    """
    from monai.metrics.surface_dice import compute_surface_dice

    thresholds = [tolerance] * predicted.shape[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MONAI warns about empty masks
        shares = compute_surface_dice(predicted.cpu(), truth.cpu(), class_thresholds=thresholds, include_background=True, spacing=spacing)
    return shares.double()


def _hd95(predicted: "Tensor", truth: "Tensor", spacing: Sequence[float] | None, task: Any) -> "Tensor":
    return boundary_distance(predicted, truth) if installed("scipy") else _nan(predicted)


def _hd95_mm(predicted: "Tensor", truth: "Tensor", spacing: Sequence[float] | None, task: Any) -> "Tensor":
    return boundary_distance(predicted, truth, spacing) if spacing is not None and installed("scipy") else _nan(predicted)


def _surface_dice(predicted: "Tensor", truth: "Tensor", spacing: Sequence[float] | None, task: Any) -> "Tensor":
    if spacing is None or not installed("scipy"):
        return _nan(predicted)
    return surface_dice(predicted, truth, spacing, task.surface_tolerance)


def _nan(masks: "Tensor") -> "Tensor":
    import torch

    return torch.full(masks.shape[:2], math.nan, dtype=torch.float64)


def _accuracy(probabilities: "Tensor", targets: "Tensor", label: bool) -> float:
    return int((targets == probabilities.argmax(dim=1)).sum()) / len(targets)


def _auc_macro(probabilities: "Tensor", targets: "Tensor", label: bool) -> float:
    """Each class against the rest, mean over the classes that occur; NaN if only one occurs."""
    import torch
    from monai.metrics.rocauc import compute_roc_auc

    truths = [(targets == c).long() for c in range(probabilities.shape[1])]
    areas = [compute_roc_auc(probabilities[:, c], truth) for c, truth in enumerate(truths) if 0 < truth.sum() < len(targets)]
    return float(torch.tensor(areas, dtype=torch.float64).mean())


def _balanced_accuracy(probabilities: "Tensor", targets: "Tensor", label: bool) -> float:
    """Mean sensitivity of the classes that occur."""
    return _of_counts("sensitivity", _class_counts(probabilities, targets))


def _f1_macro(probabilities: "Tensor", targets: "Tensor", label: bool) -> float:
    """Mean F1 of the classes that occur or are predicted; of a label only that of yes (scikit-learn's macro average of labels)."""
    counts = _class_counts(probabilities, targets)
    return _of_counts("f1 score", counts[1:] if label else counts)


def _class_counts(probabilities: "Tensor", targets: "Tensor") -> "Tensor":
    """(classes, 4): see `dice`."""
    from monai.metrics.confusion_matrix import get_confusion_matrix
    from torch.nn.functional import one_hot

    classes = probabilities.shape[1]
    return get_confusion_matrix(one_hot(probabilities.argmax(dim=1), classes), one_hot(targets.long(), classes)).sum(dim=0).double()


def _of_counts(name: str, counts: "Tensor") -> float:
    from monai.metrics.confusion_matrix import compute_confusion_matrix_metric

    return float(compute_confusion_matrix_metric(name, counts).nanmean())  # NaN is 0/0


_EMPTY: Final = "no image has a foreground pixel, true or predicted (0/0)"
_NOT_BOTH: Final = "no image has both true and predicted foreground"
_ONE_CLASS: Final = "the true labels hold a single class"
METRICS: Final = {
    "dice": Metric("counts", "Dice", dice, _EMPTY),
    "iou": Metric("counts", "IoU", iou, _EMPTY),
    "hd95": Metric("masks", "HD95 (px)", _hd95, _NOT_BOTH, lower_is_better=True, spatial_dims=2),
    "hd95_mm": Metric(
        "masks", "HD95 (mm)", _hd95_mm, f"{_NOT_BOTH}, or the voxel spacing is unknown", lower_is_better=True, spatial_dims=3
    ),
    "surface_dice": Metric(
        "masks", "surface Dice", _surface_dice, "no image has a foreground voxel, or the voxel spacing is unknown", spatial_dims=3
    ),
    "accuracy": Metric("classes", "accuracy", _accuracy, _ONE_CLASS),
    "balanced_accuracy": Metric("classes", "balanced accuracy", _balanced_accuracy, _ONE_CLASS),
    "f1_macro": Metric("classes", "F1 (macro)", _f1_macro, "no label occurs or is predicted (0/0)"),
    "auc_macro": Metric("classes", "AUC (macro)", _auc_macro, _ONE_CLASS),
}


def metrics_of(kind: str, spatial_dims: int = 2) -> tuple[str, ...]:
    """Names of the metrics of a kind of tasks, in the order of the table.

    Args:
        kind: "segmentation" or "classification".

    Examples:
        >>> metrics_of("segmentation"), metrics_of("segmentation", spatial_dims=3)
        (('dice', 'iou', 'hd95'), ('dice', 'iou', 'hd95_mm', 'surface_dice'))
    """
    return tuple(name for name, metric in METRICS.items() if metric.kind == kind and metric.spatial_dims in (None, spatial_dims))


def selection_metrics(kind: str) -> tuple[str, ...]:
    """Names of the metrics that can select models: higher is better, and cheap enough for every round."""
    return tuple(name for name in metrics_of(kind) if METRICS[name].source != "masks")
