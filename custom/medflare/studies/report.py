"""table.md: the tables of a study, below what makes its rows hard to compare or unfit for use."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable

from medflare.core.packages import CODE
from medflare.evaluation.findings import UNUSABLE, findings
from medflare.studies.candidates import UNIFORM, weighs_by_samples
from medflare.studies.markdown import bullets
from medflare.studies.references import CENTRALISED, CONSTANT, SINGLE_SITE, TRAINED_AS
from medflare.studies.runs import summed_up
from medflare.studies.statistics import FEWEST_OF_CLASS, Groups, Results, all_runs, distinct
from medflare.studies.tables import StudyTables
from medflare.tasks.summaries import MEANS_OVER_IMAGES

TABLE_FILE = "table.md"


def study_report(study: StudyTables) -> str:
    """What the runs have in common, what makes them hard to compare, and all tables."""
    rounds = distinct(all_runs(study.groups), "rounds")
    parts = [f"# {study.task['name']}, {' or '.join(map(str, rounds))} rounds\n"]
    lines = [f"WARNING {line}" for line in banner(study)] + cautions(study)
    if lines:
        parts.append(bullets(lines))
    of_differences = notes(study)
    for heading, table in study.everything.items():
        part = f"## {heading}\n\n{table}"
        if of_differences and "differences" in heading:
            part += f"\n{bullets(of_differences)}"
        parts.append(part)
    return "\n".join(parts)


def banner(study: StudyTables) -> list[str]:
    """The rows whose deployed model should not be used, by at least half of their runs, and
    why; first whether these are all rows.
    """
    lines = []
    no_better = []
    for row in study.compared:
        runs = study.groups[row]
        unusable = []
        for run in runs:
            unusable += [finding for finding in findings(run) if finding.kind in UNUSABLE]
        counts = Counter(finding.kind for finding in unusable)
        grave = [finding for finding in unusable if 2 * counts[finding.kind] >= len(runs)]
        if 2 * counts["at_chance"] >= len(runs):
            no_better.append(row)
        if grave:
            lines.append(f"{row}: {'; '.join(summed_up(grave, len(runs)))}.")
    if no_better and no_better == study.compared:
        everywhere = (
            "Every method has a site where it is no better than the constant prediction, "
            "which ignores the image."
        )
        lines.insert(0, everywhere)
    return lines


def cautions(study: StudyTables) -> list[str]:
    """What makes rows hard to compare."""
    groups = study.groups
    runs = all_runs(groups)
    # Whether the optimizer starts every round afresh, and whether sites are weighed by images ->
    # rows.
    optimizers = defaultdict(list)
    weightings = defaultdict(list)
    failed = []
    uniform = False
    for row, row_runs in groups.items():
        method = row_runs[0]["method"]
        hyper = row_runs[0]["configuration"]["hyper"]  # of all runs of the row
        if method != CONSTANT:
            # PRR has no `reset_optimizer`: it always starts with a new optimizer.
            optimizers[bool(hyper["site"].get("reset_optimizer", True))].append(row)
        if method not in (CONSTANT, SINGLE_SITE, CENTRALISED):
            weightings[weighs_by_samples(hyper["server"])].append(row)
        uniform |= method == TRAINED_AS and hyper["server"].get("weighting") == "uniform"
        for run in row_runs:
            if run["reason"]:
                failed.append(f"FAILED: {row}, seed {run['seed']}: {run['reason']}")
    lines = []
    if len(optimizers) == 2:
        lines.append(
            "Unequal: the optimizer keeps its moments from round to round in "
            f"{', '.join(optimizers[False])}, and starts every round afresh in "
            f"{', '.join(optimizers[True])} (reset_optimizer; prr has no choice)."
        )
    if len(weightings) == 2 and not uniform:
        lines.append(
            "Unequal: the mean weighs sites by their training images in "
            f"{', '.join(weightings[True])}, and otherwise in {', '.join(weightings[False])}: "
            f"add `--reference {UNIFORM}`, FedAvg with every site counting once."
        )
    if len(distinct(runs, "rounds")) > 1:
        lines.append("Unequal: rows have different numbers of rounds.")
    lines += _other_code(groups)
    unequal = _unequal_settings(runs)
    if unequal:
        lines.append(f"Unequal: runs have different tasks ({', '.join(unequal)}).")
    methods = distinct(runs, "method")
    missing = [method for method in (CONSTANT, SINGLE_SITE) if method not in methods]
    if missing:
        lines.append(
            f"Not held against {' and '.join(missing)}: add `--reference {','.join(missing)}`."
        )
    return lines + failed + equal_rows(study)


def _other_code(groups: Groups) -> list[str]:
    """A line for each distribution, besides medflare, of which runs had different code."""
    codes: defaultdict[str, dict[str, dict[str, None]]] = defaultdict(dict)
    for row, runs in groups.items():
        for run in runs:
            for name, code in run["versions"].items():
                if name.endswith(CODE) and name != f"medflare{CODE}":
                    codes[name].setdefault(code, {})[row] = None
    lines = []
    for name, rows_by_code in codes.items():
        if len(rows_by_code) > 1:
            rows = "; ".join(map(", ".join, rows_by_code.values()))
            remedy = "run the older ones again with --rerun ROW"
            lines.append(f"Unequal: different {name} in {rows}: {remedy}.")
    return lines


def _unequal_settings(runs: Iterable[Results]) -> list[str]:
    """The settings of the task with several values; every seed has its own split."""
    values = defaultdict(set)
    for run in runs:
        for name, value in run["configuration"]["task"].items():
            if name != "resplit":
                values[name].add(json.dumps(value, sort_keys=True))
    return [name for name, different in values.items() if len(different) > 1]


def equal_rows(study: StudyTables) -> list[str]:
    """A line for the rows whose deployed models have equal values of all metrics, at all sites
    and in all seeds.
    """
    level = study.values.index.get_level_values
    rows_by_values = defaultdict(list)
    for row in study.groups:
        deployed = (level("row") == row) & (level("model") == "deployed")
        values = study.values[deployed].droplevel("row").dropna(how="all")
        if len(values):
            rows_by_values[str(values.to_dict())].append(row)
    lines = []
    for rows in rows_by_values.values():
        if len(rows) > 1:
            names = " and ".join(rows)
            lines.append(f"{names} have equal test metrics everywhere.")
    return lines


def notes(study: StudyTables) -> list[str]:
    """What the tables of differences rest on, one line each."""
    lines = []
    if study.split_ratio:
        lines.append(
            "Intervals over seeds: splits overlap, so the variance has the factor "
            f"1/n + test/training images ({study.split_ratio:.2f}) in place of 1/n "
            "(Nadeau and Bengio)."
        )
    if study.draws_images:
        lines.append(
            "Every seed draws its own patients, so nothing is compared over patients; "
            "verdicts rest on the seeds."
        )
    if study.draws_images or study.metric in MEANS_OVER_IMAGES:
        return lines
    labels = study.task.get("labels", [])
    rule = f"a class needs {FEWEST_OF_CLASS} patients in every test set"
    for role, sites in study.common.items():
        for site, classes in sites.items():
            missing = [label for place, label in enumerate(labels) if place not in classes]
            if missing:
                effect = f"counts without {', '.join(missing)}" if classes else "does not count"
                lines.append(f"Over patients, {role}: {site} {effect} ({rule}).")
    return lines
