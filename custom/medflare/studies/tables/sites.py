"""A table of one metric: models down, sites across."""

from collections.abc import Sequence

from medflare.evaluation.presentation import best_value
from medflare.studies.tables.markdown import markdown, spread
from medflare.studies.tables.rows import Groups, places_of, rows_of, selection


def sites_table(groups: Groups, metric: str, models: Sequence[str] | None = None) -> str:
    """A Markdown table of one metric: a row for each group and model, a column for each site and each role's mean.

    Cells hold "mean ± standard deviation" over the group's seeds; the best mean of a column that could be delivered is bold. Models of
    a group with the same numbers everywhere share a row.

    Args:
        groups: label, for example "FedSM" or "single-site" -> results dicts that differ in their seed and in who is outside.
        metric: its name.
        models: None for all that the runs measured.
    """
    places = places_of(run for runs in groups.values() for run in runs)
    rows = rows_of(groups, metric, places, models)
    best = [best_value(metric, (row.cells[place].mean for row in rows if row.reachable)) for place in range(len(places))]
    lines = [["method", "model", "selection", *(_heading(role, site) for role, site in places), "runs"]]
    for row in rows:
        cells = []
        for cell, top in zip(row.cells, best, strict=True):
            text = spread(metric, cell.mean, cell.sd)
            cells.append(f"**{text}**" if row.reachable and cell.mean is not None and cell.mean == top else text)
        lines.append([row.label, row.shown, selection(row), *cells, str(len(row.runs))])
    return markdown(lines, left=3)


def _heading(role: str, site: str | None) -> str:
    if site is None:
        return f"mean {role}"
    return site if role == "inside" else f"{site} ({role})"
