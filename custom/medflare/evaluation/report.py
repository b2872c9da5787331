"""report.html: a self-contained page about a run, written at the server, and one about its
patients, written at each site.
"""

import base64
import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from medflare.core.errors import StateError, one_line
from medflare.core.files import write_atomically, write_json
from medflare.core.packages import installed
from medflare.core.palette import structure_colours
from medflare.core.text import Json, JsonDict, format_seconds, printable_json
from medflare.data.datalist import SPLITS
from medflare.evaluation import presentation as text
from medflare.evaluation.figures import (
    Panel,
    Points,
    RocCurves,
    line_panels,
    patients_drawing,
    roc_curves,
    training_curves,
)
from medflare.evaluation.findings import UNUSABLE, findings_at_site, findings_of, level_sentence
from medflare.evaluation.groups import FEWEST_OF_GROUP, group_rows
from medflare.evaluation.results import (
    REPORT_FILE,
    RESULTS_FILE,
    ROLES,
    ROUNDS_FILE,
    RunRecord,
    SiteRecord,
    build_results,
    defined_mean,
    json_ready,
    load_results,
    site_results,
)
from medflare.tasks import classes
from medflare.tasks.config import TaskConfig, presets
from medflare.tasks.summaries import ALL, Summary, mean_interval

if TYPE_CHECKING:
    from jinja2 import Template

# Of a model selection in the page; long runs of many sites would make it too large to open.
_CANDIDATES = 200
_LISTED = 10  # patients by name, those with the lowest values

_Table = tuple[list[str], list[list[Any]]]  # headings, rows


