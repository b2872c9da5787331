"""How images were acquired, in numbers (size, spacing and intensities as stored), the range of
these over the training images, and whether a new image is outside of it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field, NonNegativeFloat

from medflare.core.errors import ConfigError
from medflare.core.settings import checked, strict_dataclass
from medflare.core.text import format_shape
from medflare.data.reading import Image, is_coloured
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Spacing

# In a card, and in the server's last message: the range over all training sites.
TRAINED_ON = "trained_on"
_MILLIMETRES = 1.5  # factor beyond the range that a field of view or a spacing may have
_PIXELS = 2.0  # the same for sizes in pixels
_CONTRAST = 3.0  # the same for the span of intensities
# How far a median may leave the range, as a fraction of the largest span of intensities.
_MEDIAN = 0.5
_FAR = 10  # times the others', as of other units
_SAMPLED = 10_000  # intensities of a channel, evenly spaced
_MAX_CHANNELS = 64  # images with more are features and have no intensities
# Percentiles over the patients: the extreme ones are left out.
_OUTER = (5, 95)
_INNER = (10, 90)


class Acquisition(NamedTuple):
    """The numbers of one image."""

    # pixels, the shorter side first, since pictures are turned; voxels along the task's axes
    sides: tuple[float, ...]
    spacing: Spacing | None  # millimetres between voxels; None for pictures, or if unknown
    medians: tuple[float, ...]  # of every channel
    contrasts: tuple[float, ...]  # of every channel: its 95th less its 5th percentile
    coloured: bool  # whether its colours differ; False if the channels are not colours

    @property
    def extent(self) -> Spacing | None:
        """The field of view in millimetres."""
        if self.spacing is None:
            return None
        return tuple(side * gap for side, gap in zip(self.sides, self.spacing, strict=True))


def acquisition_of(image: Image, task: TaskConfig) -> Acquisition:
    """The numbers of an image; of a volume that is cut into slices, the sides of a slice."""
    array = image.array
    sides = list(array.shape[1:])
    spacing = None
    if task.spatial_dims == 3 and image.stored_grid is not None:
        grid = image.stored_grid.turned(task.orientation)
        sides = list(grid.shape)
        spacing = grid.spacing
    elif task.spatial_dims == 2:
        if array.ndim == 4:
            del sides[task.slices.axis]
        sides.sort()
    flat = array.reshape(len(array), -1)
    columns = np.linspace(0, flat.shape[1] - 1, min(flat.shape[1], _SAMPLED)).astype(int)
    sampled = flat[:, columns].astype(np.float64)
    low = median = high = np.zeros(0)
    if len(array) <= _MAX_CHANNELS:
        low, median, high = np.percentile(sampled, (5, 50, 95), axis=1)
    coloured = image.coloured
    if len(array) == 3 and not task.channel_names and not task.pick:
        coloured = is_coloured(sampled)
    return Acquisition(
        tuple(map(float, sides)),
        spacing,
        tuple(median.tolist()),
        tuple((high - low).tolist()),
        coloured,
    )


# -- the range of training images ------------------------------------------------------------------


Axes = Annotated[tuple[NonNegativeFloat, ...], Field(min_length=2, max_length=3)]
Values = Annotated[tuple[float, ...], Field(max_length=_MAX_CHANNELS)]


@strict_dataclass
class TrainedOn:
    """The range of training images: (lowest, highest) of each number of `Acquisition`."""

    images: Annotated[int, Field(ge=1)]
    sides: tuple[Axes, Axes]
    spacing: tuple[Axes, Axes] | None  # as the extent, None if no image has one
    extent: tuple[Axes, Axes] | None
    medians: tuple[Values, Values]
    contrasts: tuple[Values, Values]
    # which of False and True there are
    coloured: Annotated[tuple[bool, ...], Field(min_length=1, max_length=2)]

    def to_dict(self) -> dict[str, Any]:
        """The range as JSON values, with six digits."""
        text = json.dumps(asdict(self))
        return json.loads(text, parse_float=lambda digits: float(f"{float(digits):.6g}"))

    def misfit(self, task: TaskConfig) -> str | None:
        """Why the range cannot be of a task's images, or None."""
        axes = {len(end) for pair in (self.sides, self.spacing, self.extent) for end in pair or ()}
        channels = {len(end) for pair in (self.medians, self.contrasts) for end in pair}
        expected = task.image_channels if task.image_channels <= _MAX_CHANNELS else 0
        if axes == {task.spatial_dims} and channels == {expected}:
            return None
        return f"{TRAINED_ON} has other axes or channels than the task"


