"""Check a site's data and the task before training: read every image, count, measure, and list all
problems with their remedies.
"""

import hashlib
import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import ConcatDataset

from medflare.core.errors import ConfigError, DataError, UnreadableError
from medflare.core.files import make_folder, write_atomically
from medflare.core.rng import numpy_generator, seeded
from medflare.core.text import format_shape, printable
from medflare.data.class_counts import class_counts, counts_by_image, scarce_classes, scarce_line
from medflare.data.datalist import (
    FILE,
    SPLITS,
    DatalistItem,
    check_patients,
    folders_without_datalist,
    kind_of_labels,
    read_datalist,
    site_folders,
    site_name,
)
from medflare.data.decoding import Source, target_of
from medflare.data.loading import SiteData, load_site_data, open_source, renumbered_items
from medflare.data.local import LocalSettings
from medflare.data.progress import with_progress
from medflare.data.reading import Image, read_stored
from medflare.data.targets import encode_label
from medflare.data.transforms import Augmentation, Preprocessing, middle_slice
from medflare.networks.catalogue import initial_network
from medflare.networks.dry_run import check_network
from medflare.preparation.step_cost import noise, step_explained
from medflare.preparation.structures import structure_masks
from medflare.tasks.classes import FEWEST
from medflare.tasks.config import TaskConfig
from medflare.tasks.losses import build_loss
from medflare.training.montage import contact_sheet
from medflare.training.opening import check_batch_bounds, check_single_batches, check_task_bounds
from medflare.training.site_rules import check_used_images

_SHEET = "thumbnails.png"
# What the folders of this tool's output hold: checks, runs, and folders of runs.
_OUTPUTS = (_SHEET, "results.json", "*/results.json")
_MAX_PROBLEMS = 10  # printed per site
_MAX_ALIKE = 3  # problems of one text that are printed each
_MAX_SIZES = 3  # printed per site
_INTENSITY_IMAGES = 20  # images of a site whose intensities are judged
_MOST_NUMBERS = 2**20  # of an image, for its mean, deviation and transform
_CLIPPED = 0.5  # fraction of an image's foreground that may be clipped
_LARGE = 20.0  # mean or deviation that is unusual for a network's input
_BYTE = 255  # the highest number of 8 bits
_FLAT = 0.005  # deviation below which an input is constant
# Fraction of a mask, beyond which a structure that has its corners is probably the background.
_FILLED = 0.5
_FEW_FILLED = 0.2  # of all masks, as of a slip
_THUMBNAIL = 12  # pixels a side, for the shift between sites
_SHIFT_IMAGES = 300  # per site; enough for two digits


@dataclass
class SiteCheck:
    """What a check finds in one site's folder."""

    # Split -> (images, patients); a volume counts by its slices.
    splits: dict[str, tuple[int, int]] = field(default_factory=dict)
    # Splits with fewer patients than `minimum_patients`, in words.
    suppressed: str = ""
    # Stored size as text -> number of files.
    sizes: Counter[str] = field(default_factory=Counter)
    # Class -> its training images, or pixels (segmentation).
    classes: dict[str, int] = field(default_factory=dict)
    # Minimum, mean, deviation and maximum of the stored intensities.
    intensity: dict[str, float] = field(default_factory=dict)
    # Unusual but allowed.
    notes: list[str] = field(default_factory=list)
    # Images that cannot be used and that the task skips, one line each.
    left_out: list[str] = field(default_factory=list)
    # Why it cannot join, and structures that no training mask shows, one line each.
    problems: list[str] = field(default_factory=list)
    # Whether it has test images only: it can be an outside site, which does not train.
    test_only: bool = False

    def lines(self, task: TaskConfig) -> list[str]:
        """The report as text; what could not be read is left out."""
        unit = "images"
        if task.kind == "segmentation":
            unit = "pixels" if task.spatial_dims == 2 else "voxels"
        rows = {}
        for split, (images, patients) in self.splits.items():
            rows[split] = f"{images} images of {patients} patients"
        rows["stored sizes"] = ", ".join(
            f"{size} ({files})" for size, files in self.sizes.most_common(_MAX_SIZES)
        )
        if len(self.sizes) > _MAX_SIZES:
            rows["stored sizes"] += f" and {len(self.sizes) - _MAX_SIZES} more"
        rows[f"training {unit}"] = ", ".join(
            f"{label} {number}" for label, number in self.classes.items()
        )
        if self.intensity:
            text = "{minimum:.4g} to {maximum:.4g}, mean {mean:.4g}, sd {deviation:.4g}"
            rows["intensities"] = text.format(**self.intensity)
        width = max(map(len, rows)) + 2
        lines = [f"{name:{width}}{value}" for name, value in rows.items() if value]
        for note in self.notes:
            lines.append(f"note: {note}")
        for line in _first_lines(_grouped(self.left_out)):
            lines.append(f"left out: {line}")
        for problem in _first_lines(_grouped(self.problems)):
            lines.append(f"PROBLEM: {problem}")
        return lines


