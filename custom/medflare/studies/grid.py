"""Grids: a row with all combinations of some values, of which the best on validation images is
shown.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any

from medflare.core.errors import ConfigError
from medflare.core.hyper import parsed_value
from medflare.core.text import Json
from medflare.evaluation.presentation import UNDEFINED, best_value, format_metric, lower_is_better
from medflare.studies.candidates import Candidate
from medflare.studies.markdown import Table
from medflare.studies.references import CURVES, SINGLE_SITE
from medflare.studies.runs import task_of
from medflare.studies.statistics import Groups, Results
from medflare.tasks.config import TaskConfig

TRIED = "tried, selected on validation images: no row is selected by its test metric"
_SHORT = {"lr": "task.optimizer.lr"}


def parse_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Name -> values, from "mu=0.01,0.1"; ConfigError for anything else.

    Examples:
        >>> parse_grid(["mu=0.01,0.1", "rule=mean,median"])
        {'mu': [0.01, 0.1], 'rule': ['mean', 'median']}
    """
    grid: dict[str, list[Any]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if not name or not values:
            raise ConfigError(f"--grid {text!r} has no values; write NAME=VALUE,VALUE")
        try:
            parsed = json.loads(f"[{values}]")
        except ValueError:
            parsed = [parsed_value(value) for value in values.split(",")]
        grid.setdefault(name, []).extend(parsed)
    return grid


def cells_of(
    candidates: Sequence[Candidate],
    grid: Mapping[str, Sequence[Any]],
    task: TaskConfig,
    changed: Callable[[Json, Json], TaskConfig],
) -> dict[str, list[Candidate]]:
    """Row -> its candidate with all combinations of the values that it has a name for.

    `changed`: gives a task's mapping with some of its settings ("task.NAME") changed. ConfigError:
    a name that no row has, or a wrong value.
    """
    cells = {}
    unused = set(grid)
    planned = task.to_dict()
    for candidate in candidates:
        names = [name for name in grid if _varies(candidate, name)]
        unused -= set(names)
        cells_of_row = {}
        for combination in product(*(grid[name] for name in names)):
            named = dict(zip(names, combination, strict=True))
            hyper = {}
            settings = {}
            for name, value in named.items():
                if name in candidate.hyper_names:
                    hyper[name] = value
                else:
                    settings[_SHORT.get(name, name)] = value
            changes = {}
            if settings:
                for name, value in changed(planned, settings).to_dict().items():
                    if value != planned[name]:
                        changes[name] = value
            cell = candidate.varied(named, hyper, changes)
            cells_of_row[cell.row] = cell
        if names:
            cells[candidate.row] = list(cells_of_row.values())
    if unused:
        raise ConfigError(
            f"--grid {min(unused)}: no row has this setting, or every row sets it; "
            "name a hyper-parameter of a method, lr or task.NAME"
        )
    return cells


def _varies(candidate: Candidate, name: str) -> bool:
    """Whether the row has such a hyper-parameter and does not set it, or trains on the task."""
    if name in candidate.hyper_names:
        bare = name.rpartition(".")[2]
        return not any(bare in values for values in candidate.hyper.values())
    return bool(candidate.hyper_names) and (name in _SHORT or name.startswith("task."))


def validation_values(run: Results) -> list[float]:
    """The task's validation metric of the selected round at every inside site: of the personal
    model if there is one, else of the global one; empty for a run that failed.
    """
    if run["reason"]:
        return []
    curves = run.get(CURVES, {})
    model = "personal" if "personal" in curves else "global"
    metric = run["configuration"]["task"]["metric"]
    rule = run["configuration"]["hyper"]["server"].get("selection")
    shared = {} if run["method"] == SINGLE_SITE else run["model_selection"].get(model, {})
    values = []
    for points in curves.get(model, {}).values():
        by_round = {round: value for round, value in points if round > 0}
        if shared.get("round") in by_round:
            values.append(by_round[shared["round"]])
        elif by_round and rule == "last":
            values.append(by_round[max(by_round)])
        elif by_round:  # the site selected alone
            values.append((min if lower_is_better(metric) else max)(by_round.values()))
    return values


def assessed(rows: Sequence[str], groups: Groups) -> dict[str, float | None]:
    """Row -> mean of `validation_values` over its runs; None if a run or site lacks a value that
    another row has.
    """
    validation: dict[str, list[float]] = {}
    for row in rows:
        validation[row] = []
        for run in groups.get(row, ()):
            validation[row] += validation_values(run)
    most = max(1, *map(len, validation.values()))
    means = {}
    for row, values in validation.items():
        means[row] = fmean(values) if len(values) == most else None
    return means


def selected(rows: Sequence[str], groups: Groups) -> str:
    """The row with the best mean validation metric, the first of equal ones."""
    means = assessed(rows, groups)
    best = best_value(task_of(groups)["metric"], means.values())
    for row, mean in means.items():
        if mean is not None and best in (None, mean):
            return row
    return rows[0]


def tried(grids: Mapping[str, Sequence[str]], groups: Groups) -> Table:
    """Everything that was tried; the selected ones are bold."""
    metric = task_of(groups)["metric"]
    lines = [["tried", "mean validation metric", "runs"]]
    for rows in grids.values():
        best = selected(rows, groups)
        for row, mean in assessed(rows, groups).items():
            value = UNDEFINED if mean is None else f"{metric} {format_metric(metric, mean)}"
            runs = str(len(groups.get(row, ())))
            lines.append([row, f"**{value}**" if row == best else value, runs])
    return Table(lines, left=1)
