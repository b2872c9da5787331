"""Means, confidence intervals and paired comparisons over seeds and over patients.

Over seeds: would another training give the same difference? Over patients: would other patients?
"""

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.stats import nct, norm, wilcoxon
from scipy.stats import t as student

from medflare.core.rng import numpy_generator
from medflare.core.text import Json
from medflare.evaluation.presentation import label_metric, sites_of_role
from medflare.evaluation.results import results_frame
from medflare.tasks.class_metrics import (
    ONE_CLASS,
    Array,
    Bools,
    Floats,
    is_exclusive,
    of_outputs,
    one_hot,
)
from medflare.tasks.classes import fractions_below, has_interval
from medflare.tasks.config import draws_images
from medflare.tasks.metrics_table import known_metric
from medflare.tasks.summaries import ALL, MEANS_OVER_IMAGES, Interval, mean_of_defined, percentiles

Results = Json  # of a run, with what a study adds to results.json
# Results with scores of single patients, and the name of a model in them.
RunModel = tuple[Sequence[Results], str]
# Row of a study -> runs that differ in their seed and in the sites left out.
Groups = Mapping[str, Sequence[Results]]
CaseTable = Mapping[str, Array]  # the cases of one model, see `case_table`

ALL_SITES = ""  # in place of a site: the mean over the sites of a role
RESAMPLES = 1999
_BATCH = 200  # resamples in memory at once
# Patients of a class in each test set; resamples of fewer miss it, or hold one patient many times.
FEWEST_OF_CLASS = 10
LEVEL = 0.05  # of tests, two-sided
POWER = 0.8
_MEANS_OVER_CLASSES = (  # of the metric of one class that `label_metric` names
    "balanced_accuracy",
    "f1_macro",
    "auc_macro",
    "auprc_macro",
    "sensitivity_macro",
    "specificity_macro",
    "ppv_macro",
)


def all_runs(groups: Groups) -> list[Results]:
    """The runs of all rows."""
    return list(chain.from_iterable(groups.values()))


def distinct(runs: Sequence[Results], key: str) -> list[Any]:
    """The different values of an item of the results dicts, sorted."""
    return sorted({run[key] for run in runs})


def all_sites(runs: Sequence[Results]) -> list[str]:
    """The names of the sites of any run, sorted."""
    return sorted(set[str]().union(*(run["sites"] for run in runs)))


def metrics_frame(groups: Groups) -> pd.DataFrame:
    """The rows of `results_frame` of all runs, with columns row (of the study), seed and run
    (its number within the row).
    """
    frames = []
    for row, runs in groups.items():
        for number, run in enumerate(runs):
            frames.append(results_frame(run).assign(row=row, seed=run["seed"], run=number))
    return pd.concat(frames, ignore_index=True)


def study_values(table: pd.DataFrame) -> pd.DataFrame:
    """The test metrics of a study, one value per seed; `table`: see `metrics_frame`.

    Runs of one seed that leave out different sites are averaged site by site. Models that differ
    only in a site's name ("personal/A", "personal/B") are averaged and named "personal/*".

    Returns:
        Index: row, model, role, metric, site (`ALL_SITES`: mean over the sites of the
            role); columns: seeds; NaN: undefined.
    """
    table = table[table["label"] == ALL]
    table = table.assign(model=table["model"].str.replace("/.*", "/*", regex=True))
    keys = ["row", "model", "role", "metric", "site", "seed"]
    sites = table.groupby([*keys, "run"])["value"].mean().groupby(keys).mean()
    means = sites.groupby(["row", "model", "role", "metric", "seed"]).mean()
    means = pd.concat({ALL_SITES: means}, names=["site"]).reorder_levels(keys)
    return pd.concat([sites, means]).unstack("seed")


