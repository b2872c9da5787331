"""The result table of the console, drawn by Rich."""

import io
from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from medflare.evaluation.doubts import doubts
from medflare.evaluation.names import COMPLETED, ROLES, SPLITS
from medflare.evaluation.presentation import (
    event_counts,
    format_bytes,
    format_metric,
    format_seconds,
    is_best,
    lower_is_better,
    metric_label,
    metric_names,
    model_columns,
    ordered_sites,
    selector_line,
    synthetic_source,
)


def plain_table(results: Mapping[str, Any]) -> str:
    """The result table as plain text: no control characters, as wide as it needs to be."""
    parts: list[Text | Table] = [_summary(results), _table(results, metric_names(results)), *_told(results)]
    buffer = io.StringIO()
    console = Console(file=buffer, force_terminal=False, color_system=None, width=10_000, legacy_windows=False, highlight=False)
    console.width = max(80, *(Measurement.get(console, console.options, part).maximum for part in parts))
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def print_table(results: Mapping[str, Any], terminal: IO[str]) -> None:
    """The result table in colour, cut to the task's own metric where the window is narrow.

    Args:
        terminal: where it is drawn.
    """
    console = Console(file=terminal)
    metrics = metric_names(results)
    table = _table(results, metrics)
    fits = Measurement.get(console, console.options.update_width(10_000), table).maximum <= console.width
    console.print(_summary(results))
    console.print(table if fits else _table(results, metrics[:1]), *_told(results), sep="\n")
    for doubt in doubts(results["events"]):
        console.print(Text(f"WARNING {doubt.line}", "bold yellow"))


def _summary(results: Mapping[str, Any]) -> Text:
    """Method, task, status and cost; the reason where the run failed."""
    text = Text(f"{results['method']} on {results['task']}, {_counted(results['rounds'], 'round')}, seed {results['seed']}: ")
    text.append(results["status"], "bold green" if results["status"] == COMPLETED else "bold red")
    if results["reason"]:
        text.append(f": {results['reason']}", "red")
    if synthetic_source(results):
        text.append(f"\n{synthetic_source(results)}", "italic")
    traffic, total = results["traffic"], results["seconds"].get("total")
    cost = [f"{format_bytes(traffic['down_bytes'])} to the sites, {format_bytes(traffic['up_bytes'])} from them"]
    cost += [format_seconds(total)] if total is not None else []
    cost += [f"{_counted(len(results['events']), 'event')}, told in the report"] if results["events"] else []
    text.append("\n" + "; ".join(cost))
    return text.append(f"\n{event_counts(results['events'])}") if results["events"] else text


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _table(results: Mapping[str, Any], metrics: Sequence[str]) -> Table:
    """Sites down, models across, metric by metric; the best model of a site stands out."""
    models = model_columns(results)
    columns = [(model, metric) for metric in metrics for model in models.values()]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("site", "role", "images\n" + "/".join(SPLITS)):
        table.add_column(heading)
    for metric in metrics:
        words = f"{metric_label(metric)}{' ↓' if lower_is_better(metric) else ''}"
        for heading in models:
            table.add_column(f"{words}\n" + heading.replace(" = ", "\n= "), justify="right")
    sites = ordered_sites(results)
    for name, site in sites.items():
        counts = "/".join("?" if site["n"][split] is None else str(site["n"][split]) for split in SPLITS)
        table.add_row(Text(name), site["role"], counts, *_cells(site["metrics"], columns))
    for role in ROLES if columns else ():
        if sum(site["role"] == role for site in sites.values()) > 1:
            table.add_row("mean", role, "", *_cells(results["mean"][role], columns))
    return table


def _told(results: Mapping[str, Any]) -> list[Text | Table]:
    """What a method tells beside metrics: by what its model selects; of its sites, columns down, as there are more columns than sites."""
    tables: list[Text | Table] = [Text(line)] if (line := selector_line(results)) else []
    for title, rows in results.get("tables", {}).items():
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in (title, *rows):
            table.add_column(Text(heading))
        for column in dict.fromkeys(name for row in rows.values() for name in row):
            table.add_row(Text(column), *(Text(str(row.get(column, ""))) for row in rows.values()))
        tables.append(table)
    return tables


def _cells(models: Mapping[str, Mapping[str, float | None]], columns: list[tuple[str, str]]) -> list[Text]:
    return [
        Text(format_metric(metric, models[model][metric]), "bold green" if is_best(models, model, metric) else "")
        for model, metric in columns
    ]
