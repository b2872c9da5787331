"""A task proposed from a sample of a data root's images and the speed of this device, each setting
with its reason.
"""

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import nibabel

from medflare.core.errors import ConfigError, DataError
from medflare.core.text import format_seconds, format_shape, printable
from medflare.data.class_counts import scarce, scarce_line
from medflare.data.datalist import (
    FILE,
    DatalistItem,
    class_numbers,
    kind_of_labels,
    mask_names,
    read_content,
    read_datalist,
    site_folders,
    site_name,
)
from medflare.data.dicom import read, segment_codes, segments_overlap, tags_of
from medflare.data.local import DEVICE_VARIABLE
from medflare.data.progress import announce, with_progress
from medflare.data.reading import (
    NIFTI,
    PICTURES,
    dicom_images,
    explained,
    is_segmentation,
    palette_of,
    read_stored,
    suffix,
)
from medflare.data.targets import SiteStructures, differing_structures, plain_name, same_names
from medflare.networks.features import keeps_features
from medflare.networks.weights import INSTALL, PACKAGED, packaged_weights, scaled_for
from medflare.preparation.check import check_task
from medflare.preparation.device_rules import (
    local_epochs,
    picture_size,
    scaled,
    small_segmentation,
    small_unet,
)
from medflare.preparation.fingerprint import Fingerprints, evenly_spaced, fingerprints
from medflare.preparation.learning_rate import usual_rate
from medflare.preparation.mask_values import mask_values
from medflare.preparation.planning import (
    UNDECIDED,
    Choice,
    Modality,
    ProposedTask,
    Settings,
    chosen_settings,
    intensity,
    plan,
)
from medflare.preparation.round_time import Stopwatch, device_name, median_size
from medflare.tasks.config import load_task
from medflare.tasks.metrics_table import default_metrics
from medflare.training.computing import usable_device

_READ = 20  # training images of a site, for the fingerprint
_SAMPLED_IMAGES = 6  # of a site, to count channels
# Masks of a site that are read to list label values; `medflare data check` reads all.
_LEAST_MASKS = 20
_MOST_MASKS = 200
_MASK_PIXELS = 200_000_000  # of these masks
_MAX_SIDE = {2: 224, 3: 96}  # of a classifier's input
_STEP = 16  # sides are multiples of it
_FEW_IMAGES = 2000  # training images below which a small network is enough
_IMBALANCE = 3  # ratio of the largest class to the smallest from which classes are balanced
_AIR = -200  # Hounsfield units; only CT has lower values
_MAX_BATCH = 16
_SMALL = "small_cnn"  # the smallest classifier of the catalogue
_PRETRAINED = "efficientnet_lite0"
TIMED_ROUNDS = 20  # of a run whose time is printed
_LATE = 1.25  # times the limit of a round, from which a warning says so


@dataclass(frozen=True)
class TaskHints:
    """What the user knows about the task; empty values are proposed."""

    name: str = ""
    labels: tuple[str, ...] = ()  # names of classes or structures, without the background
    channels: int | None = None  # of an image
    dims: int | None = None  # 2 or 3
    size: tuple[int, ...] = ()  # of the network's input; images are resized to it
    network: str = ""  # its name
    modality: Modality | None = None  # see `planning.plan`
    memory: float = 8.0  # GiB of the smallest training device
    minutes: float = 2.0  # of a round on this device, at most
    # Whether pretrained weights are required; otherwise they are proposed if a package with them is
    # installed.
    pretrained: bool = False


class DatasetSummary(NamedTuple):
    """The settings of a task that the data decide, the same with reasons, whether the images are
    pictures (not volumes or DICOM), and whether a header names them CT.
    """

    settings: Settings
    choices: tuple[Choice, ...]
    pictures: bool
    is_ct: bool