@dataclass(frozen=True)
class Comparison:
    """A paired comparison of two models over the same seeds, or over the same patients."""

    difference: float | None = None  # mean of second - first; None without a pair
    interval: Interval | None = None  # 95 %; None if it is undefined
    # Two-sided, of the paired t-test over seeds, of Wilcoxon's test over patients, or of DeLong's
    # for areas; None if it is undefined.
    p: float | None = None
    n: int = 0  # seeds or patients with both values
    # Standard error of the difference over seeds, or of areas; None by Wilcoxon's test, and if it
    # is undefined.
    error: float | None = None


def compare(first: ArrayLike, second: ArrayLike, split_ratio: float = 0.0) -> Comparison:
    """Compare two models by Student's t, value by value of the same seeds in the same order; NaN
    where undefined. One number as `first` is compared with every value.

    Below two pairs, and if all differences are equal, there is neither interval nor p.

    Args:
        split_ratio: test images divided by training images if every seed draws the split again,
            else 0; see `standard_error`.
    """
    differences = np.asarray(second, dtype=float) - np.asarray(first, dtype=float)
    differences = differences[np.isfinite(differences)]
    n = len(differences)
    if n == 0:
        return Comparison()
    mean = differences.mean()
    if n == 1 or np.ptp(differences) <= 1e-12 * np.abs(differences).max():
        return Comparison(mean, n=n)  # no spread to test against
    return _tested(mean, standard_error(differences, split_ratio), student(n - 1), n)


def _tested(difference: float, error: float, distribution: Any, n: int) -> Comparison:
    """The comparison with interval and p, where difference / error has this distribution if there
    is none.
    """
    half_width = distribution.ppf(1 - LEVEL / 2) * error
    p = 2 * distribution.sf(abs(difference) / error)
    return Comparison(difference, (difference - half_width, difference + half_width), p, n, error)


def standard_error(differences: Sequence[float] | Floats, split_ratio: float) -> float:
    """The standard error of a mean over at least two seeds, sd * sqrt(1 / n + test / train).

    Splits that are drawn again share images, so that differences of seeds are correlated (Nadeau
    and Bengio, Inference for the Generalization Error, Machine Learning 52, 2003, Sec. 3). With
    fixed splits the second term is 0.

    Examples:
        >>> round(standard_error([1.0, 2.0, 3.0], 0.25), 6)  # sd 1, sqrt(1/3 + 1/4)
        0.763763
    """
    return float(np.std(differences, ddof=1) * np.sqrt(1 / len(differences) + split_ratio))


def split_ratio(runs: Sequence[Results]) -> float:
    """Test images divided by training images of the inside sites; 0 if splits share no images, if
    the runs have one split, or do not record their images.
    """
    tasks = [run["configuration"]["task"] for run in runs]
    splits = {task.get("resplit") for task in tasks}
    if len(splits) < 2 or draws_images(tasks[0].get("embedded", "")):
        return 0.0
    training = 0
    test = 0
    for run in runs:
        for site in sites_of_role(run, "inside"):
            images = run["sites"][site].get("n", {})
            training += images.get("train") or 0
            test += images.get("test") or 0
    return test / training if training else 0.0


def detectable_difference(n: int, split_ratio: float = 0.0) -> float | None:
    """The true difference, in standard deviations over seeds, that the t-test of `compare` finds
    with 80 % power; None below two seeds.

    It follows from the noncentral t distribution with n - 1 degrees of freedom (Cohen, Statistical
    Power Analysis, 1988, Sec. 2.5).

    Examples:
        >>> [round(detectable_difference(n), 2) for n in (3, 10)]
        [3.26, 1.0]
    """
    if n < 2:
        return None
    critical = student.ppf(1 - LEVEL / 2, n - 1)

    def lacking(noncentrality: float) -> float:
        return float(nct.sf(critical, n - 1, noncentrality)) - POWER  # the other tail is below 1e-4

    noncentrality = brentq(lacking, 0.0, 1.5 * critical)
    return float(noncentrality * np.sqrt(1 / n + split_ratio))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """The p-values of one claim, adjusted for their number (Holm, Scandinavian Journal of
    Statistics 6, 1979).

    The i-th smallest of m is multiplied by m - i + 1; none is below a smaller one, or above 1. A
    missing value is no test: it stays None and does not count.

    Examples:
        >>> holm([0.04, None, 0.01, 0.03])
        [0.06, None, 0.03, 0.06]
    """
    tests = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(tests):
        largest = max(largest, min(1.0, (len(tests) - rank) * p))
        adjusted[index] = largest
    return adjusted


