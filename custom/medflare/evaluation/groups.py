"""A model's metric by group of test patients (sex, age band, scanner), for the site itself.

A group of too few patients is suppressed: its value would be nearly that of a single patient. The
value of all patients is known, so the suppressed groups together must be large enough, too.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from medflare.core.numbers import finite_or_none
from medflare.data.attributes import sorted_groups
from medflare.tasks.classes import Cases
from medflare.tasks.config import TaskConfig
from medflare.tasks.summaries import ALL, Interval, intervals_of, values_of

FEWEST_OF_GROUP = 5  # patients of a group that is shown


@dataclass(frozen=True)
class GroupRow:
    """A group of patients with the task's metric."""

    group: str
    patients: int | None  # number of them with a value of the metric; None if it is suppressed
    value: float | None = None  # None if it is suppressed or undefined
    interval: Interval | None = None  # 95 %, over patients; None for too few of them


def group_rows(
    cases: Cases, groups: Mapping[str, str], minimum: int, task: TaskConfig
) -> list[GroupRow]:
    """The task's metric in every group of patients, in the order of `attributes.sorted_groups`.

    Patients without a value of the metric do not count; a group of such patients is left out.

    Args:
        groups: patient -> group; every patient of `cases` is in one.
        minimum: smallest number of patients that is shown; at least `FEWEST_OF_GROUP` in any case.
    """
    by_group = defaultdict(list)  # group -> its rows in `cases`
    for row in _defined_rows(cases, task):
        by_group[groups[cases.patients[row]]].append(row)
    sizes = {}  # group -> its patients
    for group in sorted_groups(by_group):
        sizes[group] = len({cases.patients[row] for row in by_group[group]})
    suppressed = suppressed_groups(sizes, max(minimum, FEWEST_OF_GROUP))
    rows = []
    for group, patients in sizes.items():
        if group in suppressed:
            rows.append(GroupRow(group, None))
            continue
        group_cases = _cases_of(cases, by_group[group])
        weights = np.ones(len(group_cases.patients))
        values = values_of(group_cases, [task.metric], task, weights)
        value = finite_or_none(float(values[ALL][task.metric]))
        intervals = intervals_of(group_cases, [task.metric], task)
        interval = intervals.get(ALL, {}).get(task.metric)
        rows.append(GroupRow(group, patients, value, interval))
    return rows


def suppressed_groups(sizes: Mapping[str, int], minimum: int) -> set[str]:
    """The groups that are not shown: those of fewer than `minimum` patients, and the next larger
    ones until two groups, and together `minimum` patients, are suppressed.

    Otherwise the value of the suppressed patients could be computed: from the value of all patients
    and those of the other groups.

    Examples:
        >>> sorted(suppressed_groups({"a": 9, "b": 7, "c": 4}, 5))
        ['b', 'c']
        >>> sorted(suppressed_groups({"a": 9, "b": 7, "c": 2, "d": 2}, 5))
        ['b', 'c', 'd']
        >>> suppressed_groups({"a": 9, "b": 5}, 5)
        set()
    """
    suppressed: set[str] = set()
    patients = 0
    for group in sorted(sizes, key=lambda group: (sizes[group], group)):
        is_small = sizes[group] < minimum
        can_be_computed = len(suppressed) == 1 or 0 < patients < minimum
        if is_small or can_be_computed:
            suppressed.add(group)
            patients += sizes[group]
    return suppressed


def _defined_rows(cases: Cases, task: TaskConfig) -> list[int]:
    """The rows of `cases` that have a value of the task's metric; for classification all."""
    if cases.outputs is not None:
        return list(range(len(cases.patients)))
    values = cases.values.get(task.metric)
    if values is None:
        return []
    return (~values.isnan()).nonzero().flatten().tolist()


def _cases_of(cases: Cases, rows: list[int]) -> Cases:
    """Some rows of the cases, without structures."""
    patients = tuple(cases.patients[row] for row in rows)
    if cases.probabilities is None or cases.targets is None:
        values = {metric: column[rows] for metric, column in cases.values.items()}
        return Cases(patients, values)
    return Cases(patients, {}, cases.probabilities[rows], cases.targets[rows])
