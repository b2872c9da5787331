"""Learning curves: the task's metric on validation images over the rounds, and whether it is still rising at the end."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from medflare.evaluation.presentation import format_metric
from medflare.studies.recorded import CURVES
from medflare.studies.statistics.seeds import Run
from medflare.studies.tables.markdown import markdown
from medflare.studies.tables.rows import Groups

Curve: TypeAlias = dict[int, float]  # rounds of training -> mean over sites and runs

RISING: Final = 0.01  # of the metric, over the last third of the rounds
_FEWEST: Final = 4  # points in that third: a line through three says little
_COLUMNS: Final = 8


def curve_of(runs: Sequence[Run], model: str) -> Curve:
    """Mean validation curve of a model; deployed models go by the personal curve where there is one, else by the global one.

    Args:
        runs: of one group.
        model: its name in tables.
    """
    names = {"global": ("global",), "personal": ("personal", "global")}.get(model, ("personal", "global"))
    values: dict[int, list[float]] = {}
    for run in runs:
        curves: Mapping[str, Any] = run.get(CURVES, {})
        for points in curves.get(next((name for name in names if name in curves), ""), {}).values():
            for at, value in points:
                values.setdefault(int(at), []).append(value)
    most = max(map(len, values.values()), default=0)
    return {at: float(np.mean(values[at])) for at in sorted(values) if len(values[at]) == most}  # the same sites and runs at every point


def is_rising(curve: Curve) -> bool:
    """Whether the metric gained more than 0.01 over the last third of the rounds, by a line of least squares.

    The gain must be twice its standard error too, so that a curve that only swings does not count.

    Args:
        curve: see `curve_of`; below four points in the last third nothing is said.

    Examples:
        >>> is_rising({at: 0.02 * at for at in range(13)}), is_rising({at: 0.8 for at in range(13)}), is_rising({0: 0.1, 1: 0.9})
        (True, False, False)
    """
    late = [at for at in curve if at >= max(curve) * 2 / 3]
    if len(late) < _FEWEST:
        return False
    from scipy.stats import linregress

    line, span = linregress(late, [curve[at] for at in late]), late[-1] - late[0]
    return bool(line.slope * span > RISING and line.slope > 2 * line.stderr)


def curves_table(groups: Groups, metric: str) -> str:
    """A Markdown table of the mean validation curves, at most eight rounds of each.

    Args:
        groups: the runs.
        metric: of the task, which the curves show.

    Returns:
        "" where no run has a curve.
    """
    curves: dict[tuple[str, str], Curve] = {}
    for label, runs in groups.items():
        for model in ("global", "personal"):
            if any(model in run.get(CURVES, {}) for run in runs):
                curves[label, model] = curve_of(runs, model)
    last = max((max(curve, default=0) for curve in curves.values()), default=0)
    if not last:
        return ""
    shown = sorted({round(step) for step in np.linspace(0, last, _COLUMNS)})
    lines = [["method", "model", *(str(at) for at in shown), "rising"]]
    for (label, model), curve in curves.items():
        values = [format_metric(metric, curve.get(at)) for at in shown]
        lines.append([label, model, *values, "yes" if is_rising(curve) else "no"])
    return markdown(lines, left=2)
