"""The metrics that there are: their names in settings and results, their names in words, and which way is better."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Metric:
    """What is known of a metric without computing it.

    Attributes:
        kind: of tasks that it is for, "segmentation" or "classification".
        words: for tables and figures, with the unit where it has one.
        lower_is_better: a distance; else a share between 0 and 1. It is costly too, so no model is selected by it.
    """

    kind: str
    words: str
    lower_is_better: bool = False


METRICS: Final = {
    "dice": Metric("segmentation", "Dice"),
    "iou": Metric("segmentation", "IoU"),
    "hd95": Metric("segmentation", "HD95 (px)", lower_is_better=True),
    "accuracy": Metric("classification", "accuracy"),
    "balanced_accuracy": Metric("classification", "balanced accuracy"),
    "f1_macro": Metric("classification", "F1 (macro)"),
    "auc_macro": Metric("classification", "AUC (macro)"),
}


def metrics_of(kind: str) -> tuple[str, ...]:
    """Names of all metrics of a kind of tasks, in the order of the table."""
    return tuple(name for name, metric in METRICS.items() if metric.kind == kind)


def selection_metrics(kind: str) -> tuple[str, ...]:
    """Names of those by which models may be selected: higher is better, and they are cheap enough for every round."""
    return tuple(name for name in metrics_of(kind) if not METRICS[name].lower_is_better)
