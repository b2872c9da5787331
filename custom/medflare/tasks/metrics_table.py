"""The metrics that there are: their names in settings and results, their names in words, and which way is better."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Metric:
    """What is known of a metric without computing it.

    Attributes:
        kind: of tasks that it is for, "segmentation" or "classification".
        words: for tables and figures, with the unit where it has one.
        lower_is_better: a distance; else a share between 0 and 1.
        costly: too slow to compute every round, so no model is selected by it.
        spatial_dims: of the images that it is for, 2 (pictures and slices) or 3 (volumes); None for all.
    """

    kind: str
    words: str
    lower_is_better: bool = False
    costly: bool = False
    spatial_dims: int | None = None


METRICS: Final = {
    "dice": Metric("segmentation", "Dice"),
    "iou": Metric("segmentation", "IoU"),
    "hd95": Metric("segmentation", "HD95 (px)", lower_is_better=True, costly=True, spatial_dims=2),
    "hd95_mm": Metric("segmentation", "HD95 (mm)", lower_is_better=True, costly=True, spatial_dims=3),
    "surface_dice": Metric("segmentation", "surface Dice", costly=True, spatial_dims=3),
    "accuracy": Metric("classification", "accuracy"),
    "balanced_accuracy": Metric("classification", "balanced accuracy"),
    "f1_macro": Metric("classification", "F1 (macro)"),
    "auc_macro": Metric("classification", "AUC (macro)"),
}


def metrics_of(kind: str, spatial_dims: int = 2) -> tuple[str, ...]:
    """Names of all metrics of a kind of tasks, in the order of the table.

    Args:
        kind: "segmentation" or "classification".
        spatial_dims: of the task's images, 2 or 3.

    Examples:
        >>> metrics_of("segmentation"), metrics_of("segmentation", spatial_dims=3)
        (('dice', 'iou', 'hd95'), ('dice', 'iou', 'hd95_mm', 'surface_dice'))
    """
    return tuple(name for name, metric in METRICS.items() if metric.kind == kind and metric.spatial_dims in (None, spatial_dims))


def selection_metrics(kind: str) -> tuple[str, ...]:
    """Names of those by which models may be selected: higher is better, and they are cheap enough for every round."""
    return tuple(name for name in metrics_of(kind) if not METRICS[name].costly)