def _grouped(lines: Iterable[str]) -> list[str]:
    """The lines, FILE: TEXT; more than three with one text as one, with the first file."""
    by_text = defaultdict(list)
    for line in lines:
        by_text[line.partition(": ")[2] or line].append(line)
    shown = []
    for alike in by_text.values():
        if len(alike) > _MAX_ALIKE:
            alike = [f"{len(alike)} alike, the first: {alike[0]}"]
        shown += alike
    return shown


def _first_lines(lines: list[str]) -> list[str]:
    hidden = len(lines) - _MAX_PROBLEMS
    if hidden <= 0:
        return lines
    return [*lines[:_MAX_PROBLEMS], f"... and {hidden} more"]


@dataclass
class CheckReport:
    """What a check finds in a data root for a task."""

    task: TaskConfig
    root: Path
    sites: dict[str, SiteCheck]
    shift: float | None = None  # see `site_shift`; None if it cannot be measured
    shift_reason: str = ""  # why it cannot
    unread: Sequence[str] = ()  # sites whose images cannot be used, so that they have no shift
    thumbnails: Path | None = None  # the contact sheet, if requested
    notes: list[str] = field(default_factory=list)  # of all sites, one line each
    problem: str = ""  # why these sites together cannot train, with the remedy

    @property
    def ok(self) -> bool:
        """Whether every site can join, and one of several can train."""
        return not self.problem and not any(report.problems for report in self.sites.values())

    def render(self) -> str:
        """The report as text."""
        lines = [f"{self.root}, task {self.task.name}"]
        for name, report in self.sites.items():
            lines += ["", name]
            for line in report.lines(self.task):
                lines.append(f"  {line}")
        shift = f"not measured, {self.shift_reason}"
        if self.shift is not None:
            chance = 1 / (len(self.sites) - len(self.unread))
            shift = (
                f"{self.shift:.2f} balanced accuracy of telling the site from a thumbnail "
                f"(chance {chance:.2f})"
            )
            if self.unread:
                shift += f", without {', '.join(self.unread)}"
        lines += ["", f"shift between sites: {shift}"]
        if self.thumbnails:
            lines.append(f"thumbnails, a row for each site: {self.thumbnails}")
        for note in self.notes:
            lines.append(f"note: {note}")
        if self.problem:
            lines.append(f"PROBLEM: {self.problem}")
        lines.append("OK" if self.ok else "NOT OK: solve the problems above and check again")
        return "\n".join(lines)


