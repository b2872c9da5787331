"""Paired differences: every model against what the first row deploys, over seeds and over patients."""

from collections.abc import Sequence

from medflare.evaluation.presentation import UNDEFINED
from medflare.studies.statistics.patients import compare_patients
from medflare.studies.statistics.seeds import Run, compare, values_of
from medflare.studies.tables.markdown import interval, markdown, p_value
from medflare.studies.tables.rows import Groups, models_of, named, places_of


def differences_table(groups: Groups, metric: str) -> str:
    """A Markdown table of paired differences to what the first group deploys, each with its 95 % intervals.

    Over seeds: Student's t, of seeds that both groups have. Over patients: `compare_patients`, where the runs hold scores of patients.

    Args:
        groups: label -> results dicts that differ in their seed and in who is outside; the first is what others are held against.
        metric: its name.
    """
    (first, reference), *_ = groups.items()
    rows: dict[tuple[str, ...], list[str]] = {}  # what a line says beside its models -> the models it says it of
    for label, runs in groups.items():
        for model in models_of(runs):
            for role in dict.fromkeys(role for role, _ in places_of(runs)):
                cells = _cells(reference, runs, model, metric, role, itself=label == first)
                if cells:
                    rows.setdefault((label, role, *cells), []).append(model)
    over = ["95 % over seeds", "t-test over seeds, p", "seeds", "95 % over patients", "test over patients, p", "patients"]
    lines = [["method", "model", "sites", f"difference to {first}", *over]]
    lines += [[label, named(models), *cells] for (label, *cells), models in rows.items()]
    return markdown(lines, left=3)


def _cells(reference: Sequence[Run], runs: Sequence[Run], model: str, metric: str, role: str, *, itself: bool) -> list[str]:
    """The line's numbers; none where there is nothing to compare."""
    seeds = {run["seed"] for run in reference} & {run["seed"] for run in runs}
    before, after = ([run for run in of if run["seed"] in seeds] for of in (reference, runs))
    pair = values_of(before, "deployed", metric, role=role), values_of(after, model, metric, role=role)
    if itself and pair[0] == pair[1]:
        return []
    over_seeds = compare(*pair)
    if over_seeds.difference is None:
        return []
    over_patients = compare_patients((before, "deployed"), (after, model), metric, role=role)
    test = p_value(over_patients.p)
    return [
        f"{over_seeds.difference:+.3f}",
        *(interval(over_seeds.interval), p_value(over_seeds.p), str(over_seeds.n)),
        interval(over_patients.interval),
        f"{test} ({over_patients.test})" if over_patients.p is not None else test,
        str(over_patients.patients) if over_patients.patients else UNDEFINED,
    ]
