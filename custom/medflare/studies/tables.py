"""The tables of a study in Markdown, table.md with what makes its rows hard to compare, and learning curves."""

import json
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final, TypeAlias

import numpy as np
import pandas as pd

from medflare.core.errors import StateError
from medflare.evaluation.figures import Panel, line_panels, unit_bounds
from medflare.evaluation.labels import named_metrics
from medflare.evaluation.presentation import UNDEFINED, best_value, format_metric, label_metric, lower_is_better, metric_label
from medflare.evaluation.results import MODELS, confusion, results_frame
from medflare.evaluation.verdicts import KINDS, UNUSABLE, Finding, findings, is_rising
from medflare.federation.settings import CROSS_SITE
from medflare.studies.candidates import UNIFORM, weighs_by_samples
from medflare.studies.references import CENTRALISED, CONSTANT, CURVES, REFERENCES, SCORES, SINGLE_SITE, TRAINED_AS
from medflare.studies.statistics import (
    ALL_SITES,
    FEWEST_OF_CLASS,
    MEANS_OVER_IMAGES,
    Comparison,
    Groups,
    Run,
    common_classes,
    compare,
    compare_patients,
    detectable_difference,
    holm,
    pooled_values,
    split_ratio,
    study_values,
    verdict,
)
from medflare.tasks.summaries import ALL

Model: TypeAlias = tuple[str, str]  # label of a row, name of the model

TABLE_FILE: Final = "table.md"
ORACLE: Final = "oracle"
BEST_EXPERT, EXPERT_SPREAD = "best expert", "spread of experts"  # of IOP-FL's experts at an outside site
CHOSEN_ON_TEST: Final = (ORACLE, BEST_EXPERT)
UNATTAINABLE: Final = (*CHOSEN_ON_TEST, EXPERT_SPREAD)  # rows that show what could be gained; no model that a site could have
# Models of a run that its adapted model has to beat.
CONTROLS: Final = ("global", "batch_statistics", "mixture", "printed_objective", "tent")
RISING: Final = "still_rising"  # kind of a finding
HARM: Final = 0.02  # routing that ends this far below its start has done harm
_WITHOUT_MEAN: Final = (CONSTANT, SINGLE_SITE, CENTRALISED)
_STATISTICS: Final = (
    *("95 % over seeds", "t-test over seeds, p", "seeds"),
    *("95 % over patients", "test over patients, p", "patients"),
    *("p over seeds, Holm", "detectable", "d", "verdict"),
)
MARGIN: Final = 0.02  # smallest difference that matters where no paper has an effect
# The papers' effects on the mean over sites, see docs/results.md: (method, metric, role of the sites) -> d.
PAPER_EFFECTS: Final[Mapping[tuple[str, str, str], float]] = {
    ("fedsm", "dice", "inside"): 0.020,
    ("iop_fl", "dice", "inside"): 0.024,
    ("iop_fl", "dice", "outside"): 0.035,
    ("prr", "f1_macro", "inside"): 0.12,
    ("grace", "balanced_accuracy", "inside"): 0.10,
    ("grace", "balanced_accuracy", "outside"): 0.07,
}


@dataclass(frozen=True)
class Difference:
    """A paired comparison of two models of a study at the sites of a role; d: the smallest difference that matters."""

    role: str
    over_seeds: Comparison
    over_patients: Comparison
    detectable: float | None  # with 80 % power
    margin: float

    def cells(self, adjusted_p: float | None, judged: bool) -> list[str]:
        """The cells after label and models; without a verdict unless `judged`."""
        seeds, patients = self.over_seeds, self.over_patients
        return [
            self.role,
            f"{seeds.difference:+.3f}",
            *(_bounds_text(seeds), _p_text(seeds.p), str(seeds.n or UNDEFINED)),
            *(_bounds_text(patients), _p_text(patients.p, " (Wilcoxon)"), str(patients.n or UNDEFINED)),
            _p_text(adjusted_p),
            UNDEFINED if self.detectable is None else f"{self.detectable:.3f}",
            f"{self.margin:.3f}" if judged else UNDEFINED,
            verdict(seeds, patients, adjusted_p, self.margin) if judged else UNDEFINED,
        ]


