"""Predictions of a model patient by patient, and their summary by class: confusion counts and ROC
curves.

A curve is reported as its sensitivities on a fixed grid of false positive rates, since its corners
would be scores of single patients.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from medflare.core.packages import installed
from medflare.tasks.class_metrics import Array, Bools, Floats, calibration_bins
from medflare.tasks.config import TaskConfig

if TYPE_CHECKING:
    from torch import Tensor

FALSE_ALARMS: Final = tuple(step / 20 for step in range(21))  # false positive rates
# Of a reply: the size of metadata is limited (`federation.settings.META_LIMIT`).
MOST_CLASSES: Final = 16
# Patients, or other values, behind an interval: a bootstrap interval of three is their lowest and
# highest value.
FEWEST: Final = 6
_DIGITS: Final = 4  # of sensitivities
_AREA_DIGITS: Final = 7
_NORMAL_975: Final = 1.959963984540054  # quantile of the normal distribution: an interval of 95 %


def has_interval(count: int) -> bool:
    """Whether so many patients, or other values, have an interval; the values of fewer are shown as
    they are.
    """
    return count >= FEWEST


@dataclass(frozen=True)
class Cases:
    """A model's predictions on one split. They are of single patients: they stay at the site."""

    # Segmentation: every patient once; classification: the patient of every image.
    patients: Sequence[str] = ()
    # Segmentation: metric -> float64 (patients,), the mean over a patient's defined classes, NaN
    # where there is none.
    values: "Mapping[str, Tensor]" = field(default_factory=dict)
    # Classification: float64 (images, outputs); None for segmentation.
    probabilities: "Tensor | None" = None
    # Classification: long (images,), multilabel float (images, labels); None for segmentation.
    targets: "Tensor | None" = None
    # Segmentation: structure -> metric -> float64 (patients,), NaN where undefined.
    structures: "Mapping[str, Mapping[str, Tensor]]" = field(default_factory=dict)

    def has_few(self, metric: str, minimum: int) -> bool:
        """Whether a metric of masks is defined for patients, but for fewer than `minimum`."""
        if metric not in self.values:
            return False
        return 0 < int((~self.values[metric].isnan()).sum()) < minimum

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values: six decimals, null where undefined; probabilities with nine
        digits, since equal ones change areas under curves.

        Examples:
            >>> import torch
            >>> Cases(("a", "b"), {"dice": torch.tensor([0.5, torch.nan])}).to_dict()
            {'patients': ['a', 'b'], 'values': {'dice': [0.5, None]}}
            >>> Cases(("a",), {}, torch.tensor([[0.25, 0.75]]), torch.tensor([1])).to_dict()
            {'patients': ['a'], 'probabilities': [[0.25, 0.75]], 'targets': [1]}
        """
        content: dict[str, Any] = {"patients": list(self.patients)}
        if self.probabilities is None or self.targets is None:
            content["values"] = _listed(self.values)
            if self.structures:
                content["structures"] = {
                    label: _listed(values) for label, values in self.structures.items()
                }
            return content
        rows = self.probabilities.tolist()
        content["probabilities"] = [[float(f"{value:.9g}") for value in row] for row in rows]
        content["targets"] = self.targets.long().tolist()
        return content


def _listed(values: "Mapping[str, Tensor]") -> dict[str, list[float | None]]:
    listed: dict[str, list[float | None]] = {}
    for name, row in values.items():
        listed[name] = [None if math.isnan(value) else round(value, 6) for value in row.tolist()]
    return listed


def class_names(task: TaskConfig) -> list[tuple[str, ...]]:
    """The classes of each problem with exclusive classes: the task itself, or every label of a
    multilabel task.
    """
    return list(matrix_names(task.target, task.labels).values())


def matrix_names(target: str, labels: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The confusion matrices of a classification task: name -> classes, in the order of rows and
    columns.

    Examples:
        >>> matrix_names("multilabel", ["oedema"]), matrix_names("multiclass", ["mild", "severe"])
        ({'oedema': ('not oedema', 'oedema')}, {'': ('mild', 'severe')})
    """
    if target == "multilabel":
        return {label: (f"not {label}", label) for label in labels}
    if target == "binary":
        return {"": (f"not {labels[0]}", labels[0])}
    return {"": tuple(labels)}


def curve_names(target: str, labels: Sequence[str]) -> tuple[str, ...]:
    """The classes with a ROC curve, each against the rest; of two exclusive classes only the
    second.

    Examples:
        >>> curve_names("multiclass", ["mild", "severe"]), curve_names("binary", ["tumour"])
        (('severe',), ('tumour',))
    """
    if target == "multiclass" and len(labels) == 2:
        return (labels[1],)
    return tuple(labels)


