"""A task proposed from the fingerprints of its sites by the rules of nnU-Net, each choice with its reason."""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from medflare.core.errors import ConfigError
from medflare.data.checking import rules
from medflare.data.checking.fingerprint import DatasetFingerprint, Spread
from medflare.data.geometry import format_shape
from medflare.networks.dry_run import check_network, step_bytes
from medflare.tasks.config import load_task

Modality: TypeAlias = Literal["mr", "ct", "photo"]

_LEAST_LEVELS: Final = 3  # of MONAI's DynUNet
_SOURCE: Final = "rules: Isensee et al., nnU-Net, Nature Methods 18, 2021, where no reason says otherwise"
_COUNTED: Final = 0.5  # of the memory, that what `step_bytes` counts may fill
_MOST_PATCHES: Final = 8  # that an image gives in an epoch
_KNOWN: Final = (0, 10, 50, 90, 100)  # percentiles of a `Spread`
# What `load_task` wants to see beside what is learnt, before anything is decided.
UNDECIDED: Final = {
    "network": {"name": "unet"},
    "loss": {"name": "dice"},
    "optimizer": {"name": "adam", "lr": 1.0},
    "batch_size": 1,
    "local_epochs": 1,
}


@dataclass(frozen=True)
class Choice:
    """One setting of the proposed task and why it has this value."""

    setting: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Plan:
    """A proposed task.

    Attributes:
        settings: as a task's JSON file has them; `load_task` takes them.
        choices: those that the fingerprints decided, in the order of the decisions.
        source: whose rules they follow; "" where every reason stands alone.
        warnings: what no choice mends, one line each.
    """

    settings: dict[str, Any]
    choices: tuple[Choice, ...]
    source: str = _SOURCE
    warnings: tuple[str, ...] = ()

    def render(self) -> str:
        """Two lines for every choice, whose rules they follow, and the warnings."""
        lines = [f"{choice.setting}: {json.dumps(choice.value)}\n    {choice.reason}" for choice in self.choices]
        return "\n".join([*lines, *filter(None, [self.source]), *(f"warning: {warning}" for warning in self.warnings)])


def plan(
    found: Sequence[DatasetFingerprint],
    *,
    modality: Modality = "mr",
    memory: float = 8.0,
    voxels: bool = False,
    name: str | None = None,
) -> Plan:
    """A task for sites whose images are like this.

    Args:
        found: one or more fingerprints, made with one task.
        modality: "ct" where intensities are Hounsfield units, "photo" for photographs, "mr" for everything whose numbers have no unit.
        memory: GiB of the smallest device that trains.
        voxels: plan as if nobody knew the spacing of volumes: for files whose millimetres are not to be trusted.
        name: of the task; None: the name of the one that the images were looked at with, and "_planned".

    Raises:
        ConfigError: fingerprints that do not belong together, a task without masks, images that are too small for a U-Net, or too little
            memory.
    """
    if not 0 < memory < math.inf:
        raise ConfigError(f"memory must be above 0 GiB, got {memory:g}")
    learnt = _learnt(found)
    geometry = _geometry(found, learnt["spatial_dims"], voxels)
    fixed = [*geometry.choices, intensity(found, modality), _augment(geometry), *_TRAINING]
    settings = learnt | {"name": name or f"{learnt['name']}_planned", "batch_size": rules.LEAST_BATCH}
    settings |= {choice.setting: choice.value for choice in fixed}
    sized = _sized(found, settings, geometry, memory)
    settings |= {choice.setting: choice.value for choice in sized}
    check_network(load_task(settings))
    return Plan(settings, (*geometry.choices, *sized, *fixed[len(geometry.choices) :]))


# -- sites together --------------------------------------------------------------------------------------------------------


