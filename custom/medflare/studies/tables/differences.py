"""Paired differences: every model against what one row deploys, and against models of its own run, over seeds and over patients."""

from collections.abc import Sequence
from typing import Any, Final

from medflare.evaluation.presentation import UNDEFINED
from medflare.studies.constant import CONSTANT
from medflare.studies.statistics.patients import compare_patients
from medflare.studies.statistics.seeds import Run, compare, values_of
from medflare.studies.tables.markdown import interval, markdown, p_value
from medflare.studies.tables.rows import Groups, models_of, named, places_of

NULL: Final = ("global", "batch_statistics", "mixture", "tent")  # what a run's adapted model has to beat, see IOP-FL's controls
_OVER: Final = ("95 % over seeds", "t-test over seeds, p", "seeds", "95 % over patients", "test over patients, p", "patients")


def differences_table(groups: Groups, metric: str, against: str | None = None) -> str:
    """A Markdown table of paired differences to what one group deploys, each with its 95 % intervals.

    Over seeds: Student's t, of seeds that both groups have. Over patients: `compare_patients`, where the runs hold scores of patients.

    Args:
        groups: label -> results dicts that differ in their seed and in who is outside.
        metric: its name.
        against: label of the group that all others are held against; None: the first.
    """
    against = next(iter(groups)) if against is None else against
    rows: dict[tuple[str, ...], list[str]] = {}  # what a line says beside its models -> the models it says it of
    for label, runs in groups.items():
        compared: list[tuple[list[Any], list[str]]] = []  # results of a model, its cells: models with the same results are compared once
        for model in models_of(runs):
            for role in _roles(runs):
                results = _results(runs, model, role)
                cells = next((known for others, known in compared if others == results), None)
                if cells is None:
                    cells = _cells((groups[against], "deployed"), (runs, model), metric, role, alike=label == against)
                    compared.append((results, cells))
                if cells:
                    rows.setdefault((label, *cells), []).append(model)
    lines = [["method", "model", "sites", f"difference to {against}", *_OVER]]
    lines += [[label, named(models), *cells] for (label, *cells), models in rows.items()]
    return markdown(lines, left=3)


def own_differences_table(groups: Groups, metric: str) -> str:
    """A Markdown table of what a row deploys against other models of the same runs: the same training, without what was added to it.

    Args:
        groups: as for `differences_table`.
        metric: its name.

    Returns:
        "" where no run has two models.
    """
    rows: dict[tuple[str, ...], list[str]] = {}
    for label, runs in groups.items():
        if runs[0]["method"] == CONSTANT:
            continue
        for null in (model for model in models_of(runs) if model in NULL):
            for role in _roles(runs):
                cells = _cells((runs, null), (runs, "deployed"), metric, role, alike=True)
                if cells:
                    rows.setdefault((label, *cells), []).append(null)
    if not rows:
        return ""
    lines = [["method", "deployed against its own", "sites", "difference", *_OVER]]
    lines += [[label, ", ".join(models), *cells] for (label, *cells), models in rows.items()]
    return markdown(lines, left=3)


def _roles(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(role for role, _ in places_of(runs)))


def _results(runs: Sequence[Run], model: str, role: str) -> list[Any]:
    """What the model reached at every site of the role, in every run; nobody else's where it is the name of several (`models_of`)."""
    several = model if "*" in model else ""
    return [role, several, *(site["metrics"].get(model) for run in runs for site in run["sites"].values() if site["role"] == role)]


def _cells(first: tuple[Sequence[Run], str], second: tuple[Sequence[Run], str], metric: str, role: str, *, alike: bool) -> list[str]:
    """The line's numbers for runs and their model; none where there is nothing to compare, or with `alike` where both are the same."""
    seeds = {run["seed"] for run in first[0]} & {run["seed"] for run in second[0]}
    before, after = (([run for run in runs if run["seed"] in seeds], model) for runs, model in (first, second))
    pair = values_of(*before, metric, role=role), values_of(*after, metric, role=role)
    if alike and pair[0] == pair[1]:
        return []
    over_seeds = compare(*pair)
    if over_seeds.difference is None:
        return []
    over_patients = compare_patients(before, after, metric, role=role)
    test = p_value(over_patients.p)
    return [
        role,
        f"{over_seeds.difference:+.3f}",
        *(interval(over_seeds.interval), p_value(over_seeds.p), str(over_seeds.n)),
        interval(over_patients.interval),
        f"{test} ({over_patients.test})" if over_patients.p is not None else test,
        str(over_patients.patients) if over_patients.patients else UNDEFINED,
    ]
