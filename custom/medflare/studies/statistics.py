"""What repeated runs and their patients say: estimates, confidence intervals and paired comparisons.

Over seeds one asks whether training again would give the same difference, over patients whether other patients would. All works on
results dicts (`results.build_results`) of runs that differ in their seed, and in who is outside where every site is left out in turn.
"""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

from medflare.core.rng import numpy_generator
from medflare.core.settings import unknown

Floats: TypeAlias = NDArray[np.float64]
Run: TypeAlias = Mapping[str, Any]  # a results dict
Interval: TypeAlias = tuple[float, float]
CaseDict: TypeAlias = Mapping[str, Any]  # `tasks.classes.Cases.to_dict`

# -- over seeds ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """Mean of repeated runs.

    Attributes:
        mean: None where no run has a value.
        sd: sample standard deviation (n - 1 in the denominator); None below two runs.
        n: runs with a value.
        interval: bootstrap confidence interval of the mean; None below two runs.
    """

    mean: float | None
    sd: float | None
    n: int
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Comparison:
    """Paired comparison of two methods over the same seeds.

    Attributes:
        difference: mean of second - first; None where no seed has both values.
        interval: 95 %, of Student's t; None where it is undefined: below two pairs, or where all differences are equal.
        p: two-sided, of the paired t-test; None where that is undefined. Seeds draw overlapping splits, so both are too confident.
        n: seeds with both values.
    """

    difference: float | None
    interval: tuple[float, float] | None
    p: float | None
    n: int


def estimate(values: Iterable[float | None]) -> Estimate:
    """Mean, standard deviation and bootstrap interval of the defined values.

    The interval is the percentile bootstrap of the mean (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
    Sec. 13.3) with 9999 resamples; with n equal values it has no width. For a handful of seeds it is too narrow: read it with n.

    Args:
        values: one a run; None and NaN are left out.

    Examples:
        >>> estimate([0.5, None]), estimate([])
        (Estimate(mean=0.5, sd=None, n=1, interval=None), Estimate(mean=None, sd=None, n=0, interval=None))
    """
    defined = _defined(values)
    if len(defined) < 2:
        return Estimate(defined[0] if defined else None, None, len(defined), None)
    from scipy.stats import bootstrap

    generator = numpy_generator(0, "bootstrap")
    resampled = bootstrap((defined,), np.mean, method="percentile", rng=generator)
    low, high = resampled.confidence_interval
    return Estimate(float(np.mean(defined)), float(np.std(defined, ddof=1)), len(defined), (float(low), float(high)))


def compare(first: Sequence[float | None], second: Sequence[float | None]) -> Comparison:
    """Compare two methods run by run; place i of both sequences belongs to the same seed (and split).

    Args:
        first: one value a seed; None where it is undefined.

    Raises:
        ValueError: the sequences differ in length.

    Examples:
        >>> compare([0.5, None], [0.75, 0.5])
        Comparison(difference=0.25, interval=None, p=None, n=1)
    """
    if len(first) != len(second):
        raise ValueError(f"a paired comparison needs pairs, got {len(first)} and {len(second)} values")
    differences = np.array([b - a for a, b in zip(first, second, strict=True) if _is_defined(a) and _is_defined(b)])
    if len(differences) < 2:
        return Comparison(float(differences[0]) if len(differences) else None, None, None, len(differences))
    if np.ptp(differences) <= 1e-12 * np.abs(differences).max():  # no spread to test against
        return Comparison(float(differences.mean()), None, None, len(differences))
    from scipy.stats import ttest_1samp

    test = ttest_1samp(differences, 0.0)
    low, high = test.confidence_interval(0.95)
    return Comparison(float(differences.mean()), (float(low), float(high)), float(test.pvalue), len(differences))


def values_of(results: Sequence[Run], model: str, metric: str, *, role: str = "inside", site: str | None = None) -> list[float | None]:
    """One value a seed, in the order of the seeds: the mean over the sites of `role`, or `site`'s own; None where it is undefined.

    A seed has several runs where each site was left out in turn: a site's values in that role are averaged over them first.

    Args:
        results: of runs that differ in their seed and in who is outside.
        model: "NAME/*" stands for the mean over all models "NAME/...", for example IOP-FL's "personal/HRF" and "personal/LESAV".
        role: "inside" or "outside".
        site: one site alone; None: the mean over the sites of the role.
    """
    seeds = sorted({run["seed"] for run in results})
    return [_value([run for run in results if run["seed"] == seed], model, metric, role, site) for seed in seeds]


def _value(runs: Sequence[Run], model: str, metric: str, role: str, site: str | None) -> float | None:
    names = sorted({name for run in runs for name in run["sites"]}) if site is None else [site]
    return _mean(_mean(_measured(run, name, model, metric, role) for run in runs) for name in names)


def _measured(run: Run, site: str, model: str, metric: str, role: str) -> float | None:
    place = run["sites"].get(site)
    if place is None or place["role"] != role:
        return None
    names = [name for name in place["metrics"] if name.startswith(model[:-1])] if model.endswith("/*") else [model]
    return _mean((place["metrics"].get(name) or {}).get(metric) for name in names)


def _mean(values: Iterable[float | None]) -> float | None:
    defined = _defined(values)
    return float(np.mean(defined)) if defined else None


def _defined(values: Iterable[float | None]) -> list[float]:
    return [float(value) for value in values if _is_defined(value)]


def _is_defined(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


# -- over patients ------------------------------------------------------------------------------------------------------


RESAMPLES: Final = 1999
_AT_ONCE: Final = 200  # resamples in memory together
_UNDEFINED: Final = 0.1  # the most resamples without a value that an interval can do without; of three patients of a class 5 % have none


@dataclass(frozen=True)
class PatientComparison:
    """Paired comparison of two models over the same patients.

    Attributes:
        difference: second - first, the mean over sites of the mean over a site's runs; None where no patient was measured by both.
        interval: 95 % over patients; None below two patients at a site, or where more than a tenth of the resamples leave the metric
            undefined at every site, as with a class of one or two patients: an interval of the others would be too narrow.
        p: two-sided, of Wilcoxon's test; None where it is undefined, as of classes.
        patients: how many both models measured, all sites together.
    """

    difference: float | None = None
    interval: Interval | None = None
    p: float | None = None
    patients: int = 0


@dataclass(frozen=True)
class _Pair:
    """The cases of both models in one run at one site, and the places of their patients among all patients of the site."""

    first: CaseDict
    second: CaseDict
    rows: NDArray[np.int64]

    def difference(self, metric: str, weights: Floats) -> Floats:
        return weighted_metric(self.second, metric, weights) - weighted_metric(self.first, metric, weights)


@dataclass(frozen=True)
class _SitePairs:
    """All runs of one site."""

    patients: int
    runs: tuple[_Pair, ...]

    def difference(self, metric: str, counts: Floats) -> Floats:
        """Mean over runs, for every resample; `counts` (..., patients) says how often each patient was drawn."""
        return _nanmean(np.stack([pair.difference(metric, counts[..., pair.rows]) for pair in self.runs]), axis=0)


def compare_patients(
    first: tuple[Sequence[Run], str], second: tuple[Sequence[Run], str], metric: str, *, role: str = "inside", resamples: int = RESAMPLES
) -> PatientComparison:
    """Compare two models patient by patient.

    The interval is BCa's (Efron, JASA 82, 1987) over patients drawn within their sites; the percentile's where BCa is undefined, then of
    the resamples that have a value. Runs pair their patients by name; of a patient with several cases these have to come in the same order
    in both, or the pair is left out.

    Args:
        first: results dicts with the scores of single patients, and the model's name in them.
        second: the same, runs with the same seed and the same sites inside are pairs.
        role: of the sites, "inside" or "outside".
    """
    sites = _paired(first, second, metric, role)
    if not sites:
        return PatientComparison()
    everybody = [site.difference(metric, np.ones(site.patients)) for site in sites]
    point = float(_nanmean(np.array(everybody), axis=0))
    count = sum(site.patients for site in sites)
    if np.isnan(point):
        return PatientComparison(patients=count)
    return PatientComparison(point, _interval(sites, metric, resamples), _tested(sites, metric), count)


def _interval(sites: Sequence[_SitePairs], metric: str, resamples: int) -> Interval | None:
    if any(site.patients < 2 for site in sites):
        return None
    from scipy.stats import DegenerateDataWarning, bootstrap

    def statistic(*drawn: NDArray[np.int64], axis: int = -1) -> Floats:
        """Drawn places of patients (..., patients), one array a site."""
        counts = [_counts(np.moveaxis(places, axis, -1), site.patients) for site, places in zip(sites, drawn, strict=True)]
        found = [site.difference(metric, count.astype(float)) for site, count in zip(sites, counts, strict=True)]
        return _nanmean(np.stack(np.broadcast_arrays(*found)), axis=0)

    places = tuple(np.arange(site.patients) for site in sites)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateDataWarning)  # where nothing varies: the percentile's interval has no width then
        found = bootstrap(
            places,
            statistic,
            n_resamples=resamples,
            batch=_AT_ONCE,
            vectorized=True,
            method="BCa",
            rng=numpy_generator(0, "bootstrap over patients"),
        )
    if np.isfinite(found.confidence_interval).all():
        return float(found.confidence_interval.low), float(found.confidence_interval.high)
    return _percentiles(found.bootstrap_distribution)


def _percentiles(resampled: Floats) -> Interval | None:
    """The percentile interval of the resamples that have a value; None where too few have one."""
    defined = resampled[np.isfinite(resampled)]
    if len(defined) < (1 - _UNDEFINED) * len(resampled):
        return None
    low, high = np.percentile(defined, (2.5, 97.5))
    return float(low), float(high)


def _counts(drawn: NDArray[np.int64], patients: int) -> NDArray[np.int64]:
    """How often each of `patients` is among the drawn places (..., draws), as (..., patients)."""
    rows = drawn.reshape(-1, drawn.shape[-1])
    numbered = rows + patients * np.arange(len(rows))[:, None]  # a patient of each resample has a number of its own
    return np.bincount(numbered.ravel(), minlength=patients * len(rows)).reshape(*drawn.shape[:-1], patients)


def _tested(sites: Sequence[_SitePairs], metric: str) -> float | None:
    """The p-value of Wilcoxon's test where a patient has a value."""
    from scipy.stats import wilcoxon

    if not all("values" in pair.first for site in sites for pair in site.runs):
        return None
    differences = np.concatenate([_per_patient(site, metric) for site in sites])
    differences = differences[~np.isnan(differences)]
    if len(differences) < 2:
        return None
    return float(wilcoxon(differences).pvalue) if differences.any() else 1.0