def propose(root: Path, hints: TaskHints) -> ProposedTask:
    """A task that passes `check_task`, for the device of MEDFLARE_DEVICE.

    UnreadableError for the first damaged file, ConfigError if a hint does not fit, or no network
    does, DataError as of `summarise`.
    """
    if not hints.minutes > 0:
        raise ConfigError(f"--minutes {hints.minutes:g}: give the minutes of a round, above 0")
    summary = summarise(root, hints)
    dims = summary.settings["spatial_dims"]
    segments = summary.settings["kind"] == "segmentation"
    if hints.size and len(hints.size) != dims:
        raise ConfigError(f"--size {','.join(map(str, hints.size))}: images have {dims} dimensions")
    of_data = summary.settings | {"metric": "dice" if segments else "f1_macro"}
    task = load_task({**UNDECIDED, **of_data, "size": list(hints.size or [64] * dims)})
    sites = fingerprints(root, task, sample=_READ)
    modality = _modality(sites, summary, hints)
    device = usable_device(os.environ.get(DEVICE_VARIABLE, "cpu"), DEVICE_VARIABLE)
    stopwatch = Stopwatch(sites, device, hints.memory, limit=60 * hints.minutes)
    if segments:
        proposed = _segmentation(stopwatch, modality.value, hints, of_data)
    else:
        proposed = _classification(sites, modality.value, hints, of_data)
    if hints.network:
        proposed = _changed(proposed, [Choice("network", {"name": hints.network}, "as given")])
    proposed = dataclasses.replace(
        proposed,
        choices=(*summary.choices, modality, *proposed.choices),
        warnings=_few_images(sites),
    )
    if segments:
        proposed = _with_pretrained(proposed, sites, hints)
    else:
        proposed = _within_minutes(proposed, hints, stopwatch)
    proposed = _with_rate_and_epochs(proposed, hints, stopwatch)
    check_task(load_task(proposed.settings))
    return proposed


def _few_images(sites: Fingerprints) -> tuple[str, ...]:
    """A warning for every site with classes that few images show, where all images were counted."""
    warnings = []
    for site in sites:
        counts = {}
        for name, presence in site.classes.items():
            if presence.images is not None:
                counts[name] = presence.images
        few = scarce(counts)
        if few:
            warnings.append(f"{site.site}: {scarce_line(few)}")
    return tuple(warnings)


# -- what datalists and files say ------------------------------------------------------------------


def summarise(root: Path, hints: TaskHints) -> DatasetSummary:
    """What datalists and files say about a task; ConfigError for labels that do not fit or differ
    by site, DataError for no images.
    """
    if len(set(hints.labels)) < len(hints.labels):
        raise ConfigError(f"--labels {','.join(hints.labels)}: a name is there twice")
    folders = site_folders(root)
    listed = [read_datalist(folder, "classification") for folder in folders]
    headers = [read_content(folder) for folder in folders]
    for folder, items in zip(folders, listed, strict=True):
        if not items:
            raise DataError(f"{folder / FILE}: lists no image; write it with medflare data init")
    label = listed[0][0].label
    kind = kind_of_labels(listed[0])
    names = class_numbers(headers[0].get("labels"))
    for folder, header in zip(folders, headers, strict=True):
        if not same_names(class_numbers(header.get("labels")), names):
            problem = (
                f"its labels are not those of {folders[0] / FILE}; make them equal (data init "
                "--classes with the classes of all sites)"
            )
            if kind == "segmentation":
                first = _site_structures(folders[0])
                problem = differing_structures(_site_structures(folder), first)
            raise ConfigError(f"{folder / FILE}: {problem}")
    reason = "labels are numbers of classes"
    if kind == "segmentation":
        reason = "labels are mask files"
    choices = [Choice("kind", kind, reason)]
    entries = [read_datalist(folder, kind) for folder in folders]
    labelled = []
    images = []
    for site in entries:
        labelled += site if kind == "classification" else evenly_spaced(site, _masks_to_read(site))
        images += evenly_spaced(site, _SAMPLED_IMAGES)
    if kind == "segmentation":
        structure = printable(_common(headers, "structure")) or "foreground"
        choices += _structures(labelled, names, hints, label, structure)
        choices += _codes(labelled, chosen_settings(choices)["labels"])
    else:
        choices += _classes(labelled, names, hints, label)
    channels = _channel_names(headers[0].get("channel_names"), folders[0] / FILE)
    choices += _channels_and_dims(images, channels, hints)
    incomplete = sum(None in entry.channels for site in entries for entry in site)
    if incomplete:
        choices.append(Choice("missing_channels", "zeros", f"{incomplete} images lack a channel"))
    name = hints.name or _plain_name(_common(headers, "name") or root.resolve().name)
    settings = {"name": name, **chosen_settings(choices)}
    pictures = all(suffix(entry.image) in PICTURES for entry in images)
    return DatasetSummary(settings, tuple(choices), pictures, _is_ct(images, channels.values()))


