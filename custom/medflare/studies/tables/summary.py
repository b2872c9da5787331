"""What a mean over sites hides: the worst site, all images as one, sites that lose by taking part, rows that have not learnt."""

from collections.abc import Sequence

import numpy as np

from medflare.data.sites.constant import NEAR
from medflare.evaluation.presentation import UNDEFINED, format_metric, lower_is_better
from medflare.studies.constant import CONSTANT
from medflare.studies.recorded import SCORES
from medflare.studies.references import SINGLE_SITE
from medflare.studies.statistics.seeds import Run, estimate, values_of
from medflare.studies.statistics.weighted import has_metric, joined_cases, weighted_metric
from medflare.studies.tables.curves import curve_of, is_rising
from medflare.studies.tables.markdown import markdown, spread
from medflare.studies.tables.rows import Groups, Row, places_of, rows_of, selection


def summary_table(groups: Groups, metric: str) -> str:
    """A Markdown table of one metric: a row for each group, model and role of sites.

    Columns: the mean over sites; the worst site by its mean over seeds; "all images": the metric of all test images of these sites as
    if of one hospital, from the scores of single patients; how many sites are below training alone by their mean over seeds; and what
    warns of a row: "still rising" (`curves.is_rising`), "constant answer at ..." where at least half of the seeds are within 0.01.

    Args:
        groups: label -> results dicts that differ in their seed and in who is outside.
        metric: its name.
    """
    alone, constant = (_of_method(groups, method) for method in (SINGLE_SITE, CONSTANT))
    places = places_of(run for runs in groups.values() for run in runs)
    lines = [["method", "model", "selection", "sites", "mean", "worst site", "all images", "below training alone", "warnings"]]
    for row in rows_of(groups, metric, places):
        means = {place: cell.mean for place, cell in zip(places, row.cells, strict=True)}
        for role in dict.fromkeys(role for role, _ in places):
            sites = {site: value for (of, site), value in means.items() if of == role and site is not None and value is not None}
            if not sites:
                continue
            cell = row.cells[places.index((role, None))]
            worst = sorted(sites, key=lambda site: sites[site])[-1 if lower_is_better(metric) else 0]
            pooled = estimate(pooled_values(row.runs, row.models[0], metric, role=role))
            lost = sites_below(row, alone, metric, list(sites)) if role == "inside" and alone and row.runs is not alone else None
            numbers = [
                spread(metric, cell.mean, cell.sd),
                f"{format_metric(metric, sites[worst])} ({worst})",
                spread(metric, pooled.mean, pooled.sd),
                UNDEFINED if lost is None else f"{len(lost)} of {len(sites)}" + (f" ({', '.join(lost)})" if lost else ""),
            ]
            warnings = _warnings(row, metric, role, list(sites), constant)
            lines.append([row.label, row.shown, selection(row), role, *numbers, "; ".join(warnings) or UNDEFINED])
    return markdown(lines, left=4)


def pooled_values(runs: Sequence[Run], model: str, metric: str, *, role: str = "inside") -> list[float | None]:
    """One value a run: the metric of all test images of the role's sites together; None where the scores of single patients lack.

    Args:
        runs: of one group.
        model: its name.
        metric: its name.
        role: of the sites.
    """
    found: list[float | None] = []
    for run in runs:
        names = [name for name, site in sorted(run["sites"].items()) if site["role"] == role]
        parts = [run.get(SCORES, {}).get(name, {}).get(model) or {} for name in names]
        if not parts or not all(part and has_metric(part, metric) for part in parts):
            found.append(None)
            continue
        together = joined_cases(parts, metric)
        found.append(float(weighted_metric(together, metric, np.ones(len(together["patients"])))))
    return found


def sites_below(row: Row, alone: Sequence[Run], metric: str, sites: Sequence[str]) -> list[str]:
    """Sites where the row is worse than training alone, in the mean over the seeds that both have.

    Args:
        row: its first model counts.
        alone: the runs of every site alone.
        metric: its name.
        sites: inside sites.
    """
    sign = -1 if lower_is_better(metric) else 1

    def gains(site: str) -> list[float]:
        return [sign * (own - other) for other, own in _pairs(alone, "deployed", row.runs, row.models[0], metric, "inside", site)]

    return [site for site in sites if (found := gains(site)) and np.mean(found) < 0]


def _warnings(row: Row, metric: str, role: str, sites: Sequence[str], constant: Sequence[Run]) -> list[str]:
    warnings = ["still rising"] if is_rising(curve_of(row.runs, row.models[0])) else []
    if not constant or row.runs is constant or lower_is_better(metric):
        return warnings
    flat = [site for site in sites if _is_constant(row, metric, role, site, constant)]
    return [*warnings, f"constant answer at {', '.join(flat)}"] if flat else warnings


def _is_constant(row: Row, metric: str, role: str, site: str, constant: Sequence[Run]) -> bool:
    """Whether at least half of the seeds are near to the constant answer of all sites, or of the site's own."""
    of_all = _pairs(constant, "global", row.runs, row.models[0], metric, role, site)
    own = _pairs(constant, "personal", row.runs, row.models[0], metric, role, site)
    return any(pairs and 2 * sum(abs(one - two) <= NEAR for one, two in pairs) >= len(pairs) for pairs in (of_all, own))


def _pairs(
    first: Sequence[Run], model: str, second: Sequence[Run], other: str, metric: str, role: str, site: str
) -> list[tuple[float, float]]:
    """Values of both models at one site in the seeds that both have."""
    seeds = {run["seed"] for run in first} & {run["seed"] for run in second}
    values = [
        values_of([run for run in runs if run["seed"] in seeds], of, metric, role=role, site=site)
        for runs, of in ((first, model), (second, other))
    ]
    return [(one, two) for one, two in zip(*values, strict=True) if one is not None and two is not None]


def _of_method(groups: Groups, method: str) -> Sequence[Run]:
    """The runs of the first group that has this method; none where there is no such group."""
    return next((runs for runs in groups.values() if runs and runs[0]["method"] == method), ())
