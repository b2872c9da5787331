"""What repeated runs say: mean and standard deviation over seeds, confidence intervals, paired comparisons, tables.

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
    """One value a seed, in the order of the seeds: the mean over the sites of `role`, or `site`'s own; None where it is undefined.

    A seed has several runs where each site was left out in turn: a site's values in that role are averaged over them first.

    Args:
        model: "NAME/*" stands for the mean over all models "NAME/...", for example IOP-FL's "personal/HRF" and "personal/LESAV".
    """
    seeds = sorted({run["seed"] for run in results})
    return [_value([run for run in results if run["seed"] == seed], model, metric, role, site) for seed in seeds]


def markdown_table(groups: Mapping[str, Sequence[Run]], metric: str, models: Sequence[str] | None = None) -> str:
    """A Markdown table of one metric: a row for each group and model, a column for each site and each role's mean.

    Cells hold "mean ± standard deviation" over the group's seeds; the best mean of a column is bold. Models of a group with
    the same numbers everywhere (FedAvg delivers one model for all purposes) share a row.

    Args:
        groups: label, for example "FedSM" or "single-site" -> results dicts that differ in their seed and in who is outside.
        models: None for all that the runs measured.
    """
    every = [run for runs in groups.values() for run in runs]
    columns = _places(every)
    body: dict[tuple[str, str], list[Estimate]] = {}
    for label, runs in groups.items():
        for model in _models(runs) if models is None else models:
            cells = [estimate(values_of(runs, model, metric, role=role, site=site)) for role, site in columns]
            if not any(cell.n for cell in cells):
                continue
            twin = next((key for key, known in body.items() if key[0] == label and known == cells), None)
            if twin is not None:
                del body[twin]
            body[label, f"{twin[1]}, {model}" if twin else model] = cells
    best = [best_value(metric, (cells[place].mean for cells in body.values())) for place in range(len(columns))]
    lines = [["method", "model", *(_heading(role, site) for role, site in columns), "runs"]]
    for (label, model), cells in body.items():
        shown = [_cell(metric, cell, bold=cell.mean is not None and cell.mean == top) for cell, top in zip(cells, best, strict=True)]
        lines.append([label, model, *shown, str(len(groups[label]))])
    return _markdown(lines, left=2)


def comparison_table(groups: Mapping[str, Sequence[Run]], metric: str) -> str:
    """A Markdown table of paired differences: every model of every group against what the first group deploys, seed by seed."""
    (first, reference), *_ = groups.items()
    rows: dict[tuple[str, ...], list[str]] = {}  # what a line says beside its models -> the models it says it of
    for label, runs in groups.items():
        for model in _models(runs):
            for role in dict.fromkeys(role for role, _ in _places(runs)):
                pair = (values_of(reference, "deployed", metric, role=role), values_of(runs, model, metric, role=role))
                if len(pair[0]) != len(pair[1]) or (label == first and pair[0] == pair[1]):
                    continue
                found = compare(*pair)
                if found.difference is not None:
                    p_values = (_p_value(found.t_test), _p_value(found.wilcoxon))
                    rows.setdefault((label, role, f"{found.difference:+.3f}", *p_values, str(found.n)), []).append(model)
    lines = [["method", "model", "sites", f"difference to {first}", "paired t-test, p", "Wilcoxon, p", "seeds"]]
    lines += [[label, ", ".join(models), *cells] for (label, *cells), models in rows.items()]
    return _markdown(lines, left=3)


def _value(runs: Sequence[Run], model: str, metric: str, role: str, site: str | None) -> float | None:
    names = sorted({name for run in runs for name in run["sites"]}) if site is None else [site]
    return _mean(_mean(_measured(run, name, model, metric, role) for run in runs) for name in names)


def _measured(run: Run, site: str, model: str, metric: str, role: str) -> float | None:
    place = run["sites"].get(site)
    if place is None or place["role"] != role:
        return None
    names = [name for name in place["metrics"] if name.startswith(model[:-1])] if model.endswith("/*") else [model]
    return _mean((place["metrics"].get(name) or {}).get(metric) for name in names)


def _models(runs: Sequence[Run]) -> list[str]:
    """Names of the models that the runs measured; those that differ in a site's name alone as one."""
    found = [model for run in runs for site in run["sites"].values() for model in site["metrics"]]
    return list(dict.fromkeys([*MODELS, *(model if "/" not in model else f"{model.partition('/')[0]}/*" for model in found)]))


def _heading(role: str, site: str | None) -> str:
    if site is None:
        return f"mean {role}"
    return site if role == "inside" else f"{site} ({role})"


def _cell(metric: str, cell: Estimate, *, bold: bool) -> str:
    if cell.mean is None:
        return UNDEFINED
    text = format_metric(metric, cell.mean) + (f" ± {format_metric(metric, cell.sd)}" if cell.sd is not None else "")
    return f"**{text}**" if bold else text


def _p_value(p: float | None) -> str:
    return UNDEFINED if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _places(runs: Sequence[Run]) -> list[tuple[str, str | None]]:
    """(role, site) of every site in order of their names and then (role, None), for inside and outside sites."""
    sites = sorted({(site["role"], name) for run in runs for name, site in run["sites"].items()})
    places: list[tuple[str, str | None]] = []
    for role in dict.fromkeys(role for role, _ in sites):
        places += [*(place for place in sites if place[0] == role), (role, None)]
    return places


def _markdown(lines: Sequence[Sequence[str]], left: int) -> str:
    """Lines as a Markdown table; the first holds the headings, and all columns but the `left` first ones are set flush right."""
    rule = ["---" if column < left else "---:" for column in range(len(lines[0]))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]]) + "\n"


def _mean(values: Iterable[float | None]) -> float | None:
    defined = _defined(values)
    return float(np.mean(defined)) if defined else None


def _defined(values: Iterable[float | None]) -> list[float]:
    return [float(value) for value in values if _is_defined(value)]


def _is_defined(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
