"""The page of a study: all rows side by side, ranks, gain over training alone by site, cost, curves
and every table.
"""

from collections.abc import Mapping
from typing import Any, Final

import pandas as pd

from medflare.evaluation.presentation import (
    UNDEFINED,
    format_bytes,
    format_metric,
    format_seconds,
    lower_is_better,
    task_description,
)
from medflare.evaluation.report import template
from medflare.studies.figures import (
    deployed_values,
    differences_drawing,
    learning_curves,
    marked_range,
)
from medflare.studies.references import CONSTANT, SINGLE_SITE
from medflare.studies.statistics import ALL_SITES, all_runs, distinct, mean_interval
from medflare.studies.tables import StudyTables, cautions, spread, task_of

PAGE_FILE: Final = "study.html"


def study_page(study: StudyTables) -> str:
    """The page as HTML, from the deployed model of every row."""
    groups = study.groups
    metric = study.first_metric
    values = deployed_values(study)
    plot = differences_drawing(study)
    inside: list[str] = []
    for role, site in study.places:
        if role == "inside" and site != ALL_SITES:
            inside.append(site)
    runs = all_runs(groups)
    return template("study.html").render(
        task=task_of(groups),
        description=task_description(task_of(groups)),
        metric=metric,
        lower=lower_is_better(metric),
        findings=[],
        sites=inside,
        seeds=distinct(runs, "seed"),
        rounds=distinct(runs, "rounds"),
        banner=study.banner(),
        cautions=[*cautions(groups), *study.same_answers(), *study.notes()],
        overview=_overview(study, values),
        gains=_gains(study, values),
        plot=plot.svg("differences") if plot else None,
        reference=next(iter(groups)),
        margin=marked_range(metric),
        curves=learning_curves(groups, "currentColor"),
        tables={title: answer_first(*parsed(table)) for title, table in study.everything.items()},
    )


def _overview(study: StudyTables, values: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """A row for each row of the study: its means, its rank, its cost and its warnings.

    The constant answer has a rank, too.
    """
    compared = values.dropna(axis=1, how="all")
    ranks = compared.dropna().rank(axis=1, ascending=lower_is_better(study.first_metric))
    headings = ["method", *(f"mean {role}" for role in study.roles)]
    headings += ["mean rank", "traffic", "time", "runs", "warnings"]
    lines: list[list[str]] = []
    for label, runs in study.groups.items():
        cells = [label]
        for role in study.roles:
            by_seed = study.series(label, "deployed", role, study.first_metric)
            cells.append(spread(study.first_metric, by_seed))
        rank = UNDEFINED
        if label in ranks and len(ranks):
            rank = f"{ranks[label].mean():.1f}"
            bounds = mean_interval(ranks[label].tolist())
            if bounds is not None:
                rank += f"\n{bounds[0]:.1f} to {bounds[1]:.1f}"
        traffic = 0
        seconds = 0.0
        for run in runs:
            traffic += run["traffic"]["down_bytes"] + run["traffic"]["up_bytes"]
            seconds += run["seconds"].get("total") or 0.0
        cells += [
            rank,
            format_bytes(traffic / len(runs)) if traffic else UNDEFINED,
            format_seconds(seconds / len(runs)),
            str(len(runs)),
            "\n".join(study.warnings(label)) or UNDEFINED,
        ]
        lines.append(cells)
    return headings, lines


def _gains(study: StudyTables, values: pd.DataFrame) -> Mapping[str, Any]:
    """Row -> {"sites": site -> (text, whether it loses), "losers": sites}, against the row of
    training alone; empty without it.
    """
    alone = study.label_of(SINGLE_SITE)
    if alone is None:
        return {}
    sign = -1 if lower_is_better(study.first_metric) else 1
    gains: dict[str, dict[str, Any]] = {}
    for label in values.columns.drop(alone):
        if study.groups[label][0]["method"] == CONSTANT:
            continue
        by_site = (sign * (values[label] - values[alone])).dropna().groupby("site").mean()
        cells: dict[Any, tuple[str, bool]] = {}
        losers: list[Any] = []
        for site, gain in by_site.items():
            text = f"{gain:+.3f}" if sign > 0 else format_metric(study.first_metric, gain)
            cells[site] = (text, gain < 0)
            if gain < 0:
                losers.append(site)
        if cells:
            gains[label] = {"sites": cells, "losers": losers}
    return gains


def parsed(table: str) -> tuple[list[str], list[list[tuple[str, bool]]]]:
    """Headings, and rows of (text, whether it is bold), of a table in Markdown.

    Examples:
        >>> parsed("| method | A |\\n| --- | ---: |\\n| fedavg | **0.5** |\\n")
        (['method', 'A'], [[('fedavg', False), ('0.5', True)]])
    """
    headings, _, *lines = table.strip().splitlines()
    rows: list[list[tuple[str, bool]]] = []
    for line in lines:
        rows.append([(cell.strip("*"), cell.startswith("**")) for cell in _cells(line)])
    return _cells(headings), rows


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split(" | ")]


_IN_NAME: Final = ("model", "deployed against its own", "sites", "model of", "structure or class")
_ANSWERS: Final = ("mean inside", "mean", "verdict")
_LAST: Final = ("selection",)


def answer_first(
    headings: list[str], rows: list[list[tuple[str, bool]]]
) -> tuple[list[str], list[list[tuple[str, bool]]]]:
    """The table with its most important number as the second column, so that a phone shows it
    without scrolling.

    What a row is (its model, its sites) is on a second line of its name; the mean over sites comes
    first, how a round was selected last.

    Examples:
        >>> headings = ["method", "model", "A", "mean inside"]
        >>> row = [("fedsm", False), ("global", False), ("0.4", False), ("0.5", True)]
        >>> headings, rows = answer_first(headings, [row])
        >>> headings
        ['method', 'mean inside', 'A']
        >>> rows
        [[('fedsm\\nglobal', False), ('0.5', True), ('0.4', False)]]
    """
    names: list[int] = []
    answers: list[int] = []
    others: list[int] = []
    last: list[int] = []
    for place, heading in enumerate(headings[1:], start=1):
        if heading in _IN_NAME:
            names.append(place)
        elif heading in _ANSWERS:
            answers.append(place)
        elif heading in _LAST:
            last.append(place)
        else:
            others.append(place)
    order = [*answers, *others, *last]
    moved_rows: list[list[tuple[str, bool]]] = []
    for row in rows:
        name = "\n".join(row[place][0] for place in (0, *names))
        moved_rows.append([(name, False), *(row[place] for place in order)])
    return [headings[0], *(headings[place] for place in order)], moved_rows
