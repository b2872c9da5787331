"""The table of metrics: how each is named, computed and compared. Light to import.

A new metric is a function and a row of `METRICS`; of another distribution, an extension that is a
`Metric`. NaN means that a metric is undefined.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from medflare.core.errors import ConfigError
from medflare.core.extensions import Extensions, trusted
from medflare.core.packages import installed, trust_refusal
from medflare.core.settings import unknown
from medflare.core.text import Json
from medflare.tasks.class_metrics import (
    accuracy,
    auc,
    auprc,
    brier_score,
    calibration_error,
    f1,
    macro,
    of_outputs,
    ppv,
    quadratic_kappa,
    sensitivity,
    specificity,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Metric:
    """A row of the table.

    Attributes:
        source: what it is computed from:
            "counts": `compute(counts)`, pixel counts (patients, C, 4) -> float64 (patients, C);
            "masks": `compute(predicted, truth, spacing, task)`, bool (N, C, ...) -> float64 (N, C);
                costly;
            "classes": `compute(probabilities, targets, weights, target)`, see
                `tasks.class_metrics`.
        words: display name, with the unit.
        compute: see `source`.
        undefined: the reason that is reported where the metric is NaN.
        lower_is_better: whether lower values are better.
        spatial_dims: only for images of so many dimensions; None: for all.
        bounds: lowest and highest possible value.
        digits: decimals of its numbers in tables.
        default: whether tasks without `metrics` have it.
    """

    source: Literal["counts", "masks", "classes"]
    words: str
    compute: Callable[..., Any]
    undefined: str
    lower_is_better: bool = False
    spatial_dims: int | None = None
    bounds: tuple[float, float] = (0.0, 1.0)
    digits: int = 3
    default: bool = False

    @property
    def kind(self) -> str:
        """The kind of tasks for which the metric is."""
        return "classification" if self.source == "classes" else "segmentation"


def dice(counts: "Tensor") -> "Tensor":
    """2 TP / (2 TP + FP + FN) of counts (..., 4): true positive, false positive, true negative,
    false negative.
    """
    tp, fp, _, fn = counts.unbind(-1)
    return 2 * tp / (2 * tp + fp + fn)


def iou(counts: "Tensor") -> "Tensor":
    """TP / (TP + FP + FN), see `dice`."""
    tp, fp, _, fn = counts.unbind(-1)
    return tp / (tp + fp + fn)


def volume_error(counts: "Tensor") -> "Tensor":
    """|predicted - true volume| / true volume, see `dice`; NaN without a true pixel."""
    tp, fp, _, fn = counts.unbind(-1)
    true = tp + fn
    return ((fp - fn).abs() / true).where(true > 0, math.nan)


def boundary_distance(
    predicted: "Tensor", truth: "Tensor", spacing: Sequence[float] | None = None
) -> "Tensor":
    """95th percentile Hausdorff distance, float64 (N, C), of masks, bool (N, C, ...); in pixels
    without a spacing.

    It is the larger of the two directed 95th percentiles, NaN unless truth and prediction both have
    pixels, by the parts of MONAI's `compute_hausdorff_distance` without its slow cropping.

    Examples:
        >>> import torch
        >>> predicted = torch.tensor([[[[1, 0, 0, 0]]]]) > 0
        >>> truth = torch.tensor([[[[0, 0, 0, 1]]]]) > 0
        >>> boundary_distance(predicted, truth), boundary_distance(predicted, truth, (1.0, 0.5))
        (tensor([[3.]], dtype=torch.float64), tensor([[1.5000]], dtype=torch.float64))
    """

    def larger_percentile(there: "Tensor", back: "Tensor") -> float:
        # torch's quantile takes 2**24 distances at most.
        return float(max(np.quantile(there.numpy(), 0.95), np.quantile(back.numpy(), 0.95)))

    return _of_surfaces(larger_percentile, predicted, truth, spacing)


def average_surface_distance(
    predicted: "Tensor", truth: "Tensor", spacing: Sequence[float] | None = None
) -> "Tensor":
    """Mean distance of the surface pixels of truth and prediction to the other's surface, see
    `boundary_distance`.
    """
    import torch

    return _of_surfaces(lambda *directed: torch.cat(directed).mean(), predicted, truth, spacing)


def _of_surfaces(
    summary: Callable[..., "Tensor | float"],
    predicted: "Tensor",
    truth: "Tensor",
    spacing: Sequence[float] | None,
) -> "Tensor":
    """`summary` of both directed distances (surface pixels,) of every image and class where both
    masks have pixels, else NaN.
    """
    import torch
    from monai.metrics.utils import get_mask_edges
    from monai.transforms.utils import generate_spatial_bounding_box

    values = torch.full(predicted.shape[:2], math.nan, dtype=torch.float64)
    both = predicted.flatten(2).any(2) & truth.flatten(2).any(2)
    for image, label in both.nonzero().tolist():
        first = predicted[image, label].cpu()
        second = truth[image, label].cpu()
        box = tuple(map(slice, *generate_spatial_bounding_box((first | second)[None])))
        first_edges, second_edges = get_mask_edges(first[box], second[box], crop=False)
        there = _to_surface(first_edges, second_edges, spacing)
        back = _to_surface(second_edges, first_edges, spacing)
        values[image, label] = summary(there, back)
    return values


def _to_surface(edges: Any, others: Any, spacing: Sequence[float] | None) -> "Tensor":
    """Distances (edge pixels,) of the pixels of `edges`, bool (...), to the nearest of `others`."""
    import torch
    from monai.metrics.utils import get_surface_distance
    from scipy.spatial import KDTree

    if spacing is None or len(spacing) <= 3:  # without cosines, see `data.geometry.Grid.cell`
        return get_surface_distance(edges, others, spacing=spacing)
    sides = np.array(spacing[:3])
    first, second, third = spacing[3:]
    cosines = np.array([[1, first, second], [first, 1, third], [second, third, 1]])
    # Rows: the millimetres of a step along each axis, up to a rotation.
    axes = np.linalg.cholesky(cosines * np.outer(sides, sides))
    points = np.argwhere(np.asarray(edges)) @ axes
    other_points = np.argwhere(np.asarray(others)) @ axes
    return torch.as_tensor(KDTree(other_points).query(points)[0], dtype=torch.float32)


def lesion_f1(predicted: "Tensor", truth: "Tensor") -> "Tensor":
    """F1 of lesions, the connected components with all neighbours, float64 (N, C), of masks, bool
    (N, C, ...).

    2 TP / (2 TP + FP + FN): TP true lesions that the prediction overlaps, FN the others, FP
    predicted lesions that overlap no true one (the ISLES challenge: Hernandez Petzsche et al.,
    Scientific Data 9, 2022). NaN without any lesion.

    Examples:
        >>> import torch
        >>> lesion_f1(torch.tensor([[[1, 0, 0, 0, 1]]]) > 0, torch.tensor([[[1, 1, 0, 0, 0]]]) > 0)
        tensor([[0.6667]], dtype=torch.float64)
    """
    import torch
    from scipy.ndimage import label

    def lesions(mask: Any, other: Any) -> tuple[int, int]:
        """The number of lesions, and of those that overlap the other mask."""
        numbered, count = label(mask, np.ones((3,) * mask.ndim))
        return count, len(np.unique(numbered[other & mask]))

    values = torch.full(predicted.shape[:2], math.nan, dtype=torch.float64)
    for pair in np.ndindex(*values.shape):
        predicted_mask = predicted[pair].cpu().numpy()
        true_mask = truth[pair].cpu().numpy()
        true, detected = lesions(true_mask, predicted_mask)
        predictions, overlapping = lesions(predicted_mask, true_mask)
        if true or predictions:
            # 2 TP / (2 TP + FP + FN)
            values[pair] = 2 * detected / (detected + true + predictions - overlapping)
    return values


def surface_dice(
    predicted: "Tensor", truth: "Tensor", spacing: Sequence[float], tolerance: float
) -> "Tensor":
    """Share of the surfaces of truth and prediction, bool (N, C, X, Y, Z), that lie within
    `tolerance` of each other, float64 (N, C).

    NaN if both are empty, 0 if one is. Spacing and tolerance are in millimetres.

    Examples:
        >>> import torch
        >>> predicted, truth = torch.zeros(2, 1, 1, 4, 4, 4, dtype=torch.bool)
        >>> predicted[..., 1, 1, 1], truth[..., 1, 1, 2] = True, True
        >>> [surface_dice(predicted, truth, (1.0, 1.0, 3.0), limit).item() for limit in (2.0, 3.0)]
        [0.0, 1.0]
    """
    import torch

    def fraction_near(there: "Tensor", back: "Tensor") -> "Tensor":
        return (torch.cat([there, back]) <= tolerance).double().mean().float()  # as MONAI's

    near = _of_surfaces(fraction_near, predicted, truth, spacing)
    one_empty = predicted.flatten(2).any(2) != truth.flatten(2).any(2)
    return near.masked_fill(one_empty.cpu(), 0.0)


def _of_masks(
    measure: Callable[..., "Tensor"], *settings: str, millimetres: bool = False
) -> Callable[..., "Tensor"]:
    """`measure` as `Metric.compute`, with some settings of the task; NaN without SciPy, or without
    the spacing that millimetres need.
    """

    def compute(
        predicted: "Tensor", truth: "Tensor", spacing: Sequence[float] | None, task: Any
    ) -> "Tensor":
        if not installed("scipy") or (millimetres and spacing is None):
            import torch

            return torch.full(predicted.shape[:2], math.nan, dtype=torch.float64)
        arguments = [getattr(task, name) for name in settings]
        if millimetres:
            arguments.insert(0, spacing)
        return measure(predicted, truth, *arguments)

    return compute


_in_mm = partial(_of_masks, millimetres=True)
_EMPTY = "no image has a foreground pixel, true or predicted (0/0)"
_NOT_BOTH = "no image has both true and predicted foreground"
_NO_IMAGE = "no image"
_ONE_CLASS = "the true labels hold a single class"
_NO_LABEL = "no image has a label"
_error = partial(Metric, lower_is_better=True, bounds=(0.0, 1e6))
_distance = partial(_error, "masks", digits=1)
_distance_px = partial(_distance, undefined=_NOT_BOTH, spatial_dims=2)
_distance_mm = partial(
    _distance, undefined=f"{_NOT_BOTH}, or the voxel spacing is unknown", spatial_dims=3
)
_of_classes = partial(Metric, "classes")
METRICS: Mapping[str, Metric] = {
    "dice": Metric("counts", "Dice", dice, _EMPTY, default=True),
    "iou": Metric("counts", "IoU", iou, _EMPTY, default=True),
    "hd95": _distance_px("HD95 (px)", _of_masks(boundary_distance), default=True),
    "hd95_mm": _distance_mm("HD95 (mm)", _in_mm(boundary_distance), default=True),
    "surface_dice": Metric(
        "masks",
        "surface Dice",
        _in_mm(surface_dice, "surface_tolerance"),
        f"{_EMPTY}, or the voxel spacing is unknown",
        spatial_dims=3,
        default=True,
    ),
    "assd": _distance_px("ASSD (px)", _of_masks(average_surface_distance)),
    "assd_mm": _distance_mm("ASSD (mm)", _in_mm(average_surface_distance)),
    "volume_error": _error(
        "counts", "volume error", volume_error, "no image has a true foreground pixel"
    ),
    "lesion_f1": Metric("masks", "lesion F1", _of_masks(lesion_f1), _EMPTY),
    "accuracy": _of_classes("accuracy", accuracy, _NO_IMAGE, default=True),
    "balanced_accuracy": _of_classes(
        "balanced accuracy", macro(sensitivity, ("binary", "multilabel")), _NO_IMAGE, default=True
    ),
    "f1_macro": _of_classes(
        "F1 (macro)", macro(f1, ("binary",)), "no label occurs or is predicted (0/0)", default=True
    ),
    "auc_macro": _of_classes("AUC (macro)", macro(auc), _ONE_CLASS, default=True),
    "auprc_macro": _of_classes("AUPRC (macro)", macro(auprc), _NO_LABEL),
    "sensitivity_macro": _of_classes("sensitivity (macro)", macro(sensitivity), _NO_LABEL),
    "specificity_macro": _of_classes("specificity (macro)", macro(specificity), _ONE_CLASS),
    "ppv_macro": _of_classes(
        "positive predictive value (macro)", macro(ppv), "no label is predicted"
    ),
    "quadratic_kappa": _of_classes(
        "quadratic weighted kappa",
        quadratic_kappa,
        "truth and prediction hold a single class",
        bounds=(-1.0, 1.0),
    ),
    "brier": _of_classes(
        "Brier score", brier_score, _NO_IMAGE, lower_is_better=True, bounds=(0.0, 2.0)
    ),
    "ece": _of_classes("calibration error", calibration_error, _NO_IMAGE, lower_is_better=True),
}


def _try(metric: Any) -> None:
    """Raise if an object is no `Metric`, or its values for examples do not have the right shape, or
    are outside its bounds.
    """
    if not isinstance(metric, Metric):
        raise TypeError(f"{metric!r} is no {Metric.__module__}.Metric")
    low, high = metric.bounds
    for values, shape in _examples(metric):
        if tuple(np.shape(values)) != shape:
            raise ValueError(f"compute returns the shape {tuple(np.shape(values))}, not {shape}")
        numbers = np.asarray(values)
        outside = numbers[(numbers < low) | (numbers > high)]
        if outside.size:
            raise ValueError(
                f"compute returns {outside[0]:.4g}, its bounds are {low:g} to {high:g}; "
                "give Metric(..., bounds=(lowest, highest))"
            )


def _examples(metric: Metric) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """Values of a metric for examples, each with the shape that they must have."""
    import torch

    if metric.source == "classes":
        weights = np.array([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
        targets = np.array([0, 1])
        binary = np.array([[0.9], [0.5]])
        yield of_outputs(metric.compute, binary, targets, weights), (3,)
        exclusive = np.full((2, _CLASSES), 1 / _CLASSES)
        exclusive[0] = np.eye(_CLASSES)[2]
        yield of_outputs(metric.compute, exclusive, targets, weights), (3,)
    elif metric.source == "counts":
        counts = [[[3.0, 1, 10, 2]], [[0, 0, 16, 0]], [[1, 15, 0, 0]], [[0, 15, 0, 1]]]
        yield metric.compute(torch.tensor(counts).double()), (4, 1)
    else:
        dims = metric.spatial_dims or 2
        sides = (4,) * dims
        truth = torch.zeros(2, 1, *sides, dtype=torch.bool)
        truth[0, 0, 1:3] = True
        spacing = (1.0, 1.0, 1.0) if dims == 3 else None
        task = SimpleNamespace(**_EXAMPLE, size=sides, spatial_dims=dims)
        for predicted in (truth, truth.roll(2, dims=2)):
            yield metric.compute(predicted, truth, spacing, task), (2, 1)


_CLASSES = 10  # of the example with exclusive classes
# Settings of the task for which a metric of masks is tried.
_EXAMPLE: Json = {
    "name": "example",
    "kind": "segmentation",
    "target": "binary",
    "labels": ("structure",),
    "outputs": 1,
    "spacing": None,
    "surface_tolerance": 2.0,
}
EXTENSIONS = Extensions("metric", "metrics", lambda: METRICS, _try)


def metric_table() -> dict[str, Metric]:
    """All metrics by name: `METRICS`, and those of the distributions that this process trusts, if
    they can be used.
    """
    return _table(trusted())


@cache
def _table(packages: tuple[str, ...]) -> dict[str, Metric]:
    table = dict(METRICS)
    for name in EXTENSIONS.names():
        if not trust_refusal(EXTENSIONS.module(name), packages):
            with suppress(ConfigError):  # which a task that names it gets, see `require_usable`
                table[name] = EXTENSIONS.foreign(name)
    return table


def require_usable(name: str) -> None:
    """Raise ConfigError if an extension of this name cannot be used, or is not trusted."""
    is_trusted = not trust_refusal(EXTENSIONS.module(name), trusted())
    if is_trusted or name not in METRICS:
        EXTENSIONS.foreign(name)


def known_metric(name: str, location: str) -> Metric:
    """A metric by name; ConfigError, with the nearest name, if there is none, or if its extension
    cannot be used.
    """
    if name not in metric_table():
        require_usable(name)
        raise unknown("metric", name, metric_table(), location)
    return metric_table()[name]


def metrics_of(kind: str, spatial_dims: int = 2) -> tuple[str, ...]:
    """Names of the metrics that a task of this kind ("segmentation", "classification") can have, in
    the order of the table.

    Examples:
        >>> metrics_of("segmentation")[:5]
        ('dice', 'iou', 'hd95', 'assd', 'volume_error')
    """
    return tuple(
        name
        for name, metric in metric_table().items()
        if metric.kind == kind and metric.spatial_dims in (None, spatial_dims)
    )


def default_metrics(kind: str, spatial_dims: int = 2) -> tuple[str, ...]:
    """Names of the metrics of a task that names none.

    Examples:
        >>> default_metrics("segmentation"), default_metrics("segmentation", spatial_dims=3)
        (('dice', 'iou', 'hd95'), ('dice', 'iou', 'hd95_mm', 'surface_dice'))
    """
    return tuple(name for name in metrics_of(kind, spatial_dims) if metric_table()[name].default)


def selection_metrics(kind: str) -> tuple[str, ...]:
    """Names of the metrics that can select models: from 0 to 1, higher is better, and cheap enough
    for every round.
    """
    names = []
    for name in metrics_of(kind):
        metric = metric_table()[name]
        is_score = metric.bounds == (0.0, 1.0) and not metric.lower_is_better
        if is_score and metric.source != "masks":
            names.append(name)
    return tuple(names)