def check_site(
    root: Path | str,
    task: TaskConfig,
    out: Path | str | None = None,
    local: LocalSettings = LocalSettings(),
) -> CheckReport:
    """Read everything below a data root: one site's folder, or a folder with one folder per site.

    Args:
        root: has a datalist.json, or folders that do.
        out: folder for the contact sheet `thumbnails.png`, or None.
        local: the site's local settings: its bounds, and the folders that a datalist may name files
            in.

    Raises:
        ConfigError: the task exceeds the site's bounds, or does not work, see `check_task`.
        DataError: `root` has no site. Problems of a site's data are listed in the report instead.
        OSError: `out` cannot be made.
    """
    root = Path(root)
    check_task_bounds(task, local.bounds, "this site")
    check_batch_bounds(task, local.bounds, "this site")
    check_task(task)
    folders = site_folders(root)
    if out is not None:
        make_folder(Path(out))
    report = CheckReport(task, root, {})
    if folders != [root]:
        report.notes += _no_sites(root, out)
    data = {}
    seen: _SeenImages = {}
    for folder in folders:
        name = site_name(folder)
        site = SiteCheck()
        report.sites[name] = site
        try:
            site_data = _check_folder(name, folder, task, local, site, seen)
            if site_data is not None:
                data[name] = site_data
        except DataError as error:
            site.problems.append(str(error))
    none_trains = all(site.test_only for site in report.sites.values())
    if none_trains and folders != [root]:  # a site's folder alone may be that of an outside site
        report.problem = (
            "every site has test images only, so no site can train; "
            "add a site that has training images"
        )
    report.unread = [name for name in report.sites if name not in data]
    report.shift, report.shift_reason = site_shift(data)
    if len(data) < 2 <= len(report.sites):
        unread = ", ".join(report.unread)
        report.shift_reason = f"as it takes two sites without problems; see those of {unread}"
    if out is not None and data:
        report.thumbnails = Path(out) / _SHEET
        write_atomically(report.thumbnails, contact_sheet(data, task))
    return report


def unreadable_files(root: Path) -> list[str]:
    """A line for each file of the datalists below a folder that cannot be read, without a task; one
    for many with one problem, unless they are damaged.
    """
    damaged = []
    lines = []
    for folder in site_folders(root):
        listed = read_datalist(folder, "classification")
        if not listed:
            continue
        entries = read_datalist(folder, kind_of_labels(listed))
        for entry in with_progress(entries, len(entries), f"{folder.name}, files checked"):
            for file in entry.paths:
                try:
                    read_stored(file, mask=file in entry.masks)
                except UnreadableError as error:
                    damaged.append(str(error))
                except DataError as error:
                    lines.append(str(error))
    return damaged + _grouped(lines)


def _no_sites(root: Path, out: Path | str | None) -> list[str]:
    """A line that names the folders beside the sites without a datalist, if there are some; `out`
    and folders of results are not meant as sites.
    """
    folders = []
    for folder in folders_without_datalist(root):
        is_output = any(file for pattern in _OUTPUTS for file in folder.glob(pattern))
        is_out = out is not None and folder.resolve() == Path(out).resolve()
        if not (is_output or is_out):
            folders.append(folder)
    if not folders:
        return []
    names = ", ".join(folder.name for folder in folders)
    command = f"medflare data init {shlex.quote(str(folders[0]))}"
    return [f"folders without a {FILE} are no sites: {names}; write it with {command}"]


def check_task(task: TaskConfig) -> None:
    """One training step on noise, so that a task that does not work fails before a federation
    starts.

    Raises:
        ConfigError: a network, loss or transform that is unknown, misconfigured or does not fit the
            task's image size.
    """
    check_network(task)
    loss = build_loss(task)
    augmentation = Augmentation(task)
    images, targets = noise(task, 2)
    network = initial_network(task, seed=0)
    with step_explained(task), seeded(0, "check task"):
        images, targets = augmentation(images, targets, np.random.RandomState(0))
        loss(network(images), targets).backward()
    check_single_batches(task)