def range_of(images: Mapping[str, Sequence[Acquisition]], minimum: int = 0) -> TrainedOn | None:
    """The range of a site's training images: percentiles over patients of the median over a
    patient's images, so that extreme patients, and those of many images, decide little.

    Args:
        images: patient -> training images.
        minimum: small-cell suppression: of fewer patients there is no range; from 2 on, percentiles
            are 10 and 90, not 5 and 95, and there is no range of spacings where one is unknown:
            the known ones may be of few patients. New images are then compared in pixels.
    """
    if not images or len(images) < minimum:
        return None
    percentiles = _INNER if minimum > 1 else _OUTER
    every = [image for of_patient in images.values() for image in of_patient]

    def ends(name: str) -> Any:
        medians = []
        for of_patient in images.values():
            values = [value for value in map(attrgetter(name), of_patient) if value is not None]
            if values:
                medians.append(np.median(np.array(values, np.float64), axis=0))
        return np.percentile(np.array(medians), percentiles, axis=0).tolist()

    content = {
        "images": len(every),
        "sides": ends("sides"),
        "spacing": None,
        "extent": None,
        "medians": ends("medians"),
        "contrasts": ends("contrasts"),
        "coloured": sorted({end > 0.5 for end in ends("coloured")}),
    }
    spaced = [image.spacing is not None for image in every]
    if all(spaced) or (any(spaced) and minimum <= 1):
        content["spacing"] = ends("spacing")
        content["extent"] = ends("extent")
    return read_range(content)


def read_range(value: object) -> TrainedOn:
    """A range from JSON values; ConfigError for other values."""
    return checked(TrainedOn, value if isinstance(value, dict) else {}, TRAINED_ON)


