"""A site's fingerprint: what planning a task needs to know about its training images, as numbers. No image, file or patient is in it."""

import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from medflare.core.errors import Aborted, DataError
from medflare.core.rng import numpy_generator
from medflare.core.settings import STRICT, checked, nested
from medflare.data.datalist import Entry, site_folders, site_name
from medflare.data.decoding import pictures_of, target_of
from medflare.data.loading import refuse_too_many, source_of, used_entries
from medflare.data.progress import counted
from medflare.data.sources import Source
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Spacing

FORMAT: Final = "medflare fingerprint 1"
_REMEDY: Final = "write it anew with medflare data fingerprint"
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

    overall: Annotated[Intensities, nested(Intensities)]
    foreground: Annotated[Intensities, nested(Intensities)] | None


@dataclass(frozen=True, config=STRICT)
class Presence:
    """How many images show a class, and its share of all voxels (None in classification); None where that would tell of a few patients."""

    images: Annotated[int, Field(ge=0)] | None
    share: Share | None


@dataclass(frozen=True, config=STRICT)
class Fingerprint:
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
    sizes: Annotated[Spread, nested(Spread)]
    spacings: Annotated[Spread, nested(Spread)] | None
    extents: Annotated[Spread, nested(Spread)] | None
    zeros: Share
    channels: tuple[Annotated[Channel, nested(Channel)], ...]
    classes: dict[str, Annotated[Presence, nested(Presence)]]


# -- made ------------------------------------------------------------------------------------------------------------------


def fingerprints(root: Path | str, task: TaskConfig) -> list[Fingerprint]:
    """Of every site below a data root; training images alone are read, one at a time.

    Args:
        root: one site's folder, or a folder with one folder per site.
        task: says what files mean and which images train. Its size, intensity transform and network do not matter, nor its spacing:
            volumes are looked at as stored, along its axes.

    Raises:
        DataError: no site, no training image, or one that cannot be used (unless the task skips those).
    """
    places = [(site_name(folder), folder) for folder in site_folders(Path(root))]
    found = [fingerprint_of(site, task, partial(source_of, site, root=folder)) for site, folder in places]
    return [item for item in found if item is not None]


