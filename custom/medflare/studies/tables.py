"""The tables of a study in Markdown, and table.md with what makes its rows hard to compare."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from statistics import fmean

import numpy as np
import pandas as pd

from medflare.core.errors import StateError
from medflare.core.packages import CODE
from medflare.core.settings import unknown
from medflare.core.text import Json
from medflare.evaluation.findings import (
    KINDS,
    UNUSABLE,
    Finding,
    findings,
    is_rising,
    validation_curve,
)
from medflare.evaluation.presentation import (
    UNDEFINED,
    best_value,
    format_metric,
    label_metric,
    lower_is_better,
    scoring_sites,
    sites_of_role,
    task_metric,
)
from medflare.evaluation.results import MODELS, confusion
from medflare.federation.settings import CROSS_SITE
from medflare.studies.candidates import UNIFORM, weighs_by_samples
from medflare.studies.references import (
    CENTRALISED,
    CONSTANT,
    PARTICIPATING,
    REFERENCES,
    SCORES,
    SINGLE_SITE,
    TRAINED_AS,
)
from medflare.studies.statistics import (
    ALL_SITES,
    FEWEST_OF_CLASS,
    Comparison,
    Groups,
    Results,
    all_runs,
    all_sites,
    common_classes,
    compare,
    compare_patients,
    conclusion,
    delong_by_class,
    detectable_difference,
    distinct,
    holm,
    metrics_frame,
    pooled_values,
    split_ratio,
    study_values,
)
from medflare.tasks.config import draws_images
from medflare.tasks.summaries import ALL, MEANS_OVER_IMAGES

Model = tuple[str, str]  # row, name of the model
# Seed, site and role -> the task's metric of the constant prediction.
_Constants = dict[tuple[int, str, str], float | None]

TABLE_FILE = "table.md"
ORACLE = "oracle"
# What would end a cell, or be HTML or a link: sites name models.
_MARKUP = re.compile(r"\||<(?=\S)|\](?=\()")
# Of IOP-FL's experts at an outside site.
BEST_EXPERT = "best expert"
EXPERT_SPREAD = "spread of experts"
CHOSEN_ON_TEST = (ORACLE, BEST_EXPERT)
# Rows that show what could be gained; no model that a site could have.
UNATTAINABLE = (*CHOSEN_ON_TEST, EXPERT_SPREAD)
# Models of a run that its adapted model has to beat.
CONTROLS = ("global", "batch_statistics", "mixture", "printed_objective", "tent")
_PERSONAL = ""  # beside the sites that a selector recognized: the share of personal models
HARM = 0.02  # routing that ends this far below its start has done harm
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
MARGIN = 0.02  # smallest difference that matters where no paper has an effect
# The papers' effects on the mean over sites, see docs/results.md: (method, metric, role of the
# sites) -> d.
PAPER_EFFECTS: Mapping[tuple[str, str, str], float] = {
    ("fedsm", "dice", "inside"): 0.020,
    ("iop_fl", "dice", "inside"): 0.024,
    ("iop_fl", "dice", "outside"): 0.035,
    ("prr", "f1_macro", "inside"): 0.12,
    ("grace", "balanced_accuracy", "inside"): 0.10,
    ("grace", "balanced_accuracy", "outside"): 0.07,
    ("grace", "dice", "inside"): 0.037,
    ("grace", "dice", "outside"): 0.020,
}
# Method -> the row, or the own model, that the paper's effect is over.
PAPER_COMPARATORS: Mapping[str, tuple[str, ...]] = {
    "fedsm": ("fedavg", "global"),  # its global model is FedAvg's
    "iop_fl": ("fedavg", "global"),
    "prr": ("fedbn", "prr:pfa=false,det=false,cpa=off"),
    "grace": ("fedavg",),
}


@dataclass(frozen=True)
class Table:
    """Lines of cells, the first with the headings, and how many columns are words; the others are
    numbers. As text it is Markdown. A bold cell is between two pairs of asterisks.
    """

    lines: Sequence[Sequence[str]]
    left: int

    def __str__(self) -> str:
        rule = ["---"] * self.left + ["---:"] * (len(self.lines[0]) - self.left)
        text = ""
        for line in [self.lines[0], rule, *self.lines[1:]]:
            cells = [_MARKUP.sub(r"\\\g<0>", cell) for cell in line]
            text += f"| {' | '.join(cells)} |\n"
        return text


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


def interval_text(comparison: Comparison) -> str:
    """The interval."""
    if comparison.interval is None:
        return UNDEFINED
    low, high = comparison.interval
    return f"{low:+.3f} to {high:+.3f}"


def delong_text(comparisons: Sequence[Comparison]) -> str:
    """The mean difference of the AUC, and p: "+0.012, p 0.030".

    Of several seeds, p is twice the median (Meinshausen, Meier and Bühlmann, JASA 104, 2009,
    Sec. 2.2), which is valid for seeds that share patients.
    """
    differences = [
        comparison.difference for comparison in comparisons if comparison.difference is not None
    ]
    if not differences:
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
    return f"{np.mean(differences):+.3f}, p {p_text(p)}"


def p_text(p: float | None, test: str = "") -> str:
    if p is None:
        return UNDEFINED
    if p < 0.001:
        return f"< 0.001{test}"
    return f"{p:.3f}{test}"


@dataclass(frozen=True)
class EqualModels:
    """Models of one row that have the same values of a metric everywhere; values: index (role,
    site), columns seeds.
    """

    row: str
    models: tuple[str, ...]
    values: pd.DataFrame
    runs: Sequence[Results]

    @property
    def is_attainable(self) -> bool:
        is_oracle = self.runs[0]["method"] == PARTICIPATING
        return not (is_oracle or set(self.models) <= set(UNATTAINABLE))

    @property
    def cells(self) -> list[str]:
        """The first three columns of its line: row, models, and how the deployed round was
        selected.
        """
        selections = dict.fromkeys(filter(None, map(selection, self.runs)))
        return [self.row, model_list(self.models), ", ".join(selections) or UNDEFINED]


class StudyTables:
    """The tables of a study, of all metrics or of some; `further`: title -> table, shown last.

    Raises StateError if no run has a task, ConfigError for a metric that no run has.
    """

    def __init__(
        self,
        groups: Groups,
        metrics: Sequence[str] = (),
        further: Mapping[str, Table] | None = None,
    ) -> None:
        self.task = task_of(groups)
        self.metric: str = self.task["metric"]
        self.further = further or {}
        constants = _constants(groups, self.metric)
        self.groups: dict[str, list[Results]] = {}
        for row, row_runs in groups.items():
            self.groups[row] = []
            for run in row_runs:
                run = with_oracle(_with_constant(run, constants), self.metric)
                self.groups[row].append(with_best_expert(run, self.metric))
        self.values = study_values(self.groups)
        runs = all_runs(groups)
        table = metrics_frame(groups)
        measured = table.loc[table["label"] == ALL, "metric"].unique().tolist()
        sites = table.groupby("role")["site"].unique()
        for metric in metrics:
            if metric not in measured:
                raise unknown("metric", metric, measured)
        task_first = sorted(measured, key=lambda metric: metric != self.metric)
        self.metrics = list(metrics) or task_first
        # The metric of the page, of ranks and of figures.
        self.first_metric = next(iter(self.metrics), self.metric)
        self.roles = sites.index.tolist()  # in their alphabetical order
        self.places: list[tuple[str, str]] = []
        for role, site_names in sites.items():
            self.places += [(role, site) for site in (*sorted(site_names), ALL_SITES)]
        # The rows that are compared with each other.
        self.compared = [
            row for row in groups if groups[row][0]["method"] not in (CONSTANT, PARTICIPATING)
        ]
        self.split_ratio = split_ratio(runs)
        self.draws_images = draws_images(self.task.get("embedded", ""))
        # The same for all rows.
        self.common = {role: common_classes(runs, role) for role in self.roles}

    def tables(self, wanted: Container[str] | None = None) -> dict[str, Table]:
        """Title -> table: for every metric, the task's own first, what each site reached and what
        the mean hides; then, of the task's metric, paired differences to the first row and to
        training alone, areas under ROC curves, the selector and routing.

        `wanted`: titles (intervals take time); None: all.
        """
        makers: dict[str, Callable[[], Table | None]] = {}
        for metric in self.metrics:
            makers[metric] = partial(self.sites, metric)
            makers[f"{metric}, what the mean hides"] = partial(self.summary, metric)
        if "auc_macro" in self.metrics:
            makers["AUC by class, DeLong's test"] = self.delong
        if self.metric in self.metrics:
            title = f"{label_metric(self.metric)} by structure or class, deployed model"
            makers[title] = self.by_label
            makers[f"{self.metric}, differences"] = self.differences
            for row, runs in list(self.groups.items())[1:]:
                if runs[0]["method"] == SINGLE_SITE:
                    title = f"{self.metric}, differences to {row}"
                    makers[title] = partial(self.differences, row)
            makers[f"{self.metric}, differences within a row"] = self.differences_within
            makers[f"{self.metric}, cross-site"] = self.cross_site
            makers[f"{self.metric}, routing"] = self.routing
        makers["selector"] = self.selector
        tables = {}
        for title, make in makers.items():
            if wanted is None or title in wanted:
                table = make()
                if table is not None:
                    tables[title] = table
        return {**tables, **self.further}

    @cached_property
    def everything(self) -> dict[str, Table]:
        return self.tables()

    def series(self, row: str, role: str, metric: str, site: str = ALL_SITES) -> "pd.Series[float]":
        """One value of the deployed model per seed; NaN where undefined."""
        return self.values.reindex([(row, "deployed", role, metric, site)]).iloc[0]

    def models(self, row: str) -> list[str]:
        """The models of a row; those that differ only in a site's name as one."""
        models = dict.fromkeys(MODELS)
        for run in self.groups[row]:
            for site in run["sites"].values():
                for name in site["metrics"]:
                    models[re.sub("/.*", "/*", name)] = None
        return list(models)

    def equal_models(self, metric: str) -> list[EqualModels]:
        """The models that have a value of the metric at any site."""
        by_values: dict[tuple[str, str], EqualModels] = {}
        for row, runs in self.groups.items():
            for model in self.models(row):
                keys = [(row, model, role, metric, site) for role, site in self.places]
                values = self.values.reindex(keys)
                values.index = pd.MultiIndex.from_tuples(self.places)
                if values.isna().all(axis=None):
                    continue
                key = (row, str(values.to_numpy().tolist()))
                equal = by_values.pop(key).models if key in by_values else ()
                by_values[key] = EqualModels(row, (*equal, model), values, runs)
        return list(by_values.values())

    def sites(self, metric: str) -> Table:
        """A line per row and model, a column per site and per mean of a role: mean ± standard
        deviation over seeds.

        The best mean of a column is bold, except those of `UNATTAINABLE` rows.
        """
        shown = self.equal_models(metric)
        means = pd.DataFrame([equal.values.mean(axis=1) for equal in shown if equal.is_attainable])
        best = {place: best_value(metric, row_means.dropna()) for place, row_means in means.items()}
        lines = [["method", "model", "selection", *self._headings(), "runs"]]
        for equal in shown:
            mean = equal.values.mean(axis=1)
            cells = equal.cells
            for place, values in equal.values.iterrows():
                cell = spread(metric, values)
                if equal.is_attainable and mean[place] == best.get(place):
                    cell = f"**{cell}**"
                cells.append(cell)
            lines.append([*cells, str(len(equal.runs))])
        return Table(lines, left=3)

    def summary(self, metric: str) -> Table:
        """A line per row, model and role: mean over sites, worst site, all images as of one site,
        sites below training alone, warnings.

        Warnings are the findings of its runs, see `warnings`.
        """
        headings = ["method", "model", "selection", "sites", "mean", "worst site", "all images"]
        lines = [[*headings, "below training alone", "warnings"]]
        for equal in self.equal_models(metric):
            gains = self.gains(equal.row, equal.models[0], metric)
            below = [site for site, gain in gains.items() if gain < 0]
            losses = f"{len(below)} of {len(gains)}"
            if below:
                losses += f" ({', '.join(below)})"
            for role in self.roles:
                sites = equal.values.loc[role].mean(axis=1).drop(ALL_SITES).dropna()
                if sites.empty:
                    continue
                worst = (sign_of(metric) * sites).idxmin()
                line = [
                    *equal.cells,
                    role,
                    spread(metric, equal.values.loc[(role, ALL_SITES)]),
                    f"{format_metric(metric, sites[worst])} ({worst})",
                    spread(metric, pooled_values(equal.runs, equal.models[0], metric, role)),
                    losses if gains and role == "inside" else UNDEFINED,
                    "; ".join(self.warnings(equal.row, equal.models, role)) or UNDEFINED,
                ]
                lines.append(line)
        return Table(lines, left=4)

    def by_label(self) -> Table | None:
        """A line per row and structure or class, a column per site and per mean of a role; None if
        there is at most one of them.
        """
        table = metrics_frame(self.groups)
        deployed = (table["label"] != ALL) & (table["model"] == "deployed")
        table = table[deployed & (table["metric"] == label_metric(self.metric))]
        if table["label"].nunique() < 2:
            return None
        keys = ["row", "label", "role", "seed"]
        means = table.groupby(keys, as_index=False)["value"].mean().assign(site=ALL_SITES)
        keys.insert(3, "site")
        values = pd.concat([table, means]).groupby(keys)["value"].mean().unstack("seed")
        lines = [["method", "structure or class", *self._headings()]]
        for row, label in table[["row", "label"]].drop_duplicates().itertuples(index=False):
            places = values.reindex([(row, label, *place) for place in self.places])
            cells = [spread(self.metric, by_seed) for _, by_seed in places.iterrows()]
            lines.append([row, label, *cells])
        return Table(lines, left=2)

    def _headings(self) -> list[str]:
        headings = []
        for role, site in self.places:
            if site == ALL_SITES:
                headings.append(f"mean {role}")
            elif role == "inside":
                headings.append(site)
            else:
                headings.append(f"{site} ({role})")
        return headings

    def row_of(self, method: str) -> str | None:
        """The first row with this method."""
        for row, runs in self.groups.items():
            if runs[0]["method"] == method:
                return row
        return None

    def gains(self, row: str, model: str, metric: str) -> dict[str, float]:
        """Inside site -> how much better a model of a row is than training alone, in the mean over
        the seeds of both; empty for that row.
        """
        alone = self.row_of(SINGLE_SITE)
        if alone is None or alone == row:
            return {}
        alone_values = self.by_site(alone, "deployed", "inside", metric)
        gains = self.by_site(row, model, "inside", metric) - alone_values
        return (sign_of(metric) * gains.mean(axis=1).dropna()).to_dict()

    def warnings(
        self, row: str, models: Sequence[str] = ("deployed",), role: str | None = None
    ) -> list[str]:
        """What the findings of a row's runs say of these equal models at the sites of a role, by
        default at all, see `summed_up`.

        Whether the row still rises is decided by the mean curve of its runs, since that has less
        noise. The constant prediction has none.
        """
        runs = self.groups[row]
        model = "deployed" if "deployed" in models else models[0]
        if row not in self.compared or model in UNATTAINABLE:
            return []
        role_findings = []
        for run in runs:
            for finding in findings(run, model=model):
                sites = finding.sites
                if role is not None:
                    role_sites = sites_of_role(run, role)
                    sites = tuple(site for site in sites if site in role_sites)
                if finding.kind != "still_rising" and (sites or not finding.sites):
                    role_findings.append(replace(finding, sites=sites))
        lines = summed_up(role_findings, len(runs))
        if is_rising(curve_of(runs, models[0])):
            lines.append("still rising")
        return lines

    def banner(self) -> list[str]:
        """The rows whose deployed model should not be used, by at least half of their runs, and
        why; first whether these are all rows.
        """
        lines = []
        no_better = []
        for row in self.compared:
            runs = self.groups[row]
            unusable = []
            for run in runs:
                unusable += [finding for finding in findings(run) if finding.kind in UNUSABLE]
            counts = Counter(finding.kind for finding in unusable)
            grave = [finding for finding in unusable if 2 * counts[finding.kind] >= len(runs)]
            if 2 * counts["at_chance"] >= len(runs):
                no_better.append(row)
            if grave:
                lines.append(f"{row}: {'; '.join(summed_up(grave, len(runs)))}.")
        if no_better and no_better == self.compared:
            everywhere = (
                "Every method has a site where it is no better than the constant prediction, "
                "which ignores the image."
            )
            lines.insert(0, everywhere)
        return lines

    def differences(self, against: str | None = None) -> Table:
        """Paired differences of the task's metric to what one row (None: the first) deploys, and
        verdicts.
        """
        against = against or next(iter(self.groups))
        pairs = []
        for row in self.groups:
            for model in self.models(row):
                pairs.append(((row, model), (against, "deployed"), (row, model)))
        headings = ["method", "model", "sites", f"difference to {against}", *_STATISTICS]
        return Table([headings, *self._differences(pairs)], left=3)

    def differences_within(self) -> Table | None:
        """What a row deploys against other models of its runs; None if no run has two models."""
        pairs = []
        for row in self.compared:
            for model in self.models(row):
                if model in CONTROLS:
                    pairs.append(((row, model), (row, model), (row, "deployed")))
        headings = ["method", "deployed against its own", "sites", "difference", *_STATISTICS]
        return _unless_empty([headings, *self._differences(pairs)], left=3)

    def _differences(self, pairs: Iterable[tuple[Model, Model, Model]]) -> list[list[str]]:
        """Lines of row, models and cells of (named model, first, second), see `Difference.cells`.

        Models with equal results share a line. The lines of a role are one claim, within which p is
        adjusted. The constant prediction and the oracle claim nothing.
        """
        models = defaultdict(list)
        # Models with equal results are compared once.
        compared = {}
        for (row, model), first, second in pairs:
            for role in self.roles:
                key = (row, role, self._results_key(row, model, role))
                if key not in compared:
                    compared[key] = self.difference(first, second, role)
                difference = compared[key]
                if difference is not None:
                    models[difference].append(model)
        judged = []
        for line, equal_models in models.items():
            if line.row in self.compared and not set(equal_models) <= set(UNATTAINABLE):
                judged.append(line)
        adjusted: dict[Difference, float | None] = {}
        for role in self.roles:
            claim = [line for line in judged if line.role == role]
            adjusted |= zip(claim, holm([line.over_seeds.p for line in claim]), strict=True)
        rows = defaultdict(list)  # row and cells -> models
        for line, equal_models in models.items():
            cells = (line.row, *line.cells(adjusted.get(line), line in adjusted))
            rows[cells].extend(equal_models)
        return [[row, model_list(row_models), *cells] for (row, *cells), row_models in rows.items()]

    def _results_key(self, row: str, model: str, role: str) -> str:
        """Equal for models of a row with the same values of all metrics at a role's sites."""
        if "*" in model:  # the mean of several models equals no other: it has no scores of patients
            return model
        sites = (*self.sites_of(role), ALL_SITES)
        keys = list(product([row], [model], [role], self.metrics, sites))
        return str(self.values.reindex(keys).to_numpy().tolist())

    def sites_of(self, role: str) -> list[str]:
        return [
            site for place_role, site in self.places if place_role == role and site != ALL_SITES
        ]

    def by_site(self, row: str, model: str, role: str, metric: str) -> pd.DataFrame:
        """The values of a model: a row per site of the role, a column per seed."""
        sites = self.sites_of(role)
        keys = [(row, model, role, metric, site) for site in sites]
        return self.values.reindex(keys).set_axis(sites)

    def difference(self, first: Model, second: Model, role: str) -> Difference | None:
        """Second - first; None if nothing is to be compared, or both are the same of one row."""
        row, model = first
        other_row, other_model = second
        before = self.by_site(*first, role, self.metric)
        after = self.by_site(*second, role, self.metric)
        both = before.notna() & after.notna()
        before = before.where(both).mean()  # over sites, one per seed
        after = after.where(both).mean()
        over_seeds = compare(before, after, self.split_ratio)
        if over_seeds.difference is None or (row == other_row and before.equals(after)):
            return None
        runs = self.groups[other_row]
        over_patients = None
        if not self.draws_images:
            over_patients = compare_patients(
                (self.groups[row], model),
                (runs, other_model),
                self.metric,
                role=role,
                common=self.common[role],
            )
        detectable = None
        in_deviations = detectable_difference(over_seeds.n, self.split_ratio)
        if over_seeds.error is not None and in_deviations is not None:
            detectable = in_deviations * (after - before).std()
        margin = self._margin(second, first, role) or self._margin(first, second, role) or MARGIN
        return Difference(other_row, role, over_seeds, over_patients, detectable, margin)

    def _margin(self, model: Model, comparator: Model, role: str) -> float | None:
        """The paper's effect of a row's method, if it is over this comparator."""
        row, _ = model
        other, other_model = comparator
        method = self.groups[row][0]["method"]
        names = {other, other.partition(":")[0]}
        if other_model != "deployed":
            names = {other_model} if other == row else set()
        if names.isdisjoint(PAPER_COMPARATORS.get(method, ())):
            return None
        return PAPER_EFFECTS.get((method, self.metric, role))

    def delong(self) -> Table | None:
        """What every row deploys against the first row: the difference of the AUC of a class, mean
        over seeds, and p of DeLong's test.

        Without the constant prediction; None without scores.
        """
        against = next(iter(self.groups))
        places = [place for place in self.places if place[1] != ALL_SITES]
        headings = [f"{site} ({role})" for role, site in places]
        lines = [["method", "class", *headings]]
        names = self.task.get("labels", [])
        first = (self.groups[against], "deployed")
        for row in self.compared:
            if row == against:
                continue
            cells: dict[int, dict[tuple[str, str], str]] = defaultdict(dict)  # of class and place
            for role in self.roles:
                by_class = delong_by_class(first, (self.groups[row], "deployed"), role)
                for (site, number), comparisons in by_class.items():
                    cells[number][role, site] = delong_text(comparisons)
            for number, texts_by_place in sorted(cells.items()):
                texts = [texts_by_place.get(place, UNDEFINED) for place in places]
                lines.append([f"{row} - {against}", names[number], *texts])
        return _unless_empty(lines, left=2)

    def equal_rows(self) -> list[str]:
        """A line for the rows whose deployed models have equal values of all metrics, at all sites
        and in all seeds.
        """
        level = self.values.index.get_level_values
        rows_by_values = defaultdict(list)
        for row in self.groups:
            deployed = (level("row") == row) & (level("model") == "deployed")
            values = self.values[deployed].droplevel("row").dropna(how="all")
            if len(values):
                rows_by_values[str(values.to_dict())].append(row)
        lines = []
        for rows in rows_by_values.values():
            if len(rows) > 1:
                names = " and ".join(rows)
                lines.append(f"{names} have equal test metrics everywhere.")
        return lines

    def notes(self) -> list[str]:
        """What the tables of differences rest on, one line each."""
        lines = []
        if self.split_ratio:
            lines.append(
                "Intervals over seeds: splits overlap, so the variance has the factor "
                f"1/n + test/training images ({self.split_ratio:.2f}) in place of 1/n "
                "(Nadeau and Bengio)."
            )
        if self.draws_images:
            lines.append(
                "Every seed draws its own patients, so nothing is compared over patients; "
                "verdicts rest on the seeds."
            )
        if self.draws_images or self.metric in MEANS_OVER_IMAGES:
            return lines
        labels = self.task.get("labels", [])
        rule = f"a class needs {FEWEST_OF_CLASS} patients in every test set"
        for role, sites in self.common.items():
            for site, classes in sites.items():
                missing = [label for place, label in enumerate(labels) if place not in classes]
                if missing:
                    effect = f"counts without {', '.join(missing)}" if classes else "does not count"
                    lines.append(f"Over patients, {role}: {site} {effect} ({rule}).")
        return lines

    def cross_site(self) -> Table | None:
        """Every site's model (rows) on every site's test images (columns); its own site is bold.
        None without `references.cross_site`.
        """
        sites = all_sites(all_runs(self.groups))
        lines = [["method", "model of", *sites, "runs"]]
        for row, runs in self.groups.items():
            metrics_by_owner = defaultdict(list)
            for run in runs:
                for owner, by_site in run.get(CROSS_SITE, {}).items():
                    metrics_by_owner[owner].append(by_site)
            for owner, run_metrics in sorted(metrics_by_owner.items()):
                rows = pd.DataFrame(run_metrics, columns=sites, dtype=float)
                cells = {site: spread(self.metric, rows[site]) for site in sites}
                if owner in cells:
                    cells[owner] = f"**{cells[owner]}**"
                lines.append([row, owner, *cells.values(), str(len(rows))])
        return _unless_empty(lines, left=2)

    def selector(self) -> Table | None:
        """Balanced accuracy of each row's selector on test images, and how many images a personal
        model predicted; None without one.
        """
        recognized = defaultdict(list)  # of every run with a selector
        tested: set[str] = set()
        for row, runs in self.groups.items():
            for run in runs:
                table = confusion(run["sites"])
                if table:
                    tested |= table.keys()
                    recognized[row].append(_recognized(run, table))
        sites = sorted(tested)
        headings = ["method", "balanced accuracy", *(f"{site} recognised" for site in sites)]
        lines = [[*headings, "answered by a personal model", "runs"]]
        for row, fractions in recognized.items():
            columns = pd.DataFrame(fractions, columns=[*sites, _PERSONAL], dtype=float)
            cells = [spread("share", columns[sites].mean(axis=1))]
            cells += [spread("share", column) for _, column in columns.items()]
            lines.append([row, *cells, str(len(fractions))])
        return _unless_empty(lines, left=1)

    def routing(self) -> Table | None:
        """Routing against its start at every left-out site: means, worst run, runs with harm, and
        how many of these have an event.
        """
        headings = ["method", "outside", "start", "end", "worst run", f"more than {HARM} below"]
        lines = [[*headings, "of these with an event", "runs"]]
        for row, runs in self.groups.items():
            if "mixture" not in self.models(row) or "outside" not in self.roles:
                continue
            reverted = set()  # site and seed
            for run in runs:
                for event in run["events"]:
                    if event["kind"] == "reverted":
                        reverted.add((event["site"], run["seed"]))
            level = ("row", "role", "metric")
            by_site = self.values.xs((row, "outside", self.metric), level=level)
            by_seed = by_site.drop(ALL_SITES, level="site").stack(future_stack=True)
            moves = by_seed.unstack("model")[["mixture", "deployed"]].dropna()
            for site, site_moves in moves.groupby(level="site", sort=False):
                lines.append([row, str(site), *_routing_cells(site_moves, reverted)])
            if len(moves):
                lines.append([row, "all", *_routing_cells(moves, reverted)])
        return _unless_empty(lines, left=2)


