"""table.md: what a study found, as Markdown tables of means and of paired differences."""

from collections.abc import Mapping, Sequence
from typing import Final

from medflare.evaluation.presentation import UNDEFINED, best_value, format_metric
from medflare.evaluation.results import MODELS
from medflare.studies.statistics import Estimate, Run, compare, estimate, values_of
from medflare.tasks.config import TaskConfig

TABLE_FILE: Final = "table.md"


def study_report(groups: Mapping[str, Sequence[Run]], task: TaskConfig, rounds: int) -> str:
    """Markdown: a table for each of the task's metrics, its main one first, and the paired differences in the main one.

    Args:
        groups: label -> results dicts that differ in their seed and in who is outside.
        task: gives the metrics.
        rounds: of every run.
    """
    metrics = sorted(task.metrics, key=lambda metric: metric != task.metric)
    tables = {metric: markdown_table(groups, metric) for metric in metrics}
    tables[f"{task.metric}, differences seed by seed"] = comparison_table(groups, task.metric)
    sections = (f"## {title}\n\n{table}" for title, table in tables.items())
    return "\n".join([f"# {task.name}, {rounds} rounds\n", *sections])


def markdown_table(groups: Mapping[str, Sequence[Run]], metric: str, models: Sequence[str] | None = None) -> str:
    """A Markdown table of one metric: a row for each group and model, a column for each site and each role's mean.

    Cells hold "mean ± standard deviation" over the group's seeds; the best mean of a column is bold. Models of a group with
    the same numbers everywhere (FedAvg delivers one model for all purposes) share a row.

    Args:
        groups: label, for example "FedSM" or "single-site" -> results dicts that differ in their seed and in who is outside.
        metric: its name.
        models: None for all that the runs measured.
    """
    every = [run for runs in groups.values() for run in runs]
    columns = _places(every)
    body: dict[tuple[str, str], list[Estimate]] = {}
    for label, runs in groups.items():
        for model in _models(runs) if models is None else models:
            cells = [estimate(values_of(runs, model, metric, role=role, site=site)) for role, site in columns]
            if not any(cell.n for cell in cells):
                continue
            twin = next((key for key, known in body.items() if key[0] == label and known == cells), None)
            if twin is not None:
                del body[twin]
            body[label, f"{twin[1]}, {model}" if twin else model] = cells
    best = [best_value(metric, (cells[place].mean for cells in body.values())) for place in range(len(columns))]
    lines = [["method", "model", *(_heading(role, site) for role, site in columns), "runs"]]
    for (label, model), cells in body.items():
        shown = [_cell(metric, cell, bold=cell.mean is not None and cell.mean == top) for cell, top in zip(cells, best, strict=True)]
        lines.append([label, model, *shown, str(len(groups[label]))])
    return _markdown(lines, left=2)


def comparison_table(groups: Mapping[str, Sequence[Run]], metric: str) -> str:
    """A Markdown table of paired differences: every model of every group against what the first group deploys, seed by seed.

    Args:
        groups: label -> results dicts that differ in their seed and in who is outside; the first is the reference.
        metric: its name.
    """
    (first, reference), *_ = groups.items()
    rows: dict[tuple[str, ...], list[str]] = {}  # what a line says beside its models -> the models it says it of
    for label, runs in groups.items():
        for model in _models(runs):
            for role in dict.fromkeys(role for role, _ in _places(runs)):
                pair = (values_of(reference, "deployed", metric, role=role), values_of(runs, model, metric, role=role))
                if len(pair[0]) != len(pair[1]) or (label == first and pair[0] == pair[1]):
                    continue
                found = compare(*pair)
                if found.difference is not None:
                    p_values = (_p_value(found.t_test), _p_value(found.wilcoxon))
                    rows.setdefault((label, role, f"{found.difference:+.3f}", *p_values, str(found.n)), []).append(model)
    lines = [["method", "model", "sites", f"difference to {first}", "paired t-test, p", "Wilcoxon, p", "seeds"]]
    lines += [[label, ", ".join(models), *cells] for (label, *cells), models in rows.items()]
    return _markdown(lines, left=3)


def _models(runs: Sequence[Run]) -> list[str]:
    """Names of the models that the runs measured; those that differ in a site's name alone as one."""
    found = [model for run in runs for site in run["sites"].values() for model in site["metrics"]]
    return list(dict.fromkeys([*MODELS, *(model if "/" not in model else f"{model.partition('/')[0]}/*" for model in found)]))


def _places(runs: Sequence[Run]) -> list[tuple[str, str | None]]:
    """(role, site) of every site in order of their names and then (role, None), for inside and outside sites."""
    sites = sorted({(site["role"], name) for run in runs for name, site in run["sites"].items()})
    places: list[tuple[str, str | None]] = []
    for role in dict.fromkeys(role for role, _ in sites):
        places += [*(place for place in sites if place[0] == role), (role, None)]
    return places


def _heading(role: str, site: str | None) -> str:
    if site is None:
        return f"mean {role}"
    return site if role == "inside" else f"{site} ({role})"


def _cell(metric: str, cell: Estimate, *, bold: bool) -> str:
    if cell.mean is None:
        return UNDEFINED
    text = format_metric(metric, cell.mean) + (f" ± {format_metric(metric, cell.sd)}" if cell.sd is not None else "")
    return f"**{text}**" if bold else text


def _p_value(p: float | None) -> str:
    return UNDEFINED if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _markdown(lines: Sequence[Sequence[str]], left: int) -> str:
    """Lines as a Markdown table; the first holds the headings, and all columns but the `left` first ones are set flush right."""
    rule = ["---" if column < left else "---:" for column in range(len(lines[0]))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]]) + "\n"
