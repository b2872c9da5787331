"""Size, network, batch and epochs of a proposed task, so that a round on this device takes at most
the minutes that are allowed.

The rules are medflare's own; docs/benchmarks.md ("Proposed tasks") has the runs that they were
chosen by.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

from medflare.core.text import about, format_shape
from medflare.preparation.fingerprint import DatasetFingerprint
from medflare.preparation.planning import Choice, mirroring, ordered_axes
from medflare.preparation.round_time import Stopwatch, median_size, round_seconds
from medflare.preparation.structures import SIDES
from medflare.tasks.config import TaskConfig, load_task

_DETAIL: Final = 0.97  # Dice after resizing from which a size keeps enough of the structures
_LEAST_DETAIL: Final = 0.9  # below it, patches at full resolution are better
_WHOLE: Final = {2: 128, 3: 48}  # side up to which whole images are better than patches
_LEVELS: Final = 4
_WIDTH: Final = 16  # feature maps of the first level
_STEP: Final = 2 ** (_LEVELS - 1)  # sides of images are multiples of it
_BATCHES: Final = {2: 8, 3: 4}  # at most
_PATCH_BATCH: Final = 4
_PATCH_SIDES: Final = {2: (128, 96, 64), 3: (48, 32)}
_MAX_PATCHES: Final = {2: 4, 3: 2}  # of an image in an epoch
# nnU-Net's changes of intensity that cost a CPU little; its rotations and blurs cost more than they
# give in a short run.
_CHEAP: Final = (
    "RandGaussianNoise",
    "RandScaleIntensity",
    "RandScaleIntensityFixedMean",
    "RandAdjustContrast",
    "RandFlip",
)
_STEPS: Final = 25  # of a round at the median site
_MAX_EPOCHS: Final = 10


def small_segmentation(
    settings: dict[str, Any],
    sites: Sequence[DatasetFingerprint],
    stopwatch: Stopwatch,
    limit: float,
) -> tuple[Choice, ...]:
    """Image mode, size, augmentation, network and batch size for a CPU.

    A round with one local epoch takes at most `limit` seconds, if any settings allow that. Images
    are resized to the smallest size that keeps the structures, see `structures.Layout`. Where that
    is large, or `limit` does not allow it, patches at full resolution take their place, if `limit`
    allows those: they give more steps in the same time, half of them around a structure. Structures
    that keep an order need the whole image, since their place tells them apart.

    Args:
        settings: of the task, complete.
    """
    dims = settings["spatial_dims"]
    batch = _batch_size(sites, dims)
    network = Choice("network", small_unet(), f"a U-Net of {_LEVELS} levels that a CPU can train")
    augment = _cheap_augmentation(settings, sites)
    common = {**settings, "network": network.value, "batch_size": batch.value, "local_epochs": 1}
    common["augment"] = augment.value
    detail = _detail(sites)
    wanted = _wanted_side(median_size(sites), detail)
    is_ordered = bool(ordered_axes(sites))
    if wanted <= _WHOLE[dims] or is_ordered:
        mode, size = _resized(common, sites, stopwatch, limit, wanted)
        if is_ordered or detail.get(max(size.value), 1.0) >= _LEAST_DETAIL:
            return (mode, size, augment, network, batch)
    reason = "patches of a step; small batches give more steps"
    patch_batch = Choice("batch_size", _PATCH_BATCH, reason)
    patches = _patches({**common, "batch_size": _PATCH_BATCH}, sites, stopwatch, limit)
    if patches:
        return (*patches, augment, network, patch_batch)
    mode, size = _resized(common, sites, stopwatch, limit, min(wanted, _WHOLE[dims]))
    return (mode, size, augment, network, batch)


def _cheap_augmentation(settings: dict[str, Any], sites: Sequence[DatasetFingerprint]) -> Choice:
    transforms = [transform for transform in settings["augment"] if transform["name"] in _CHEAP]
    intensities = "nnU-Net's changes of intensity, without what costs a CPU much"
    return Choice("augment", transforms, f"{mirroring(ordered_axes(sites))}; {intensities}")


def _wanted_side(median: Sequence[float], detail: dict[int, float]) -> int:
    """The smallest longest side that keeps the structures, at most that of the median image."""
    full = round(max(median))
    for side, dice in sorted(detail.items()):
        if dice >= _DETAIL and side < full:
            return side
    return full


def whole_images(choices: Sequence[Choice]) -> bool:
    """Whether images are resized; then the task has neither `patches_per_image` nor `spacing`."""
    return any(choice.setting == "image_mode" and choice.value == "resize" for choice in choices)


def settings_of(choices: Sequence[Choice]) -> dict[str, Any]:
    """Setting -> chosen value."""
    return {choice.setting: choice.value for choice in choices}


def small_unet(levels: int = _LEVELS) -> dict[str, Any]:
    """A U-Net for a CPU."""
    widths = [_WIDTH * 2**level for level in range(levels)]
    return {"name": "unet", "channels": widths, "norm": "instance"}


def _task(
    settings: dict[str, Any], choices: Sequence[Choice], dropped: Sequence[str]
) -> TaskConfig:
    changed = settings | settings_of(choices)
    for name in dropped:
        changed.pop(name, None)
    return load_task(changed)


def _batch_size(sites: Sequence[DatasetFingerprint], dims: int) -> Choice:
    smallest = min(site.images for site in sites)
    batch = max(2, min(_BATCHES[dims], smallest // 4))
    reason = f"a quarter of the smallest site's images, from 2 to {_BATCHES[dims]}"
    return Choice("batch_size", batch, reason)


def _detail(sites: Sequence[DatasetFingerprint]) -> dict[int, float]:
    """Longest side -> Dice after resizing, of the site that loses most."""
    detail: dict[int, float] = {}
    for site in sites:
        if site.layout is not None:
            for side, dice in site.layout.detail.items():
                detail[side] = min(dice, detail.get(side, 1.0))
    return detail


def _resized(
    common: dict[str, Any],
    sites: Sequence[DatasetFingerprint],
    stopwatch: Stopwatch,
    limit: float,
    wanted: int,
) -> tuple[Choice, Choice]:
    """Image mode and size of resized images, the longest side at most `wanted`."""
    median = median_size(sites)
    detail = _detail(sites)
    smaller = [side for side in reversed(SIDES[common["spatial_dims"]]) if side < wanted]
    reason = "whole images, which a small network on a CPU learns faster"
    mode = Choice("image_mode", "resize", reason)
    for side in (wanted, *smaller):
        size = _scaled(median, side)
        task = _task(common, (mode, Choice("size", size, "")), ("patches_per_image", "spacing"))
        if round_seconds(task, sites, stopwatch.estimated_seconds(task)) <= limit:
            break
    reason = "the largest size for the minutes of a round"
    if side == wanted:
        reason = "the smallest size that keeps the structures"
    if side in detail:
        reason += f"; structures keep a Dice of {detail[side]:.2f} at this size"
    image = format_shape(round(length) for length in median)
    return mode, Choice("size", size, f"{reason}; the median image is {image}")


def _scaled(median: Sequence[float], longest: float) -> list[int]:
    """Sides like those of the median image, the longest about `longest`, in steps of `_STEP`."""
    scale = longest / max(median)
    return [max(2 * _STEP, round(side * scale / _STEP) * _STEP) for side in median]


def _patches(
    common: dict[str, Any], sites: Sequence[DatasetFingerprint], stopwatch: Stopwatch, limit: float
) -> tuple[Choice, ...]:
    """Image mode, size and number of patches at the resolution of the files (or of the task's
    spacing); () if none is fast enough.
    """
    dims = common["spatial_dims"]
    median = median_size(sites, common.get("spacing"))
    most = _MAX_PATCHES[dims]
    reason = "resized images would lose structures; patches keep the resolution"
    mode = Choice("image_mode", "patch", reason)
    covered = f"patches that cover a median image, at most {most}"
    for longest in _PATCH_SIDES[dims]:
        size = _scaled(median, min(longest, max(median)))
        patches = max(1, min(most, round(math.prod(median) / math.prod(size))))
        choices = (
            mode,
            Choice("size", size, "of a patch, for the minutes of a round"),
            Choice("patches_per_image", patches, covered),
        )
        task = _task(common, choices, ())
        if round_seconds(task, sites, stopwatch.estimated_seconds(task)) <= limit:
            return choices
    return ()


def picture_size(
    settings: dict[str, Any],
    sites: Sequence[DatasetFingerprint],
    stopwatch: Stopwatch,
    limit: float,
    step: int,
) -> Choice | None:
    """A smaller size for the images of a classification, if a round with the present one takes more
    than `limit` seconds.

    Args:
        settings: of the task, complete.
        step: sides are multiples of it.
    """
    task = load_task({**settings, "local_epochs": 1})
    seconds = stopwatch.measured(task, sites).seconds
    if seconds <= limit:
        return None
    scale = (limit / seconds) ** (1 / len(task.size))
    size = [max(step, int(side * scale / step) * step) for side in task.size]
    reason = f"made smaller than {format_shape(task.size)}, for the minutes of a round"
    return Choice("size", size, reason)


def local_epochs(
    task: TaskConfig, sites: Sequence[DatasetFingerprint], seconds: float, limit: float
) -> Choice:
    """Local epochs; `seconds` of a round with one."""
    images = sorted(site.images for site in sites)[len(sites) // 2]
    steps = max(1, images * task.patches_per_image // task.batch_size)
    wanted = min(_MAX_EPOCHS, math.ceil(_STEPS / steps))
    epochs = max(1, min(wanted, int(limit / seconds)))
    reason = f"about {_STEPS} steps of a round at a site of {images} images"
    if epochs < wanted:
        reason += f", as far as {about(limit)} of a round allow"
    return Choice("local_epochs", epochs, reason)
