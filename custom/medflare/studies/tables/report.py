"""table.md: what a study found, as Markdown tables that say how their models were selected and what warns of them."""

import json
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, Final

from medflare.studies.candidates import UNIFORM, weighs_by_samples
from medflare.studies.constant import CONSTANT
from medflare.studies.references import CENTRALISED, SINGLE_SITE, TRAINED_AS
from medflare.studies.tables.choices import routing_table, selector_table
from medflare.studies.tables.curves import curves_table
from medflare.studies.tables.differences import differences_table, own_differences_table
from medflare.studies.tables.rows import Groups, task_of, with_oracle
from medflare.studies.tables.sites import sites_table
from medflare.studies.tables.summary import summary_table

TABLE_FILE: Final = "table.md"
_WITHOUT_MEAN: Final = (CONSTANT, SINGLE_SITE, CENTRALISED)


def study_tables(groups: Groups, wanted: Container[str] | None = None) -> dict[str, str]:
    """Title -> Markdown table: for each of the task's metrics, its main one first, what every site reached and what the mean hides; then
    paired differences to the first row and to rows that trained alone, what selectors and routing chose, and learning curves in the main
    one.

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
    tables[f"{main}, learning curves"] = partial(curves_table, groups, main)
    chosen = {title: make() for title, make in tables.items() if wanted is None or title in wanted}
    return {title: table for title, table in chosen.items() if table}


def study_report(groups: Groups) -> str:
    """Markdown: what the runs have in common, what to beware of, and `study_tables`.

    Args:
        groups: as for `study_tables`.
    """
    rounds = sorted({run["rounds"] for runs in groups.values() for run in runs})
    title = f"# {task_of(groups)['name']}, {' or '.join(map(str, rounds))} rounds\n"
    cautions = "".join(f"- {line}\n" for line in _cautions(groups))
    return "\n".join(
        [title, *([cautions] if cautions else []), *(f"## {title}\n\n{table}" for title, table in study_tables(groups).items())]
    )


def _cautions(groups: Groups) -> list[str]:
    """What makes rows hard to compare, one line each."""
    lines = []
    moments: dict[bool, list[str]] = {True: [], False: []}
    for label, runs in groups.items():
        for reset in {_starts_afresh(run) for run in runs if run["method"] != CONSTANT}:
            moments[reset].append(label)
    if all(moments.values()):
        lines.append(
            f"Unequal: the optimizer keeps its moments from round to round in {', '.join(moments[False])}, "
            f"and starts every round afresh in {', '.join(moments[True])} (reset_optimizer; prr has no choice)."
        )
    weighed: dict[bool, list[str]] = {True: [], False: []}
    for label, runs in groups.items():
        for samples in {weighs_by_samples(run["configuration"]["hyper"]["server"]) for run in runs if run["method"] not in _WITHOUT_MEAN}:
            weighed[samples].append(label)
    if all(weighed.values()) and not any(_is_uniform_fedavg(run) for runs in groups.values() for run in runs):
        lines.append(
            f"Unequal: the mean weighs sites by their training images in {', '.join(weighed[True])}, and otherwise in "
            f"{', '.join(weighed[False])}: add `--reference {UNIFORM}`, FedAvg with every site counting once."
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


def _starts_afresh(run: Mapping[str, Any]) -> bool:
    """Whether every round had a fresh optimizer; a half without `reset_optimizer` (PRR's) has no memory for moments."""
    return bool(run["configuration"]["hyper"]["site"].get("reset_optimizer", True))


def _is_uniform_fedavg(run: Mapping[str, Any]) -> bool:
    return bool(run["method"] == TRAINED_AS and run["configuration"]["hyper"]["server"].get("weighting") == "uniform")


def _unequal_settings(tasks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the settings that not all tasks have alike, where they have them; every seed draws a split of its own."""
    names = dict.fromkeys(name for task in tasks for name in task if name != "resplit")
    return [name for name in names if len({json.dumps(task[name], sort_keys=True) for task in tasks if name in task}) > 1]


def _has(groups: Groups, method: str) -> bool:
    return any(run["method"] == method for runs in groups.values() for run in runs)
