"""How names and numbers of a results dict are shown: the same on the console, in the report and in tables of the documentation."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from medflare.tasks.metrics_table import METRICS

UNDEFINED: Final = "–"
_NAMED: Final = 5  # sites that a line names


def metric_label(metric: str) -> str:
    """The metric's name in words; unknown metrics keep their own."""
    return METRICS[metric].words if metric in METRICS else metric.replace("_", " ")


def lower_is_better(metric: str) -> bool:
    """True for distances."""
    return metric in METRICS and METRICS[metric].lower_is_better


def format_metric(metric: str, value: float | None) -> str:
    """Three decimals for shares, one for pixels, a dash where the metric is undefined."""
    if value is None:
        return UNDEFINED
    return f"{value:.1f}" if lower_is_better(metric) else f"{value:.3f}"


def best_value(metric: str, values: Iterable[float | None]) -> float | None:
    """The best of the defined values; None where they do not differ: there is nothing to be better than."""
    defined = {value for value in values if value is not None}
    if len(defined) < 2:
        return None
    return min(defined) if lower_is_better(metric) else max(defined)


def is_best(models: Mapping[str, Mapping[str, float | None]], model: str, metric: str) -> bool:
    """Whether this model is the best of the site's (or the mean's) models by the metric.

    Args:
        models: model -> metric -> value.

    Examples:
        >>> models = {"global": {"dice": 0.5}, "personal": {"dice": 0.6}, "deployed": {"dice": None}}
        >>> [is_best(models, model, "dice") for model in models]
        [False, True, False]
    """
    value = models[model][metric]
    return value is not None and value == best_value(metric, (other[metric] for other in models.values()))


def format_bytes(count: float) -> str:
    """Bytes with binary prefixes: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def event_counts(events: Iterable[Mapping[str, Any]]) -> str:
    """Whom events are about, kind by kind, with their numbers; many sites are counted.

    Examples:
        >>> event_counts([{"kind": "rejected", "site": "B"}, {"kind": "warning", "site": None}, {"kind": "rejected", "site": "B"}])
        'rejected B 2; warning 1'
        >>> event_counts({"kind": "undefined", "site": f"site-{number}"} for number in range(6))
        'undefined 6 at 6 sites'
    """
    found: dict[str, Counter[str]] = {}
    for event in events:
        found.setdefault(event["kind"], Counter())[event["site"] or ""] += 1
    return "; ".join(f"{kind} {_counted(sites)}" for kind, sites in found.items())


def _counted(sites: Counter[str]) -> str:
    if len(sites) > _NAMED:
        return f"{sites.total()} at {len(sites)} sites"
    return ", ".join(f"{site} {count}".strip() for site, count in sorted(sites.items()))


def format_seconds(seconds: float) -> str:
    """A duration a person can read: "0.43 s", "12.1 s", "3 min 20 s", "2 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_setting(value: Any) -> str:
    """A setting as `--set` takes it: true, false and none in small letters, the parts of a list separated by commas."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(format_setting, value)) if isinstance(value, list | tuple) else str(value)


def metric_names(results: Mapping[str, Any]) -> tuple[str, ...]:
    """The metrics that have a value anywhere, the task's own metric (the one that selects models) first."""
    models = [model for site in results["sites"].values() for model in site["metrics"].values()]
    found = tuple(dict.fromkeys(metric for model in models for metric, value in model.items() if value is not None))
    key = results["configuration"]["task"].get("metric")
    return (key, *(metric for metric in found if metric != key)) if key in found else found


def model_names(results: Mapping[str, Any]) -> tuple[str, ...]:
    """The kinds of model that sites report: "global", "personal", "deployed", and what else a method compares."""
    return tuple(dict.fromkeys(model for site in results["sites"].values() for model in site["metrics"]))


def model_columns(results: Mapping[str, Any]) -> dict[str, str]:
    """Columns of a table of models: models whose numbers are the same at every site share one.

    A model without any number is equal to nobody: nothing is known of it.

    Returns:
        Heading -> the model whose numbers the column shows.

    Examples:
        >>> one, other = {"dice": 0.5}, {"dice": 0.6}
        >>> model_columns({"sites": {"A": {"metrics": {"global": one, "personal": other, "deployed": one}}}})
        {'global = deployed': 'global', 'personal': 'personal'}
    """
    groups: list[list[str]] = []
    for model in model_names(results):
        numbers = _numbers(results, model)
        defined = any(value is not None for metrics in numbers for value in metrics.values())
        twins = next((group for group in groups if defined and _numbers(results, group[0]) == numbers), None)
        groups.append([model]) if twins is None else twins.append(model)
    return {" = ".join(group): group[0] for group in groups}


def _numbers(results: Mapping[str, Any], model: str) -> list[Mapping[str, float | None]]:
    return [site["metrics"][model] for site in results["sites"].values()]


def ordered_sites(results: Mapping[str, Any]) -> dict[str, Any]:
    """Sites by name, those inside the federation before those outside.

    Returns:
        Site -> its part of the results.

    Examples:
        >>> sites = {"C": {"role": "inside"}, "B": {"role": "outside"}, "A": {"role": "inside"}}
        >>> list(ordered_sites({"sites": sites}))
        ['A', 'C', 'B']
    """
    sites = results["sites"]
    return {name: sites[name] for name in sorted(sites, key=lambda name: (sites[name]["role"] != "inside", name))}


def privacy_costs(results: Mapping[str, Any]) -> dict[str, str]:
    """Site -> what training has cost its patients' privacy, in words; sites that trained without DP-SGD are left out."""
    costs = {name: site["privacy"] for name, site in ordered_sites(results).items() if "privacy" in site}
    return {
        name: f"ε = {format_metric('', cost['epsilon'])} at δ = {cost['delta']:g}, {cost['steps']} steps" for name, cost in costs.items()
    }


def selector_line(results: Mapping[str, Any]) -> str:
    """By what a model that selects one of several networks does so, in one line; "" for all others."""
    selector = results.get("selector")
    if not selector:
        return ""
    gain, taken, count = selector["mean_gain"], selector["confusion"], len(selector["candidates"])
    chosen = f"{count} candidates" + ("" if gain is None else f"; mean paired gain {gain:+.3f} over the global model")
    known, images = sum(row.get(site, 0) for site, row in taken.items()), sum(sum(row.values()) for row in taken.values())
    line = f"gamma {selector['gamma']:.2f} ({chosen if count else 'as set'})"
    return line + (f"; the selector knows {known} of {images} test images" if images else "")


def synthetic_source(results: Mapping[str, Any]) -> str:
    """The task's own words on its images where they are synthetic, else ""."""
    source = str(results["configuration"]["task"].get("source", ""))
    return source if "synthetic" in source.lower() else ""
