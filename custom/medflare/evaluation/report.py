"""report.html: one page, self-contained, that says what a run was, how it ended and what came out."""

import base64
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from medflare.core.packages import installed
from medflare.evaluation.classes import class_tables
from medflare.evaluation.doubts import doubts
from medflare.evaluation.figures import roc_curves, training_curves, with_own_ids
from medflare.evaluation.names import ROLES, RUNNING, SPLITS
from medflare.evaluation.presentation import (
    format_bytes,
    format_metric,
    format_seconds,
    format_setting,
    is_best,
    lower_is_better,
    metric_label,
    metric_names,
    model_columns,
    ordered_sites,
    privacy_costs,
    selector_line,
    synthetic_source,
)

if TYPE_CHECKING:
    from jinja2 import Template


_MOST_VOTES: Final = 200  # candidates of an election that are shown; long runs of many sites would make the page too large to open


def render_report(
    results: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]] = (),
    pictures: Mapping[str, bytes] | None = None,
) -> str:
    """The page as HTML text.

    Args:
        results: a results dict (`results.build_results`).
        history: steps as `results.read_rounds` gives them.
        pictures: title -> PNG file content.
    """
    drawable = installed("matplotlib")
    page = template("report.html").render(
        results=results,
        metrics=metric_names(results),
        columns=model_columns(results),
        sites=ordered_sites(results),
        means=[role for role in ROLES if any(site["role"] == role for site in results["sites"].values())],
        splits=SPLITS,
        synthetic=synthetic_source(results),
        doubts=doubts(results["events"]),
        tiles=_tiles(results),
        updated=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC") if results["status"] == RUNNING else "",
        reached=max((step["round"] for step in history), default=-1) + 1,
        curves=training_curves(results, history) if drawable else None,
        drawable=drawable,
        model_selection=_model_selection(results),
        selector=_selector(results),
        reports=_reports(results),
        tables={title: _with_columns(rows) for title, rows in results.get("tables", {}).items()},
        privacy=privacy_costs(results),
        pictures={title: base64.b64encode(content).decode() for title, content in (pictures or {}).items()},
        classes=[(tables, roc_curves(tables.points) if drawable else None) for tables in class_tables(results)],
        costs=_costs(results),
        seconds={stage: format_seconds(value) for stage, value in results["seconds"].items() if value is not None},
        traffic=_flattened(results["traffic"]),
    )
    return with_own_ids(page)


@cache
def template(name: str) -> "Template":
    """A page of `templates/`: escaped, and an error where it names what is not there."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("medflare.evaluation"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(label=metric_label, setting=format_setting)
    environment.globals.update(zip=zip, shown=format_metric, best=is_best, lower_is_better=lower_is_better)
    return environment.get_template(name)


def _tiles(results: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(heading, number, explanation) of the few numbers that a reader looks for first."""
    tiles = []
    for metric in metric_names(results)[:1]:
        for role in ROLES:
            values = [site["metrics"]["deployed"][metric] for site in results["sites"].values() if site["role"] == role]
            value, count, defined = results["mean"][role]["deployed"][metric], len(values), sum(found is not None for found in values)
            if value is not None:
                some = f"{defined} of " if defined < count else ""
                where = f"mean over {some}{count} {role} site{'s' if count > 1 else ''}, deployed model"
                tiles.append((f"{metric_label(metric)}, {role}", format_metric(metric, value), where))
    for model, selection in results.get("model_selection", {}).items():
        if selection["round"] is not None:
            count = len({site for candidate in selection["candidates"] for site in candidate["votes"]})
            where = f"of training, {model} model, by the validation of {count} site{'s' if count > 1 else ''}"
            tiles.append(("Selected round", f"{selection['round']} of {results['rounds']}", where))
    traffic = results["traffic"]
    moved = f"{format_bytes(traffic['down_bytes'])} to the sites, {format_bytes(traffic['up_bytes'])} from them"
    tiles.append(("Traffic", format_bytes(traffic["down_bytes"] + traffic["up_bytes"]), moved))
    if results["seconds"].get("total") is not None:
        tiles.append(("Time", format_seconds(results["seconds"]["total"]), f"{results['rounds']} rounds, start to finish"))
    return tiles


def _model_selection(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What the page shows of every election.

    Returns:
        Model -> {"round", "rule", "candidates": the latest and the delivered one, "sites", "favourites": site -> the first round with its
        highest vote, "cut": whether there were more}.
    """
    shown: dict[str, dict[str, Any]] = {}
    for model, election in results.get("model_selection", {}).items():
        sites = sorted({site for candidate in election["candidates"] for site in candidate["votes"]})
        heard = {site: [candidate for candidate in election["candidates"] if site in candidate["votes"]] for site in sites}
        favourites = {site: max(own, key=lambda found: found["votes"][site])["round"] for site, own in heard.items()}
        candidates = election["candidates"]
        delivered = [found for found in candidates[:-_MOST_VOTES] if found["round"] == election["round"]]
        shown[model] = {**election, "candidates": [*delivered, *candidates[-_MOST_VOTES:]], "sites": sites, "favourites": favourites}
        shown[model]["cut"] = len(candidates) > _MOST_VOTES
    return shown


def _selector(results: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of how the deployed model selects: its part of the results, "line" and "classes"; empty without a selector."""
    classes = [name for name, site in results["sites"].items() if site["role"] == "inside"]
    return {**results["selector"], "line": selector_line(results), "classes": classes} if "selector" in results else {}


def _costs(results: Mapping[str, Any]) -> dict[str, tuple[str, str, str]]:
    """Site -> what it was sent, what it sent, and how long it was at work, in words."""
    costs = results.get("costs", {})
    known = {site: costs[site] for site in ordered_sites(results) if site in costs}
    return {
        site: (format_bytes(cost["down_bytes"]), format_bytes(cost["up_bytes"]), format_seconds(cost["seconds"]))
        for site, cost in known.items()
    }


def _reports(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Model -> {"columns", "rows": site -> values}: what models say of their own work, one table for each kind of model."""
    rows: dict[str, dict[str, Any]] = {}
    for name, site in ordered_sites(results).items():
        for model, report in site.get("reports", {}).items():
            rows.setdefault(model, {})[name] = _flattened(report)
    return {model: _with_columns(found) for model, found in rows.items()}


def _with_columns(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """{"columns", "rows": site -> column -> value} of rows that need not have all columns."""
    return {"columns": list(dict.fromkeys(column for row in rows.values() for column in row)), "rows": rows}


def _flattened(content: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by spaces; lists as text."""
    if not isinstance(content, Mapping):
        shown = f"{content:.4g}" if isinstance(content, float) else content
        return {prefix or "value": ", ".join(map(str, shown)) if isinstance(shown, list) else shown}
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat.update(_flattened(value, f"{prefix} {key}".strip()))
    return flat
