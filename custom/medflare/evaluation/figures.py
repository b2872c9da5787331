"""Figures as SVG, whose text has the page's own font and colour, so that they fit a light and a
dark page; and as PDF for a paper.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import fill, wrap
from typing import IO, TYPE_CHECKING, Any, Literal

from medflare.core.packages import installed, require
from medflare.core.palette import COLOURS
from medflare.core.text import Json
from medflare.evaluation.presentation import metric_label, task_metric
from medflare.evaluation.results import MODELS
from medflare.tasks.metrics_table import metric_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINES = ("-", "--", ":", "-.")
INK = "#010203"  # replaced by the page's text colour in the finished SVG
_WIDTH = 4.2  # inches: on a phone the text has its size
_ROW_NAME = 20  # characters of a line
_GOLDEN = 0.6180339887  # its multiples modulo 1 are spread evenly

Points = Sequence[tuple[float, float]]
RocCurves = dict[str, dict[str, tuple[Points, float]]]  # class -> line -> points and area


@dataclass(frozen=True)
class Panel:
    """One of several line plots side by side."""

    title: str
    lines: Mapping[str, Points]  # label -> points (x, y)
    x: str
    y: str = ""
    at: float | None = None  # x of a dotted vertical line
    bounds: tuple[float, float] | None = None  # the axis y shows at least these
    notes: Mapping[str, str] = field(default_factory=dict)  # label -> another text in the legend


@dataclass(frozen=True)
class Drawing:
    """A plot: `draw` fills a figure of `width` x `height` inches."""

    draw: Callable[["Figure"], None]
    width: float
    height: float

    def svg(self, name: str) -> str | None:
        """An SVG element without a fixed size; None without matplotlib.

        Ids in it depend on `name`, so that figures of one page have different ones.
        """
        if not installed("matplotlib"):
            return None
        buffer = io.StringIO()
        style = {"svg.fonttype": "none", "svg.hashsalt": name}
        metadata = {"Date": None, "Creator": None}
        self._save(buffer, style, format="svg", metadata=metadata)
        svg = buffer.getvalue()
        svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
        used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))

        def only_used(match: re.Match[str]) -> str:
            return match[0] if match[1] in used else ""

        # In tags alone: a name of another party may hold the same text.
        svg = re.sub("<[^>]+>", lambda tag: re.sub(r' id="([^"]*)"', only_used, tag[0]), svg)
        return re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)

    def pdf(self) -> bytes:
        """A PDF file with embedded TrueType fonts; equal plots give equal bytes.

        Raises:
            ConfigError: matplotlib is missing.
        """
        require("matplotlib", "a figure as PDF")
        buffer = io.BytesIO()
        style = {"pdf.fonttype": 42}
        metadata = {"CreationDate": None}
        self._save(buffer, style, format="pdf", metadata=metadata, bbox_inches="tight")
        return buffer.getvalue()

    def _save(self, file: IO[Any], style: Json, **options: Any) -> None:
        """Draw and save with a transparent background; `options`: of `Figure.savefig`."""
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        ink = dict.fromkeys(
            ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
        )
        plain = {"font.size": 10, "axes.facecolor": "none", "path.simplify": True}
        plain["text.parse_math"] = False  # names from other parties may hold $
        with rc_context({**ink, **plain, **style}):
            figure = Figure(figsize=(self.width, self.height))
            self.draw(figure)
            figure.savefig(file, transparent=True, **options)


def line_panels(panels: Sequence[Panel], name: str, *, unit_square: bool = False) -> str | None:
    """Line plots, each an SVG with its legend, so that a narrow page has them below each other;
    None if there are none.

    `name` is unique in its page; `unit_square`: axes from 0 to 1 with the diagonal, as for ROC
    curves.
    """
    labels = sorted({label for panel in panels for label in panel.lines})
    drawings = ""
    for number, panel in enumerate(panels):
        drawing = line_drawing(panel, labels, unit_square)
        drawings += drawing.svg(f"{name}-{number}") or ""
    return drawings or None


def line_drawing(panel: Panel, labels: Sequence[str], unit_square: bool = False) -> Drawing:
    """A plot; a label has the same style in all plots with these `labels`."""
    texts = {label: panel.notes.get(label, label) for label in panel.lines}
    columns = max(1, min(4, len(texts), int(52 / (max(map(len, texts.values())) + 6))))
    legend = 0.2 * -(-len(texts) // columns)  # inches
    height = (4.2 if unit_square else 2.8) + legend

    def draw(figure: "Figure") -> None:
        axis = figure.subplots()
        for label, points in panel.lines.items():
            number = labels.index(label)
            axis.plot(
                *zip(*points, strict=True),
                label=texts[label],
                linewidth=1.6,
                color=COLOURS[number % 8],
                marker=_MARKERS[number % 8],
                markersize=3.5 if len(points) < 40 else 0,
                linestyle=_LINES[number // 8 % 4],
            )
        if panel.at is not None:
            axis.axvline(panel.at, color=INK, alpha=0.4, linewidth=1, linestyle=":")
        axis.set_title(panel.title, fontsize=10, loc="left")
        axis.set(xlabel=panel.x, ylabel=panel.y)
        if unit_square:
            axis.plot([0, 1], [0, 1], color=INK, alpha=0.25, linewidth=1)
            axis.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
        else:
            axis.locator_params(axis="x", integer=True)
        if panel.bounds is not None:
            low, high = axis.get_ylim()
            margin = 0.02 * (panel.bounds[1] - panel.bounds[0])
            axis.set_ylim(min(low, panel.bounds[0] - margin), max(high, panel.bounds[1] + margin))
        _plain_axis(axis)
        # Fixed margins: matplotlib's own layout takes more than twice the time.
        figure.subplots_adjust(
            left=0.6 / _WIDTH,
            right=1 - 0.1 / _WIDTH,
            bottom=(0.55 + legend) / height,
            top=1 - 0.35 / height,
        )
        figure.legend(loc="lower center", ncols=columns, frameon=False)

    return Drawing(draw, _WIDTH, height)


def training_curves(results: Json, history: Sequence[Json]) -> str | None:
    """Loss, validation metric and aggregation numbers of every site over the rounds as SVG; None
    without a finished step.

    A validation metric at round r belongs to the models after r rounds of training. A dotted line
    marks the selected round.
    """
    lines: dict[str, dict[str, list[tuple[float, float]]]] = {}  # title -> site -> points
    metric = task_metric(results)

    def add(title: str, site: str, round: int, value: object) -> None:
        if isinstance(value, int | float):
            lines.setdefault(title, {}).setdefault(site, []).append((round, float(value)))

    def validation(model: str) -> str:
        if model not in MODELS:  # a selector has an accuracy of its own
            return f"Validation, {model}"
        return f"Validation {metric_label(metric)}, {model}"

    for step in history:
        for site, meta in step["sites"].items():
            add("Training loss", site, step["round"] + 1, meta.get("loss"))
            for model, value in (meta.get("validation") or {}).items():
                add(validation(model), site, step["round"], value)
        for site, numbers in step.get("aggregation", {}).items():
            for name, value in numbers.items():
                add(f"Aggregation {name}", site, step["round"] + 1, value)
    selections = results.get("model_selection", {})
    selected = {validation(model): selections[model]["round"] for model in selections}
    panels = []
    for title, sites in lines.items():
        bounds = unit_bounds(metric) if title.startswith("Validation") else None
        panels.append(Panel(title, sites, "round", at=selected.get(title), bounds=bounds))
    return line_panels(panels, "training")


def unit_bounds(metric: str) -> tuple[float, float] | None:
    """0 and 1 for a metric that cannot exceed 1, so that a small difference looks small; None for
    all others.

    Examples:
        >>> unit_bounds("dice"), unit_bounds("hd95")
        ((0.0, 1.0), None)
    """
    entry = metric_table().get(metric)
    if entry is None or entry.bounds[1] != 1:
        return None
    return (0.0, 1.0)


def roc_curves(curves: RocCurves, name: str) -> str | None:
    """ROC curves as SVG, one for each class, with the areas in the legend; None if there are none.
    `name` is unique in its page; points are (1 - specificity, sensitivity).
    """
    panels = []
    for title, class_curves in curves.items():
        lines = {line: points for line, (points, _) in class_curves.items()}
        notes = {line: f"{line}, AUC {area:.3f}" for line, (_, area) in class_curves.items()}
        panels.append(Panel(title, lines, "1 - specificity", "sensitivity", notes=notes))
    return line_panels(panels, name, unit_square=True)


def patients_drawing(
    values: Mapping[str, Mapping[str, float]],
    intervals: Mapping[str, tuple[float, float] | None],
    label: str,
    margin: float | None = None,
) -> Drawing:
    """A mark for every patient, a row for every model, with the mean and its interval if it has
    one.

    With a `margin`, values are differences: 0 and the range from -margin to margin are marked.
    """

    def draw(figure: "Figure") -> None:
        figure.set_layout_engine("constrained")
        axis = figure.subplots()
        for row, (model, by_patient) in enumerate(values.items()):
            points = []
            heights = []
            for number, patient in enumerate(sorted(by_patient)):
                points.append(by_patient[patient])
                heights.append(row + 0.4 * ((number * _GOLDEN) % 1 - 0.5))
            axis.plot(
                points,
                heights,
                linestyle="none",
                marker="o",
                markersize=4,
                alpha=0.5,
                color=COLOURS[row % len(COLOURS)],
                rasterized=len(points) > 500,  # as one image
            )
            interval = intervals.get(model)
            if interval:
                axis.plot(interval, [row, row], color=INK, linewidth=2)
            axis.plot([sum(points) / len(points)], [row], marker="D", markersize=7, color=INK)
        axis.set_yticks(range(len(values)), [fill(model, _ROW_NAME) for model in values])
        axis.set_ylim(len(values) - 0.5, -0.5)
        if margin is not None:
            axis.axvspan(-margin, margin, color=INK, alpha=0.1, linewidth=0)
            axis.axvline(0, color=INK, alpha=0.4, linewidth=1, linestyle=":")
        elif all(
            0 <= value <= 1 for by_patient in values.values() for value in by_patient.values()
        ):
            axis.set_xlim(-0.02, 1.02)  # small differences look small
        axis.set_xlabel(label)
        _plain_axis(axis, grid="x")

    lines = sum(len(wrap(model, _ROW_NAME)) for model in values)
    return Drawing(draw, _WIDTH, 0.7 + 0.3 * len(values) + 0.2 * lines)


def _plain_axis(axis: "Axes", grid: Literal["x", "y"] = "y") -> None:
    axis.grid(axis=grid, color=INK, alpha=0.12, linewidth=0.8)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(length=0)
