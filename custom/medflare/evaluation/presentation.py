"""Numbers and names of a results dict as text: the same on the console, in reports and in the
tables of studies.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from medflare.core.text import Json
from medflare.tasks.metrics_table import metric_table

UNDEFINED = "–"
_WORDS = {  # of a class
    "ppv": "positive predictive value",
    "f1": "F1",
    "auc": "AUC",
    "auprc": "AUPRC",
}
_MOST = 5  # sites that one line names
# Beside a model's metrics: label -> metric -> value.
STRUCTURES = "structures"
CLASSES = "classes"
_Tables = dict[str, Mapping[str, Json]]  # title -> site -> column -> cell


def metric_label(metric: str) -> str:
    """The metric's name in words."""
    entry = metric_table().get(metric)
    if entry is not None:
        return entry.words
    return _WORDS.get(metric, metric.replace("_", " "))


def lower_is_better(metric: str) -> bool:
    """Whether the metric is a distance or an error."""
    entry = metric_table().get(metric)
    return entry is not None and entry.lower_is_better


def format_metric(metric: str, value: float | None, interval: Sequence[float] | None = None) -> str:
    """Three decimals, one for distances, a dash for an undefined value; the interval is on a second
    line.

    Examples:
        >>> format_metric("dice", 0.9123, (0.84, 0.984)), format_metric("hd95_mm", 3.14)
        ('0.912\\n0.840 to 0.984', '3.1')
        >>> format_metric("dice", None)
        '–'
    """
    if value is None:
        return UNDEFINED
    entry = metric_table().get(metric)
    digits = entry.digits if entry else 3
    number = f"{value:.{digits}f}"
    if not interval:
        return number
    low, high = interval
    return f"{number}\n{low:.{digits}f} to {high:.{digits}f}"


def format_values(metric: str, values: Iterable[float]) -> str:
    """The values of a few patients, the lowest first; "" without any.

    Examples:
        >>> format_values("dice", [0.102, 0.07])
        'each: 0.070, 0.102'
    """
    texts = [format_metric(metric, value) for value in sorted(values)]
    if not texts:
        return ""
    return f"each: {', '.join(texts)}"


