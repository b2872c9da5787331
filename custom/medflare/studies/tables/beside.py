"""A suite's rows beside the paper's: its numbers, ours with their intervals, and every setting that differs."""

import json
from collections.abc import Sequence
from typing import Final

from medflare.evaluation.presentation import UNDEFINED
from medflare.studies.statistics import Estimate, estimate, values_of
from medflare.studies.suites import MEAN, Suite
from medflare.studies.tables.rows import Groups, markdown
from medflare.tasks.config import load_task

BESIDE_FILE: Final = "beside_the_paper.md"


def beside_the_paper(suite: Suite, groups: Groups) -> str:
    """Markdown: a line of the paper and one of ours for every row of its table.

    Args:
        groups: label of a method -> results dicts that differ in their seed and in who is outside.

    Returns:
        The table; ours as mean [95 % bootstrap interval over seeds], in the paper's unit.
    """
    lines = [["row", "of", *suite.columns]]
    for row, numbers in suite.numbers.items():
        lines.append([row, "paper", *(_shown(suite, numbers.get(column)) for column in suite.columns)])
        label = suite.methods.get(row)
        if label is not None and label in groups:
            lines.append(["", label, *(_ours(suite, groups, label, column) for column in suite.columns)])
    unit = "in hundredths" if suite.settings.percent else "as a share"
    seeds = ", ".join(map(str, _values(groups, "seed")))
    about = f"{suite.settings.metric} {unit}, {suite.settings.role} sites, our model: {suite.settings.model}. "
    about += f"Ours: mean over seeds {seeds} [95 % bootstrap interval]. The paper's: {suite.source}.\n"
    differing = "".join(f"- {line}\n" for line in (*suite.differences, *deviations(suite, groups)))
    parts = [f"# {suite.paper}, {suite.table}, beside ours\n", about, markdown(lines, 2)]
    return "\n".join([*parts, *([f"What differs:\n\n{differing}"] if differing else [])])


def deviations(suite: Suite, groups: Groups) -> list[str]:
    """What the runs have otherwise than the suite, one line each; of the runs as they were kept, whatever was asked for today."""
    sites = list(dict.fromkeys(name for runs in groups.values() for run in runs for name in run["sites"]))
    here: dict[str, Sequence[object]] = {"rounds": _values(groups, "rounds"), "seeds": _values(groups, "seed"), "sites": sorted(sites)}
    there: dict[str, Sequence[object]] = {"rounds": [suite.settings.rounds], "seeds": sorted(suite.seeds), "sites": sorted(suite.sites)}
    lines = [f"{name}: {_listed(here[name])}, the suite has {_listed(there[name])}" for name in here if here[name] != there[name]]
    planned = load_task(suite.task).to_dict()
    for task in (run["configuration"]["task"] for runs in groups.values() for run in runs if run["configuration"]["task"]):
        changed = [name for name, value in planned.items() if name != "resplit" and task.get(name) != value]
        lines += [f"{name} of the task: {json.dumps(task.get(name))}, the suite has {json.dumps(planned[name])}" for name in changed]
    failed = [label for label, runs in groups.items() if any(run["reason"] for run in runs)]
    return [*dict.fromkeys(lines), *(f"{label}: a run failed, see table.md" for label in failed)]


def _values(groups: Groups, name: str) -> list[int]:
    return sorted({run[name] for runs in groups.values() for run in runs})


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


def _ours(suite: Suite, groups: Groups, label: str, column: str) -> str:
    site = None if column == MEAN else column
    found = estimate(values_of(groups[label], suite.settings.model, suite.settings.metric, role=suite.settings.role, site=site))
    return _with_interval(suite, found)


def _with_interval(suite: Suite, found: Estimate) -> str:
    if found.mean is None:
        return UNDEFINED
    scale = 100 if suite.settings.percent else 1
    bounds = "" if found.interval is None else f" [{', '.join(_shown(suite, scale * bound) for bound in found.interval)}]"
    return _shown(suite, scale * found.mean) + bounds


def _shown(suite: Suite, value: float | None) -> str:
    """A number with as many places as the papers print."""
    return UNDEFINED if value is None else f"{value:.2f}" if suite.settings.percent else f"{value:.4f}"
