"""report.html: a self-contained page about a run, written at the server, and one about its patients, written at each site."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from medflare.core.packages import installed
from medflare.core.palette import COLOURS
from medflare.core.rng import numpy_generator
from medflare.core.store import write_atomically, write_json
from medflare.evaluation.figures import Panel, line_panels, patients_plot, roc_curves, training_curves
from medflare.evaluation.presentation import (
    counted,
    doubts,
    format_bytes,
    format_metric,
    format_seconds,
    format_setting,
    is_best,
    label_tables,
    lower_is_better,
    method_tables,
    metric_label,
    metric_names,
    model_columns,
    ordered_sites,
    selector_line,
    synthetic_source,
)
from medflare.evaluation.results import (
    CLASSES,
    REPORT_FILE,
    RESULTS_FILE,
    ROLES,
    SPLITS,
    STRUCTURES,
    RunRecord,
    SiteRecord,
    build_results,
    json_ready,
    site_results,
)
from medflare.tasks.classes import (
    FALSE_ALARMS,
    Cases,
    area_interval,
    class_report,
    curve_names,
    curve_points,
    matrix_names,
    one_against_rest,
    pooled,
    reliability_points,
)
from medflare.tasks.config import TaskConfig
from medflare.tasks.summaries import Summary

if TYPE_CHECKING:
    from jinja2 import Template

_CANDIDATES: Final = 200  # of a model selection in the page; long runs of many sites would make it too large to open
_RESAMPLES: Final = 999
_LISTED: Final = 10  # patients by name, those with the lowest values


@cache
def template(name: str) -> "Template":
    """A page of `templates/`, with HTML escaping; an unknown name in it is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("medflare.evaluation")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(label=metric_label, setting=format_setting, bytes=format_bytes, seconds=format_seconds)
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    environment.globals.update(zip=zip, shown=format_metric, best=is_best, lower_is_better=lower_is_better)
    return environment.get_template(name)


# -- the server's report -----------------------------------------------------------------------------------------------------


def write_results(folder: Path, record: RunRecord) -> dict[str, Any]:
    """Write results.json and then report.html into `folder`; returns the results dict, see `build_results`."""
    results = build_results(record)
    write_json(folder / RESULTS_FILE, results, public=True)
    page = render_report(results, json_ready(record.history), record.pictures)
    write_atomically(folder / REPORT_FILE, page.encode(), public=True)
    return results


def render_report(
    results: Mapping[str, Any], history: Sequence[Mapping[str, Any]] = (), pictures: Mapping[str, bytes] | None = None
) -> str:
    """The server's page as HTML, from `build_results`, the steps of `read_rounds`, and PNG files by title."""
    sites = ordered_sites(results)
    reports: dict[str, dict[str, Any]] = {}
    for name, site in sites.items():
        for model, content in site.get("reports", {}).items():
            shown = {key: value for key, value in content.items() if key != "selector"}  # the table of the selector has it
            reports.setdefault(model, {})[name] = _flattened(shown)
    inside = [name for name, site in sites.items() if site["role"] == "inside"]
    selector = results.get("selector")
    counts = selector["confusion"] if selector else {}
    return template("report.html").render(
        results=results,
        metrics=metric_names(results),
        constants=any(site.get("constant") is not None for site in sites.values()),
        verdict=_verdict(results),
        citation=results.get("citation", ""),
        columns=model_columns(results),
        sites=sites,
        roles=[role for role in ROLES if any(site["role"] == role for site in sites.values())],
        splits=SPLITS,
        synthetic=synthetic_source(results),
        doubts=doubts(results["events"]),
        tiles=_tiles(results),
        curves=training_curves(results, history),
        drawable=installed("matplotlib"),
        model_selection={model: _shown_selection(selection) for model, selection in results.get("model_selection", {}).items()},
        selector=selector,
        selector_line=selector_line(results),
        confusion=_by_site({site: {other: row.get(other, 0) for other in inside} for site, row in counts.items()}),
        reports={model: _by_site(rows) for model, rows in reports.items()},
        labels={title: _by_site(rows) for title, rows in label_tables(results, intervals=True).items()},
        tables={title: _by_site(rows) for title, rows in method_tables(results).items()},
        pictures=pictures or {},
        classes=[(each, roc_curves(each["points"], each["auc"], f"roc-{place}")) for place, each in enumerate(class_tables(results))],
    )


