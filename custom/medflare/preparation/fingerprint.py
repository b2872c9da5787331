"""Dataset fingerprint of a site: the numbers of its training images that planning a task needs,
without a name of an image, file or patient.
"""

import dataclasses
import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from medflare.core.errors import Aborted, DataError, one_line
from medflare.core.files import write_json
from medflare.core.rng import numpy_generator
from medflare.core.settings import strict_dataclass
from medflare.core.text import read_json
from medflare.data.acquisition import Axes
from medflare.data.class_counts import class_counts
from medflare.data.datalist import FILE, DatalistItem, has_test_only, site_folders, site_name
from medflare.data.decoding import Source, file_state, pictures_of, target_of
from medflare.data.loading import check_unreadable, open_source, usable_items
from medflare.data.progress import announce, with_progress
from medflare.data.targets import encode_label
from medflare.preparation.structures import Layout, LayoutOfImages
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Spacing
from medflare.tasks.optimizers import Fraction

FORMAT = "medflare fingerprint 1"
KEPT_FILE = "fingerprint.json"  # beside the datalist
# Settings that a planned task takes from the task of the fingerprints: what is learnt, and what
# files mean.
LEARNT = (
    "name",
    "kind",
    "target",
    "labels",
    "label_values",
    "unlisted_labels",
    "metric",
    "spatial_dims",
    "channels",
    "pick",
    "missing_channels",
    "orientation",
    "slices",
    "surface_tolerance",
    "resplit",
    "unreadable",
    "unreadable_limit",
    "source",
)
_DRAWN = 10_000  # intensities per image for percentiles (nnU-Net)
_MAX_DRAWN = 2_000_000  # intensities of all images, which limits memory
_MAX_SUMMED = 2**20  # intensities of an image for mean and deviation, about

T = TypeVar("T")


@strict_dataclass
class Spread:
    """Percentiles over the images, each with a number per axis."""

    minimum: Axes
    p10: Axes
    median: Axes
    p90: Axes
    maximum: Axes


@strict_dataclass
class Intensities:
    """Stored values of images.

    Percentiles are of at most 10,000 values per image, mean and deviation of about a million.
    """

    p0_5: float
    median: float
    p99_5: float
    mean: float
    deviation: NonNegativeFloat


@strict_dataclass
class Channel:
    """Intensities of one channel."""

    overall: Intensities
    foreground: Intensities | None  # None without foreground or mask


@strict_dataclass
class Presence:
    """Number of images with a class, and its share of all voxels (segmentation).

    Both are None if suppressed for few patients; the number is also None if a sample of masks was
    read.
    """

    images: NonNegativeInt | None
    share: Fraction | None


@strict_dataclass
class DatasetFingerprint:
    """The training images of a site in numbers."""

    site: str
    images: PositiveInt  # in training: volumes, pictures, or slices
    patients: PositiveInt
    learnt: dict[str, Any]  # settings of the task, see `LEARNT`
    sizes: Spread  # stored pixels or voxels along each axis, volumes along the task's axes
    # Millimetres between voxels; None for pictures, or if a file does not have it.
    spacings: Spread | None
    extents: Spread | None  # sizes in millimetres, or None
    zeros: Fraction  # of pixels or voxels that are 0 in every channel
    channels: tuple[Channel, ...]
    classes: dict[str, Presence]  # in multiclass segmentation with background
    # Of structures; None for classes of images, and if suppressed for few patients.
    layout: Layout | None = None
    # Whether intensities, sizes and masks are those of a sample of the images.
    sampled: bool = False


Fingerprints: TypeAlias = Sequence[DatasetFingerprint]  # one of each site


def fingerprints(
    root: Path | str, task: TaskConfig, sample: int | None = None
) -> list[DatasetFingerprint]:
    """The fingerprint of every site below a data root, but of those with test images only.

    Args:
        root: one site's folder, or a folder with one folder per site.
        task: its labels, channels and axes count; its size, spacing, intensity transform and
            network do not.
        sample: training images that are read of a site, evenly spaced in its datalist; None: all.
            Fingerprints of samples are kept beside the datalists, and used until datalist, sampled
            files or task change.

    Raises:
        DataError: no site, no training image, or one that cannot be used (unless the task skips
            those).
    """
    sites = []
    for folder in site_folders(Path(root)):
        site = site_name(folder)
        if has_test_only(folder):
            announce(f"{site}: left out, as it has test images only")
            continue
        source_of_task = partial(open_source, site, root=folder)
        if sample is None:
            fingerprint = fingerprint_of(site, task, source_of_task)
        else:
            fingerprint = _saved_fingerprint(folder, site, task, source_of_task, sample)
        if fingerprint is not None:
            sites.append(fingerprint)
    if not sites:
        raise DataError(
            f"{root}: test images only; use the task of sites that train: "
            f"medflare data check {shlex.quote(str(root))} --task task.json"
        )
    return sites


