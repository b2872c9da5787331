"""What a model answered, class by class: confusion counts and ROC curves, aggregates that tell of no single patient's score.

A curve is told as its sensitivity on a fixed grid of false alarms: its corners would be single patients.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from medflare.core.packages import installed
from medflare.tasks.cases import Cases
from medflare.tasks.config import TaskConfig

FALSE_ALARMS: Final = tuple(place / 20 for place in range(21))  # 1 - specificity: 0, 0.05, ..., 1
MOST_CLASSES: Final = 16  # of a reply: meta are small (`federation.settings.FACTS_LIMIT`)
_DIGITS: Final = 4
_NORMAL_975: Final = 1.959963984540054  # quantile of the normal distribution: an interval of 95 %


def class_names(task: TaskConfig) -> list[tuple[str, ...]]:
    """Names of the classes of each softmax problem of a task: one problem, or of a multilabel task one for each label."""
    return [(f"not {label}", label) for label in task.labels] if task.target == "multilabel" else [task.classes]


def matrix_names(target: str, labels: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The confusion matrices of a classification task: name -> classes, in the order of rows and columns.

    Args:
        target: "binary", "multiclass" or "multilabel".

    Examples:
        >>> matrix_names("multilabel", ["oedema"]), matrix_names("multiclass", ["mild", "severe"])
        ({'oedema': ('not oedema', 'oedema')}, {'': ('mild', 'severe')})
    """
    if target == "multilabel":
        return {label: (f"not {label}", label) for label in labels}
    return {"": (f"not {labels[0]}", labels[0]) if target == "binary" else tuple(labels)}


def curve_names(target: str, labels: Sequence[str]) -> tuple[str, ...]:
    """The classes with a ROC curve, each against the rest; of two exclusive classes the second, whose curve says it all.

    Args:
        target: "binary", "multiclass" or "multilabel".

    Examples:
        >>> curve_names("multiclass", ["mild", "severe"]), curve_names("multiclass", ["a", "b", "c"])
        (('severe',), ('a', 'b', 'c'))
    """
    return tuple(labels[1:]) if target == "multiclass" and len(labels) == 2 else tuple(labels)


def class_report(cases: Cases, target: str, labels: Sequence[str]) -> dict[str, Any]:
    """Confusion counts and ROC curves of one model on one split.

    Args:
        target: "binary", "multiclass" or "multilabel".

    Returns:
        "confusion": of every matrix of `matrix_names` the counts of images, truth down and answer across; "roc": for every class of
            `curve_names` {"auc", "low", "high", "sensitivity": at `FALSE_ALARMS`}, null and empty where undefined; DeLong's interval
            only where every image is another patient's. Empty for segmentation, without images, with more than `MOST_CLASSES` labels,
            and where scikit-learn or SciPy is not installed.
    """
    if cases.probabilities is None or cases.targets is None or not len(cases.patients) or len(labels) > MOST_CLASSES:
        return {}
    if not (installed("sklearn") and installed("scipy")):
        return {}
    probabilities, truth = cases.probabilities.numpy(), cases.targets.long().numpy()
    if target == "multiclass":
        matrices = [confusion_counts(probabilities.argmax(axis=1), truth, len(labels))]
        columns = range(len(labels))[-len(curve_names(target, labels)) :]
        curves = [(probabilities[:, column], truth == column) for column in columns]
    else:
        truth = truth.reshape(probabilities.shape)
        matrices = [confusion_counts(p > 0.5, t, 2) for p, t in zip(probabilities.T, truth.T, strict=True)]
        curves = [(p, t == 1) for p, t in zip(probabilities.T, truth.T, strict=True)]
    independent = len(set(cases.patients)) == len(cases.patients)
    return {"confusion": matrices, "roc": [_curve(scores, positive, independent) for scores, positive in curves]}


def confusion_counts(answered: NDArray[Any], truth: NDArray[Any], classes: int) -> list[list[int]]:
    """Images of every class by what they were taken for: truth down, answer across.

    Args:
        answered: numbers of classes, (images,).
        classes: how many there are.

    Examples:
        >>> confusion_counts(np.array([0, 1, 1]), np.array([0, 0, 1]), 2)
        [[1, 1], [0, 1]]
    """
    from sklearn.metrics import confusion_matrix

    counts: list[list[int]] = confusion_matrix(truth, answered, labels=range(classes)).tolist()
    return counts