def equivalence_p(over_seeds: Comparison, margin: float) -> float | None:
    """The p-value of "the difference is not between -margin and margin", the larger one of two
    one-sided t-tests; None without spread.

    Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15, 1987. At 5 % it says the same
    as a 90 % interval within the margin.
    """
    if over_seeds.difference is None or over_seeds.error is None:
        return None
    # To the nearer bound; its test has the larger p.
    distance = (margin - abs(over_seeds.difference)) / over_seeds.error
    return float(student.sf(distance, over_seeds.n - 1))


def conclusion(
    over_seeds: Comparison,
    over_patients: Comparison | None,
    adjusted_p: float | None,
    margin: float,
) -> str:
    """What a study says of a difference of a metric of which more is better.

    Args:
        over_patients: None where every seed draws other patients: the seeds alone decide.
        adjusted_p: of the difference over seeds, see `holm`.
        margin: d, the smallest difference that matters.

    Returns:
        "confirmed" (above zero) or "opposite" (below) if `adjusted_p` is below 5 % and the interval
        over patients does not have 0; else "smaller than d" if the equivalence test over seeds is
        below 5 % and the interval over patients is between -d and d, or if both models are equal in
        all seeds; else "study too small".
    """
    difference = over_seeds.difference
    if difference == 0 and over_seeds.interval is None and over_seeds.n > 1:
        return "smaller than d"
    if difference is None or adjusted_p is None:
        return "study too small"
    low = high = difference
    if over_patients is not None:
        if over_patients.interval is None:
            return "study too small"
        low, high = over_patients.interval
    if adjusted_p < LEVEL and difference > 0 and low > 0:
        return "confirmed"
    if adjusted_p < LEVEL and difference < 0 and high < 0:
        return "opposite"
    p = equivalence_p(over_seeds, margin)
    if p is not None and p < LEVEL and -margin < low and high < margin:
        return "smaller than d"
    return "study too small"


# -- metrics of weighted cases, as a bootstrap over patients needs them ----------------------------


def case_table(cases: Json, metric: str) -> CaseTable | None:
    """The cases of `tasks.classes.Cases.to_dict` that a metric is computed from; None without any.

    Returns:
        "patients" (cases,), and of segmentation "values" (cases,), NaN where undefined, of
        classification "probabilities" (cases, outputs) and "targets" (cases,) or, multilabel,
        (cases, labels).
    """
    patients = np.array(cases.get("patients", []), dtype=str)
    if "values" in cases:
        values = cases["values"].get(metric)
        if values is None:
            return None
        return {"patients": patients, "values": np.array(values, dtype=float)}
    if not len(patients):
        return None
    return {
        "patients": patients,
        "probabilities": np.array(cases["probabilities"], dtype=float),
        "targets": np.array(cases["targets"]),
    }


def _cases_of(run: Results, site: str, model: str, metric: str) -> CaseTable | None:
    """The `case_table` of a model at a site; None without scores of patients."""
    return case_table(run.get("scores", {}).get(site, {}).get(model) or {}, metric)


def joined_cases(tables: Sequence[CaseTable]) -> CaseTable:
    """The cases of several sites as of one."""
    joined = {}
    for name in tables[0]:
        joined[name] = np.concatenate([table[name] for table in tables])
    return joined


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
        return mean_of_defined(cases["values"], weights)
    compute = known_metric(metric, "").compute
    return of_outputs(compute, cases["probabilities"], cases["targets"], weights)


