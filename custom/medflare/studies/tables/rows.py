"""The rows of a study's tables: the models of every group of runs, the oracle's choice among them, and what each was selected by."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from medflare.core.errors import StateError
from medflare.evaluation.presentation import UNDEFINED, format_metric
from medflare.evaluation.results import MODELS
from medflare.studies.candidates import REFERENCES
from medflare.studies.references import CURVES, SCORES
from medflare.studies.statistics import Estimate, Run, estimate, values_of

Groups: TypeAlias = Mapping[str, Sequence[Run]]  # label -> results dicts that differ in their seed and in who is outside
Place: TypeAlias = tuple[str, str | None]  # (role, site), or (role, None) for the mean over the sites of the role

ORACLE: Final = "oracle"


@dataclass(frozen=True)
class Row:
    """Models of one group that have the same numbers everywhere (FedAvg delivers one model for all purposes).

    Attributes:
        label: of the group.
        models: their names.
        cells: one for each place.
        runs: of the group.
    """

    label: str
    models: tuple[str, ...]
    cells: list[Estimate]
    runs: Sequence[Run]

    @property
    def shown(self) -> str:
        """The models' names in a cell."""
        return named(self.models)

    @property
    def reachable(self) -> bool:
        """Whether somebody who has not seen the test images could deliver it."""
        return self.models != (ORACLE,)


def rows_of(groups: Groups, metric: str, places: Sequence[Place], models: Sequence[str] | None = None) -> list[Row]:
    """The rows that have a value somewhere.

    Args:
        metric: whose values the cells hold.
        models: None for all that the runs measured.
    """
    found: list[Row] = []
    for label, runs in groups.items():
        for model in models_of(runs) if models is None else models:
            cells = [estimate(values_of(runs, model, metric, role=role, site=site)) for role, site in places]
            if not any(cell.n for cell in cells):
                continue
            twin = next((row for row in found if row.label == label and row.cells == cells), None)
            if twin is not None:
                found.remove(twin)
            found.append(Row(label, (*twin.models, model) if twin else (model,), cells, runs))
    return found


def named(models: Iterable[str]) -> str:
    """Names of models as they stand in a cell.

    Examples:
        >>> named(["global", "oracle"])
        'global, oracle (chosen on test)'
    """
    return ", ".join(f"{ORACLE} (chosen on test)" if model == ORACLE else model for model in models)


def models_of(runs: Sequence[Run]) -> list[str]:
    """Names of the models that the runs measured; those that differ in a site's name alone as one."""
    found = [model for run in runs for site in run["sites"].values() for model in site["metrics"]]
    return list(dict.fromkeys([*MODELS, *(model if "/" not in model else f"{model.partition('/')[0]}/*" for model in found)]))


def places_of(runs: Iterable[Run]) -> list[Place]:
    """(role, site) of every site in order of their names and then (role, None), for inside and outside sites."""
    sites = sorted({(site["role"], name) for run in runs for name, site in run["sites"].items()})
    places: list[Place] = []
    for role in dict.fromkeys(role for role, _ in sites):
        places += [*(place for place in sites if place[0] == role), (role, None)]
    return places


def task_of(groups: Groups) -> Mapping[str, Any]:
    """The configuration of the task, which all runs share.

    Raises:
        StateError: no run got as far as its task.
    """
    found = (run["configuration"]["task"] for runs in groups.values() for run in runs if run["configuration"]["task"])
    task = next(found, None)
    if task is None:
        raise StateError("no run of this study got as far as its task; see the reason in each results.json")
    return task


def selection(row: Row) -> str:
    """By what the round was chosen whose models were delivered: "last", or "best dice" (of the validation images) and how sites agreed."""
    found = dict.fromkeys(filter(None, map(_selection, row.runs)))
    return ", ".join(found) or UNDEFINED


def _selection(run: Run) -> str:
    settings = run["configuration"]
    chosen = settings["hyper"]["server"].get("selection", "")
    best = f"best {settings['task'].get('metric', '')}".strip()
    agreed = {"median": "median of sites", "paired": "paired over sites", "mean": "mean of sites"}
    return best if chosen == "best" else f"{best}, {agreed[chosen]}" if chosen in agreed else str(chosen)