@cache
def template(name: str) -> "Template":
    """A page of `templates/`, with HTML escaping; an unknown name in it is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("medflare.evaluation"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        base64=lambda content: base64.b64encode(content).decode(),
        by_site=_by_site,
        seconds=format_seconds,
    )
    environment.globals.update(zip=zip, text=text, UNUSABLE=UNUSABLE)
    return environment.get_template(name)


# -- the server's report ---------------------------------------------------------------------------


def write_results(folder: Path, record: RunRecord) -> JsonDict:
    """Write results.json and then report.html into `folder`; returns the results dict, see
    `build_results`.

    A page with pictures, which may show training images, is readable by this account alone, as are
    results and page of a failed run, whose reason may name a file.
    """
    results = build_results(record)
    failed = bool(record.reason)
    write_json(folder / RESULTS_FILE, results, public=not failed)
    page = _page(folder, results, json_ready(record.history), record.pictures)
    private = failed or record.pictures
    write_atomically(folder / REPORT_FILE, page.encode(), public=not private)
    return results


def write_report(folder: Path) -> None:
    """Write report.html of a run from its results.json and metrics.jsonl, for this account alone;
    StateError if another party wrote other content.
    """
    results = load_results(folder)
    history = []
    file = folder / ROUNDS_FILE
    try:
        for line in file.read_bytes().splitlines() if file.exists() else ():
            with suppress(JSONDecodeError):  # a line that a crash cut short
                history.append(printable_json(json.loads(line)))
        page = _page(folder, results, history)
    except Exception as error:
        raise StateError(f"{file}: not the steps of a run: {one_line(error)}") from error
    write_atomically(folder / REPORT_FILE, page.encode())


def _page(
    folder: Path,
    results: Json,
    history: Sequence[Json],
    pictures: Mapping[str, bytes] | None = None,
) -> str:
    models = {path.name for path in (folder / "models").glob("*")}
    return render_report(results, history, pictures, models)


def render_report(
    results: Json,
    history: Sequence[Json] = (),
    pictures: Mapping[str, bytes] | None = None,
    models: Collection[str] = (),
) -> str:
    """The server's page as HTML, from `build_results`, the steps of metrics.jsonl, and PNG files by
    title; `models`: the folders of final models beside it.
    """
    sites = text.ordered_sites(results)
    columns = text.deployed_first(results)
    selections = results.get("model_selection", {})
    class_figures = []
    for number, table in enumerate(class_tables(results)):
        curves = roc_curves(table["roc"], f"roc-{number}")
        class_figures.append((table, curves))
    return template("report.html").render(
        results=results,
        constants=_mean_constants(sites),
        models=models,
        next_model=_usable_folder(columns, models),
        task_options=_task_options(results),
        level=level_sentence(results),
        columns=columns,
        sites=sites,
        splits=SPLITS,
        findings=findings_of(results),
        tiles=_tiles(results),
        curves=training_curves(results, history),
        drawable=installed("matplotlib"),
        model_selection={model: _shown_selection(selections[model]) for model in selections},
        confusion=_confusion(results),
        reports=_reports(sites),
        pictures=pictures or {},
        classes=class_figures,
    )


def _task_options(results: Json) -> str:
    """The options of a command with the run's task; results do not know its file, nor where the
    images are.
    """
    task = results["task"] if results["task"] in presets() else "TASK.json"
    if text.synthetic_source(results):
        return f"--task {task}"
    return f"--task {task} --data-root DATA"


def _confusion(results: Json) -> dict[str, dict[str, int]]:
    """Site -> site predicted by the selector -> number of test images; empty without a selector."""
    rows = {}
    if results.get("selector"):
        inside = text.sites_of_role(results, "inside")
        for site, row in results["selector"]["confusion"].items():
            rows[site] = {predicted: row.get(predicted, 0) for predicted in inside}
    return rows


def _reports(sites: Json) -> dict[str, dict[str, JsonDict]]:
    """Model -> site -> what the model reports of its predictions there."""
    reports: dict[str, dict[str, JsonDict]] = defaultdict(dict)
    for name, site in sites.items():
        for model, content in site.get("reports", {}).items():
            numbers = dict(content)
            numbers.pop("selector", None)  # the table of the selector has it
            reports[model][name] = _flattened(numbers)
    return reports


def _mean_constants(sites: Json) -> dict[str, float | None]:
    """Role -> mean of the constant prediction over its sites that have one; empty without any."""
    means = {}
    for role in ROLES:
        constants = [site.get("constant") for site in sites.values() if site["role"] == role]
        means[role] = defined_mean(constants)
    if means == dict.fromkeys(ROLES):
        return {}
    return means


def _usable_folder(columns: Mapping[str, str], models: Collection[str]) -> str:
    """The model that the next steps use: the deployed one if it differs from the global one and is
    among the final models of the server; "" if there is none.
    """
    same = any({"global", "deployed"} <= set(heading.split(" = ")) for heading in columns)
    if not same and len(columns) >= 2 and "deployed" in models:
        return "deployed"
    return "global" if "global" in models else ""


def _tiles(results: Json) -> list[tuple[str, str, str]]:
    """(heading, number, explanation) of the numbers that a reader looks for first."""
    tiles = []
    sites = results["sites"].values()
    for metric in text.metric_names(results)[:1]:
        for role in ROLES:
            mean = results["mean"][role]["deployed"][metric]
            if mean is None:
                continue
            site_metrics = [site["metrics"]["deployed"] for site in sites if site["role"] == role]
            defined = sum(values[metric] is not None for values in site_metrics)
            some = f"{defined} of " if defined < len(site_metrics) else ""
            measured = text.with_number(len(site_metrics), f"{role} site")
            where = f"mean over {some}{measured}, deployed model"
            heading = f"{text.metric_label(metric)}, {role}"
            tiles.append((heading, text.format_metric(metric, mean), where))
    for model, selection in results.get("model_selection", {}).items():
        if selection["round"] is not None:
            scoring = text.with_number(len(text.scoring_sites(selection)), "site")
            where = f"of training, {model} model, by the validation of {scoring}"
            tiles.append(("Selected round", f"{selection['round']} of {results['rounds']}", where))
    down = results["traffic"]["down_bytes"]
    up = results["traffic"]["up_bytes"]
    parts = f"{text.format_bytes(down)} to the sites, {text.format_bytes(up)} from them"
    tiles.append(("Traffic", text.format_bytes(down + up), parts))
    total = results["seconds"].get("total")
    if total is not None:
        rounds = text.with_number(results["rounds"], "round")
        tiles.append(("Time", format_seconds(total), f"{rounds}, start to finish"))
    return tiles


def _shown_selection(selection: Json) -> Json:
    """A model selection with its latest candidates and the selected one, and "sites" and "cut"
    (whether there were more).
    """
    candidates = selection["candidates"]
    selected = selection["round"]
    earlier = [item for item in candidates[:-_CANDIDATES] if item["round"] == selected]
    return {
        **selection,
        "candidates": earlier + candidates[-_CANDIDATES:],
        "sites": sorted(text.scoring_sites(selection)),
        "cut": len(candidates) > _CANDIDATES,
    }


def _by_site(rows: Mapping[str, Json]) -> _Table:
    """A table from site -> column -> value; an empty cell without a value."""
    columns = list(dict.fromkeys(chain.from_iterable(rows.values())))
    cells = []
    for site, row in rows.items():
        cells.append([site, *(row.get(column, "") for column in columns)])
    return ["site", *columns], cells


def _flattened(content: Any, prefix: str = "") -> JsonDict:
    """Nested mappings as one, with keys joined by spaces, and lists as text."""
    if isinstance(content, Mapping):
        flat: JsonDict = {}
        for key, value in content.items():
            flat |= _flattened(value, f"{prefix} {key}".strip())
        return flat
    if isinstance(content, float):
        content = f"{content:.4g}"
    elif isinstance(content, list):
        content = ", ".join(map(str, content))
    return {prefix or "value": content}


def class_tables(results: Json) -> list[Json]:
    """Confusion matrices and ROC areas of every model that differs from the others, the deployed
    one first.

    A site without counts (it keeps them back), or with counts of other classes, is left out.

    Returns:
        "model": heading;
        "pooled", "single": (title, classes, counts) of all sites of a role, and of each site;
        "curves": classes with a ROC curve;
        "areas": rows of site, then the area of each curve as text;
        "roc": class -> site -> points of the ROC curve, and its area.
    """
    task = results["configuration"]["task"]
    if task.get("kind") != "classification":
        return []
    sites = text.ordered_sites(results)
    matrices = classes.matrix_names(task["target"], task["labels"])
    curves = classes.curve_names(task["target"], task["labels"])
    sizes = [len(curves), *map(len, matrices.values())]
    tables = []
    for heading, model in text.model_columns(results).items():
        reports = {}
        for site, content in sites.items():
            report = content.get("classes", {}).get(model)
            if report and [len(report["roc"]), *map(len, report["confusion"])] == sizes:
                reports[site] = report
        if not reports:
            continue
        pooled = []
        single = []
        for number, (name, labels) in enumerate(matrices.items()):
            suffix = f", {name}" if name else ""
            by_role = defaultdict(list)
            for site, report in reports.items():
                counts = report["confusion"][number]
                single.append((f"{site}{suffix}", labels, counts))
                by_role[sites[site]["role"]].append(counts)
            for role, confusions in by_role.items():
                if len(confusions) > 1:
                    title = f"{len(confusions)} {role} sites together{suffix}"
                    pooled.append((title, labels, np.sum(confusions, axis=0).tolist()))
        table = {"model": heading, "pooled": pooled, "single": single, "curves": curves}
        tables.append(table | _roc_parts(reports, curves))
    return sorted(tables, key=lambda table: "deployed" not in table["model"].split(" = "))


def _roc_parts(reports: Json, curves: Sequence[str]) -> JsonDict:
    """ "areas" and "roc" of `class_tables`."""
    areas = []
    roc: RocCurves = defaultdict(dict)
    for site, report in reports.items():
        row = [site]
        for name, curve in zip(curves, report["roc"], strict=True):
            bounds = None if curve["low"] is None else (curve["low"], curve["high"])
            row.append(text.format_metric("auc", curve["auc"], bounds))
            if curve["sensitivity"]:
                corners = zip(classes.FALSE_ALARMS, curve["sensitivity"], strict=True)
                roc[name][site] = (list(corners), curve["auc"])
        areas.append(row)
    return {"areas": areas, "roc": roc}


# -- a site's own report ---------------------------------------------------------------------------


@dataclass(frozen=True)
class SiteReport:
    """What a site knows of its final models: images of each split, test results by model, and PNG
    files by title.

    `constant`: the task's metric of the constant prediction, None if it is suppressed.
    `of_training`: see `findings.kinds_of_training`.
    `groups`: see `SiteData.test_groups`; `minimum_patients`: of the site's settings.
    """

    method: str
    site: str
    role: str
    task: TaskConfig
    n: Mapping[str, int]
    models: Mapping[str, Summary]
    pictures: Mapping[str, bytes]
    events: Sequence[Json]
    constant: float | None
    of_training: Sequence[str]
    groups: Mapping[str, Mapping[str, str]]
    minimum_patients: int


def render_site_report(report: SiteReport) -> str:
    """The site's page as HTML. It names patients and stays at the site."""
    task = report.task
    models = report.models
    record = SiteRecord(
        report.role,
        report.n,
        metrics={model: summary.metrics for model, summary in models.items()},
        classes={model: summary.classes for model, summary in models.items()},
        by_label={model: summary.by_label for model, summary in models.items()},
        intervals={model: summary.intervals for model, summary in models.items()},
        constant=report.constant,
    )
    site = site_results(record, models, task)
    results = {
        "sites": {report.site: site},
        "configuration": {"task": task.to_dict()},
        "events": report.events,
    }
    columns = text.deployed_first(results)
    values = {}
    means = {}
    for heading, model in columns.items():
        summary = models[model]
        by_patient = patient_values(summary.cases, task)
        if not by_patient:
            continue
        values[heading] = by_patient
        if task.kind == "segmentation":
            means[heading] = summary.intervals.get(ALL, {}).get(task.metric)
        else:
            means[heading] = mean_interval([by_patient[name] for name in sorted(by_patient)])
    plot = None
    if values:
        plot = patients_drawing(values, means, value_label(task)).svg("patients")
    deployed = models.get("deployed", Summary({})).cases
    deployed_values = patient_values(deployed, task)
    lowest = []
    for name in sorted(deployed_values, key=lambda name: (deployed_values[name], name))[:_LISTED]:
        row = [name]
        for by_patient in values.values():
            row.append(text.format_metric("", by_patient.get(name)))
        lowest.append(row)
    return template("site.html").render(
        report=report,
        metrics=text.metric_names(results),
        columns=columns,
        findings=findings_at_site(results, report.site, report.of_training),
        level=level_sentence(results),
        site=site,
        value_label=value_label(task),
        headings=list(values),
        lowest=lowest,
        plot=plot,
        few={model: _values_of_few(summary.cases.values) for model, summary in models.items()},
        labels=_by_label(site, task, deployed.structures),
        groups=_by_group(report, deployed),
        fewest_of_group=max(report.minimum_patients, FEWEST_OF_GROUP),
        structure_colours=_structure_colours(task),
        classes=class_tables(results),
        **_curves(columns, models, task),
        pictures=report.pictures,
    )