def class_report(cases: Cases, target: str, labels: Sequence[str]) -> dict[str, Any]:
    """Confusion counts and ROC curves of one model on one split.

    Empty for segmentation, without images, and with more than `MOST_CLASSES` labels.

    Returns:
        confusion: for every matrix of `matrix_names` the numbers of images, rows: truth, columns:
            prediction.
        roc: for every class of `curve_names` {"auc", "low", "high", "sensitivity": at
            `FALSE_ALARMS`}, null and empty where undefined; DeLong's interval only if every image
            is of another patient, and there are at least `FEWEST`.
    """
    if cases.probabilities is None or not len(cases.patients) or len(labels) > MOST_CLASSES:
        return {}
    if not (installed("sklearn") and installed("scipy")):  # as where a job brings its code
        return {}
    from sklearn.metrics import confusion_matrix

    matrices = []
    for truth, predicted, classes in decisions(cases, target, labels):
        matrices.append(confusion_matrix(truth, predicted, labels=range(classes)).tolist())
    patients = len(set(cases.patients))
    independent = patients == len(cases.patients) and has_interval(patients)
    curves = one_against_rest(cases, target, labels).values()
    return {
        "confusion": matrices,
        "roc": [_curve(scores, positive, independent) for scores, positive in curves],
    }


class Decisions(NamedTuple):
    """True and predicted class (images,) of the images of one confusion matrix, and its number of
    classes.
    """

    truth: Array
    predicted: Array
    classes: int


def decisions(cases: Cases, target: str, labels: Sequence[str]) -> list[Decisions]:
    """What each matrix of `matrix_names` counts; empty for segmentation."""
    if cases.probabilities is None or cases.targets is None:
        return []
    if target == "multiclass":
        predicted = cases.probabilities.argmax(dim=1).numpy()
        return [Decisions(cases.targets.numpy(), predicted, len(labels))]
    curves = one_against_rest(cases, target, labels).values()
    return [
        Decisions(positive.astype(np.int64), (scores > 0.5).astype(np.int64), 2)
        for scores, positive in curves
    ]


def patients_of_cells(cases: Cases, target: str, labels: Sequence[str]) -> list[int]:
    """Number of patients behind every cell of the confusion matrices that is not 0."""
    counts: list[int] = []
    for truth, predicted, classes in decisions(cases, target, labels):
        cells = (truth * classes + predicted).tolist()
        patients: dict[int, set[str]] = {}
        for patient, cell in zip(cases.patients, cells, strict=True):
            patients.setdefault(cell, set()).add(patient)
        counts += [len(names) for names in patients.values()]
    return counts


def one_against_rest(
    cases: Cases, target: str, labels: Sequence[str]
) -> dict[str, tuple[Floats, Bools]]:
    """Each class of `curve_names` -> its probabilities (images,) and whether it is true (images,);
    empty for segmentation.
    """
    if cases.probabilities is None or cases.targets is None or not len(cases.patients):
        return {}
    probabilities = cases.probabilities.numpy()
    truth = cases.targets.long().numpy()
    if target == "multiclass":
        truth = truth[:, None] == np.arange(len(labels))
    positive = truth.reshape(probabilities.shape) == 1
    names = curve_names(target, labels)
    first = len(labels) - len(names)
    columns = zip(probabilities.T[first:], positive.T[first:], strict=True)
    return dict(zip(names, columns, strict=True))


def curve_points(scores: Floats, truth: Bools) -> list[tuple[float, float]]:
    """All corners (1 - specificity, sensitivity) of a ROC curve; none if all cases are positive or
    all negative.
    """
    from sklearn.metrics import roc_curve

    if truth.all() or not truth.any():
        return []
    false_alarms, hits, _ = roc_curve(truth, scores)
    return list(zip(false_alarms.tolist(), hits.tolist(), strict=True))


def reliability_points(scores: Floats, truth: Bools) -> list[tuple[float, float]]:
    """Mean probability and frequency of the class in each bin of `class_metrics.ece` with images.

    Examples:
        >>> reliability_points(np.array([0.25, 0.75, 0.75]), np.array([False, True, False]))
        [(0.25, 0.0), (0.75, 0.5)]
    """
    bins = calibration_bins(scores)
    points = []
    for number in np.unique(bins):
        in_bin = bins == number
        points.append((float(scores[in_bin].mean()), float(truth[in_bin].mean())))
    return points


def most_wrong(cases: Cases, task: TaskConfig, most: int = 6) -> dict[int, str]:
    """The wrongly classified images with the lowest probability of the truth: row -> truth and
    prediction in words.

    Examples:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> probabilities = torch.tensor([[0.9, 0.1], [0.8, 0.2]])
        >>> cases = Cases(("a", "b"), {}, probabilities, torch.tensor([1, 0]))
        >>> most_wrong(cases, SimpleNamespace(target="multiclass", labels=("mild", "severe")))
        {0: 'severe, predicted mild (0.90; the truth 0.10)'}
    """
    if cases.probabilities is None or cases.targets is None or not len(cases.patients):
        return {}
    probabilities = cases.probabilities.numpy()
    truth = cases.targets.long().numpy()
    if task.target == "multiclass":
        predicted = probabilities.argmax(axis=1)
        of_truth = probabilities[np.arange(len(truth)), truth]
        wrong = np.flatnonzero(predicted != truth)
    else:
        truth = truth.reshape(probabilities.shape)
        of_each_truth = np.where(truth == 1, probabilities, 1 - probabilities)
        worst_label = of_each_truth.argmin(axis=1)
        of_truth = of_each_truth.min(axis=1)
        wrong = np.flatnonzero(of_truth < 0.5)
    worst_first = wrong[np.argsort(of_truth[wrong], kind="stable")]
    texts: dict[int, str] = {}
    for row in worst_first[:most].tolist():
        if task.target == "multiclass":
            texts[row] = (
                f"{task.labels[truth[row]]}, predicted {task.labels[predicted[row]]} "
                f"({probabilities[row].max():.2f}; the truth {of_truth[row]:.2f})"
            )
        else:
            column = worst_label[row]
            state = "present" if truth[row, column] else "absent"
            probability = f"{probabilities[row, column]:.2f}"
            texts[row] = f"{task.labels[column]} {state}, predicted {probability}"
    return texts


