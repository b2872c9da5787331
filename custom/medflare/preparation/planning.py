"""A segmentation task planned from the fingerprints of its sites by nnU-Net's rules.

Each choice has its reason. Isensee et al., "nnU-Net: a self-configuring method for deep
learning-based biomedical image segmentation", Nature Methods 18, 203-211, 2021, "rule-based
parameters". Numbers that the paper leaves open are those of github.com/MIC-DKFZ/nnUNet, version 2,
commits 017de4a (experiment planner) and 04f3cfc (network topology). Differences from either are
marked.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from medflare.core.errors import ConfigError
from medflare.core.text import format_shape
from medflare.networks.dry_run import check_network, step_bytes
from medflare.preparation.fingerprint import Fingerprints
from medflare.tasks.config import load_task

Modality: TypeAlias = Literal["mr", "ct", "photo"]
Settings: TypeAlias = dict[str, Any]  # of a task, as in its JSON file
Sides: TypeAlias = tuple[int, ...]

_ANISOTROPY = 3  # ratio from which the coarsest axis is treated separately
_MIN_SIDE = 4  # of the smallest feature map
_MIN_BATCH = 2
_MIN_LEVELS = 3  # of MONAI's DynUNet
_MOST_IN_BATCH = 0.05  # fraction of all voxels
# Share of zeros from which intensities are normalised without them; nnU-Net uses the share that
# cropping removes.
_MANY_ZEROS = 0.25
_WHITE = 255  # of pictures with eight bits
# Pixels or voxels of the patch that is then made smaller.
_FIRST_PATCH = {2: 2048**2, 3: 256**3}
_MAX_FEATURES = {2: 512, 3: 320}
_MAX_PATCHES = 8  # per image and epoch
_COUNTED = 0.5  # share of the memory for what `step_bytes` counts
_PERCENTILES = (0, 10, 50, 90, 100)  # of a `Spread`
_HALF_TURN = 3.1416
# Settings that `load_task` requires, before they are decided.
UNDECIDED = {
    "network": {"name": "unet"},
    "loss": {"name": "dice"},
    "optimizer": {"name": "adam", "lr": 1.0},
    "batch_size": 1,
    "local_epochs": 1,
}


@dataclass(frozen=True)
class Choice:
    """A setting of the proposed task, and the reason for its value."""

    setting: str
    value: Any
    reason: str


@dataclass(frozen=True)
class ProposedTask:
    """A task that is proposed, with the reasons for its settings."""

    settings: Settings
    choices: tuple[Choice, ...]  # the settings with their reasons, in the order of the decisions
    source: str = (
        "rules: Isensee et al., nnU-Net, Nature Methods 18, 2021, where no reason says otherwise"
    )
    warnings: tuple[str, ...] = ()  # one line each
    time: str = ""  # how long a round and a run take, one line

    def render(self) -> str:
        """Two lines for every choice, the source of the rules, the warnings, and the time."""
        lines = []
        for choice in self.choices:
            lines += [f"{choice.setting}: {json.dumps(choice.value)}", f"    {choice.reason}"]
        if self.source:
            lines.append(self.source)
        for warning in self.warnings:
            lines.append(f"warning: {warning}")
        if self.time:
            lines.append(self.time)
        return "\n".join(lines)


def chosen_settings(choices: Iterable[Choice]) -> Settings:
    """Setting -> chosen value."""
    return {choice.setting: choice.value for choice in choices}


# -- nnU-Net's rules -------------------------------------------------------------------------------


def target_spacing(
    median: Sequence[float], tenth: Sequence[float], extent: Sequence[float]
) -> tuple[float, ...]:
    """Millimetres between voxels after resampling, by axis: the median of the spacings.

    A coarsest axis that is `anisotropic` takes the 10th percentile of its spacings, but is not
    finer than the second coarsest axis.

    Examples:
        >>> target_spacing((0.8, 0.8, 1.5), (0.7, 0.7, 1.0), (320, 320, 150))
        (0.8, 0.8, 1.5)
        >>> target_spacing((0.8, 0.8, 5.0), (0.7, 0.7, 3.0), (320, 320, 150))
        (0.8, 0.8, 3.0)
        >>> target_spacing((0.8, 0.8, 5.0), (0.7, 0.7, 0.6), (320, 320, 150))
        (0.8, 0.8, 0.8)
    """
    target = list(median)
    if anisotropic(median, extent):
        coarsest = int(np.argmax(median))
        target[coarsest] = max(tenth[coarsest], sorted(median)[-2])
    return tuple(target)


def anisotropic(spacing: Sequence[float], extent: Sequence[float]) -> bool:
    """Whether one axis is over three times as coarse as the next one and has less than a third of
    the voxels of any other.

    Examples:
        >>> anisotropic((1, 1, 5), (200, 200, 100)), anisotropic((1, 1, 5), (200, 200, 1000))
        (True, False)
        >>> anisotropic((4, 4, 1), (200, 200, 100))
        False
    """
    coarsest = int(np.argmax(spacing))
    voxels = np.divide(extent, spacing)
    is_coarse = spacing[coarsest] > _ANISOTROPY * sorted(spacing)[-2]
    return bool(is_coarse and _ANISOTROPY * voxels[coarsest] < np.delete(voxels, coarsest).min())


@dataclass(frozen=True)
class Topology:
    """The levels of a U-Net: kernels and strides of convolutions, by level and axis."""

    kernels: tuple[Sides, ...]
    strides: tuple[Sides, ...]  # 1 in the first level

    @property
    def divisors(self) -> Sides:
        """Divisors of the sides of a patch: 2 ** poolings, by axis."""
        return tuple(map(math.prod, zip(*self.strides, strict=True)))

    def padded(self, size: Sequence[int]) -> Sides:
        """The next larger size that the network takes."""
        steps = np.ceil(np.divide(size, self.divisors)).astype(int)
        return tuple((steps * self.divisors).tolist())


def topology(size: Sequence[int], spacing: Sequence[float]) -> Topology:
    """How often each axis of a patch is pooled, and with which kernels.

    Levels are added while an axis of 8 voxels or more is left. Of those, the axes are pooled whose
    spacing is within a factor of 2 of their finest; a single axis only from 12 voxels. Kernels are
    3 along an axis from the level on where its spacing is within a factor of 2 of the finest, 1
    before, and 3 in the last level. Different from the published program, they are also 3 after a
    pooling of the axis: otherwise volumes that are coarse in two axes and short in the third would
    have kernels of 1.

    Examples:
        >>> topology((32, 32), (1, 1)).strides
        ((1, 1), (2, 2), (2, 2), (2, 2))
        >>> topology((32, 32, 8), (1, 1, 3)).strides
        ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 1))
        >>> topology((32, 32, 8), (1, 1, 3)).kernels
        ((3, 3, 1), (3, 3, 3), (3, 3, 3), (3, 3, 3))
        >>> topology((32, 32, 12), (8, 8, 1)).kernels
        ((1, 1, 3), (1, 1, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3))
    """
    sides = list(size)
    gaps = list(spacing)
    kernel = [1] * len(sides)
    kernels = []
    strides = [tuple(kernel)]
    while True:
        finest = min(gaps)
        for axis, gap in enumerate(gaps):
            if gap < 2 * finest:
                kernel[axis] = 3
        kernels.append(tuple(kernel))
        large = [axis for axis, side in enumerate(sides) if side >= 2 * _MIN_SIDE]
        finest = min((gaps[axis] for axis in large), default=0.0)
        halved = [axis for axis in large if gaps[axis] < 2 * finest]
        if not halved or (len(halved) == 1 and sides[halved[0]] < 3 * _MIN_SIDE):
            return Topology((*kernels[:-1], (3,) * len(sides)), tuple(strides))
        stride = [1] * len(sides)
        for axis in halved:
            stride[axis] = 2
            sides[axis] = math.ceil(sides[axis] / 2)
            gaps[axis] *= 2
            kernel[axis] = 3
        strides.append(tuple(stride))


def first_patch(median: Sequence[float], spacing: Sequence[float]) -> Sides:
    """The first patch: equally long in millimetres along all axes, 256 ** 3 voxels or 2048 ** 2
    pixels, within the median image.

    Examples:
        >>> first_patch((512, 512, 100), (0.8, 0.8, 5.0)), first_patch((3000, 500), (1, 1))
        ((472, 472, 75), (2048, 500))
    """
    density = [1 / side for side in spacing]
    scale = (_FIRST_PATCH[len(density)] / math.prod(density)) ** (1 / len(density))
    sides = np.rint(np.minimum(np.multiply(scale, density), median)).astype(int)
    return tuple(sides.tolist())


def smaller(size: Sequence[int], median: Sequence[float], spacing: Sequence[float]) -> Sides:
    """The next smaller patch: the axis that is longest relative to the median loses one step, the
    divisor of the smaller patch.

    Examples:
        >>> smaller((128, 128, 128), (150, 190, 160), (1, 1, 1))
        (112, 128, 128)
        >>> smaller((256, 64, 64), (256, 64, 64), (1, 1, 1))
        (256, 64, 56)
    """
    longest = 0
    for axis in range(len(size)):
        if size[axis] / median[axis] >= size[longest] / median[longest]:
            longest = axis

    def shortened(step: int) -> Sides:
        sides = list(size)
        sides[longest] = max(1, sides[longest] - step)
        return tuple(sides)

    step = topology(shortened(topology(size, spacing).divisors[longest]), spacing).divisors[longest]
    return topology(shortened(step), spacing).padded(shortened(step))


def batch_size(fitting: int, images: int, median: Sequence[float], patch: Sequence[int]) -> int:
    """The batch size: as many patches as fit into memory, but at most 5 % of all voxels, and at
    least 2.

    `images` counts those of the smallest site, since a batch is drawn at one site (nnU-Net: all
    images).

    Examples:
        >>> batch_size(40, 100, (100, 100), (50, 50)), batch_size(7, 100, (100, 100), (50, 50))
        (20, 7)
        >>> batch_size(7, 3, (100, 100), (50, 50))
        2
    """
    most = _MOST_IN_BATCH * images * math.prod(median) / math.prod(patch)
    return max(_MIN_BATCH, min(fitting, round(most)))


# -- a task for several sites ----------------------------------------------------------------------


def plan(
    sites: Fingerprints,
    *,
    modality: Modality = "mr",
    memory: float | None = 8.0,
    voxels: bool = False,
    name: str | None = None,
) -> ProposedTask:
    """A segmentation task for sites with these fingerprints.

    Args:
        sites: one or more fingerprints, made with one task.
        modality: "ct" for Hounsfield units, "photo" for photographs, "mr" for intensities without a
            unit.
        memory: GiB of the smallest training device; None: without patch, network and batch size,
            which it decides.
        voxels: ignore the spacings of the files.
        name: of the task; None: the name of the fingerprints' task with "_planned".

    Raises:
        ConfigError: fingerprints of different tasks, a task without masks, images that are too
            small for a U-Net, or too little memory.
    """
    if memory is not None and not 0 < memory < math.inf:
        raise ConfigError(f"memory must be above 0 GiB, got {memory:g}")
    settings = _common_settings(sites)
    geometry = _plan_geometry(sites, settings["spatial_dims"], voxels)
    training = (
        intensity(sites, modality),
        _augment(geometry, ordered_axes(sites)),
        _loss(settings["target"]),
        *_TRAINING,
    )
    settings |= {"name": name or f"{settings['name']}_planned"}
    settings |= chosen_settings((*geometry.choices, *training))
    if memory is None:
        return ProposedTask(settings, (*geometry.choices, *training))
    settings["batch_size"] = _MIN_BATCH
    sized = _plan_sizes(sites, settings, geometry, memory)
    settings |= chosen_settings(sized)
    check_network(load_task(settings))
    return ProposedTask(settings, (*geometry.choices, *sized, *training))


def ordered_axes(sites: Fingerprints) -> list[int]:
    """Axes along which structures keep an order at one site at least; images must not be mirrored
    along them.
    """
    axes = set()
    for site in sites:
        if site.layout is not None:
            axes.update(np.flatnonzero(site.layout.ordered).tolist())
    return sorted(axes)


def pooled_percentile(
    sites: Fingerprints, spread: Literal["sizes", "spacings", "extents"], percentile: float
) -> tuple[float, ...]:
    """A percentile over the images of all sites, by axis; between the five percentiles of a site
    its images are interpolated.

    Args:
        spread: the attribute that has these percentiles; every site must have it.

    Examples:
        >>> from types import SimpleNamespace
        >>> from medflare.preparation.fingerprint import Spread
        >>> first, second = (Spread(*[(side, 2 * side)] * 5) for side in (10.0, 20.0))
        >>> many = SimpleNamespace(sizes=first, images=3)
        >>> few = SimpleNamespace(sizes=second, images=2)
        >>> pooled_percentile([many, few], "sizes", 50)
        (10.0, 20.0)
        >>> many.images = 1
        >>> pooled_percentile([many, few], "sizes", 50)
        (20.0, 40.0)
    """
    grid = np.linspace(0, 100, 1001)
    weights = np.repeat([float(site.images) for site in sites], grid.size)
    spreads = [dataclasses.astuple(getattr(site, spread)) for site in sites]
    quantiles = []
    for axis in np.moveaxis(np.array(spreads), 2, 0):  # (sites, 5) each
        values = np.concatenate([np.interp(grid, _PERCENTILES, row) for row in axis])
        quantile = np.quantile(values, percentile / 100, weights=weights, method="inverted_cdf")
        quantiles.append(float(quantile))
    return tuple(quantiles)


def have_spacings(sites: Fingerprints) -> bool:
    """Whether all files of all sites have spacings."""
    return all(site.spacings for site in sites)


def _mean(sites: Fingerprints, numbers: Sequence[float]) -> float:
    """The mean of a number of each site, weighted by images."""
    return float(np.average(numbers, weights=[site.images for site in sites]))


def _common_settings(sites: Fingerprints) -> Settings:
    """The settings of the task that all fingerprints were made with."""
    if not sites:
        raise ConfigError("no fingerprint to plan from; write one with medflare data fingerprint")
    learnt = sites[0].learnt
    for site in sites:
        axes = 3 if site.learnt.get("spatial_dims") == 3 else 2
        task = load_task({**site.learnt, **UNDECIDED, "size": [1] * axes})
        location = f"site {site.site}"
        if task.kind != "segmentation":
            raise ConfigError(
                f"{location}: task {task.name} is a classification, the rules are for masks; "
                "use medflare task init"
            )
        spreads = (site.sizes, site.spacings, site.extents)
        lengths = {len(spread.median) for spread in spreads if spread is not None}
        if lengths != {task.spatial_dims} or len(site.channels) != task.image_channels:
            raise ConfigError(
                f"{location}: axes or channels are not those of task {task.name}; "
                "write the fingerprint again"
            )
        for setting in sorted({*learnt, *site.learnt}):
            if site.learnt.get(setting) != learnt.get(setting):
                raise ConfigError(
                    f"{location}: {setting} differs from site {sites[0].site}; "
                    "write the fingerprints with one task"
                )
    return dict(learnt)


@dataclass(frozen=True)
class _Geometry:
    """The choices that spacings decide."""

    median: tuple[int, ...]  # sides of the median image after resampling
    spacing: tuple[float, ...]  # of this image; 1 each if unknown
    anisotropic: bool
    choices: tuple[Choice, ...]


def _plan_geometry(sites: Fingerprints, dimensions: int, voxels: bool) -> _Geometry:
    mode = Choice(
        "image_mode",
        "patch",
        "images keep their resolution, a window slides over them; nnU-Net always trains on patches",
    )
    if dimensions == 2 or voxels or not have_spacings(sites):
        lengths = pooled_percentile(sites, "sizes", 50)
        spacing = (1.0,) * dimensions
        is_anisotropic = False
        reason = "as stored, without resampling: at least one file has no spacing"
        if voxels:
            reason = "as stored, without resampling: the spacings of the files are ignored"
        choice = Choice("spacing", None, reason)
    else:
        lengths = pooled_percentile(sites, "extents", 50)
        middle = pooled_percentile(sites, "spacings", 50)
        target = target_spacing(middle, pooled_percentile(sites, "spacings", 10), lengths)
        spacing = tuple(round(side, 4) for side in target)
        is_anisotropic = anisotropic(middle, lengths)
        reason = "median spacing in millimetres of the training images, by axis"
        if is_anisotropic:
            reason += f"; the coarsest axis (median {max(middle):g}) has its 10th percentile, "
            reason += f"since it is over {_ANISOTROPY} times as coarse"
        choice = Choice("spacing", list(spacing), reason)
    median = np.maximum(1, np.rint(np.divide(lengths, spacing))).astype(int).tolist()
    choices = (mode,) if dimensions == 2 else (choice, mode)
    return _Geometry(tuple(median), spacing, is_anisotropic, choices)


def _plan_sizes(
    sites: Fingerprints, settings: Settings, geometry: _Geometry, memory: float
) -> list[Choice]:
    """Patch, network and batch, which memory decides."""
    budget = memory * 2**30 * _COUNTED
    size, network = _largest_patch(settings, geometry, budget, memory)
    patches = max(1, min(_MAX_PATCHES, math.ceil(math.prod(geometry.median) / math.prod(size))))
    task = load_task(settings | {"size": size, "network": network})
    first = step_bytes(task, 1)
    each = step_bytes(task, 2) - first
    fitting = int((budget - first) // each) + 1
    smallest = min(site.images for site in sites)
    batch = batch_size(fitting, smallest, geometry.median, size)
    needed = (first + (batch - 1) * each) / 2**30
    cut = "equally long in millimetres along all axes, "
    cut += f"made smaller until two patches fit into {memory:g} GiB"
    if np.greater_equal(size, geometry.median).all():
        cut = "whole"
    return [
        Choice(
            "size",
            size,
            f"the median image, {format_shape(geometry.median)}, {cut}; "
            "sides divisible by 2 ** poolings",
        ),
        Choice(
            "network",
            network,
            f"U-Net of {len(network['strides'])} levels: an axis is halved while {_MIN_SIDE} "
            "voxels remain and its spacing is within a factor of 2 of the finest; "
            "32 feature maps, doubled to at most 320 (3-D) or 512 (2-D)",
        ),
        Choice(
            "batch_size",
            batch,
            f"at least {_MIN_BATCH}, as many as fit and at most {_MOST_IN_BATCH:.0%} of the voxels "
            f"of the smallest site ({smallest} images); a step takes about {needed:.2g} GiB, "
            "the rest of the memory is for what this estimate leaves out",
        ),
        Choice(
            "patches_per_image",
            patches,
            f"patches that cover a median image, at most {_MAX_PATCHES} (medflare's own rule)",
        ),
    ]


def _largest_patch(
    settings: Settings, geometry: _Geometry, budget: float, memory: float
) -> tuple[list[int], Settings]:
    """The largest patch of which two fit into `budget` bytes, and its network (MONAI's DynUNet)."""
    first = first_patch(geometry.median, geometry.spacing)
    largest = topology(first, geometry.spacing).padded(first)
    size = largest
    while True:
        levels = topology(size, geometry.spacing)
        strides = list(map(list, levels.strides))
        if len(strides) < _MIN_LEVELS:
            if size == largest:
                raise ConfigError(
                    f"the median image is {format_shape(geometry.median)}, "
                    f"too small for {_MIN_LEVELS} levels; write the task by hand"
                )
            raise ConfigError(
                f"no patch with {_MIN_LEVELS} levels fits into {memory:g} GiB; "
                "give more --memory, or --voxels if spacings are wrong"
            )
        most = _MAX_FEATURES[len(size)]
        network = {
            "name": "DynUNet",
            "kernel_size": list(map(list, levels.kernels)),
            "strides": strides,
            "upsample_kernel_size": strides[1:],
            "filters": [min(32 * 2**level, most) for level in range(len(strides))],
        }
        task = load_task(settings | {"size": list(size), "network": network})
        if step_bytes(task, _MIN_BATCH) <= budget:
            return list(size), network
        size = smaller(size, geometry.median, geometry.spacing)


def intensity(sites: Fingerprints, modality: Modality, lowest: float = 0.0) -> Choice:
    """The intensity transform; `lowest`: what the black of pictures becomes."""
    if modality == "ct":
        return _ct_intensity(sites)
    if modality == "photo" and _have_common_white(sites):
        scale = {
            "name": "ScaleIntensityRange",
            "a_min": 0,
            "a_max": _WHITE,
            "b_min": lowest,
            "b_max": 1.0,
            "clip": True,
        }
        reason = f"photographs: 0 to {_WHITE} becomes {lowest:g} to 1, the same for all"
        return Choice("intensity", scale, reason)
    zeros = _mean(sites, [site.zeros for site in sites])
    nonzero = zeros > _MANY_ZEROS
    reason = "no unit: every channel of every image to mean 0 and deviation 1, "
    reason += f"zeros ({zeros:.0%}) {'left out' if nonzero else 'included'}"
    normalize = {"name": "NormalizeIntensity", "nonzero": nonzero, "channel_wise": True}
    return Choice("intensity", normalize, reason)


def _have_common_white(sites: Fingerprints) -> bool:
    """Whether the pictures of every site have eight bits, and none of a site is nearly black."""
    for site in sites:
        highest = max(channel.overall.p99_5 for channel in site.channels)
        if not _WHITE / 8 <= highest <= _WHITE:
            return False
    return True


def _ct_intensity(sites: Fingerprints) -> Choice:
    """Clipping and scaling by the foreground of all sites."""
    shown = []
    rows = []
    for site in sites:
        inside = site.channels[0].foreground
        if inside is not None:
            shown.append(site)
            square = inside.deviation**2 + inside.mean**2
            rows.append((inside.p0_5, inside.p99_5, inside.mean, square))
    if not shown or any(len(site.channels) > 1 for site in sites):
        raise ConfigError(
            "modality ct needs one channel and training images with foreground; "
            "take mr, or write intensity by hand"
        )
    low, high, mean, square = (_mean(shown, numbers) for numbers in zip(*rows, strict=True))
    low = round(low, 2)
    high = round(high, 2)
    deviation = math.sqrt(max(square - mean**2, 0.0))
    if high <= low or deviation == 0:
        raise ConfigError(
            f"modality ct: the foreground has one intensity only ({mean:g}); "
            "take mr, or write intensity by hand"
        )
    scale = {
        "name": "ScaleIntensityRange",
        "a_min": low,
        "a_max": high,
        "b_min": round((low - mean) / deviation, 4),
        "b_max": round((high - mean) / deviation, 4),
        "clip": True,
    }
    reason = "CT: clipped to the foreground's 0.5 and 99.5 percentiles, "
    reason += f"minus its mean ({mean:.4g}), over its deviation ({deviation:.4g})"
    return Choice("intensity", scale, reason)


def _augment(geometry: _Geometry, ordered: Sequence[int]) -> Choice:
    """nnU-Net's augmentation, whose rotation depends on the geometry and on axes along which
    structures keep an order.
    """
    axes = len(geometry.median)
    largest = _HALF_TURN
    angle = "by any angle"
    if ordered or (axes == 3 and not geometry.anisotropic):
        largest = _HALF_TURN / 6
        angle = "by at most 30 degrees"
    rotate = [largest] if axes == 2 else [largest] * axes
    if geometry.anisotropic:
        rotate = [0.0] * axes
        rotate[int(np.argmax(geometry.spacing))] = largest
        angle += ", in the plane of the fine axes alone"
    transforms = [
        {
            "name": "RandAffine",
            "prob": 0.2,
            "rotate_range": rotate,
            "scale_range": [[-0.3, 0.4]] * axes,
            "padding_mode": "zeros",
        },
        {"name": "RandGaussianNoise", "prob": 0.15, "std": 0.1},
        {
            "name": "RandGaussianSmooth",
            "prob": 0.2,
            "sigma_x": [0.5, 1.5],
            "sigma_y": [0.5, 1.5],
            "sigma_z": [0.5, 1.5],
        },
        {"name": "RandScaleIntensity", "prob": 0.15, "factors": [-0.3, 0.3]},
        {"name": "RandScaleIntensityFixedMean", "prob": 0.15, "factors": [-0.35, 0.5]},
        {"name": "RandAdjustContrast", "prob": 0.3, "gamma": [0.7, 1.5]},
        {
            "name": "RandSimulateLowResolution",
            "prob": 0.25,
            "upsample_mode": "bilinear" if axes == 2 else "trilinear",
        },
    ]
    for axis in range(axes):
        if axis not in ordered:
            transforms.append({"name": "RandFlip", "prob": 0.5, "spatial_axis": axis})
    reason = f"nnU-Net's own, under MONAI's names; rotation {angle}, {mirroring(ordered)}"
    return Choice("augment", transforms, reason)


def mirroring(ordered: Sequence[int]) -> str:
    """The axes along which images are mirrored, in words."""
    if not ordered:
        return "mirroring along all axes"
    axes = " and ".join(map(str, ordered))
    return f"no mirroring along axis {axes}, where one structure lies before another in every image"


def _loss(target: str) -> Choice:
    """Dice of the structures and focal loss: medflare's own rule, nnU-Net has cross entropy.

    With cross entropy, or the background's Dice, a small network answers the background alone for
    long (docs/benchmarks.md).
    """
    loss: Settings = {"name": "dice_focal", "batch": True}
    if target == "multiclass":
        loss["include_background"] = False
    reason = "Dice and focal loss, as structures may be small (medflare's own rule); "
    return Choice("loss", loss, reason + "Dice pools the batch, as patches may be empty")


_TRAINING = (
    Choice(
        "optimizer",
        {"name": "adam", "lr": 3e-4},
        "of nnU-Net's first version (Isensee et al., 2018); "
        "the SGD of 2021 with momentum 0.99 needs more steps than a round has",
    ),
    Choice(
        "schedule", {"name": "polynomial", "power": 0.9}, "falls as (1 - round / rounds) ** 0.9"
    ),
    Choice("local_epochs", 1, "a round is an epoch of the site's images (medflare's own rule)"),
)
