"""Predictions of a model patient by patient, and their summary by class: confusion counts and ROC curves.

A curve is reported as its sensitivities on a fixed grid of false positive rates, since its corners would be scores of single patients.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from medflare.core.packages import installed
from medflare.tasks.class_metrics import calibration_bins
from medflare.tasks.config import TaskConfig

if TYPE_CHECKING:
    from torch import Tensor

FALSE_ALARMS: Final = tuple(step / 20 for step in range(21))  # false positive rates: 0, 0.05, ..., 1
MOST_CLASSES: Final = 16  # of a reply: the size of metadata is limited (`federation.settings.META_LIMIT`)
FEWEST: Final = 6  # patients, or other values, behind an interval: a bootstrap interval of three is their lowest and highest value
_DIGITS: Final = 4  # of sensitivities
_AREA_DIGITS: Final = 7
_NORMAL_975: Final = 1.959963984540054  # quantile of the normal distribution: an interval of 95 %


def has_interval(count: int) -> bool:
    """Whether so many patients, or other values, have an interval; the values of fewer are shown as they are."""
    return count >= FEWEST


@dataclass(frozen=True)
class Cases:
    """A model's predictions on one split. They are of single patients: they stay at the site."""

    patients: Sequence[str] = ()  # segmentation: every patient once; classification: the patient of every image
    # Segmentation: metric -> float64 (patients,), the mean over a patient's defined classes, NaN where there is none.
    values: "Mapping[str, Tensor]" = field(default_factory=dict)
    probabilities: "Tensor | None" = None  # classification: float64 (images, outputs); None for segmentation
    targets: "Tensor | None" = None  # classification: long (images,), multilabel float (images, labels); None for segmentation
    # Segmentation: structure -> metric -> float64 (patients,), NaN where undefined.
    structures: "Mapping[str, Mapping[str, Tensor]]" = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values: six decimals, null where undefined.

        Examples:
            >>> import torch
            >>> Cases(("a", "b"), {"dice": torch.tensor([0.5, torch.nan])}).to_dict()
            {'patients': ['a', 'b'], 'values': {'dice': [0.5, None]}}
            >>> Cases(("a",), {}, torch.tensor([[0.25, 0.75]]), torch.tensor([1])).to_dict()
            {'patients': ['a'], 'probabilities': [[0.25, 0.75]], 'targets': [1]}
        """
        if self.probabilities is None or self.targets is None:
            structures = {label: _listed(values) for label, values in self.structures.items()}
            content = {"patients": list(self.patients), "values": _listed(self.values)}
            return content | ({"structures": structures} if structures else {})
        probabilities = [[round(value, 6) for value in row] for row in self.probabilities.tolist()]
        return {"patients": list(self.patients), "probabilities": probabilities, "targets": self.targets.long().tolist()}


def _listed(values: "Mapping[str, Tensor]") -> dict[str, list[float | None]]:
    return {name: [None if value != value else round(value, 6) for value in row.tolist()] for name, row in values.items()}


def class_names(task: TaskConfig) -> list[tuple[str, ...]]:
    """The classes of each problem with exclusive classes: the task itself, or every label of a multilabel task."""
    return list(matrix_names(task.target, task.labels).values())


def matrix_names(target: str, labels: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The confusion matrices of a classification task: name -> classes, in the order of rows and columns.

    Examples:
        >>> matrix_names("multilabel", ["oedema"]), matrix_names("multiclass", ["mild", "severe"])
        ({'oedema': ('not oedema', 'oedema')}, {'': ('mild', 'severe')})
    """
    if target == "multilabel":
        return {label: (f"not {label}", label) for label in labels}
    return {"": (f"not {labels[0]}", labels[0]) if target == "binary" else tuple(labels)}


def curve_names(target: str, labels: Sequence[str]) -> tuple[str, ...]:
    """The classes with a ROC curve, each against the rest; of two exclusive classes only the second.

    Examples:
        >>> curve_names("multiclass", ["mild", "severe"]), curve_names("multiclass", ["a", "b", "c"])
        (('severe',), ('a', 'b', 'c'))
    """
    return tuple(labels[1:]) if target == "multiclass" and len(labels) == 2 else tuple(labels)


