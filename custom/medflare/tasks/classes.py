"""Predictions of a model patient by patient, and their summary by class: confusion counts and ROC
curves.

A curve is reported as its sensitivities on a fixed grid of false positive rates, since its corners
would be scores of single patients.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from medflare.core.text import JsonDict
from medflare.tasks.class_metrics import Array, Bools, Floats, calibration_bins, one_hot
from medflare.tasks.config import TaskConfig

if TYPE_CHECKING:
    from torch import Tensor

FALSE_ALARMS = tuple(step / 20 for step in range(21))  # false positive rates
# Of a reply: the size of metadata is limited (`federation.settings.META_LIMIT`).
MOST_CLASSES = 16
# Patients, or other values, behind an interval: a bootstrap interval of three is their lowest and
# highest value.
FEWEST = 6
_DIGITS = 4  # of sensitivities
ROUNDED = 7  # decimals of metrics in metadata
_NORMAL_975 = 1.959963984540054  # quantile of the normal distribution: an interval of 95 %


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
    # Segmentation: bool (patients, structures), whether a true mask shows the structure.
    shown: "Tensor | None" = None

    @property
    def outputs(self) -> tuple[Floats, Array] | None:
        """Probabilities and targets of classification; None for segmentation, or without images."""
        if self.probabilities is None or self.targets is None or not len(self.patients):
            return None
        return self.probabilities.numpy(), self.targets.long().numpy()

    def has_few(self, metric: str, minimum: int) -> bool:
        """Whether a metric of masks is defined for patients, but for fewer than `minimum`, or fewer
        show a structure: a model that finds one everywhere has 0 for all others.
        """
        if metric not in self.values:
            return False
        counts = [int((~self.values[metric].isnan()).sum())]
        if self.shown is not None:
            counts.append(int(self.shown.any(dim=1).sum()))
        return any(0 < patients < minimum for patients in counts)

    def to_dict(self) -> JsonDict:
        """The cases as JSON values: six decimals, null where undefined; probabilities with nine
        digits, since equal ones change areas under curves.

        Examples:
            >>> import torch
            >>> Cases(("a", "b"), {"dice": torch.tensor([0.5, torch.nan])}).to_dict()
            {'patients': ['a', 'b'], 'values': {'dice': [0.5, None]}}
            >>> Cases(("a",), {}, torch.tensor([[0.25, 0.75]]), torch.tensor([1])).to_dict()
            {'patients': ['a'], 'probabilities': [[0.25, 0.75]], 'targets': [1]}
        """
        content: JsonDict = {"patients": list(self.patients)}
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
    listed = {}
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


def class_report(cases: Cases, target: str, labels: Sequence[str]) -> JsonDict:
    """Confusion counts and ROC curves of one model on one split; empty for segmentation, without
    images, and with more than `MOST_CLASSES` labels.

    Returns:
        confusion: for every matrix of `matrix_names` the numbers of images, rows: truth, columns:
            prediction.
        roc: for every class of `curve_names` {"auc", "low", "high", "sensitivity": at
            `FALSE_ALARMS`}, null and empty where undefined; DeLong's interval only if every image
            is of another patient, and there are at least `FEWEST`.
    """
    if cases.outputs is None or len(labels) > MOST_CLASSES:
        return {}
    matrices = []
    for truth, predicted, classes in decisions(cases, target, labels):
        counts = np.bincount(truth * classes + predicted, minlength=classes**2)
        matrices.append(counts.reshape(classes, classes).tolist())
    patients = len(set(cases.patients))
    independent = patients == len(cases.patients) and has_interval(patients)
    curves = one_against_rest(cases, target, labels).values()
    return {
        "confusion": matrices,
        "roc": [_curve(scores, positive, independent) for scores, positive in curves],
    }


def decisions(cases: Cases, target: str, labels: Sequence[str]) -> list[tuple[Array, Array, int]]:
    """What each matrix of `matrix_names` counts: true and predicted class (images,), and the number
    of classes; empty for segmentation.
    """
    if target == "multiclass" and cases.outputs is not None:
        probabilities, truth = cases.outputs
        return [(truth, probabilities.argmax(axis=1), len(labels))]
    curves = one_against_rest(cases, target, labels).values()
    return [(positive.astype(int), (scores > 0.5).astype(int), 2) for scores, positive in curves]


def patients_of_cells(cases: Cases, target: str, labels: Sequence[str]) -> list[int]:
    """Number of patients behind every cell of the confusion matrices that is not 0."""
    counts: list[int] = []
    for truth, predicted, classes in decisions(cases, target, labels):
        cells = (truth * classes + predicted).tolist()
        pairs = set(zip(cells, cases.patients, strict=True))
        counts += Counter(cell for cell, _ in pairs).values()
    return counts


def one_against_rest(
    cases: Cases, target: str, labels: Sequence[str]
) -> dict[str, tuple[Floats, Bools]]:
    """Each class of `curve_names` -> its probabilities (images,) and whether it is true (images,);
    empty for segmentation.
    """
    if cases.outputs is None:
        return {}
    probabilities, truth = cases.outputs
    positive = one_hot(truth, probabilities.shape[1])
    names = curve_names(target, labels)
    first = len(labels) - len(names)
    columns = zip(probabilities.T[first:], positive.T[first:], strict=True)
    return dict(zip(names, columns, strict=True))


def curve_points(scores: Floats, truth: Bools) -> list[tuple[float, float]]:
    """(1 - specificity, sensitivity) of a ROC curve with every score as the threshold, from (0, 0)
    to (1, 1); none if all cases are positive or all negative.

    Examples:
        >>> curve_points(np.array([0.9, 0.6, 0.6, 0.1]), np.array([True, True, False, False]))
        [(0.0, 0.0), (0.0, 0.5), (0.5, 1.0), (1.0, 1.0)]
    """
    if truth.all() or not truth.any():
        return []
    thresholds = np.unique(scores)[::-1]
    points = [(0.0, 0.0)]
    false_alarms = _fractions_from(thresholds, scores[~truth]).tolist()
    hits = _fractions_from(thresholds, scores[truth]).tolist()
    points += zip(false_alarms, hits, strict=True)
    return points


def _fractions_from(thresholds: Floats, scores: Floats) -> Floats:
    """For each threshold the share of scores that are equal or higher."""
    lower = np.searchsorted(np.sort(scores), thresholds, "left")
    return (len(scores) - lower) / len(scores)


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


def most_wrong(cases: Cases, task: TaskConfig) -> dict[int, str]:
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
    if cases.outputs is None:
        return {}
    probabilities, truth = cases.outputs
    of_each_truth = of_truth(probabilities, truth, task.target)
    lowest = of_each_truth.min(axis=1)
    worst_label = of_each_truth.argmin(axis=1)
    predicted = probabilities.argmax(axis=1)
    is_multiclass = task.target == "multiclass"
    wrong = np.flatnonzero(predicted != truth if is_multiclass else lowest < 0.5)
    worst_first = wrong[np.argsort(lowest[wrong], kind="stable")]
    texts = {}
    for row in worst_first[:6].tolist():
        if is_multiclass:
            texts[row] = (
                f"{task.labels[truth[row]]}, predicted {task.labels[predicted[row]]} "
                f"({probabilities[row].max():.2f}; the truth {lowest[row]:.2f})"
            )
        else:
            label = worst_label[row]
            probability = probabilities[row, label]
            state = "present" if probability < 0.5 else "absent"  # the prediction is wrong
            texts[row] = f"{task.labels[label]} {state}, predicted {probability:.2f}"
    return texts


def of_truth(probabilities: Floats, targets: Array, target: str) -> Floats:
    """The probability of what is true, (images, 1) of exclusive classes, else (images, outputs);
    arguments: `Cases.outputs`.
    """
    is_true = one_hot(targets, probabilities.shape[1])
    if target == "multiclass":
        return probabilities[is_true][:, None]
    return np.where(is_true, probabilities, 1 - probabilities)


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

    Cases are assumed to be independent: several images of one patient make the interval too
    narrow.

    Examples:
        >>> area_interval(np.array([4.0, 2.0, 3.0, 1.0]), np.array([True, True, False, False]))
        Area(value=0.75, low=0.057..., high=1.0)
    """
    m = int(truth.sum())
    n = int((~truth).sum())
    if not m or not n:
        return Area(np.nan, np.nan, np.nan)
    v10 = fractions_below(scores[truth], scores[~truth])
    v01 = 1 - fractions_below(scores[~truth], scores[truth])
    value = float(v10.mean())
    if m < 2 or n < 2:
        return Area(value, np.nan, np.nan)
    # Eq. 5 with L = 1
    variance = np.var(v10, ddof=1) / m + np.var(v01, ddof=1) / n
    width = _NORMAL_975 * float(np.sqrt(variance))
    return Area(value, max(0.0, value - width), min(1.0, value + width))


