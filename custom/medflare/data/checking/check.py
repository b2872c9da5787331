"""Data and task looked at before a site joins: everything read, counted, measured and drawn; problems listed, not hidden."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from medflare.core.errors import ConfigError, DataError, one_line
from medflare.core.rng import numpy_generator, seeded
from medflare.core.store import make_folder
from medflare.data.checking.contact_sheet import write_contact_sheet
from medflare.data.checking.intensity import IntensityCheck
from medflare.data.checking.report import CheckReport, SiteReport
from medflare.data.checking.shift import site_shift
from medflare.data.datalist import Entry, check_patients, site_folders, site_name
from medflare.data.decoding import target_of
from medflare.data.geometry import by
from medflare.data.loading import allowed_folders, known_entries, load_site_data
from medflare.data.progress import counted
from medflare.data.settings import CacheSettings, placed
from medflare.data.sites.local import LocalSettings
from medflare.data.sites.opening import refuse_large_batch, refuse_large_task
from medflare.data.sources import FileSource
from medflare.data.splits import SiteData
from medflare.data.targets import class_counts, encode_label, scarce_classes, scarce_line
from medflare.data.transforms import Augmentation
from medflare.networks.catalogue import initial_network
from medflare.networks.dry_run import check_memory, check_network
from medflare.tasks.config import TaskConfig
from medflare.tasks.losses import build_loss

_MOST_PROBLEMS = 10  # shown per site


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
    refuse_large_task(task, own.bounds, "this site")
    refuse_large_batch(task, own.bounds, "this site")
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
        report.thumbnails = write_contact_sheet(Path(out) / "thumbnails.png", data, task)
    return report


def check_task(task: TaskConfig) -> None:
    """One training step on noise, so that what does not fit shows before a federation starts.

    Raises:
        ConfigError: a network, loss or transform that is unknown, misconfigured or does not fit the task's image size.
    """
    check_network(task)
    check_memory(task, 2, torch.device("cpu"), f"task {task.name}")
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
    source = FileSource(folder, task, allowed_folders(own.data_folders), own.bounds)
    try:
        entries, _ = known_entries(name, task, source)
        check_patients(entries)
    except DataError as error:
        report.problems.append(str(error))
        return report, None
    _read_everything(source, counted(entries, len(entries), f"site {name}, images checked"), task, report)
    if report.problems and task.unreadable == "error":
        return report, None
    report.left_out, report.problems = report.problems, []
    try:
        data = load_site_data(name, task, folder, cache=placed(CacheSettings()), folders=own.data_folders, bounds=own.bounds)
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


def _read_everything(source: FileSource, entries: Iterable[Entry], task: TaskConfig, report: SiteReport) -> None:
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
        sizes[by(image.shape[1:])] += 1
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
        self._first: dict[bytes, Entry] = {}
        self._found: list[tuple[str, str]] = []

    def add(self, image: np.ndarray, entry: Entry) -> None:
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