def _check_folder(
    name: str,
    folder: Path,
    task: TaskConfig,
    local: LocalSettings,
    report: SiteCheck,
    seen: "_SeenImages",
) -> SiteData | None:
    """The data of a site, or None if images cannot be used; fills `report` and `seen`; DataError if
    the datalist or the whole cannot be used.
    """
    source = open_source(name, task, folder, local.data_folders, local.bounds)
    entries, _ = renumbered_items(name, task, source)
    check_patients(entries)
    if all(folder / entry.patient == entry.image for entry in entries):
        report.notes.append(f"patients are unknown (none in {FILE}): each image counts as one")
    logged = with_progress(entries, len(entries), f"site {name}, images checked")
    _read_images(source, logged, task, report, seen)
    if report.problems and task.unreadable == "error":
        return None
    report.left_out = report.problems
    report.problems = []
    report.test_only = {entry.split for entry in entries} == {"test"}
    role = "outside" if report.test_only else "inside"
    data = load_site_data(
        name,
        task,
        folder,
        role=role,
        folders=local.data_folders,
        bounds=local.bounds,
        in_memory=False,
    )
    for split in SPLITS:
        patients = data.split(split).patients
        report.splits[split] = (len(data.split(split)), len(set(patients)))
    report.suppressed = _suppressed(report.splits, local.minimum_patients)
    if report.suppressed:
        report.notes.append(report.suppressed)
    report.notes += few_patients(data, task)
    if report.test_only:
        report.notes += [*data.notes, "has test images only, so it can only be an outside site"]
        return data
    counts = class_counts(data.train.targets, task).tolist()
    report.classes = dict(zip(task.classes, counts, strict=True))
    report.notes += [note for note in data.notes if note not in data.absent]
    if data.dropped:
        report.notes.append(data.dropped_line)
    report.problems += data.absent
    try:
        check_used_images(name, task, data, local.minimum_patients, local.bounds)
    except ConfigError as error:
        report.problems.append(str(error))
    scarce = scarce_classes(data.train.targets, task, data.annotated)
    if data.absent:
        scarce = {label: images for label, images in scarce.items() if images}
    if scarce:
        report.notes.append(scarce_line(scarce))
    return data


def _suppressed(splits: Mapping[str, tuple[int, int]], minimum: int) -> str:
    """Which splits have images of fewer patients than `minimum`, in words; "" if none has."""
    few = []
    for split, (_, patients) in splits.items():
        if 0 < patients < minimum:
            few.append(f"{patients} {split} patients")
    if not few:
        return ""
    return (
        f"{' and '.join(few)}: fewer than minimum_patients {minimum}, so that no metric of these "
        "images leaves the site"
    )


def few_patients(data: SiteData, task: TaskConfig) -> list[str]:
    """A line about splits, else about their classes, of too few patients for an interval."""
    few = []
    for split in ("validation", "test"):
        part = data.split(split)
        patients = len(set(part.patients))
        if 0 < patients < FEWEST:
            few.append(f"{split} {patients}")
        if patients < FEWEST:
            continue
        shown = counts_by_image(part.targets, task) > 0
        for name, of_images in zip(task.classes, shown.T.tolist(), strict=True):
            count = len(set(compress(part.patients, of_images)))
            if count < FEWEST and name in (data.annotated or task.classes):
                few.append(f"{name!r} in {split} {count}")
    if not few:
        return []
    return [f"fewer than {FEWEST} patients, so no interval and little meaning: {', '.join(few)}"]


# Shape, and hash of the thinned values -> the first such image of all sites, and its source.
_SeenImages: TypeAlias = dict[tuple[tuple[int, ...], bytes], tuple[DatalistItem, Source]]