def _bounds_text(comparison: Comparison) -> str:
    bounds = comparison.interval
    return UNDEFINED if bounds is None else f"{bounds[0]:+.3f} to {bounds[1]:+.3f}"


def _p_text(p: float | None, test: str = "") -> str:
    return UNDEFINED if p is None else ("< 0.001" if p < 0.001 else f"{p:.3f}") + test


@dataclass(frozen=True)
class Row:
    """Models of one label that have the same values of a metric everywhere; values: index (role, site), columns seeds."""

    label: str
    models: tuple[str, ...]
    values: pd.DataFrame
    runs: Sequence[Run]

    @property
    def is_attainable(self) -> bool:
        return not set(self.models) <= set(UNATTAINABLE)

    @property
    def cells(self) -> list[str]:
        """The first three columns of its line: label, models, and how the deployed round was selected."""
        selections = dict.fromkeys(filter(None, map(selection, self.runs)))
        return [self.label, model_list(self.models), ", ".join(selections) or UNDEFINED]


class StudyTables:
    """The tables of a study; raises StateError if no run has a task."""

    def __init__(self, groups: Groups) -> None:
        self.metric: str = task_of(groups)["metric"]
        complete = with_constants(groups, self.metric)
        self.groups: dict[str, list[Run]] = {}
        for label, runs in complete.items():
            self.groups[label] = [with_best_expert(with_oracle(run, self.metric), self.metric) for run in runs]
        self.values = study_values(self.groups)
        sites_of_runs = [site for runs in groups.values() for run in runs for site in run["sites"].items()]
        models = [model for _, site in sites_of_runs for model in site["metrics"].values()]
        self.metrics = list(dict.fromkeys(metric for model in models for metric in named_metrics(model)))
        sites = sorted({(site["role"], name) for name, site in sites_of_runs})
        self.roles = list(dict.fromkeys(role for role, _ in sites))
        self.places = [place for role in self.roles for place in (*(place for place in sites if place[0] == role), (role, ALL_SITES))]
        runs = [run for of_row in groups.values() for run in of_row]
        self.split_ratio = split_ratio(runs)
        self.common = {role: common_classes(runs, role) for role in self.roles}  # the same for all rows

    def tables(self, wanted: Container[str] | None = None) -> dict[str, str]:
        """Title -> table: for every metric, the task's own first, what each site reached and what the mean hides; then paired differences
        to the first row and to training alone, the selector and routing. `wanted`: titles (intervals take time); None: all.
        """
        makers: dict[str, Callable[[], str]] = {}
        for metric in sorted(self.metrics, key=lambda metric: metric != self.metric):
            makers[metric] = partial(self.sites, metric)
            makers[f"{metric}, what the mean hides"] = partial(self.summary, metric)
        makers[f"{label_metric(self.metric)} by structure or class, deployed model"] = self.by_label
        makers[f"{self.metric}, differences"] = self.differences
        for label, runs in list(self.groups.items())[1:]:
            if runs[0]["method"] == SINGLE_SITE:
                makers[f"{self.metric}, differences to {label}"] = partial(self.differences, label)
        makers[f"{self.metric}, differences within a row"] = self.differences_within
        makers[f"{self.metric}, cross-site"] = self.cross_site
        makers["selector"] = self.selector
        makers[f"{self.metric}, routing"] = self.routing
        tables = {title: make() for title, make in makers.items() if wanted is None or title in wanted}
        return {title: table for title, table in tables.items() if table}

    @cached_property
    def everything(self) -> dict[str, str]:
        return self.tables()

    def series(self, label: str, model: str, role: str, metric: str, site: str = ALL_SITES) -> "pd.Series[float]":
        """One value per seed; NaN where undefined."""
        key = (label, model, role, metric, site)
        return self.values.loc[key] if key in self.values.index else pd.Series(np.nan, index=self.values.columns)

    def models(self, label: str) -> list[str]:
        """The models of a row; those that differ only in a site's name as one."""
        names = (model for run in self.groups[label] for site in run["sites"].values() for model in site["metrics"])
        return list(dict.fromkeys([*MODELS, *(f"{name.partition('/')[0]}/*" if "/" in name else name for name in names)]))

    def rows(self, metric: str) -> list[Row]:
        """The rows that have a value of the metric at any site."""
        rows: dict[tuple[str, str], Row] = {}
        for label, runs in self.groups.items():
            for model in self.models(label):
                values = self.values.reindex([(label, model, role, metric, site) for role, site in self.places])
                values.index = pd.MultiIndex.from_tuples(self.places)
                if values.isna().all(axis=None):
                    continue
                key = label, str(values.to_numpy().tolist())
                equal = rows.pop(key).models if key in rows else ()
                rows[key] = Row(label, (*equal, model), values, runs)
        return list(rows.values())

    def sites(self, metric: str) -> str:
        """A row per label and model, a column per site and per mean of a role: mean ± standard deviation over seeds.

        The best mean of a column is bold, except those of `UNATTAINABLE` rows.
        """
        rows = self.rows(metric)
        means = [row.values.mean(axis=1).tolist() for row in rows]
        attainable = [mean for row, mean in zip(rows, means, strict=True) if row.is_attainable]
        best = [best_value(metric, (value for value in column if value == value)) for column in zip(*attainable, strict=True)]
        lines = [["method", "model", "selection", *self._headings(), "runs"]]
        for row, mean in zip(rows, means, strict=True):
            cells = [spread(metric, values) for _, values in row.values.iterrows()]
            if row.is_attainable:
                cells = [f"**{cell}**" if value == top else cell for cell, value, top in zip(cells, mean, best, strict=True)]
            lines.append([*row.cells, *cells, str(len(row.runs))])
        return markdown(lines, left=3)

    def summary(self, metric: str) -> str:
        """A row per label, model and role: mean over sites, worst site, all images as of one site, sites below training alone, warnings.

        Warnings are the findings of its runs, see `warnings`.
        """
        lines = [["method", "model", "selection", "sites", "mean", "worst site", "all images", "below training alone", "warnings"]]
        for row in self.rows(metric):
            for role in self.roles:
                sites = row.values.loc[role].mean(axis=1).drop(ALL_SITES).dropna()
                if sites.empty:
                    continue
                worst = sites.idxmax() if lower_is_better(metric) else sites.idxmin()
                below = self._below_alone(row, metric, list(sites.index)) if role == "inside" else None
                numbers = [
                    spread(metric, row.values.loc[(role, ALL_SITES)]),
                    f"{format_metric(metric, sites[worst])} ({worst})",
                    spread(metric, pooled_values(row.runs, row.models[0], metric, role)),
                    UNDEFINED if below is None else f"{len(below)} of {len(sites)}" + (f" ({', '.join(below)})" if below else ""),
                ]
                lines.append([*row.cells, role, *numbers, "; ".join(self.warnings(row.label, row.models, role)) or UNDEFINED])
        return markdown(lines, left=4)

    def by_label(self) -> str:
        """A row per method and structure or class, a column per site and per mean of a role; "" if there is at most one of them."""
        frames = [results_frame(run).assign(row=row, seed=run["seed"]) for row, runs in self.groups.items() for run in runs]
        table = pd.concat(frames, ignore_index=True)
        table = table[(table["label"] != ALL) & (table["model"] == "deployed") & (table["metric"] == label_metric(self.metric))]
        if table["label"].nunique() < 2:
            return ""
        keys = ["row", "label", "role", "seed"]
        means = table.groupby(keys, as_index=False)["value"].mean().assign(site=ALL_SITES)
        values = pd.concat([table, means]).groupby(["row", "label", "role", "site", "seed"])["value"].mean().unstack("seed")
        lines = [["method", "structure or class", *self._headings()]]
        for row, label in table[["row", "label"]].drop_duplicates().itertuples(index=False):
            places = values.reindex([(row, label, *place) for place in self.places])
            lines.append([row, label, *(spread(self.metric, of_place) for _, of_place in places.iterrows())])
        return markdown(lines, left=2)

    def _headings(self) -> list[str]:
        return [f"mean {role}" if not site else site if role == "inside" else f"{site} ({role})" for role, site in self.places]

    def label_of(self, method: str) -> str | None:
        """The first row with this method."""
        return next((label for label, runs in self.groups.items() if runs[0]["method"] == method), None)

    def _below_alone(self, row: Row, metric: str, sites: Sequence[str]) -> list[str] | None:
        """The inside sites where the row is worse than training alone, in the mean over the seeds of both; None if nothing to compare."""
        alone = self.label_of(SINGLE_SITE)
        if alone in (None, row.label):
            return None
        sign = -1 if lower_is_better(metric) else 1
        gains = {site: row.values.loc[("inside", site)] - self.series(alone, "deployed", "inside", metric, site) for site in sites}
        return [site for site, gain in gains.items() if sign * gain.mean() < 0]

    def warnings(self, label: str, models: Sequence[str] = ("deployed",), role: str | None = None) -> list[str]:
        """What the findings of a row's runs say of these equal models at the sites of a role, by default at all, see `summed_up`.

        Whether the row still rises is decided by the mean curve of its runs, since that has less noise. The constant answer has none.
        """
        runs = self.groups[label]
        model = "deployed" if "deployed" in models else models[0]
        if runs[0]["method"] == CONSTANT or model in UNATTAINABLE:
            return []
        of_role = []
        for run in runs:
            for finding in findings(run, model=model):
                sites = tuple(site for site in finding.sites if role in (None, run["sites"].get(site, {}).get("role")))
                if finding.kind != RISING and (sites or not finding.sites):
                    of_role.append(replace(finding, sites=sites))
        lines = summed_up(of_role, len(runs))
        return [*lines, "still rising"] if is_rising(curve_of(runs, models[0])) else lines

    def banner(self) -> list[str]:
        """The rows whose deployed model should not be used, by at least half of their runs, and why; first whether these are all rows."""
        lines: list[str] = []
        at_chance = []
        compared = [label for label, runs in self.groups.items() if runs[0]["method"] != CONSTANT]
        for label in compared:
            runs = self.groups[label]
            of_runs = [finding for run in runs for finding in findings(run)]
            grave = [finding for finding in of_runs if finding.kind in UNUSABLE and _in_half(finding, of_runs, len(runs))]
            if any(finding.kind == "at_chance" for finding in grave):
                at_chance.append(label)
            if grave:
                lines.append(f"{label}: {'; '.join(summed_up(grave, len(runs)))}.")
        if at_chance and at_chance == compared:
            lines.insert(0, "Every method has a site where it is not better than the constant answer, which ignores the image.")
        return lines

    def differences(self, against: str | None = None) -> str:
        """Paired differences of the task's metric to what one row (None: the first) deploys, and verdicts."""
        against = next(iter(self.groups)) if against is None else against
        models = [(label, model) for label in self.groups for model in self.models(label)]
        rows = self._differences([(model, (against, "deployed"), model) for model in models])
        return markdown([["method", "model", "sites", f"difference to {against}", *_STATISTICS], *rows], left=3)

    def differences_within(self) -> str:
        """What a row deploys against other models of the same runs; "" if no run has two models."""
        labels = [label for label, runs in self.groups.items() if runs[0]["method"] != CONSTANT]
        controls = [(label, model) for label in labels for model in self.models(label) if model in CONTROLS]
        rows = self._differences([(control, control, (control[0], "deployed")) for control in controls])
        return markdown([["method", "deployed against its own", "sites", "difference", *_STATISTICS], *rows], left=3) if rows else ""

    def _differences(self, pairs: Iterable[tuple[Model, Model, Model]]) -> list[list[str]]:
        """Lines of label, models and cells of (named model, first, second), see `Difference.cells`.

        Models with equal results share a line. The lines of a role are one claim, within which p is
        adjusted. The constant answer and the oracle claim nothing.
        """
        models: dict[tuple[str, Difference], list[str]] = {}
        compared: dict[tuple[str, ...], Difference | None] = {}  # models with equal results are compared once
        for (label, model), first, second in pairs:
            for role in self.roles:
                places = [(label, model, role, metric, site) for metric in self.metrics for of, site in self.places if of == role]
                several = model if "*" in model else ""  # the mean of several models equals no other: it has no scores of patients
                key = label, several, role, str(self.values.reindex(places).to_numpy().tolist())
                if key not in compared:
                    compared[key] = self.difference(first, second, role)
                difference = compared[key]
                if difference is not None:
                    models.setdefault((label, difference), []).append(model)
        lines = list(models)
        claims = [line for line in lines if self.groups[line[0]][0]["method"] != CONSTANT and not set(models[line]) <= set(UNATTAINABLE)]
        adjusted: dict[tuple[str, Difference], float | None] = {}
        for role in self.roles:
            claim = [line for line in claims if line[1].role == role]
            adjusted |= zip(claim, holm([difference.over_seeds.p for _, difference in claim]), strict=True)
        rows: dict[tuple[str, ...], list[str]] = {}  # label and cells -> models
        for label, difference in lines:
            cells = difference.cells(adjusted.get((label, difference)), (label, difference) in adjusted)
            rows.setdefault((label, *cells), []).extend(models[label, difference])
        return [[label, model_list(of_line), *cells] for (label, *cells), of_line in rows.items()]

    def difference(self, first: Model, second: Model, role: str) -> Difference | None:
        """Second - first; None if there is nothing to compare, or both are the same of one label."""
        before, after = (self.series(label, model, role, self.metric) for label, model in (first, second))
        over_seeds = compare(before, after, self.split_ratio)
        if over_seeds.difference is None or (first[0] == second[0] and before.equals(after)):
            return None
        runs = [(self.groups[label], model) for label, model in (first, second)]
        over_patients = compare_patients(runs[0], runs[1], self.metric, role=role, common=self.common[role])
        in_deviations = detectable_difference(over_seeds.n, self.split_ratio)
        deviation = (after - before).std()
        detectable = None if over_seeds.error is None or in_deviations is None else float(in_deviations * deviation)
        method = self.groups[second[0]][0]["method"]
        return Difference(role, over_seeds, over_patients, detectable, PAPER_EFFECTS.get((method, self.metric, role), MARGIN))

    def notes(self) -> list[str]:
        """What the tables of differences rest on, one line each."""
        lines = []
        if self.split_ratio:
            lines.append(
                "Intervals over seeds: splits overlap, so the variance has the factor 1/n + test/training images "
                f"({self.split_ratio:.2f}) in place of 1/n (Nadeau and Bengio)."
            )
        if self.metric in MEANS_OVER_IMAGES:
            return lines
        labels = task_of(self.groups).get("labels", [])
        rule = f"a class needs {FEWEST_OF_CLASS} patients in every test set"
        for role, sites in self.common.items():
            for site, classes in sites.items():
                missing = [label for place, label in enumerate(labels) if place not in classes]
                if classes and missing:
                    lines.append(f"Over patients, {role}: {site} counts without {', '.join(missing)} ({rule}).")
                elif missing:
                    lines.append(f"Over patients, {role}: {site} does not count ({rule}).")
        return lines

    def cross_site(self) -> str:
        """Every site's model (rows) on every site's test images (columns); its own site is bold. "" without `references.cross_site`."""
        sites = sorted({name for runs in self.groups.values() for run in runs for name in run["sites"]})
        lines = [["method", "model of", *sites, "runs"]]
        for label, runs in self.groups.items():
            matrices = [run[CROSS_SITE] for run in runs if CROSS_SITE in run]
            for owner in sorted({owner for matrix in matrices for owner in matrix}):
                rows = pd.DataFrame([matrix[owner] for matrix in matrices if owner in matrix], columns=sites, dtype=float)
                cells = [f"**{spread(self.metric, rows[site])}**" if site == owner else spread(self.metric, rows[site]) for site in sites]
                lines.append([label, owner, *cells, str(len(rows))])
        return markdown(lines, left=2) if len(lines) > 1 else ""

    def selector(self) -> str:
        """Balanced accuracy of each row's selector on test images, and how many images a personal model predicted; "" without one."""
        tables = {label: [table for run in runs if (table := confusion(run["sites"]))] for label, runs in self.groups.items()}
        sites = sorted({site for of_runs in tables.values() for table in of_runs for site in table})
        lines = [["method", "balanced accuracy", *(f"{site} recognised" for site in sites), "answered by a personal model", "runs"]]
        for label, of_runs in tables.items():
            if of_runs:
                recalls = [{site: row.get(site, 0) / n for site, row in table.items() if (n := sum(row.values()))} for table in of_runs]
                recognised = pd.DataFrame(recalls, columns=sites)
                personal = pd.Series([personal_share(run) for run in self.groups[label] if confusion(run["sites"])], dtype=float)
                columns = [recognised.mean(axis=1), *(recognised[site] for site in sites), personal]
                lines.append([label, *(spread("share", column) for column in columns), str(len(of_runs))])
        return markdown(lines, left=1) if len(lines) > 1 else ""

    def routing(self) -> str:
        """Routing against its start at every left-out site: means, worst run, runs with harm, and how many of these have an event."""
        lines = [["method", "outside", "start", "end", "worst run", f"more than {HARM} below", "of these with an event", "runs"]]
        for label, runs in self.groups.items():
            events = {(event["site"], run["seed"]) for run in runs for event in run["events"] if event["kind"] == "reverted"}
            if "mixture" not in self.models(label) or "outside" not in self.roles:
                continue
            sides = {"start": "mixture", "end": "deployed"}
            values = {side: self.values.loc[(label, model, "outside", self.metric)].drop(ALL_SITES) for side, model in sides.items()}
            moves = pd.DataFrame({side: of_sites.stack() for side, of_sites in values.items()}).dropna()
            sites = moves.index.unique("site")
            for site in (*sites, None) if len(sites) else ():
                here = moves if site is None else moves.xs(site, level="site", drop_level=False)
                gain = here["end"] - here["start"]
                harmed = gain.index[gain < -HARM]
                reverted = sum(place in events for place in harmed)
                cells = [f"{here['start'].mean():.3f}", f"{here['end'].mean():.3f}", f"{gain.min():+.3f}"]
                lines.append([label, site or "all", *cells, str(len(harmed)), str(reverted), str(len(here))])
        return markdown(lines, left=2) if len(lines) > 1 else ""