def fingerprint_of(
    site: str,
    task: TaskConfig,
    source_of_task: Callable[[TaskConfig], Source],
    minimum: int = 0,
    aborted: Callable[[], bool] = lambda: False,
) -> Fingerprint | None:
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
    entries = [entry for entry in used_entries(site, task, source)[0] if entry.split == "training"]
    seen = _Seen(task, min(_DRAWN, _MOST_DRAWN // max(1, len(entries))))
    failed: dict[int, str] = {}
    for number, entry in enumerate(counted(entries, len(entries), f"site {site}, training images looked at")):
        if aborted():
            raise Aborted(f"site {site}: stopped on request")
        try:
            seen.add(source, entry, numpy_generator(0, site, number, "fingerprint"))
        except DataError as error:
            if task.unreadable == "error":
                raise
            failed[number] = str(error)
    refuse_too_many(failed, len(entries), task, site)
    if not seen.sizes:
        raise DataError(f"site {site}: no training image to look at; list some in datalist.json")
    return seen.fingerprint(site, learnt_of(task), minimum)


def learnt_of(task: TaskConfig) -> dict[str, Any]:
    """What a planned task takes over from this one, see `LEARNT`."""
    settings = task.to_dict()
    return {name: settings[name] for name in LEARNT}


class _Seen:
    """What is kept of the images that were looked at: sums, sizes, and some intensities."""

    def __init__(self, task: TaskConfig, drawn: int):
        self.sizes: list[Sequence[float]] = []
        self._task = task
        self._spacings: list[Spacing | None] = []
        self._patients: set[str] = set()
        self._zeros = self._voxels = 0
        self._overall, self._foreground = ([_Values(drawn) for _ in range(task.image_channels)] for _ in range(2))
        self._images: Counter[str] = Counter()
        self._areas: Counter[str] = Counter()
        self._shown: defaultdict[str, set[str]] = defaultdict(set)  # class -> patients; "" for any structure
        self._lack: defaultdict[str, set[str]] = defaultdict(set)  # class -> patients with an image that does not show it

    def add(self, source: Source, entry: Entry, random: np.random.Generator) -> None:
        """One image, read here, so that none is kept while the next one is read."""
        image = source.image(entry)
        target = target_of(self._task, source, entry, image)
        spacing = image.here.spacing if self._task.spatial_dims == 3 and image.here else None
        self._patients.add(entry.patient)
        pictures = list(pictures_of(self._task, entry, image.array, target))  # views, not copies
        for _, picture, label in pictures:
            self.sizes.append(picture.shape[1:])
            self._spacings.append(spacing)
            self._voxels += picture[0].size
            self._zeros += int((picture == 0).all(axis=0).sum())
            for name, area in _classes(label, self._task):
                self._images[name] += bool(area)
                self._areas[name] += area
                self._shown[name].update([entry.patient] if area else [])
                self._lack[name].update([] if area else [entry.patient])
            inside = label.any(axis=0) if self._task.kind == "segmentation" else None
            if inside is not None and inside.any():
                self._shown[""].add(entry.patient)
            for channel, values in enumerate(picture):
                self._overall[channel].add(values.reshape(-1), random, len(pictures))
                if inside is not None:
                    self._foreground[channel].add(values[inside], random, len(pictures))

    def fingerprint(self, site: str, learnt: dict[str, Any], minimum: int) -> Fingerprint | None:
        """All of it as numbers, each of as many patients as `fingerprint_of` says."""
        if len(self._patients) < minimum:
            return None
        known = [spacing for spacing in self._spacings if spacing is not None]
        whole = len(known) == len(self.sizes)
        ends = _INNER if minimum > 1 else _ALL
        names = self._task.labels if self._task.kind == "segmentation" else self._task.classes

        def few(name: str) -> bool:
            groups = [self._shown[name], self._lack[name]] if self._task.kind == "classification" else [self._shown[name]]
            return any(0 < len(patients) < minimum for patients in groups)

        small = {name for name in names if few(name)}
        if small and self._task.target != "multilabel":  # classes exclude each other: one follows from the total and the others
            small = set(names)
        return Fingerprint(
            site=site,
            images=len(self.sizes),
            patients=len(self._patients),
            learnt=learnt,
            sizes=_spread(self.sizes, ends),
            spacings=_spread(known, ends) if whole else None,
            extents=_spread(np.multiply(self.sizes, known), ends) if whole else None,
            zeros=self._zeros / self._voxels,
            channels=tuple(
                Channel(everywhere, None if few("") else inside.summary())
                for everywhere, inside in ((first.summary(), second) for first, second in zip(self._overall, self._foreground, strict=True))
                if everywhere is not None
            ),
            classes={name: Presence(None, None) if name in small else self._presence(name) for name in names},
        )

    def _presence(self, name: str) -> Presence:
        return Presence(self._images[name], self._areas[name] / self._voxels if self._task.kind == "segmentation" else None)


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


_ALL: Final = (0, 10, 50, 90, 100)
_INNER: Final = (10, 10, 50, 90, 90)  # without the ends, which are single images


def _spread(rows: Any, percentiles: tuple[int, ...]) -> Spread:
    """Of one row an image, one column an axis."""
    return Spread(*(tuple(map(float, row)) for row in np.percentile(np.asarray(rows, np.float64), percentiles, axis=0)))


# -- on disk ---------------------------------------------------------------------------------------------------------------


def to_json(found: Sequence[Fingerprint]) -> dict[str, Any]:
    """What a file of fingerprints holds.

    Args:
        found: of one site or several.
    """
    return {"format": FORMAT, "sites": [json.loads(json.dumps(dataclasses.asdict(item))) for item in found]}


def read_fingerprints(paths: Iterable[Path]) -> list[Fingerprint]:
    """All sites of several files, in their order.

    Raises:
        DataError: a file that cannot be read or is none of fingerprints, or a site that is given twice.
    """
    found: dict[str, tuple[Path, Fingerprint]] = {}
    for path in paths:
        for item in _read(path):
            if item.site in found:
                raise DataError(f"{path}: site {item.site} is also in {found[item.site][0]}; give each site once")
            found[item.site] = (path, item)
    return [item for _, item in found.values()]


def _read(path: Path) -> list[Fingerprint]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: file not found; {_REMEDY}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not readable as JSON ({error}); {_REMEDY}") from error
    if not isinstance(content, Mapping) or content.get("format") != FORMAT or not isinstance(content.get("sites"), list):
        raise DataError(f"{path}: no file of fingerprints ({FORMAT!r}); {_REMEDY}")
    return [
        checked(Fingerprint, item if isinstance(item, Mapping) else {}, f"{path} sites[{number}]", error=DataError, remedy=_REMEDY)
        for number, item in enumerate(content["sites"])
    ]