def _routing_cells(moves: pd.DataFrame, reverted: Container[tuple[str, int]]) -> list[str]:
    """Moves: index (site, seed), columns "mixture", the start, and "deployed", the end."""
    gain = moves["deployed"] - moves["mixture"]
    harmed = gain.index[gain < -HARM]
    return [
        f"{moves['mixture'].mean():.3f}",
        f"{moves['deployed'].mean():.3f}",
        f"{gain.min():+.3f}",
        str(len(harmed)),
        str(sum(place in reverted for place in harmed)),
        str(len(moves)),
    ]


# -- parts of runs ---------------------------------------------------------------------------------


def task_of(groups: Groups) -> Json:
    """The task's configuration, from the first run that has one; raises StateError if none has."""
    for run in all_runs(groups):
        if run["configuration"]["task"]:
            return run["configuration"]["task"]
    raise StateError("no run of this study has a task; see the reason in each results.json")


def selection(run: Results) -> str:
    """How the deployed round was selected: "last", or "best dice" (on validation images) and how
    the sites' values were joined, or that each site selected alone.
    """
    rule = run["configuration"]["hyper"]["server"].get("selection", "")
    joined = {
        "best": "",
        "median": ", median of sites",
        "paired": ", paired over sites",
        "mean": ", mean of sites",
    }
    if rule not in joined:
        return rule
    metric = task_metric(run)
    best = f"best {metric}".strip()
    sites = _scoring_sites(run)
    if run["method"] == SINGLE_SITE or sites == set():
        return f"{best}, each site its own"
    if sites is not None and len(sites) == 1:
        return best
    return best + joined[rule]


