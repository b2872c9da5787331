"""What a run prints: one line per step, and the table of its results. Plain text in a log file, colour on a terminal."""

import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from medflare.core.packages import installed
from medflare.evaluation import presentation as text
from medflare.evaluation.results import COMPLETED, FAILED, REPORT_FILE, RESULTS_FILE, ROLES, SPLITS, find_results, load_results
from medflare.evaluation.verdicts import UNUSABLE, findings_of, verdict

if TYPE_CHECKING:
    from rich.table import Table

_WIDE = 10_000  # columns, where nothing is cut or wrapped
_WIDTH = 100  # columns of tables, unless a terminal has fewer


def round_line(
    phase: str,
    round: int,
    rounds: int,
    meta: Mapping[str, Mapping[str, Any]],
    rejected: Mapping[str, str],
    seconds: float,
    aggregation: Mapping[str, Mapping[str, float | None]] | None = None,
) -> str:
    """One step, for example "round 3/20 train: A loss 0.4120 global 0.801 weight 0.612 | B rejected (holds NaN) | 1.2 s".

    Args:
        round: 0-based, shown from 1; `rounds` for the validation of the last round's models.
        meta: site -> metadata of its reply.
        rejected: site -> reason.
        aggregation: site -> numbers of the server about it, for example its weight.
    """
    after = f"after round {rounds}" if rounds else "without training"
    place = after if round >= rounds else f"round {round + 1}/{rounds}"
    parts: dict[str, list[str]] = {}
    for site, reply in meta.items():
        parts[site] = [site] if reply.get("loss") is None else [site, f"loss {reply['loss']:.4f}"]
        parts[site] += [f"{model} {text.format_metric('', value)}" for model, value in reply.get("validation", {}).items()]
        parts[site] += [f"ε {text.format_metric('', reply['privacy'].get('epsilon'))}"] if "privacy" in reply else []
    parts |= {site: [site, f"rejected ({' '.join(reason.split())})"] for site, reason in rejected.items()}
    for site, numbers in (aggregation or {}).items():
        parts.setdefault(site, [site]).extend(f"{name} {text.format_metric('', value)}" for name, value in numbers.items())
    return f"{place} {phase}: " + " | ".join([*(" ".join(parts[site]) for site in sorted(parts)), text.format_seconds(seconds)])


def results_table(results: Mapping[str, Any]) -> str:
    """The result table as plain text for a log, with the verdict and a line for each finding."""
    buffer = io.StringIO()
    print_results(results, buffer)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


def print_results(results: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Print the result tables, each with as many metrics as 100 columns hold, by default on standard output; a terminal gets colour."""
    stream = sys.stdout if file is None else file
    if not installed("rich"):
        outcome = f"{results['status']}: {results['reason']}" if results["reason"] else results["status"]
        lines = [f"{results['method']} on {results['task']}: {outcome}; see {RESULTS_FILE} and {REPORT_FILE}"]
        lines += [verdict(results)] if verdict(results) else []
        lines += [f"WARNING {finding.line}" for finding in findings_of(results)]
        stream.write("\n".join(lines) + "\n")
        return
    from rich.console import Console
    from rich.measure import Measurement
    from rich.text import Text

    terminal = stream.isatty()
    plain: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}  # names are other parties'
    console = Console(file=stream, force_terminal=terminal, width=None if terminal else _WIDE, **plain)
    width = min(console.width, _WIDTH)

    def fits(metrics: Sequence[str]) -> bool:
        table = _metrics_table(results, metrics)
        return Measurement.get(console, console.options.update_width(_WIDE), table).maximum <= width

    groups: list[list[str]] = []  # of metrics, a table each
    for metric in text.metric_names(results):
        if groups and fits([*groups[-1], metric]):
            groups[-1].append(metric)
        else:
            groups.append([metric])
    summary = Text("\n".join(_summary(results)))
    usable = all(finding.kind not in UNUSABLE for finding in findings_of(results))
    summary.highlight_words([COMPLETED], "bold green" if usable else "bold yellow")
    summary.highlight_words([FAILED], "bold red")
    console.print(summary, *(_metrics_table(results, metrics) for metrics in groups or [[]]), sep="\n")
    if line := text.selector_line(results):
        console.print(Text(line))
    for title, rows in [*list(text.label_tables(results).items())[:1], *text.method_tables(results).items()]:
        console.print(_method_table(title, rows))
    if sentence := verdict(results):
        console.print(Text(sentence))
    for finding in findings_of(results):
        console.print(Text(f"WARNING {finding.line}", "bold yellow"))


def _summary(results: Mapping[str, Any]) -> list[str]:
    """Method, task, status, cost and number of events; the reason of a failure."""
    weights = (results["configuration"]["task"].get("network") or {}).get("weights") or {}
    what = f"{results['method']} on {results['task']}, {text.counted(results['rounds'], 'round')}, seed {results['seed']}"
    if not results["rounds"] and weights:
        what = f"evaluation of {weights['file']} (sha256 {weights['sha256'][:12]}) on {results['task']}, no training"
    title = f"{what}: {results['status']}"
    lines = [title + (f": {results['reason']}" if results["reason"] else ""), text.synthetic_source(results)]
    traffic, total, events = results["traffic"], results["seconds"].get("total"), results["events"]
    cost = [f"{text.format_bytes(traffic['down_bytes'])} to the sites, {text.format_bytes(traffic['up_bytes'])} from them"]
    cost += [text.format_seconds(total)] if total is not None else []
    cost += [f"{text.counted(len(events), 'event')}, listed in the report"] if events else []
    return [line for line in (*lines, "; ".join(cost), text.event_counts(events)) if line]


def _metrics_table(results: Mapping[str, Any], metrics: Sequence[str]) -> "Table":
    """A row for each site, a column for each metric and model; the best model of a site is bold."""
    from rich.table import Table
    from rich.text import Text

    columns = text.model_columns(results)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("site", "role", "images\n" + "/".join(SPLITS)):
        table.add_column(heading)
    for metric in metrics:
        for heading in columns:
            arrow = " ↓" if text.lower_is_better(metric) else ""
            table.add_column(f"{text.metric_label(metric)}{arrow}\n" + heading.replace(" = ", "\n= "), justify="right")

    sites = text.ordered_sites(results)
    rows = [(name, site["role"], site["n"], site["metrics"]) for name, site in sites.items()]
    roles = [site["role"] for site in sites.values()]
    rows += [("mean", role, {}, results["mean"][role]) for role in ROLES if metrics and roles.count(role) > 1]
    for name, role, n, models in rows:
        cells = [
            Text(text.format_metric(metric, models[model][metric]), "bold green" if text.is_best(models, model, metric) else "")
            for metric in metrics
            for model in columns.values()
        ]
        table.add_row(Text(name), role, "/".join("?" if n[split] is None else str(n[split]) for split in SPLITS if n), *cells)
    return table


def _method_table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> "Table":
    """What a method reports of its sites beside metrics, one column per site: there are more values than sites."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in (title, *rows):
        table.add_column(Text(heading))
    for name in dict.fromkeys(name for row in rows.values() for name in row):
        table.add_row(Text(name), *(Text(str(row.get(name, ""))) for row in rows.values()))
    return table


def show_results(path: Path, file: IO[str] | None = None) -> bool:
    """Print the results at `path`, see `load_results`, and the path of the report; True if the run completed."""
    results = load_results(path)
    print_results(results, file)
    report = find_results(path).with_name(REPORT_FILE)
    if report.is_file():
        (sys.stdout if file is None else file).write(f"report: {report.resolve()}\n")
    return bool(results["status"] == COMPLETED)