def class_report(cases: Cases, target: str, labels: Sequence[str]) -> dict[str, Any]:
    """Confusion counts and ROC curves of one model on one split.

    Returns:
        "confusion": for every matrix of `matrix_names` the numbers of images, rows: truth, columns: prediction; "roc": for every class of
            `curve_names` {"auc", "low", "high", "sensitivity": at `FALSE_ALARMS`}, null and empty where undefined; DeLong's interval
            only if every image is of another patient, and there are at least `FEWEST`. Empty for segmentation, without images, and with
            more than `MOST_CLASSES` labels.
    """
    if cases.probabilities is None or cases.targets is None or not len(cases.patients) or len(labels) > MOST_CLASSES:
        return {}
    if not (installed("sklearn") and installed("scipy")):  # as where a job brings its code
        return {}
    from sklearn.metrics import confusion_matrix

    curves = one_against_rest(cases, target, labels).values()
    matrices = [
        confusion_matrix(truth, predicted, labels=range(classes)).tolist() for truth, predicted, classes in decisions(cases, target, labels)
    ]
    patients = len(set(cases.patients))
    independent = patients == len(cases.patients) and has_interval(patients)
    return {"confusion": matrices, "roc": [_curve(scores, positive, independent) for scores, positive in curves]}


class Decisions(NamedTuple):
    """True and predicted class (images,) of the images of one confusion matrix, and its number of classes."""

    truth: NDArray[np.int64]
    predicted: NDArray[np.int64]
    classes: int


def decisions(cases: Cases, target: str, labels: Sequence[str]) -> list[Decisions]:
    """What each matrix of `matrix_names` counts; empty for segmentation."""
    if cases.probabilities is None or cases.targets is None:
        return []
    if target == "multiclass":
        return [Decisions(cases.targets.numpy(), cases.probabilities.argmax(dim=1).numpy(), len(labels))]
    curves = one_against_rest(cases, target, labels).values()
    return [Decisions(positive.astype(np.int64), (scores > 0.5).astype(np.int64), 2) for scores, positive in curves]


def patients_of_cells(cases: Cases, target: str, labels: Sequence[str]) -> list[int]:
    """Number of patients behind every cell of the confusion matrices that is not 0."""
    patients: list[int] = []
    for truth, predicted, classes in decisions(cases, target, labels):
        cells: dict[int, set[str]] = {}
        for patient, cell in zip(cases.patients, (truth * classes + predicted).tolist(), strict=True):
            cells.setdefault(cell, set()).add(patient)
        patients += [len(names) for names in cells.values()]
    return patients


def one_against_rest(cases: Cases, target: str, labels: Sequence[str]) -> dict[str, tuple[NDArray[np.float64], NDArray[np.bool_]]]:
    """Each class of `curve_names` -> its probabilities (images,) and whether it is true (images,); empty for segmentation."""
    if cases.probabilities is None or cases.targets is None or not len(cases.patients):
        return {}
    probabilities, truth = cases.probabilities.numpy(), cases.targets.long().numpy()
    positive = truth[:, None] == np.arange(len(labels)) if target == "multiclass" else truth.reshape(probabilities.shape) == 1
    names = curve_names(target, labels)
    return dict(zip(names, zip(probabilities.T[-len(names) :], positive.T[-len(names) :], strict=True), strict=True))


def curve_points(scores: NDArray[np.float64], truth: NDArray[np.bool_]) -> list[tuple[float, float]]:
    """All corners (1 - specificity, sensitivity) of a ROC curve; none if all cases are positive or all negative."""
    from sklearn.metrics import roc_curve

    if truth.all() or not truth.any():
        return []
    false_alarms, hits, _ = roc_curve(truth, scores)
    return list(zip(false_alarms.tolist(), hits.tolist(), strict=True))


def reliability_points(scores: NDArray[np.float64], truth: NDArray[np.bool_]) -> list[tuple[float, float]]:
    """Mean probability and frequency of the class in each bin of `class_metrics.ece` with images.

    Examples:
        >>> reliability_points(np.array([0.25, 0.75, 0.75]), np.array([False, True, False]))
        [(0.25, 0.0), (0.75, 0.5)]
    """
    bins = calibration_bins(scores)
    return [(float(scores[bins == place].mean()), float(truth[bins == place].mean())) for place in np.unique(bins)]