def _scoring_sites(run: Results) -> set[str] | None:
    """The sites whose values selected a round at the server; None for a run that did not record it:
    it failed, or is of an older version.
    """
    if run["reason"] or "model_selection" not in run:
        return None
    return set[str]().union(*map(scoring_sites, run["model_selection"].values()))


def _constants(groups: Groups, metric: str) -> _Constants:
    """From the row of the constant prediction."""
    constants = {}
    for run in all_runs(groups):
        if run["method"] == CONSTANT:
            for name, site in run["sites"].items():
                constants[run["seed"], name, site["role"]] = site["metrics"]["deployed"].get(metric)
    return constants


def _with_constant(run: Results, constants: _Constants) -> Results:
    """The run with the constant prediction of every site, which runs of older versions lack."""
    if run["method"] == CONSTANT:
        return run
    sites = {}
    for name, site in run["sites"].items():
        sites[name] = {"constant": constants.get((run["seed"], name, site["role"])), **site}
    return {**run, "sites": sites}


def with_oracle(run: Results, metric: str) -> Results:
    """The run with one more model: at every site the one of global and personal model with the
    better test metric.

    References and runs with one model for all purposes stay as they are.
    """
    if run["method"] in REFERENCES or not any(map(_has_personal_model, run["sites"].values())):
        return run
    for name, site in run["sites"].items():
        values = {model: site["metrics"][model].get(metric) for model in ("global", "personal")}
        if None not in values.values():
            run = _with_best(run, name, ORACLE, values)
    return run