def with_oracle(groups: Groups, metric: str) -> dict[str, list[Run]]:
    """The same runs with one more model: at every site the better of its global and its personal model by its test images.

    Nobody can choose so: it is the mark that choosing between the two could reach.

    Args:
        metric: the task's, by which the better one is chosen, whatever metric is shown; higher is better.
    """
    return {label: [run if run["method"] in REFERENCES else _with_oracle(run, metric) for run in runs] for label, runs in groups.items()}


def _with_oracle(run: Run, metric: str) -> Run:
    sites, scores = dict(run["sites"]), dict(run.get(SCORES, {}))
    if all(site["metrics"]["personal"] in (site["metrics"]["global"], _nothing(site)) for site in sites.values()):
        return run  # one model for all purposes: there is nothing to choose
    for name, site in sites.items():
        values = {model: site["metrics"][model].get(metric) for model in ("global", "personal")}
        defined = {model: value for model, value in values.items() if value is not None}
        if len(defined) < len(values):
            continue
        chosen = max(defined, key=lambda model: defined[model])
        sites[name] = {**site, "metrics": {**site["metrics"], ORACLE: site["metrics"][chosen]}}
        if chosen in scores.get(name, {}):
            scores[name] = {**scores[name], ORACLE: scores[name][chosen]}
    return {**run, "sites": sites, SCORES: scores}


def _nothing(site: Mapping[str, Any]) -> dict[str, None]:
    """The metrics of a model that a site does not have."""
    return dict.fromkeys(site["metrics"]["personal"])


# -- learning curves ----------------------------------------------------------------------------------------------------

Curve: TypeAlias = dict[int, float]  # rounds of training -> mean over sites and runs

RISING: Final = 0.01  # of the metric, over the last third of the rounds
_FEWEST: Final = 4  # points in that third: a line through three says little


def curve_of(runs: Sequence[Run], model: str) -> Curve:
    """Mean validation curve of a model; deployed models go by the personal curve where there is one, else by the global one."""
    names = {"global": ("global",), "personal": ("personal", "global")}.get(model, ("personal", "global"))
    values: dict[int, list[float]] = {}
    for run in runs:
        curves: Mapping[str, Any] = run.get(CURVES, {})
        for points in curves.get(next((name for name in names if name in curves), ""), {}).values():
            for at, value in points:
                values.setdefault(int(at), []).append(value)
    most = max(map(len, values.values()), default=0)
    return {at: float(np.mean(values[at])) for at in sorted(values) if len(values[at]) == most}  # the same sites and runs at every point


def is_rising(curve: Curve) -> bool:
    """Whether the metric gained more than 0.01 over the last third of the rounds, by a line of least squares.

    The gain must be twice its standard error too, so that a curve that only swings does not count.

    Args:
        curve: see `curve_of`; below four points in the last third nothing is said.

    Examples:
        >>> is_rising({at: 0.02 * at for at in range(13)}), is_rising({at: 0.8 for at in range(13)}), is_rising({0: 0.1, 1: 0.9})
        (True, False, False)
    """
    late = [at for at in curve if at >= max(curve) * 2 / 3]
    if len(late) < _FEWEST:
        return False
    from scipy.stats import linregress

    line, span = linregress(late, [curve[at] for at in late]), late[-1] - late[0]
    return bool(line.slope * span > RISING and line.slope > 2 * line.stderr)


# -- cells --------------------------------------------------------------------------------------------------------------


def markdown(lines: Sequence[Sequence[str]], left: int) -> str:
    """Lines as a Markdown table.

    Args:
        lines: cells; the first line holds the headings.
        left: all columns but so many first ones are set flush right.
    """
    rule = ["---" if column < left else "---:" for column in range(len(lines[0]))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]]) + "\n"


def p_value(p: float | None) -> str:
    """Three decimals, a dash where there is no test."""
    return UNDEFINED if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def interval(bounds: tuple[float, float] | None) -> str:
    """An interval of differences, a dash where there is none.

    Examples:
        >>> interval((-0.01, 0.125)), interval(None)
        ('-0.010 to +0.125', '–')
    """
    return UNDEFINED if bounds is None else f"{bounds[0]:+.3f} to {bounds[1]:+.3f}"


def spread(metric: str, mean: float | None, sd: float | None) -> str:
    """ "mean ± standard deviation", the mean alone where there is no spread, a dash where there is neither."""
    if mean is None:
        return UNDEFINED
    return format_metric(metric, mean) + ("" if sd is None else f" ± {format_metric(metric, sd)}")
