"""report.html: a self-contained page about a run, written at the server, and one about its patients, written at each site."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from medflare.core.packages import installed
from medflare.core.palette import structure_colours
from medflare.core.rng import numpy_generator
from medflare.core.store import write_atomically, write_json
from medflare.evaluation import presentation as text
from medflare.evaluation.figures import Panel, line_panels, patients_plot, roc_curves, training_curves
from medflare.evaluation.labels import labels_of
from medflare.evaluation.results import (
    REPORT_FILE,
    RESULTS_FILE,
    ROLES,
    SPLITS,
    RunRecord,
    SiteRecord,
    build_results,
    json_ready,
    site_results,
)
from medflare.evaluation.verdicts import UNUSABLE, findings_at_site, findings_of, verdict
from medflare.tasks import classes
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
    environment.filters.update(label=text.metric_label, setting=text.format_setting, bytes=text.format_bytes, seconds=text.format_seconds)
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    environment.globals.update(zip=zip, shown=text.format_metric, best=text.is_best, lower_is_better=text.lower_is_better)
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
    sites = text.ordered_sites(results)
    reports: dict[str, dict[str, Any]] = {}
    for name, site in sites.items():
        for model, content in site.get("reports", {}).items():
            shown = {key: value for key, value in content.items() if key != "selector"}  # the table of the selector has it
            reports.setdefault(model, {})[name] = _flattened(shown)
    inside = [name for name, site in sites.items() if site["role"] == "inside"]
    columns = text.deployed_first(text.model_columns(results))
    found = findings_of(results)
    selector = results.get("selector")
    counts = selector["confusion"] if selector else {}
    return template("report.html").render(
        results=results,
        metrics=text.metric_names(results),
        constants=_mean_constants(sites),
        spread={metric: text.spread_over_sites(results, metric) for metric in text.metric_names(results)},
        description=text.task_description(results["configuration"]["task"]),
        unusable=any(finding.kind in UNUSABLE for finding in found),
        best_model=_usable_folder(columns),
        verdict=verdict(results),
        citation=results.get("citation", ""),
        columns=columns,
        sites=sites,
        roles=[role for role in ROLES if any(site["role"] == role for site in sites.values())],
        splits=SPLITS,
        synthetic=text.synthetic_source(results),
        findings=found,
        tiles=_tiles(results),
        curves=training_curves(results, history),
        drawable=installed("matplotlib"),
        model_selection={model: _shown_selection(selection) for model, selection in results.get("model_selection", {}).items()},
        selector=selector,
        selector_line=text.selector_line(results),
        confusion=_by_site({site: {other: row.get(other, 0) for other in inside} for site, row in counts.items()}),
        reports={model: _by_site(rows) for model, rows in reports.items()},
        labels={title: _by_site(rows) for title, rows in text.label_tables(results, intervals=True).items()},
        tables={title: _by_site(rows) for title, rows in text.method_tables(results).items()},
        pictures=pictures or {},
        classes=[(each, roc_curves(each["points"], each["auc"], f"roc-{place}")) for place, each in enumerate(class_tables(results))],
    )


def _mean_constants(sites: Mapping[str, Any]) -> dict[str, float | None]:
    """Role -> mean of the constant answer over its sites that have one; empty if no site has one."""
    means: dict[str, float | None] = {}
    for role in ROLES:
        values = [site["constant"] for site in sites.values() if site["role"] == role and site.get("constant") is not None]
        means[role] = fmean(values) if values else None
    return means if any(value is not None for value in means.values()) else {}


def _usable_folder(columns: Mapping[str, str]) -> str:
    """The model that the next steps use: the deployed one if it differs from the global one."""
    same = any({"global", "deployed"} <= set(heading.split(" = ")) for heading in columns)
    return "global" if same or len(columns) < 2 else "deployed"


def _tiles(results: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(heading, number, explanation) of the numbers that a reader looks for first."""
    tiles = []
    for metric in text.metric_names(results)[:1]:
        for role in ROLES:
            values = [site["metrics"]["deployed"][metric] for site in results["sites"].values() if site["role"] == role]
            value, defined = results["mean"][role]["deployed"][metric], sum(value is not None for value in values)
            if value is not None:
                some = f"{defined} of " if defined < len(values) else ""
                where = f"mean over {some}{text.counted(len(values), f'{role} site')}, deployed model"
                tiles.append((f"{text.metric_label(metric)}, {role}", text.format_metric(metric, value), where))
    for model, selection in results.get("model_selection", {}).items():
        if selection["round"] is not None:
            voters = text.counted(len({site for candidate in selection["candidates"] for site in candidate["votes"]}), "site")
            where = f"of training, {model} model, by the validation of {voters}"
            tiles.append(("Selected round", f"{selection['round']} of {results['rounds']}", where))
    down, up = results["traffic"]["down_bytes"], results["traffic"]["up_bytes"]
    tiles.append(("Traffic", text.format_bytes(down + up), f"{text.format_bytes(down)} to the sites, {text.format_bytes(up)} from them"))
    if (total := results["seconds"].get("total")) is not None:
        tiles.append(("Time", text.format_seconds(total), f"{text.counted(results['rounds'], 'round')}, start to finish"))
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
    task, sites = results["configuration"]["task"], text.ordered_sites(results)
    if task.get("kind") != "classification":
        return []
    names, curves = classes.matrix_names(task["target"], task["labels"]), classes.curve_names(task["target"], task["labels"])
    sizes = [len(labels) for labels in names.values()]
    tables = []
    for heading, model in text.model_columns(results).items():
        by_site = {site: content["classes"][model] for site, content in sites.items() if model in content.get("classes", {})}
        fits = {site: (len(of["roc"]), *map(len, of["confusion"])) == (len(curves), *sizes) for site, of in by_site.items()}
        reports = {site: report for site, report in by_site.items() if fits[site]}
        if not reports:
            continue
        together, single = [], []
        for place, (name, labels) in enumerate(names.items()):
            suffix = f", {name}" if name else ""
            for role in ROLES:
                counts = [report["confusion"][place] for site, report in reports.items() if sites[site]["role"] == role]
                if len(counts) > 1:
                    together.append((f"{len(counts)} {role} sites together{suffix}", labels, classes.pooled(counts)))
            single += [(f"{site}{suffix}", labels, report["confusion"][place]) for site, report in reports.items()]
        areas: list[list[str]] = []
        points: dict[str, dict[str, list[tuple[float, float]]]] = {}
        auc: dict[str, dict[str, float]] = {}
        for site, report in reports.items():
            areas.append([site])
            for curve, content in zip(curves, report["roc"], strict=True):
                bounds = None if content["low"] is None else (content["low"], content["high"])
                areas[-1].append(text.format_metric("auc", content["auc"], bounds))
                if content["sensitivity"]:
                    points.setdefault(curve, {})[site] = list(zip(classes.FALSE_ALARMS, content["sensitivity"], strict=True))
                    auc.setdefault(curve, {})[site] = content["auc"]
        parts = {"pooled": together, "single": single, "curves": curves, "areas": areas, "points": points, "auc": auc}
        tables.append({"model": heading, **parts})
    return sorted(tables, key=lambda table: "deployed" not in table["model"].split(" = "))