def pooled_values(
    runs: Sequence[Results], model: str, metric: str, role: str
) -> "pd.Series[float]":
    """The metric of all test images of the role's sites as of one site, one value per run; NaN
    without scores of patients.
    """
    values = []
    for run in runs:
        tables = [_cases_of(run, site, model, metric) for site in sites_of_role(run, role)]
        measured = [table for table in tables if table is not None]
        value = np.nan
        if measured and len(measured) == len(tables):
            cases = joined_cases(measured)
            value = float(weighted_metric(cases, metric, np.ones(len(cases["patients"]))))
        values.append(value)
    return pd.Series(values, dtype=float)


# -- over patients ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SitePairs:
    """The cases of both models at one site, run by run."""

    names: Array  # of the patients, sorted
    pairs: list[tuple[CaseTable, CaseTable]]
    classes: tuple[int, ...] | None = None  # of the mean over classes; None: all

    @property
    def patients(self) -> int:
        return len(self.names)

    def gains(self, metric: str, counts: Floats) -> list[Floats]:
        """Run by run second - first, (terms, ...), see `_terms`; counts (..., patients): how often
        each patient was drawn.
        """
        gains = []
        for first, second in self.pairs:
            weights = counts[..., np.searchsorted(self.names, first["patients"])]
            after = _terms(second, metric, weights, self.classes)
            gains.append(after - _terms(first, metric, weights, self.classes))
        return gains


def _terms(cases: CaseTable, metric: str, weights: Floats, classes: Sequence[int] | None) -> Floats:
    """The metric of every one of these classes or labels, (classes, ...); without classes the whole
    metric, (1, ...).
    """
    if classes is None:
        return weighted_metric(cases, metric, weights)[None]
    probabilities = cases["probabilities"]
    targets = cases["targets"]
    values = []
    for class_index in classes:
        if targets.ndim == 2:
            columns = {
                "probabilities": probabilities[:, [class_index]],
                "targets": targets[:, [class_index]],
            }
            values.append(weighted_metric(columns, metric, weights))
        else:
            scores = probabilities[:, class_index]
            predicted = probabilities.argmax(axis=1) == class_index
            metric_of_class = ONE_CLASS[label_metric(metric)]
            values.append(metric_of_class(scores, targets == class_index, predicted, weights))
    return np.stack(values)


def common_classes(runs: Sequence[Results], role: str) -> dict[str, tuple[int, ...]]:
    """The classes of each site with at least `FEWEST_OF_CLASS` patients in the test set of every
    run; {} for segmentation.

    Of exclusive classes there are at least two, else none. A label needs as many patients without
    it; a binary task has the label 0.
    """
    by_site = defaultdict(list)
    exclusive = False
    for run in runs:
        for site in sites_of_role(run, role):
            table = _class_table(run.get("scores", {}).get(site, {}))
            if table is not None:
                counts = _patients_of_classes(table)
                frequent = {
                    class_index for class_index, count in counts.items() if count >= FEWEST_OF_CLASS
                }
                by_site[site].append(frequent)
                exclusive = is_exclusive(table["probabilities"], table["targets"])
    common = {}
    for site, frequent_classes in sorted(by_site.items()):
        classes = set.intersection(*frequent_classes)
        if exclusive and len(classes) < 2:
            classes = set()
        common[site] = tuple(sorted(classes))
    return common


def _class_table(scores: Mapping[str, Json]) -> CaseTable | None:
    """The cases of the first model that has classes; `scores`: model -> `Cases.to_dict`."""
    for cases in scores.values():
        if cases and "targets" in cases:
            return case_table(cases, "")
    return None


def _patients_of_classes(cases: CaseTable) -> dict[int, int]:
    """Class -> its patients in one test set; of a label the fewer of those with it and those
    without it.
    """
    patients = cases["patients"]
    exclusive = is_exclusive(cases["probabilities"], cases["targets"])
    counts = {}
    for class_index, truth in enumerate(_truths(cases).T):
        counts[class_index] = len(np.unique(patients[truth]))
        if not exclusive:
            counts[class_index] = min(counts[class_index], len(np.unique(patients[~truth])))
    return counts


