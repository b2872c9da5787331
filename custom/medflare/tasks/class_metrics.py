"""Metrics of classes in NumPy. Images have weights, so that all resamples of a bootstrap over
patients are computed at once.

A metric is a function of

    probabilities: float64 (N, classes) of exclusive classes; of a binary task, and of a label, the
        columns no and yes;
    targets: (N,), the index of the true class;
    weights: (..., N), how often each image counts;
    target: "multiclass", "binary", or "multilabel" for one label of such a task,

and returns (...); NaN where it is undefined. In a mean over classes, undefined classes are left
out.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Array = NDArray[Any]
Bools = NDArray[np.bool_]
ClassMetric = Callable[[Floats, Array, Floats, str], Floats]
# (scores, truth, predicted, weights) of one class against the rest
OneClass = Callable[[Floats, Array, Array, Floats], Floats]
CALIBRATION_BINS = 15


def of_outputs(
    metric: ClassMetric, probabilities: Floats, targets: Array, weights: Floats
) -> Floats:
    """A metric of a network's outputs; of a multilabel task its mean over the labels for which it
    is defined.

    Args:
        probabilities: (N, outputs): one for a binary task, else one for each label.
        targets: (N,), multilabel (N, labels).
        weights: (..., N).
    """
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the mean of no values is NaN
        if is_exclusive(probabilities, targets):
            return metric(probabilities, targets, weights, "multiclass")
        target = "multilabel" if targets.ndim == 2 else "binary"
        values = []
        truths = targets.reshape(probabilities.shape).T
        for positive, truth in zip(probabilities.T, truths, strict=True):
            no_and_yes = np.stack([1 - positive, positive], axis=1)
            values.append(metric(no_and_yes, truth, weights, target))
        return np.nanmean(values, axis=0)


def is_exclusive(probabilities: Floats, targets: Array) -> bool:
    """Whether a network's outputs, see `of_outputs`, are exclusive classes."""
    return targets.ndim == 1 and probabilities.shape[1] > 1


def one_hot(targets: Array, outputs: int) -> Bools:
    """Which of several exclusive classes, or else which labels, are true: (N, outputs)."""
    if targets.ndim == 1 and outputs > 1:
        return targets[:, None] == np.arange(outputs)
    return targets.reshape(-1, outputs) == 1


def by_class(
    probabilities: Floats, targets: Array, weights: Floats, labels: Sequence[str]
) -> dict[str, dict[str, Floats]]:
    """Class -> each of `ONE_CLASS` -> (...); arguments as of `of_outputs`.

    Examples:
        >>> probabilities = np.array([[0.9], [0.2], [0.6]])
        >>> values = by_class(probabilities, np.array([1, 0, 0]), np.ones(3), ["tumour"])["tumour"]
        >>> {name: round(float(value), 3) for name, value in values.items()}
        {'sensitivity': 1.0, 'specificity': 0.5, 'ppv': 0.5, 'f1': 0.667,
         'auc': 1.0, 'auprc': 1.0, 'brier': 0.137, 'ece': 0.3}
    """
    truths = one_hot(targets, len(labels))
    predictions = probabilities > 0.5
    if is_exclusive(probabilities, targets):
        predictions = one_hot(probabilities.argmax(axis=1), len(labels))
    values = {}
    with np.errstate(all="ignore"):
        for c, label in enumerate(labels):
            outputs = probabilities[:, c], truths[:, c], predictions[:, c], weights
            values[label] = {name: metric(*outputs) for name, metric in ONE_CLASS.items()}
    return values


# -- of one class against the rest: scores (N,), truth and predicted bool (N,), weights (..., N) ---


def sensitivity(scores: Floats, truth: Array, predicted: Array, weights: Floats) -> Floats:
    """TP / (TP + FN)."""
    return weights @ (truth & predicted) / (weights @ truth)


def specificity(scores: Floats, truth: Array, predicted: Array, weights: Floats) -> Floats:
    """TN / (TN + FP)."""
    return weights @ ~(truth | predicted) / (weights @ ~truth)


def ppv(scores: Floats, truth: Array, predicted: Array, weights: Floats) -> Floats:
    """Positive predictive value, TP / (TP + FP)."""
    return weights @ (truth & predicted) / (weights @ predicted)


def f1(scores: Floats, truth: Array, predicted: Array, weights: Floats) -> Floats:
    """2 TP / (2 TP + FP + FN)."""
    return 2 * (weights @ (truth & predicted)) / (weights @ truth + weights @ predicted)


def auc(scores: Floats, truth: Array, predicted: Array, weights: Floats) -> Floats:
    """Area under the ROC curve: weighted share of (positive, negative) pairs in the right order,
    ties count half.

    All resamples share the order of the scores, so that each takes time linear in the number of
    images.
    """
    negatives = np.flatnonzero(~truth)[np.argsort(scores[~truth])]
    below = np.searchsorted(scores[negatives], scores[truth], "left")
    not_above = np.searchsorted(scores[negatives], scores[truth], "right")
    # Weight of the negatives, from the lowest score.
    counted = np.zeros((*weights.shape[:-1], len(negatives) + 1))
    np.cumsum(weights[..., negatives], axis=-1, out=counted[..., 1:])
    positive = weights[..., truth]
    ordered = (counted[..., below] + counted[..., not_above]) / 2
    pairs = positive.sum(axis=-1) * counted[..., -1]
    return (positive * ordered).sum(axis=-1) / pairs