def _per_patient(site: _SitePairs, metric: str) -> Floats:
    """Every patient's difference, averaged over the runs that tested it."""
    each = np.full((len(site.runs), site.patients), np.nan)
    for row, pair in zip(each, site.runs, strict=True):
        values = [np.array(cases["values"][metric], dtype=float) for cases in (pair.first, pair.second)]
        row[pair.rows] = values[1] - values[0]
    return _nanmean(each, axis=0)


def _paired(first: tuple[Sequence[Run], str], second: tuple[Sequence[Run], str], metric: str, role: str) -> list[_SitePairs]:
    """The sites that both models were measured at patient by patient."""
    (runs, model), (other_runs, other_model) = first, second
    partners = {_split(run): run for run in other_runs}
    found: dict[str, list[tuple[CaseDict, CaseDict]]] = {}
    for run in runs:
        for site, about in sorted(run["sites"].items()):
            partner = partners.get(_split(run), {"sites": {}})
            if about["role"] != role or partner["sites"].get(site, {}).get("role") != role:
                continue
            one, other = _cases(run, site, model), _cases(partner, site, other_model)
            if all(cases and has_metric(cases, metric) for cases in (one, other)) and (pair := _aligned(one, other, metric)):
                found.setdefault(site, []).append(pair)
    return [_site_pairs(pairs) for _, pairs in sorted(found.items())]


