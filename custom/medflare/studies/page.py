"""The page of a study: all rows side by side, ranks, gain over training alone by site, cost, curves
and every table.
"""

import pandas as pd

from medflare.core.text import format_seconds
from medflare.evaluation.presentation import UNDEFINED, format_bytes, format_metric, lower_is_better
from medflare.evaluation.report import template
from medflare.studies.figures import (
    deployed_values,
    differences_drawing,
    learning_curves,
    marked_range,
)
from medflare.studies.markdown import Table, spread
from medflare.studies.report import banner, cautions, notes
from medflare.studies.statistics import all_runs, distinct
from medflare.studies.tables import StudyTables
from medflare.tasks.summaries import mean_interval

PAGE_FILE = "study.html"


def study_page(study: StudyTables) -> str:
    """The page as HTML, from the deployed model of every row."""
    groups = study.groups
    metric = study.first_metric
    values = deployed_values(study)
    curves = learning_curves(groups)
    plot = differences_drawing(study)
    runs = all_runs(groups)
    return template("study.html").render(
        task=study.task,
        metric=metric,
        findings=[],
        sites=study.sites_of.get("inside", []),
        seeds=distinct(runs, "seed"),
        rounds=distinct(runs, "rounds"),
        banner=banner(study),
        cautions=cautions(study) + notes(study),
        overview=_overview(study, values),
        gains=_gains(study),
        plot=plot.svg("differences") if plot else None,
        reference=next(iter(groups)),
        margin=marked_range(metric),
        curves=curves.svg("curves") if curves else None,
        tables={title: answer_first(table) for title, table in study.everything.items()},
    )


def _overview(study: StudyTables, values: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """A row for each row of the study: its means, its rank, its cost and its warnings.

    The constant prediction has a rank, too.
    """
    compared = values.dropna(axis=1, how="all")
    ranks = compared.dropna().rank(axis=1, ascending=lower_is_better(study.first_metric))
    headings = ["method", *(f"mean {role}" for role in study.roles)]
    headings += ["mean rank", "traffic", "time", "runs", "warnings"]
    lines = []
    for row, runs in study.groups.items():
        cells = [row]
        for role in study.roles:
            by_seed = study.series(row, role, study.first_metric)
            cells.append(spread(study.first_metric, by_seed))
        rank = UNDEFINED
        if row in ranks and len(ranks):
            rank = f"{ranks[row].mean():.1f}"
            bounds = mean_interval(ranks[row].tolist())
            if bounds is not None:
                rank += f"\n{bounds[0]:.1f} to {bounds[1]:.1f}"
        traffic = sum(sum(run["traffic"].values()) for run in runs)
        seconds = sum(run["seconds"].get("total") or 0.0 for run in runs)
        cells += [
            rank,
            format_bytes(traffic / len(runs)) if traffic else UNDEFINED,
            format_seconds(seconds / len(runs)),
            str(len(runs)),
            "\n".join(study.warnings(row)) or UNDEFINED,
        ]
        lines.append(cells)
    return headings, lines


def _gains(study: StudyTables) -> dict[str, dict[str, tuple[str, bool]]]:
    """Row -> site -> its gain over training alone, and whether it is a loss; empty without that
    row.
    """
    metric = study.first_metric
    gains = {}
    for row in study.compared:
        cells = {}
        for site, gain in study.gains(row, "deployed", metric).items():
            text = format_metric(metric, gain) if lower_is_better(metric) else f"{gain:+.3f}"
            cells[site] = (text, gain < 0)
        if cells:
            gains[row] = cells
    return gains


# Columns that say what a row is.
_IN_NAME = ("model", "deployed against its own", "sites", "model of", "structure or class")
# Heading -> rank of its column; that of all others is 1.
_RANKS = {"mean inside": 0, "mean": 0, "verdict": 0, "selection": 2}


def answer_first(table: Table) -> tuple[list[str], list[list[tuple[str, bool]]]]:
    """Headings, and rows of (text, whether it is bold), with the most important number as the
    second column, so that a phone shows it without scrolling.

    What a row is (its model, its sites) is on a second line of its name; the mean over sites comes
    first, how a round was selected last.

    Examples:
        >>> names = ["method", "model", "A", "mean inside"]
        >>> table = Table([names, ["fedsm", "global", "0.4", "**0.5**"]], left=2)
        >>> headings, rows = answer_first(table)
        >>> headings
        ['method', 'mean inside', 'A']
        >>> rows
        [[('fedsm\\nglobal', False), ('0.5', True), ('0.4', False)]]
    """
    headings, *lines = table.lines
    names = [0]
    ranks = {}  # of the other columns
    for index, heading in enumerate(headings[1:], start=1):
        if heading in _IN_NAME:
            names.append(index)
        else:
            ranks[index] = _RANKS.get(heading, 1)
    order = sorted(ranks, key=ranks.__getitem__)
    rows = []
    for cells in lines:
        row = [("\n".join(cells[index].strip("*") for index in names), False)]
        for index in order:
            row.append((cells[index].strip("*"), cells[index].startswith("**")))
        rows.append(row)
    return [headings[0], *(headings[index] for index in order)], rows
