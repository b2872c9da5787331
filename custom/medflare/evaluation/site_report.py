"""A site's own report.html: what the models do on its test images, patient by patient. It speaks of patients and stays at the site."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np

from medflare.core.packages import installed
from medflare.core.rng import numpy_generator
from medflare.evaluation.classes import ClassTables, class_tables
from medflare.evaluation.doubts import doubts
from medflare.evaluation.figures import patients_plot, roc_curves, with_own_ids
from medflare.evaluation.presentation import format_metric, metric_label, metric_names, model_columns
from medflare.evaluation.record import json_ready
from medflare.evaluation.report import template
from medflare.tasks.classes import Cases, class_report
from medflare.tasks.config import TaskConfig

Values: TypeAlias = Mapping[str, float]  # patient -> value

_RESAMPLES: Final = 999
_AT_ONCE: Final = 100  # resamples in memory together
_LISTED: Final = 10  # patients by name, the lowest


@dataclass(frozen=True)
class SiteReport:
    """What a site knows of its delivered models.

    Attributes:
        method, site, role: of the run, the site and its part ("inside", "outside").
        n: split -> images.
        metrics: model -> metric -> test value, None where undefined.
        cases: model -> what the values are made of, patient by patient.
        pictures: title -> PNG file content.
        events: what was noticed at delivery.
    """

    method: str
    site: str
    role: str
    task: TaskConfig
    n: Mapping[str, int]
    metrics: Mapping[str, Mapping[str, float | None]]
    cases: Mapping[str, Cases]
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()


def render_site_report(report: SiteReport) -> str:
    """The page as HTML text."""
    drawable = installed("matplotlib")
    results = _as_results(report)
    columns = model_columns(results)
    values = {heading: patient_values(report.cases[model], report.task) for heading, model in columns.items() if model in report.cases}
    values = {heading: found for heading, found in values.items() if found}
    what, classes = value_label(report.task), class_tables(results)
    page = template("site.html").render(
        report=report,
        metrics=metric_names(results),
        columns=columns,
        doubts=doubts(report.events),
        what=what,
        means={heading: _mean(found) for heading, found in values.items()},
        patients=worst(values),
        lowest_of=deployed_heading(values),
        plot=patients_plot(values, {heading: mean_interval(found) for heading, found in values.items()}, what) if drawable else None,
        classes=classes,
        curves=roc_curves(_lines(classes)) if drawable else None,
        pictures={title: base64.b64encode(content).decode() for title, content in report.pictures.items()},
    )
    return with_own_ids(page)


def _lines(tables: Sequence[ClassTables]) -> dict[str, dict[str, list[float]]]:
    """Class -> model -> the site's ROC curve."""
    lines: dict[str, dict[str, list[float]]] = {}
    for one in tables:
        for curve, by_site in one.points.items():
            lines.setdefault(curve, {})[one.model] = next(iter(by_site.values()))  # there is one site
    return lines


def patient_values(cases: Cases, task: TaskConfig) -> dict[str, float]:
    """What a model scored at every patient, undefined ones left out.

    Args:
        task: gives kind and metric.

    Returns:
        Patient -> the task's metric; for classification the mean probability of what is true, over a patient's images and labels.

    Examples:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> cases = Cases(("a", "a", "b"), {}, torch.tensor([[0.9], [0.5], [0.3]]), torch.tensor([1, 1, 0]))
        >>> {name: round(v, 2) for name, v in patient_values(cases, SimpleNamespace(kind="classification", target="binary")).items()}
        {'a': 0.7, 'b': 0.7}
    """
    if task.kind == "segmentation":
        of_patients = cases.values.get(task.metric, ())
        return {name: float(value) for name, value in zip(cases.patients, of_patients, strict=False) if value == value}
    if cases.probabilities is None or cases.targets is None:
        return {}
    probabilities, truth = cases.probabilities.numpy(), cases.targets.long().numpy()
    if task.target == "multiclass":
        right = np.take_along_axis(probabilities, truth[:, None], axis=1)
    else:
        right = np.where(truth.reshape(probabilities.shape) == 1, probabilities, 1 - probabilities)
    names, places = np.unique(np.array(cases.patients), return_inverse=True)
    means = np.bincount(places, right.mean(axis=1)) / np.bincount(places)
    return dict(zip(names.tolist(), means.tolist(), strict=True))


def value_label(task: TaskConfig) -> str:
    """What `patient_values` are, in words."""
    return metric_label(task.metric) if task.kind == "segmentation" else "probability of what is true"


def mean_interval(values: Values) -> tuple[float, float] | None:
    """The 95 % interval of a mean over patients: percentiles of a bootstrap (Efron, Annals of Statistics 7, 1979).

    It says what other patients of this hospital might give; the trained model stays as it is.

    Args:
        values: patient -> value.

    Returns:
        (low, high); None below two patients, and without SciPy.

    Examples:
        >>> mean_interval({"a": 0.5, "b": 0.5}), mean_interval({"a": 0.5})
        ((0.5, 0.5), None)
    """
    if len(values) < 2 or not installed("scipy"):
        return None
    from scipy.stats import bootstrap

    random = numpy_generator(0, "bootstrap over patients")
    sample = np.array([values[name] for name in sorted(values)])
    found = bootstrap((sample,), np.mean, n_resamples=_RESAMPLES, batch=_AT_ONCE, method="percentile", vectorized=True, rng=random)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def deployed_heading(headings: Iterable[str]) -> str:
    """The heading of the deployed model, which may share its column; the last one where no column is its own, "" of none.

    Examples:
        >>> deployed_heading(["global = deployed", "personal"])
        'global = deployed'
    """
    last = ""
    for last in headings:
        if "deployed" in last.split(" = "):
            break
    return last


def worst(values: Mapping[str, Values]) -> dict[str, dict[str, float | None]]:
    """The patients with the lowest values of the deployed model, the lowest first: patient -> model -> value.

    Args:
        values: model -> patient -> value.

    Examples:
        >>> worst({"global": {"a": 0.5, "b": 0.7}, "deployed": {"a": 0.9, "b": 0.8}})
        {'b': {'global': 0.7, 'deployed': 0.8}, 'a': {'global': 0.5, 'deployed': 0.9}}
    """
    if not values:
        return {}
    deployed = values[deployed_heading(values)]
    names = sorted(deployed, key=lambda name: (deployed[name], name))[:_LISTED]
    return {name: {model: found.get(name) for model, found in values.items()} for name in names}


def _mean(values: Values) -> str:
    """For example "0.812 (0.770 to 0.850)"."""
    mean, interval = format_metric("", sum(values.values()) / len(values)), mean_interval(values)
    return mean if interval is None else f"{mean} ({format_metric('', interval[0])} to {format_metric('', interval[1])})"


def _as_results(report: SiteReport) -> dict[str, Any]:
    """As much of a results dict as tables ask for, with this site alone."""
    task = report.task
    classes = {model: found for model, cases in report.cases.items() if (found := class_report(cases, task.target, task.labels))}
    site = {"role": report.role, "n": report.n, "metrics": json_ready(report.metrics), "classes": classes}
    return {"sites": {report.site: site}, "configuration": {"task": task.to_dict()}}