def _aligned(one: CaseDict, other: CaseDict, metric: str) -> tuple[CaseDict, CaseDict] | None:
    """The cases that both measured, patient by patient in the order of the first; None where nobody can say which belong together."""
    names, others = patients_of(one), patients_of(other)
    if names != others:
        if sorted(names) != sorted(others) or len(set(names)) < len(names):
            return None
        places = {name: place for place, name in enumerate(others)}
        other = chosen_cases(other, [places[name] for name in names])
    if "values" not in one:
        return one, other
    values = zip(one["values"][metric], other["values"][metric], strict=True)
    both = [place for place, pair in enumerate(values) if None not in pair]
    return (chosen_cases(one, both), chosen_cases(other, both)) if both else None


def _split(run: Run) -> tuple[int, tuple[str, ...]]:
    """What makes two runs a pair: the seed, which draws the split, and the sites that trained (every site alone has no others)."""
    return run["seed"], tuple(sorted(name for name, site in run["sites"].items() if site["role"] == "inside"))


def _cases(run: Run, site: str, model: str) -> CaseDict:
    return run.get("scores", {}).get(site, {}).get(model) or {}


def _site_pairs(pairs: Sequence[tuple[CaseDict, CaseDict]]) -> _SitePairs:
    places = {patient: place for place, patient in enumerate(sorted({name for pair in pairs for name in patients_of(pair[0])}))}
    rows = [np.array([places[patient] for patient in patients_of(pair[0])]) for pair in pairs]
    return _SitePairs(len(places), tuple(_Pair(*pair, of) for pair, of in zip(pairs, rows, strict=True)))


def _nanmean(values: Floats, axis: int) -> Floats:
    """The mean of what is defined; NaN where nothing is."""
    defined = ~np.isnan(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(defined, values, 0.0).sum(axis=axis) / defined.sum(axis=axis))


# -- metrics of single cases under weights, as a bootstrap over patients needs them -------------------------------------


def patients_of(cases: CaseDict) -> list[str]:
    """The patient of every case, in order."""
    return list(cases["patients"])