# -- parts of runs -----------------------------------------------------------------------------------------------------------


def task_of(groups: Groups) -> Mapping[str, Any]:
    """The task's configuration, from the first run that has one; raises StateError if none has."""
    task = next((run["configuration"]["task"] for runs in groups.values() for run in runs if run["configuration"]["task"]), None)
    if task is None:
        raise StateError("no run of this study has a task; see the reason in each results.json")
    return dict(task)


def selection(run: Run) -> str:
    """How the deployed round was selected: "last", or "best dice" (on validation images) and how the sites' values were joined."""
    rule = run["configuration"]["hyper"]["server"].get("selection", "")
    joined = {"best": "", "median": ", median of sites", "paired": ", paired over sites", "mean": ", mean of sites"}
    return f"best {run['configuration']['task'].get('metric', '')}".strip() + joined[rule] if rule in joined else str(rule)


def with_constants(groups: Groups, metric: str) -> dict[str, list[Run]]:
    """The runs with the constant answer of every site; runs of older versions take it from the row of the constant answer."""
    constants: dict[tuple[int, str, str], float | None] = {}  # of seed, site and role
    for run in (run for runs in groups.values() for run in runs if run["method"] == CONSTANT):
        for name, site in run["sites"].items():
            constants[run["seed"], name, site["role"]] = site["metrics"]["deployed"].get(metric)

    def completed(run: Run) -> Run:
        if run["method"] == CONSTANT:
            return run
        sites = {}
        for name, site in run["sites"].items():
            sites[name] = {"constant": constants.get((run["seed"], name, site["role"])), **site}
        return {**run, "sites": sites}

    return {label: [completed(run) for run in runs] for label, runs in groups.items()}