def _site_structures(folder: Path) -> SiteStructures:
    header = read_content(folder)
    first = read_datalist(folder, "segmentation")[0]
    return SiteStructures(
        site_name(folder),
        class_numbers(header.get("labels")),
        str(header.get("structure") or ""),
        mask_each=len(first.masks) > 1,
        segments=is_segmentation(first.masks[0]),
    )


def _common(headers: Iterable[Mapping[str, Any]], key: str) -> str:
    """The text that all headers have, or ""."""
    texts = {str(header.get(key) or "") for header in headers}
    return texts.pop() if len(texts) == 1 else ""


def _is_ct(images: Sequence[DatalistItem], channels: Iterable[str]) -> bool:
    """Whether a header says that the images are CT, by the channel's name or DICOM's modality."""
    if {name.casefold() for name in channels} == {"ct"}:
        return True
    modalities = set()
    for entry in images:
        files = sorted(entry.image.iterdir()) if entry.image.is_dir() else [entry.image]
        first = next(dicom_images(files), None)
        if first is None:
            return False
        modalities.add(tags_of(first, "Modality").get("Modality"))
    return modalities == {"CT"}


def _plain_name(text: str) -> str:
    """A name for a task: letters, digits and underscores.

    Examples:
        >>> _plain_name("Chest X-rays")
        'chest_x_rays'
    """
    return re.sub(r"\W+", "_", text).strip("_").lower() or "task"


