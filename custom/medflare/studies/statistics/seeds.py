"""What repeated runs say: mean and standard deviation over seeds, confidence intervals, paired comparisons.

Works on results dicts (`results.build_results`) of runs that differ in their seed, and in who is outside where every site is left
out in turn. A seed's value of a metric is its mean over the sites of a role, or one site's value; a seed in which it is undefined
is left out, and `n` says how many remained.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from medflare.core.rng import numpy_generator

Run: TypeAlias = Mapping[str, Any]  # a results dict


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


def estimate(values: Iterable[float | None], *, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Mean, standard deviation and bootstrap interval of the defined values.

    The interval is the percentile bootstrap of the mean (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
    Sec. 13.3) with 9999 resamples; with n equal values it has no width. For a handful of seeds it is too narrow: read it with n.

    Args:
        values: one a run; None and NaN are left out.
        confidence: of the interval, between 0 and 1.
        seed: of the resampling.

    Examples:
        >>> estimate([0.5, None]), estimate([])
        (Estimate(mean=0.5, sd=None, n=1, interval=None), Estimate(mean=None, sd=None, n=0, interval=None))
    """
    defined = _defined(values)
    if len(defined) < 2:
        return Estimate(defined[0] if defined else None, None, len(defined), None)
    from scipy.stats import bootstrap

    generator = numpy_generator(seed, "bootstrap")
    resampled = bootstrap((defined,), np.mean, confidence_level=confidence, method="percentile", rng=generator)
    low, high = resampled.confidence_interval
    return Estimate(float(np.mean(defined)), float(np.std(defined, ddof=1)), len(defined), (float(low), float(high)))


def compare(first: Sequence[float | None], second: Sequence[float | None]) -> Comparison:
    """Compare two methods run by run; place i of both sequences belongs to the same seed (and split).

    Args:
        first: one value a seed; None where it is undefined.
        second: as many.

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
        metric: its name.
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
