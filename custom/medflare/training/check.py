"""Data and task looked at before a site joins: everything read, counted, measured and drawn; problems listed, not hidden."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch.nn import functional

from medflare.core.errors import ConfigError, DataError, one_line
from medflare.core.rng import numpy_generator, seeded
from medflare.core.store import make_folder, write_atomically
from medflare.data.datalist import DatalistItem, check_patients, site_folders, site_name
from medflare.data.decoding import Source, target_of
from medflare.data.geometry import format_shape
from medflare.data.loading import SiteData, allowed_folders, load_site_data, renumbered_entries
from medflare.data.local import CacheSettings, LocalSettings, cache_with_folder
from medflare.data.progress import counted
from medflare.data.targets import class_counts, encode_label, scarce_classes, scarce_line
from medflare.data.transforms import Augmentation, Preprocessing, middle_slice
from medflare.networks.catalogue import initial_network
from medflare.networks.dry_run import check_network
from medflare.tasks.config import TaskConfig
from medflare.tasks.losses import build_loss
from medflare.training.montage import contact_sheet
from medflare.training.opening import check_batch_bounds, check_task_bounds

_MOST_PROBLEMS = 10  # shown per site
_LOOKED_AT: Final = 20  # images of a site
_CLIPPED: Final = 0.5  # share of an image's foreground that may become one number
_LARGE: Final = 20.0  # mean or deviation that no network is fed with as a rule
_FLAT: Final = 0.005  # deviation below which an image is one number to a network
_PROPOSED: Final = '{"name": "NormalizeIntensity", "nonzero": true, "channel_wise": true}'
_MOST_SIZES = 3  # shown per site
_THUMBNAIL = 12  # pixels a side of what the figure looks at
_MOST_IMAGES = 300  # per site: enough for two digits


@dataclass
class SiteReport:
    """What one site's folder holds.

    Attributes:
        splits: split -> (images, patients); a volume counts by its slices.
        sizes: stored size as text -> files.
        classes: class -> its training images, or pixels (segmentation).
        intensity: minimum, mean, deviation and maximum of the stored intensities.
        notes: unusual but allowed.
        left_out: images that cannot be used and that the task allows to skip, one line each.
        problems: what keeps the site from joining, and structures that the training masks lack for no reason given, one line each.
    """

    splits: dict[str, tuple[int, int]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    classes: dict[str, int] = field(default_factory=dict)
    intensity: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class CheckReport:
    """What a data root holds for a task.

    Attributes:
        shift: see `shift.site_shift`; None where it cannot be measured, for `shift_reason`.
        thumbnails: the contact sheet, where one was asked for.
    """

    task: TaskConfig
    root: Path
    sites: dict[str, SiteReport]
    shift: float | None = None
    shift_reason: str = ""
    thumbnails: Path | None = None

    @property
    def ok(self) -> bool:
        """Whether every site can join."""
        return not any(report.problems for report in self.sites.values())

    def render(self) -> str:
        """The report as text: what every site has, its notes and problems, then the verdict."""
        lines = [f"{self.root}, task {self.task.name}"]
        for name, report in self.sites.items():
            lines += ["", name, *(f"  {line}" for line in self._described(report))]
            lines += [f"  note: {note}" for note in report.notes]
            lines += [f"  left out: {line}" for line in report.left_out]
            lines += [f"  PROBLEM: {problem}" for problem in report.problems]
        if self.shift is None:
            lines += ["", f"shift between sites: not measured, {self.shift_reason}"]
        else:
            chance = f"chance {1 / len(self.sites):.2f}"
            lines += ["", f"shift between sites: {self.shift:.2f} balanced accuracy of telling the site from a thumbnail ({chance})"]
        lines += [f"thumbnails, a row for each site: {self.thumbnails}"] if self.thumbnails else []
        lines.append("OK" if self.ok else "NOT OK: solve the problems above and check again")
        return "\n".join(lines)

    def _described(self, report: SiteReport) -> list[str]:
        """A site's counts, sizes, classes and intensities, a line each; what could not be read is left out."""
        unit = ("pixels" if self.task.spatial_dims == 2 else "voxels") if self.task.kind == "segmentation" else "images"
        found = {split: f"{images} images of {patients} patients" for split, (images, patients) in report.splits.items()}
        found["stored sizes"] = ", ".join(f"{size} ({files})" for size, files in list(report.sizes.items())[:_MOST_SIZES])
        if len(report.sizes) > _MOST_SIZES:
            found["stored sizes"] += f" and {len(report.sizes) - _MOST_SIZES} more"
        found[f"training {unit}"] = ", ".join(f"{label} {number}" for label, number in report.classes.items())
        if report.intensity:
            words = "{minimum:.4g} to {maximum:.4g}, mean {mean:.4g}, sd {deviation:.4g}"
            found["intensities"] = words.format(**report.intensity)
        column = max(map(len, found)) + 2
        return [f"{name:{column}}{value}" for name, value in found.items() if value]