# -- a site's own report -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SiteReport:
    """What a site knows of its final models: images of each split, test results by model, and PNG files by title.

    `constant`: the task's metric of the constant answer, None if it is suppressed.
    `of_training`: see `verdicts.kinds_of_training`.
    """

    method: str
    site: str
    role: str
    task: TaskConfig
    n: Mapping[str, int]
    models: Mapping[str, Summary]
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()
    constant: float | None = None
    of_training: Sequence[str] = ()


def render_site_report(report: SiteReport) -> str:
    """The site's page as HTML. It names patients and stays at the site."""
    task, models = report.task, report.models
    record = SiteRecord(
        report.role,
        report.n,
        {model: summary.metrics for model, summary in models.items()},
        classes={name: content for name, each in models.items() if (content := classes.class_report(each.cases, task.target, task.labels))},
        by_label={model: summary.by_label for model, summary in models.items()},
        intervals={model: summary.intervals for model, summary in models.items()},
        constant=report.constant,
    )
    site = site_results(record, tuple(models), task)
    results = {"sites": {report.site: site}, "configuration": {"task": task.to_dict()}, "events": report.events}
    columns = text.deployed_first(text.model_columns(results))
    values_of_patients = {model: summary.cases.values for model, summary in models.items()}
    values = {heading: of_model for heading, model in columns.items() if (of_model := patient_values(models[model].cases, task))}
    deployed = patient_values(models["deployed"].cases, task) if "deployed" in models else {}
    lowest = sorted(deployed, key=lambda name: (deployed[name], name))[:_LISTED]
    intervals = {heading: mean_interval(of_model) for heading, of_model in values.items()}
    points: dict[str, dict[str, list[tuple[float, float]]]] = {}  # class -> model -> its ROC curve
    areas: dict[str, dict[str, float]] = {}
    calibration: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for heading, model in columns.items():
        for name, (scores, truth) in classes.one_against_rest(models[model].cases, task.target, task.labels).items():
            if corners := classes.curve_points(scores, truth):
                points.setdefault(name, {})[heading] = corners
                areas.setdefault(name, {})[heading] = classes.area_interval(scores, truth).value
            calibration.setdefault(name, {})[heading] = classes.reliability_points(scores, truth)
    reliability = [Panel(name, lines, "predicted probability", "frequency of the class") for name, lines in calibration.items()]
    return template("site.html").render(
        report=report,
        description=text.task_description(task.to_dict()),
        metrics=text.metric_names(results),
        columns=columns,
        findings=findings_at_site(results, report.site, report.of_training),
        verdict=verdict(results),
        site=site,
        value_label=value_label(task),
        headings=list(values),
        lowest=[[name, *(text.format_metric("", of_model.get(name)) for of_model in values.values())] for name in lowest],
        plot=patients_plot(values, intervals, value_label(task)),
        few={model: _values_of_few(metrics) for model, metrics in values_of_patients.items()},
        labels=_by_label(site, task, models["deployed"].cases.structures if "deployed" in models else {}),
        structure_colours=_structure_colours(task),
        classes=class_tables(results),
        curves=roc_curves(points, areas, "roc"),
        reliability=line_panels(reliability, "reliability", unit_square=True),
        pictures=report.pictures,
    )