def format_bytes(count: float) -> str:
    """Bytes with binary prefixes, for example 1536 as "1.5 KiB"."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def with_number(number: int, noun: str) -> str:
    """The number with its noun, for example "1 site" or "2 sites"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_setting(value: Any) -> str:
    """A setting as `--set` takes it: true, false and none in lower case, list items separated by
    commas. The order of an object's keys does not count.
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(format_setting, value))
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True)
    return str(value)


def best_value(metric: str, values: Iterable[float | None]) -> float | None:
    """The best of the defined values; None if they do not differ."""
    defined = {value for value in values if value is not None}
    if len(defined) < 2:
        return None
    if lower_is_better(metric):
        return min(defined)
    return max(defined)


def is_best(models: Mapping[str, Json], model: str, metric: str) -> bool:
    """Whether a model is the best of a site's (or the mean's) models by a metric.

    Examples:
        >>> models = {"global": {"dice": 0.5}, "personal": {"dice": 0.6}, "other": {"dice": None}}
        >>> [is_best(models, model, "dice") for model in models]
        [False, True, False]
    """
    value = models[model][metric]
    best = best_value(metric, (metrics[metric] for metrics in models.values()))
    return value is not None and value == best


def outcome(results: Json) -> str:
    """The status of a run, and the reason if it failed."""
    return ": ".join(filter(None, (results["status"], results["reason"])))


# -- parts of a results dict -----------------------------------------------------------------------


def task_metric(results: Json) -> str:
    """The metric that selects models; "" for a task that could not be read."""
    return results["configuration"]["task"].get("metric", "")


def named_metrics(metrics: Json) -> dict[str, float | None]:
    """The metrics of a model, without those of its structures and classes."""
    named = dict(metrics)
    named.pop(STRUCTURES, None)
    named.pop(CLASSES, None)
    return named


def labels_of(site: Json, model: str) -> Iterator[tuple[str, Json, Json]]:
    """Every structure or class of a model at a site, its metrics and their intervals."""
    metrics = site["metrics"].get(model, {})
    intervals = site.get("intervals", {}).get(model, {})
    for kind in (STRUCTURES, CLASSES):
        for label, values in metrics.get(kind, {}).items():
            yield label, values, intervals.get(kind, {}).get(label, {})


def metric_names(results: Json) -> tuple[str, ...]:
    """The metrics that have a value anywhere, the task's own metric (the one that selects models)
    first.
    """
    names = []
    for site in results["sites"].values():
        for metrics in site["metrics"].values():
            for metric, value in named_metrics(metrics).items():
                if value is not None and metric not in names:
                    names.append(metric)
    key = task_metric(results)
    return tuple(sorted(names, key=lambda metric: metric != key))


def label_metric(metric: str) -> str:
    """The metric of one structure or class whose mean a metric is."""
    return {"balanced_accuracy": "sensitivity"}.get(metric, metric.removesuffix("_macro"))


def label_tables(results: Json, *, intervals: bool = False) -> _Tables:
    """Tables of the deployed model by structure or class: title -> site -> label -> value as text;
    first that of the task's own metric.

    A table of a single label is left out: its values are those of the site. `intervals`: with those
    over patients, 95 %.
    """
    task = results["configuration"]["task"]
    first = label_metric(task.get("metric", ""))
    word = "structure" if task.get("kind") == "segmentation" else "class"
    tables: dict[str, dict[str, dict[str, str]]] = {}
    for site, content in ordered_sites(results).items():
        for label, values, bounds in labels_of(content, "deployed"):
            for metric in sorted(values, key=lambda metric: metric != first):
                title = f"{metric_label(metric)} by {word}, deployed model"
                row = tables.setdefault(title, {}).setdefault(site, {})
                interval = bounds.get(metric) if intervals else None
                row[label] = format_metric(metric, values[metric], interval)
    return {title: table for title, table in tables.items() if max(map(len, table.values())) > 1}


def method_tables(results: Json) -> _Tables:
    """The cross-site matrix, if there is one, and the tables that the method reports: title -> row
    -> column -> number or text.
    """
    metric = task_metric(results)
    matrix = {}
    for model, row in results.get("cross_site", {}).items():
        matrix[model] = {f"images of {site}": format_metric(metric, row[site]) for site in row}
    tables = {}
    if matrix:
        tables[f"{metric_label(metric)} of personal models"] = matrix
    return tables | results.get("tables", {})


def model_columns(results: Json) -> dict[str, str]:
    """Heading ("global = deployed") of a column -> the model whose numbers it shows; the heading of
    a single column is "model".

    Models with the same numbers at every site share a column, models without any number do not.
    """
    metrics = defaultdict(list)  # model -> its metrics at every site
    for site in results["sites"].values():
        for model, site_metrics in site["metrics"].items():
            metrics[model].append(site_metrics)
    groups: list[list[str]] = []
    for model, metrics_by_site in metrics.items():
        defined = any(
            value is not None for site_metrics in metrics_by_site for value in site_metrics.values()
        )
        equal = [group for group in groups if metrics[group[0]] == metrics_by_site]
        if defined and equal:
            equal[0].append(model)
        else:
            groups.append([model])
    if len(groups) == 1:
        return {"model": groups[0][0]}
    return {" = ".join(group): group[0] for group in groups}


def deployed_first(results: Json) -> dict[str, str]:
    """The columns of `model_columns` with the deployed model's first: its numbers are the answer of
    a page.

    Examples:
        >>> metrics = {"global": {"dice": 0}, "personal": {"dice": 1}, "deployed": {"dice": 1}}
        >>> deployed_first({"sites": {"A": {"metrics": metrics}}})
        {'deployed = personal': 'personal', 'global': 'global'}
    """
    first = {}
    others = {}
    for heading, model in model_columns(results).items():
        names = heading.split(" = ")
        if "deployed" in names:
            names.remove("deployed")
            first[" = ".join(["deployed", *names])] = model
        else:
            others[heading] = model
    return first | others


def spread_over_sites(results: Json, metric: str) -> dict[str, dict[str, str]]:
    """Rows of the worst inside site and of the disparity (best minus worst): heading -> model ->
    text; empty below two inside sites.

    A model with values at fewer than two of them has dashes.
    """
    inside = sites_of_role(results, "inside")
    if len(inside) < 2:
        return {}
    worst_row = {}
    gap_row = {}
    for model in results["sites"][inside[0]]["metrics"]:
        values = []
        for name in inside:
            value = results["sites"][name]["metrics"][model].get(metric)
            if value is not None:
                values.append((value, name))
        values.sort(reverse=lower_is_better(metric))
        worst_row[model] = gap_row[model] = UNDEFINED
        if len(values) >= 2:
            worst, name = values[0]
            worst_row[model] = f"{format_metric(metric, worst)}\n{name}"
            gap_row[model] = format_metric(metric, abs(values[-1][0] - worst))
    return {"worst inside site": worst_row, "disparity (best minus worst)": gap_row}


def task_description(task: Json) -> str:
    """What a task is, in one sentence; "" for no task.

    Examples:
        >>> eyes = {"name": "eyes", "kind": "segmentation", "labels": ["disc", "cup"]}
        >>> task_description(eyes | {"spatial_dims": 2, "source": "A, 2020"})
        'eyes: segmentation of disc, cup in images. Source: A, 2020.'
    """
    if not task:
        return ""
    images = "volumes" if task.get("spatial_dims") == 3 else "images"
    labels = list(task.get("labels", ()))
    if task["kind"] == "segmentation":
        if task.get("target") == "multiclass":
            labels = labels[1:]  # the first is the background
        subject = f"of {', '.join(labels)} in {images}"
    else:
        subject = f"of {images} by {', '.join(labels)}"
    description = f"{task['name']}: {task['kind']} {subject}."
    source = str(task.get("source") or "").rstrip(".")
    if source:
        description += f" Source: {source}."
    return description


def sites_of_role(results: Json, role: str) -> list[str]:
    """The names of the sites of a role, sorted."""
    return sorted(name for name, site in results["sites"].items() if site["role"] == role)


def scoring_sites(selection: Json) -> set[str]:
    """The sites whose validation selected a round of a model."""
    return set(chain.from_iterable(item["votes"] for item in selection["candidates"]))


def ordered_sites(results: Json) -> Json:
    """Site -> its part of the results: inside sites by name, then outside sites by name.

    Examples:
        >>> sites = {"C": {"role": "inside"}, "B": {"role": "outside"}, "A": {"role": "inside"}}
        >>> list(ordered_sites({"sites": sites}))
        ['A', 'C', 'B']
    """
    by_name = sorted(results["sites"].items())
    return dict(sorted(by_name, key=lambda item: item[1]["role"] != "inside"))


def table_rows(results: Json) -> list[tuple[str, str, Any, Any]]:
    """(name, role, images of each split, model -> metrics) of the sites, then of the mean of each
    role with several of them.
    """
    rows = []
    for name, site in ordered_sites(results).items():
        rows.append((name, site["role"], site["n"], site["metrics"]))
    for role, models in results["mean"].items():
        if len(sites_of_role(results, role)) > 1:
            rows.append(("mean", role, {}, models))
    return rows


def event_counts(events: Iterable[Json]) -> str:
    """The number of events by kind and site in words; more than five sites are counted, not named.

    Examples:
        >>> rejected = {"kind": "rejected", "site": "B"}
        >>> event_counts([rejected, {"kind": "at_chance", "site": None}, rejected])
        'rejected at B (2); at chance'
        >>> event_counts({"kind": "failed", "site": site} for site in (None, "B"))
        'failed at B, the federation'
        >>> event_counts({"kind": "undefined", "site": f"site-{number}"} for number in range(6))
        'undefined at 6 sites'
    """
    kinds: dict[str, Counter[str]] = {}
    for event in events:
        kind = event["kind"].replace("_", " ")
        kinds.setdefault(kind, Counter())[event["site"] or ""] += 1
    return "; ".join(f"{kind}{_at_sites(counts)}" for kind, counts in kinds.items())


def _at_sites(counts: Counter[str]) -> str:
    sites = counts.keys() - {""}
    if not sites:
        return f" ({counts['']})" if counts[""] > 1 else ""
    if len(sites) > _MOST:
        total = f" ({counts.total()})" if counts.total() > len(sites) else ""
        return f" at {len(sites)} sites{total}"
    names = []
    for site in [*sorted(sites), ""]:
        name = site or "the federation"
        if counts[site]:
            names.append(f"{name} ({counts[site]})" if counts[site] > 1 else name)
    return f" at {', '.join(names)}"


def selector_line(results: Json) -> str:
    """How a model that selects one of several networks does so, in one line; "" for all other
    models.
    """
    selector = results.get("selector")
    if not selector:
        return ""
    source = "as set"
    if selector["candidates"]:
        source = f"{len(selector['candidates'])} candidates"
        if selector["mean_gain"] is not None:
            source += f"; mean paired gain {selector['mean_gain']:+.3f} over the global model"
    line = f"gamma {selector['gamma']:.2f} ({source})"
    correct = 0
    images = 0
    for site, row in selector["confusion"].items():
        correct += row.get(site, 0)
        images += sum(row.values())
    if images:
        line += f"; the selector recognizes the site of {correct} of {images} test images"
    return line


def synthetic_source(results: Json) -> str:
    """The task's description of its images if they are synthetic, else ""."""
    source = str(results["configuration"]["task"].get("source", ""))
    if "synthetic" not in source.lower():
        return ""
    return source
