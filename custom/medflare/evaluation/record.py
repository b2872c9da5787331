"""What is known of a run when it ends, and the results dict made of it: the content of results.json."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from statistics import fmean
from typing import Any

from medflare.core.events import Event
from medflare.core.packages import installed_versions
from medflare.evaluation.names import COMPLETED, FAILED, MODELS, ROLES, RUNNING, SCHEMA, SPLITS, UNKNOWN
from medflare.tasks.config import TaskConfig


def _no_hyper() -> dict[str, dict[str, Any]]:
    return {"site": {}, "server": {}}


@dataclass
class SiteRecord:
    """What is known about one site when a run ends.

    Attributes:
        role: "inside" (trains) or "outside" (never trains).
        n: split -> number of images; a split that the site never reported is left out.
        metrics: model ("global", "personal", "deployed", or another that the method compares) -> metric -> test value, None
            where undefined.
        reports: model -> what it says about its own work, for example how often each network of a super model answered.
        privacy: what training with differential privacy has cost ("epsilon", "delta", "steps"); empty without it.
        classes: model -> confusion counts and ROC curves of its test images, see `tasks.classes.class_report`; empty for segmentation.
    """

    role: str
    n: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    reports: Mapping[str, Any] = field(default_factory=dict)
    privacy: Mapping[str, Any] = field(default_factory=dict)
    classes: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class RunRecord:
    """A finished run, in whatever way it finished; knows nothing of the engine.

    Attributes:
        task: None where it could not be read; then there is a reason.
        sites: every site of the federation by name, also those that failed.
        reason: why the run failed, one line; empty for a completed run.
        down_bytes, up_bytes: tensors sent to all sites and received from them.
        seconds: stage ("training", "total", ...) -> wall-clock seconds.
        hyper: algorithm of the method ("site", "server") -> its hyper-parameters as they were used.
        settings: further settings that shaped the run (engine, min_sites, resplit, ...).
        costs: site -> {"down_bytes", "up_bytes", "seconds" that it was at work}.
        history: one mapping a step, as `results.append_round` takes them.
        pictures: title -> PNG file content, shown in the report.
        model_selection: model that the sites chose together -> {"round": of training behind the delivered one, "rule": that decided,
            "candidates": [{"round", "value": what the votes came to, "votes": site -> metric}]}.
        tables: title -> site -> column -> number or text: what a method tells of its sites beside metrics.
        selector: of a model that selects one of several networks for every image: {"gamma", "temperature", "candidates": values of γ,
            "votes": site -> its mean paired gain over the global model for each candidate, "mean_gain": of γ}; else empty.
        running: the run goes on: there is a report of it, and no results yet.
    """

    method: str
    task: TaskConfig | None
    seed: int
    rounds: int
    sites: Mapping[str, SiteRecord]
    reason: str = ""
    events: Iterable[Event] = ()
    down_bytes: int = 0
    up_bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    hyper: Mapping[str, Mapping[str, Any]] = field(default_factory=_no_hyper)
    settings: Mapping[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    model_selection: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    selector: Mapping[str, Any] = field(default_factory=dict)
    costs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    running: bool = False


def build_results(record: RunRecord) -> dict[str, Any]:
    """The results dict of a run; `contract.validate_results` holds for it.

    Every site and every mean names the same models and metrics, so that a reader need not ask what is there; what is
    undefined is None.

    Raises:
        TypeError: the record holds what JSON cannot.
    """
    metrics = record.task.metrics if record.task else ()
    models = tuple(dict.fromkeys([*MODELS, *(model for site in record.sites.values() for model in site.metrics)]))
    images = {name: site.n["train"] for name, site in record.sites.items() if site.role == "inside" and "train" in site.n}
    share = shares(images)
    sites = {name: _site_results(record.sites[name], models, metrics, share.get(name)) for name in sorted(record.sites)}
    results = {
        "schema": SCHEMA,
        "method": record.method,
        "task": record.task.name if record.task else UNKNOWN,
        "seed": record.seed,
        "rounds": record.rounds,
        "status": FAILED if record.reason else RUNNING if record.running else COMPLETED,
        "reason": record.reason or None,
        "sites": sites,
        "mean": mean_over_sites(sites, dict.fromkeys(models, metrics)),
        "traffic": {"down_bytes": record.down_bytes, "up_bytes": record.up_bytes},
        "seconds": dict(record.seconds),
        "costs": {site: record.costs[site] for site in sorted(record.costs)},
        "model_selection": record.model_selection,
        "events": list(record.events),
        "versions": installed_versions(),
        "configuration": {"hyper": record.hyper, "settings": record.settings, "task": record.task.to_dict() if record.task else {}},
    }
    selector = {"selector": {**record.selector, "confusion": confusion(sites)}} if record.selector else {}
    return json_ready(results | ({"tables": record.tables} if record.tables else {}) | selector)


def _site_results(site: SiteRecord, models: tuple[str, ...], metrics: tuple[str, ...], share: float | None) -> dict[str, Any]:
    found = {
        "role": site.role,
        "n": {split: site.n.get(split) for split in SPLITS},
        "metrics": {model: {metric: site.metrics.get(model, {}).get(metric) for metric in metrics} for model in models},
    }
    more = {"share": share, "reports": site.reports, "privacy": site.privacy, "classes": site.classes}
    return {**found, **{name: content for name, content in more.items() if content}}


def shares(samples: Mapping[str, float]) -> dict[str, float]:
    """site -> its share of all training images, by which means over the sites are weighted.

    Args:
        samples: site -> training images.

    Examples:
        >>> shares({"A": 30, "B": 10}), shares({"A": 0})
        ({'A': 0.75, 'B': 0.25}, {'A': 0.0})
    """
    total = sum(samples.values())
    return {site: count / total if total else 0.0 for site, count in samples.items()}


def confusion(sites: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Inside site -> how many of its test images the selector took for each site's; sites that report no counts are left out."""
    reports = {name: site.get("reports", {}).get("deployed") or {} for name, site in sites.items() if site["role"] == "inside"}
    rows = {name: report.get("selector") for name, report in reports.items()}
    counted = {name: taken for name, taken in rows.items() if isinstance(taken, Mapping)}
    return {name: dict(taken) for name, taken in counted.items() if all(type(count) is int and count >= 0 for count in taken.values())}


def mean_over_sites(sites: Mapping[str, Any], shape: Mapping[str, Iterable[str]]) -> dict[str, Any]:
    """role -> model -> metric -> mean over the sites of that role, sites without a value left out.

    Args:
        shape: model -> its metrics.
    """
    chosen = {role: [site["metrics"] for site in sites.values() if site["role"] == role] for role in ROLES}
    return {
        role: {model: {m: mean_of_defined(site[model][m] for site in found) for m in shape[model]} for model in shape}
        for role, found in chosen.items()
    }


def mean_of_defined(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are neither None nor NaN nor infinite; None where there is none.

    Examples:
        >>> mean_of_defined([1.0, None, 3.0, float("nan")]), mean_of_defined([None])
        (2.0, None)
    """
    defined = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(defined) if defined else None


def json_ready(value: Any) -> Any:
    """The same content in plain JSON types: keys as text, tuples as lists, numbers of numpy as Python's, NaN and infinity as None.

    Raises:
        TypeError: something that JSON has no type for.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_ready(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot stand in results")