def pooled(spreads: Sequence[Spread], images: Sequence[int], percentile: float) -> tuple[float, ...]:
    """A percentile over the images of all sites together, by axis.

    Between the five numbers that are known of a site its images are taken to lie evenly.

    Examples:
        >>> one, other = (Spread(*[(side, 2 * side)] * 5) for side in (10.0, 20.0))
        >>> pooled([one, other], [3, 2], 50), pooled([one, other], [2, 3], 50)
        ((10.0, 20.0), (20.0, 40.0))
    """
    grid = np.linspace(0, 100, 1001)
    weights = np.repeat(np.asarray(images, np.float64), grid.size)

    def axis(number: int) -> float:
        known = [[row[number] for row in dataclasses.astuple(spread)] for spread in spreads]
        values = np.concatenate([np.interp(grid, _KNOWN, row) for row in known])
        return float(np.quantile(values, percentile / 100, weights=weights, method="inverted_cdf"))

    return tuple(axis(number) for number in range(len(spreads[0].median)))


def _mean(found: Sequence[DatasetFingerprint], numbers: Sequence[float]) -> float:
    """Of a number of each site, by its images."""
    return float(np.average(numbers, weights=[item.images for item in found]))


def _learnt(found: Sequence[DatasetFingerprint]) -> dict[str, Any]:
    """What all of them were made with."""
    if not found:
        raise ConfigError("no fingerprint to plan from; write one with medflare data fingerprint")
    first = found[0]
    for item in found:
        task = load_task({**item.learnt, **UNDECIDED, "size": [1] * (3 if item.learnt.get("spatial_dims") == 3 else 2)})
        if task.kind != "segmentation":
            raise ConfigError(f"site {item.site}: task {task.name} classifies, the rules are for masks; use medflare task init")
        axes = {len(spread.median) for spread in (item.sizes, item.spacings, item.extents) if spread is not None}
        if axes != {task.spatial_dims} or len(item.channels) != task.image_channels:
            raise ConfigError(f"site {item.site}: axes or channels are not those of task {task.name}; write the fingerprint anew")
        for setting in sorted({*first.learnt, *item.learnt}):
            if item.learnt.get(setting) != first.learnt.get(setting):
                values = f"{item.learnt.get(setting)!r}, site {first.site} with {first.learnt.get(setting)!r}"
                raise ConfigError(f"site {item.site}: looked at with {setting} {values}; write the fingerprints with one task")
    return first.learnt


# -- geometry --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Geometry:
    """Sides of the median image after resampling, its spacing (1 each where nobody knows), whether that is anisotropic; and the choices."""

    median: tuple[int, ...]
    spacing: tuple[float, ...]
    anisotropic: bool
    choices: tuple[Choice, ...]


def _geometry(found: Sequence[DatasetFingerprint], dimensions: int, voxels: bool) -> _Geometry:
    images = [item.images for item in found]
    spacings = [item.spacings for item in found if item.spacings is not None]
    extents = [item.extents for item in found if item.extents is not None]
    fit = Choice("image_mode", "patch", "images keep their resolution, a window slides over them; nnU-Net trains on patches everywhere")
    if dimensions == 2 or voxels or min(len(spacings), len(extents)) < len(found):
        sizes = [item.sizes for item in found]
        median = tuple(max(1, round(side)) for side in pooled(sizes, images, 50))
        why = "the files' millimetres are not to be used" if voxels else "at least one file does not say how far its voxels lie apart"
        stored = Choice("spacing", None, f"as stored, none are resampled: {why}")
        return _Geometry(median, (1.0,) * dimensions, False, (fit,) if dimensions == 2 else (stored, fit))
    middle, tenth, extent = pooled(spacings, images, 50), pooled(spacings, images, 10), pooled(extents, images, 50)
    spacing = tuple(round(side, 4) for side in rules.target_spacing(middle, tenth, extent))
    median = tuple(max(1, round(length / side)) for length, side in zip(extent, spacing, strict=True))
    special = rules.anisotropic(middle, extent)
    reason = "median spacing in millimetres of the training images, by axis"
    if special:
        reason += f"; the coarsest axis (median {max(middle):g}) the 10th percentile, since it is over {rules.ANISOTROPY} times as coarse"
    return _Geometry(median, spacing, special, (Choice("spacing", list(spacing), reason), fit))


# -- what memory decides ---------------------------------------------------------------------------------------------------