def _structure_colours(task: TaskConfig) -> list[tuple[str, str, str]]:
    """(name, colour of the truth, colour of the prediction) of every structure in the pictures."""
    background = 1 if task.target == "multiclass" else 0
    names = task.labels[background:]
    return [(name, *pair) for name, pair in zip(names, structure_colours(len(names)), strict=True)]


def _values_of_few(values: Mapping[str, Any]) -> dict[str, str]:
    """Metric -> the value of each patient, for metrics with too few values for an interval."""
    defined = {metric: [value for value in each.tolist() if value == value] for metric, each in values.items()}
    return {metric: text.format_values(metric, each) for metric, each in defined.items() if not classes.has_interval(len(each))}


def _by_label(site: Mapping[str, Any], task: TaskConfig, patients: Mapping[str, Any]) -> tuple[list[str], list[list[str]]] | None:
    """(headings, rows) of the deployed model's metrics of every structure or class; None for a single one, which has those of the model.

    `patients`: structure -> metric -> values of patients.
    """
    rows = list(labels_of(site, "deployed"))
    if len(rows) < 2:
        return None
    metrics = list(rows[0][1])
    cells = []
    for label, values, bounds in rows:
        few = _values_of_few(patients.get(label, {}))
        shown = [text.format_metric(name, values[name], bounds.get(name)) + (f"\n{few[name]}" if few.get(name) else "") for name in metrics]
        cells.append([label, *shown])
    return ["structure" if task.kind == "segmentation" else "class", *map(text.metric_label, metrics)], cells


def patient_values(cases: classes.Cases, task: TaskConfig) -> dict[str, float]:
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
    return text.metric_label(task.metric) if task.kind == "segmentation" else "probability of the true class"


def mean_interval(values: Mapping[str, float]) -> tuple[float, float] | None:
    """The 95 % percentile bootstrap interval of a mean over patients (Efron, Annals of Statistics 7, 1979).

    None where `classes.has_interval` forbids it.
    """
    if not classes.has_interval(len(values)):
        return None
    sample = np.array([values[name] for name in sorted(values)])
    draws = numpy_generator(0, "bootstrap over patients").integers(len(sample), size=(_RESAMPLES, len(sample)))
    low, high = np.quantile(sample[draws].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)
