"""What a run says while it works and when it ends: one line a step, one table. Plain text in a log file, colour on a terminal."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from medflare.core.packages import installed
from medflare.evaluation.doubts import doubts
from medflare.evaluation.names import COMPLETED, REPORT_FILE, RESULTS_FILE
from medflare.evaluation.presentation import format_metric, format_seconds
from medflare.evaluation.results import find_results, load_results


def round_line(
    phase: str,
    round: int,
    rounds: int,
    meta: Mapping[str, Mapping[str, Any]],
    rejected: Mapping[str, str],
    seconds: float,
    aggregation: Mapping[str, Mapping[str, float | None]] | None = None,
) -> str:
    """One step in one line: every site's loss and validation metrics, or why its update was not used, and its aggregation's numbers.

    Args:
        round: 0-based; `rounds` itself for the look at the last round's models.
        meta: site -> meta of its reply; "loss", "validation" (model -> metric) and the ε of "privacy" are shown.
        rejected: site -> reason.
        seconds: that the step took.
        aggregation: site -> what the server made of it, for example its weight.

    Returns:
        For example "round 2 (3/20) train: A loss 0.4120 global 0.801 weight 0.612 | B rejected (holds NaN) | 1.2 s".
    """
    after = f"after round {rounds - 1}" if rounds else "without a round"
    place = after if round >= rounds else f"round {round} ({round + 1}/{rounds})"
    shown = {site: [site, *_step_facts(meta[site])] for site in meta}
    shown.update({site: [site, f"rejected ({' '.join(reason.split())})"] for site, reason in rejected.items()})
    for site, numbers in (aggregation or {}).items():
        shown.setdefault(site, [site]).extend(f"{name} {format_metric('', value)}" for name, value in numbers.items())
    return f"{place} {phase}: " + " | ".join([*(" ".join(shown[site]) for site in sorted(shown)), format_seconds(seconds)])


def _step_facts(meta: Mapping[str, Any]) -> list[str]:
    parts = [] if meta.get("loss") is None else [f"loss {meta['loss']:.4f}"]
    parts += [f"{model} {format_metric('', value)}" for model, value in meta.get("validation", {}).items()]
    if "privacy" in meta:
        parts.append(f"ε {format_metric('', meta['privacy'].get('epsilon'))}")
    return parts


def results_table(results: Mapping[str, Any]) -> str:
    """The result table as plain text that a log can hold, and a line for each doubt about the deployed model (`doubts`) under it.

    Where Rich, which draws the table, is not installed, one line stands in for it.
    """
    if not installed("rich"):
        outcome = f"{results['status']}: {results['reason']}" if results["reason"] else results["status"]
        table = f"{results['method']} on {results['task']}: {outcome}; see {RESULTS_FILE} and {REPORT_FILE}"
    else:
        from medflare.evaluation.tables import plain_table

        table = plain_table(results)
    return "\n".join([table, *(f"WARNING {doubt.line}" for doubt in doubts(results["events"]))])


def print_results(results: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """The result table on a terminal, with colour and cut to the task's own metric where the window is narrow; else plain text.

    Args:
        file: where to; None: standard output.
    """
    stream = sys.stdout if file is None else file
    if not (stream.isatty() and installed("rich")):
        stream.write(results_table(results) + "\n")
        return
    from medflare.evaluation.tables import print_table

    print_table(results, stream)


def show_results(path: Path, file: IO[str] | None = None) -> bool:
    """Print the results found at `path` (see `results.find_results`) and where the report lies; whether the run completed.

    Raises:
        StateError: there is no results.json, or it is damaged.
    """
    results = load_results(path)
    print_results(results, file)
    report = find_results(path).with_name(REPORT_FILE)
    if report.is_file():
        (sys.stdout if file is None else file).write(f"report: {report.resolve()}\n")
    return bool(results["status"] == COMPLETED)