def auprc(scores: Floats, truth: Array, predicted: Array, weights: Floats) -> Floats:
    """Average precision, Σ_n (R_n - R_{n-1}) P_n over the distinct scores as thresholds, from the
    highest.
    """
    order = np.argsort(-scores)
    # Images with equal scores share a threshold: the last of them counts.
    last = np.ones(len(scores), dtype=bool)
    last[:-1] = np.diff(scores[order]) != 0
    positives = np.cumsum(weights[..., order] * truth[order], axis=-1)[..., last]
    predictions = np.cumsum(weights[..., order], axis=-1)[..., last]
    precision = positives / np.where(predictions > 0, predictions, 1)
    # Σ_n (R_n - R_{n-1}) P_n, with the positives of all images taken out of the recalls R_n.
    gained = (np.diff(positives, axis=-1, prepend=0) * precision).sum(axis=-1)
    return gained / (weights @ truth)


def brier(scores: Floats, truth: Array, predicted: Array, weights: Floats) -> Floats:
    """Mean squared difference of probability and truth, 0 or 1 (Brier, Monthly Weather Review 78,
    1950).
    """
    return weights @ (scores - truth) ** 2 / weights.sum(axis=-1)


def ece(scores: Floats, truth: Array, predicted: Array, weights: Floats) -> Floats:
    """Expected calibration error: |frequency of the class - mean probability| in 15 bins of the
    probability, weighted by their images.

    Guo et al., On Calibration of Modern Neural Networks, ICML 2017, Eq. 3; the bins are [0, 1/15),
    ..., [14/15, 1].
    """
    in_bin = calibration_bins(scores)[:, None] == np.arange(CALIBRATION_BINS)
    differences = np.where(in_bin, (truth - scores)[:, None], 0.0)
    return np.abs(weights @ differences).sum(axis=-1) / weights.sum(axis=-1)


def calibration_bins(scores: Floats) -> Array:
    """The bin of every probability, see `ece`."""
    return np.minimum((scores * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)


ONE_CLASS: dict[str, OneClass] = {
    metric.__name__: metric
    for metric in (sensitivity, specificity, ppv, f1, auc, auprc, brier, ece)
}


# -- of all classes --------------------------------------------------------------------------------


def macro(metric: OneClass, negative_of: Sequence[str] = ()) -> ClassMetric:
    """The mean over the classes; of no and yes only that of yes, unless the target ("binary",
    "multilabel") is in `negative_of`.
    """

    def mean(probabilities: Floats, targets: Array, weights: Floats, target: str) -> Floats:
        predicted = probabilities.argmax(axis=1)
        first = 0 if target in ("multiclass", *negative_of) else 1
        values = []
        for c in range(first, probabilities.shape[1]):
            values.append(metric(probabilities[:, c], targets == c, predicted == c, weights))
        return np.nanmean(values, axis=0)

    return mean


def accuracy(probabilities: Floats, targets: Array, weights: Floats, target: str) -> Floats:
    """Share of the images whose most probable class is the true one."""
    return weights @ (probabilities.argmax(axis=1) == targets) / weights.sum(axis=-1)


def quadratic_kappa(probabilities: Floats, targets: Array, weights: Floats, target: str) -> Floats:
    """1 - Σ_ij w_ij O_ij / Σ_ij w_ij E_ij with w_ij = (i - j)², of the order of the classes
    (Cohen, Psychological Bulletin 70, 1968).

    O counts images by true and predicted class; E is what their frequencies give if truth and
    prediction are independent.
    """
    predicted = probabilities.argmax(axis=1)
    classes = np.arange(probabilities.shape[1])
    true_counts = weights @ (targets[:, None] == classes)
    predicted_counts = weights @ (predicted[:, None] == classes)
    disagreement = (classes[:, None] - classes) ** 2
    # Σ_ij w_ij E_ij
    expected = np.einsum("...i,ij,...j->...", true_counts, disagreement, predicted_counts)
    expected = expected / weights.sum(axis=-1)
    # Σ_ij w_ij O_ij, image by image
    observed = weights @ (targets - predicted) ** 2
    return 1 - observed / expected


def brier_score(probabilities: Floats, targets: Array, weights: Floats, target: str) -> Floats:
    """Of exclusive classes the squared differences summed over the classes, 0 to 2; of no and yes
    `brier` of yes.
    """
    if target != "multiclass":
        return brier(probabilities[:, 1], targets == 1, targets == 1, weights)
    total = np.zeros(weights.shape[:-1])
    for c, column in enumerate(probabilities.T):
        total += brier(column, targets == c, targets == c, weights)
    return total


def calibration_error(
    probabilities: Floats, targets: Array, weights: Floats, target: str
) -> Floats:
    """`ece` of the most probable class and whether it is true; of no and yes that of yes."""
    if target != "multiclass":
        return ece(probabilities[:, 1], targets == 1, targets == 1, weights)
    correct = probabilities.argmax(axis=1) == targets
    return ece(probabilities.max(axis=1), correct, correct, weights)