def fingerprint_of(
    site: str,
    task: TaskConfig,
    source_of_task: Callable[[TaskConfig], Source],
    minimum: int = 0,
    aborted: Callable[[], bool] = lambda: False,
    sample: int | None = None,
) -> DatasetFingerprint | None:
    """The fingerprint of one site; training images are read one at a time.

    Args:
        source_of_task: task -> the site's images as that task reads them.
        sample: see `fingerprints`.
        minimum: small-cell suppression: number of patients below which a number is left out. A
            class or a foreground that fewer patients show is left out (of exclusive classes then
            all), and minimum and maximum of a `Spread` become the 10th and 90th percentile.
        aborted: called before every image.

    Returns:
        The fingerprint; None if there are fewer than `minimum` training patients.

    Raises:
        DataError: see `fingerprints`.
        Aborted: `aborted` returned True.
    """
    task = dataclasses.replace(task, spacing=None)
    source = source_of_task(task)
    listed = _training_entries(site, task, source)
    entries = listed if sample is None else evenly_spaced(listed, sample)
    is_sample = len(entries) < len(listed)
    # By channel: the values overall, and in the foreground.
    drawn = min(_DRAWN, _MAX_DRAWN // max(1, len(entries)))
    values = [(_Values(drawn), _Values(drawn)) for _ in range(task.image_channels)]
    layout = LayoutOfImages(task)
    rows = []
    failed = {}
    what = "a sample of the training images read" if is_sample else "training images read"
    for number, entry in enumerate(with_progress(entries, len(entries), f"site {site}, {what}")):
        if aborted():
            raise Aborted(f"site {site}: stopped on request")
        random = numpy_generator(0, site, number, "fingerprint")
        try:
            rows += _read_rows(task, source, entry, random, values, layout)
        except DataError as error:
            if task.unreadable == "error":
                raise
            failed[number] = str(error)
    check_unreadable(failed, len(entries), task, site)
    if not rows:
        raise DataError(f"site {site}: no training image; list some in datalist.json")
    images = len(rows)
    patients, sides, spacings, voxels, zeros, areas = zip(*rows, strict=True)
    if is_sample:
        images = round(len(rows) * len(listed) / len(entries))
        patients = tuple(entry.patient for entry in listed)
    number_of_patients = len({*patients})
    if number_of_patients < minimum:
        return None

    names = task.labels if task.kind == "segmentation" else task.classes
    suppressed = _suppressed_classes(names, rows, task, minimum)
    counts: Mapping[str, int] = {}
    if is_sample and task.kind == "classification":
        counts = _images_by_class(listed, task)
    classes = {}
    for name in names:
        of_class = [area[name] for area in areas]
        share = sum(of_class) / sum(voxels) if task.kind == "segmentation" else None
        if name in suppressed:
            classes[name] = Presence(None, None)
        elif is_sample:
            classes[name] = Presence(counts.get(name), share)
        else:
            classes[name] = Presence(len(of_class) - of_class.count(0), share)
    few_with_foreground = _is_small("", rows, task, minimum)
    has_layout = task.kind == "segmentation" and not few_with_foreground and not suppressed
    all_known = None not in spacings
    return DatasetFingerprint(
        site=site,
        images=images,
        patients=number_of_patients,
        learnt=learnt_of(task),
        sizes=_spread(sides, minimum),
        spacings=_spread(spacings, minimum) if all_known else None,
        extents=_spread(np.multiply(sides, spacings), minimum) if all_known else None,
        zeros=sum(zeros) / sum(voxels),
        channels=_channels(values, with_foreground=not few_with_foreground),
        classes=classes,
        layout=layout.summary(minimum) if has_layout else None,
        sampled=is_sample,
    )


def _training_entries(site: str, task: TaskConfig, source: Source) -> list[DatalistItem]:
    entries, *_ = usable_items(site, task, source)
    return [entry for entry in entries if entry.split == "training"]


def evenly_spaced(items: Sequence[T], most: int) -> list[T]:
    """At most `most` of the items, the first and the last among them.

    Examples:
        >>> evenly_spaced([1, 2, 3, 4, 5], 3), evenly_spaced([1, 2], 3)
        ([1, 3, 5], [1, 2])
    """
    rows = np.linspace(0, len(items) - 1, min(most, len(items))).astype(int)
    return [items[row] for row in np.unique(rows)]


def _images_by_class(entries: Sequence[DatalistItem], task: TaskConfig) -> Counter[str]:
    """Class -> listed images that have it."""
    images = Counter(dict.fromkeys(task.classes, 0))
    for entry in entries:
        target = encode_label(entry.label, task, entry.location)
        if target is not None:
            images.update(_class_areas(target, task))
    return images


def learnt_of(task: TaskConfig) -> dict[str, Any]:
    """The settings that a planned task takes from this one, see `LEARNT`."""
    settings = task.to_dict()
    return {name: settings[name] for name in LEARNT}


class _Row(NamedTuple):
    """One training image."""

    patient: str
    sides: Sequence[float]
    spacing: Spacing | None
    voxels: int
    zeros: int
    areas: dict[str, int]  # class -> its voxels (classification: 1 or 0), "" for any structure


class _Values:
    """Intensities of all images: sums of all values, and a random sample of each image.

    The percentiles are those of the samples.
    """

    def __init__(self, drawn: int):
        self._limit = drawn
        self._drawn: list[np.ndarray] = []
        self.count = 0
        self._sum = 0.0
        self._squares = 0.0

    def add(self, values: np.ndarray, random: np.random.Generator, parts: int) -> None:
        """Add values (n,) of one of the `parts` pictures of an image."""
        summed = values[:: max(1, values.size // _MAX_SUMMED)]
        self.count += summed.size
        self._sum += float(summed.sum(dtype=np.float64))
        self._squares += float(np.square(summed, dtype=np.float64).sum())
        limit = max(1, self._limit // parts)
        if values.size > limit:
            values = values[random.integers(values.size, size=limit)]
        self._drawn.append(values.copy())

    def summary(self) -> Intensities:
        mean = self._sum / self.count
        variance = max(self._squares / self.count - mean**2, 0.0)
        drawn = np.concatenate(self._drawn).astype(np.float64)
        low, middle, high = np.percentile(drawn, (0.5, 50, 99.5)).tolist()
        return Intensities(low, middle, high, mean, variance**0.5)


def _read_rows(
    task: TaskConfig,
    source: Source,
    entry: DatalistItem,
    random: np.random.Generator,
    values: Sequence[tuple[_Values, _Values]],
    layout: LayoutOfImages,
) -> list[_Row]:
    """The rows of an entry (several if a volume is cut into slices), whose intensities are added to
    `values` by channel, and structures to `layout`.
    """
    image = source.image(entry)
    target = target_of(task, source, entry, image)
    spacing = None
    if task.spatial_dims == 3 and image.grid:
        spacing = image.grid.spacing
    rows = []
    pictures = list(pictures_of(task, entry, image.array, target))  # views, not copies
    for _, picture, label in pictures:
        inside = np.zeros(picture.shape[1:], bool)
        if task.kind == "segmentation":
            inside = np.asarray(label.any(axis=0))
            layout.add(label, entry.patient)
        areas = {"": int(inside.sum()), **_class_areas(label, task)}
        zeros = int((picture == 0).all(axis=0).sum())
        rows.append(_Row(entry.patient, picture.shape[1:], spacing, picture[0].size, zeros, areas))
        for (overall, foreground), channel in zip(values, picture, strict=True):
            overall.add(channel.reshape(-1), random, len(pictures))
            foreground.add(channel[inside], random, len(pictures))
    return rows


def _class_areas(target: np.ndarray, task: TaskConfig) -> dict[str, int]:
    """Class -> its pixels or voxels in a target, see `target_of` (classification: 1 or 0)."""
    batch = torch.from_numpy(np.ascontiguousarray(target))[None]
    return dict(zip(task.classes, class_counts(batch, task).tolist(), strict=True))


def _is_small(name: str, rows: Sequence[_Row], task: TaskConfig, minimum: int) -> bool:
    """Whether some patients, but few, show a class or, in classification, do not."""
    shown = {row.patient for row in rows if row.areas[name]}
    without = {row.patient for row in rows if not row.areas[name]}
    few_without = task.kind == "classification" and 0 < len(without) < minimum
    return few_without or 0 < len(shown) < minimum


def _suppressed_classes(
    names: Sequence[str], rows: Sequence[_Row], task: TaskConfig, minimum: int
) -> set[str]:
    """The classes whose numbers are left out."""
    small = {name for name in names if _is_small(name, rows, task, minimum)}
    if small and task.target != "multilabel":
        return set(names)  # of exclusive classes one follows from the total and the others
    return small


def _channels(
    values: Sequence[tuple[_Values, _Values]], with_foreground: bool
) -> tuple[Channel, ...]:
    channels = []
    for overall, inside in values:
        foreground = inside.summary() if inside.count and with_foreground else None
        channels.append(Channel(overall.summary(), foreground))
    return tuple(channels)


def _spread(rows: Any, minimum: int) -> Spread:
    """Percentiles of rows (images, axes); if numbers are suppressed, without minimum and maximum,
    which are single images.
    """
    percentiles = (10, 10, 50, 90, 90) if minimum > 1 else (0, 10, 50, 90, 100)
    values = np.percentile(np.asarray(rows, np.float64), percentiles, axis=0)
    return Spread(*map(tuple, values.tolist()))


# -- on disk ---------------------------------------------------------------------------------------


def _saved_fingerprint(
    folder: Path,
    site: str,
    task: TaskConfig,
    source_of_task: Callable[[TaskConfig], Source],
    sample: int,
) -> DatasetFingerprint | None:
    """The fingerprint of a sample: from `KEPT_FILE` if nothing has changed since it was written,
    else made and written there.
    """
    listed = _training_entries(site, task, source_of_task(task))
    key = _key(folder, task, evenly_spaced(listed, sample))
    file = folder / KEPT_FILE
    with suppress(OSError, ValueError, LookupError, TypeError, DataError):
        content = read_json(file)
        if content["format"] == FORMAT and content["key"] == key:
            return from_json(content["sites"][0])
    fingerprint = fingerprint_of(site, task, source_of_task, sample=sample)
    if fingerprint is not None:
        with suppress(OSError):  # the folder may be read-only
            write_json(file, {"key": key, **to_json([fingerprint])})
    return fingerprint


def _key(folder: Path, task: TaskConfig, entries: Sequence[DatalistItem]) -> str:
    """Hash of the datalist, of the task's settings, and of sizes and times of the sampled files."""
    digest = hashlib.sha256((folder / FILE).read_bytes())
    digest.update(json.dumps(learnt_of(task), sort_keys=True).encode())
    for entry in entries:
        for path in entry.paths:
            digest.update(json.dumps(file_state(path)).encode())
    return digest.hexdigest()


def to_json(sites: Fingerprints) -> dict[str, Any]:
    """The content of a file of fingerprints."""
    listed = [json.loads(json.dumps(dataclasses.asdict(site))) for site in sites]
    return {"format": FORMAT, "sites": listed}


def from_json(value: Any) -> DatasetFingerprint:
    """One of the sites of `to_json`, validated; DataError for any other value."""
    try:
        return TypeAdapter(DatasetFingerprint).validate_json(json.dumps(value))
    except ValidationError as error:
        raise DataError(f"not a fingerprint: {one_line(error)}") from error


def read_fingerprints(paths: Iterable[Path]) -> list[DatasetFingerprint]:
    """All sites of several files.

    Raises:
        DataError: a file is not of fingerprints, or a site is in two files.
    """
    sites: dict[str, DatasetFingerprint] = {}
    for path in paths:
        try:
            content = read_json(path)
            if content["format"] != FORMAT:
                raise ValueError(f"format is not {FORMAT!r}")
            listed = list(map(from_json, content["sites"]))
        except (OSError, LookupError, TypeError, ValueError, DataError) as error:
            raise DataError(
                f"{path}: no fingerprints ({one_line(error)}); "
                "write them with medflare data fingerprint"
            ) from error
        for site in listed:
            if sites.setdefault(site.site, site) is not site:
                raise DataError(f"{path}: site {site.site} is there twice; give each site once")
    return list(sites.values())
