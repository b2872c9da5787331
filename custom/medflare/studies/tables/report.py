"""The tables of a study, and table.md: what it found, how its models were selected and what warns of them."""

import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from medflare.evaluation.presentation import UNDEFINED, best_value, format_metric, lower_is_better
from medflare.evaluation.results import confusion
from medflare.studies.candidates import UNIFORM, weighs_by_samples
from medflare.studies.references import CENTRALISED, CONSTANT, SCORES, SINGLE_SITE, TRAINED_AS
from medflare.studies.statistics import (
    Run,
    compare,
    compare_patients,
    estimate,
    has_metric,
    joined_cases,
    values_of,
    weighted_metric,
)
from medflare.studies.tables.rows import (
    Groups,
    Row,
    curve_of,
    interval,
    is_rising,
    markdown,
    models_of,
    named,
    p_value,
    places_of,
    rows_of,
    selection,
    spread,
    task_of,
    with_oracle,
)
from medflare.training.constant import NEAR

TABLE_FILE: Final = "table.md"
_WITHOUT_MEAN: Final = (CONSTANT, SINGLE_SITE, CENTRALISED)


def study_tables(groups: Groups, wanted: Container[str] | None = None) -> dict[str, str]:
    """Title -> Markdown table: for each of the task's metrics, its main one first, what every site reached and what the mean hides; then
    paired differences to the first row and to rows that trained alone, and what selectors and routing chose.

    Args:
        groups: label -> results dicts that differ in their seed and in who is outside.
        wanted: titles of the tables to make, since intervals over patients take their time; None: all.

    Raises:
        StateError: no run got as far as its task.
    """
    task = task_of(groups)
    main = task["metric"]
    every = [run for runs in groups.values() for run in runs]
    found = dict.fromkeys(metric for run in every for site in run["sites"].values() for of in site["metrics"].values() for metric in of)
    groups = with_oracle(groups, main)
    tables: dict[str, Callable[[], str]] = {}
    for metric in sorted(found, key=lambda metric: metric != main):
        tables[metric] = partial(sites_table, groups, metric)
        tables[f"{metric}, what the mean hides"] = partial(summary_table, groups, metric)
    tables[f"{main}, differences"] = partial(differences_table, groups, main)
    for label, runs in list(groups.items())[1:]:
        if runs[0]["method"] == SINGLE_SITE:
            tables[f"{main}, differences to {label}"] = partial(differences_table, groups, main, label)
    tables[f"{main}, differences within a row"] = partial(own_differences_table, groups, main)
    tables["selector"] = partial(selector_table, groups)
    tables[f"{main}, routing"] = partial(routing_table, groups, main)
    chosen = {title: make() for title, make in tables.items() if wanted is None or title in wanted}
    return {title: table for title, table in chosen.items() if table}


def study_report(groups: Groups) -> str:
    """Markdown: what the runs have in common, what to beware of, and `study_tables`."""
    rounds = sorted({run["rounds"] for runs in groups.values() for run in runs})
    title = f"# {task_of(groups)['name']}, {' or '.join(map(str, rounds))} rounds\n"
    cautions = "".join(f"- {line}\n" for line in _cautions(groups))
    return "\n".join(
        [title, *([cautions] if cautions else []), *(f"## {title}\n\n{table}" for title, table in study_tables(groups).items())]
    )


def _cautions(groups: Groups) -> list[str]:
    """What makes rows hard to compare, one line each."""
    lines = []
    trained = [(label, run) for label, runs in groups.items() for run in runs if run["method"] != CONSTANT]
    kept, fresh = _parted((label, _starts_afresh(run)) for label, run in trained)
    if kept and fresh:
        lines.append(
            f"Unequal: the optimizer keeps its moments from round to round in {kept}, and starts every round afresh in {fresh} "
            "(reset_optimizer; prr has no choice)."
        )
    averaged = [(label, run["configuration"]["hyper"]["server"]) for label, run in trained if run["method"] not in _WITHOUT_MEAN]
    other, samples = _parted((label, weighs_by_samples(server)) for label, server in averaged)
    if other and samples and not any(_is_uniform_fedavg(run) for _, run in trained):
        lines.append(
            f"Unequal: the mean weighs sites by their training images in {samples}, and otherwise in {other}: "
            f"add `--reference {UNIFORM}`, FedAvg with every site counting once."
        )
    rounds = {label: {run["rounds"] for run in runs} for label, runs in groups.items()}
    if len(set().union(*rounds.values())) > 1:
        lines.append("Unequal: rows have different numbers of rounds.")
    if unequal := _unequal_settings([run["configuration"]["task"] for runs in groups.values() for run in runs]):
        lines.append(f"Unequal: runs have different tasks ({', '.join(unequal)}).")
    missing = [name for name in (CONSTANT, SINGLE_SITE) if not _has(groups, name)]
    if missing:
        lines.append(f"Not held against {' and '.join(missing)}: add `--reference {','.join(missing)}`.")
    failed = [f"{label}, seed {run['seed']}: {run['reason']}" for label, runs in groups.items() for run in runs if run["reason"]]
    return [*lines, *(f"FAILED: {line}" for line in failed)]