def with_oracle(run: Run, metric: str) -> Run:
    """The run with one more model: at every site the one of global and personal model with the better test metric.

    References and runs with one model for all purposes stay as they are.
    """
    different = any(
        site["metrics"]["personal"] not in (site["metrics"]["global"], dict.fromkeys(site["metrics"]["personal"]))
        for site in run["sites"].values()
    )
    if run["method"] in REFERENCES or not different:
        return run
    sites, scores = dict(run["sites"]), dict(run.get(SCORES, {}))
    for name, site in run["sites"].items():
        values = {model: site["metrics"][model].get(metric) for model in ("global", "personal")}
        if None in values.values():
            continue
        best = max(values, key=lambda model: values[model])
        sites[name] = {**site, "metrics": {**site["metrics"], ORACLE: site["metrics"][best]}}
        if best in scores.get(name, {}):
            scores[name] = {**scores[name], ORACLE: scores[name][best]}
    return {**run, "sites": sites, SCORES: scores}


def with_best_expert(run: Run, metric: str) -> Run:
    """The run with two more rows at outside sites that got several experts: the best by test images, and how far best and worst differ.

    They say what routing could gain, see the sites' `personal/SITE` models of `iop_fl comparisons=true`.
    """
    sites, scores = dict(run["sites"]), dict(run.get(SCORES, {}))
    for name, site in run["sites"].items():
        experts = [model for model, values in site["metrics"].items() if model.startswith("personal/") and values.get(metric) is not None]
        if site["role"] != "outside" or len(experts) < 2:
            continue
        values = {model: site["metrics"][model][metric] for model in experts}
        best = max(values, key=values.__getitem__)
        spread_of_experts = {metric: max(values.values()) - min(values.values())}
        sites[name] = {**site, "metrics": {**site["metrics"], BEST_EXPERT: site["metrics"][best], EXPERT_SPREAD: spread_of_experts}}
        if best in scores.get(name, {}):
            scores[name] = {**scores[name], BEST_EXPERT: scores[name][best]}
    return {**run, "sites": sites, SCORES: scores}