def _masks_to_read(entries: Sequence[DatalistItem]) -> int:
    """How many masks of a site are read to list their values: fewer if they are large."""
    file = entries[0].masks[0]
    if is_segmentation(file):  # it has frames for some slices of its image alone
        file = entries[0].image
    pixels = read_stored(file, mask=True).array.size
    return max(_LEAST_MASKS, min(_MOST_MASKS, _MASK_PIXELS // pixels))


def _classes(
    entries: Sequence[DatalistItem], names: Mapping[str, list[int]], hints: TaskHints, label: Any
) -> list[Choice]:
    """Target and labels by the names of the datalist, otherwise by the class numbers."""
    several = isinstance(label, list)
    numbers: list[int] = []
    if several:
        count = len(label)
        target = Choice("target", "multilabel", "any of several findings")
    else:
        numbers = [entry.label for entry in entries if isinstance(entry.label, int)]
        count = 1 + max(numbers, default=0)
        target = Choice("target", "multiclass", "one class an image")
    name_of: dict[int, str] = {}
    for name, of_name in names.items():
        name_of |= dict.fromkeys(of_name, name)
    of_classes = list(range(max(count, len(name_of))))
    all_named = not several and {*numbers} <= name_of.keys()
    has_gaps = all_named and sorted(name_of) != of_classes
    if has_gaps:  # for example without a class 0
        of_classes = sorted(name_of)
        count = len(of_classes)
    labels = list(hints.labels)
    reason = "as given"
    if not labels:
        labels = [name_of.get(number, f"class_{number}") for number in of_classes]
        reason = "names from the datalist" if names else "the datalist has no names"
    if len(labels) < count or several or has_gaps:
        _check_number_of_labels(hints, count, "classes")
    choices = [target, Choice("labels", labels, reason)]
    if not has_gaps:  # --labels may also name classes without images
        of_classes = list(range(len(labels)))
    number_of = dict(zip(labels, of_classes, strict=True))
    renamed = any(name_of.get(number, name) != name for name, number in number_of.items())
    if (renamed or has_gaps) and not several:
        values = {name: [number] for name, number in number_of.items()}
        choices.append(Choice("label_values", values, "numbers of the datalist"))
    return choices


def _structures(
    entries: Sequence[DatalistItem],
    names: Mapping[str, list[int]],
    hints: TaskHints,
    label: Any,
    structure: str,
) -> list[Choice]:
    """Target and labels by the names of the datalist, otherwise by the values of masks.

    `structure`: its name, if the masks have one value.
    """
    if isinstance(label, list):
        return _masks_of_structures(names, hints, len(label), "a mask file for each structure")
    if names and any(map(_has_overlap, entries)):
        return _masks_of_structures(names, hints, len(names), "DICOM segments overlap")
    _check_palettes(entries)
    named = {}
    for name, values in names.items():
        # nnU-Net's "ignore" is no structure: its pixels count neither in training nor in metrics.
        if values != [0] and plain_name(name) != "ignore":
            named[name] = values
    background = 0
    if named:
        reason = "as in the datalist"
        listed = ", ".join(named)
        _check_number_of_labels(hints, len(named), f"structures of the datalist ({listed})")
    else:
        files = [entry.masks[0] for entry in entries]
        background, values = mask_values(files, named=bool(hints.labels))
        shown = ", ".join(map(str, values))
        _check_number_of_labels(hints, len(values), f"values ({shown}) in {len(entries)} masks")
        named = {f"structure_{value}": [value] for value in values}
        if len(values) == 1:
            named = {structure: values}
        reason = f"masks have the values {background} and {shown}"
        if background:
            reason += f"; {background} is in their corners"
    structures = dict(zip(hints.labels or named, named.values(), strict=True))
    overlap = any(len(values) > 1 for values in structures.values())
    if overlap:
        target = Choice("target", "multilabel", "structures overlap")
    elif len(structures) == 1 and background == 0:  # a binary task has its background at 0
        target = Choice("target", "binary", "one structure")
    else:
        target = Choice("target", "multiclass", "every pixel is a structure or background")
        structures = {"background": [background], **structures}
    choices = [target, Choice("labels", list(structures), reason)]
    default = [[number] for number in range(len(structures))]
    if len(structures) == 1:
        default = [[1]]
    renamed = bool(names and hints.labels) and hints.labels != tuple(named)
    if renamed or overlap or list(structures.values()) != default:
        choices.append(Choice("label_values", structures, "the values that files use"))
    return choices


def _masks_of_structures(
    names: Mapping[str, list[int]], hints: TaskHints, count: int, reason: str
) -> list[Choice]:
    """Target and labels of structures with a mask each, so that they may overlap."""
    labels = list(hints.labels or mask_names(names))
    if not labels:
        labels = [f"structure_{number + 1}" for number in range(count)]
    _check_number_of_labels(hints, count, "masks of an image")
    order = "as given" if hints.labels else "in the order of the masks"
    return [Choice("target", "multilabel", reason), Choice("labels", labels, order)]


def _has_overlap(entry: DatalistItem) -> bool:
    """Whether the mask is a DICOM segmentation object whose segments overlap."""
    mask = entry.masks[0]
    if not is_segmentation(mask):
        return False
    with explained(mask):
        return segments_overlap(read(mask))


def _codes(entries: Sequence[DatalistItem], labels: Sequence[str]) -> list[Choice]:
    """Codes of the structures, if there are DICOM segmentation objects among the masks."""
    codes: dict[str, Any] = {}
    for entry in entries:
        for mask in entry.masks:
            if is_segmentation(mask):
                with explained(mask):
                    codes |= segment_codes(tags_of(mask, "SegmentSequence"))
    code_of = {label: codes[label] for label in labels if label in codes}
    if not code_of:
        return []
    reason = "of the DICOM segmentation objects, for those that predict writes"
    return [Choice("codes", code_of, reason)]


def _check_number_of_labels(hints: TaskHints, count: int, what: str) -> None:
    if hints.labels and len(hints.labels) != count:
        names = ",".join(hints.labels)
        raise ConfigError(
            f"--labels {names}: {len(hints.labels)} names for {count} {what}; name each"
        )


def _check_palettes(entries: Sequence[DatalistItem]) -> None:
    """Raise DataError for a label number that has two colours: palettes of single files differ."""
    shown: dict[int, tuple[Path, tuple[int, ...]]] = {}
    for entry in entries:
        for number, colour in palette_of(entry.masks[0]).items():
            other, first = shown.setdefault(number, (entry.masks[0], colour))
            if colour != first:
                raise DataError(
                    f"{entry.masks[0]}: {number} has another colour in its palette than in "
                    f"{other.name}; store the numbers of structures in grey, alike in all masks"
                )


def _channels_and_dims(
    entries: Sequence[DatalistItem], name_of: Mapping[str, str], hints: TaskHints
) -> list[Choice]:
    files = max(len(entry.channels) for entry in entries)
    shapes = []
    for entry in with_progress(entries, len(entries), "images read for their channels"):
        shapes.append(_stored_shape(entry))
    channel_counts, dimensions = zip(*shapes, strict=True)
    if files:
        if hints.channels not in (None, files):
            raise ConfigError(
                f"--channels {hints.channels}: images have {files} files, one per channel; "
                "leave it out"
            )
        names = [name_of.get(str(number), f"channel_{number}") for number in range(files)]
        channels = Choice("channels", names, "a file for each channel")
    elif hints.channels:
        channels = Choice("channels", hints.channels, "as given")
    else:
        count = max(channel_counts)
        kind = {1: "grey", 3: "colour"}.get(count, f"{count} channels in a file")
        channels = Choice("channels", count, f"{kind} in the {len(shapes)} images read")
    if hints.dims:
        dims = Choice("spatial_dims", hints.dims, "as given")
    elif max(dimensions) > 2:
        dims = Choice("spatial_dims", 3, "volumes")
    else:
        dims = Choice("spatial_dims", 2, "pictures")
    return [channels, dims]


def _channel_names(names: Any, file: Path) -> dict[str, str]:
    """Number of a channel -> its name, from a datalist's list or table of names."""
    if isinstance(names, list):
        names = dict(enumerate(names))
    table = names or {}
    is_table = isinstance(table, Mapping)
    if not is_table or not all(isinstance(name, str | int) for name in table.values()):
        raise DataError(f'{file}: channel_names must be like {{"0": "T1", "1": "T2"}}; correct it')
    return {str(number): str(name) for number, name in table.items()}


def _stored_shape(entry: DatalistItem) -> tuple[int, int]:
    """Channels and dimensions of an image's first file; a file with equal channels is grey."""
    if suffix(entry.image) in NIFTI:
        with explained(entry.image):
            shape = nibabel.load(entry.image).shape
        channels = max(shape[3:], default=1)
        return channels, sum(side > 1 for side in shape[:3])
    stored = read_stored(entry.image)
    array = stored.array
    channels = 1 if (array == array[:1]).all() else len(array)
    return channels, 2 if stored.grid is None else array.ndim - 1  # frames of DICOM lack positions


def _modality(sites: Fingerprints, summary: DatasetSummary, hints: TaskHints) -> Choice:
    if hints.modality is not None:
        return Choice("modality", hints.modality, "as given")
    if summary.pictures:
        return Choice("modality", "photo", "pictures whose numbers begin at 0")
    if summary.is_ct:
        return Choice("modality", "ct", "as the header or the name of the channel says")
    lowest = min(channel.overall.p0_5 for site in sites for channel in site.channels)
    if lowest < _AIR and summary.settings["channels"] == 1:
        reason = f"intensities down to {lowest:g}, as Hounsfield units have them for air"
        return Choice("modality", "ct", reason)
    reason = "numbers without a unit; give --modality ct if they are Hounsfield units"
    return Choice("modality", "mr", reason)


# -- the rules -------------------------------------------------------------------------------------


def _changed(proposed: ProposedTask, changes: Sequence[Choice], without: str = "") -> ProposedTask:
    """The task with some settings changed and one left out."""
    changed = chosen_settings(changes)
    settings = proposed.settings | changed
    settings.pop(without, None)
    replaced = {*changed, without}
    unchanged = [choice for choice in proposed.choices if choice.setting not in replaced]
    return dataclasses.replace(proposed, settings=settings, choices=(*unchanged, *changes))


def _batch_size(sites: Fingerprints) -> Choice:
    smallest = min(site.images for site in sites)
    images = max(2, min(_MAX_BATCH, smallest // 8))
    rule = f"an eighth of the smallest site's images, from 2 to {_MAX_BATCH} (medflare's own rule)"
    return Choice("batch_size", images, rule)


def _segmentation(
    stopwatch: Stopwatch, modality: Modality, hints: TaskHints, of_data: Settings
) -> ProposedTask:
    """nnU-Net's rules where a GPU keeps to the minutes of a round; otherwise a small U-Net, or
    as `hints.size` says.
    """
    sites = stopwatch.sites
    if stopwatch.device.type != "cpu" and not hints.size:
        planned = plan(sites, modality=modality, memory=hints.memory, name=of_data["name"])
        if stopwatch.measured_seconds(load_task(planned.settings)) <= stopwatch.limit:
            return planned
    proposed = plan(sites, modality=modality, memory=None, name=of_data["name"])
    settings = {**UNDECIDED, "size": [64] * of_data["spatial_dims"], **proposed.settings}
    if hints.size:
        choices = _resized_as_given(sites, hints.size)
    else:
        announce("measuring training steps on this device")
        choices = small_segmentation(settings, stopwatch)
    if chosen_settings(choices)["image_mode"] == "resize":
        return _changed(proposed, choices, without="spacing")
    return _changed(proposed, choices)


def _resized_as_given(sites: Fingerprints, size: Sequence[int]) -> tuple[Choice, ...]:
    """Image mode, network and batch size for images of a given size."""
    levels = 2
    for count in (3, 4):
        if all(side % 2 ** (count - 1) == 0 for side in size):
            levels = count
    mode = "images are resized to the given size: faster and less sharp than patches"
    return (
        Choice("image_mode", "resize", mode),
        Choice("size", list(size), "as given"),
        Choice("network", small_unet(levels), f"a small U-Net of {levels} levels, for a CPU too"),
        _batch_size(sites),
    )


def _classification(
    sites: Fingerprints, modality: Modality, hints: TaskHints, of_data: Settings
) -> ProposedTask:
    """medflare's own rules: resized images, a network by their number, balanced classes if some are
    rare.
    """
    dims = of_data["spatial_dims"]
    images = sum(site.images for site in sites)
    size = Choice("size", list(hints.size), "as given") if hints.size else _size(sites, dims)
    counts = {}
    for name in sites[0].classes:
        counts[name] = sum(site.classes[name].images or 0 for site in sites)
    fewest = min(counts, key=counts.__getitem__)
    most = max(counts, key=counts.__getitem__)
    augment = [
        {"name": "RandFlip", "prob": 0.5, "spatial_axis": 0 if dims == 3 else 1},
        {
            "name": "RandAffine",
            "prob": 0.5,
            "rotate_range": [0.2] * (1 if dims == 2 else 3),
            "scale_range": [0.1] * dims,
            "padding_mode": "border",
        },
    ]
    turned = "mirrored, turned and scaled a little; take RandFlip out if left and right differ"
    network = Choice("network", {"name": "resnet18"}, f"{images} training images")
    if images < _FEW_IMAGES or max(size.value) < 2 * _STEP:
        reason = f"{images} training images, too few for a large network"
        network = Choice("network", {"name": _SMALL}, reason)
    reason = f"{most} is shown {counts[most]} times, {fewest} {counts[fewest]} times"
    sampling = Choice("sampling", "shuffle", reason)
    if of_data["target"] == "multiclass" and counts[most] > _IMBALANCE * counts[fewest]:
        reason += "; every class is drawn equally often"
        sampling = Choice("sampling", "balanced", reason)
    choices: tuple[Choice, ...] = (
        size,
        _intensity(sites, modality),
        network,
        Choice("augment", augment, turned),
        sampling,
        Choice("loss", {"name": "ce"}, "cross entropy"),
        Choice("optimizer", UNDECIDED["optimizer"], ""),
        _batch_size(sites),
        Choice("local_epochs", 1, "a round is an epoch of the site's images"),
        Choice("metric", "f1_macro", "a rare class counts as much as a common one"),
    )
    if of_data["target"] == "multiclass" and _are_grades(of_data["labels"]):
        metrics = [*default_metrics("classification"), "quadratic_kappa"]
        reason = "classes are numbered grades: kappa weighs by how many grades an answer is off"
        choices += (Choice("metrics", metrics, reason),)
    return ProposedTask(of_data | chosen_settings(choices), choices, source="")


def _are_grades(labels: Sequence[str]) -> bool:
    """Whether classes are three or more consecutive numbers."""
    if len(labels) < 3 or not all(label.isdecimal() for label in labels):
        return False
    first = int(labels[0])
    return [int(label) for label in labels] == list(range(first, first + len(labels)))


def _size(sites: Fingerprints, dims: int) -> Choice:
    median = median_size(sites)
    size = scaled(median, min(_MAX_SIDE[dims], max(median)), _STEP)
    rule = f"at most {_MAX_SIDE[dims]} a side, in steps of {_STEP}"
    return Choice("size", size, f"the median image is {format_shape(median)}; {rule}")


def _intensity(sites: Fingerprints, modality: Modality) -> Choice:
    """The intensity transform; a range becomes -1 to 1, as a classifier without normalization
    layers hardly trains on images of positive numbers alone.
    """
    lowest = -1.0
    if modality != "ct":
        return intensity(sites, modality, lowest)
    # Without masks there is no foreground.
    low = min(channel.overall.p0_5 for site in sites for channel in site.channels)
    high = max(channel.overall.p99_5 for site in sites for channel in site.channels)
    scale = {
        "name": "ScaleIntensityRange",
        "a_min": low,
        "a_max": max(high, low + 1),
        "b_min": lowest,
        "b_max": 1.0,
        "clip": True,
    }
    return Choice("intensity", scale, "the same for all images")


def _within_minutes(planned: ProposedTask, hints: TaskHints, stopwatch: Stopwatch) -> ProposedTask:
    """A classification whose round keeps to the limit: with pretrained weights, with smaller
    images, or else with the smallest network; where none does, the last of these.
    """
    large = _with_pretrained(planned, stopwatch.sites, hints)
    is_smallest = large.settings["network"]["name"] == _SMALL
    proposed = _with_fast_size(large, hints, stopwatch)
    if hints.network or hints.pretrained or is_smallest:
        return proposed
    task = load_task(proposed.settings)
    is_fast = stopwatch.measured_seconds(task) <= stopwatch.limit
    if is_fast and max(task.size) >= 2 * _STEP:  # as `_classification` has it
        return proposed
    name = large.settings["network"]["name"]
    reason = f"a round with {name} takes more than the minutes"
    if not hints.size:
        reason += ", with smaller images too"
    small = _changed(planned, [Choice("network", {"name": _SMALL}, reason)])
    return _with_fast_size(small, hints, stopwatch)


def _with_fast_size(proposed: ProposedTask, hints: TaskHints, stopwatch: Stopwatch) -> ProposedTask:
    """The task with a smaller size, if its round needs one and the user gives none."""
    if hints.size:
        return proposed
    weights = PACKAGED.get(proposed.settings["network"]["name"])
    step = _STEP if weights is None else weights.step
    smaller = picture_size(proposed.settings, stopwatch, step)
    if smaller is None:
        return proposed
    return _changed(proposed, [smaller])


def _with_rate_and_epochs(
    proposed: ProposedTask, hints: TaskHints, stopwatch: Stopwatch
) -> ProposedTask:
    """The task with learning rate and local epochs, and with its time."""
    task = load_task(proposed.settings)
    rate, reason = usual_rate(task)
    optimizer = Choice("optimizer", {**task.optimizer, "lr": rate}, reason)
    seconds = stopwatch.measured_seconds(task)
    epochs = local_epochs(task, stopwatch, seconds)
    device = device_name(stopwatch.device)
    if keeps_features(task, stopwatch.device):
        first = format_seconds(seconds)
        time = f"time: the first round of FedAvg takes about {first} here ({device}), others less"
    else:
        seconds = stopwatch.measured_seconds(dataclasses.replace(task, local_epochs=epochs.value))
        time = (
            f"time: a round of FedAvg takes about {format_seconds(seconds)} here ({device}), "
            f"{TIMED_ROUNDS} rounds about {format_seconds(TIMED_ROUNDS * seconds)}"
        )
    time += f"; a step takes {stopwatch.measured(task).gibibytes:.2g} GiB"
    warnings = proposed.warnings
    if seconds > _LATE * stopwatch.limit:
        slow = (
            f"a round takes about {format_seconds(seconds)}, more than --minutes {hints.minutes:g}"
        )
        warnings += (f"{slow}; give a smaller --size, another --network, or a GPU",)
    proposed = _changed(proposed, [optimizer, epochs])
    return dataclasses.replace(proposed, time=time, warnings=warnings)


def _with_pretrained(proposed: ProposedTask, sites: Fingerprints, hints: TaskHints) -> ProposedTask:
    """The task with a pretrained network for pictures; a warning without its package, ConfigError
    if it is required and there is none.
    """
    settings = proposed.settings
    name = hints.network or _PRETRAINED
    if hints.pretrained:
        packaged_weights(name)  # raises where there are none
    weights = PACKAGED.get(name)
    if weights is None:
        return proposed
    pictures = (
        settings["kind"] == "classification"
        and settings["spatial_dims"] == 2
        and settings["channels"] in (1, weights.channels)
    )
    if not pictures or min(settings["size"]) < weights.step:
        if hints.pretrained:
            raise ConfigError(
                f"--pretrained: {name} has weights for classification of pictures "
                f"with sides of {weights.step} pixels or more"
            )
        return proposed
    if weights.path is None:
        text = (
            f"the network starts from random weights; {INSTALL} installs pretrained ones, "
            "which this command with --force then proposes"
        )
        return dataclasses.replace(proposed, warnings=(*proposed.warnings, text))
    network = {"name": name, "weights": packaged_weights(name)}
    scale = scaled_for(weights, settings["intensity"])
    changes = [
        Choice("network", network, "ImageNet weights of an installed package"),
        Choice("channels", weights.channels, "the weights are for colour; grey is repeated"),
        Choice("intensity", scale, "the scale that the weights need"),
    ]
    size = [max(weights.step, side // weights.step * weights.step) for side in settings["size"]]
    reason_of_size = f"the weights need multiples of {weights.step}"
    if sum(site.images for site in sites) < _FEW_IMAGES:
        reason = (
            "with few images only the head is trained (medflare's own rule); "
            "for fedavg, fedprox and robust, remove it for others"
        )
        changes.append(Choice("freeze", ["body"], reason))
        reason = "features of an image are computed once; give it without freeze"
        changes.append(Choice("augment", [], reason))
        size = [weights.side] * 2
        reason_of_size = "that of the images of the weights"
    if not hints.size:
        changes.append(Choice("size", size, reason_of_size))
    differing = [change for change in changes if settings.get(change.setting) != change.value]
    return _changed(proposed, differing)
