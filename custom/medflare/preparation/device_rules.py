"""Size, network, batch and epochs of a proposed task, so that a round on this device takes at most
the minutes that are allowed.

The rules are medflare's own; docs/benchmarks.md ("Proposed tasks") has the runs that they were
chosen by.
"""

import math
import statistics
from collections.abc import Sequence

from medflare.core.text import format_seconds, format_shape
from medflare.networks.features import keeps_features
from medflare.preparation.fingerprint import Fingerprints
from medflare.preparation.planning import Choice, Settings, chosen_settings, mirroring, ordered_axes
from medflare.preparation.round_time import Stopwatch, median_size
from medflare.preparation.structures import SIDES
from medflare.tasks.config import TaskConfig, load_task

_DETAIL = 0.97  # Dice after resizing from which a size keeps enough of the structures
_LEAST_DETAIL = 0.9  # below it, patches at full resolution are better
_WHOLE = {2: 128, 3: 48}  # side up to which whole images are better than patches
_LEVELS = 4
_WIDTH = 8  # feature maps of the first level
_STEP = 2 ** (_LEVELS - 1)  # sides of images are multiples of it
_LEAST_SIDE = 16
_BATCHES = {2: 8, 3: 4}  # at most
_PATCH_BATCH = 4
_PATCH_SIDES = {2: (128, 96, 64), 3: (48, 32)}
_MAX_PATCHES = {2: 4, 3: 2}  # of an image in an epoch
# nnU-Net's transforms that cost a CPU little; its blurs cost more than they give in a short run.
_CHEAP = (
    "RandGaussianNoise",
    "RandScaleIntensity",
    "RandScaleIntensityFixedMean",
    "RandAdjustContrast",
    "RandFlip",
)
_STEPS = 25  # of a round at the median site
_MAX_EPOCHS = 10
_MANY_EPOCHS = 3  # of a round, from which whole images are turned and scaled
# nnU-Net turns and scales a fifth of the images, by more.
_TURNED = 0.5
_LARGEST_ANGLE = 0.26
_LARGEST_SCALE = 0.15


