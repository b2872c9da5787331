"""The page of a study: all rows side by side, ranks, gain over training alone by site, cost, curves
and every table.
"""

import re
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
from medflare.studies.references import SINGLE_SITE
from medflare.studies.statistics import all_runs, distinct, mean_interval
from medflare.studies.tables import StudyTables, cautions, sign_of, spread, task_of

PAGE_FILE: Final = "study.html"


def study_page(study: StudyTables) -> str:
    """The page as HTML, from the deployed model of every row."""
    groups = study.groups
    metric = study.first_metric
    values = deployed_values(study)
    plot = differences_drawing(study)
    runs = all_runs(groups)
    return template("study.html").render(
        task=task_of(groups),
        description=task_description(task_of(groups)),
        metric=metric,
        lower=lower_is_better(metric),
        findings=[],
        sites=study.inside,
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
        tables={title: answer_first(table) for title, table in study.everything.items()},
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
            traffic += sum(run["traffic"].values())
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
    sign = sign_of(study.first_metric)
    gains: dict[str, dict[str, Any]] = {}
    for label in values.columns.drop(alone):
        if label not in study.compared:
            continue
        by_site = (sign * (values[label] - values[alone])).dropna().groupby("site").mean()
        cells: dict[Any, tuple[str, bool]] = {}
        for site, gain in by_site.items():
            text = f"{gain:+.3f}" if sign > 0 else format_metric(study.first_metric, gain)
            cells[site] = (text, gain < 0)
        if cells:
            gains[label] = {"sites": cells, "losers": list(by_site.index[by_site < 0])}
    return gains


# Columns that say what a row is.
_IN_NAME: Final = ("model", "deployed against its own", "sites", "model of", "structure or class")
# Heading -> rank of its column; that of all others is 1.
_RANKS: Final = {"mean inside": 0, "mean": 0, "verdict": 0, "selection": 2}


def answer_first(table: str) -> tuple[list[str], list[list[tuple[str, bool]]]]:
    """Headings, and rows of (text, whether it is bold), of a table in Markdown, with its most
    important number as the second column, so that a phone shows it without scrolling.

    What a row is (its model, its sites) is on a second line of its name; the mean over sites comes
    first, how a round was selected last.

    Examples:
        >>> headings = "| method | model | A | mean inside |\\n| --- | --- | ---: | ---: |\\n"
        >>> headings, rows = answer_first(headings + "| fedsm | global | 0.4 | **0.5** |\\n")
        >>> headings
        ['method', 'mean inside', 'A']
        >>> rows
        [[('fedsm\\nglobal', False), ('0.5', True), ('0.4', False)]]
    """
    headings, _, *lines = map(_cells, table.strip().splitlines())
    names = [0]
    ranks: dict[int, int] = {}  # of the other columns
    for index, heading in enumerate(headings[1:], start=1):
        if heading in _IN_NAME:
            names.append(index)
        else:
            ranks[index] = _RANKS.get(heading, 1)
    order = sorted(ranks, key=ranks.__getitem__)
    rows: list[list[tuple[str, bool]]] = []
    for cells in lines:
        row = [("\n".join(cells[index].strip("*") for index in names), False)]
        for index in order:
            row.append((cells[index].strip("*"), cells[index].startswith("**")))
        rows.append(row)
    return [headings[0], *(headings[index] for index in order)], rows


def _cells(line: str) -> list[str]:
    cells = re.split(r"(?<!\\)\|", line)[1:-1]
    return [cell.strip().replace("\\|", "|") for cell in cells]