def sensitivities(scores: NDArray[np.float64], truth: NDArray[np.bool_]) -> list[float]:
    """The ROC curve at `FALSE_ALARMS`, straight between its corners; of a vertical part the upper end.

    Args:
        scores: (cases,), of which at least one is positive and one negative.
        truth: which cases are positive.

    Examples:
        >>> sensitivities(np.array([0.9, 0.2, 0.6, 0.1]), np.array([True, True, False, False]))[::10]
        [0.5, 1.0, 1.0]
    """
    from sklearn.metrics import roc_curve

    false_alarms, hits, _ = roc_curve(truth, scores, drop_intermediate=False)
    found = np.interp(FALSE_ALARMS, false_alarms, hits)
    return [round(float(value), _DIGITS) for value in found]


@dataclass(frozen=True)
class Area:
    """An area under the ROC curve.

    Attributes:
        value: the area; NaN where the cases are of one kind.
        low, high: its 95 % interval; NaN with a single case of a kind.
    """

    value: float
    low: float
    high: float


def area_interval(scores: NDArray[np.float64], truth: NDArray[np.bool_]) -> Area:
    """An area and its interval, θ ± 1.96 sqrt(var(θ)), cut to [0, 1].

    With m positive scores X_i and n negative scores Y_j of a classifier (DeLong, DeLong and Clarke-Pearson, Biometrics 44, 1988):

        θ = 1/(mn) Σ_i Σ_j ψ(X_i, Y_j),   ψ = 1 where X > Y, 1/2 where X = Y, else 0     (Eq. 1)
        V10(X_i) = 1/n Σ_j ψ(X_i, Y_j),   V01(Y_j) = 1/m Σ_i ψ(X_i, Y_j)                 (Sec. 3)
        var(θ) = var_i(V10) / m + var_j(V01) / n                                         (Eq. 5 with L = 1)

    V10 and V01 come from midranks (Sun and Xu, IEEE Signal Processing Letters 21, 2014, Eqs. 8-12), in the time that sorting takes.
    Cases are taken for independent: several images of one patient make the interval too narrow.

    Args:
        scores: (cases,).
        truth: which cases are positive.

    Examples:
        >>> area_interval(np.array([4.0, 2.0, 3.0, 1.0]), np.array([True, True, False, False]))
        Area(value=0.75, low=0.057..., high=1.0)
    """
    m, n = int(truth.sum()), int((~truth).sum())
    if not m or not n:
        return Area(np.nan, np.nan, np.nan)
    from scipy.stats import rankdata

    ranks, positive, negative = rankdata(scores), scores[truth], scores[~truth]
    v10 = (ranks[truth] - rankdata(positive)) / n
    v01 = 1 - (ranks[~truth] - rankdata(negative)) / m
    value = float(v10.mean())
    if m < 2 or n < 2:
        return Area(value, np.nan, np.nan)
    width = _NORMAL_975 * float(np.sqrt(np.var(v10, ddof=1) / m + np.var(v01, ddof=1) / n))
    return Area(value, max(0.0, value - width), min(1.0, value + width))


def patients_of_classes(patients: Sequence[str], targets: NDArray[Any], target: str, labels: int) -> list[int]:
    """How many patients stand behind confusion counts and curves: for every class those with it, and those without.

    Args:
        targets: (images,), multilabel (images, labels).
        target: "binary", "multiclass" or "multilabel".
        labels: how many the task has.

    Examples:
        >>> patients_of_classes(["a", "a", "b"], np.array([0, 0, 1]), "multiclass", 3)
        [1, 1, 1, 1, 0, 2]
    """
    names = np.array(list(patients))
    if target == "multilabel":
        columns = [targets[:, label] == 1 for label in range(labels)]
    else:
        columns = [targets == label for label in (range(labels) if target == "multiclass" else (1,))]
    return [len(set(names[side])) for column in columns for side in (column, ~column)]


def _curve(scores: NDArray[np.float64], truth: NDArray[np.bool_], independent: bool) -> dict[str, Any]:
    if truth.all() or not truth.any():
        return {"auc": None, "low": None, "high": None, "sensitivity": []}
    area = area_interval(scores, truth)
    low, high = (area.low, area.high) if independent else (math.nan, math.nan)
    return {"auc": _rounded(area.value), "low": _rounded(low), "high": _rounded(high), "sensitivity": sensitivities(scores, truth)}


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, _DIGITS)


def pooled(matrices: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """Confusion counts of several sites as one.

    Examples:
        >>> pooled([[[1, 0], [2, 3]], [[4, 1], [0, 0]]])
        [[5, 1], [2, 3]]
    """
    return [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*matrices, strict=True)]


def row_shares(matrix: Sequence[Sequence[int]]) -> list[list[float | None]]:
    """Counts as shares of their row, None in a row without any: how the images of each class were taken.

    Args:
        matrix: truth down, answer across.

    Examples:
        >>> row_shares([[3, 1], [0, 0]])
        [[0.75, 0.25], [None, None]]
    """
    return [[count / sum(row) if sum(row) else None for count in row] for row in matrix]
