"""The page of a study: all rows side by side, ranks, gain over training alone by site, cost, curves and every table."""

from collections.abc import Mapping
from typing import Any, Final

import pandas as pd

from medflare.evaluation.figures import patients_plot
from medflare.evaluation.presentation import (
    UNDEFINED,
    format_bytes,
    format_metric,
    format_seconds,
    lower_is_better,
    metric_label,
    task_description,
)
from medflare.evaluation.report import template
from medflare.studies.references import CONSTANT, SINGLE_SITE
from medflare.studies.statistics import ALL_SITES, mean_interval
from medflare.studies.tables import StudyTables, cautions, learning_curves, spread, task_of

PAGE_FILE: Final = "study.html"


def study_page(study: StudyTables) -> str:
    """The page as HTML, from the deployed model of every row."""
    groups, metric = study.groups, study.metric
    values = _deployed(study)
    points = {label: {f"{site}, seed {seed}": value for (site, seed), value in column.dropna().items()} for label, column in values.items()}
    runs = [run for of_row in groups.values() for run in of_row]
    return template("study.html").render(
        task=task_of(groups),
        description=task_description(task_of(groups)),
        metric=metric,
        lower=lower_is_better(metric),
        findings=[],
        sites=[site for role, site in study.places if role == "inside" and site != ALL_SITES],
        seeds=sorted({run["seed"] for run in runs}),
        rounds=sorted({run["rounds"] for run in runs}),
        banner=study.banner(),
        cautions=[*cautions(groups), *study.notes()],
        overview=_overview(study, values),
        gains=_gains(study, values),
        plot=patients_plot({label: of_row for label, of_row in points.items() if of_row}, {}, metric_label(metric)),
        curves=learning_curves(groups, "currentColor"),
        tables={title: answer_first(*parsed(table)) for title, table in study.everything.items()},
    )


def _deployed(study: StudyTables) -> pd.DataFrame:
    """The task's metric of the deployed models at inside sites (if there are none, at outside sites): index (site, seed), columns rows."""
    role = "inside" if "inside" in study.roles else study.roles[0]
    table = study.values.xs(("deployed", role, study.metric), level=("model", "role", "metric"))
    table = table[table.index.get_level_values("site") != ALL_SITES]
    return table.stack(future_stack=True).unstack("label").reindex(columns=list(study.groups))


def _overview(study: StudyTables, values: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """A row for each row of the study: its means, its rank, its cost and its warnings. The constant answer has a rank, too."""
    compared = values.dropna(axis=1, how="all")
    ranks = compared.dropna().rank(axis=1, ascending=lower_is_better(study.metric))
    lines = []
    for label, runs in study.groups.items():
        means = [spread(study.metric, study.series(label, "deployed", role, study.metric)) for role in study.roles]
        rank = UNDEFINED
        if label in ranks and len(ranks):
            bounds = mean_interval(ranks[label].tolist())
            rank = f"{ranks[label].mean():.1f}" + (f"\n{bounds[0]:.1f} to {bounds[1]:.1f}" if bounds else "")
        traffic = sum(run["traffic"]["down_bytes"] + run["traffic"]["up_bytes"] for run in runs) / len(runs)
        seconds = sum(run["seconds"].get("total") or 0.0 for run in runs) / len(runs)
        cost = [format_bytes(traffic) if traffic else UNDEFINED, format_seconds(seconds), str(len(runs))]
        lines.append([label, *means, rank, *cost, "\n".join(study.warnings(label)) or UNDEFINED])
    return ["method", *(f"mean {role}" for role in study.roles), "mean rank", "traffic", "time", "runs", "warnings"], lines


def _gains(study: StudyTables, values: pd.DataFrame) -> Mapping[str, Any]:
    """Row -> {"sites": site -> (text, whether it loses), "losers": sites}, against the row of training alone; empty without it."""
    alone = study.label_of(SINGLE_SITE)
    if alone is None:
        return {}
    sign = -1 if lower_is_better(study.metric) else 1
    gains = {}
    for label in values.columns.drop(alone):
        by_site = (sign * (values[label] - values[alone])).dropna().groupby("site").mean()
        cells = {site: (f"{gain:+.3f}" if sign > 0 else format_metric(study.metric, gain), gain < 0) for site, gain in by_site.items()}
        if cells and study.groups[label][0]["method"] != CONSTANT:
            gains[label] = {"sites": cells, "losers": [site for site, (_, loses) in cells.items() if loses]}
    return gains


def parsed(table: str) -> tuple[list[str], list[list[tuple[str, bool]]]]:
    """Headings, and rows of (text, whether it is bold), of a table in Markdown.

    Examples:
        >>> parsed("| method | A |\\n| --- | ---: |\\n| fedavg | **0.5** |\\n")
        (['method', 'A'], [[('fedavg', False), ('0.5', True)]])
    """
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.strip().splitlines()]
    return lines[0], [[(cell.strip("*"), cell.startswith("**")) for cell in line] for line in lines[2:]]


_IN_NAME: Final = ("model", "deployed against its own", "sites", "model of", "structure or class")
_ANSWERS: Final = ("mean inside", "mean", "verdict")
_LAST: Final = ("selection",)


def answer_first(headings: list[str], rows: list[list[tuple[str, bool]]]) -> tuple[list[str], list[list[tuple[str, bool]]]]:
    """The table with its most important number as the second column, so that a phone shows it without scrolling.

    What a row is (its model, its sites) is on a second line of its name; the mean over sites comes first, how a round was selected last.

    Examples:
        >>> answer_first(["method", "model", "A", "mean inside"], [[("fedsm", False), ("global", False), ("0.4", False), ("0.5", True)]])
        (['method', 'mean inside', 'A'], [[('fedsm\\nglobal', False), ('0.5', True), ('0.4', False)]])
    """
    names = [place for place, heading in enumerate(headings) if place and heading in _IN_NAME]
    answers = [place for place, heading in enumerate(headings) if heading in _ANSWERS]
    last = [place for place, heading in enumerate(headings) if heading in _LAST]
    moved = {0, *names, *answers, *last}
    others = [place for place in range(len(headings)) if place not in moved]
    order = [*answers, *others, *last]
    moved_rows = []
    for row in rows:
        name = "\n".join(row[place][0] for place in (0, *names))
        moved_rows.append([(name, False), *(row[place] for place in order)])
    return [headings[0], *(headings[place] for place in order)], moved_rows
