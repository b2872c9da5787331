"""A study's figures as SVG files: learning curves, how routing mixed.

They are drawn from what the runs keep, so they can be made again without training. A file is read on light and on dark pages: what is
drawn in the page's text colour elsewhere is grey here.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from medflare.evaluation.figures import as_svg, look_of, quieten
from medflare.evaluation.presentation import metric_label
from medflare.studies.references import CONSTANT, CURVES
from medflare.studies.tables.rows import Groups, curve_of, task_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GREY: Final = "#808080"


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