def fractions_below(values: Floats, others: Floats) -> Floats:
    """For each value the share of others below it, equal ones count half: the mean of DeLong's ψ.

    Examples:
        >>> fractions_below(np.array([2.0, 3.0]), np.array([1.0, 2.0]))
        array([0.75, 1.  ])
    """
    in_order = np.sort(others)
    below = np.searchsorted(in_order, values, "left")
    not_above = np.searchsorted(in_order, values, "right")
    return (below + not_above) / 2 / len(others)


def patients_of_classes(patients: Sequence[str], targets: Array, labels: int) -> list[int]:
    """Numbers of patients behind confusion counts and curves: for every class the patients with it,
    and the patients without it.

    Targets are (images,), multilabel (images, labels), of so many labels.

    Examples:
        >>> patients_of_classes(["a", "a", "b"], np.array([0, 0, 1]), 3)
        [1, 1, 1, 1, 0, 2]
    """
    names = np.array(list(patients))
    counts = []
    for column in one_hot(targets, labels).T:
        counts += [len(set(names[column])), len(set(names[~column]))]
    return counts


def _curve(scores: Floats, truth: Bools, independent: bool) -> JsonDict:
    """A curve of `class_report`; between its corners it is linear, on a vertical part the upper end
    counts.
    """
    area = area_interval(scores, truth)
    sensitivity = []
    if not math.isnan(area.value):
        false_alarms, hits = zip(*curve_points(scores, truth), strict=True)
        on_grid = np.interp(FALSE_ALARMS, false_alarms, hits).tolist()
        sensitivity = [round(value, _DIGITS) for value in on_grid]
    return {
        "auc": rounded(area.value),
        "low": rounded(area.low) if independent else None,
        "high": rounded(area.high) if independent else None,
        "sensitivity": sensitivity,
    }


def rounded(value: float) -> float | None:
    """Metadata with seven decimals, and None for NaN."""
    return None if math.isnan(value) else round(value, ROUNDED)
