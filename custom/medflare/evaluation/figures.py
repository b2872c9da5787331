"""The report's figures as inline SVG: text in the page's own font and colour, so that they fit a light and a dark page."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from medflare.evaluation.names import MODELS
from medflare.evaluation.presentation import metric_label
from medflare.tasks.classes import FALSE_ALARMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distinguishable with any colour vision, and on white as on near-black (after Okabe and Ito, 2008, without yellow and black).
COLOURS: Final = ("#0f7fc4", "#dd8a00", "#0a9b74", "#d4590a", "#c26a9c", "#4aa8d8", "#8a7a2f", "#7a6fd0")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "*")
_LOSS, _AGGREGATION = "loss", "Aggregation"  # panels beside those of the validated models
_MANY: Final = 500  # marks that are drawn one by one
_GOLDEN: Final = 0.6180339887  # its multiples are spread evenly
INK: Final = "#010203"  # stands for the page's text colour until the SVG is finished


def training_curves(results: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> str | None:
    """Loss, validation metric and place in the aggregation of every site over the rounds as SVG; None where no step was finished.

    A validation metric at round r belongs to the models that the round started from: those that r rounds of training made. A dotted line
    stands where a model was chosen.

    Args:
        history: one mapping a step, see `results.append_round`.
    """
    panels = _curves(history)
    if not panels:
        return None
    metric = metric_label(results["configuration"]["task"].get("metric", "metric"))
    sites = sorted({site for lines in panels.values() for site in lines})
    elected = {model: election["round"] for model, election in results.get("model_selection", {}).items()}
    chosen = {model: round for model, round in elected.items() if round is not None}  # nobody chose where nothing was trained

    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows = -(-len(panels) // columns)

    def draw(figure: "Figure") -> None:
        axes = figure.subplots(rows, columns, squeeze=False).flat
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        for axis, (title, lines) in zip(axes, panels.items(), strict=False):
            for site, points in sorted(lines.items()):
                rounds, values = zip(*points, strict=True)
                style = look_of(sites.index(site))
                axis.plot(rounds, values, label=site, linewidth=1.6, markersize=3.5 if len(rounds) < 40 else 0, **style)
            if title in chosen:
                axis.axvline(chosen[title], color=INK, alpha=0.4, linewidth=1, linestyle=":")
            axis.set_title(_heading(title, metric), fontsize=10, loc="left")
            axis.set_xlabel("round" if title == _LOSS or title.startswith(_AGGREGATION) else "rounds of training")
            axis.xaxis.get_major_locator().set_params(integer=True)
            quieten(axis)
        _legend(figure)

    return as_svg(draw, width=3.4 * max(2, columns), height=2.7 * rows + 0.4 + 0.2 * (len(sites) // 8))


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
        for site, meta in step["sites"].items():
            for panel, value in {_LOSS: meta.get("loss"), **(meta.get("validation") or {})}.items():
                add(panel, site, step["round"], value)
        for site, numbers in step.get("aggregation", {}).items():
            for name, value in numbers.items():
                add(f"{_AGGREGATION} {name}", site, step["round"], value)
    return panels


def roc_curves(points: Mapping[str, Mapping[str, Sequence[float]]]) -> str | None:
    """ROC curves as SVG, a panel for each class; None where there is none.

    Args:
        points: class -> name of a line -> sensitivities, see `tasks.classes.FALSE_ALARMS`.
    """
    if not points:
        return None
    names = sorted({name for lines in points.values() for name in lines})
    columns = min(3, len(points))
    rows = -(-len(points) // columns)
    width, height = 3.4 * max(2, columns), 3.4 * rows + 0.3 + 0.2 * (len(names) // 8)

    def draw(figure: "Figure") -> None:
        axes = figure.subplots(rows, columns, squeeze=False).flat
        for axis in axes[len(points) :]:
            axis.set_visible(False)
        for axis, (curve, lines) in zip(axes, points.items(), strict=False):
            axis.plot([0, 1], [0, 1], color=INK, alpha=0.25, linewidth=1)
            for name, values in lines.items():
                axis.plot(FALSE_ALARMS, values, label=name, linewidth=1.6, markersize=3, **look_of(names.index(name)))
            axis.set_title(curve, fontsize=10, loc="left")
            axis.set(xlabel="1 - specificity", ylabel="sensitivity", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
            quieten(axis)
        margins = {"left": 0.55 / width, "right": 1 - 0.1 / width, "bottom": 0.85 / height, "top": 1 - 0.35 / height}
        figure.subplots_adjust(**margins, hspace=0.35, wspace=0.25)
        _legend(figure, "lower center")

    return as_svg(draw, width, height, layout=None)


def patients_plot(values: Mapping[str, Mapping[str, float]], intervals: Mapping[str, tuple[float, float] | None], label: str) -> str | None:
    """A mark for every patient, a row for every model, with the mean and its interval, as SVG; None where there is no value.

    Args:
        values: model -> patient -> value.
        intervals: model -> that of the mean.
    """
    if not values:
        return None

    def draw(figure: "Figure") -> None:
        axis = figure.subplots()
        for row, (model, found) in enumerate(values.items()):
            points = [found[patient] for patient in sorted(found)]
            places = [row + 0.4 * ((place * _GOLDEN) % 1 - 0.5) for place in range(len(points))]  # apart, and at the same place every time
            style: dict[str, Any] = {"marker": "o", "markersize": 4, "alpha": 0.5, "color": COLOURS[row % len(COLOURS)]}
            axis.plot(points, places, linestyle="none", rasterized=len(points) > _MANY, **style)
            mean, interval = sum(points) / len(points), intervals[model]
            if interval is not None:
                axis.plot(interval, [row, row], color=INK, linewidth=2)
            axis.plot([mean], [row], marker="D", markersize=7, color=INK)
        axis.set_yticks(range(len(values)), list(values))
        axis.set_ylim(len(values) - 0.5, -0.5)
        axis.set_xlabel(label)
        quieten(axis, grid="x")

    return as_svg(draw, width=10.2, height=0.7 + 0.6 * len(values))


def _legend(figure: "Figure", place: str = "outside lower center") -> None:
    """One below all panels, each label once."""
    handles = {label: handle for axis in figure.axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc=place, ncols=min(8, len(handles)), frameon=False)


def look_of(place: int, line: bool = True) -> dict[str, Any]:
    """Colour and marker differ together; after eight sites the line style does too."""
    look: dict[str, Any] = {"color": COLOURS[place % len(COLOURS)], "marker": _MARKERS[place % len(_MARKERS)]}
    return {**look, "linestyle": ("-", "--", ":", "-.")[place // len(COLOURS) % 4]} if line else look


def with_own_ids(page: str) -> str:
    """A page whose figures name their parts apart: matplotlib counts anew in each, and a page has every name once.

    Args:
        page: HTML with SVG elements in it.

    Examples:
        >>> with_own_ids('<svg><g id="axes_1"><clipPath id="c"/><path clip-path="url(#c)"/></g></svg><svg><g id="axes_1"/></svg>')
        '<svg><g><clipPath id="figure-1-c"/><path clip-path="url(#figure-1-c)"/></g></svg><svg><g/></svg>'
    """
    number = 0

    def renamed(found: re.Match[str]) -> str:
        nonlocal number
        number += 1
        used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', found[0]))
        own = re.sub(r' id="([^"]*)"', lambda name: f' id="figure-{number}-{name[1]}"' if name[1] in used else "", found[0])
        return re.sub(r'(url\(#|href="#)', rf"\g<1>figure-{number}-", own)

    return re.sub(r"<svg\b.*?</svg>", renamed, page, flags=re.DOTALL)


def quieten(axis: "Axes", grid: Literal["x", "y"] = "y") -> None:
    axis.grid(axis=grid, color=INK, alpha=0.12, linewidth=0.8)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(length=0)


def as_svg(draw: Callable[["Figure"], None], width: float, height: float, layout: Literal["constrained"] | None = "constrained") -> str:
    """Run `draw` on a figure of `width` x `height` inches; the SVG element without a fixed size, the page scales it.

    Without a layout, `draw` places the panels itself: that takes less than half the time.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ink = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    settings = {**ink, "svg.fonttype": "none", "svg.hashsalt": "medflare", "font.size": 9, "axes.facecolor": "none", "path.simplify": True}
    with rc_context(settings):
        figure = Figure(figsize=(width, height), layout=layout)
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    return re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