class Area(NamedTuple):
    """An area under the ROC curve, NaN if all cases are positive or all negative, and its 95 %
    interval, NaN if a single one is.
    """

    value: float
    low: float
    high: float


def area_interval(scores: Floats, truth: Bools) -> Area:
    """An area and its interval, θ ± 1.96 sqrt(var(θ)), clipped to [0, 1], of scores (cases,) and
    whether each case is positive.

    With m positive scores X_i and n negative scores Y_j of a classifier (DeLong, DeLong and
    Clarke-Pearson, Biometrics 44, 1988):

        θ = 1/(mn) Σ_i Σ_j ψ(X_i, Y_j),   ψ = 1 where X > Y, 1/2 where X = Y, else 0   (Eq. 1)
        V10(X_i) = 1/n Σ_j ψ(X_i, Y_j),   V01(Y_j) = 1/m Σ_i ψ(X_i, Y_j)               (Sec. 3)
        var(θ) = var_i(V10) / m + var_j(V01) / n                         (Eq. 5 with L = 1)

    V10 and V01 come from midranks in O(n log n) (Sun and Xu, IEEE Signal Processing Letters 21,
    2014, Eqs. 8-12). Cases are assumed to be independent: several images of one patient make the
    interval too narrow.

    Examples:
        >>> area_interval(np.array([4.0, 2.0, 3.0, 1.0]), np.array([True, True, False, False]))
        Area(value=0.75, low=0.057..., high=1.0)
    """
    m = int(truth.sum())
    n = int((~truth).sum())
    if not m or not n:
        return Area(np.nan, np.nan, np.nan)
    from scipy.stats import rankdata

    ranks = rankdata(scores)
    # V10(X_i) and V01(Y_j) (Sec. 3), from midranks.
    v10 = (ranks[truth] - rankdata(scores[truth])) / n
    v01 = 1 - (ranks[~truth] - rankdata(scores[~truth])) / m
    value = float(v10.mean())
    if m < 2 or n < 2:
        return Area(value, np.nan, np.nan)
    # Eq. 5 with L = 1
    variance = np.var(v10, ddof=1) / m + np.var(v01, ddof=1) / n
    width = _NORMAL_975 * float(np.sqrt(variance))
    return Area(value, max(0.0, value - width), min(1.0, value + width))


def patients_of_classes(
    patients: Sequence[str], targets: Array, target: str, labels: int
) -> list[int]:
    """Numbers of patients behind confusion counts and curves: for every class the patients with it,
    and the patients without it.

    Targets are (images,), multilabel (images, labels), of so many labels.

    Examples:
        >>> patients_of_classes(["a", "a", "b"], np.array([0, 0, 1]), "multiclass", 3)
        [1, 1, 1, 1, 0, 2]
    """
    names = np.array(list(patients))
    if target == "multilabel":
        columns = [targets[:, label] == 1 for label in range(labels)]
    elif target == "multiclass":
        columns = [targets == label for label in range(labels)]
    else:
        columns = [targets == 1]
    counts: list[int] = []
    for column in columns:
        counts += [len(set(names[column])), len(set(names[~column]))]
    return counts


def _curve(scores: Floats, truth: Bools, independent: bool) -> dict[str, Any]:
    """A curve of `class_report`; between its corners it is linear, on a vertical part the upper end
    counts.
    """
    if truth.all() or not truth.any():
        return {"auc": None, "low": None, "high": None, "sensitivity": []}
    from sklearn.metrics import roc_curve

    area = area_interval(scores, truth)
    false_alarms, hits, _ = roc_curve(truth, scores, drop_intermediate=False)
    sensitivity = np.interp(FALSE_ALARMS, false_alarms, hits).tolist()
    return {
        "auc": _rounded(area.value),
        "low": _rounded(area.low) if independent else None,
        "high": _rounded(area.high) if independent else None,
        "sensitivity": [round(value, _DIGITS) for value in sensitivity],
    }


def _rounded(value: float) -> float | None:
    if math.isnan(value):
        return None
    return round(value, _AREA_DIGITS)


def pooled(matrices: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    """The sum of several sites' confusion counts.

    Examples:
        >>> pooled([[[1, 0], [2, 3]], [[4, 1], [0, 0]]])
        [[5, 1], [2, 3]]
    """
    total: list[list[int]] = np.sum(matrices, axis=0).tolist()
    return total