def _has_personal_model(site: Json) -> bool:
    personal = site["metrics"]["personal"]
    return personal not in (site["metrics"]["global"], dict.fromkeys(personal))


def _with_best(run: Results, site: str, name: str, values: Mapping[str, float]) -> Results:
    """The run with a further name for the model of the largest value at a site."""
    model = max(values, key=values.__getitem__)
    content = run["sites"][site]
    metrics = {**content["metrics"], name: content["metrics"][model]}
    scores = dict(run.get(SCORES, {}))
    if model in scores.get(site, {}):
        scores[site] = {**scores[site], name: scores[site][model]}
    sites = {**run["sites"], site: {**content, "metrics": metrics}}
    return {**run, "sites": sites, SCORES: scores}


def with_best_expert(run: Results, metric: str) -> Results:
    """The run with two more rows at outside sites that got several experts: the best by test
    images, and how far best and worst differ.

    They say what routing could gain, see the sites' `personal/SITE` models of `iop_fl
    comparisons=true`.
    """
    for name in sites_of_role(run, "outside"):
        values = {}
        for model, model_metrics in run["sites"][name]["metrics"].items():
            if model.startswith("personal/") and model_metrics.get(metric) is not None:
                values[model] = model_metrics[metric]
        if len(values) >= 2:
            run = _with_best(run, name, BEST_EXPERT, values)
            difference = max(values.values()) - min(values.values())
            run["sites"][name]["metrics"][EXPERT_SPREAD] = {metric: difference}
    return run


