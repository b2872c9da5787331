"""Numbers and names of a results dict as text: the same on the console, in reports and in the tables of studies."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from medflare.evaluation.labels import labels_of, named_metrics
from medflare.tasks.metrics_table import metric_table

UNDEFINED: Final = "–"
_WORDS: Final = {"ppv": "positive predictive value", "f1": "F1", "auc": "AUC", "auprc": "AUPRC"}  # of a class
_MOST: Final = 5  # sites that one line names


def metric_label(metric: str) -> str:
    """The metric's name in words."""
    known = metric_table().get(metric)
    return known.words if known else _WORDS.get(metric, metric.replace("_", " "))


def lower_is_better(metric: str) -> bool:
    """True for distances and errors."""
    known = metric_table().get(metric)
    return known is not None and known.lower_is_better


def format_metric(metric: str, value: float | None, interval: Sequence[float] | None = None) -> str:
    """Three decimals, one for distances, a dash for an undefined value; the interval is on a second line.

    Examples:
        >>> format_metric("dice", 0.9123, (0.84, 0.984)), format_metric("hd95_mm", 3.14), format_metric("dice", None)
        ('0.912\\n0.840 to 0.984', '3.1', '–')
    """
    if value is None:
        return UNDEFINED
    known = metric_table().get(metric)
    number, *bounds = (f"{part:.{known.digits if known else 3}f}" for part in (value, *(interval or ())))
    return f"{number}\n{bounds[0]} to {bounds[1]}" if bounds else number


def format_values(metric: str, values: Iterable[float]) -> str:
    """The values of a few patients, the lowest first, without undefined ones.

    Examples:
        >>> format_values("dice", [0.102, 0.07, float("nan")])
        'each: 0.070, 0.102'
    """
    defined = sorted(value for value in values if value == value)
    return f"each: {', '.join(format_metric(metric, value) for value in defined)}" if defined else ""


def format_bytes(count: float) -> str:
    """Bytes with binary prefixes: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """A duration: "0.43 s", "12.1 s", "3 min 20 s", "2 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def counted(number: int, noun: str) -> str:
    """ "1 site", "2 sites"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_setting(value: Any) -> str:
    """A setting as `--set` takes it: true, false and none in lower case, list items separated by commas."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(format_setting, value)) if isinstance(value, list | tuple) else str(value)


def best_value(metric: str, values: Iterable[float | None]) -> float | None:
    """The best of the defined values; None if they do not differ."""
    defined = {value for value in values if value is not None}
    if len(defined) < 2:
        return None
    return min(defined) if lower_is_better(metric) else max(defined)


def is_best(models: Mapping[str, Mapping[str, float | None]], model: str, metric: str) -> bool:
    """Whether a model is the best of a site's (or the mean's) models by a metric.

    Examples:
        >>> models = {"global": {"dice": 0.5}, "personal": {"dice": 0.6}, "deployed": {"dice": None}}
        >>> [is_best(models, model, "dice") for model in models]
        [False, True, False]
    """
    value = models[model][metric]
    return value is not None and value == best_value(metric, (other[metric] for other in models.values()))


# -- parts of a results dict -------------------------------------------------------------------------------------------------


def metric_names(results: Mapping[str, Any]) -> tuple[str, ...]:
    """The metrics that have a value anywhere, the task's own metric (the one that selects models) first."""
    models = [model for site in results["sites"].values() for model in site["metrics"].values()]
    names = tuple(dict.fromkeys(metric for model in models for metric, value in named_metrics(model).items() if value is not None))
    key = results["configuration"]["task"].get("metric")
    return (key, *(metric for metric in names if metric != key)) if key in names else names


def label_metric(metric: str) -> str:
    """The metric of one structure or class whose mean a metric is."""
    return {"balanced_accuracy": "sensitivity"}.get(metric, metric.removesuffix("_macro"))


def label_tables(results: Mapping[str, Any], *, intervals: bool = False) -> dict[str, dict[str, dict[str, str]]]:
    """Tables of the deployed model by structure or class: title -> site -> label -> value as text; first that of the task's own metric.

    A table of a single label is left out: its values are those of the site. `intervals`: with those over patients, 95 %.
    """
    task = results["configuration"]["task"]
    first, word = label_metric(task.get("metric", "")), "structure" if task.get("kind") == "segmentation" else "class"
    tables: dict[str, dict[str, dict[str, str]]] = {}
    for site, content in ordered_sites(results).items():
        for label, values, bounds in labels_of(content, "deployed"):
            for metric in sorted(values, key=lambda metric: metric != first):
                table = tables.setdefault(f"{metric_label(metric)} by {word}, deployed model", {})
                table.setdefault(site, {})[label] = format_metric(metric, values[metric], bounds.get(metric) if intervals else None)
    return {title: table for title, table in tables.items() if max(map(len, table.values())) > 1}


def method_tables(results: Mapping[str, Any]) -> dict[str, Mapping[str, Mapping[str, Any]]]:
    """The cross-site matrix, if there is one, and the tables that the method reports: title -> row -> column -> number or text."""
    metric = results["configuration"]["task"].get("metric", "")
    matrix = {
        owner: {f"images of {site}": format_metric(metric, value) for site, value in row.items()}
        for owner, row in results.get("cross_site", {}).items()
    }
    title = f"{metric_label(metric)} of personal models"
    return {**({title: matrix} if matrix else {}), **results.get("tables", {})}


