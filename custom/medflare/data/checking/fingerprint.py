"""A site's fingerprint: what planning a task needs to know about its training images, as numbers. No image, file or patient is in it."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from medflare.core.errors import Aborted, DataError, one_line
from medflare.core.rng import numpy_generator
from medflare.core.settings import STRICT
from medflare.data.datalist import DatalistItem, site_folders, site_name
from medflare.data.decoding import Source, pictures_of, target_of
from medflare.data.loading import check_unreadable, open_source, usable_entries
from medflare.data.progress import counted
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Spacing

FORMAT: Final = "medflare fingerprint 1"
# What a planned task takes over from the one that the images were looked at with: what is learnt, and what files mean.
LEARNT: Final = (
    *("name", "kind", "target", "labels", "label_values", "unlisted_labels", "metric", "spatial_dims", "channels", "pick"),
    *("missing_channels", "orientation", "slices", "surface_tolerance", "resplit", "unreadable", "unreadable_limit", "source"),
)
_DRAWN: Final = 10_000  # intensities of an image that quantiles are taken of, as nnU-Net has it
_MOST_DRAWN: Final = 2_000_000  # of all images, so that a site with many pictures needs no more memory

Axes = Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(min_length=2, max_length=3)]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, config=STRICT)
class Spread:
    """How images differ in one respect: percentiles over the images, each with a number per axis."""

    minimum: Axes
    p10: Axes
    median: Axes
    p90: Axes
    maximum: Axes


@dataclass(frozen=True, config=STRICT)
class Intensities:
    """Stored values: mean and standard deviation of all of them, percentiles of at most 10,000 drawn from each image."""

    p0_5: float
    median: float
    p99_5: float
    mean: float
    deviation: Annotated[float, Field(ge=0)]


@dataclass(frozen=True, config=STRICT)
class Channel:
    """Intensities of one channel, everywhere and in the foreground; None where there is none, or no mask."""

    overall: Intensities
    foreground: Intensities | None


@dataclass(frozen=True, config=STRICT)
class Presence:
    """How many images show a class, and its share of all voxels (None in classification); None where that would tell of a few patients."""

    images: Annotated[int, Field(ge=0)] | None
    share: Share | None


@dataclass(frozen=True, config=STRICT)
class DatasetFingerprint:
    """A site's training images in numbers.

    Attributes:
        site: its name.
        images: training images: volumes, pictures, or kept slices.
        patients: whom they are of.
        learnt: the settings of the task they were looked at with that a planned one takes over, see `LEARNT`.
        sizes: pixels or voxels along each axis, as stored, volumes along the task's axes.
        spacings: millimetres between voxels; None for pictures, and where a file does not say.
        extents: sizes in millimetres; None likewise.
        zeros: share of pixels or voxels that are 0 in every channel.
        channels: intensities by channel.
        classes: presence by class; in segmentation the structures, and in a multiclass one label 0 too.
    """

    site: str
    images: Annotated[int, Field(ge=1)]
    patients: Annotated[int, Field(ge=1)]
    learnt: dict[str, Any]
    sizes: Spread
    spacings: Spread | None
    extents: Spread | None
    zeros: Share
    channels: tuple[Channel, ...]
    classes: dict[str, Presence]


# -- made ------------------------------------------------------------------------------------------------------------------


def fingerprints(root: Path | str, task: TaskConfig) -> list[DatasetFingerprint]:
    """Of every site below a data root; training images alone are read, one at a time.

    Args:
        root: one site's folder, or a folder with one folder per site.
        task: says what files mean and which images train. Its size, intensity transform and network do not matter, nor its spacing:
            volumes are looked at as stored, along its axes.

    Raises:
        DataError: no site, no training image, or one that cannot be used (unless the task skips those).
    """
    places = [(site_name(folder), folder) for folder in site_folders(Path(root))]
    found = [fingerprint_of(site, task, partial(open_source, site, root=folder)) for site, folder in places]
    return [item for item in found if item is not None]


def fingerprint_of(
    site: str,
    task: TaskConfig,
    source_of_task: Callable[[TaskConfig], Source],
    minimum: int = 0,
    aborted: Callable[[], bool] = lambda: False,
) -> DatasetFingerprint | None:
    """Of one site's training images, read one at a time.

    Args:
        site: its name.
        task: see `fingerprints`.
        source_of_task: task -> the site's images as that task reads them.
        minimum: of how many patients a number must be for it to be told. Then nothing is told of fewer training patients; nothing of a
            class or of a foreground that fewer of them show, of several exclusive classes then of none; and as the smallest and largest
            image of a `Spread`, which are single ones, stand its 10th and 90th percentile. 0 and 1 hold nothing back.
        aborted: asked before every image.

    Returns:
        The fingerprint; None where there are too few patients to tell of any.

    Raises:
        DataError: see `fingerprints`.
        Aborted: `aborted` answered True.
    """
    task = dataclasses.replace(task, spacing=None)
    source = source_of_task(task)
    entries = [entry for entry in usable_entries(site, task, source)[0] if entry.split == "training"]
    rows: list[_Row] = []
    drawn = min(_DRAWN, _MOST_DRAWN // max(1, len(entries)))
    overall, foreground = ([_Values(drawn) for _ in range(task.image_channels)] for _ in range(2))
    failed: dict[int, str] = {}
    for number, entry in enumerate(counted(entries, len(entries), f"site {site}, training images looked at")):
        if aborted():
            raise Aborted(f"site {site}: stopped on request")
        try:
            rows += _looked_at(task, source, entry, numpy_generator(0, site, number, "fingerprint"), overall, foreground)
        except DataError as error:
            if task.unreadable == "error":
                raise
            failed[number] = str(error)
    check_unreadable(failed, len(entries), task, site)
    if not rows:
        raise DataError(f"site {site}: no training image to look at; list some in datalist.json")
    patients = {row.patient for row in rows}
    if len(patients) < minimum:
        return None

    def few(name: str) -> bool:
        """Whether fewer patients than that show a class, or an image without it, where every image has one."""
        shown, lack = ({row.patient for row in rows if bool(row.areas[name]) == seen} for seen in (True, False))
        return 0 < len(shown) < minimum or (task.kind == "classification" and 0 < len(lack) < minimum)

    names = task.labels if task.kind == "segmentation" else task.classes
    small = {name for name in names if few(name)}
    if small and task.target != "multilabel":  # classes exclude each other: one follows from the total and the others
        small = set(names)
    voxels = sum(row.voxels for row in rows)
    presences = {}
    for name in names:
        share = sum(row.areas[name] for row in rows) / voxels if task.kind == "segmentation" else None
        presences[name] = Presence(None, None) if name in small else Presence(sum(row.areas[name] > 0 for row in rows), share)
    sizes, spacings = [row.sides for row in rows], [row.spacing for row in rows if row.spacing is not None]
    whole = len(spacings) == len(rows)
    inside = [None if few("") else values.summary() for values in foreground]
    channels = zip((values.summary() for values in overall), inside, strict=True)
    return DatasetFingerprint(
        site=site,
        images=len(rows),
        patients=len(patients),
        learnt=learnt_of(task),
        sizes=_spread(sizes, minimum),
        spacings=_spread(spacings, minimum) if whole else None,
        extents=_spread(np.multiply(sizes, spacings), minimum) if whole else None,
        zeros=sum(row.zeros for row in rows) / voxels,
        channels=tuple(Channel(everywhere, within) for everywhere, within in channels if everywhere is not None),
        classes=presences,
    )


def learnt_of(task: TaskConfig) -> dict[str, Any]:
    """What a planned task takes over from this one, see `LEARNT`."""
    settings = task.to_dict()
    return {name: settings[name] for name in LEARNT}


class _Row(NamedTuple):
    """One training image; `areas`: class -> voxels that show it (classification: 1 or 0), "" for any structure."""

    patient: str
    sides: Sequence[float]
    spacing: Spacing | None
    voxels: int
    zeros: int
    areas: dict[str, int]


def _looked_at(
    task: TaskConfig,
    source: Source,
    entry: DatalistItem,
    random: np.random.Generator,
    overall: "Sequence[_Values]",
    foreground: "Sequence[_Values]",
) -> list[_Row]:
    """The rows of an entry, read here, so that no image is kept while the next one is read; its intensities are added by channel."""
    image = source.image(entry)
    target = target_of(task, source, entry, image)
    spacing: Spacing | None = image.grid.spacing if task.spatial_dims == 3 and image.grid else None
    rows = []
    pictures = list(pictures_of(task, entry, image.array, target))  # views, not copies
    for _, picture, label in pictures:
        inside = label.any(axis=0) if task.kind == "segmentation" else None
        areas = {"": 0 if inside is None else int(inside.sum()), **dict(_classes(label, task))}
        zeros = int((picture == 0).all(axis=0).sum())
        rows.append(_Row(entry.patient, picture.shape[1:], spacing, picture[0].size, zeros, areas))
        for channel, values in enumerate(picture):
            overall[channel].add(values.reshape(-1), random, len(pictures))
            if inside is not None:
                foreground[channel].add(values[inside], random, len(pictures))
    return rows


class _Values:
    """Intensities that come image by image: sums of all, and a draw from each image for quantiles."""

    def __init__(self, drawn: int):
        self._limit = drawn
        self._drawn: list[np.ndarray] = []
        self._count, self._sum, self._squares = 0, 0.0, 0.0

    def add(self, values: np.ndarray, random: np.random.Generator, parts: int) -> None:
        """Those of one of the `parts` pictures of an image, (n,)."""
        self._count += values.size
        self._sum += float(values.sum(dtype=np.float64))
        self._squares += float(np.square(values, dtype=np.float64).sum())
        limit = max(1, self._limit // parts)
        self._drawn.append(values.copy() if values.size <= limit else values[random.integers(values.size, size=limit)])

    def summary(self) -> Intensities | None:
        """None where there were no values."""
        if not self._count:
            return None
        mean = self._sum / self._count
        low, middle, high = np.percentile(np.concatenate(self._drawn).astype(np.float64), (0.5, 50, 99.5)).tolist()
        return Intensities(low, middle, high, mean, max(self._squares / self._count - mean**2, 0.0) ** 0.5)


def _classes(target: np.ndarray, task: TaskConfig) -> Iterable[tuple[str, int]]:
    """Every class and how many voxels of an image show it (classification: 1 or 0)."""
    if task.target == "multilabel":
        return zip(task.labels, (int(part.sum()) for part in target), strict=True)
    if task.kind == "segmentation" and task.target == "binary":
        return [(task.labels[0], int(target.sum()))]
    return [(name, int((target == index).sum())) for index, name in enumerate(task.classes)]


def _spread(rows: Any, minimum: int) -> Spread:
    """Of one row an image, one column an axis; without the ends, which are single images, where those are not to be told."""
    percentiles = (10, 10, 50, 90, 90) if minimum > 1 else (0, 10, 50, 90, 100)
    return Spread(*(tuple(map(float, row)) for row in np.percentile(np.asarray(rows, np.float64), percentiles, axis=0)))


# -- on disk ---------------------------------------------------------------------------------------------------------------


def to_json(found: Sequence[DatasetFingerprint]) -> dict[str, Any]:
    """What a file of fingerprints holds."""
    return {"format": FORMAT, "sites": [json.loads(json.dumps(dataclasses.asdict(item))) for item in found]}


def from_json(value: Any) -> DatasetFingerprint:
    """One of the sites of `to_json`, checked.

    Raises:
        DataError: it is none.
    """
    try:
        return TypeAdapter(DatasetFingerprint).validate_json(json.dumps(value))
    except ValidationError as error:
        raise DataError(f"no fingerprint: {one_line(error)}") from error


def read_fingerprints(paths: Iterable[Path]) -> list[DatasetFingerprint]:
    """All sites of several files, in their order.

    Raises:
        DataError: a file that cannot be read or is none of fingerprints, or a site that is given twice.
    """
    found: dict[str, DatasetFingerprint] = {}
    for path in paths:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"no file of fingerprints ({FORMAT!r})")
            items = [from_json(item) for item in content["sites"]]
        except (OSError, LookupError, TypeError, ValueError, DataError) as error:
            raise DataError(f"{path}: no fingerprints ({one_line(error)}); write it anew with medflare data fingerprint") from error
        for item in items:
            if found.setdefault(item.site, item) is not item:
                raise DataError(f"{path}: site {item.site} is given twice; give each site once")
    return list(found.values())
