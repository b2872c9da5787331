"""What repeated runs say: mean and standard deviation over seeds, confidence intervals, paired comparisons, tables.

Works on results dicts (`results.build_results`) of runs that differ in their seed alone. A run's value of a metric is its mean
over the sites of a role, or one site's value; a run in which it is undefined is left out, and `n` says how many remained.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from medflare.core.rng import numpy_generator
from medflare.evaluation.presentation import UNDEFINED, best_value, format_metric
from medflare.evaluation.results import MODELS

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
        t_test, wilcoxon: two-sided p-values (paired t-test; Wilcoxon signed-rank); None where the test is
            undefined: below two pairs, or, for the t-test, where all differences are equal.
        n: seeds with both values.
    """

    difference: float | None
    t_test: float | None
    wilcoxon: float | None
    n: int


@dataclass(frozen=True)
class Row:
    """One estimate of a summary; `site` is None for the mean over the sites of the role."""

    method: str
    role: str
    site: str | None
    model: str
    metric: str
    estimate: Estimate


def estimate(values: Iterable[float | None], *, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Mean, standard deviation and bootstrap interval of the defined values.

    The interval is the percentile bootstrap of the mean (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
    Sec. 13.3) with 9999 resamples; with n equal values it has no width. For a handful of seeds it is too narrow: read it with n.

    Args:
        values: one a run; None and NaN are left out.
        seed: of the resampling.
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

    Raises:
        ValueError: the sequences differ in length.
    """
    if len(first) != len(second):
        raise ValueError(f"a paired comparison needs pairs, got {len(first)} and {len(second)} values")
    differences = np.array([b - a for a, b in zip(first, second, strict=True) if _is_defined(a) and _is_defined(b)])
    if len(differences) < 2:
        return Comparison(float(differences[0]) if len(differences) else None, None, None, len(differences))
    from scipy.stats import ttest_1samp, wilcoxon

    equal = np.ptp(differences) <= 1e-12 * np.abs(differences).max()  # no spread to test against
    t_test = None if equal else float(ttest_1samp(differences, 0.0).pvalue)
    signed_rank = float(wilcoxon(differences).pvalue) if differences.any() else 1.0  # equal pairs favour neither side
    return Comparison(float(differences.mean()), t_test, signed_rank, len(differences))


def values_of(results: Sequence[Run], model: str, metric: str, *, role: str = "inside", site: str | None = None) -> list[float | None]:
    """One value a run: the mean over the sites of `role`, or `site`'s own; None where it is undefined or the site has another role."""
    if site is None:
        return [run["mean"][role].get(model, {}).get(metric) for run in results]
    found = [run["sites"].get(site, {}) for run in results]
    return [place["metrics"].get(model, {}).get(metric) if place.get("role") == role else None for place in found]


def summarise(results: Sequence[Run], *, confidence: float = 0.95) -> list[Row]:
    """Estimates over seeds of every model and metric: the mean over each role's sites first, then every site.

    Runs are grouped by method; what no run defines has no row.
    """
    rows = []
    for method in dict.fromkeys(run["method"] for run in results):
        runs = [run for run in results if run["method"] == method]
        for role, site in _places(runs):
            for model, metric in _measured(runs):
                found = estimate(values_of(runs, model, metric, role=role, site=site), confidence=confidence)
                if found.n:
                    rows.append(Row(method, role, site, model, metric, found))
    return rows


def markdown_table(groups: Mapping[str, Sequence[Run]], metric: str, models: Sequence[str] = MODELS) -> str:
    """A Markdown table of one metric: a row for each group and model, a column for each site and each role's mean.

    Cells hold "mean ± standard deviation" over the group's runs; the best mean of a column is bold. Models of a group with
    the same numbers everywhere (FedAvg delivers one model for all purposes) share a row.

    Args:
        groups: label, for example "FedSM" or "single-site" -> results dicts that differ in their seed alone.
    """
    every = [run for runs in groups.values() for run in runs]
    columns = sorted(_places(every), key=lambda place: (place[0] != "inside", place[1] is None, place[1] or ""))
    body: dict[tuple[str, str], list[Estimate]] = {}
    for label, runs in groups.items():
        for model in models:
            cells = [estimate(values_of(runs, model, metric, role=role, site=site)) for role, site in columns]
            if not any(cell.n for cell in cells):
                continue
            twin = next((key for key, known in body.items() if key[0] == label and known == cells), None)
            if twin is not None:
                del body[twin]
            body[label, f"{twin[1]}, {model}" if twin else model] = cells
    best = [best_value(metric, (cells[place].mean for cells in body.values())) for place in range(len(columns))]
    headings = ["method", "model", *(_heading(role, site) for role, site in columns), "runs"]
    lines = [headings, ["---", "---", *["---:"] * (len(columns) + 1)]]
    for (label, model), cells in body.items():
        shown = [_cell(metric, cell, bold=cell.mean is not None and cell.mean == top) for cell, top in zip(cells, best, strict=True)]
        lines.append([label, model, *shown, str(len(groups[label]))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _heading(role: str, site: str | None) -> str:
    if site is None:
        return f"mean {role}"
    return site if role == "inside" else f"{site} ({role})"


def _cell(metric: str, cell: Estimate, *, bold: bool) -> str:
    if cell.mean is None:
        return UNDEFINED
    text = format_metric(metric, cell.mean) + (f" ± {format_metric(metric, cell.sd)}" if cell.sd is not None else "")
    return f"**{text}**" if bold else text


def _places(runs: Sequence[Run]) -> list[tuple[str, str | None]]:
    """(role, None) for the mean of each role that has sites, and (role, site) for every site."""
    sites = sorted({(site["role"], name) for run in runs for name, site in run["sites"].items()})
    return [*dict.fromkeys((role, None) for role, _ in sites), *sites]


def _measured(runs: Sequence[Run]) -> list[tuple[str, str]]:
    sites = [site["metrics"] for run in runs for site in run["sites"].values()]
    return list(dict.fromkeys((model, metric) for models in sites for model, metrics in models.items() for metric in metrics))


def _defined(values: Iterable[float | None]) -> list[float]:
    return [float(value) for value in values if _is_defined(value)]


def _is_defined(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