def _truths(cases: CaseTable) -> Bools:
    """(cases, outputs), whether a case has a class or a label."""
    return one_hot(cases["targets"], cases["probabilities"].shape[1])


def compare_patients(
    first: RunModel,
    second: RunModel,
    metric: str,
    *,
    role: str = "inside",
    common: Mapping[str, tuple[int, ...]] | None = None,
) -> Comparison:
    """Compare two models patient by patient.

    Runs with the same seed and inside sites are pairs; their patients are paired by name. A patient
    with several cases must have them in the same order in both runs, else the pair is left out.
    Patients are drawn within their sites. There is no interval if there are fewer than six patients
    (`has_interval`), if a site has fewer than two, or if more than a tenth of the resamples are
    undefined. It is the percentile interval (Efron and Tibshirani, An Introduction to the
    Bootstrap, 1993, Sec. 13.3), widened by `expanded_level` of the fewest patients of a site or
    class.

    Metrics of classes have no p. Resamples of a class with few patients can miss it, which changes
    the quantity. So `common_classes` alone count, in difference and interval, and a site without
    any is left out. If no site is left, the difference is of all classes and has no interval. A
    metric that is no mean over classes or images needs all classes.

    Args:
        role: of the sites, "inside" or "outside".
        common: site -> classes; default: `common_classes` of these runs.
    """
    with np.errstate(all="ignore"), warnings.catch_warnings():
        # Means of undefined values, and resamples that are all equal.
        warnings.simplefilter("ignore")
        sites = _paired(first, second, metric, role)
        if not sites:
            return Comparison()
        by_name = common_classes([*first[0], *second[0]], role) if common is None else common
        has_classes = any("targets" in cases for site in sites.values() for cases, _ in site.pairs)
        usable = _with_classes(sites, metric, by_name) if has_classes else []
        compared = usable or list(sites.values())
        point = float(np.nanmean([_point(site, metric) for site in compared]))
        count = sum(site.patients for site in compared)
        if np.isnan(point):
            return Comparison(n=count)
        if has_classes:
            fewest = min((_fewest_patients(site, metric) for site in usable), default=0)
            return Comparison(point, _interval(usable, metric, fewest), None, count)
        fewest = min(site.patients for site in compared)
        return Comparison(point, _interval(compared, metric, fewest), _wilcoxon(compared), count)


def _with_classes(
    sites: Mapping[str, _SitePairs], metric: str, common: Mapping[str, tuple[int, ...]]
) -> list[_SitePairs]:
    """The sites that have an interval, with the classes that count."""
    if metric in MEANS_OVER_IMAGES:
        return list(sites.values())
    usable = []
    for name, site in sites.items():
        classes = common.get(name, ())
        table = site.pairs[0][0]
        complete = len(classes) == table["probabilities"].shape[1]
        separable = metric in _MEANS_OVER_CLASSES or table["targets"].ndim == 2
        if complete and not separable:
            usable.append(site)
        elif classes and separable:
            # A binary task has one output, and its metric may count both classes.
            binary = table["targets"].ndim == table["probabilities"].shape[1] == 1
            usable.append(site if binary else replace(site, classes=classes))
    return usable


def _paired(first: RunModel, second: RunModel, metric: str, role: str) -> dict[str, _SitePairs]:
    """The sites that both models were measured at, patient by patient."""
    runs, model = first
    other_runs, other_model = second
    by_site = defaultdict(list)
    for run in runs:
        other = _of_same_split(run, other_runs)
        if other is None:
            continue
        for site in set(sites_of_role(run, role)).intersection(sites_of_role(other, role)):
            cases = _cases_of(run, site, model, metric)
            pair = _aligned(cases, _cases_of(other, site, other_model, metric))
            if pair is not None:
                by_site[site].append(pair)
    sites = {}
    for name, pairs in sorted(by_site.items()):
        patients = np.concatenate([cases["patients"] for cases, _ in pairs])
        sites[name] = _SitePairs(np.unique(patients), pairs)
    return sites


