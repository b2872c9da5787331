"""A study as tables for other programs: every value, and a line for every row."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from medflare.core.text import JsonDict
from medflare.evaluation.presentation import label_metric
from medflare.evaluation.results import COMPLETED, defined_mean
from medflare.studies.costs import PEAK, PROCESSOR
from medflare.studies.references import CONSTANT, TRAINED_AS
from medflare.studies.runs import curve_of, selection
from medflare.studies.statistics import Groups, Results, all_runs, compare, distinct, metrics_frame
from medflare.studies.tables import StudyTables

_OF_TARGET = 0.95  # of the final validation metric
# Seconds of a run, if all runs have them -> column.
_SECONDS = {PROCESSOR: "processor_seconds", "total": "wall_seconds"}


def long_table(groups: Groups, metrics: Sequence[str]) -> pd.DataFrame:
    """The rows of `results_frame` of all runs, of these metrics and of their structures or classes,
    with columns method (the row) and seed.
    """
    table = metrics_frame(groups).drop(columns="run").rename(columns={"row": "method"})
    wanted = {*metrics, *map(label_metric, metrics)}
    return table[table["metric"].isin(wanted)]


def summary_table(study: StudyTables, target: float | None = None) -> pd.DataFrame:
    """A line for every row of the study.

    Columns: of every metric and role the mean over sites and seeds of the deployed model, and low
    and high, its 95 % t interval over seeds; of completed runs the seeds, their number and the
    means of the traffic, the seconds and, if measured, the peak memory; rounds; the first round
    whose mean validation metric reaches the target; the selection rule and the versions.

    Args:
        target: of the validation metric; default: see `default_target`. The column's name says it.
    """
    rounds_column = "rounds_to_target"
    if target is None:
        target, source = default_target(study)
    else:
        source = "set"
    if target is not None:
        rounds_column = f"rounds_to_{study.metric}_{target:.3f} ({source})"
    runs = [run for run in _completed(all_runs(study.groups)) if run["method"] != CONSTANT]
    has_processor = all(run["seconds"].get(PROCESSOR) is not None for run in runs)
    stage = PROCESSOR if has_processor else "total"
    lines = []
    for row, row_runs in study.groups.items():
        line: JsonDict = {"method": row} | _means(study, row)
        completed = _completed(row_runs)
        line["seeds"] = len(distinct(completed, "seed"))
        line["runs"] = len(completed)
        line["traffic_MB"] = defined_mean(sum(run["traffic"].values()) / 1e6 for run in completed)
        line[_SECONDS[stage]] = defined_mean(run["seconds"].get(stage) for run in completed)
        peak = defined_mean(run.get(PEAK) for run in completed)
        if peak is not None:
            line["peak_memory_MB"] = peak / 1e6
        line["rounds"] = _joined(distinct(row_runs, "rounds"))
        curve = curve_of(row_runs, "deployed")
        enough = [round for round in curve if target is not None and curve[round] >= target]
        line[rounds_column] = min(enough, default=None)
        line["selection"] = _joined(set(map(selection, row_runs)))
        lines.append(line | _versions(row_runs))
    return pd.DataFrame(lines)


def default_target(study: StudyTables) -> tuple[float | None, str]:
    """95 % of the final validation metric of FedAvg, or without FedAvg of the best row but the
    oracle, and what it is; None without curves.
    """
    finals = {}
    for row in study.compared:
        curve = curve_of(study.groups[row], "deployed")
        if curve:
            finals[row] = curve[max(curve)]
    if not finals:
        return None, ""
    row = study.row_of(TRAINED_AS) or ""
    if row not in finals:
        row = max(finals, key=finals.__getitem__)
    return _OF_TARGET * finals[row], f"{_OF_TARGET:.0%} of {row}"


def _means(study: StudyTables, row: str) -> dict[str, float | None]:
    cells = {}
    for metric in study.metrics:
        for role in study.roles:
            values = study.series(row, role, metric)
            over_seeds = compare(0.0, values, study.split_ratio)
            low, high = over_seeds.interval or (None, None)
            cells[f"{metric}_{role}"] = over_seeds.difference
            cells[f"{metric}_{role}_low"] = low
            cells[f"{metric}_{role}_high"] = high
    return cells


def _completed(runs: Iterable[Results]) -> list[Results]:
    return [run for run in runs if run["status"] == COMPLETED]


def _versions(runs: Sequence[Results]) -> dict[str, str]:
    """Package -> its versions in some runs."""
    versions = defaultdict(set)
    for run in runs:
        for package, version in run["versions"].items():
            versions[package].add(str(version))
    return {package: _joined(numbers) for package, numbers in sorted(versions.items())}


def _joined(values: Iterable[Any]) -> str:
    return " or ".join(map(str, sorted(values)))
