"""What is reported of one model on one split: its metrics, those of each structure or class, and
intervals over patients.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from medflare.core.rng import numpy_generator
from medflare.core.text import Json
from medflare.tasks.class_metrics import Array, Bools, Floats, by_class, of_outputs
from medflare.tasks.classes import ROUNDED, Cases, class_report, has_interval, rounded
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics_table import metric_table

Values = Mapping[str, float | None]
Interval = tuple[float, float]

ALL = ""  # in place of a structure or class: the metric of the model
# Structures or classes: the size of metadata is limited (`federation.settings.META_LIMIT`).
MOST_LABELS = 32
_RESAMPLES = 999
_RESAMPLES_OF_MEAN = 9999
# Metrics of classification that are means over images: a rare class hardly counts in them.
MEANS_OVER_IMAGES = ("accuracy", "brier", "ece")
_BATCH = 200  # resamples in memory at once
_UNDEFINED = 0.1  # largest share of undefined resamples


@dataclass(frozen=True)
class Summary:
    """The summary of a model on one split."""

    metrics: Values  # metric -> value; None where it is undefined
    # Predictions of single patients; they stay at the site.
    cases: Cases = field(default_factory=Cases, repr=False)
    # Structure -> the task's metrics, class -> those of `class_metrics.ONE_CLASS`; empty with more
    # than `MOST_LABELS` of them.
    by_label: Mapping[str, Values] = field(default_factory=dict)
    # Structure or class, or `ALL` -> metric -> 95 % interval; no entry where it is undefined.
    intervals: Mapping[str, Mapping[str, Interval]] = field(default_factory=dict)
    classes: Json = field(default_factory=dict)  # see `class_report`


def summarize(metrics: Values, cases: Cases, task: TaskConfig) -> Summary:
    """The summary of a model with these metrics and cases."""
    names = [name for name, value in metrics.items() if value is not None]
    point = values_of(cases, names, task, np.ones(len(cases.patients)))
    point.pop(ALL, None)
    by_label = {}
    for label, values in point.items():
        by_label[label] = {metric: rounded(float(value)) for metric, value in values.items()}
    of_classes = class_report(cases, task.target, task.labels)
    return Summary(metrics, cases, by_label, intervals_of(cases, names, task), of_classes)


def intervals_of(
    cases: Cases, metrics: Sequence[str], task: TaskConfig
) -> dict[str, dict[str, Interval]]:
    """The percentile bootstrap over patients (Efron, Annals of Statistics 7, 1979); none where
    `has_interval` forbids it.

    A metric that is undefined in more than a tenth of the resamples has no interval. A resample
    that lacks a class counts as undefined for the metrics that are means over classes.
    """
    names, rows = np.unique(np.array(cases.patients, dtype=str), return_inverse=True)
    if not has_interval(len(names)):
        return {}
    random = numpy_generator(0, "bootstrap over patients")
    counts = random.multinomial(len(names), np.full(len(names), 1 / len(names)), size=_RESAMPLES)
    batches = []
    for part in np.split(counts, range(_BATCH, _RESAMPLES, _BATCH)):
        weights = part[:, rows].astype(float)
        values = values_of(cases, metrics, task, weights)
        if cases.targets is not None:
            lack = _lack_a_class(cases.targets.numpy(), weights)
            for metric in values[ALL].keys() - set(MEANS_OVER_IMAGES):
                values[ALL][metric] = np.where(lack, np.nan, values[ALL][metric])
        batches.append(values)
    intervals: dict[str, dict[str, Interval]] = defaultdict(dict)
    for label, values in batches[0].items():
        for metric in values:
            if not has_interval(_patients_behind(cases, label, metric, len(names))):
                continue
            bounds = percentiles(np.concatenate([batch[label][metric] for batch in batches]))
            if bounds is not None:
                interval = round(bounds[0], ROUNDED), round(bounds[1], ROUNDED)
                intervals[label][metric] = interval
    return intervals


def percentiles(resamples: Floats, level: float = 0.05) -> Interval | None:
    """The interval outside which is this share of the defined resamples; None if more than a tenth
    of them are undefined.
    """
    defined = resamples[np.isfinite(resamples)]
    if len(defined) < (1 - _UNDEFINED) * len(resamples):
        return None
    low, high = np.percentile(defined, (50 * level, 100 - 50 * level)).tolist()
    return low, high


def _lack_a_class(targets: Array, weights: Floats) -> Bools:
    """Whether weighted cases of a classification task (..., cases) lack a class that the cases
    have, (...); of labels, also their absence.
    """
    if targets.ndim == 2:
        classes = np.concatenate([targets.T > 0, targets.T == 0])
    else:
        classes = targets == np.unique(targets)[:, None]
    classes = classes[classes.any(axis=1)]
    return np.any(weights @ classes.T == 0, axis=-1)


def _patients_behind(cases: Cases, label: str, metric: str, patients: int) -> int:
    """The patients with a defined value of a structure, or of all together; of a classification
    task all.
    """
    values = cases.values if label == ALL else cases.structures.get(label, {})
    if metric not in values:
        return patients
    return int((~values[metric].isnan()).sum())


def values_of(
    cases: Cases, metrics: Sequence[str], task: TaskConfig, weights: Floats
) -> dict[str, dict[str, Any]]:
    """Label, or `ALL` -> metric -> (...) of weighted cases (..., cases)."""
    if not len(cases.patients):
        return {}
    by_label = {}
    if cases.outputs is None:
        structures = cases.structures if len(cases.structures) <= MOST_LABELS else {}
        for label, values in {ALL: cases.values, **structures}.items():
            by_label[label] = {
                name: mean_of_defined(values[name].numpy(), weights)
                for name in metrics
                if name in values
            }
        return by_label
    outputs = *cases.outputs, weights
    by_label[ALL] = {name: of_outputs(metric_table()[name].compute, *outputs) for name in metrics}
    if len(task.labels) <= MOST_LABELS:
        by_label.update(by_class(*outputs, task.labels))
    return by_label


def mean_of_defined(values: Floats, weights: Floats) -> Floats:
    """The mean (...) of the values (cases,) that are defined; weights (..., cases)."""
    with np.errstate(all="ignore"):
        return weights @ np.nan_to_num(values) / (weights @ ~np.isnan(values))


def mean_interval(values: Sequence[float]) -> Interval | None:
    """The 95 % percentile bootstrap interval of a mean (Efron and Tibshirani, An Introduction to
    the Bootstrap, 1993, Sec. 13.3); None where `has_interval` forbids it.
    """
    if not has_interval(len(values)):
        return None
    sample = np.asarray(values)
    random = numpy_generator(0, "bootstrap")
    rows = random.integers(len(sample), size=(_RESAMPLES_OF_MEAN, len(sample)))
    return percentiles(sample[rows].mean(axis=1))