def _of_same_split(run: Results, others: Sequence[Results]) -> Results | None:
    """The first of the others with the seed and the inside sites of a run."""
    inside = sites_of_role(run, "inside")
    for other in others:
        if run["seed"] == other["seed"] and inside == sites_of_role(other, "inside"):
            return other
    return None


def _aligned(
    first: CaseTable | None, second: CaseTable | None
) -> tuple[CaseTable, CaseTable] | None:
    """The cases that both models measured, in the same order; None if there are none, or if they
    cannot be paired.
    """
    if first is None or second is None:
        return None
    names = first["patients"].tolist()
    others = second["patients"].tolist()
    if names != others:
        if len(set(names)) < len(names) or sorted(names) != sorted(others):
            return None
        second = _selected(second, pd.Index(others).get_indexer(names))
    if "values" in first:
        both = ~np.isnan(first["values"]) & ~np.isnan(second["values"])
        first = _selected(first, both)
        second = _selected(second, both)
    return (first, second) if len(first["patients"]) else None


def _selected(cases: CaseTable, rows: Array) -> CaseTable:
    return {name: column[rows] for name, column in cases.items()}


def _interval(sites: Sequence[_SitePairs], metric: str, fewest: int) -> Interval | None:
    """The interval over patients; `fewest`: patients of a site, or of a class at a site."""
    patients = [site.patients for site in sites]
    if fewest < 2 or min(patients) < 2 or not has_interval(sum(patients)):
        return None
    rng = numpy_generator(0, "bootstrap over patients")
    values = []
    for start in range(0, RESAMPLES, _BATCH):
        size = min(_BATCH, RESAMPLES - start)
        gains = []
        for site in sites:
            gain = _mean_gain(site, metric, _counts(rng, site.patients, size))
            if gain is not None:
                gains.append(gain)
        values.append(np.mean(gains, axis=0))
    return percentiles(np.concatenate(values), expanded_level(fewest))


def expanded_level(n: int) -> float:
    """The share of resamples outside a percentile interval of 95 % over n values, 2 Phi(-sqrt(n /
    (n - 1)) t(0.975, n - 1)).

    Resampled means of few values vary too little (Hesterberg, What Teachers Should Know About the
    Bootstrap, The American Statistician 69, 2015, Sec. 4.5); with many values it is 5 %.

    Examples:
        >>> [round(expanded_level(n), 3) for n in (2, 10, 30, 100000)]
        [0.0, 0.017, 0.038, 0.05]
    """
    quantile = student.ppf(1 - LEVEL / 2, n - 1)
    return float(2 * norm.sf(np.sqrt(n / (n - 1)) * quantile))


def _fewest_patients(site: _SitePairs, metric: str) -> int:
    """The fewest patients of a class that counts, in any run; all patients where the metric is
    a mean over images.
    """
    fewest = []
    for cases, _ in site.pairs:
        counts = _patients_of_classes(cases)
        if metric in MEANS_OVER_IMAGES:
            fewest.append(len(np.unique(cases["patients"])))
        else:
            fewest.append(min(counts[class_index] for class_index in site.classes or counts))
    return min(fewest)


def _point(site: _SitePairs, metric: str) -> float:
    """The mean gain of all patients; NaN without any."""
    mean = _mean_gain(site, metric, np.ones(site.patients))
    return np.nan if mean is None else float(mean)


def _counts(rng: np.random.Generator, patients: int, resamples: int) -> Floats:
    """How often each patient is drawn, (resamples, patients)."""
    drawn = rng.integers(patients, size=(resamples, patients))
    drawn += patients * np.arange(resamples)[:, None]  # other numbers in every resample
    counts = np.bincount(drawn.ravel(), minlength=resamples * patients)
    return counts.reshape(resamples, patients).astype(float)


