"""What methods choose by themselves at a site: which site's model a selector takes, how far routing moves from where it starts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from medflare.evaluation.record import confusion
from medflare.studies.statistics.seeds import Run, estimate
from medflare.studies.tables.markdown import markdown, spread
from medflare.studies.tables.rows import Groups

BELOW: Final = 0.02  # of the metric: routing that ends this far below its start has done harm
_START: Final = "mixture"  # routing before any step, see IOP-FL's comparisons


def balanced_accuracy(taken: Mapping[str, Mapping[str, int]]) -> float | None:
    """Mean over sites of the share of a site's images that were taken for its own; None where there is no image.

    Args:
        taken: see `evaluation.record.confusion`.

    Examples:
        >>> balanced_accuracy({"A": {"A": 3, "B": 1}, "B": {"A": 2, "B": 2}}), balanced_accuracy({})
        (0.625, None)
    """
    shares = [row.get(site, 0) / sum(row.values()) for site, row in taken.items() if sum(row.values())]
    return float(np.mean(shares)) if shares else None


def selector_table(groups: Groups) -> str:
    """A Markdown table of selectors on test images: their balanced accuracy, and how many images a personal model answered.

    Args:
        groups: label -> results dicts that differ in their seed and in who is outside.

    Returns:
        "" where no row has a selector.
    """
    names = sorted({site for runs in groups.values() for run in runs for site in confusion(run["sites"])})
    lines = [["method", "balanced accuracy", *(f"{name} recognised" for name in names), "answered by a personal model", "runs"]]
    for label, runs in groups.items():
        found = [taken for run in runs if (taken := confusion(run["sites"]))]
        if not found:
            continue
        accuracy = estimate(map(balanced_accuracy, found))
        recognised = [estimate(balanced_accuracy({name: taken[name]}) for taken in found if name in taken) for name in names]
        personal = estimate(_personal_share(run) for run in runs)
        cells = [spread("share", cell.mean, cell.sd) for cell in (accuracy, *recognised, personal)]
        lines.append([label, *cells, str(len(found))])
    return markdown(lines, left=1) if len(lines) > 1 else ""


def routing_table(groups: Groups, metric: str) -> str:
    """A Markdown table of routing against its start at every site that was left out: mean, worst run, harm, and whether events name it.

    Args:
        groups: as for `selector_table`; runs with IOP-FL's comparisons.
        metric: higher is better.

    Returns:
        "" where no row routes.
    """
    lines = [["method", "outside", "start", "end", "worst run", f"more than {BELOW} below", "of these with an event", "runs"]]
    for label, runs in groups.items():
        moves = [move for run in runs for move in _moves(run, metric)]
        for name in (*sorted({move.site for move in moves}), None) if moves else ():
            here = [move for move in moves if name in (move.site, None)]
            harmed = [move for move in here if move.end < move.start - BELOW]
            ends = [f"{np.mean([getattr(move, side) for move in here]):.3f}" for side in ("start", "end")]
            worst = min(move.end - move.start for move in here)
            told = sum(move.reverted for move in harmed)
            lines.append([label, name or "all", *ends, f"{worst:+.3f}", str(len(harmed)), str(told), str(len(here))])
    return markdown(lines, left=2) if len(lines) > 1 else ""


class _Move(NamedTuple):
    """What routing did at one site that was left out, in one run."""

    site: str
    start: float
    end: float
    reverted: bool  # an event says that the gate refused a state


def _moves(run: Run, metric: str) -> Iterator[_Move]:
    for name, site in run["sites"].items():
        start, end = (site["metrics"].get(model, {}).get(metric) for model in (_START, "deployed"))
        if site["role"] == "outside" and start is not None and end is not None:
            yield _Move(name, start, end, any(event["kind"] == "reverted" and event["site"] == name for event in run["events"]))


def _personal_share(run: Run) -> float | None:
    """Of the inside sites' test images, those that a personal model answered."""
    answered: Sequence[Mapping[str, Any]] = [run["sites"][name]["reports"]["deployed"] for name in confusion(run["sites"])]
    counts = [{name: count for name, count in of.items() if name != "selector"} for of in answered]
    every = sum(sum(of.values()) for of in counts)
    return 1 - sum(of.get("global", 0) for of in counts) / every if every else None