def _sized(found: Sequence[DatasetFingerprint], settings: dict[str, Any], geometry: _Geometry, memory: float) -> list[Choice]:
    """Patch, network and batch."""
    budget = memory * 2**30 * _COUNTED
    size, network = _fitting(settings, geometry, budget, memory)
    patches = max(1, min(_MOST_PATCHES, math.ceil(math.prod(geometry.median) / math.prod(size))))
    task = load_task(settings | {"size": size, "network": network})
    one, two = (step_bytes(task, batch) for batch in (1, 2))
    smallest = min(item.images for item in found)
    batch = rules.batch_size(int((budget - one) // (two - one)) + 1, smallest, geometry.median, size)
    needed = (one + (batch - 1) * (two - one)) / 2**30
    whole = all(side >= full for side, full in zip(size, geometry.median, strict=True))
    median = f"the median image, {format_shape(geometry.median)}"
    cut = "whole" if whole else f"as long in millimetres along all axes, made smaller until two fit into {memory:g} GiB"
    return [
        Choice("size", size, f"{median}, {cut}; sides divisible by 2 ** poolings"),
        Choice(
            "network",
            network,
            f"U-Net of {len(network['strides'])} levels: an axis is halved while {rules.LEAST_SIDE} voxels remain and its spacing is "
            "within a factor of 2 of the finest; 32 feature maps, doubled to at most 320 (3-D) or 512 (2-D)",
        ),
        Choice(
            "batch_size",
            batch,
            f"at least {rules.LEAST_BATCH}, as many as fit and show at most {rules.BATCH_SHARE:.0%} of the voxels of the smallest site "
            f"({smallest} images); a step takes about {needed:.2g} GiB, the rest of the memory is left for what that does not count",
        ),
        Choice("patches_per_image", patches, f"patches that cover a median image, at most {_MOST_PATCHES} (medflare's own rule)"),
    ]


def _fitting(settings: dict[str, Any], geometry: _Geometry, budget: float, memory: float) -> tuple[list[int], dict[str, Any]]:
    """The largest patch of which two fit, and its network."""
    first = rules.first_patch(geometry.median, geometry.spacing)
    size = largest = rules.topology(first, geometry.spacing).padded(first)
    while True:
        levels = rules.topology(size, geometry.spacing)
        if len(levels.strides) < _LEAST_LEVELS and size == largest:
            raise ConfigError(
                f"the median image is {format_shape(geometry.median)}, too small for {_LEAST_LEVELS} levels; write the task by hand"
            )
        if len(levels.strides) < _LEAST_LEVELS:
            trusted = "" if set(geometry.spacing) == {1.0} else ", or plan with --voxels where the files' millimetres are not to be trusted"
            raise ConfigError(f"no patch with {_LEAST_LEVELS} levels fits into {memory:g} GiB; give more with --memory{trusted}")
        network = _dynunet(levels)
        if step_bytes(load_task(settings | {"size": list(size), "network": network}), rules.LEAST_BATCH) <= budget:
            return list(size), network
        size = rules.smaller(size, geometry.median, geometry.spacing)


def _dynunet(levels: rules.Topology) -> dict[str, Any]:
    """MONAI's network of nnU-Net with these levels."""
    strides = [list(row) for row in levels.strides]
    return {
        "name": "DynUNet",
        "kernel_size": [list(row) for row in levels.kernels],
        "strides": strides,
        "upsample_kernel_size": strides[1:],
        "filters": list(rules.features(len(strides), len(strides[0]))),
    }


# -- intensities and training ----------------------------------------------------------------------------------------------


def intensity(found: Sequence[DatasetFingerprint], modality: Modality) -> Choice:
    """The intensity transform.

    Raises:
        ConfigError: CT without foreground, or with several channels.
    """
    if modality == "ct":
        return _of_ct(found)
    if modality == "photo":
        highest = max(channel.overall.p99_5 for item in found for channel in item.channels)
        top = 255 if highest <= 255 else 65535
        scale = {"name": "ScaleIntensityRange", "a_min": 0, "a_max": top, "b_min": 0.0, "b_max": 1.0, "clip": True}
        return Choice("intensity", scale, f"photographs: the range of their numbers, 0 to {top}, becomes 0 to 1, the same for all")
    zeros = _mean(found, [item.zeros for item in found])
    without = zeros > rules.CROPPED
    reason = "no unit: every channel of every image to mean 0 and deviation 1"
    reason += f", zeros left out since they are {zeros:.0%} of the voxels" if without else f"; zeros ({zeros:.0%}) count"
    return Choice("intensity", {"name": "NormalizeIntensity", "nonzero": without, "channel_wise": True}, reason)


def _of_ct(found: Sequence[DatasetFingerprint]) -> Choice:
    """Clipping and scaling by the foreground of all sites together."""
    shown = [(item, channel.foreground) for item in found for channel in item.channels[:1] if channel.foreground is not None]
    if any(len(item.channels) > 1 for item in found) or not shown:
        raise ConfigError("modality ct needs one channel and training images with foreground; take mr, or write intensity by hand")
    sites, inside = [item for item, _ in shown], [values for _, values in shown]
    low, high = (round(_mean(sites, numbers), 2) for numbers in ([v.p0_5 for v in inside], [v.p99_5 for v in inside]))
    mean = _mean(sites, [values.mean for values in inside])
    deviation = math.sqrt(max(_mean(sites, [values.deviation**2 + values.mean**2 for values in inside]) - mean**2, 0.0))
    if high <= low or deviation == 0:
        raise ConfigError(f"modality ct: the foreground has one intensity only ({mean:g}); take mr, or write intensity by hand")
    ends = {"b_min": round((low - mean) / deviation, 4), "b_max": round((high - mean) / deviation, 4)}
    scale = {"name": "ScaleIntensityRange", "a_min": low, "a_max": high, **ends, "clip": True}
    scaled = f"minus its mean ({mean:.4g}), over its deviation ({deviation:.4g})"
    return Choice("intensity", scale, f"CT: clipped to the foreground's 0.5 and 99.5 percentiles, then {scaled}, the same for all")


def _augment(geometry: _Geometry) -> Choice:
    """Rotation is the one that depends on geometry."""
    axes = len(geometry.median)
    rotate, turned = [_HALF_TURN], "by any angle"
    if geometry.anisotropic:
        coarsest = max(range(axes), key=lambda axis: geometry.spacing[axis])
        rotate, turned = [_HALF_TURN if axis == coarsest else 0.0 for axis in range(axes)], "in the plane of the fine axes alone"
    elif axes == 3:
        rotate, turned = [_HALF_TURN / 6] * axes, "by 30 degrees about every axis"
    transforms = [
        {"name": "RandAffine", "prob": 0.2, "rotate_range": rotate, "scale_range": [[-0.3, 0.4]] * axes, "padding_mode": "zeros"},
        *_PHOTOMETRIC,
        {"name": "RandSimulateLowResolution", "prob": 0.25, "upsample_mode": "bilinear" if axes == 2 else "trilinear"},
        *({"name": "RandFlip", "prob": 0.5, "spatial_axis": axis} for axis in range(axes)),
    ]
    return Choice("augment", transforms, f"nnU-Net's own, under MONAI's names; rotation {turned}, mirroring along all axes")


_HALF_TURN: Final = 3.1416
_PHOTOMETRIC: Final = (
    {"name": "RandGaussianNoise", "prob": 0.15, "std": 0.1},
    {"name": "RandGaussianSmooth", "prob": 0.2, "sigma_x": [0.5, 1.5], "sigma_y": [0.5, 1.5], "sigma_z": [0.5, 1.5]},
    {"name": "RandScaleIntensity", "prob": 0.15, "factors": [-0.3, 0.3]},
    {"name": "RandScaleIntensityFixedMean", "prob": 0.15, "factors": [-0.35, 0.5]},
    {"name": "RandAdjustContrast", "prob": 0.3, "gamma": [0.7, 1.5]},
)
_TRAINING: Final = (
    Choice("loss", {"name": "dice_ce", "batch": True}, "Dice and cross entropy, summed; Dice pools the batch, as patches may be empty"),
    Choice(
        "optimizer",
        {"name": "adam", "lr": 3e-4},
        "of nnU-Net's first version (Isensee et al., 2018); the SGD of 2021 with momentum 0.99 needs more steps than a round has",
    ),
    Choice("schedule", {"name": "polynomial", "power": 0.9}, "falls as (1 - round / rounds) ** 0.9"),
    Choice("local_epochs", 1, "a round is an epoch of the site's images (medflare's own rule)"),
)