def check_range(value: object) -> object:
    """For a pydantic `AfterValidator`: ValueError if `read_range` does not accept the value."""
    try:
        read_range(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return value


def joined_range(sites: Sequence[TrainedOn]) -> TrainedOn | None:
    """The range over several sites of one task; None without any.

    No site widens the range of the middle site (of two: the narrower end) more than `_FAR` times.
    """
    if not sites:
        return None
    content: dict[str, Any] = {"images": sum(site.images for site in sites)}
    span = np.zeros(0)
    for name in ("sides", "spacing", "extent", "contrasts", "medians"):
        pairs = [getattr(site, name) for site in sites]
        table = np.array([pair for pair in pairs if pair is not None])  # (sites, 2, numbers)
        content[name] = None
        if len(table):
            low = np.quantile(table[:, 0], 0.5, axis=0, method="higher")
            high = np.quantile(table[:, 1], 0.5, axis=0, method="lower")
            least, most = low / _FAR, high * _FAR
            if name == "contrasts":
                span = most
            if name == "medians":  # they may be negative
                least, most = low - span, high + span
            least = np.maximum(least, table[:, 0].min(axis=0))
            most = np.minimum(most, table[:, 1].max(axis=0))
            content[name] = [least.tolist(), most.tolist()]
    content["coloured"] = sorted({value for site in sites for value in site.coloured})
    return read_range(content)


def far_beyond(sites: Mapping[str, TrainedOn]) -> dict[str, str]:
    """Site -> a side or a span of intensities of its images that is `_FAR` times as large as any of
    the other sites, in words.
    """
    notes = {}
    for name, text in (("sides", "sides"), ("contrasts", "spans of intensities")):
        largest = {site: max(getattr(sites[site], name)[1], default=0.0) for site in sites}
        for site, value in largest.items():
            others = max((largest[other] for other in sites if other != site), default=0.0)
            if 0 < _FAR * others < value:
                ends = f"up to {value:.4g}, those of the others up to {others:.4g}"
                notes[site] = f"its training images have {text} {ends}"
    return notes


# -- a new image -----------------------------------------------------------------------------------


def outside(image: Acquisition, trained: TrainedOn, channels: Sequence[str] = ()) -> dict[str, str]:
    """How an image differs from the training images; empty if it is within their range.

    Limits are wide: millimetres 1.5 times, pixels twice, the span of intensities three times beyond
    the range, a median half the largest span. Spacings are compared only if both are known.

    Returns:
        "field of view", "size", "spacing", "intensities" or "colour" -> the value and the range.

    Examples:
        >>> millimetres = ((30, 30), (60, 60))
        >>> trained = TrainedOn(9, millimetres, ((1, 1), (1, 1)), millimetres, ((10,), (40,)),
        ...                     ((80,), (100,)), (False,))
        >>> outside(Acquisition((240, 250), (1, 1), (25,), (90,), False), trained)
        {'field of view': '240 x 250 mm, trained on 30 x 30 to 60 x 60 mm'}
        >>> outside(Acquisition((40, 40), (1, 1), (250,), (9,), False), trained)
        {'intensities': 'median 250, trained on 10 to 40; span 9, trained on 80 to 100'}
    """
    differences = {}
    if image.spacing and image.extent and trained.spacing and trained.extent:
        if _beyond(image.extent, trained.extent, _MILLIMETRES):
            view = f"{_sides(image.extent)} mm, trained on {_range(trained.extent)} mm"
            differences["field of view"] = view
        if _beyond(image.spacing, trained.spacing, _MILLIMETRES):
            spacing = f"{_sides(image.spacing)} mm, trained on {_range(trained.spacing)} mm"
            differences["spacing"] = spacing
    elif _beyond(image.sides, trained.sides, _PIXELS):
        differences["size"] = f"{_sides(image.sides)}, trained on {_range(trained.sides)}"
    intensities = _intensities_outside(image, trained, channels)
    if intensities:
        differences["intensities"] = "; ".join(intensities)
    may_be_coloured = image.coloured or len(image.medians) > 1  # a single channel is grey anyway
    if may_be_coloured and image.coloured not in trained.coloured:
        if image.coloured:
            differences["colour"] = "in colour, trained on grey images"
        else:
            differences["colour"] = "grey, trained on images in colour"
    return differences


def _intensities_outside(
    image: Acquisition, trained: TrainedOn, channels: Sequence[str]
) -> list[str]:
    lines = []
    slack = _MEDIAN * max((*trained.contrasts[1], 0.0))
    rows = zip(image.medians, image.contrasts, *trained.medians, *trained.contrasts, strict=True)
    for number, (median, contrast, low, high, least, most) in enumerate(rows):
        channel = ""
        if len(image.medians) > 1:
            channel = f"channel {channels[number] if channels else number}: "
        if not low - slack <= median <= high + slack:
            lines.append(f"{channel}median {median:.4g}, trained on {low:.4g} to {high:.4g}")
        if _beyond([contrast], ([least], [most]), _CONTRAST):
            lines.append(f"{channel}span {contrast:.4g}, trained on {least:.4g} to {most:.4g}")
    return lines


def _beyond(values: Sequence[float], ends: Sequence[Sequence[float]], factor: float) -> bool:
    for value, low, high in zip(values, *ends, strict=True):
        if not low / factor <= value <= high * factor:
            return True
    return False


def _sides(values: Sequence[float]) -> str:
    return format_shape([f"{value:.4g}" for value in values])


def _range(ends: Sequence[Sequence[float]]) -> str:
    low, high = map(_sides, ends)
    if low == high:
        return low
    return f"{low} to {high}"