def personal_share(run: Run) -> float:
    """Share of the inside sites' test images that a personal model predicted; NaN without images."""
    reports = [run["sites"][name]["reports"]["deployed"] for name in confusion(run["sites"])]
    counts = pd.DataFrame(reports).drop(columns="selector").sum()
    return float(1 - counts.get("global", 0) / counts.sum()) if counts.sum() else np.nan


def curve_of(runs: Sequence[Run], model: str) -> dict[int, float]:
    """Rounds of training -> validation metric, mean over sites and runs, where all sites and runs have a value.

    The deployed model has the personal model's curve if there is one, else the global one's.
    """
    names = ("global",) if model == "global" else ("personal", "global")
    points = []
    for run in runs:
        curves = run.get(CURVES, {})
        for of_site in curves.get(next((name for name in names if name in curves), ""), {}).values():
            points += of_site
    by_round = pd.DataFrame(points, columns=["round", "value"], dtype=float).groupby("round")["value"].agg(["mean", "size"])
    return {int(round): float(mean) for round, mean in by_round["mean"][by_round["size"] == by_round["size"].max()].items()}


def summed_up(of_runs: Sequence[Finding], runs: int) -> list[str]:
    """The findings of several runs in a few words, the gravest first: their sites, and in how many runs if not in all.

    A finding that does not make the model unusable is left out if it is in fewer than half of the runs.
    """
    lines = []
    for kind in KINDS:
        same = [finding for finding in of_runs if finding.kind == kind]
        if not same or (kind not in UNUSABLE and not _in_half(same[0], same, runs)):
            continue
        sites = sorted({site for finding in same for site in finding.sites})
        share = f" ({len(same)} of {runs} runs)" if len(same) < runs else ""
        lines.append(replace(same[0], sites=tuple(sites)).at_sites + share)
    return lines


