"""Two models on the same patients: the difference with an interval over patients, and a paired test.

Over seeds one asks whether training again would give the same difference, over patients whether other patients would. Patients are
drawn anew within their sites (a stratified bootstrap); the trained models stay as they are. A patient whom several seeds tested is one
patient: it is drawn with all its cases.

Where a patient has a value of its own (Dice), estimate, interval and test are of the patients that have one under both models in the same
run: an empty mask has no Dice for a model that finds nothing and 0 for one that does, and the means of the two are then of other patients.
What that hides stands in the tables of each model by itself.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from medflare.core.rng import numpy_generator
from medflare.studies.statistics.weighted import CaseDict, chosen_cases, has_metric, patients_of, weighted_metric
from medflare.tasks.delong import delong

Floats: TypeAlias = NDArray[np.float64]
Run: TypeAlias = Mapping[str, Any]  # a results dict
Interval: TypeAlias = tuple[float, float]

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
        p: two-sided; None where the test is undefined.
        test: what `p` comes from: "Wilcoxon", "DeLong", or "" where there is no test.
        patients: how many both models measured, all sites together.
    """

    difference: float | None = None
    interval: Interval | None = None
    p: float | None = None
    test: str = ""
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
        metric: its name.
        role: of the sites, "inside" or "outside".
        resamples: of the bootstrap.
    """
    sites = _paired(first, second, metric, role)
    if not sites:
        return PatientComparison()
    everybody = [site.difference(metric, np.ones(site.patients)) for site in sites]
    point = float(_nanmean(np.array(everybody), axis=0))
    count = sum(site.patients for site in sites)
    if np.isnan(point):
        return PatientComparison(patients=count)
    p, test = _tested(sites, metric)
    return PatientComparison(point, _interval(sites, metric, resamples), p, test, count)


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


def _tested(sites: Sequence[_SitePairs], metric: str) -> tuple[float | None, str]:
    """p-value and the name of its test: Wilcoxon's where a patient has a value, DeLong's for the area of two classes."""
    from scipy.stats import norm, wilcoxon

    if all("values" in pair.first for site in sites for pair in site.runs):
        differences = np.concatenate([_per_patient(site, metric) for site in sites])
        differences = differences[~np.isnan(differences)]
        if len(differences) < 2:
            return None, "Wilcoxon"
        return (float(wilcoxon(differences).pvalue) if differences.any() else 1.0), "Wilcoxon"
    if metric == "auc_macro" and all(_two_classed(pair) for site in sites for pair in site.runs):
        difference, variance = zip(*(_delong(site) for site in sites), strict=True)
        # Sites are independent. A site's runs share patients: the variance of their mean is at most the mean of their variances.
        mean, error = float(np.mean(difference)), float(np.sqrt(np.sum(variance))) / len(sites)
        if not np.isfinite(mean) or not np.isfinite(error):
            return None, "DeLong"
        if error == 0:
            return (1.0 if mean == 0 else None), "DeLong"
        return float(2 * norm.sf(abs(mean) / error)), "DeLong"
    return None, ""


def _per_patient(site: _SitePairs, metric: str) -> Floats:
    """Every patient's difference, averaged over the runs that tested it."""
    each = np.full((len(site.runs), site.patients), np.nan)
    for row, pair in zip(each, site.runs, strict=True):
        values = [np.array(cases["values"][metric], dtype=float) for cases in (pair.first, pair.second)]
        row[pair.rows] = values[1] - values[0]
    return _nanmean(each, axis=0)


def _two_classed(pair: _Pair) -> bool:
    """Whether DeLong's test holds: two exclusive classes, and an image a patient, since it takes the cases for independent."""
    shape = np.shape(pair.first["probabilities"])
    return np.ndim(pair.first["targets"]) == 1 and shape[1] <= 2 and len(set(pair.first["patients"])) == shape[0]


def _delong(site: _SitePairs) -> tuple[float, float]:
    """Mean difference and mean variance over the site's runs."""
    found = []
    for pair in site.runs:
        one, other = (np.array(cases["probabilities"], dtype=float)[:, -1] for cases in (pair.first, pair.second))
        areas = delong(one, other, np.array(pair.first["targets"]) == 1)
        found.append((areas.second - areas.first, areas.variance))
    difference, variance = _nanmean(np.array(found), axis=0)
    return float(difference), float(variance)


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