def _verdict(results: Mapping[str, Any]) -> str:
    """Whether the deployed model is better than the constant answer, site by site; "" without constant answers."""
    metric = results["configuration"]["task"].get("metric", "")
    sites = {name: site for name, site in results["sites"].items() if site.get("constant") is not None}
    bounds = {name: site.get("intervals", {}).get("deployed", {}).get(metric) for name, site in sites.items()}
    better = [name for name, site in sites.items() if (bounds[name] or [0])[0] > site["constant"]]
    values = {name: site["metrics"]["deployed"][metric] for name, site in sites.items()}
    worse = [name for name, value in values.items() if value is not None and value <= sites[name]["constant"]]
    rest = len(sites) - len(better) - len(worse)
    parts = [f"better at {len(better)} of {len(sites)} sites (the whole interval is above it)"]
    parts += [f"not better at {', '.join(sorted(worse))}"] if worse else []
    parts += [f"open at {rest}"] if rest else []
    return f"Deployed model against the constant answer, which ignores the image: {'; '.join(parts)}." if sites else ""


def _tiles(results: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(heading, number, explanation) of the numbers that a reader looks for first."""
    tiles = []
    for metric in metric_names(results)[:1]:
        for role in ROLES:
            values = [site["metrics"]["deployed"][metric] for site in results["sites"].values() if site["role"] == role]
            value, defined = results["mean"][role]["deployed"][metric], sum(value is not None for value in values)
            if value is not None:
                some = f"{defined} of " if defined < len(values) else ""
                where = f"mean over {some}{counted(len(values), f'{role} site')}, deployed model"
                tiles.append((f"{metric_label(metric)}, {role}", format_metric(metric, value), where))
    for model, selection in results.get("model_selection", {}).items():
        if selection["round"] is not None:
            voters = counted(len({site for candidate in selection["candidates"] for site in candidate["votes"]}), "site")
            where = f"of training, {model} model, by the validation of {voters}"
            tiles.append(("Selected round", f"{selection['round']} of {results['rounds']}", where))
    down, up = results["traffic"]["down_bytes"], results["traffic"]["up_bytes"]
    tiles.append(("Traffic", format_bytes(down + up), f"{format_bytes(down)} to the sites, {format_bytes(up)} from them"))
    if results["seconds"].get("total") is not None:
        tiles.append(("Time", format_seconds(results["seconds"]["total"]), f"{counted(results['rounds'], 'round')}, start to finish"))
    return tiles


def _shown_selection(selection: Mapping[str, Any]) -> dict[str, Any]:
    """A model selection with its latest candidates and the selected one, and "sites" and "cut" (whether there were more)."""
    candidates = selection["candidates"]
    earlier = [candidate for candidate in candidates[:-_CANDIDATES] if candidate["round"] == selection["round"]]
    sites = sorted({site for candidate in candidates for site in candidate["votes"]})
    return {**selection, "candidates": earlier + candidates[-_CANDIDATES:], "sites": sites, "cut": len(candidates) > _CANDIDATES}


def _by_site(rows: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """(headings, rows) of a table from site -> column -> value; a missing value is an empty cell."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    return ["site", *columns], [[site, *(row.get(column, "") for column in columns)] for site, row in rows.items()]


def _flattened(content: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by spaces; lists as text."""
    if isinstance(content, Mapping):
        parts = (_flattened(value, f"{prefix} {key}".strip()) for key, value in content.items())
        return {key: value for part in parts for key, value in part.items()}
    value = f"{content:.4g}" if isinstance(content, float) else ", ".join(map(str, content)) if isinstance(content, list) else content
    return {prefix or "value": value}


def class_tables(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Confusion matrices and ROC areas of every model that differs from the others, the deployed one first.

    A site without counts (it keeps them back), or with counts of other classes, is left out.

    Returns:
        "model": heading; "pooled", "single": (title, classes, counts) of all sites of a role, and of each site; "curves": classes with a
            ROC curve; "areas": rows of site, then the area of each curve as text; "points", "auc": class -> site -> points of the
            ROC curve, and its area.
    """
    task, sites = results["configuration"]["task"], ordered_sites(results)
    if task.get("kind") != "classification":
        return []
    names, curves = matrix_names(task["target"], task["labels"]), curve_names(task["target"], task["labels"])
    sizes = [len(classes) for classes in names.values()]
    tables = []
    for heading, model in model_columns(results).items():
        by_site = {site: content["classes"][model] for site, content in sites.items() if model in content.get("classes", {})}
        fits = {site: (len(of["roc"]), *map(len, of["confusion"])) == (len(curves), *sizes) for site, of in by_site.items()}
        reports = {site: report for site, report in by_site.items() if fits[site]}
        if not reports:
            continue
        together, single = [], []
        for place, (name, classes) in enumerate(names.items()):
            suffix = f", {name}" if name else ""
            for role in ROLES:
                counts = [report["confusion"][place] for site, report in reports.items() if sites[site]["role"] == role]
                if len(counts) > 1:
                    together.append((f"{len(counts)} {role} sites together{suffix}", classes, pooled(counts)))
            single += [(f"{site}{suffix}", classes, report["confusion"][place]) for site, report in reports.items()]
        areas = [[site, *map(_area, report["roc"])] for site, report in reports.items()]
        points: dict[str, dict[str, list[tuple[float, float]]]] = {}
        auc: dict[str, dict[str, float]] = {}
        for site, report in reports.items():
            for curve, content in zip(curves, report["roc"], strict=True):
                if content["sensitivity"]:
                    points.setdefault(curve, {})[site] = list(zip(FALSE_ALARMS, content["sensitivity"], strict=True))
                    auc.setdefault(curve, {})[site] = content["auc"]
        parts = {"pooled": together, "single": single, "curves": curves, "areas": areas, "points": points, "auc": auc}
        tables.append({"model": heading, **parts})
    return sorted(tables, key=lambda table: "deployed" not in table["model"].split(" = "))


def _area(curve: Mapping[str, Any]) -> str:
    return format_metric("auc", curve["auc"], None if curve["low"] is None else (curve["low"], curve["high"]))


# -- a site's own report -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SiteReport:
    """What a site knows of its final models: images of each split, test results by model, and PNG files by title."""

    method: str
    site: str
    role: str
    task: TaskConfig
    n: Mapping[str, int]
    models: Mapping[str, Summary]
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()


def render_site_report(report: SiteReport) -> str:
    """The site's page as HTML. It names patients and stays at the site."""
    task, models = report.task, report.models
    record = SiteRecord(
        report.role,
        report.n,
        {model: summary.metrics for model, summary in models.items()},
        classes={name: content for name, each in models.items() if (content := class_report(each.cases, task.target, task.labels))},
        by_label={model: summary.by_label for model, summary in models.items()},
        intervals={model: summary.intervals for model, summary in models.items()},
    )
    site = site_results(record, tuple(models), task)
    results = {"sites": {report.site: site}, "configuration": {"task": task.to_dict()}}
    columns = model_columns(results)
    by_model = {heading: patient_values(models[model].cases, task) for heading, model in columns.items()}
    values = {heading: of_model for heading, of_model in by_model.items() if of_model}
    deployed = patient_values(models["deployed"].cases, task) if "deployed" in models else {}
    lowest = sorted(deployed, key=lambda name: (deployed[name], name))[:_LISTED]
    intervals = {heading: mean_interval(of_model) for heading, of_model in values.items()}
    points: dict[str, dict[str, list[tuple[float, float]]]] = {}  # class -> model -> its ROC curve
    areas: dict[str, dict[str, float]] = {}
    calibration: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for heading, model in columns.items():
        for name, (scores, truth) in one_against_rest(models[model].cases, task.target, task.labels).items():
            if corners := curve_points(scores, truth):
                points.setdefault(name, {})[heading] = corners
                areas.setdefault(name, {})[heading] = area_interval(scores, truth).value
            calibration.setdefault(name, {})[heading] = reliability_points(scores, truth)
    reliability = [Panel(name, lines, "predicted probability", "frequency of the class") for name, lines in calibration.items()]
    return template("site.html").render(
        report=report,
        metrics=metric_names(results),
        columns=columns,
        doubts=doubts(report.events),
        site=site,
        value_label=value_label(task),
        headings=list(values),
        lowest=[[name, *(format_metric("", of_model.get(name)) for of_model in values.values())] for name in lowest],
        plot=patients_plot(values, intervals, value_label(task)),
        labels=_by_label(site),
        structure_colours=list(zip(task.labels[task.target == "multiclass" :], cycle(COLOURS), strict=False)),
        classes=class_tables(results),
        curves=roc_curves(points, areas, "roc"),
        reliability=line_panels(reliability, "reliability", unit_square=True),
        pictures=report.pictures,
    )


def _by_label(site: Mapping[str, Any]) -> tuple[list[str], list[list[str]]] | None:
    """(headings, rows) of the deployed model's metrics of every structure or class; None for a single one, which has those of the model."""
    for kind in (STRUCTURES, CLASSES):
        values = site["metrics"].get("deployed", {}).get(kind, {})
        bounds = site.get("intervals", {}).get("deployed", {}).get(kind, {})
        if len(values) > 1:
            metrics = list(next(iter(values.values())))
            rows = [[label, *(format_metric(m, row[m], bounds.get(label, {}).get(m)) for m in metrics)] for label, row in values.items()]
            return [{STRUCTURES: "structure", CLASSES: "class"}[kind], *map(metric_label, metrics)], rows
    return None


def patient_values(cases: Cases, task: TaskConfig) -> dict[str, float]:
    """A model's value for every patient, without undefined ones.

    Returns:
        Patient -> the task's metric; for classification the mean probability of the true class over a patient's images and labels.
    """
    if task.kind == "segmentation":
        values = cases.values.get(task.metric, ())
        return {name: float(value) for name, value in zip(cases.patients, values, strict=False) if value == value}
    if cases.probabilities is None or cases.targets is None:
        return {}
    probabilities, truth = cases.probabilities.numpy(), cases.targets.long().numpy()
    if task.target == "multiclass":
        correct = np.take_along_axis(probabilities, truth[:, None], axis=1)
    else:
        correct = np.where(truth.reshape(probabilities.shape) == 1, probabilities, 1 - probabilities)
    names, places = np.unique(np.array(cases.patients), return_inverse=True)
    means = np.bincount(places, correct.mean(axis=1)) / np.bincount(places)
    return dict(zip(names.tolist(), means.tolist(), strict=True))


def value_label(task: TaskConfig) -> str:
    """The name of `patient_values`."""
    return metric_label(task.metric) if task.kind == "segmentation" else "probability of the true class"


def mean_interval(values: Mapping[str, float]) -> tuple[float, float] | None:
    """The 95 % percentile bootstrap interval of a mean over patients (Efron, Annals of Statistics 7, 1979); None below two patients."""
    if len(values) < 2:
        return None
    sample = np.array([values[name] for name in sorted(values)])
    draws = numpy_generator(0, "bootstrap over patients").integers(len(sample), size=(_RESAMPLES, len(sample)))
    low, high = np.quantile(sample[draws].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)