def most_wrong(cases: Cases, task: TaskConfig, most: int = 6) -> dict[int, str]:
    """The wrongly classified images with the lowest probability of the truth: row -> truth and prediction in words.

    Examples:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> cases = Cases(("a", "b"), {}, torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([1, 0]))
        >>> most_wrong(cases, SimpleNamespace(target="multiclass", labels=("mild", "severe"), classes=("mild", "severe")))
        {0: 'severe, predicted mild (0.90; the truth 0.10)'}
    """
    if cases.probabilities is None or cases.targets is None or not len(cases.patients):
        return {}
    probabilities, truth = cases.probabilities.numpy(), cases.targets.long().numpy()
    if task.target == "multiclass":
        of_truth, chosen = probabilities[np.arange(len(truth)), truth], probabilities.argmax(axis=1)
        texts = {
            row: f"{task.labels[truth[row]]}, predicted {task.labels[chosen[row]]} ({probabilities[row].max():.2f}; "
            f"the truth {of_truth[row]:.2f})"
            for row in np.flatnonzero(chosen != truth)
        }
    else:
        truth = truth.reshape(probabilities.shape)
        each = np.where(truth == 1, probabilities, 1 - probabilities)  # probability of the truth of every label
        of_truth, label = each.min(axis=1), each.argmin(axis=1)
        names = [task.labels[place] for place in label]
        texts = {
            row: f"{names[row]} {'present' if truth[row, label[row]] else 'absent'}, predicted {probabilities[row, label[row]]:.2f}"
            for row in np.flatnonzero(of_truth < 0.5)
        }
    return {int(row): texts[row] for row in sorted(texts, key=lambda row: (of_truth[row], row))[:most]}


class Area(NamedTuple):
    """An area under the ROC curve, NaN if all cases are positive or all negative, and its 95 % interval, NaN if a single one is."""

    value: float
    low: float
    high: float


def area_interval(scores: NDArray[np.float64], truth: NDArray[np.bool_]) -> Area:
    """An area and its interval, θ ± 1.96 sqrt(var(θ)), clipped to [0, 1], of scores (cases,) and whether each case is positive.

    With m positive scores X_i and n negative scores Y_j of a classifier (DeLong, DeLong and Clarke-Pearson, Biometrics 44, 1988):

        θ = 1/(mn) Σ_i Σ_j ψ(X_i, Y_j),   ψ = 1 where X > Y, 1/2 where X = Y, else 0     (Eq. 1)
        V10(X_i) = 1/n Σ_j ψ(X_i, Y_j),   V01(Y_j) = 1/m Σ_i ψ(X_i, Y_j)                 (Sec. 3)
        var(θ) = var_i(V10) / m + var_j(V01) / n                                         (Eq. 5 with L = 1)

    V10 and V01 come from midranks in O(n log n) (Sun and Xu, IEEE Signal Processing Letters 21, 2014, Eqs. 8-12).
    Cases are assumed to be independent: several images of one patient make the interval too narrow.

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
    """Numbers of patients behind confusion counts and curves: for every class the patients with it, and the patients without it.

    Targets are (images,), multilabel (images, labels), of so many labels.

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
    """A curve of `class_report`. Between its corners it is linear; on a vertical part the upper end counts."""
    if truth.all() or not truth.any():
        return {"auc": None, "low": None, "high": None, "sensitivity": []}
    from sklearn.metrics import roc_curve

    false_alarms, hits, _ = roc_curve(truth, scores, drop_intermediate=False)
    sensitivity = [round(float(value), _DIGITS) for value in np.interp(FALSE_ALARMS, false_alarms, hits)]
    area = area_interval(scores, truth)
    low, high = (area.low, area.high) if independent else (math.nan, math.nan)
    return {"auc": _rounded(area.value), "low": _rounded(low), "high": _rounded(high), "sensitivity": sensitivity}


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, _AREA_DIGITS)


def pooled(matrices: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """The sum of several sites' confusion counts.

    Examples:
        >>> pooled([[[1, 0], [2, 3]], [[4, 1], [0, 0]]])
        [[5, 1], [2, 3]]
    """
    return [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*matrices, strict=True)]
