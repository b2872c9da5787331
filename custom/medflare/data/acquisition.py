"""How images were acquired, in numbers: how large they are, how fine and how bright; over training images their range, and whether a new
image lies within it. As stored, before anything is resampled, resized or normalised."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from medflare.core.errors import ConfigError
from medflare.core.settings import STRICT, checked
from medflare.data.geometry import format_shape
from medflare.data.reading import Image, is_coloured
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Spacing

TRAINED_ON: Final = "trained_on"  # of a card, and of the server's last message: the range over all training sites
MILLIMETRES: Final = 1.5  # times as large as the largest, or as small as the smallest, that a field of view or a spacing may be
PIXELS: Final = 2.0  # the same of sizes in pixels, which say less
CONTRAST: Final = 3.0  # the same of the span of intensities
MEDIAN: Final = 0.5  # how far a median may leave the range, as a share of the largest span of intensities
_DRAWN: Final = 10_000  # intensities of a channel, evenly spread over the image
_MOST_CHANNELS: Final = 64  # of which intensities are told; images with more are features
_ENDS, _INNER = (5, 95), (10, 90)  # percentiles over the images: none is the number of a single one


@plain_dataclass(frozen=True)
class Acquisition:
    """One image.

    Attributes:
        sides: pixels, the shorter side first, since pictures are turned; voxels along the task's axes.
        spacing: millimetres between voxels; None for pictures, and where nobody knows.
        medians: of every channel.
        contrasts: of every channel, what lies between the 5th and the 95th percentile.
        coloured: whether its colours differ; False where channels are none.
    """

    sides: tuple[float, ...]
    spacing: Spacing | None
    medians: tuple[float, ...]
    contrasts: tuple[float, ...]
    coloured: bool

    @property
    def extent(self) -> Spacing | None:
        """The field of view in millimetres."""
        return None if self.spacing is None else tuple(side * gap for side, gap in zip(self.sides, self.spacing, strict=True))

    def row(self) -> list[float]:
        """The same as numbers alone."""
        spacing = self.spacing or (math.nan,) * len(self.sides)
        return [*self.sides, *spacing, *self.medians, *self.contrasts, float(self.coloured)]

    @classmethod
    def of_row(cls, row: Sequence[float], axes: int) -> "Acquisition":
        """What `row` was made of, of an image with so many axes."""
        spacing, values = tuple(row[axes : 2 * axes]), row[2 * axes : -1]
        known = not any(map(math.isnan, spacing))
        half = len(values) // 2
        return cls(tuple(row[:axes]), spacing if known else None, tuple(values[:half]), tuple(values[half:]), bool(row[-1]))


def acquisition_of(image: Image, task: TaskConfig) -> Acquisition:
    """An image as it was read; of a volume that is cut into slices, one slice's sides."""
    array = image.array
    sides: tuple[int, ...] = array.shape[1:]
    spacing: Spacing | None = None
    if task.spatial_dims == 3 and image.stored_grid is not None:
        here = image.stored_grid.turned(task.orientation)
        sides, spacing = here.shape, here.spacing
    elif task.spatial_dims == 2:
        sides = tuple(sorted(side for axis, side in enumerate(sides) if array.ndim == 3 or axis != task.slices.axis))
    flat = array.reshape(len(array), -1)
    drawn = flat[:, np.linspace(0, flat.shape[1] - 1, min(flat.shape[1], _DRAWN)).astype(int)].astype(np.float64)
    low, median, high = np.percentile(drawn, (5, 50, 95), axis=1) if len(array) <= _MOST_CHANNELS else np.zeros((3, 0))
    coloured = is_coloured(drawn) if len(array) == 3 and not task.channel_names and not task.pick else image.coloured
    return Acquisition(tuple(map(float, sides)), spacing, tuple(median.tolist()), tuple((high - low).tolist()), coloured)


# -- of many images --------------------------------------------------------------------------------------------------------


Axes = Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(min_length=2, max_length=3)]
Values = Annotated[tuple[float, ...], Field(max_length=_MOST_CHANNELS)]


@dataclass(frozen=True, config=STRICT)
class TrainedOn:
    """The range of training images, lowest and highest of each number.

    Attributes:
        images: of how many.
        sides, spacing, extent, medians, contrasts: see `Acquisition`; spacing and extent of those images that have any, else None.
        coloured: which of False and True there are.
    """

    images: Annotated[int, Field(ge=1)]
    sides: tuple[Axes, Axes]
    spacing: tuple[Axes, Axes] | None
    extent: tuple[Axes, Axes] | None
    medians: tuple[Values, Values]
    contrasts: tuple[Values, Values]
    coloured: Annotated[tuple[bool, ...], Field(min_length=1, max_length=2)]

    def to_dict(self) -> dict[str, Any]:
        """JSON values, six digits each."""
        return {name: _plain(value) for name, value in asdict(self).items()}

    def misfit(self, task: TaskConfig) -> str:
        """In what it is none of a task's images, "" where it is."""
        axes = {len(end) for pair in (self.sides, self.spacing, self.extent) if pair is not None for end in pair}
        channels = {len(end) for pair in (self.medians, self.contrasts) for end in pair}
        wanted = task.image_channels if task.image_channels <= _MOST_CHANNELS else 0
        if axes != {task.spatial_dims} or channels != {wanted}:
            return f"{TRAINED_ON} has other axes or channels than the task"
        return ""


