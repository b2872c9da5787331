"""Means, confidence intervals and paired comparisons over seeds and over patients.

Over seeds: would another training give the same difference? Over patients: would other patients?
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import bootstrap, ttest_1samp, wilcoxon

from medflare.core.rng import numpy_generator
from medflare.core.settings import unknown
from medflare.evaluation.results import results_frame
from medflare.tasks.class_metrics import of_outputs
from medflare.tasks.classes import has_interval
from medflare.tasks.metrics_table import metric_table
from medflare.tasks.summaries import ALL, weighted_mean

Floats: TypeAlias = NDArray[np.float64]
Run: TypeAlias = Mapping[str, Any]  # a results dict
Groups: TypeAlias = Mapping[str, Sequence[Run]]  # row of a study -> runs that differ in their seed and in the sites left out
Interval: TypeAlias = tuple[float, float]
CaseTable: TypeAlias = Mapping[str, NDArray[Any]]  # the cases of one model, see `case_table`

ALL_SITES: Final = ""  # in place of a site: the mean over the sites of a role
RESAMPLES: Final = 1999
_BATCH: Final = 200  # resamples in memory at once
_UNDEFINED: Final = 0.1  # largest fraction of undefined resamples; with three patients of a class, 5 % of the resamples have none of them


def study_values(groups: Groups) -> pd.DataFrame:
    """The test metrics of a study, one value per seed.

    Runs of one seed that leave out different sites are averaged site by site. Models that differ only in a site's name ("personal/A",
    "personal/B") are averaged and named "personal/*".

    Returns:
        Index: label, model, role, metric, site (`ALL_SITES`: mean over the sites of the role); columns: seeds; NaN: undefined.
    """
    frames = [
        results_frame(run).loc[lambda table: table["label"] == ALL].assign(label=label, seed=run["seed"], run=place)
        for label, runs in groups.items()
        for place, run in enumerate(runs)
    ]
    table = pd.concat(frames, ignore_index=True)
    table["model"] = table["model"].str.replace("/.*", "/*", regex=True)
    keys = ["label", "model", "role", "metric", "site", "seed"]
    sites = table.groupby([*keys, "run"])["value"].mean().groupby(keys).mean()
    means = sites.groupby([key for key in keys if key != "site"]).mean()
    means = pd.concat({ALL_SITES: means}, names=["site"]).reorder_levels(keys)
    return pd.concat([sites, means]).unstack("seed")


@dataclass(frozen=True)
class Comparison:
    """Paired comparison of two models over the same seeds, or over the same patients."""

    difference: float | None = None  # mean of second - first; None without a pair
    interval: Interval | None = None  # 95 %; None if it is undefined
    p: float | None = None  # two-sided, of the paired t-test over seeds, or of Wilcoxon's test over patients; None if it is undefined
    n: int = 0  # seeds or patients with both values


def compare(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """Compare two models by Student's t, value by value of the same seeds in the same order; NaN where undefined.

    Below two pairs, and if all differences are equal, there is neither interval nor p. Splits of different seeds overlap, so that both
    are too confident.
    """
    differences = np.asarray(second, dtype=float) - np.asarray(first, dtype=float)
    differences = differences[np.isfinite(differences)]
    n = len(differences)
    if n < 2 or np.ptp(differences) <= 1e-12 * np.abs(differences).max():  # no spread to test against
        return Comparison(float(differences.mean()) if n else None, None, None, n)
    test = ttest_1samp(differences, 0.0)
    low, high = test.confidence_interval(0.95)
    return Comparison(float(differences.mean()), (float(low), float(high)), float(test.pvalue), n)


def mean_interval(values: Sequence[float]) -> Interval | None:
    """The 95 % percentile bootstrap interval of a mean (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, Sec. 13.3).

    None where `has_interval` forbids it.
    """
    if not has_interval(len(values)):
        return None
    interval = bootstrap((values,), np.mean, method="percentile", rng=numpy_generator(0, "bootstrap")).confidence_interval
    return float(interval.low), float(interval.high)


# -- metrics of weighted cases, as a bootstrap over patients needs them ------------------------------------------------------


def case_table(cases: Mapping[str, Any], metric: str) -> CaseTable | None:
    """The cases of `tasks.classes.Cases.to_dict` that a metric is computed from; None without any.

    Returns:
        "patients" (cases,), and of segmentation "values" (cases,), NaN where undefined, of classification "probabilities"
        (cases, outputs) and "targets" (cases,) or, multilabel, (cases, labels).
    """
    patients = np.array(cases.get("patients", []), dtype=str)
    if "values" in cases:
        values = cases["values"].get(metric)
        return None if values is None else {"patients": patients, "values": np.array(values, dtype=float)}
    if not len(patients):
        return None
    return {"patients": patients, "probabilities": np.array(cases["probabilities"], dtype=float), "targets": np.array(cases["targets"])}


def joined_cases(tables: Sequence[CaseTable]) -> CaseTable:
    """The cases of several sites as of one."""
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def weighted_metric(cases: CaseTable, metric: str, weights: Floats) -> Floats:
    """A metric of one model at one site.

    Args:
        weights: (..., cases), how often each case counts.

    Returns:
        (...); NaN where the weighted cases leave the metric undefined.

    Raises:
        ConfigError: an unknown metric of classes.
    """
    if "values" in cases:
        return weighted_mean(cases["values"], weights)
    if metric not in metric_table():
        raise unknown("metric", metric, metric_table())
    return of_outputs(metric_table()[metric].compute, cases["probabilities"], cases["targets"], weights)


def pooled_values(runs: Sequence[Run], model: str, metric: str, role: str) -> "pd.Series[float]":
    """The metric of all test images of the role's sites as of one site, one value per run; NaN without scores of patients."""
    values = []
    for run in runs:
        names = [name for name, site in sorted(run["sites"].items()) if site["role"] == role]
        tables = [case_table(run.get("scores", {}).get(name, {}).get(model) or {}, metric) for name in names]
        complete = [table for table in tables if table is not None]
        cases = joined_cases(complete) if complete and len(complete) == len(tables) else None
        values.append(np.nan if cases is None else float(weighted_metric(cases, metric, np.ones(len(cases["patients"])))))
    return pd.Series(values, dtype=float)


