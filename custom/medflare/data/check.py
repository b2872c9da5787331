"""Data and task looked at before a site joins: everything read, counted, measured and drawn; problems listed, not hidden."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from medflare.core.errors import ConfigError, DataError
from medflare.core.rng import numpy_generator, seeded
from medflare.data.contact_sheet import write_contact_sheet
from medflare.data.datalist import FILE, Entry
from medflare.data.decoding import FileSource, target_of
from medflare.data.splits import SiteData, class_counts, load_site_data
from medflare.data.targets import encode_label
from medflare.data.transforms import Augmentation
from medflare.networks.catalogue import initial_network
from medflare.tasks.config import TaskConfig
from medflare.tasks.losses import build_loss

_MOST_PROBLEMS = 10  # shown per site
_MOST_SIZES = 3
_THUMBNAIL = 12  # pixels a side of what the shift figure looks at
_SHIFT_IMAGES = 300  # per site: enough for two digits


@dataclass
class SiteReport:
    """What one site's folder holds.

    Attributes:
        splits: split -> (images, patients); a volume counts by its slices.
        sizes: stored size as text -> files.
        classes: class -> its training images, or pixels (segmentation).
        intensity: minimum, mean, deviation and maximum of the stored intensities.
        notes: unusual but allowed.
        problems: what keeps the site from joining, one line each.
    """

    splits: dict[str, tuple[int, int]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    classes: dict[str, int] = field(default_factory=dict)
    intensity: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class CheckReport:
    """What a data root holds for a task.

    Attributes:
        shift: see `site_shift`; None where it cannot be measured, for `shift_reason`.
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
        return not any(report.problems for report in self.sites.values())

    def render(self) -> str:
        """The report as text: what every site has, its notes and problems, then the verdict."""
        lines = [f"{self.root}, task {self.task.name}"]
        for name, report in self.sites.items():
            lines += ["", name, *(f"  {line}" for line in self._described(report))]
            lines += [f"  note: {note}" for note in report.notes]
            lines += [f"  PROBLEM: {problem}" for problem in report.problems]
        if self.shift is None:
            lines += ["", f"shift between sites: not measured, {self.shift_reason}"]
        else:
            chance = f"chance {1 / len(self.sites):.2f}"
            lines += ["", f"shift between sites: {self.shift:.2f} balanced accuracy of telling the site from a thumbnail ({chance})"]
        lines += [f"thumbnails: {self.thumbnails}"] if self.thumbnails else []
        lines.append("OK" if self.ok else "NOT OK: solve the problems above and check again")
        return "\n".join(lines)

    def _described(self, report: SiteReport) -> list[str]:
        """A site's counts, sizes, classes and intensities, a line each; what could not be read is left out."""
        unit = "pixels" if self.task.kind == "segmentation" else "images"
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


def check_site(root: Path | str, task: TaskConfig, out: Path | str | None = None) -> CheckReport:
    """Reads everything below a data root: one site's folder, or a folder with one folder per site.

    Args:
        root: holds datalist.json itself, or folders that do.
        task: what the data are for.
        out: folder for the contact sheet `thumbnails.png`, or None.

    Raises:
        ConfigError: the task itself cannot work, see `check_task`.
        DataError: `root` holds no site. Problems of a site's data are listed in the report instead.
    """
    root = Path(root)
    check_task(task)
    folders = [root] if (root / FILE).is_file() else sorted(path.parent for path in root.glob(f"*/{FILE}"))
    if not folders:
        raise DataError(f"{root}: neither a {FILE} nor folders that hold one; give a site's folder or the folder of several sites")
    report = CheckReport(task, root, {})
    data = {}
    for folder in folders:
        name = folder.resolve().name
        report.sites[name], found = _check_folder(name, folder, task)
        if found is not None:
            data[name] = found
    if len(data) < 2:
        report.shift_reason = "it takes two sites"
    else:
        report.shift, report.shift_reason = site_shift(data)
    if out is not None and data:
        report.thumbnails = write_contact_sheet(Path(out) / "thumbnails.png", data, task)
    return report