# -- read and counted -----------------------------------------------------------------------------------------------------


def check_site(root: Path | str, task: TaskConfig, out: Path | str | None = None, own: LocalSettings = LocalSettings()) -> CheckReport:
    """Reads everything below a data root: one site's folder, or a folder with one folder per site.

    Args:
        root: holds datalist.json itself, or folders that do.
        task: what the data are for.
        out: folder for the contact sheet `thumbnails.png`, or None.
        own: the site's own settings: its bounds, and the folders that a datalist may name files in.

    Raises:
        ConfigError: the task asks more than the site's bounds allow, or itself cannot work, see `check_task`.
        DataError: `root` holds no site. Problems of a site's data are listed in the report instead.
        OSError: `out` cannot be made.
    """
    root = Path(root)
    check_task_bounds(task, own.bounds, "this site")
    check_batch_bounds(task, own.bounds, "this site")
    check_task(task)
    folders = site_folders(root)
    if out is not None:
        make_folder(Path(out))  # one that cannot be is said before hours of reading
    report = CheckReport(task, root, {})
    data = {}
    for folder in folders:
        name = site_name(folder)
        site, found = _check_folder(name, folder, task, own)
        report.sites[name] = site
        site.problems, site.left_out = _shortened(site.problems), _shortened(site.left_out)
        if found is not None:
            data[name] = found
    if len(data) < 2:
        report.shift_reason = "it takes two sites"
    else:
        report.shift, report.shift_reason = site_shift(data)
    if out is not None and data:
        report.thumbnails = Path(out) / "thumbnails.png"
        write_atomically(report.thumbnails, contact_sheet(data, task))
    return report


def check_task(task: TaskConfig) -> None:
    """One training step on noise, so that what does not fit shows before a federation starts.

    Raises:
        ConfigError: a network, loss or transform that is unknown, misconfigured or does not fit the task's image size.
    """
    check_network(task)
    loss, augmentation = build_loss(task), Augmentation(task)
    random = numpy_generator(0, "check task")
    images = torch.tensor(random.random((2, task.image_channels, *task.size), dtype=np.float32))
    area = task.size if task.kind == "segmentation" else ()
    targets = torch.ones(2, len(task.labels), *area) if task.target == "multilabel" else torch.ones(2, *area, dtype=torch.long)
    network = initial_network(task, seed=0)
    try:
        images, targets = augmentation(images, targets, np.random.RandomState(0))
        with seeded(0, "check task"):
            loss(network(images), targets).backward()
    except (RuntimeError, ValueError, IndexError) as error:
        reason = one_line(error)
        raise ConfigError(
            f"task {task.name}: a training step on {task.size} images fails ({reason}); change size, network or augment"
        ) from error