def _curves(
    columns: Mapping[str, str], models: Mapping[str, Summary], task: TaskConfig
) -> dict[str, str | None]:
    """The ROC and reliability curves of a site's page as SVG, a panel for each class."""
    roc: RocCurves = defaultdict(dict)
    calibration: dict[str, dict[str, Points]] = defaultdict(dict)
    for heading, model in columns.items():
        curves = classes.one_against_rest(models[model].cases, task.target, task.labels)
        for name, (scores, truth) in curves.items():
            corners = classes.curve_points(scores, truth)
            if corners:
                roc[name][heading] = (corners, classes.area_interval(scores, truth).value)
            calibration[name][heading] = classes.reliability_points(scores, truth)
    axes = ("predicted probability", "frequency of the class")
    panels = [Panel(name, lines, *axes) for name, lines in calibration.items()]
    return {
        "curves": roc_curves(roc, "roc"),
        "reliability": line_panels(panels, "reliability", unit_square=True),
    }


def _structure_colours(task: TaskConfig) -> list[tuple[str, str, str]]:
    """(name, colour of the truth, colour of the prediction) of every structure in the pictures."""
    names = task.labels[1:] if task.target == "multiclass" else task.labels
    return [(name, *pair) for name, pair in zip(names, structure_colours(len(names)), strict=True)]


