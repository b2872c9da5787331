"""The figures of a study: learning curves, differences to the first row, and ranks over tasks."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from medflare.core.store import write_atomically
from medflare.evaluation.figures import (
    INK,
    Drawing,
    Panel,
    line_drawing,
    line_panels,
    patients_drawing,
    unit_bounds,
)
from medflare.evaluation.presentation import metric_label
from medflare.studies.references import CONSTANT, CURVES
from medflare.studies.statistics import ALL_SITES, Groups, compare
from medflare.studies.tables import MARGIN, StudyTables, curve_of, task_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def curve_panel(groups: Groups) -> Panel | None:
    """The task's metric on validation images over the rounds, a line for every row and model; None
    without curves.
    """
    lines = {}
    for label, runs in groups.items():
        if label == CONSTANT:
            continue
        models = set[str]().union(*(run.get(CURVES, {}) for run in runs))
        for model in sorted(models & {"global", "personal"}):
            curve = curve_of(runs, model)
            if len(curve) > 1:
                lines[f"{label}, {model}" if len(models) > 1 else label] = list(curve.items())
    if not lines:
        return None
    metric = task_of(groups)["metric"]
    words = f"validation {metric_label(metric)}"
    return Panel("", lines, "rounds of training", words, bounds=unit_bounds(metric))


def learning_curves(groups: Groups, ink: str = "#808080") -> str | None:
    """`curve_panel` as SVG; None without curves.

    The default colour of the text, `ink`, is legible on light and dark pages.
    """
    panel = curve_panel(groups)
    svg = line_panels([panel], "curves") if panel else None
    return svg and svg.replace("currentColor", ink)


def deployed_values(study: StudyTables) -> pd.DataFrame:
    """The first metric of the deployed models at inside sites (if there are none, at outside
    sites): index (site, seed), columns rows.
    """
    role = study.roles[0]  # in their alphabetical order
    level = ("model", "role", "metric")
    table = study.values.xs(("deployed", role, study.first_metric), level=level)
    table = table.drop(ALL_SITES, level="site")
    return table.stack(future_stack=True).unstack("method").reindex(columns=list(study.groups))


def differences_drawing(study: StudyTables) -> Drawing | None:
    """Every row minus the first row, a point for each site and seed, with the 95 % interval over
    seeds; None below two rows.

    The `marked_range` is grey. The constant answer is left out: beside it,
    all other differences look equal.
    """
    against, *others = study.groups
    values = deployed_values(study)
    points = {}
    intervals = {}
    for label in others:
        differences = (values[label] - values[against]).dropna()
        if differences.empty or label not in study.compared:
            continue
        points[label] = {f"{site}, {seed}": value for (site, seed), value in differences.items()}
        of_seeds = differences.groupby(level="seed").mean()
        intervals[label] = compare(0.0, of_seeds, study.split_ratio).interval
    if not points:
        return None
    metric = study.first_metric
    words = f"{metric_label(metric)}, row minus {against}"
    return patients_drawing(points, intervals, words, margin=marked_range(metric))


def marked_range(metric: str) -> float:
    """The smallest difference that matters; 0 for a distance, which has no common scale."""
    return MARGIN if unit_bounds(metric) else 0.0


def critical_difference_drawing(ranks: Mapping[Any, float], critical: float) -> Drawing:
    """Mean ranks on an axis, best left; a bar joins rows that do not differ by `critical` (Demšar,
    JMLR 7, 2006, Fig. 1).
    """
    ordered = sorted(ranks.items(), key=itemgetter(1))
    count = len(ordered)
    left_count = (count + 1) // 2
    bars = equal_groups([rank for _, rank in ordered], critical)
    top = 0.6 + 0.3 * len(bars)  # of the names

    def draw(figure: "Figure") -> None:
        axis = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axis.set_axis_off()
        axis.set(xlim=(1 - 0.8 * count, 1.8 * count), ylim=(top + left_count, -2))
        line: Mapping[str, Any] = {"color": INK, "linewidth": 1}
        axis.plot([1, count], [0, 0], **line)
        for tick in range(1, count + 1):
            axis.plot([tick, tick], [0, -0.15], **line)
            axis.text(tick, -0.3, str(tick), ha="center", va="bottom")
        axis.plot([1, 1 + critical], [-1.3, -1.3], **line)
        axis.text(1, -1.4, f"critical difference {critical:.2f}", va="bottom")
        for position, (label, rank) in enumerate(ordered):
            is_left = position < left_count
            height = top + min(position, count - 1 - position)
            side: float = 0.9 if is_left else count + 0.1
            text = f"{label} {rank:.2f} " if is_left else f" {rank:.2f} {label}"
            axis.plot([rank, rank, side], [0, height, height], **line)
            axis.text(side, height, text, ha="right" if is_left else "left", va="center")
        for number, (first, last) in enumerate(bars):
            ends = [ordered[first][1] - 0.05, ordered[last][1] + 0.05]
            axis.plot(ends, [0.3 + 0.3 * number] * 2, color=INK, linewidth=3)

    return Drawing(draw, 7.0, 0.25 * (top + left_count + 2))  # inches; 0.25 for a name


def equal_groups(ranks: Sequence[float], critical: float) -> list[tuple[int, int]]:
    """First and last position of every largest group of sorted ranks within a critical difference.

    Examples:
        >>> equal_groups([1.0, 1.5, 2.5, 4.0], 1.2)
        [(0, 1), (1, 2)]
    """
    groups: list[tuple[int, int]] = []
    for first, rank in enumerate(ranks):
        last = first
        while last + 1 < len(ranks) and ranks[last + 1] - rank < critical:
            last += 1
        is_new = not groups or last > groups[-1][1]
        if last > first and is_new:
            groups.append((first, last))
    return groups


def write_figures(folder: Path, study: StudyTables) -> list[Path]:
    """Write the learning curves as curves.svg and curves.pdf, and differences.pdf, as far as the
    study has them; the files.

    Raises ConfigError without matplotlib.
    """
    drawings = {"differences": differences_drawing(study)}
    panel = curve_panel(study.groups)
    contents = {}
    if panel is not None:
        drawings["curves"] = line_drawing(panel, sorted(panel.lines))
        contents["curves.svg"] = (learning_curves(study.groups) or "").encode()
    for name, drawing in drawings.items():
        if drawing is not None:
            contents[f"{name}.pdf"] = drawing.pdf()
    files = []
    for name, content in sorted(contents.items()):
        files.append(folder / name)
        write_atomically(files[-1], content, public=True)
    return files
