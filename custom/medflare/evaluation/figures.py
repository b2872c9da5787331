"""The report's figures as inline SVG: text in the page's own font and colour, so that they fit a light and a dark page."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from medflare.evaluation.names import MODELS
from medflare.evaluation.presentation import lower_is_better, metric_label, metric_names, model_names, ordered_sites

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distinguishable with any colour vision, and on white as on near-black (after Okabe and Ito, 2008, without yellow and black).
_COLOURS: Final = ("#0f7fc4", "#dd8a00", "#0a9b74", "#d4590a", "#c26a9c", "#4aa8d8", "#8a7a2f", "#7a6fd0")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "*")
_LOSS, _AGGREGATION = "loss", "Aggregation"  # panels beside those of the validated models
_INK: Final = "#010203"  # stands for the page's text colour until the SVG is finished


def training_curves(results: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> str | None:
    """Loss, validation metric and place in the aggregation of every site over the rounds as SVG; None where no step was finished.

    A validation metric at round r belongs to the models that the round started from: those that r rounds of training made.

    Args:
        results: content of results.json.
        history: one mapping a step, see `results.append_round`.
    """
    panels = _curves(history)
    if not panels:
        return None
    metric = metric_label(results["configuration"]["task"].get("metric", "metric"))
    sites = sorted({site for lines in panels.values() for site in lines})

    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows = -(-len(panels) // columns)

    def draw(figure: "Figure") -> None:
        axes = figure.subplots(rows, columns, squeeze=False).flat
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        for axis, (title, lines) in zip(axes, panels.items(), strict=False):
            for site, points in sorted(lines.items()):
                rounds, values = zip(*points, strict=True)
                style = _style(sites.index(site))
                axis.plot(rounds, values, label=site, linewidth=1.6, markersize=3.5 if len(rounds) < 40 else 0, **style)
            axis.set_title(_heading(title, metric), fontsize=10, loc="left")
            axis.set_xlabel("round" if title == _LOSS or title.startswith(_AGGREGATION) else "rounds of training")
            axis.xaxis.get_major_locator().set_params(integer=True)
            _quiet(axis)
        handles = {label: handle for axis in figure.axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(8, len(handles)), frameon=False)

    return _svg(draw, width=3.4 * max(2, columns), height=2.7 * rows + 0.4 + 0.2 * (len(sites) // 8))


def _heading(panel: str, metric: str) -> str:
    """A method may validate what is no model of the task: a selector has an accuracy of its own."""
    if panel == _LOSS:
        return "Training loss"
    if panel.startswith(_AGGREGATION):
        return panel
    return f"Validation {metric}, {panel}" if panel in MODELS else f"Validation, {panel}"


def _curves(history: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Panel (the loss, a model, or a number of the aggregation) -> site -> (round, value), what is undefined left out."""
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}

    def add(panel: str, site: str, round: int, value: object) -> None:
        if isinstance(value, int | float):
            panels.setdefault(panel, {}).setdefault(site, []).append((round, float(value)))

    for step in history:
        for site, facts in step["sites"].items():
            for panel, value in {_LOSS: facts.get("loss"), **(facts.get("validation") or {})}.items():
                add(panel, site, step["round"], value)
        for site, numbers in step.get("aggregation", {}).items():
            for name, value in numbers.items():
                add(f"{_AGGREGATION} {name}", site, step["round"], value)
    return panels


def models_by_site(results: Mapping[str, Any]) -> str | None:
    """The task's metric of every model at every site, one row a site, as SVG; None where nothing was measured.

    Args:
        results: content of results.json.
    """
    metrics = metric_names(results)
    if not metrics:
        return None
    metric, sites, models = metrics[0], ordered_sites(results), model_names(results)

    def draw(figure: "Figure") -> None:
        axis = figure.subplots()
        for row, site in enumerate(sites.values()):
            values = [value for model in models if (value := site["metrics"][model][metric]) is not None]
            if values:
                axis.plot([min(values), max(values)], [row, row], color=_INK, alpha=0.25, linewidth=1.2, zorder=1)
        for place, model in enumerate(models):
            points = [(value, row) for row, site in enumerate(sites.values()) if (value := site["metrics"][model][metric]) is not None]
            if points:
                size = max(4, 9 - 2 * place)  # smaller ones on top, so that equal models all stay visible
                axis.plot(*zip(*points, strict=True), label=model, linestyle="none", markersize=size, zorder=2, **_style(place, line=False))
        axis.set_yticks(range(len(sites)), [f"{name} (outside)" if site["role"] == "outside" else name for name, site in sites.items()])
        axis.set_ylim(len(sites) - 0.5, -0.5)
        axis.set_xlabel(f"test {metric_label(metric)}" + (", lower is better" if lower_is_better(metric) else ""))
        _quiet(axis, grid="x")
        figure.legend(loc="outside upper left", ncols=len(models), frameon=False)

    return _svg(draw, width=10.2, height=1.1 + 0.34 * len(sites))


def _style(place: int, line: bool = True) -> dict[str, Any]:
    """Colour and marker differ together; after eight sites the line style does too."""
    look: dict[str, Any] = {"color": _COLOURS[place % len(_COLOURS)], "marker": _MARKERS[place % len(_MARKERS)]}
    return {**look, "linestyle": ("-", "--", ":", "-.")[place // len(_COLOURS) % 4]} if line else look


def _quiet(axis: "Axes", grid: Literal["x", "y"] = "y") -> None:
    axis.grid(axis=grid, color=_INK, alpha=0.12, linewidth=0.8)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(length=0)


def _svg(draw: Callable[["Figure"], None], width: float, height: float) -> str:
    """Run `draw` on a figure of `width` x `height` inches; the SVG element without a fixed size, the page scales it."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ink = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK)
    settings = {**ink, "svg.fonttype": "none", "svg.hashsalt": "medflare", "font.size": 9, "axes.facecolor": "none", "path.simplify": True}
    with rc_context(settings):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    return re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
