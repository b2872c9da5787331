"""What is reported of one model on one split: its metrics, those of each structure or class, and
intervals over patients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from medflare.core.rng import numpy_generator
from medflare.tasks.class_metrics import Floats, by_class, of_outputs
from medflare.tasks.classes import Cases, has_interval
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics_table import metric_table

Values: TypeAlias = Mapping[str, float | None]
Interval: TypeAlias = tuple[float, float]

ALL: Final = ""  # in place of a structure or class: the metric of the model
# Structures or classes: the size of metadata is limited (`federation.settings.META_LIMIT`).
MOST_LABELS: Final = 32
RESAMPLES: Final = 999
# Metrics of classification that are means over images: a rare class hardly counts in them.
MEANS_OVER_IMAGES: Final = ("accuracy", "brier", "ece")
_BATCH: Final = 200  # resamples in memory at once
_UNDEFINED: Final = 0.1  # largest share of undefined resamples
_DIGITS: Final = 7


@dataclass(frozen=True)
class Summary:
    """A model on one split."""

    metrics: Values  # metric -> value; None where it is undefined
    # Predictions of single patients; they stay at the site.
    cases: Cases = field(default_factory=Cases, repr=False)
    # Structure -> the task's metrics, class -> those of `class_metrics.ONE_CLASS`; empty with more
    # than `MOST_LABELS` of them.
    by_label: Mapping[str, Values] = field(default_factory=dict)
    # Structure or class, or `ALL` -> metric -> 95 % interval; no entry where it is undefined.
    intervals: Mapping[str, Mapping[str, Interval]] = field(default_factory=dict)


def summarize(metrics: Values, cases: Cases, task: TaskConfig) -> Summary:
    """The summary of a model with these metrics and cases."""
    names = [name for name, value in metrics.items() if value is not None]
    point = _values(cases, names, task, np.ones(len(cases.patients)))
    by_label: dict[str, Values] = {}
    for label, values in point.items():
        if label != ALL:
            by_label[label] = {metric: _defined(value) for metric, value in values.items()}
    return Summary(metrics, cases, by_label, _intervals(cases, names, task))


def _intervals(
    cases: Cases, metrics: Sequence[str], task: TaskConfig
) -> dict[str, dict[str, Interval]]:
    """The percentile bootstrap over patients (Efron, Annals of Statistics 7, 1979); none where
    `has_interval` forbids it.

    A metric that is undefined in more than a tenth of the resamples has no interval. So is a mean
    over classes where a resample lacks a class.
    """
    names, rows = np.unique(np.array(cases.patients, dtype=str), return_inverse=True)
    if not has_interval(len(names)):
        return {}
    random = numpy_generator(0, "bootstrap over patients")
    counts = random.multinomial(len(names), np.full(len(names), 1 / len(names)), size=RESAMPLES)
    batches: list[dict[str, dict[str, Any]]] = []
    for part in np.split(counts, range(_BATCH, RESAMPLES, _BATCH)):
        weights = part[:, rows].astype(float)
        values = _values(cases, metrics, task, weights)
        lack = _lack_a_class(cases, weights)
        for metric in values[ALL].keys() - set(MEANS_OVER_IMAGES):
            values[ALL][metric] = np.where(lack, np.nan, values[ALL][metric])
        batches.append(values)
    intervals: dict[str, dict[str, Interval]] = {}
    for label, values in batches[0].items():
        for metric in values:
            if not has_interval(_patients_behind(cases, label, metric, len(names))):
                continue
            resampled = np.concatenate([batch[label][metric] for batch in batches])
            defined = resampled[~np.isnan(resampled)]
            if len(defined) >= (1 - _UNDEFINED) * RESAMPLES:
                low, high = np.percentile(defined, (2.5, 97.5)).tolist()
                interval = round(low, _DIGITS), round(high, _DIGITS)
                intervals.setdefault(label, {})[metric] = interval
    return intervals


def _lack_a_class(cases: Cases, weights: Floats) -> NDArray[np.bool_]:
    """Whether weighted cases of a classification task (..., cases) lack a class that the cases
    have, (...); of labels, also their absence.
    """
    if cases.targets is None:
        return np.zeros(weights.shape[:-1], bool)
    targets = cases.targets.numpy()
    classes = [targets == number for number in np.unique(targets)]
    if targets.ndim == 2:
        classes = [*(targets > 0).T, *(targets == 0).T]
    lack = np.zeros(weights.shape[:-1], bool)
    for of_class in classes:
        if of_class.any():
            lack |= weights @ of_class == 0
    return lack


def _patients_behind(cases: Cases, label: str, metric: str, patients: int) -> int:
    """The patients with a defined value of a structure, or of all together; of a classification
    task all.
    """
    values = cases.values if label == ALL else cases.structures.get(label, {})
    if metric not in values:
        return patients
    return int((~values[metric].isnan()).sum())


def _values(
    cases: Cases, metrics: Sequence[str], task: TaskConfig, weights: Floats
) -> dict[str, dict[str, Any]]:
    """Label, or `ALL` -> metric -> (...) of weighted cases (..., cases)."""
    if not len(cases.patients):
        return {}
    by_label: dict[str, dict[str, Any]] = {}
    if cases.probabilities is None or cases.targets is None:
        structures = cases.structures if len(cases.structures) <= MOST_LABELS else {}
        for label, values in {ALL: cases.values, **structures}.items():
            by_label[label] = {
                name: weighted_mean(values[name].numpy(), weights)
                for name in metrics
                if name in values
            }
        return by_label
    outputs = cases.probabilities.numpy(), cases.targets.long().numpy(), weights
    by_label[ALL] = {name: of_outputs(metric_table()[name].compute, *outputs) for name in metrics}
    if len(task.labels) <= MOST_LABELS:
        by_label.update(by_class(*outputs, task.labels))
    return by_label


def weighted_mean(values: Floats, weights: Floats) -> Floats:
    """The mean (...) of the values (cases,) that are defined; weights (..., cases)."""
    with np.errstate(all="ignore"):
        return np.asarray(weights @ np.nan_to_num(values) / (weights @ ~np.isnan(values)))


def _defined(value: Any) -> float | None:
    if np.isnan(value):
        return None
    return round(float(value), _DIGITS)