def check_task(task: TaskConfig) -> None:
    """One training step on noise, so that what does not fit shows before a federation starts.

    Raises:
        ConfigError: a network, loss or transform that is unknown, misconfigured or does not fit the task's image size.
    """
    loss, augmentation = build_loss(task), Augmentation(task)
    random = numpy_generator(0, "check task")
    images = torch.tensor(random.random((2, task.channels, *task.size), dtype=np.float32))
    area = task.size if task.kind == "segmentation" else ()
    targets = torch.ones(2, len(task.labels), *area) if task.target == "multilabel" else torch.ones(2, *area, dtype=torch.long)
    network = initial_network(task, seed=0)
    try:
        images, targets = augmentation(images, targets, np.random.RandomState(0))
        with seeded(0, "check task"):
            loss(network(images), targets).backward()
    except (RuntimeError, ValueError, IndexError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"task {task.name}: a training step on {task.size} images fails ({reason}); change size, network or augment"
        ) from error


def _check_folder(name: str, folder: Path, task: TaskConfig) -> tuple[SiteReport, SiteData | None]:
    report = SiteReport()
    source = FileSource(folder, task)
    try:
        entries = source.entries()
    except DataError as error:
        report.problems.append(str(error))
        return report, None
    _read_everything(source, entries, task, report)
    if report.problems:
        return report, None
    try:
        data = load_site_data(name, task, folder)
    except DataError as error:
        report.problems.append(str(error))
        return report, None
    for split in ("train", "validation", "test"):
        report.splits[split] = len(data.split(split)), len(set(data.split(split).patients))
    counts = class_counts(data.train.targets, task).tolist()
    report.classes = dict(zip(task.classes, counts, strict=True))
    report.notes += data.notes
    return report, data


def _read_everything(source: FileSource, entries: list[Entry], task: TaskConfig, report: SiteReport) -> None:
    """Every file, whatever the others are like: sizes, intensities and problems go into the report."""
    sizes: Counter[str] = Counter()
    moments = []
    for entry in entries:
        try:
            if task.kind == "classification" and encode_label(entry.label, task, entry.place) is None:
                continue
            image = source.image(entry)
            target_of(task, source, entry, image)
        except DataError as error:
            report.problems.append(str(error))
            continue
        sizes[" x ".join(map(str, image.shape[1:]))] += 1
        moments.append((image.min(), image.mean(dtype=np.float64), np.square(image, dtype=np.float64).mean(), image.max()))
    hidden = len(report.problems) - _MOST_PROBLEMS
    if hidden > 0:
        report.problems[_MOST_PROBLEMS:] = [f"... and {hidden} more"]
    report.sizes = dict(sizes.most_common())
    if moments:
        low, mean, square, high = np.array(moments).T
        deviation = float(np.sqrt(max(square.mean() - mean.mean() ** 2, 0.0)))
        report.intensity = {"minimum": float(low.min()), "mean": float(mean.mean()), "deviation": deviation, "maximum": float(high.max())}


def site_shift(data: dict[str, SiteData]) -> tuple[float | None, str]:
    """How far sites' images differ: balanced accuracy of telling the site from a 12 x 12 thumbnail.

    Linear discriminant analysis with shrinkage on what the network sees, three-fold cross-validation by patient. 1 / sites
    means that nothing tells them apart.

    Returns:
        The figure and "", or None and the reason.
    """
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
    from sklearn.metrics import balanced_accuracy_score
    from sklearn.model_selection import StratifiedGroupKFold, cross_val_predict

    pictures, sites, patients = [], [], []
    for name, site in data.items():
        images = torch.cat([site.train.images, site.validation.images, site.test.images])
        owners = np.array([f"{name}/{patient}" for split in (site.train, site.validation, site.test) for patient in split.patients])
        if len(set(owners)) < 3:
            return None, f"site {name} has fewer than three patients"
        rows = numpy_generator(0, name, "shift").permutation(len(images))[:_SHIFT_IMAGES]
        small = functional.interpolate(images[rows], (_THUMBNAIL, _THUMBNAIL), mode="area")
        pictures.append(small.flatten(1).numpy())
        sites += [name] * len(rows)
        patients += owners[rows].tolist()
    folds = StratifiedGroupKFold(3, shuffle=True, random_state=0)
    told = cross_val_predict(
        LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto"), np.concatenate(pictures), sites, groups=patients, cv=folds
    )
    return float(balanced_accuracy_score(sites, told)), ""
