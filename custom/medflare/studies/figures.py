"""The figures of a study: learning curves, differences to the first row, and ranks over tasks."""

from pathlib import Path

import pandas as pd

from medflare.core.files import write_atomically
from medflare.evaluation.figures import Drawing, Panel, line_drawing, patients_drawing, unit_bounds
from medflare.evaluation.presentation import metric_label
from medflare.studies.paper_effects import MARGIN
from medflare.studies.references import CONSTANT, CURVES
from medflare.studies.runs import curve_of, task_of
from medflare.studies.statistics import Groups, compare
from medflare.studies.tables import StudyTables

_INK = "#808080"  # of text that is legible on light and dark pages


def learning_curves(groups: Groups) -> Drawing | None:
    """The task's metric on validation images over the rounds, a line for every row and model; None
    without curves.
    """
    lines = {}
    for row, runs in groups.items():
        if row == CONSTANT:
            continue
        models = set[str]().union(*(run.get(CURVES, {}) for run in runs))
        for model in sorted(models & {"global", "personal"}):
            curve = curve_of(runs, model)
            if len(curve) > 1:
                lines[f"{row}, {model}" if len(models) > 1 else row] = list(curve.items())
    if not lines:
        return None
    metric = task_of(groups)["metric"]
    axis_label = f"validation {metric_label(metric)}"
    panel = Panel("", lines, "rounds of training", axis_label, bounds=unit_bounds(metric))
    return line_drawing(panel, sorted(lines))


def deployed_values(study: StudyTables) -> pd.DataFrame:
    """The first metric of the deployed models at inside sites (if there are none, at outside
    sites): index (site, seed), columns rows.
    """
    role = study.roles[0]  # in their alphabetical order
    metric = study.first_metric
    return pd.DataFrame(
        {row: study.by_site_and_seed(row, "deployed", role, metric) for row in study.groups}
    )


def differences_drawing(study: StudyTables) -> Drawing | None:
    """Every row minus the first row, a point for each site and seed, with the 95 % interval over
    seeds; None below two rows.

    The `marked_range` is grey. The constant prediction is left out: beside it,
    all other differences look equal.
    """
    against, *others = study.groups
    values = deployed_values(study)
    points = {}
    intervals = {}
    for row in others:
        differences = (values[row] - values[against]).dropna()
        if differences.empty or row not in study.compared:
            continue
        points[row] = {f"{site}, {seed}": value for (site, seed), value in differences.items()}
        by_seed = differences.groupby(level="seed").mean()
        intervals[row] = compare(0.0, by_seed, study.split_ratio).interval
    if not points:
        return None
    metric = study.first_metric
    axis_label = f"{metric_label(metric)}, row minus {against}"
    return patients_drawing(points, intervals, axis_label, margin=marked_range(metric))


def marked_range(metric: str) -> float:
    """The smallest difference that matters; 0 for a distance, which has no common scale."""
    return MARGIN if unit_bounds(metric) else 0.0


def ranks_drawing(ranks: pd.DataFrame, critical: float) -> Drawing:
    """The ranks of every row (see `tasks_compared.ranks_of`), best mean first. Bars, as long as the
    critical difference, overlap where mean ranks do not differ by it.
    """
    means = ranks.mean().sort_values()
    half_width = critical / 2
    bars = {row: (mean - half_width, mean + half_width) for row, mean in means.items()}
    axis_label = f"rank, 1 is best; critical difference {critical:.2f}"
    return patients_drawing(ranks[means.index].to_dict(), bars, axis_label)


def write_figures(folder: Path, study: StudyTables) -> list[Path]:
    """Write the learning curves as curves.svg and curves.pdf, and differences.pdf, as far as the
    study has them; returns the files.

    Raises:
        ConfigError: matplotlib is missing.
    """
    curves = learning_curves(study.groups)
    differences = differences_drawing(study)
    contents = {}
    if curves is not None:
        contents["curves.pdf"] = curves.pdf()
        svg = curves.svg("curves") or ""
        contents["curves.svg"] = svg.replace("currentColor", _INK).encode()
    if differences is not None:
        contents["differences.pdf"] = differences.pdf()
    files = []
    for name, content in sorted(contents.items()):
        files.append(folder / name)
        write_atomically(files[-1], content, public=True)
    return files