def _read_images(
    source: Source,
    entries: Iterable[DatalistItem],
    task: TaskConfig,
    report: SiteCheck,
    seen: _SeenImages,
) -> None:
    """Read every file: sizes, intensities and problems go into the report."""
    preprocessing = Preprocessing(task)
    moments: list[tuple[float, ...]] = []
    unsuitable = []
    copies: list[str] = []
    leaks: list[str] = []
    filled = defaultdict[str, list[str]](list)  # structure -> images whose masks it fills
    unscaled = []  # volumes whose spacing is unknown
    is_classification = task.kind == "classification"
    for entry in entries:
        try:
            if is_classification and encode_label(entry.label, task, entry.location) is None:
                continue  # the task leaves out its class
            read = source.image(entry)
            for name in filled_structures(target_of(task, source, entry, read), task):
                filled[name].append(entry.name)
        except DataError as error:
            report.problems.append(str(error))
            continue
        if read.grid is not None and read.grid.spacing is None:
            unscaled.append(entry.name)
        image = read.array
        report.sizes[format_shape(_stored_sides(read, task))] += 1
        few = _thinned(image)
        mean = few.mean(dtype=np.float64)
        mean_square = np.square(few, dtype=np.float64).mean()
        moments.append((image.min(), mean, mean_square, image.max()))
        if len(moments) <= _INTENSITY_IMAGES:
            problem = intensity_problem(few, preprocessing.intensities(few).numpy())
            if problem:
                unsuitable.append(problem)
        digest = hashlib.sha256(np.ascontiguousarray(few).data).digest()
        first, its_source = seen.setdefault((image.shape, digest), (entry, source))
        varied = image.min() < image.max()  # plain images are alike
        of_another = first.patient != entry.patient or its_source is not source
        if varied and of_another and np.array_equal(image, its_source.image(first).array):
            other_label = is_classification and first.label != entry.label
            pair = f"{printable(str(entry.image))} and {printable(str(first.image))}"
            equal = copies if first.split == entry.split else leaks
            equal.append(f"{pair}, with other labels" if other_label else pair)
    judged = min(len(moments), _INTENSITY_IMAGES)
    if 2 * len(unsuitable) >= judged > 0:
        report.notes.append(
            f"the task's intensity ({task.intensity['name']}) does not suit {len(unsuitable)} of "
            f"{judged} images, the first: {unsuitable[0]}; for images without a unit, set "
            '"intensity": {"name": "NormalizeIntensity", "nonzero": true, "channel_wise": true}'
        )
    report.notes += filter(None, [depth_note([highest for *_, highest in moments], task)])
    report.notes += _lines_of_filled(filled, len(moments))
    report.notes += _line_of_copies(copies, "patient or site")
    report.notes += _line_of_copies(leaks, "split, so tests may tell what was memorised")
    if unscaled:
        report.notes.append(
            f"{len(unscaled)} images give no spacing, so distances are in voxels, the first: "
            f"{unscaled[0]}"
        )
    if moments:
        report.intensity = _overall_intensity(moments)


def _stored_sides(image: Image, task: TaskConfig) -> Sequence[int]:
    """The sides of an image before it is resampled to the task's spacing."""
    if task.spatial_dims == 3 and image.stored_grid is not None:
        return image.stored_grid.turned(task.orientation).shape
    return image.array.shape[1:]


def _lines_of_filled(filled: Mapping[str, Sequence[str]], masks: int) -> list[str]:
    """Lines about structures that fill all masks, or a few; `filled`: structure -> images."""
    lines = []
    for name, of_images in filled.items():
        if len(of_images) == masks:
            which = f"all of {masks} masks"
        elif len(of_images) <= _FEW_FILLED * masks:
            which = f"{len(of_images)} of {masks} masks, the first: {of_images[0]}"
        else:
            continue
        lines.append(
            f"WARNING: {name} fills {which}, with their corners; if they are inverted, as by "
            "their palette, store the structure as 1 and the rest as 0"
        )
    return lines


def _line_of_copies(copies: Sequence[str], apart: str) -> list[str]:
    """A line about images that equal one of another patient, site or split."""
    if not copies:
        return []
    line = f"{len(copies)} images equal one of another {apart}, the first: {copies[0]}"
    return [f"{line}; give both one patient, or leave one out"]


def _thinned(image: np.ndarray) -> np.ndarray:
    """An image (C, ...) of at most about a million numbers: every k-th along each axis."""
    sides = image.ndim - 1
    step = math.ceil((image.size / _MOST_NUMBERS) ** (1 / sides))
    every = (slice(None), *[slice(None, None, step)] * sides)
    return image[every]


def depth_note(highest: Sequence[float], task: TaskConfig) -> str:
    """A line if pictures of 8 and of 16 bits, by the highest number of each, are scaled alike."""
    dark = sum(number <= _BYTE for number in highest)
    scaled = task.intensity["name"] == "ScaleIntensityRange" and task.intensity.get("a_min") == 0
    if not scaled or dark in (0, len(highest)):
        return ""
    return (
        f"WARNING: {dark} of {len(highest)} images have numbers up to {_BYTE}, as of 8 bits, the "
        f"others up to {max(highest):g}, and the task scales all alike; save all with as many "
        'bits, or set "intensity": {"name": "NormalizeIntensity", "channel_wise": true}'
    )


