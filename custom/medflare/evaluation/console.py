"""What a run prints at its end: the table of its results, as plain text in a log file, in colour on
a terminal.
"""

import io
import shlex
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING

from medflare.core.packages import installed
from medflare.core.text import Json, format_seconds, printable
from medflare.data.datalist import SPLITS
from medflare.evaluation import presentation as text
from medflare.evaluation.findings import UNUSABLE, findings_of, level_sentence
from medflare.evaluation.results import (
    COMPLETED,
    FAILED,
    REPORT_FILE,
    RESULTS_FILE,
    list_results,
    load_results,
)

if TYPE_CHECKING:
    from rich.table import Table

_WIDE = 10_000  # columns, where nothing is cut or wrapped
_WIDTH = 100  # columns of tables, unless a terminal has fewer


def results_table(results: Json) -> str:
    """The result table as plain text for a log, with the level and a line for each finding."""
    buffer = io.StringIO()
    print_results(results, buffer)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def print_results(results: Json, stream: IO[str]) -> None:
    """Print the result tables, each with as many metrics as 100 columns hold; a terminal gets
    colour.
    """
    sentence = level_sentence(results)
    run_findings = findings_of(results)
    if not installed("rich"):
        title = f"{results['method']} on {results['task']}: {text.outcome(results)}"
        stream.write(f"{title}; see {RESULTS_FILE} and {REPORT_FILE}\n")
        if sentence:
            stream.write(f"{sentence}\n")
        for finding in run_findings:
            stream.write(f"WARNING {finding.line}\n")
        return
    from rich.console import Console
    from rich.measure import Measurement
    from rich.text import Text

    terminal = stream.isatty()
    console = Console(
        file=stream,
        force_terminal=terminal,
        width=None if terminal else _WIDE,
        highlight=False,
        markup=False,  # names are other parties'
        emoji=False,
    )
    width = min(console.width, _WIDTH)
    wide = console.options.update_width(_WIDE)
    groups: list[list[str]] = [[]]  # of metrics, a table each
    for metric in text.metric_names(results):
        table = _metrics_table(results, [*groups[-1], metric])
        if groups[-1] and Measurement.get(console, wide, table).maximum > width:
            groups.append([])
        groups[-1].append(metric)
    summary = Text("\n".join(_summary(results)))
    usable = all(finding.kind not in UNUSABLE for finding in run_findings)
    summary.highlight_words([COMPLETED], "bold green" if usable else "bold yellow")
    summary.highlight_words([FAILED], "bold red")
    console.print(summary, *(_metrics_table(results, metrics) for metrics in groups), sep="\n")
    line = text.selector_line(results)
    if line:
        console.print(Text(line))
    label_tables = list(text.label_tables(results).items())
    for title, rows in [*label_tables[:1], *text.method_tables(results).items()]:
        console.print(_method_table(title, rows))
    if sentence:
        console.print(Text(sentence))
    for finding in run_findings:
        console.print(Text(f"WARNING {finding.line}", "bold yellow"))


def _summary(results: Json) -> list[str]:
    """The method, task, status, cost and number of events of a run, and the reason of a failure."""
    weights = (results["configuration"]["task"].get("network") or {}).get("weights")
    if weights and not results["rounds"]:
        file = f"{weights['file']} (sha256 {weights['sha256'][:12]})"
        what = f"evaluation of {file} on {results['task']}, no training"
    else:
        rounds = text.with_number(results["rounds"], "round")
        what = f"{results['method']} on {results['task']}, {rounds}, seed {results['seed']}"
    down = text.format_bytes(results["traffic"]["down_bytes"])
    up = text.format_bytes(results["traffic"]["up_bytes"])
    cost = f"{down} to the sites, {up} from them"
    total = results["seconds"].get("total")
    if total is not None:
        cost += f"; {format_seconds(total)}"
    events = results["events"]
    if events:
        cost += f"; {text.with_number(len(events), 'event')}, listed in the report"
    lines = [f"{what}: {text.outcome(results)}", text.synthetic_source(results), cost]
    return [line for line in (*lines, text.event_counts(events)) if line]


def _metrics_table(results: Json, metrics: Sequence[str]) -> "Table":
    """A row for each site, a column for each metric and model; the best model of a site is bold."""
    from rich.table import Table
    from rich.text import Text

    columns = text.model_columns(results)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("site", "role", "images\n" + "/".join(SPLITS)):
        table.add_column(heading)
    for metric in metrics:
        label = text.metric_label(metric)
        if text.lower_is_better(metric):
            label += " ↓"
        for heading in columns:
            broken = heading.replace(" = ", "\n= ")
            table.add_column(f"{label}\n{broken}", justify="right")
    for name, role, n, models in text.table_rows(results):
        if not n and not metrics:
            continue  # the mean of no metric
        counts = []
        if n:
            for split in SPLITS:
                counts.append("?" if n[split] is None else str(n[split]))
        cells = []
        for metric in metrics:
            for model in columns.values():
                style = "bold green" if text.is_best(models, model, metric) else ""
                cells.append(Text(text.format_metric(metric, models[model][metric]), style))
        table.add_row(Text(name), role, "/".join(counts), *cells)
    return table


def _method_table(title: str, rows: Mapping[str, Json]) -> "Table":
    """What a method reports of its sites beside metrics, one column per site: there are more values
    than sites.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in (title, *rows):
        table.add_column(Text(heading))
    for name in dict.fromkeys(chain.from_iterable(rows.values())):
        table.add_row(Text(name), *(Text(str(row.get(name, ""))) for row in rows.values()))
    return table


def show_results(path: Path) -> bool:
    """Print the results at `path`, see `load_results`, the path of the report, and how to use the
    model; True if the run completed.
    """
    file, *older = list_results(path)
    results = load_results(file)
    print_results(results, sys.stdout)
    folder = file.parent
    if older:
        newest = printable(str(folder))
        sys.stdout.write(f"note: {path} has {len(older) + 1} runs; this is the newest, {newest}\n")
    report = folder / REPORT_FILE
    if report.is_file():
        sys.stdout.write(f"report: {printable(str(report.resolve()))}\n")
    models = sorted(folder.glob("sites/*/deployed"))
    usable = all(finding.kind not in UNUSABLE for finding in findings_of(results))
    if models and usable:
        model = printable(shlex.quote(str(models[0])))
        sys.stdout.write(f"next: medflare predict {model} IMAGES --out predictions\n")
    return results["status"] == COMPLETED