def _in_half(finding: Finding, of_runs: Sequence[Finding], runs: int) -> bool:
    return 2 * sum(other.kind == finding.kind for other in of_runs) >= runs


def learning_curves(groups: Groups, ink: str = "#808080") -> str | None:
    """The task's metric on validation images over the rounds as SVG, a line for every row and model; None without curves.

    The default colour of the text, `ink`, is legible on light and dark pages.
    """
    lines = {}
    for label, runs in groups.items():
        models = dict.fromkeys(model for run in runs for model in run.get(CURVES, {}) if label != CONSTANT)
        for model in ("global", "personal"):
            curve = curve_of(runs, model) if model in models else {}
            if len(curve) > 1:
                lines[f"{label}, {model}" if len(models) > 1 else label] = list(curve.items())
    if not lines:
        return None
    metric = task_of(groups)["metric"]
    words = f"validation {metric_label(metric)}"
    panel = Panel("", lines, "rounds of training", words, bounds=unit_bounds(metric))
    svg = line_panels([panel], "curves")
    return svg and svg.replace("currentColor", ink)


def study_report(study: StudyTables) -> str:
    """Markdown: what the runs have in common, what makes them hard to compare, and all tables."""
    groups = study.groups
    rounds = sorted({run["rounds"] for runs in groups.values() for run in runs})
    title = f"# {task_of(groups)['name']}, {' or '.join(map(str, rounds))} rounds\n"
    warnings = [f"WARNING {line}" for line in study.banner()]
    lines = "".join(f"- {line}\n" for line in (*warnings, *cautions(groups)))
    notes = "".join(f"\n- {line}" for line in study.notes())
    tables = []
    for heading, table in study.everything.items():
        has_notes = notes and "differences" in heading
        tables.append(f"## {heading}\n\n{table}" + (f"{notes}\n" if has_notes else ""))
    return "\n".join([title, *([lines] if lines else []), *tables])