def _overall_intensity(moments: list[tuple[float, ...]]) -> dict[str, float]:
    """Minimum, mean, deviation and maximum of all images, which count equally.

    Args:
        moments: minimum, mean, mean of the squares and maximum of each image.
    """
    low, mean, square, high = np.array(moments).T
    variance = square.mean() - mean.mean() ** 2
    return {
        "minimum": float(low.min()),
        "mean": float(mean.mean()),
        "deviation": float(np.sqrt(max(variance, 0.0))),
        "maximum": float(high.max()),
    }


def filled_structures(target: np.ndarray, task: TaskConfig) -> list[str]:
    """The structures of a mask (see `target_of`) that have all its corners and more than half of
    it; none in classification.
    """
    if task.kind == "classification":
        return []
    names = []
    for name, shown in structure_masks(target, task).items():
        corners = shown[np.ix_(*[(0, -1)] * shown.ndim)]
        if corners.all() and shown.mean() > _FILLED:
            names.append(name)
    return names


def intensity_problem(stored: np.ndarray, transformed: np.ndarray) -> str:
    """Why the intensity transform does not suit an image, or ""; intensities (C, ...) as stored and
    after the task's transform.

    Examples:
        >>> steps = np.arange(100.0)
        >>> intensity_problem(steps, steps / 100), intensity_problem(steps, steps.clip(0, 20) / 20)
        ('', 'clipped: 81 % of what is above the lowest number becomes 1')
        >>> intensity_problem(steps, 1000 * steps), intensity_problem(steps, steps / 1e5)
        ('too large: mean 4.95e+04, deviation 2.89e+04', 'constant: deviation 0.000289')
    """
    above = stored > stored.min()
    if not above.any():
        return ""
    clipped = above & (transformed == transformed.max())
    fraction = clipped.sum() / above.sum()
    if fraction > _CLIPPED and np.ptp(stored[clipped]) > 0:
        becomes = f"becomes {transformed.max():.4g}"
        return f"clipped: {100 * fraction:.0f} % of what is above the lowest number {becomes}"
    mean = float(transformed.mean(dtype=np.float64))
    deviation = float(transformed.std(dtype=np.float64))
    if max(abs(mean), deviation) > _LARGE:
        return f"too large: mean {mean:.3g}, deviation {deviation:.3g}"
    if deviation < _FLAT:
        return f"constant: deviation {deviation:.3g}"
    return ""


def site_shift(data: Mapping[str, SiteData]) -> tuple[float | None, str]:
    """How far sites' images differ: balanced accuracy of telling the site from a 12 x 12 thumbnail.

    Linear discriminant analysis with shrinkage on the network's input (of a volume its middle
    slice), three-fold cross-validation by patient. 1 / sites is chance.

    Returns:
        The accuracy and "", or None and the reason.
    """
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
    from sklearn.metrics import balanced_accuracy_score
    from sklearn.model_selection import StratifiedGroupKFold, cross_val_predict

    if len(data) < 2:
        return None, "as it takes two sites"
    pictures = []
    sites = []
    patients = []
    for name, site in data.items():
        splits = [site.train, site.validation, site.test]
        images: ConcatDataset[tuple[torch.Tensor, torch.Tensor]] = ConcatDataset(splits)
        owners = [*site.train.patients, *site.validation.patients, *site.test.patients]
        if len(set(owners)) < 3:
            return None, f"as site {name} has fewer than three patients"
        rows = numpy_generator(0, name, "shift").permutation(len(images))[:_SHIFT_IMAGES]
        thumbnails = {}
        shown = with_progress(
            sorted(rows), len(rows), f"site {name}, images compared with other sites"
        )
        for row in shown:  # a volume's slices in turn: each volume is decoded once
            picture = middle_slice(images[row][0])[None]
            thumbnails[row] = functional.interpolate(picture, (_THUMBNAIL, _THUMBNAIL), mode="area")
        for row in rows:
            pictures.append(thumbnails[row].flatten(1).numpy())
            sites.append(name)
            patients.append(f"{name}/{owners[row]}")
    folds = StratifiedGroupKFold(3, shuffle=True, random_state=0)
    model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto")
    predicted = cross_val_predict(model, np.concatenate(pictures), sites, groups=patients, cv=folds)
    return float(balanced_accuracy_score(sites, predicted)), ""
