"""Figures of a study as SVG files: learning curves and routing coefficients. The text is grey, for light and dark pages."""

from typing import TYPE_CHECKING, Final

import numpy as np

from medflare.evaluation.figures import Panel, as_svg, line_panels
from medflare.evaluation.presentation import metric_label
from medflare.studies.references import CONSTANT, CURVES
from medflare.studies.statistics import Groups
from medflare.studies.tables import curve_of, task_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GREY: Final = "#808080"


def study_figures(groups: Groups) -> dict[str, str]:
    """Name -> SVG file, of those that the runs have the numbers for.

    Raises:
        StateError: no run has a task.
    """
    figures = {"curves": learning_curves(groups, task_of(groups)["metric"]), "routing": routing_coefficients(groups)}
    return {name: svg.replace("currentColor", _GREY) for name, svg in figures.items() if svg}


def learning_curves(groups: Groups, metric: str) -> str | None:
    """The validation metric over the rounds, mean over sites and runs, a line for every row and model; None without curves."""
    lines = {}
    for label, runs in groups.items():
        models = dict.fromkeys(model for run in runs for model in run.get(CURVES, {}) if label != CONSTANT)
        for model in models.keys() & {"global", "personal"}:
            curve = curve_of(runs, model)
            if len(curve) > 1:
                lines[f"{label}, {model}" if len(models) > 1 else label] = list(curve.items())
    panels = [Panel("", lines, "rounds of training", f"validation {metric_label(metric)}")] if lines else []
    return line_panels(panels, "curves")


def routing_coefficients(groups: Groups) -> str | None:
    """The routing coefficients of every network and layer at each left-out site, mean over runs; None if nothing was routed."""
    coefficients: dict[str, list[list[list[float]]]] = {}  # site -> run -> layer -> network
    networks: dict[str, list[str]] = {}  # the inside sites by name, then the global network
    for run in (run for runs in groups.values() for run in runs):
        inside = sorted(name for name, site in run["sites"].items() if site["role"] == "inside")
        for name, site in run["sites"].items():
            by_layer = (site.get("reports", {}).get("deployed") or {}).get("coefficients")
            if by_layer:
                coefficients.setdefault(name, []).append(list(by_layer.values()))
                networks[name] = [*inside, "global"]
    if not coefficients:
        return None

    def draw(figure: "Figure") -> None:
        figure.set_layout_engine("constrained")
        axes = figure.subplots(1, len(coefficients), squeeze=False).flat
        for axis, (name, of_runs) in zip(axes, coefficients.items(), strict=True):
            mean = np.mean(of_runs, axis=0)
            even = 1 / mean.shape[1]
            reach = float(np.abs(mean - even).max()) or even
            image = axis.imshow(mean, cmap="RdBu_r", vmin=even - reach, vmax=even + reach, aspect="auto")
            figure.colorbar(image, ax=axis)
            axis.set_title(f"{name} outside", fontsize=10, loc="left")
            axis.set_xticks(range(mean.shape[1]), networks[name], rotation=30, ha="right")
            axis.set_ylabel("layer")

    return as_svg(draw, max(4.0, 3.0 * len(coefficients)), 3.4, "routing")
