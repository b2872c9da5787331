"""A study's figures as SVG files: learning curves, patients by site, how alike updates are, how routing mixed.

They are drawn from what the runs keep, so they can be made again without training. A file is read on light and on dark pages: what is
drawn in the page's text colour elsewhere is grey here.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from medflare.evaluation.figures import COLOURS, INK, as_svg, look_of, quieten
from medflare.evaluation.presentation import metric_label
from medflare.studies.references import CONSTANT, CURVES, SCORES, SIMILARITY
from medflare.studies.statistics import Run
from medflare.studies.tables.rows import Groups, curve_of, task_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GREY: Final = "#808080"
_BOXES: Final = ("global", "deployed")  # models that a row of box plots shows, those with the same scores once


def study_figures(groups: Groups) -> dict[str, str]:
    """Name -> SVG file, of those that the runs have the numbers for.

    Args:
        groups: label -> results dicts that differ in their seed and in who is outside.

    Raises:
        StateError: no run got as far as its task.
    """
    metric = task_of(groups)["metric"]
    drawn = {
        "curves": learning_curves(groups, metric),
        "patients": patients_by_site(groups, metric),
        "similarity": similarity_of_updates(groups),
        "routing": routing_coefficients(groups),
    }
    return {name: svg.replace("currentColor", _GREY) for name, svg in drawn.items() if svg}


def learning_curves(groups: Groups, metric: str) -> str | None:
    """The validation metric over the rounds, a line for every row and model: its mean over sites and runs; None without curves."""
    models = {label: dict.fromkeys(model for run in runs for model in run.get(CURVES, {})) for label, runs in groups.items()}
    curves = {
        f"{label}, {model}" if len(models[label]) > 1 else label: curve_of(runs, model)
        for label, runs in groups.items()
        for model in ("global", "personal")
        if model in models[label] and label != CONSTANT
    }
    curves = {name: curve for name, curve in curves.items() if len(curve) > 1}
    if not curves:
        return None

    def draw(figure: "Figure") -> None:
        from matplotlib.ticker import MaxNLocator

        axis = figure.subplots()
        for place, (name, curve) in enumerate(curves.items()):
            axis.plot(list(curve), list(curve.values()), label=name, linewidth=1.6, markersize=0, **look_of(place))
        axis.set_xlabel("rounds of training")
        axis.set_ylabel(f"validation {metric_label(metric)}")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        quieten(axis)
        axis.legend(frameon=False, loc="lower right")

    return as_svg(draw, width=7.2, height=3.6)


def patients_by_site(groups: Groups, metric: str) -> str | None:
    """Box plots of single patients' test scores, a group for every site, a box for every row but the constant; None where nobody kept them.

    A box spans the quartiles, its line is the median, its whiskers reach 1.5 times the quartiles' distance. A patient whom several seeds
    tested is in it several times.

    Args:
        metric: one that single patients have.
    """
    boxes: dict[str, dict[str, list[float]]] = {}  # row -> site -> values
    for label, runs in groups.items():
        of = {model: found for model in _BOXES if label != CONSTANT and (found := _patients(runs, model, metric))}
        if len(of) == len(_BOXES) and of["global"] == of["deployed"]:
            boxes[label] = of["global"]
        else:
            boxes |= {f"{label}, {model}": found for model, found in of.items()}
    if not boxes:
        return None
    sites = sorted({site for found in boxes.values() for site in found})

    def draw(figure: "Figure") -> None:
        axis, width, ink = figure.subplots(), 0.8 / len(boxes), {"color": INK}
        for place, (name, found) in enumerate(boxes.items()):
            colour = COLOURS[place % len(COLOURS)]
            here = [site for site in sites if site in found]
            axis.boxplot(
                [found[site] for site in here],
                positions=[sites.index(site) + (place - (len(boxes) - 1) / 2) * width for site in here],
                widths=0.8 * width,
                patch_artist=True,
                boxprops={"facecolor": colour, "edgecolor": INK, "alpha": 0.7},
                medianprops=ink,
                whiskerprops=ink,
                capprops=ink,
                flierprops={"marker": ".", "markersize": 3, "markeredgecolor": INK, "alpha": 0.5},
            )
            axis.plot([], [], label=name, color=colour, linewidth=6, alpha=0.7)
        axis.set_xticks(range(len(sites)), sites)
        axis.set_ylabel(f"test {metric_label(metric)} of a patient")
        quieten(axis)
        figure.legend(loc="outside lower center", ncols=3, frameon=False)

    return as_svg(draw, width=max(6.0, 0.35 * len(boxes) * len(sites)), height=3.8)


def similarity_of_updates(groups: Groups) -> str | None:
    """Cosines of the sites' updates, a panel for every row, mean over rounds and runs; None where no row has two sites that sent some.

    What a site sends may be more than a model; shown is the entry "model", or else the first.
    """
    panels: dict[str, dict[str, dict[str, list[float]]]] = {}
    for label, runs in groups.items():
        for found in (run[SIMILARITY] for run in runs if run.get(SIMILARITY)):
            for site, row in found.get("model", next(iter(found.values()))).items():
                for other, value in row.items():
                    panels.setdefault(label, {}).setdefault(site, {}).setdefault(other, []).append(value)
    if not panels:
        return None
    sites = sorted({site for found in panels.values() for site in found})

    def draw(figure: "Figure") -> None:
        axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)  # the hospitals' names once
        for axis, (label, found) in zip(axes.flat, panels.items(), strict=True):
            means = np.array([[np.mean(found.get(site, {}).get(other, [np.nan])) for other in sites] for site in sites])
            _heatmap(axis, means, sites, sites)
            axis.set_title(label, fontsize=9, loc="left")

    return as_svg(draw, width=max(4.0, 2.6 * len(panels)), height=2.8)


def routing_coefficients(groups: Groups) -> str | None:
    """How routing mixed the networks at each site that was left out, layer by layer, mean over seeds; None where nothing was routed."""
    panels: dict[str, list[NDArray[np.float64]]] = {}
    networks: dict[str, list[str]] = {}  # in the order of the coefficients: the inside sites' by their names, then the global one
    for run in (run for runs in groups.values() for run in runs):
        inside = sorted(name for name, site in run["sites"].items() if site["role"] == "inside")
        for name, site in run["sites"].items():
            coefficients = site.get("reports", {}).get("deployed", {}).get("coefficients")
            if isinstance(coefficients, Mapping) and coefficients:
                panels.setdefault(name, []).append(np.array(list(coefficients.values()), dtype=float))
                networks[name] = [*inside, "global"]
    if not panels:
        return None

    def draw(figure: "Figure") -> None:
        for axis, (name, found) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True):
            mean = np.mean(found, axis=0)
            even = 1 / mean.shape[1]
            reach = float(np.abs(mean - even).max()) or even
            shown = axis.imshow(mean, cmap="RdBu_r", vmin=even - reach, vmax=even + reach, aspect="auto")
            figure.colorbar(shown, ax=axis)
            axis.set_title(f"{name} outside", fontsize=10, loc="left")
            axis.set_xticks(range(mean.shape[1]), networks[name], rotation=30, ha="right")
            axis.set_ylabel("layer")

    return as_svg(draw, width=max(4.0, 3.0 * len(panels)), height=3.4)


def _heatmap(axis: "Axes", shares: NDArray[np.float64], rows: Sequence[str], columns: Sequence[str]) -> None:
    """Numbers of which those from 0 to 1 differ in colour, each written into its cell."""
    axis.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="none")  # the cells as they are: a smaller file
    axis.set_xticks(range(len(columns)), columns, rotation=30, ha="right")
    axis.set_yticks(range(len(rows)), rows)
    for (row, column), share in np.ndenumerate(shares):
        axis.text(column, row, f"{share:.2f}", ha="center", va="center", fontsize=8, color="white" if share > 0.5 else "black")


def _patients(runs: Sequence[Run], model: str, metric: str) -> dict[str, list[float]]:
    """Site -> values of all its patients in all runs; a site that was left out is one of its own."""
    found: dict[str, list[float]] = {}
    for run in runs:
        scores: Mapping[str, Any] = run.get(SCORES, {})
        for name, of in scores.items():
            values = (of.get(model) or {}).get("values", {}).get(metric, [])
            place = name if run["sites"][name]["role"] == "inside" else f"{name} (outside)"
            found.setdefault(place, []).extend(value for value in values if value is not None)
    return {place: values for place, values in found.items() if values}