def range_of(rows: Any, patients: int, axes: int, minimum: int = 0) -> TrainedOn | None:
    """The range of a site's training images: the 5th and the 95th percentile of each number, so that none is that of a single image.

    Args:
        rows: of `Acquisition.row`, (N, ...).
        patients: whom they are of.
        axes: of the images.
        minimum: of how many patients a number must be for it to leave the site. Nothing is told of fewer; of as many or more, from 2 on,
            the 10th and the 90th percentile.

    Returns:
        None where nothing is told.
    """
    if not len(rows) or patients < minimum:
        return None
    images = [Acquisition.of_row(row, axes) for row in np.asarray(rows, np.float64).tolist()]
    known = [(image.spacing, image.extent) for image in images if image.spacing is not None]

    percentiles = _INNER if minimum > 1 else _ENDS

    def ends(values: Sequence[Any]) -> Any:
        found = np.percentile(np.asarray(values, np.float64), percentiles, axis=0)
        return tuple(tuple(map(float, end)) for end in found)

    spacing, extent = (ends(values) for values in zip(*known, strict=True)) if known else (None, None)
    return TrainedOn(
        images=len(images),
        sides=ends([image.sides for image in images]),
        spacing=spacing,
        extent=extent,
        medians=ends([image.medians for image in images]),
        contrasts=ends([image.contrasts for image in images]),
        coloured=tuple(sorted({bool(end > 0.5) for end in np.percentile([float(image.coloured) for image in images], percentiles)})),
    )


def read_range(value: object) -> TrainedOn:
    """A range as another party tells it.

    Raises:
        ConfigError: it is none.
    """
    return checked(TrainedOn, value if isinstance(value, dict) else {}, TRAINED_ON)


def check_range(value: object) -> object:
    """For a pydantic `AfterValidator`: raise ValueError if `read_range` does not accept the value."""
    try:
        read_range(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return value


def joined_range(ranges: Iterable[TrainedOn]) -> TrainedOn | None:
    """The range over several sites, from the lowest to the highest; None without any.

    Args:
        ranges: of the sites, all of one task.
    """
    total: TrainedOn | None = None
    for one in ranges:
        total = one if total is None else _joined(total, one)
    return total


def _joined(first: TrainedOn, second: TrainedOn) -> TrainedOn:
    def widest(one: Any, other: Any) -> Any:
        if one is None or other is None:
            return one or other
        return tuple(map(min, one[0], other[0])), tuple(map(max, one[1], other[1]))

    pairs = ("sides", "spacing", "extent", "medians", "contrasts")
    joined = {name: widest(getattr(first, name), getattr(second, name)) for name in pairs}
    coloured = tuple(sorted({*first.coloured, *second.coloured}))
    return replace(first, images=first.images + second.images, coloured=coloured, **joined)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


# -- a new image -----------------------------------------------------------------------------------------------------------


def outside(image: Acquisition, trained: TrainedOn, channels: Sequence[str] = ()) -> dict[str, str]:
    """In what an image lies outside what a model was trained on; empty where it lies within.

    Limits are wide, so that what passes them is of another kind: millimetres 1.5 times, pixels twice, the span of intensities three times
    beyond the range either way, a median half the largest span. A spacing that is not known on both sides is not compared.

    Args:
        image: as it was read.
        trained: the range of the training images.
        channels: their names.

    Returns:
        "field of view", "size", "spacing", "intensities" or "colour" -> what it is and what the model was trained on.

    Examples:
        >>> trained = TrainedOn(9, ((30, 30), (60, 60)), ((1, 1), (1, 1)), ((30, 30), (60, 60)), ((10,), (40,)), ((80,), (100,)), (False,))
        >>> outside(Acquisition((240, 250), (1, 1), (25,), (90,), False), trained)
        {'field of view': '240 x 250 mm, trained on 30 x 30 to 60 x 60 mm'}
        >>> outside(Acquisition((40, 40), (1, 1), (250,), (9,), False), trained)
        {'intensities': 'median 250, trained on 10 to 40; span 9, trained on 80 to 100'}
        >>> outside(Acquisition((40, 40), (1, 1), (25,), (90,), False), trained)
        {}
    """
    found: dict[str, str] = {}
    if image.spacing is not None and image.extent is not None and trained.spacing is not None and trained.extent is not None:
        for name, values, ends in (("field of view", image.extent, trained.extent), ("spacing", image.spacing, trained.spacing)):
            if _beyond(values, ends, MILLIMETRES):
                found[name] = f"{_sides(values)} mm, trained on {_range(ends)} mm"
    elif _beyond(image.sides, trained.sides, PIXELS):
        found["size"] = f"{_sides(image.sides)}, trained on {_range(trained.sides)}"
    several, lines = len(image.medians) > 1, []
    slack = MEDIAN * max((*trained.contrasts[1], 0.0))
    for place, (median, contrast) in enumerate(zip(image.medians, image.contrasts, strict=True)):
        (low, high), (least, most) = ([end[place] for end in pair] for pair in (trained.medians, trained.contrasts))
        of = f"of channel {channels[place] if channels else place} " if several else ""
        if not low - slack <= median <= high + slack:
            lines.append(f"median {of}{median:.4g}, trained on {low:.4g} to {high:.4g}")
        if _beyond([contrast], ([least], [most]), CONTRAST):
            lines.append(f"span {of}{contrast:.4g}, trained on {least:.4g} to {most:.4g}")
    if lines:
        found["intensities"] = "; ".join(lines)
    if image.coloured not in trained.coloured and (image.coloured or several):  # one channel is grey either way
        found["colour"] = "in colour, trained on grey images" if image.coloured else "grey, trained on images in colour"
    return found


def _beyond(values: Sequence[float], ends: Sequence[Sequence[float]], factor: float) -> bool:
    return any(not low / factor <= value <= high * factor for value, low, high in zip(values, *ends, strict=True))


def _sides(values: Sequence[float]) -> str:
    return format_shape([f"{value:.4g}" for value in values])


def _range(ends: Sequence[Sequence[float]]) -> str:
    low, high = map(_sides, ends)
    return low if low == high else f"{low} to {high}"