@dataclass(frozen=True)
class _SitePairs:
    """The cases of both models at one site, run by run, and the rows of their patients among all patients of the site."""

    patients: int
    pairs: list[tuple[CaseTable, CaseTable]]
    rows: list[NDArray[np.intp]]

    def difference(self, metric: str, counts: Floats) -> Floats:
        """Mean over runs for every resample; counts (..., patients): how often each patient was drawn."""
        values = [
            weighted_metric(second, metric, counts[..., rows]) - weighted_metric(first, metric, counts[..., rows])
            for (first, second), rows in zip(self.pairs, self.rows, strict=True)
        ]
        return np.asarray(np.nanmean(values, axis=0))


def compare_patients(
    first: tuple[Sequence[Run], str], second: tuple[Sequence[Run], str], metric: str, *, role: str = "inside"
) -> Comparison:
    """Compare two models patient by patient.

    The interval is BCa (Efron, JASA 82, 1987) over patients drawn within their sites; where BCa is undefined, the percentile interval
    of the defined resamples. Runs with the same seed and inside sites are pairs; their patients are paired by name. A patient with
    several cases must have them in the same order in both runs, else the pair is left out. There is no interval if there are fewer than
    six patients (`has_interval`), if a site has fewer than two, or if more than a tenth of the resamples are undefined; and no p for
    metrics of classes, which have no value per patient.

    Args:
        first: results dicts with scores of single patients, and the model's name in them.
        second: likewise, of the other row.
        role: of the sites, "inside" or "outside".
    """
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # means of undefined values, and resamples that are all equal
        sites = _paired(first, second, metric, role)
        if not sites:
            return Comparison()
        point = float(np.nanmean([site.difference(metric, np.ones(site.patients)) for site in sites]))
        count = sum(site.patients for site in sites)
        if np.isnan(point):
            return Comparison(n=count)
        return Comparison(point, _interval(sites, metric), _wilcoxon(sites), count)


