"""The test metrics of a study by row, model, site and seed: what its tables compare."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from medflare.core.settings import unknown
from medflare.evaluation.findings import findings, is_rising
from medflare.evaluation.presentation import UNDEFINED, lower_is_better, sites_of_role
from medflare.evaluation.results import MODELS
from medflare.studies.further_models import UNATTAINABLE, model_list, with_further_models
from medflare.studies.references import CONSTANT, PARTICIPATING, SINGLE_SITE
from medflare.studies.runs import curve_of, selection, summed_up, task_of
from medflare.studies.statistics import (
    ALL_SITES,
    Groups,
    Results,
    all_runs,
    common_classes,
    metrics_frame,
    split_ratio,
    study_values,
)
from medflare.tasks.config import draws_images
from medflare.tasks.summaries import ALL


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
        return self.runs[0]["method"] != PARTICIPATING and not UNATTAINABLE.issuperset(self.models)

    @property
    def cells(self) -> list[str]:
        """The first three columns of its line: row, models, and how the deployed round was
        selected.
        """
        selections = dict.fromkeys(filter(None, map(selection, self.runs)))
        return [self.row, model_list(self.models), ", ".join(selections) or UNDEFINED]


class StudyValues:
    """The values of all metrics of a study, or of some.

    Raises:
        StateError: no run has a task.
        ConfigError: no run has a metric.
    """

    def __init__(self, groups: Groups, metrics: Sequence[str] = ()) -> None:
        self.task = task_of(groups)
        self.metric: str = self.task["metric"]
        self.groups = with_further_models(groups, self.metric)
        self.frame = metrics_frame(self.groups)
        self.values = study_values(self.frame)
        self._model_names = self.frame.groupby("row")["model"].unique()
        measured = self.frame.loc[self.frame["label"] == ALL, "metric"].unique().tolist()
        for metric in metrics:
            if metric not in measured:
                raise unknown("metric", metric, measured)
        task_first = sorted(measured, key=lambda metric: metric != self.metric)
        self.metrics = list(metrics) or task_first
        # The metric of the page, of ranks and of figures.
        self.first_metric = next(iter(self.metrics), self.metric)
        self.sites_of: dict[str, list[str]] = {}  # role -> sites, both in their alphabetical order
        self.places: list[tuple[str, str]] = []
        for role, sites in self.frame.groupby("role")["site"].unique().items():
            self.sites_of[role] = sorted(sites)
            self.places += [(role, site) for site in (*self.sites_of[role], ALL_SITES)]
        self.roles = list(self.sites_of)
        # The rows that are compared with each other.
        self.compared = [
            row for row in groups if groups[row][0]["method"] not in (CONSTANT, PARTICIPATING)
        ]
        runs = all_runs(groups)
        self.split_ratio = split_ratio(runs)
        self.draws_images = draws_images(self.task.get("embedded", ""))
        # The same for all rows.
        self.common = {role: common_classes(runs, role) for role in self.roles}

    def models(self, row: str) -> list[str]:
        """The models of a row; those that differ only in a site's name as one."""
        names = [re.sub("/.*", "/*", name) for name in self._model_names.get(row, ())]
        return list(dict.fromkeys([*MODELS, *names]))

    def of_model(self, row: str, model: str, metric: str) -> pd.DataFrame:
        """The values of a model; index: role and site, see `places`; columns: seeds; NaN where
        undefined.
        """
        keys = [(row, model, role, metric, site) for role, site in self.places]
        return self.values.reindex(keys).set_axis(pd.MultiIndex.from_tuples(self.places))

    def series(self, row: str, role: str, metric: str, site: str = ALL_SITES) -> "pd.Series[float]":
        """One value of the deployed model per seed; NaN where undefined."""
        return self.of_model(row, "deployed", metric).loc[(role, site)]

    def by_site(self, row: str, model: str, role: str, metric: str) -> pd.DataFrame:
        """The values of a model: a row per site of the role, a column per seed."""
        return self.of_model(row, model, metric).loc[role].drop(ALL_SITES)

    def by_site_and_seed(self, row: str, model: str, role: str, metric: str) -> "pd.Series[float]":
        """The values of a model; index: site and seed."""
        return self.by_site(row, model, role, metric).stack(future_stack=True)

    def equal_models(self, metric: str) -> list[EqualModels]:
        """The models that have a value of the metric at any site."""
        by_values: dict[tuple[str, str], EqualModels] = {}
        for row, runs in self.groups.items():
            for model in self.models(row):
                values = self.of_model(row, model, metric)
                if values.isna().all(axis=None):
                    continue
                key = (row, str(values.to_numpy().tolist()))
                equal = by_values.pop(key).models if key in by_values else ()
                by_values[key] = EqualModels(row, (*equal, model), values, runs)
        return list(by_values.values())

    def row_of(self, method: str) -> str | None:
        """The first row with this method."""
        rows = (row for row, runs in self.groups.items() if runs[0]["method"] == method)
        return next(rows, None)

    def gains(self, row: str, model: str, metric: str) -> dict[str, float]:
        """Inside site -> how much better a model of a row is than training alone, in the mean over
        the seeds of both; empty for that row.
        """
        alone = self.row_of(SINGLE_SITE)
        if alone is None or alone == row or "inside" not in self.roles:
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


def sign_of(metric: str) -> int:
    """-1 for distances and errors, of which less is better, else 1."""
    return -1 if lower_is_better(metric) else 1
