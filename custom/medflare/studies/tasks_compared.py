"""Studies of several tasks with the same rows: mean ranks, and tests over tasks.

They follow Demšar, Statistical Comparisons of Classifiers over Multiple Data Sets, JMLR 7, 2006.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pandas as pd
from scipy.stats import friedmanchisquare, studentized_range, wilcoxon

from medflare.core.errors import ConfigError
from medflare.evaluation.presentation import format_metric, metric_label
from medflare.studies.markdown import Table, bullets, p_text
from medflare.studies.statistics import LEVEL, holm
from medflare.studies.tables import StudyTables
from medflare.studies.values import sign_of


def task_means(studies: Sequence[StudyTables]) -> pd.DataFrame:
    """The deployed models' first metric, mean over inside sites (if there are none, outside sites)
    and seeds: index (task, metric), columns the rows of all studies but the constant prediction
    and the oracle of outside sites.

    Raises ConfigError for a task of two studies, and for fewer than two rows in common.
    """
    means: dict[tuple[str, str], dict[str, float]] = {}
    for study in studies:
        column = (study.task["name"], study.first_metric)
        if column in means:
            raise ConfigError(f"task {column[0]} is in two studies; name one folder of each task")
        means[column] = {}
        for row in study.compared:
            values = study.series(row, study.roles[0], study.first_metric)
            means[column][row] = values.mean()
    table = pd.DataFrame.from_dict(means, orient="index").dropna(axis=1)
    if table.shape[1] < 2:
        raise ConfigError(
            "study table: the studies have fewer than two rows in common; "
            "run the same methods on each task"
        )
    return table


def ranks_of(means: pd.DataFrame) -> pd.DataFrame:
    """The rank of every row in every task, 1 is best; `means`: see `task_means`."""
    return _oriented(means).rank(axis=1, ascending=False)


def mean_ranks(means: pd.DataFrame) -> "pd.Series[float]":
    """The mean rank of every row, the best first; `means`: see `task_means`."""
    return ranks_of(means).mean().sort_values()


def _oriented(means: pd.DataFrame) -> pd.DataFrame:
    """The values with a sign such that more is better."""
    signs = [sign_of(metric) for _, metric in means.index]
    return means.mul(signs, axis=0)


def critical_difference(tasks: int, rows: int) -> float:
    """CD = q sqrt(k (k + 1) / (6 N)), Nemenyi's test at 5 % (Demšar, Sec. 3.2.2); q is the quantile
    of the studentized range divided by the root of 2.

    Examples:
        >>> round(critical_difference(14, 4), 2)
        1.25
    """
    q = studentized_range.ppf(1 - LEVEL, rows, np.inf) / np.sqrt(2)
    return float(q * np.sqrt(rows * (rows + 1) / (6 * tasks)))


def ranking(means: pd.DataFrame) -> Table:
    """Every row's means and mean rank, the best first; `means`: see `task_means`."""
    ranks = mean_ranks(means)
    headings = [f"{task}, {metric_label(metric)}" for task, metric in means.index]
    lines = [["method", *headings, "mean rank"]]
    for row, rank in ranks.items():
        cells = [format_metric(column[1], means.loc[column, row]) for column in means.index]
        lines.append([str(row), *cells, f"{rank:.2f}"])
    return Table(lines, left=1)


def tasks_report(studies: Sequence[StudyTables]) -> str:
    """Markdown: means and mean ranks, Friedman's test, Nemenyi's critical difference, and pairwise
    Wilcoxon tests over tasks.
    """
    means = task_means(studies)
    tasks, rows = means.shape
    ranks = mean_ranks(means)
    critical = critical_difference(tasks, rows)
    notes = []
    names = set[str]().union(*(study.compared for study in studies))
    left_out = sorted(names - set(means))
    if left_out:
        notes.append(f"Not in all studies, or undefined: {', '.join(left_out)}.")
    if rows > 2:
        notes.append(_friedman_line(means))
    notes.append(f"Nemenyi: mean ranks differ at 5 % from {critical:.2f} on.")
    smallest = 2 / 2**tasks
    if smallest >= LEVEL:
        notes.append(
            f"With {tasks} tasks the smallest p of Wilcoxon's test is {smallest:.3f}: no pair can "
            f"be below 5 %. Mean ranks differ by at most {rows - 1}, so Nemenyi's test "
            + ("can find a difference." if critical <= rows - 1 else "cannot find any either.")
        )
    parts = [f"# {tasks} tasks, {rows} rows\n", str(ranking(means)), bullets(notes)]
    parts.append(f"## pairs of rows over tasks\n\n{_pairs(means, ranks)}")
    return "\n".join(parts)


def _friedman_line(means: pd.DataFrame) -> str:
    chi2, p = friedmanchisquare(*_oriented(means).to_numpy().T)
    if np.isnan(chi2):
        return "Friedman: all rows are equal in all tasks."
    return f"Friedman, corrected for ties: chi2 {chi2:.2f}, p {p_text(p)}."


def _pairs(means: pd.DataFrame, ranks: "pd.Series[float]") -> str:
    pairs = list(combinations(ranks.index, 2))
    oriented = _oriented(means)
    p_values = []
    for first, second in pairs:
        differences = oriented[first] - oriented[second]
        p_values.append(float(wilcoxon(differences).pvalue) if differences.any() else 1.0)
    lines = [["better rank", "other", "difference of mean ranks", "Wilcoxon, p", "p, Holm"]]
    for (first, second), p, adjusted in zip(pairs, p_values, holm(p_values), strict=True):
        gap = ranks[second] - ranks[first]
        lines.append([first, second, f"{gap:.2f}", p_text(p), p_text(adjusted)])
    return str(Table(lines, left=2))