def has_metric(cases: CaseDict, metric: str) -> bool:
    """Whether a metric can be computed from these cases."""
    return metric in cases["values"] if "values" in cases else bool(cases["patients"])


def chosen_cases(cases: CaseDict, places: Sequence[int]) -> CaseDict:
    """Some of the cases, in the order of `places`.

    Examples:
        >>> chosen_cases({"patients": ["a", "b"], "values": {"dice": [0.5, None]}}, [1])
        {'patients': ['b'], 'values': {'dice': [None]}}
    """

    def chosen(column: Sequence[Any]) -> list[Any]:
        return [column[place] for place in places]

    parts = {name: column for name, column in cases.items() if name != "values"}
    found: dict[str, Any] = {name: chosen(column) for name, column in parts.items()}
    return found | ({"values": {metric: chosen(column) for metric, column in cases["values"].items()}} if "values" in cases else {})


def joined_cases(parts: Sequence[CaseDict], metric: str) -> CaseDict:
    """The cases of several sites as those of one.

    Args:
        metric: the one that is kept, where there are values.
    """
    patients = [patient for part in parts for patient in part["patients"]]
    if "values" in parts[0]:
        return {"patients": patients, "values": {metric: [value for part in parts for value in part["values"][metric]]}}
    names = ("probabilities", "targets")
    return {"patients": patients, **{name: [row for part in parts for row in part[name]] for name in names}}


def weighted_metric(cases: CaseDict, metric: str, weights: Floats) -> Floats:
    """A metric of one model at one site.

    Args:
        weights: (..., cases), how often each case counts.

    Returns:
        (...); NaN where the weighted cases leave the metric undefined.

    Examples:
        >>> weighted_metric({"patients": ["a", "b"], "values": {"dice": [0.5, None]}}, "dice", np.array([[1.0, 1.0], [0.0, 2.0]]))
        array([0.5, nan])
    """
    with np.errstate(invalid="ignore", divide="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the mean of nothing, which is NaN here as well
        if "values" in cases:
            values = np.array(cases["values"][metric], dtype=float)
            return np.asarray(weights @ np.nan_to_num(values) / (weights @ ~np.isnan(values)))
        probabilities, targets = np.array(cases["probabilities"], dtype=float), np.array(cases["targets"])
        if targets.ndim == 2:
            pairs = [(_two_classes(probabilities[:, [c]]), targets[:, c]) for c in range(targets.shape[1])]
            labels = [_of_classes(*pair, metric, weights, label=True) for pair in pairs]
            return np.asarray(np.nanmean(labels, axis=0))
        return _of_classes(_two_classes(probabilities) if probabilities.shape[1] == 1 else probabilities, targets, metric, weights)


def _two_classes(positive: Floats) -> Floats:
    return np.concatenate([1 - positive, positive], axis=1)


def _of_classes(probabilities: Floats, targets: NDArray[Any], metric: str, weights: Floats, label: bool = False) -> Floats:
    """As `tasks.metrics` has it: classes that cannot be judged are left out of the mean over classes, and a `label`'s F1 is that of yes."""
    chosen, classes = probabilities.argmax(axis=1), range(probabilities.shape[1])
    if metric == "accuracy":
        return np.asarray(weights @ (chosen == targets) / weights.sum(axis=-1))
    if metric == "auc_macro":
        return np.asarray(np.nanmean([_area(probabilities[:, c], targets == c, weights) for c in classes], axis=0))
    if metric not in ("balanced_accuracy", "f1_macro"):
        raise unknown("metric", metric, ("accuracy", "balanced_accuracy", "f1_macro", "auc_macro"))
    found = []
    for c in classes[1:] if label and metric == "f1_macro" else classes:
        hits, true, said = (weights @ mask for mask in ((targets == c) & (chosen == c), targets == c, chosen == c))
        found.append(hits / true if metric == "balanced_accuracy" else 2 * hits / (true + said))
    return np.asarray(np.nanmean(found, axis=0))


def _area(scores: Floats, truth: NDArray[np.bool_], weights: Floats) -> Floats:
    """The area under the ROC curve: the weighted share of (positive, negative) pairs in the right order, ties by half.

    All resamples share the order of the scores, so that each costs as much as there are cases, and not pairs of them.
    """
    negatives = np.flatnonzero(~truth)[np.argsort(scores[~truth])]
    below, tied = (np.searchsorted(scores[negatives], scores[truth], side) for side in ("left", "right"))
    counted = np.zeros((*weights.shape[:-1], len(negatives) + 1))  # of so many negatives, from the lowest score
    np.cumsum(weights[..., negatives], axis=-1, out=counted[..., 1:])
    positive = weights[..., truth]
    ordered = (counted[..., below] + counted[..., tied]) / 2
    return np.asarray((positive * ordered).sum(axis=-1) / (positive.sum(axis=-1) * counted[..., -1]))