def _values_of_few(values: Json) -> dict[str, str]:
    """Metric -> the value of each patient, for metrics with too few values for an interval."""
    texts = {}
    for metric, by_patient in values.items():
        defined = [value for value in by_patient.tolist() if value == value]
        if not classes.has_interval(len(defined)):
            texts[metric] = text.format_values(metric, defined)
    return texts


def _by_label(site: Json, task: TaskConfig, patients: Json) -> _Table | None:
    """The deployed model's metrics of every structure or class; None for a single one, which has
    those of the model.

    `patients`: structure -> metric -> values of patients.
    """
    labels = list(text.labels_of(site, "deployed"))
    if len(labels) < 2:
        return None
    metrics = list(labels[0][1])
    rows = []
    for label, values, bounds in labels:
        few = _values_of_few(patients.get(label, {}))
        row = [label]
        for metric in metrics:
            cell = text.format_metric(metric, values[metric], bounds.get(metric))
            if few.get(metric):
                cell += f"\n{few[metric]}"
            row.append(cell)
        rows.append(row)
    noun = "structure" if task.kind == "segmentation" else "class"
    return [noun, *map(text.metric_label, metrics)], rows


def _by_group(report: SiteReport, deployed: classes.Cases) -> dict[str, _Table]:
    """Sex, age or scanner -> the deployed model's metric by group of patients; suppressed groups
    have one mark, whatever their size.

    `deployed`: its cases.
    """
    metric = report.task.metric
    tables = {}
    for name, groups in report.groups.items():
        rows = []
        for row in group_rows(deployed, groups, report.minimum_patients, report.task):
            if row.patients is None:
                rows.append([row.group, "not shown", "too few"])
            else:
                value = text.format_metric(metric, row.value, row.interval)
                rows.append([row.group, value, str(row.patients)])
        if rows:
            tables[name] = [name, text.metric_label(metric), "patients"], rows
    return tables


def patient_values(cases: classes.Cases, task: TaskConfig) -> dict[str, float]:
    """A model's value for every patient, without undefined ones.

    Returns:
        Patient -> the task's metric; for classification the mean probability of the true class over
        a patient's images and labels.
    """
    if task.kind == "segmentation":
        pairs = zip(cases.patients, cases.values.get(task.metric, ()), strict=False)
        return {name: float(value) for name, value in pairs if value == value}
    if cases.outputs is None:
        return {}
    probabilities = classes.of_truth(*cases.outputs, task.target)
    names, rows = np.unique(np.array(cases.patients), return_inverse=True)
    means = np.bincount(rows, probabilities.mean(axis=1)) / np.bincount(rows)
    return dict(zip(names.tolist(), means.tolist(), strict=True))


def value_label(task: TaskConfig) -> str:
    """The name of `patient_values`."""
    if task.kind == "segmentation":
        return text.metric_label(task.metric)
    return "probability of the true class"