def _mean_gain(site: _SitePairs, metric: str, counts: Floats) -> Floats | None:
    """Mean over runs and over the terms that are defined for all patients; None without any.

    A term of a class has to be defined in a resample, too; runs without a patient in it are left
    out of values of patients.
    """
    mean = np.nanmean if "values" in site.pairs[0][0] else np.mean
    means = []
    full_gains = site.gains(metric, np.ones(site.patients))
    for gain, full_gain in zip(site.gains(metric, counts), full_gains, strict=True):
        defined = np.isfinite(full_gain)
        if defined.any():
            means.append(gain[defined].mean(axis=0))
    return mean(means, axis=0) if means else None


def _wilcoxon(sites: Sequence[_SitePairs]) -> float | None:
    """The p-value over patients, each with its mean difference over runs; None below two."""
    gains = {}
    for number, site in enumerate(sites):
        for run, (first, second) in enumerate(site.pairs):
            gain = second["values"] - first["values"]
            gains[number, run] = pd.Series(gain, first["patients"])
    differences = pd.concat(gains).groupby(level=[0, 2]).mean()
    if len(differences) < 2:
        return None
    if not differences.any():
        return 1.0
    return wilcoxon(differences).pvalue


# -- areas under ROC curves of the same cases ------------------------------------------------------


def delong(
    truth: ArrayLike, first: ArrayLike, second: ArrayLike, patients: ArrayLike
) -> Comparison:
    """Compare the areas under the ROC curves of two scores of the same cases.

    The variance is that of DeLong, DeLong and Clarke-Pearson, Biometrics 44, 1988, Eq. 5 to 8.
    Cases of one patient are dependent: Obuchowski, Biometrics 53, 1997, Sec. 2, sums them; of one
    case each it is the same.
    p and interval are of the normal distribution; there are none if the variance is 0. Below two
    patients with and two without the class nothing is compared.

    Args:
        truth: (cases,), whether a case has the class.
        first: (cases,), scores of one model; likewise `second`.
        patients: (cases,), the patient of each case.
    """
    positive = np.asarray(truth, dtype=bool)
    before, after = np.asarray(first), np.asarray(second)
    names, clusters = np.unique(patients, return_inverse=True)
    sums = []  # by patient, of cases with the class, then without it
    fractions = []
    variance = 0.0
    for group in (positive, ~positive):
        members = len(np.unique(clusters[group]))
        if members < 2:
            return Comparison(n=len(names))
        gain = fractions_below(after[group], after[~group])
        gain -= fractions_below(before[group], before[~group])
        fractions.append(gain.mean())
        patient_sums = np.bincount(clusters[group], gain - gain.mean(), len(names)) / group.sum()
        variance += members / (members - 1) * float(patient_sums @ patient_sums)
        sums.append(patient_sums)
    # A case without the class is ranked correctly if it is lower, so its gains have the other sign.
    variance -= 2 * len(names) / (len(names) - 1) * float(sums[0] @ sums[1])
    difference = fractions[0]
    error = np.sqrt(max(variance, 0.0))
    if error < 1e-12:
        return Comparison(difference, n=len(names))
    return _tested(difference, error, norm, len(names))


def delong_by_class(
    first: RunModel, second: RunModel, role: str
) -> dict[tuple[str, int], list[Comparison]]:
    """Site and class (or label) -> `delong` of every pair of runs, each class against the rest; of
    two exclusive classes the second.

    See `compare_patients` for the arguments and the pairs.
    """
    compared = defaultdict(list)
    for name, site in _paired(first, second, "auc_macro", role).items():
        for before, after in site.pairs:
            probabilities = before["probabilities"]
            is_pair = before["targets"].ndim == 1 and probabilities.shape[1] == 2
            columns = zip(_truths(before).T, probabilities.T, after["probabilities"].T, strict=True)
            for class_index, (truth, first_scores, second_scores) in enumerate(columns):
                if class_index == 0 and is_pair:
                    continue
                comparison = delong(truth, first_scores, second_scores, before["patients"])
                compared[(name, class_index)].append(comparison)
    return compared
