"""Paired differences between the models of a study, with verdicts."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from medflare.evaluation.presentation import UNDEFINED
from medflare.studies.further_models import UNATTAINABLE, model_list
from medflare.studies.markdown import Table, p_text, table_unless_empty
from medflare.studies.paper_effects import MARGIN, PAPER_COMPARATORS, PAPER_EFFECTS
from medflare.studies.statistics import (
    ALL_SITES,
    Comparison,
    compare,
    compare_patients,
    conclusion,
    delong_by_class,
    detectable_difference,
    holm,
)
from medflare.studies.values import StudyValues

Model = tuple[str, str]  # row, name of the model

# Models of a run that its adapted model has to beat.
_CONTROLS = ("global", "batch_statistics", "mixture", "printed_objective", "tent")
_STATISTICS = (
    "95 % over seeds",
    "t-test over seeds, p",
    "seeds",
    "95 % over patients",
    "test over patients, p",
    "patients",
    "p over seeds, Holm",
    "detectable",
    "d",
    "verdict",
)


@dataclass(frozen=True)
class Difference:
    """A paired comparison of two models of a study at the sites of a role; d: the smallest
    difference that matters.
    """

    row: str  # of the second model
    role: str
    over_seeds: Comparison
    over_patients: Comparison | None  # None: every seed draws other patients
    detectable: float | None  # with 80 % power
    margin: float

    def cells(self, adjusted_p: float | None, judged: bool) -> list[str]:
        """The cells after row and models; without a verdict unless `judged`."""
        seeds = self.over_seeds
        patients = self.over_patients or Comparison()
        margin = UNDEFINED
        verdict = UNDEFINED
        if judged:
            margin = f"{self.margin:.3f}"
            verdict = conclusion(seeds, self.over_patients, adjusted_p, self.margin)
        return [
            self.role,
            f"{seeds.difference:+.3f}",
            interval_text(seeds),
            p_text(seeds.p),
            str(seeds.n or UNDEFINED),
            interval_text(patients),
            p_text(patients.p, " (Wilcoxon)"),
            str(patients.n or UNDEFINED),
            p_text(adjusted_p),
            UNDEFINED if self.detectable is None else f"{self.detectable:.3f}",
            margin,
            verdict,
        ]


def differences(study: StudyValues, against: str | None = None) -> Table:
    """Paired differences of the task's metric to what one row (None: the first) deploys, and
    verdicts.
    """
    against = against or next(iter(study.groups))
    pairs = []
    for row in study.groups:
        for model in study.models(row):
            pairs.append(((row, model), (against, "deployed"), (row, model)))
    headings = ["method", "model", "sites", f"difference to {against}", *_STATISTICS]
    return Table([headings, *_lines(study, pairs)], left=3)


def differences_within(study: StudyValues) -> Table | None:
    """Paired differences of what a row deploys to other models of its runs; None if no run has two
    models.
    """
    pairs = []
    for row in study.compared:
        for model in study.models(row):
            if model in _CONTROLS:
                pairs.append(((row, model), (row, model), (row, "deployed")))
    headings = ["method", "deployed against its own", "sites", "difference", *_STATISTICS]
    return table_unless_empty([headings, *_lines(study, pairs)], left=3)


def _lines(study: StudyValues, pairs: Iterable[tuple[Model, Model, Model]]) -> list[list[str]]:
    """Lines of row, models and cells of (named model, first, second), see `Difference.cells`.

    Models with equal results share a line. The lines of a role are one claim, within which p is
    adjusted. The constant prediction and the oracle claim nothing.
    """
    models = defaultdict(list)
    # Models with equal results are compared once.
    compared = {}
    for (row, model), first, second in pairs:
        for role in study.roles:
            key = (row, role, _results_key(study, row, model, role))
            if key not in compared:
                compared[key] = difference_of(study, first, second, role)
            difference = compared[key]
            if difference is not None:
                models[difference].append(model)
    adjusted: dict[Difference, float | None] = {}
    for role in study.roles:
        claim = []
        for line, equal_models in models.items():
            claims = line.row in study.compared and not UNATTAINABLE.issuperset(equal_models)
            if line.role == role and claims:
                claim.append(line)
        adjusted |= zip(claim, holm([line.over_seeds.p for line in claim]), strict=True)
    rows = defaultdict(list)  # row and cells -> models
    for line, equal_models in models.items():
        cells = (line.row, *line.cells(adjusted.get(line), line in adjusted))
        rows[cells].extend(equal_models)
    return [[row, model_list(row_models), *cells] for (row, *cells), row_models in rows.items()]


def _results_key(study: StudyValues, row: str, model: str, role: str) -> str:
    """A key that is equal for models of a row with the same values of all metrics at a role's
    sites.
    """
    if "*" in model:  # the mean of several models equals no other: it has no scores of patients
        return model
    sites = (*study.sites_of[role], ALL_SITES)
    keys = list(product([row], [model], [role], study.metrics, sites))
    return str(study.values.reindex(keys).to_numpy().tolist())


def difference_of(study: StudyValues, first: Model, second: Model, role: str) -> Difference | None:
    """The difference second - first; None if nothing is to be compared, or both are the same of one
    row.
    """
    row, model = first
    other_row, other_model = second
    before = study.by_site(*first, role, study.metric)
    after = study.by_site(*second, role, study.metric)
    both = before.notna() & after.notna()
    before = before.where(both).mean()  # over sites, one per seed
    after = after.where(both).mean()
    over_seeds = compare(before, after, study.split_ratio)
    if over_seeds.difference is None or (row == other_row and before.equals(after)):
        return None
    over_patients = None
    if not study.draws_images:
        over_patients = compare_patients(
            (study.groups[row], model),
            (study.groups[other_row], other_model),
            study.metric,
            role=role,
            common=study.common[role],
        )
    detectable = None
    in_deviations = detectable_difference(over_seeds.n, study.split_ratio)
    if over_seeds.error is not None and in_deviations is not None:
        detectable = in_deviations * (after - before).std()
    effect = _paper_effect(study, second, first, role) or _paper_effect(study, first, second, role)
    return Difference(other_row, role, over_seeds, over_patients, detectable, effect or MARGIN)


def _paper_effect(study: StudyValues, model: Model, comparator: Model, role: str) -> float | None:
    """The paper's effect of a row's method, if it is over this comparator."""
    row, _ = model
    other, other_model = comparator
    method = study.groups[row][0]["method"]
    names = {other, other.partition(":")[0]}
    if other_model != "deployed":
        names = {other_model} if other == row else set()
    if names.isdisjoint(PAPER_COMPARATORS.get(method, ())):
        return None
    return PAPER_EFFECTS.get((method, study.metric, role))


def delong_differences(study: StudyValues) -> Table | None:
    """The AUC of a class of what every row deploys minus that of the first row, mean over seeds,
    and p of DeLong's test; None without scores.

    The constant prediction is left out.
    """
    against = next(iter(study.groups))
    places = [(role, site) for role, site in study.places if site != ALL_SITES]
    headings = [f"{site} ({role})" for role, site in places]
    lines = [["method", "class", *headings]]
    names = study.task.get("labels", [])
    first = (study.groups[against], "deployed")
    for row in study.compared:
        if row == against:
            continue
        cells: dict[int, dict[tuple[str, str], str]] = defaultdict(dict)  # of class and place
        for role in study.roles:
            by_class = delong_by_class(first, (study.groups[row], "deployed"), role)
            for (site, number), comparisons in by_class.items():
                cells[number][role, site] = delong_text(comparisons)
        for number, texts_by_place in sorted(cells.items()):
            texts = [texts_by_place.get(place, UNDEFINED) for place in places]
            lines.append([f"{row} - {against}", names[number], *texts])
    return table_unless_empty(lines, left=2)


def delong_text(comparisons: Sequence[Comparison]) -> str:
    """The mean difference of the AUC, and p: "+0.012, p 0.030".

    With several seeds, p is twice the median (Meinshausen, Meier and Bühlmann, JASA 104, 2009, Sec.
    2.2), which is valid for seeds that share patients.
    """
    areas = [comparison.difference for comparison in comparisons]
    defined = [area for area in areas if area is not None]
    if not defined:
        return UNDEFINED
    p_values = []
    for comparison in comparisons:
        if comparison.p is not None:
            p_values.append(comparison.p)
        elif comparison.difference == 0:  # equal areas without variance
            p_values.append(1.0)
    p = p_values[0] if p_values else None
    if len(p_values) > 1:
        p = min(1.0, 2 * np.median(p_values))
    return f"{np.mean(defined):+.3f}, p {p_text(p)}"


def interval_text(comparison: Comparison) -> str:
    if comparison.interval is None:
        return UNDEFINED
    low, high = comparison.interval
    return f"{low:+.3f} to {high:+.3f}"