def _check_folder(name: str, folder: Path, task: TaskConfig, own: LocalSettings) -> tuple[SiteReport, SiteData | None]:
    report = SiteReport()
    source = Source(folder, task, allowed_folders(own.data_folders), own.bounds)
    try:
        entries, _ = renumbered_entries(name, task, source)
        check_patients(entries)
    except DataError as error:
        report.problems.append(str(error))
        return report, None
    _read_everything(source, counted(entries, len(entries), f"site {name}, images checked"), task, report)
    if report.problems and task.unreadable == "error":
        return report, None
    report.left_out, report.problems = report.problems, []
    try:
        data = load_site_data(name, task, folder, cache=cache_with_folder(CacheSettings()), folders=own.data_folders, bounds=own.bounds)
    except DataError as error:
        report.problems.append(str(error))
        return report, None
    for split in ("train", "validation", "test"):
        report.splits[split] = len(data.split(split)), len(set(data.split(split).patients))
    counts = class_counts(data.train.targets, task).tolist()
    report.classes = dict(zip(task.classes, counts, strict=True))
    report.notes += [note for note in data.notes if note not in data.absent]
    report.problems += data.absent
    scarce = scarce_classes(data.train.targets, task, data.annotated)
    if scarce := {name: images for name, images in scarce.items() if images or not data.absent}:
        report.notes.append(scarce_line(scarce))
    return report, data


def _shortened(lines: list[str]) -> list[str]:
    hidden = len(lines) - _MOST_PROBLEMS
    return [*lines[:_MOST_PROBLEMS], f"... and {hidden} more"] if hidden > 0 else lines


def _read_everything(source: Source, entries: Iterable[DatalistItem], task: TaskConfig, report: SiteReport) -> None:
    """Every file, whatever the others are like: sizes, intensities and problems go into the report."""
    sizes: Counter[str] = Counter()
    moments, intensity, copies = [], IntensityCheck(task), _Copies()
    for entry in entries:
        try:
            if task.kind == "classification" and encode_label(entry.label, task, entry.place) is None:
                continue
            read = source.image(entry)
            target_of(task, source, entry, read)
        except DataError as error:
            report.problems.append(str(error))
            continue
        image = read.array
        sizes[format_shape(image.shape[1:])] += 1
        intensity.add(image)
        copies.add(image, entry)
        moments.append((image.min(), image.mean(dtype=np.float64), np.square(image, dtype=np.float64).mean(), image.max()))
    report.sizes = dict(sizes.most_common())
    report.notes += filter(None, [intensity.note(), copies.note()])
    if moments:
        low, mean, square, high = np.array(moments).T
        deviation = float(np.sqrt(max(square.mean() - mean.mean() ** 2, 0.0)))
        report.intensity = {"minimum": float(low.min()), "mean": float(mean.mean()), "deviation": deviation, "maximum": float(high.max())}


class _Copies:
    """Images that are the same, value by value, under two patients: copies, or one image saved twice, which no name tells."""

    def __init__(self) -> None:
        self._first: dict[bytes, DatalistItem] = {}
        self._found: list[tuple[str, str]] = []

    def add(self, image: np.ndarray, entry: DatalistItem) -> None:
        """One image (C, ...) as it is stored; of one value it says nothing."""
        if image.min() == image.max():
            return
        content = hashlib.blake2b(str(image.shape).encode(), digest_size=16)
        content.update(np.ascontiguousarray(image).data)
        first = self._first.setdefault(content.digest(), entry)
        if first.patient != entry.patient:
            self._found.append((entry.name, first.name))

    def note(self) -> str:
        """How many there are and the first of them; "" where there are none."""
        if not self._found:
            return ""
        count = "1 image is" if len(self._found) == 1 else f"{len(self._found)} images are"
        both = " and ".join(self._found[0])
        return f"{count} the same as one of another patient, the first: {both}; give both one patient, or list it once"


# -- intensities ----------------------------------------------------------------------------------------------------------