def _paired(first: tuple[Sequence[Run], str], second: tuple[Sequence[Run], str], metric: str, role: str) -> list[_SitePairs]:
    """The sites that both models were measured at, patient by patient."""

    def split(run: Run) -> tuple[int, list[str]]:
        return run["seed"], sorted(name for name, site in run["sites"].items() if site["role"] == "inside")

    def cases(run: Run, site: str, model: str) -> CaseTable | None:
        return case_table(run.get("scores", {}).get(site, {}).get(model) or {}, metric)

    (runs, model), (other_runs, other_model) = first, second
    by_site: dict[str, list[tuple[CaseTable, CaseTable]]] = {}
    for run in runs:
        other: Run = next((other for other in other_runs if split(other) == split(run)), {"sites": {}})
        for site in run["sites"]:
            if run["sites"][site]["role"] == other["sites"].get(site, {}).get("role") == role:
                pair = _aligned(cases(run, site, model), cases(other, site, other_model))
                if pair is not None:
                    by_site.setdefault(site, []).append(pair)
    sites = []
    for _, pairs in sorted(by_site.items()):
        patients = np.unique(np.concatenate([cases_of_run["patients"] for cases_of_run, _ in pairs]))
        sites.append(_SitePairs(len(patients), pairs, [np.searchsorted(patients, of_run["patients"]) for of_run, _ in pairs]))
    return sites


def _aligned(first: CaseTable | None, second: CaseTable | None) -> tuple[CaseTable, CaseTable] | None:
    """The cases that both models measured, in the same order; None if there are none, or if they cannot be paired."""
    if first is None or second is None:
        return None
    names, others = first["patients"].tolist(), second["patients"].tolist()
    if names != others:
        if len(set(names)) < len(names) or sorted(names) != sorted(others):
            return None
        places = pd.Index(others).get_indexer(names)
        second = {name: column[places] for name, column in second.items()}
    if "values" in first:
        both = ~np.isnan(first["values"]) & ~np.isnan(second["values"])
        first, second = ({name: column[both] for name, column in table.items()} for table in (first, second))
    return (first, second) if len(first["patients"]) else None


def _interval(sites: Sequence[_SitePairs], metric: str) -> Interval | None:
    if any(site.patients < 2 for site in sites) or not has_interval(sum(site.patients for site in sites)):
        return None

    def statistic(*drawn: NDArray[np.int64], axis: int = -1) -> Floats:
        """Drawn patients (..., draws), one array per site."""
        pairs = list(zip(sites, drawn, strict=True))
        counts = [np.apply_along_axis(np.bincount, -1, np.moveaxis(each, axis, -1), minlength=site.patients) for site, each in pairs]
        values = [site.difference(metric, count.astype(float)) for site, count in zip(sites, counts, strict=True)]
        return np.asarray(np.nanmean(np.stack(np.broadcast_arrays(*values)), axis=0))

    result = bootstrap(
        tuple(np.arange(site.patients) for site in sites),
        statistic,
        n_resamples=RESAMPLES,
        batch=_BATCH,
        vectorized=True,
        method="BCa",
        rng=numpy_generator(0, "bootstrap over patients"),
    )
    low, high = result.confidence_interval
    if not np.isfinite([low, high]).all():
        defined = result.bootstrap_distribution[np.isfinite(result.bootstrap_distribution)]
        if len(defined) < (1 - _UNDEFINED) * RESAMPLES:
            return None
        low, high = np.percentile(defined, (2.5, 97.5))
    return float(low), float(high)


def _wilcoxon(sites: Sequence[_SitePairs]) -> float | None:
    """The p-value over patients, each with its mean difference over runs; None without values of patients."""
    if not all("values" in first for site in sites for first, _ in site.pairs):
        return None
    gains = {
        (place, run): pd.Series(second["values"] - first["values"], first["patients"])
        for place, site in enumerate(sites)
        for run, (first, second) in enumerate(site.pairs)
    }
    differences = pd.concat(gains).groupby(level=[0, 2]).mean()
    if len(differences) < 2:
        return None
    return float(wilcoxon(differences).pvalue) if differences.any() else 1.0