def _parted(labels: Iterable[tuple[str, bool]]) -> tuple[str, str]:
    """The labels that are false of a run, and those that are true of one, in words."""
    found = dict.fromkeys(labels)
    return ", ".join(label for label, true in found if not true), ", ".join(label for label, true in found if true)


def _starts_afresh(run: Mapping[str, Any]) -> bool:
    """Whether every round had a fresh optimizer; an algorithm without `reset_optimizer` (PRR's) has no memory for moments."""
    return bool(run["configuration"]["hyper"]["site"].get("reset_optimizer", True))


def _is_uniform_fedavg(run: Mapping[str, Any]) -> bool:
    return bool(run["method"] == TRAINED_AS and run["configuration"]["hyper"]["server"].get("weighting") == "uniform")


def _unequal_settings(tasks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the settings that not all tasks have alike, where they have them; every seed draws a split of its own."""
    names = dict.fromkeys(name for task in tasks for name in task if name != "resplit")
    return [name for name in names if len({json.dumps(task[name], sort_keys=True) for task in tasks if name in task}) > 1]


def _has(groups: Groups, method: str) -> bool:
    return any(run["method"] == method for runs in groups.values() for run in runs)


# -- what every site reached --------------------------------------------------------------------------------------------


def sites_table(groups: Groups, metric: str, models: Sequence[str] | None = None) -> str:
    """A Markdown table of one metric: a row for each group and model, a column for each site and each role's mean.

    Cells hold "mean ± standard deviation" over the group's seeds; the best mean of a column that could be delivered is bold. Models of
    a group with the same numbers everywhere share a row.

    Args:
        groups: label, for example "FedSM" or "single-site" -> results dicts that differ in their seed and in who is outside.
        models: None for all that the runs measured.
    """
    places = places_of(run for runs in groups.values() for run in runs)
    rows = rows_of(groups, metric, places, models)
    best = [best_value(metric, (row.cells[place].mean for row in rows if row.reachable)) for place in range(len(places))]
    lines = [["method", "model", "selection", *(_heading(role, site) for role, site in places), "runs"]]
    for row in rows:
        cells = []
        for cell, top in zip(row.cells, best, strict=True):
            text = spread(metric, cell.mean, cell.sd)
            cells.append(f"**{text}**" if row.reachable and cell.mean is not None and cell.mean == top else text)
        lines.append([row.label, row.shown, selection(row), *cells, str(len(row.runs))])
    return markdown(lines, left=3)


def _heading(role: str, site: str | None) -> str:
    if site is None:
        return f"mean {role}"
    return site if role == "inside" else f"{site} ({role})"


# -- what a mean over sites hides: the worst site, all images as one, sites that lose by taking part --------------------


def summary_table(groups: Groups, metric: str) -> str:
    """A Markdown table of one metric: a row for each group, model and role of sites.

    Columns: the mean over sites; the worst site by its mean over seeds; "all images": the metric of all test images of these sites as
    if of one hospital, from the scores of single patients; how many sites are below training alone by their mean over seeds; and what
    warns of a row: "still rising" (`curves.is_rising`), "constant answer at ..." where at least half of the seeds are within 0.01.

    Args:
        groups: label -> results dicts that differ in their seed and in who is outside.
    """
    alone, constant = (_of_method(groups, method) for method in (SINGLE_SITE, CONSTANT))
    places = places_of(run for runs in groups.values() for run in runs)
    lines = [["method", "model", "selection", "sites", "mean", "worst site", "all images", "below training alone", "warnings"]]
    for row in rows_of(groups, metric, places):
        means = {place: cell.mean for place, cell in zip(places, row.cells, strict=True)}
        for role in dict.fromkeys(role for role, _ in places):
            sites = {site: value for (of, site), value in means.items() if of == role and site is not None and value is not None}
            if not sites:
                continue
            cell = row.cells[places.index((role, None))]
            worst = sorted(sites, key=lambda site: sites[site])[-1 if lower_is_better(metric) else 0]
            pooled = estimate(pooled_values(row.runs, row.models[0], metric, role=role))
            lost = sites_below(row, alone, metric, list(sites)) if role == "inside" and alone and row.runs is not alone else None
            numbers = [
                spread(metric, cell.mean, cell.sd),
                f"{format_metric(metric, sites[worst])} ({worst})",
                spread(metric, pooled.mean, pooled.sd),
                UNDEFINED if lost is None else f"{len(lost)} of {len(sites)}" + (f" ({', '.join(lost)})" if lost else ""),
            ]
            warnings = _warnings(row, metric, role, list(sites), constant)
            lines.append([row.label, row.shown, selection(row), role, *numbers, "; ".join(warnings) or UNDEFINED])
    return markdown(lines, left=4)


def pooled_values(runs: Sequence[Run], model: str, metric: str, *, role: str = "inside") -> list[float | None]:
    """One value a run: the metric of all test images of the role's sites together; None where the scores of single patients lack."""
    found: list[float | None] = []
    for run in runs:
        names = [name for name, site in sorted(run["sites"].items()) if site["role"] == role]
        parts = [run.get(SCORES, {}).get(name, {}).get(model) or {} for name in names]
        if not parts or not all(part and has_metric(part, metric) for part in parts):
            found.append(None)
            continue
        together = joined_cases(parts, metric)
        found.append(float(weighted_metric(together, metric, np.ones(len(together["patients"])))))
    return found


def sites_below(row: Row, alone: Sequence[Run], metric: str, sites: Sequence[str]) -> list[str]:
    """Sites where the row is worse than training alone, in the mean over the seeds that both have.

    Args:
        sites: inside sites.
    """
    sign = -1 if lower_is_better(metric) else 1

    def gains(site: str) -> list[float]:
        return [sign * (own - other) for other, own in _pairs(alone, "deployed", row.runs, row.models[0], metric, "inside", site)]

    return [site for site in sites if (found := gains(site)) and np.mean(found) < 0]


def _warnings(row: Row, metric: str, role: str, sites: Sequence[str], constant: Sequence[Run]) -> list[str]:
    warnings = ["still rising"] if is_rising(curve_of(row.runs, row.models[0])) else []
    if not constant or row.runs is constant or lower_is_better(metric):
        return warnings
    flat = [site for site in sites if _is_constant(row, metric, role, site, constant)]
    return [*warnings, f"constant answer at {', '.join(flat)}"] if flat else warnings


def _is_constant(row: Row, metric: str, role: str, site: str, constant: Sequence[Run]) -> bool:
    """Whether at least half of the seeds are near to the constant answer of all sites, or of the site's own."""
    of_all = _pairs(constant, "global", row.runs, row.models[0], metric, role, site)
    own = _pairs(constant, "personal", row.runs, row.models[0], metric, role, site)
    return any(pairs and 2 * sum(abs(one - two) <= NEAR for one, two in pairs) >= len(pairs) for pairs in (of_all, own))


def _pairs(
    first: Sequence[Run], model: str, second: Sequence[Run], other: str, metric: str, role: str, site: str
) -> list[tuple[float, float]]:
    """Values of both models at one site in the seeds that both have."""
    seeds = {run["seed"] for run in first} & {run["seed"] for run in second}
    values = [
        values_of([run for run in runs if run["seed"] in seeds], of, metric, role=role, site=site)
        for runs, of in ((first, model), (second, other))
    ]
    return [(one, two) for one, two in zip(*values, strict=True) if one is not None and two is not None]


def _of_method(groups: Groups, method: str) -> Sequence[Run]:
    """The runs of the first group that has this method; none where there is no such group."""
    return next((runs for runs in groups.values() if runs and runs[0]["method"] == method), ())


# -- paired differences, over seeds and over patients -------------------------------------------------------------------


NULL: Final = ("global", "batch_statistics", "mixture", "tent")  # what a run's adapted model has to beat, see IOP-FL's controls
_OVER: Final = ("95 % over seeds", "t-test over seeds, p", "seeds", "95 % over patients", "test over patients, p", "patients")


def differences_table(groups: Groups, metric: str, against: str | None = None) -> str:
    """A Markdown table of paired differences to what one group deploys, each with its 95 % intervals.

    Over seeds: Student's t, of seeds that both groups have. Over patients: `compare_patients`, where the runs hold scores of patients.

    Args:
        groups: label -> results dicts that differ in their seed and in who is outside.
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
        f"{test} (Wilcoxon)" if over_patients.p is not None else test,
        str(over_patients.patients) if over_patients.patients else UNDEFINED,
    ]


# -- what methods choose by themselves at a site ------------------------------------------------------------------------


BELOW: Final = 0.02  # of the metric: routing that ends this far below its start has done harm
_START: Final = "mixture"  # routing before any step, see IOP-FL's comparisons


def balanced_accuracy(taken: Mapping[str, Mapping[str, int]]) -> float | None:
    """Mean over sites of the share of a site's images that were taken for its own; None where there is no image.

    Examples:
        >>> balanced_accuracy({"A": {"A": 3, "B": 1}, "B": {"A": 2, "B": 2}}), balanced_accuracy({})
        (0.625, None)
    """
    shares = [row.get(site, 0) / sum(row.values()) for site, row in taken.items() if sum(row.values())]
    return float(np.mean(shares)) if shares else None


def selector_table(groups: Groups) -> str:
    """A Markdown table of selectors on test images: their balanced accuracy, and how many images a personal model answered.

    Args:
        groups: label -> results dicts that differ in their seed and in who is outside.

    Returns:
        "" where no row has a selector.
    """
    names = sorted({site for runs in groups.values() for run in runs for site in confusion(run["sites"])})
    lines = [["method", "balanced accuracy", *(f"{name} recognised" for name in names), "answered by a personal model", "runs"]]
    for label, runs in groups.items():
        found = [taken for run in runs if (taken := confusion(run["sites"]))]
        if not found:
            continue
        accuracy = estimate(map(balanced_accuracy, found))
        recognised = [estimate(balanced_accuracy({name: taken[name]}) for taken in found if name in taken) for name in names]
        personal = estimate(_personal_share(run) for run in runs)
        cells = [spread("share", cell.mean, cell.sd) for cell in (accuracy, *recognised, personal)]
        lines.append([label, *cells, str(len(found))])
    return markdown(lines, left=1) if len(lines) > 1 else ""


def routing_table(groups: Groups, metric: str) -> str:
    """A Markdown table of routing against its start at every site that was left out: mean, worst run, harm, and whether events name it.

    Args:
        metric: higher is better.

    Returns:
        "" where no row routes.
    """
    lines = [["method", "outside", "start", "end", "worst run", f"more than {BELOW} below", "of these with an event", "runs"]]
    for label, runs in groups.items():
        moves = [move for run in runs for move in _moves(run, metric)]
        for name in (*sorted({move.site for move in moves}), None) if moves else ():
            here = [move for move in moves if name in (move.site, None)]
            harmed = [move for move in here if move.end < move.start - BELOW]
            ends = [f"{np.mean([getattr(move, side) for move in here]):.3f}" for side in ("start", "end")]
            worst = min(move.end - move.start for move in here)
            told = sum(move.reverted for move in harmed)
            lines.append([label, name or "all", *ends, f"{worst:+.3f}", str(len(harmed)), str(told), str(len(here))])
    return markdown(lines, left=2) if len(lines) > 1 else ""


class _Move(NamedTuple):
    """What routing did at one site that was left out, in one run."""

    site: str
    start: float
    end: float
    reverted: bool  # an event says that the gate refused a state


def _moves(run: Run, metric: str) -> Iterator[_Move]:
    for name, site in run["sites"].items():
        start, end = (site["metrics"].get(model, {}).get(metric) for model in (_START, "deployed"))
        if site["role"] == "outside" and start is not None and end is not None:
            yield _Move(name, start, end, any(event["kind"] == "reverted" and event["site"] == name for event in run["events"]))


def _personal_share(run: Run) -> float | None:
    """Of the inside sites' test images, those that a personal model answered."""
    answered: Sequence[Mapping[str, Any]] = [run["sites"][name]["reports"]["deployed"] for name in confusion(run["sites"])]
    counts = [{name: count for name, count in of.items() if name != "selector"} for of in answered]
    every = sum(sum(of.values()) for of in counts)
    return 1 - sum(of.get("global", 0) for of in counts) / every if every else None