class IntensityCheck:
    """Judges by a task's intensity transform the first images that it is shown."""

    def __init__(self, task: TaskConfig):
        self._preprocessing, self._name = Preprocessing(task), task.intensity["name"]
        self._wrong = self._seen = 0
        self._first = ""

    def add(self, image: np.ndarray) -> None:
        """Look at an image (C, ...) as it is stored."""
        if self._seen >= _LOOKED_AT:
            return
        self._seen += 1
        if problem := unsuitable(image, self._preprocessing.intensities(image).numpy()):
            self._first = self._first or problem
            self._wrong += 1

    def note(self) -> str | None:
        """A warning with a proposal where at least half of the images are unsuitable, else None."""
        if not self._wrong or 2 * self._wrong < self._seen:
            return None
        return (
            f"the task's intensity ({self._name}) does not suit {self._wrong} of {self._seen} images looked at, the first: {self._first}; "
            f'for images without a unit, set "intensity": {_PROPOSED}'
        )


def unsuitable(stored: np.ndarray, fed: np.ndarray) -> str | None:
    """What is wrong with an image as a network is fed with it, in words, or None.

    Args:
        stored: intensities (C, ...).
        fed: the same after the task's transform.

    Examples:
        >>> steps = np.arange(100.0)
        >>> unsuitable(steps, steps / 100), unsuitable(steps, steps.clip(0, 20) / 20), unsuitable(np.zeros(9), np.zeros(9))
        (None, 'clipped: 81 % of what is above the lowest number becomes 1', None)
        >>> unsuitable(steps, 1000 * steps), unsuitable(steps, steps / 1e5)
        ('too large: mean 4.95e+04, deviation 2.89e+04', 'all alike: deviation 0.000289')
    """
    above = stored > stored.min()
    if not above.any():
        return None
    top = fed.max()
    clipped = above & (fed == top)
    share = clipped.sum() / above.sum()
    if share > _CLIPPED and np.ptp(stored[clipped]) > 0:
        return f"clipped: {share:.0%} of what is above the lowest number becomes {top:.4g}".replace("%", " %")
    mean, deviation = float(fed.mean(dtype=np.float64)), float(fed.std(dtype=np.float64))
    if max(abs(mean), deviation) > _LARGE:
        return f"too large: mean {mean:.3g}, deviation {deviation:.3g}"
    return f"all alike: deviation {deviation:.3g}" if deviation < _FLAT else None


# -- shift between sites --------------------------------------------------------------------------------------------------


def site_shift(data: Mapping[str, SiteData]) -> tuple[float | None, str]:
    """How far sites' images differ: balanced accuracy of telling the site from a 12 x 12 thumbnail.

    Linear discriminant analysis with shrinkage on what the network sees (of a volume its middle slice), three-fold cross-validation by
    patient. 1 / sites means that nothing tells them apart.

    Returns:
        The figure and "", or None and the reason.
    """
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
    from sklearn.metrics import balanced_accuracy_score
    from sklearn.model_selection import StratifiedGroupKFold, cross_val_predict

    pictures, sites, patients = [], [], []
    for name, site in data.items():
        images = [(split, row) for split in (site.train, site.validation, site.test) for row in range(len(split))]
        owners = np.array([f"{name}/{patient}" for split in (site.train, site.validation, site.test) for patient in split.patients])
        if len(set(owners)) < 3:
            return None, f"site {name} has fewer than three patients"
        rows = numpy_generator(0, name, "shift").permutation(len(images))[:_MOST_IMAGES]
        chosen = (images[row][0].image(images[row][1]) for row in rows)
        small = [functional.interpolate(middle_slice(image)[None], (_THUMBNAIL, _THUMBNAIL), mode="area") for image in chosen]
        pictures.append(torch.cat(small).flatten(1).numpy())
        sites += [name] * len(rows)
        patients += owners[rows].tolist()
    folds = StratifiedGroupKFold(3, shuffle=True, random_state=0)
    told = cross_val_predict(
        LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto"), np.concatenate(pictures), sites, groups=patients, cv=folds
    )
    return float(balanced_accuracy_score(sites, told)), ""
