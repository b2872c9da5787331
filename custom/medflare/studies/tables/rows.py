"""The rows of a study's tables: the models of every group of runs, the oracle's choice among them, and what each was selected by."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from medflare.core.errors import StateError
from medflare.evaluation.presentation import UNDEFINED
from medflare.evaluation.results import MODELS
from medflare.studies.candidates import REFERENCES
from medflare.studies.recorded import SCORES
from medflare.studies.statistics.seeds import Estimate, Run, estimate, values_of

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
        groups: the runs.
        metric: whose values the cells hold.
        places: the columns.
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

    Args:
        groups: the runs.

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
        groups: the runs.
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
