"""The metrics of a site from its single cases, under weights: what a bootstrap over patients needs, many resamples at a time.

With all weights one they are those of `tasks.metrics`.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
CaseDict: TypeAlias = Mapping[str, Any]  # `tasks.cases.Cases.to_dict`


def patients_of(cases: CaseDict) -> list[str]:
    """The patient of every case, in order."""
    return list(cases["patients"])


def has_metric(cases: CaseDict, metric: str) -> bool:
    """Whether a metric can be computed from these cases."""
    return metric in cases["values"] if "values" in cases else bool(cases["patients"])


def chosen_cases(cases: CaseDict, places: Sequence[int]) -> CaseDict:
    """Some of the cases, in the order of `places`.

    Examples:
        >>> chosen_cases({"patients": ["a", "b"], "values": {"dice": [0.5, None]}}, [1])
        {'patients': ['b'], 'values': {'dice': [None]}}
    """

    def chosen(column: Sequence[Any]) -> list[Any]:
        return [column[place] for place in places]

    parts = {name: column for name, column in cases.items() if name != "values"}
    found: dict[str, Any] = {name: chosen(column) for name, column in parts.items()}
    return found | ({"values": {metric: chosen(column) for metric, column in cases["values"].items()}} if "values" in cases else {})


def joined_cases(parts: Sequence[CaseDict], metric: str) -> CaseDict:
    """The cases of several sites as those of one.

    Args:
        parts: of one task.
        metric: the one that is kept, where there are values.
    """
    patients = [patient for part in parts for patient in part["patients"]]
    if "values" in parts[0]:
        return {"patients": patients, "values": {metric: [value for part in parts for value in part["values"][metric]]}}
    names = ("probabilities", "targets")
    return {"patients": patients, **{name: [row for part in parts for row in part[name]] for name in names}}


def weighted_metric(cases: CaseDict, metric: str, weights: Floats) -> Floats:
    """A metric of one model at one site.

    Args:
        cases: what the model scored.
        metric: its name.
        weights: (..., cases), how often each case counts.

    Returns:
        (...); NaN where the weighted cases leave the metric undefined.

    Examples:
        >>> weighted_metric({"patients": ["a", "b"], "values": {"dice": [0.5, None]}}, "dice", np.array([[1.0, 1.0], [0.0, 2.0]]))
        array([0.5, nan])
    """
    with np.errstate(invalid="ignore", divide="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the mean of nothing, which is NaN here as well
        if "values" in cases:
            values = np.array(cases["values"][metric], dtype=float)
            return np.asarray(weights @ np.nan_to_num(values) / (weights @ ~np.isnan(values)))
        probabilities, targets = np.array(cases["probabilities"], dtype=float), np.array(cases["targets"])
        if targets.ndim == 2:
            pairs = [(_two_classes(probabilities[:, [c]]), targets[:, c]) for c in range(targets.shape[1])]
            labels = [_of_classes(*pair, metric, weights, label=True) for pair in pairs]
            return np.asarray(np.nanmean(labels, axis=0))
        return _of_classes(_two_classes(probabilities) if probabilities.shape[1] == 1 else probabilities, targets, metric, weights)


def _two_classes(positive: Floats) -> Floats:
    return np.concatenate([1 - positive, positive], axis=1)


def _of_classes(probabilities: Floats, targets: NDArray[Any], metric: str, weights: Floats, label: bool = False) -> Floats:
    """As `tasks.metrics` has it: classes that cannot be judged are left out of the mean over classes, and a `label`'s F1 is that of yes."""
    chosen, classes = probabilities.argmax(axis=1), range(probabilities.shape[1])
    if metric == "accuracy":
        return np.asarray(weights @ (chosen == targets) / weights.sum(axis=-1))
    if metric == "auc_macro":
        return np.asarray(np.nanmean([_area(probabilities[:, c], targets == c, weights) for c in classes], axis=0))
    found = []
    for c in classes[1:] if label and metric == "f1_macro" else classes:
        hits, true, said = (weights @ mask for mask in ((targets == c) & (chosen == c), targets == c, chosen == c))
        found.append(hits / true if metric == "balanced_accuracy" else 2 * hits / (true + said))
    return np.asarray(np.nanmean(found, axis=0))


def _area(scores: Floats, truth: NDArray[np.bool_], weights: Floats) -> Floats:
    """The area under the ROC curve: the weighted share of (positive, negative) pairs in the right order, ties by half.

    All resamples share the order of the scores, so that each costs as much as there are cases, and not pairs of them.
    """
    negatives = np.flatnonzero(~truth)[np.argsort(scores[~truth])]
    below, tied = (np.searchsorted(scores[negatives], scores[truth], side) for side in ("left", "right"))
    counted = np.zeros((*weights.shape[:-1], len(negatives) + 1))  # of so many negatives, from the lowest score
    np.cumsum(weights[..., negatives], axis=-1, out=counted[..., 1:])
    positive = weights[..., truth]
    ordered = (counted[..., below] + counted[..., tied]) / 2
    return np.asarray((positive * ordered).sum(axis=-1) / (positive.sum(axis=-1) * counted[..., -1]))