def model_columns(results: Mapping[str, Any]) -> dict[str, str]:
    """Heading ("global = deployed") of a column -> the model whose numbers it shows; the heading of a single column is "model".

    Models with the same numbers at every site share a column, models without any number do not.
    """
    metrics = [site["metrics"] for site in results["sites"].values()]
    groups: list[list[str]] = []
    for model in dict.fromkeys(name for of_site in metrics for name in of_site):
        defined = any(value is not None for of_site in metrics for value in of_site[model].values())
        equal = [group for group in groups if defined and all(of_site[group[0]] == of_site[model] for of_site in metrics)]
        if equal:
            equal[0].append(model)
        else:
            groups.append([model])
    return {"model": groups[0][0]} if len(groups) == 1 else {" = ".join(group): group[0] for group in groups}


def deployed_first(columns: Mapping[str, str]) -> dict[str, str]:
    """The columns of `model_columns` with the deployed model's first: its numbers are the answer of a page.

    Examples:
        >>> deployed_first({"global": "global", "personal = deployed": "personal"})
        {'deployed = personal': 'personal', 'global': 'global'}
    """
    first, others = {}, {}
    for heading, model in columns.items():
        names = heading.split(" = ")
        if "deployed" in names:
            names.remove("deployed")
            first[" = ".join(["deployed", *names])] = model
        else:
            others[heading] = model
    return first | others


def spread_over_sites(results: Mapping[str, Any], metric: str) -> dict[str, dict[str, str]]:
    """Rows of the worst inside site and of the disparity (best minus worst): heading -> model -> text; empty below two inside sites.

    A model with values at fewer than two of them has dashes.
    """
    inside = {name: site["metrics"] for name, site in ordered_sites(results).items() if site["role"] == "inside"}
    if len(inside) < 2:
        return {}
    lower = lower_is_better(metric)
    worst_row, gap_row = {}, {}
    for model in dict.fromkeys(model for metrics in inside.values() for model in metrics):
        values = {name: metrics[model].get(metric) for name, metrics in inside.items()}
        defined = {name: value for name, value in values.items() if value is not None}
        if len(defined) < 2:
            worst_row[model] = gap_row[model] = UNDEFINED
            continue
        order = sorted(defined, key=lambda name: (defined[name], name), reverse=lower)
        worst, best = order[0], order[-1]
        worst_row[model] = f"{format_metric(metric, defined[worst])}\n{worst}"
        gap_row[model] = format_metric(metric, abs(defined[best] - defined[worst]))
    return {"worst inside site": worst_row, "disparity (best minus worst)": gap_row}


def task_description(task: Mapping[str, Any]) -> str:
    """What a task is, in one sentence; "" for no task.

    Examples:
        >>> task_description({"name": "eyes", "kind": "segmentation", "labels": ["disc", "cup"], "spatial_dims": 2, "source": "A, 2020"})
        'eyes: segmentation of disc, cup in images. Source: A, 2020.'
    """
    if not task:
        return ""
    images = "volumes" if task.get("spatial_dims") == 3 else "images"
    kind = task["kind"]
    join = "of" if kind == "segmentation" else "by"
    source = str(task.get("source") or "").rstrip(".")
    labels = list(task.get("labels", ()))
    if kind == "segmentation" and task.get("target") == "multiclass":
        labels = labels[1:]  # the first is the background
    subject = f"{join} {', '.join(labels)} in {images}" if kind == "segmentation" else f"of {images} {join} {', '.join(labels)}"
    return f"{task['name']}: {kind} {subject}." + (f" Source: {source}." if source else "")


def ordered_sites(results: Mapping[str, Any]) -> dict[str, Any]:
    """Site -> its part of the results: inside sites by name, then outside sites by name.

    Examples:
        >>> sites = {"C": {"role": "inside"}, "B": {"role": "outside"}, "A": {"role": "inside"}}
        >>> list(ordered_sites({"sites": sites}))
        ['A', 'C', 'B']
    """
    return dict(sorted(results["sites"].items(), key=lambda site: (site[1]["role"] != "inside", site[0])))


def event_counts(events: Iterable[Mapping[str, Any]]) -> str:
    """The number of events by kind and site in words; more than five sites are counted, not named.

    Examples:
        >>> event_counts([{"kind": "rejected", "site": "B"}, {"kind": "at_chance", "site": None}, {"kind": "rejected", "site": "B"}])
        'rejected at B (2); at chance'
        >>> event_counts({"kind": "undefined", "site": f"site-{number}"} for number in range(6))
        'undefined at 6 sites'
    """
    kinds: dict[str, Counter[str]] = {}
    for event in events:
        kinds.setdefault(event["kind"].replace("_", " "), Counter())[event["site"] or ""] += 1

    def counted(sites: Counter[str]) -> str:
        if len(sites) > _MOST:
            return f" at {len(sites)} sites" + (f" ({sites.total()})" if sites.total() > len(sites) else "")
        names = ", ".join(f"{site} ({count})" if count > 1 else site for site, count in sorted(sites.items())).strip()
        return f" at {names}" if names else ""

    return "; ".join(f"{kind}{counted(sites)}" for kind, sites in kinds.items())


def selector_line(results: Mapping[str, Any]) -> str:
    """How a model that selects one of several networks does so, in one line; "" for all other models."""
    selector = results.get("selector")
    if not selector:
        return ""
    gain, rows, count = selector["mean_gain"], selector["confusion"], len(selector["candidates"])
    source = f"{count} candidates" + ("" if gain is None else f"; mean paired gain {gain:+.3f} over the global model")
    correct, images = sum(row.get(site, 0) for site, row in rows.items()), sum(sum(row.values()) for row in rows.values())
    line = f"gamma {selector['gamma']:.2f} ({source if count else 'as set'})"
    return line + (f"; the selector recognizes the site of {correct} of {images} test images" if images else "")


def synthetic_source(results: Mapping[str, Any]) -> str:
    """The task's description of its images if they are synthetic, else ""."""
    source = str(results["configuration"]["task"].get("source", ""))
    return source if "synthetic" in source.lower() else ""
