"""How a classification task's confusion counts and ROC curves are shown, in the server's report and in a site's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medflare.evaluation.names import ROLES
from medflare.evaluation.presentation import UNDEFINED, format_metric, model_columns, ordered_sites
from medflare.tasks.classes import curve_names, matrix_names, pooled, row_shares


@dataclass(frozen=True)
class Matrix:
    """A confusion matrix to be drawn.

    Attributes:
        title: whose images, and of a multilabel task which label.
        classes: names of rows and columns.
        rows: (share of the row or None, images) of every cell.
    """

    title: str
    classes: tuple[str, ...]
    rows: list[list[tuple[float | None, int]]]


@dataclass(frozen=True)
class ClassTables:
    """What is shown of one model.

    Attributes:
        model: heading, equal models together.
        pooled: of all sites of a role together.
        single: of each site.
        curves: classes with a ROC curve.
        areas: site -> area and interval of each of `curves`, in words.
        points: class -> site -> sensitivities, see `tasks.classes.FALSE_ALARMS`.
    """

    model: str
    pooled: list[Matrix]
    single: list[Matrix]
    curves: tuple[str, ...]
    areas: dict[str, list[str]]
    points: dict[str, dict[str, list[float]]]


def class_tables(results: Mapping[str, Any]) -> list[ClassTables]:
    """Confusion matrices and areas of every model that differs from the others, the deployed one first.

    A site's report that does not fit the task's classes is left out.
    """
    task = results["configuration"]["task"]
    if task.get("kind") != "classification":
        return []
    names, curves = matrix_names(task["target"], task["labels"]), curve_names(task["target"], task["labels"])
    found = []
    for heading, model in model_columns(results).items():
        reports = {site: about["classes"][model] for site, about in ordered_sites(results).items() if model in about.get("classes", {})}
        known = {site: report for site, report in reports.items() if _fits(report, names, curves)}
        if known:
            found.append(_tables(heading, known, {site: about["role"] for site, about in results["sites"].items()}, names, curves))
    return sorted(found, key=lambda tables: "deployed" not in tables.model.split(" = "))


def _fits(report: Mapping[str, Any], names: Mapping[str, Sequence[str]], curves: Sequence[str]) -> bool:
    """Lists are empty where a site keeps them back."""
    sizes = [len(matrix) for matrix in report["confusion"]]
    return sizes == [len(classes) for classes in names.values()] and len(report["roc"]) == len(curves)


def _tables(
    heading: str,
    reports: Mapping[str, Mapping[str, Any]],
    roles: Mapping[str, str],
    names: Mapping[str, tuple[str, ...]],
    curves: tuple[str, ...],
) -> ClassTables:
    together, single = [], []
    for place, (name, classes) in enumerate(names.items()):
        of_sites = {site: report["confusion"][place] for site, report in reports.items()}
        suffix = f", {name}" if name else ""
        for role in ROLES:
            chosen = {site: matrix for site, matrix in of_sites.items() if roles[site] == role}
            if len(chosen) > 1:
                together.append(_matrix(f"{len(chosen)} {role} sites together{suffix}", classes, pooled(list(chosen.values()))))
        single += [_matrix(f"{site}{suffix}", classes, matrix) for site, matrix in of_sites.items()]
    points: dict[str, dict[str, list[float]]] = {}
    for place, curve in enumerate(curves):
        drawn = {site: report["roc"][place]["sensitivity"] for site, report in reports.items()}
        points[curve] = {site: values for site, values in drawn.items() if values}
    areas = {site: [_area(curve) for curve in report["roc"]] for site, report in reports.items()}
    return ClassTables(heading, together, single, curves, areas, {curve: lines for curve, lines in points.items() if lines})


def _matrix(title: str, classes: tuple[str, ...], counts: Sequence[Sequence[int]]) -> Matrix:
    shares = row_shares(counts)
    return Matrix(title, classes, [list(zip(share, row, strict=True)) for share, row in zip(shares, counts, strict=True)])


def _area(curve: Mapping[str, Any]) -> str:
    """For example "0.912 (0.840 to 0.984)"."""
    if curve["auc"] is None:
        return UNDEFINED
    value = format_metric("", curve["auc"])
    return value if curve["low"] is None else f"{value} ({format_metric('', curve['low'])} to {format_metric('', curve['high'])})"
