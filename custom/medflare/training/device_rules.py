"""Size, network, batch and epochs of a proposed task, so that a round on this device takes at most the minutes that are allowed.

The rules are medflare's own; docs/benchmarks.md ("Proposed tasks") compares what they propose with other settings.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

from medflare.core.text import about, format_shape
from medflare.data.checking.fingerprint import DatasetFingerprint
from medflare.data.checking.planning import Choice
from medflare.data.checking.structures import SIDES
from medflare.tasks.config import TaskConfig, load_task
from medflare.training.round_time import Stopwatch, median_size, round_seconds

_DETAIL: Final = 0.97  # Dice after resizing from which a size keeps enough of the structures
_LEAST_DETAIL: Final = 0.9  # below it, patches at full resolution are better
_LARGEST: Final = {2: 512, 3: 128}  # side of a resized image
_LEVELS: Final = 4
_WIDTH: Final = 16  # feature maps of the first level
_STEP: Final = 2 ** (_LEVELS - 1)  # sides of images are multiples of it
_BATCHES: Final = {2: 8, 3: 4}  # at most
_PATCH_SIDES: Final = {2: (128, 96, 64), 3: (64, 48, 32)}
_MAX_PATCHES: Final = 8  # of an image in an epoch
_STEPS: Final = 25  # of a round at the median site
_MAX_EPOCHS: Final = 10


def small_segmentation(
    settings: dict[str, Any],
    sites: Sequence[DatasetFingerprint],
    stopwatch: Stopwatch,
    limit: float,
) -> tuple[Choice, ...]:
    """Image mode, size, network and batch size, so that a round with one local epoch takes at most `limit` seconds, if any does.

    Images are resized to the smallest size that keeps the structures, see `structures.Layout`, or to the largest that `limit`
    allows. Where that loses too much of the structures, patches at full resolution take their place.

    Args:
        settings: of the task, complete.
    """
    batch = _batch_size(sites, settings["spatial_dims"])
    network = Choice("network", small_unet(), f"a U-Net of {_LEVELS} levels that a CPU can train")
    common = {**settings, "network": network.value, "batch_size": batch.value, "local_epochs": 1}
    detail = _detail(sites)
    mode, size = _resized(common, sites, stopwatch, limit, detail)
    dice = detail.get(max(size.value), 1.0)
    if dice < _LEAST_DETAIL:
        return (*_patches(common, sites, stopwatch, limit, dice), network, batch)
    return (mode, size, network, batch)


def whole_images(choices: Sequence[Choice]) -> bool:
    """Whether images are resized; then the task has neither `patches_per_image` nor `spacing`."""
    return any(choice.setting == "image_mode" and choice.value == "resize" for choice in choices)


def small_unet(levels: int = _LEVELS) -> dict[str, Any]:
    """A U-Net for a CPU."""
    widths = [_WIDTH * 2**level for level in range(levels)]
    return {"name": "unet", "channels": widths, "norm": "instance"}


def _task(settings: dict[str, Any], choices: Sequence[Choice], dropped: Sequence[str]) -> TaskConfig:
    changed = settings | {choice.setting: choice.value for choice in choices}
    return load_task({name: value for name, value in changed.items() if name not in dropped})


def _batch_size(sites: Sequence[DatasetFingerprint], dims: int) -> Choice:
    smallest = min(site.images for site in sites)
    batch = max(2, min(_BATCHES[dims], smallest // 4))
    return Choice("batch_size", batch, f"a quarter of the smallest site's images, from 2 to {_BATCHES[dims]}")


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
    detail: dict[int, float],
) -> tuple[Choice, Choice]:
    """Image mode and size of resized images."""
    dims = common["spatial_dims"]
    median = median_size(sites)
    full = min(_LARGEST[dims], round(max(median)))
    enough = [side for side, dice in sorted(detail.items()) if dice >= _DETAIL and side <= full]
    wanted = enough[0] if enough else full
    sides: list[int] = [wanted, *(side for side in reversed(SIDES[dims]) if side < wanted)]
    mode = Choice("image_mode", "resize", "whole images, which a small network on a CPU learns faster than patches")
    for side in sides:
        size = _scaled(median, side)
        task = _task(common, (mode, Choice("size", size, "")), ("patches_per_image", "spacing"))
        if round_seconds(task, sites, stopwatch.estimated_seconds(task)) <= limit:
            break
    kept = f"; structures keep a Dice of {detail[side]:.2f} at this size" if side in detail else ""
    why = "the smallest size that keeps the structures" if side == wanted else "the largest size for the minutes of a round"
    image = format_shape(tuple(round(length) for length in median))
    return mode, Choice("size", size, f"{why}{kept}; the median image is {image}")


def _scaled(median: Sequence[float], longest: float) -> list[int]:
    """Sides like those of the median image, the longest about `longest`, in steps of `_STEP`."""
    scale = longest / max(median)
    return [max(2 * _STEP, round(side * scale / _STEP) * _STEP) for side in median]


def _patches(
    common: dict[str, Any],
    sites: Sequence[DatasetFingerprint],
    stopwatch: Stopwatch,
    limit: float,
    dice: float,
) -> tuple[Choice, ...]:
    """Image mode, size and number of patches at the resolution of the files (or of the task's spacing)."""
    median = median_size(sites, common.get("spacing"))
    reason = f"structures would keep a Dice of {dice:.2f} in resized images, so patches keep the resolution"
    mode = Choice("image_mode", "patch", reason)
    for longest in _PATCH_SIDES[common["spatial_dims"]]:
        size = [min(longest, math.ceil(side / _STEP) * _STEP) for side in median]
        patches = max(1, min(_MAX_PATCHES, round(math.prod(median) / math.prod(size))))
        choices = (
            mode,
            Choice("size", size, "of a patch, for the minutes of a round"),
            Choice("patches_per_image", patches, f"patches that cover a median image, at most {_MAX_PATCHES}"),
        )
        task = _task(common, choices, ())
        if round_seconds(task, sites, stopwatch.estimated_seconds(task)) <= limit:
            break
    return choices


def picture_size(
    settings: dict[str, Any],
    sites: Sequence[DatasetFingerprint],
    stopwatch: Stopwatch,
    limit: float,
    step: int,
) -> Choice | None:
    """A smaller size for the images of a classification, if a round with the present one takes more than `limit` seconds.

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