def small_segmentation(settings: Settings, stopwatch: Stopwatch) -> tuple[Choice, ...]:
    """Image mode, size, augmentation, network and batch size of a segmentation for a CPU.

    A round with one local epoch keeps to the stopwatch's limit, if any settings allow that. Images
    are resized to the smallest size that keeps the structures, see `structures.Layout`. Where that
    is large, or the limit does not allow it, patches at full resolution take their place, if the
    limit allows those: they give more steps in the same time, half of them around a structure.
    Structures that keep an order need the whole image, since their place tells them apart. Whole
    images are turned and scaled where a round has `_MANY_EPOCHS`.

    Args:
        settings: of the task, complete, with one local epoch.
    """
    sites = stopwatch.sites
    dims = settings["spatial_dims"]
    batch = Choice(
        "batch_size",
        max(2, min(_BATCHES[dims], min(site.images for site in sites) // 4)),
        f"a quarter of the smallest site's images, from 2 to {_BATCHES[dims]}",
    )
    network = Choice("network", small_unet(), f"a U-Net of {_LEVELS} levels that a CPU can train")
    ordered = ordered_axes(sites)
    cheap = [transform for transform in settings["augment"] if transform["name"] in _CHEAP]
    reason = f"{mirroring(ordered)}; nnU-Net's changes of intensity, without what costs a CPU much"
    augment = Choice("augment", cheap, reason)
    of_whole_images = augment
    if _usual_epochs(sites, batch.value) >= _MANY_EPOCHS:
        turned = [turned_a_little(settings["augment"]), *cheap]
        reason = f"turned and scaled a little, as images are few; {reason}"
        of_whole_images = Choice("augment", turned, reason)
    common = settings | chosen_settings((network, batch, augment))
    detail = _detail(sites)
    wanted = _wanted_side(median_size(sites), detail)
    if wanted <= _WHOLE[dims] or ordered:
        mode, size = _resized(common, stopwatch, wanted)
        if ordered or detail.get(max(size.value), 1.0) >= _LEAST_DETAIL:
            return (mode, size, of_whole_images, network, batch)
    reason = "patches of a step; small batches give more steps"
    patch_batch = Choice("batch_size", _PATCH_BATCH, reason)
    patches = _patches({**common, "batch_size": _PATCH_BATCH}, stopwatch)
    if patches:
        return (*patches, augment, network, patch_batch)
    mode, size = _resized(common, stopwatch, min(wanted, _WHOLE[dims]))
    return (mode, size, of_whole_images, network, batch)


def turned_a_little(augment: Sequence[Settings]) -> Settings:
    """nnU-Net's RandAffine with smaller rotations and scalings of more images."""
    (affine,) = (transform for transform in augment if transform["name"] == "RandAffine")
    smaller = {
        "prob": _TURNED,
        "rotate_range": [min(angle, _LARGEST_ANGLE) for angle in affine["rotate_range"]],
        "scale_range": [_LARGEST_SCALE] * len(affine["scale_range"]),
        "padding_mode": "border",
    }
    return affine | smaller


def _wanted_side(median: Sequence[float], detail: dict[int, float]) -> int:
    """The smallest longest side that keeps the structures, at most that of the median image."""
    full = round(max(median))
    for side, dice in sorted(detail.items()):
        if dice >= _DETAIL and side < full:
            return side
    return full


def small_unet(levels: int = _LEVELS) -> Settings:
    """A U-Net for a CPU."""
    widths = [_WIDTH * 2**level for level in range(levels)]
    return {"name": "unet", "channels": widths, "norm": "instance"}


def _detail(sites: Fingerprints) -> dict[int, float]:
    """Longest side -> Dice after resizing, of the site that loses most."""
    detail: dict[int, float] = {}
    for site in sites:
        if site.layout is not None:
            for side, dice in site.layout.detail.items():
                detail[side] = min(dice, detail.get(side, 1.0))
    return detail


def _resized(common: Settings, stopwatch: Stopwatch, wanted: int) -> tuple[Choice, Choice]:
    """Image mode and size of resized images, the longest side at most `wanted`."""
    median = median_size(stopwatch.sites)
    detail = _detail(stopwatch.sites)
    smaller = [side for side in reversed(SIDES[common["spatial_dims"]]) if side < wanted]
    reason = "whole images, which a small network on a CPU learns faster"
    mode = Choice("image_mode", "resize", reason)
    for side in (wanted, *smaller):
        size = scaled(median, side)
        whole = {"image_mode": "resize", "size": size, "spacing": None}
        if stopwatch.seems_fast(load_task(common | whole)):
            break
    reason = "the largest size for the minutes of a round"
    if side == wanted:
        reason = "the smallest size that keeps the structures"
    if side in detail:
        reason += f"; structures keep a Dice of {detail[side]:.2f} at this size"
    image = format_shape(round(length) for length in median)
    return mode, Choice("size", size, f"{reason}; the median image is {image}")


def scaled(median: Sequence[float], longest: float, step: int = _STEP) -> list[int]:
    """Sides like those of the median image, the longest about `longest`, in steps."""
    scale = longest / max(median)
    return [max(_LEAST_SIDE, round(side * scale / step) * step) for side in median]


def _patches(common: Settings, stopwatch: Stopwatch) -> tuple[Choice, ...]:
    """Image mode, size and number of patches at the resolution of the files (or of the task's
    spacing); () if none is fast enough.
    """
    dims = common["spatial_dims"]
    median = median_size(stopwatch.sites, common.get("spacing"))
    most = _MAX_PATCHES[dims]
    reason = "resized images would lose structures; patches keep the resolution"
    mode = Choice("image_mode", "patch", reason)
    covered = f"patches that cover a median image, at most {most}"
    for longest in _PATCH_SIDES[dims]:
        size = scaled(median, min(longest, max(median)))
        patches = max(1, min(most, round(math.prod(median) / math.prod(size))))
        choices = (
            mode,
            Choice("size", size, "of a patch, for the minutes of a round"),
            Choice("patches_per_image", patches, covered),
        )
        if stopwatch.seems_fast(load_task(common | chosen_settings(choices))):
            return choices
    return ()


def picture_size(settings: Settings, stopwatch: Stopwatch, step: int) -> Choice | None:
    """A smaller size for the images of a classification, if a round with the present one takes more
    than the stopwatch's limit.

    Args:
        settings: of the task, complete, with one local epoch.
        step: sides are multiples of it.
    """
    size = list(settings["size"])
    seconds = stopwatch.measured_seconds(load_task(settings))
    # Each time is measured: of a small image, a step takes longer than its pixels say.
    while seconds > stopwatch.limit and max(size) > step:
        scale = (stopwatch.limit / seconds) ** (1 / len(size))
        size = [max(step, int(side * scale / step) * step) for side in size]
        seconds = stopwatch.measured_seconds(load_task({**settings, "size": size}))
    if size == list(settings["size"]):
        return None
    full = format_shape(settings["size"])
    return Choice("size", size, f"made smaller than {full}, for the minutes of a round")


def local_epochs(task: TaskConfig, stopwatch: Stopwatch, seconds: float) -> Choice:
    """The number of local epochs; `seconds` of a round with one."""
    images = _median_images(stopwatch.sites)
    wanted = _usual_epochs(stopwatch.sites, task.batch_size, task.patches_per_image)
    epochs = wanted
    if not keeps_features(task, stopwatch.device):
        epochs = max(1, min(wanted, int(stopwatch.limit / seconds)))
    reason = f"about {_STEPS} steps of a round at a site of {images} images"
    if epochs < wanted:
        reason += f", as far as {format_seconds(stopwatch.limit)} of a round allow"
    return Choice("local_epochs", epochs, reason)


def _usual_epochs(sites: Fingerprints, batch_size: int, patches_per_image: int = 1) -> int:
    """The number of local epochs with about `_STEPS` steps at the median site."""
    steps = max(1, _median_images(sites) * patches_per_image // batch_size)
    return min(_MAX_EPOCHS, math.ceil(_STEPS / steps))


def _median_images(sites: Fingerprints) -> int:
    return statistics.median_high(site.images for site in sites)