def _recognized(run: Results, table: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """Site -> the fraction of its test images that the selector recognised; `_PERSONAL` -> that of
    all that a personal model predicted. Without images, nothing.

    `table`: see `confusion`.
    """
    fractions = {}
    for site, row in table.items():
        images = sum(row.values())
        if images:
            fractions[site] = row.get(site, 0) / images
    reports = [run["sites"][site]["reports"]["deployed"] for site in table]
    counts = pd.DataFrame(reports).drop(columns="selector").sum()
    if counts.sum():
        fractions[_PERSONAL] = float(1 - counts.get("global", 0) / counts.sum())
    return fractions


def curve_of(runs: Sequence[Results], model: str) -> dict[int, float]:
    """Rounds of training -> validation metric, mean over sites (`validation_curve`) and runs, where
    all runs have one.
    """
    curves = []
    for run in runs:
        curve = validation_curve(run, model)
        if curve and not run["reason"]:  # a failed run ended early
            curves.append(curve)
    rounds = sorted(set.intersection(*map(set, curves))) if curves else []
    return {int(at): fmean(curve[at] for curve in curves) for at in rounds}


def summed_up(run_findings: Sequence[Finding], runs: int) -> list[str]:
    """The findings of several runs in a few words, the gravest first: their sites, and in how many
    runs if not in all.

    A finding that does not make the model unusable is left out if it is in fewer than half of the
    runs.
    """
    lines = []
    for kind in KINDS:
        same = [finding for finding in run_findings if finding.kind == kind]
        is_rare = 2 * len(same) < runs
        if not same or (is_rare and kind not in UNUSABLE):
            continue
        sites = set[str]().union(*(finding.sites for finding in same))
        some = f" ({len(same)} of {runs} runs)" if len(same) < runs else ""
        lines.append(replace(same[0], sites=tuple(sorted(sites))).at_sites + some)
    return lines


def study_report(study: StudyTables) -> str:
    """Markdown: what the runs have in common, what makes them hard to compare, and all tables."""
    groups = study.groups
    rounds = distinct(all_runs(groups), "rounds")
    parts = [f"# {study.task['name']}, {' or '.join(map(str, rounds))} rounds\n"]
    lines = [f"WARNING {line}" for line in study.banner()]
    lines += cautions(groups) + study.equal_rows()
    if lines:
        parts.append(bullets(lines))
    notes = study.notes()
    for heading, table in study.everything.items():
        part = f"## {heading}\n\n{table}"
        if notes and "differences" in heading:
            part += f"\n{bullets(notes)}"
        parts.append(part)
    return "\n".join(parts)


def cautions(groups: Groups) -> list[str]:
    """What makes rows hard to compare, one line each."""
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
    return lines + failed


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


def bullets(lines: Iterable[str]) -> str:
    """The lines as a list in Markdown."""
    return "".join(f"- {line}\n" for line in lines)


def _unless_empty(lines: Sequence[Sequence[str]], left: int) -> Table | None:
    """None if there are only headings."""
    return Table(lines, left) if len(lines) > 1 else None


def model_list(models: Iterable[str]) -> str:
    notes = dict.fromkeys(CHOSEN_ON_TEST, " (chosen on test)")
    return ", ".join(model + notes.get(model, "") for model in models)


def sign_of(metric: str) -> int:
    """-1 for distances and errors, of which less is better, else 1."""
    return -1 if lower_is_better(metric) else 1


def spread(metric: str, values: "pd.Series[float]") -> str:
    """ "mean ± standard deviation" of the defined values; the mean alone of one value."""
    defined = values.dropna()
    if defined.empty:
        return UNDEFINED
    text = format_metric(metric, defined.mean())
    if len(defined) > 1:
        text += f" ± {format_metric(metric, defined.std())}"
    return text