def cautions(groups: Groups) -> list[str]:
    """What makes rows hard to compare, one line each."""
    lines = []
    runs = [(label, run) for label, of_label in groups.items() for run in of_label]
    trained = [(label, run, run["configuration"]["hyper"]) for label, run in runs if run["method"] != CONSTANT]
    # PRR has no `reset_optimizer`: it always starts with a new optimizer.
    kept, fresh = _parted((label, bool(hyper["site"].get("reset_optimizer", True))) for label, _, hyper in trained)
    if kept and fresh:
        lines.append(
            f"Unequal: the optimizer keeps its moments from round to round in {kept}, and starts every round afresh in {fresh} "
            "(reset_optimizer; prr has no choice)."
        )
    uniform = any(run["method"] == TRAINED_AS and hyper["server"].get("weighting") == "uniform" for _, run, hyper in trained)
    averaged = [(label, hyper["server"]) for label, run, hyper in trained if run["method"] not in _WITHOUT_MEAN]
    other, samples = _parted((label, weighs_by_samples(server)) for label, server in averaged)
    if other and samples and not uniform:
        lines.append(
            f"Unequal: the mean weighs sites by their training images in {samples}, and otherwise in {other}: "
            f"add `--reference {UNIFORM}`, FedAvg with every site counting once."
        )
    if len({run["rounds"] for _, run in runs}) > 1:
        lines.append("Unequal: rows have different numbers of rounds.")
    tasks = [run["configuration"]["task"] for _, run in runs]
    names = dict.fromkeys(name for task in tasks for name in task if name != "resplit")  # every seed has its own split
    unequal = [name for name in names if len({json.dumps(task[name], sort_keys=True) for task in tasks if name in task}) > 1]
    if unequal:
        lines.append(f"Unequal: runs have different tasks ({', '.join(unequal)}).")
    missing = [method for method in (CONSTANT, SINGLE_SITE) if all(run["method"] != method for _, run in runs)]
    if missing:
        lines.append(f"Not held against {' and '.join(missing)}: add `--reference {','.join(missing)}`.")
    return [*lines, *(f"FAILED: {label}, seed {run['seed']}: {run['reason']}" for label, run in runs if run["reason"])]


def _parted(labels: Iterable[tuple[str, bool]]) -> tuple[str, str]:
    """The labels for which the condition is false in a run, and those for which it is true in one."""
    pairs = dict.fromkeys(labels)
    return ", ".join(label for label, true in pairs if not true), ", ".join(label for label, true in pairs if true)


def markdown(lines: Sequence[Sequence[str]], left: int) -> str:
    """Lines of cells, the first with the headings, as a Markdown table; all columns but the first `left` ones are right-aligned."""
    rule = ["---" if column < left else "---:" for column in range(len(lines[0]))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]]) + "\n"


def model_list(models: Iterable[str]) -> str:
    return ", ".join(f"{model} (chosen on test)" if model in CHOSEN_ON_TEST else model for model in models)


def spread(metric: str, values: "pd.Series[float]") -> str:
    """ "mean ± standard deviation" of the defined values; the mean alone of one value."""
    defined = values.dropna()
    if defined.empty:
        return UNDEFINED
    return format_metric(metric, defined.mean()) + (f" ± {format_metric(metric, defined.std())}" if len(defined) > 1 else "")
