"""How long a round takes on this device: a step is measured, and the steps of all sites are
counted.
"""

import json
import math
from collections.abc import Sequence

import torch

from medflare.core.errors import ConfigError
from medflare.core.text import format_shape
from medflare.data.progress import announce
from medflare.networks.dry_run import step_bytes
from medflare.preparation.fingerprint import Fingerprints
from medflare.preparation.planning import have_spacings, pooled_percentile
from medflare.preparation.step_cost import StepCost, measure_step, step_operations
from medflare.tasks.config import TaskConfig
from medflare.training.patches import OVERLAP

# Validation images for each training image: fingerprints count training images alone.
_VALIDATED = 0.25
_FORWARD = 1 / 3  # a forward pass, of the time of a training step
# The network whose step is measured to estimate those of others.
_YARDSTICK = {"name": "unet", "channels": [16, 32, 64], "norm": "instance"}
_YARDSTICK_SIDES = {2: 64, 3: 24}


class Stopwatch:
    """Measures and estimates rounds of some sites on one device.

    Attributes:
        limit: seconds that a round should take at most.
    """

    def __init__(self, sites: Fingerprints, device: torch.device, memory: float, limit: float):
        """`memory`: GiB that a step may take."""
        self.sites = sites
        self.device = device
        self.limit = limit
        self._memory = memory
        self._seconds_per_operation: float | None = None
        self._steps: dict[str, StepCost] = {}  # settings of a step -> what it took

    def seems_fast(self, task: TaskConfig) -> bool:
        """Whether a round keeps to the limit, by the operations of a step and this device's speed
        with a small network.
        """
        if self._seconds_per_operation is None:
            small = _yardstick(task)
            operations = step_operations(small) * small.batch_size
            self._seconds_per_operation = measure_step(small, self.device).seconds / operations
        seconds = self._seconds_per_operation * step_operations(task) * task.batch_size
        return round_seconds(task, self.sites, seconds) <= self.limit

    def measured_seconds(self, task: TaskConfig) -> float:
        """Seconds of a round of FedAvg in which the sites train one after the other."""
        return round_seconds(task, self.sites, self.measured(task).seconds)

    def measured(self, task: TaskConfig) -> StepCost:
        """What a step of a task takes; ConfigError if it needs more than the memory."""
        needed = step_bytes(task, task.batch_size) / 2**30
        if needed > self._memory:
            raise ConfigError(
                f"task {task.name}: a step takes about {needed:.2g} GiB, more than "
                f"{self._memory:g}; take a smaller size, network or batch_size"
            )
        # Epochs do not change a step.
        settings = json.dumps(task.to_dict() | {"local_epochs": 1}, sort_keys=True)
        if settings not in self._steps:
            what = f"{task.network['name']}, {format_shape(task.size)}"
            announce(f"measuring a training step on this device: {what}")
            self._steps[settings] = measure_step(task, self.device)
        return self._steps[settings]


def _yardstick(task: TaskConfig) -> TaskConfig:
    """A small U-Net for small images of the task's kind."""
    return TaskConfig(
        name="yardstick",
        kind="segmentation",
        target="binary",
        labels=("structure",),
        channels=task.image_channels,
        spatial_dims=task.spatial_dims,
        size=(_YARDSTICK_SIDES[task.spatial_dims],) * task.spatial_dims,
        network=dict(_YARDSTICK),
        loss={"name": "dice_ce"},
        optimizer={"name": "adam", "lr": 0.001},
        batch_size=4,
        local_epochs=1,
        metric="dice",
    )


def device_name(device: torch.device) -> str:
    """The device's name for people: "cpu, 2 threads" or the name of the GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def round_seconds(task: TaskConfig, sites: Fingerprints, step_seconds: float) -> float:
    """Seconds of a round: training at all sites, one after the other, and validation, without the
    images' reading, which happens once.
    """
    image_seconds = step_seconds / task.batch_size
    images = sum(site.images for site in sites)
    trained = images * task.patches_per_image * task.local_epochs
    validated = _VALIDATED * images * _windows(task, sites)
    return image_seconds * (trained + _FORWARD * validated)


def _windows(task: TaskConfig, sites: Fingerprints) -> int:
    """Windows that cover an image of median size; 1 if images are resized."""
    if task.image_mode == "resize":
        return 1
    windows = 1
    for full, side in zip(median_size(sites, task.spacing), task.size, strict=True):
        stride = side * (1 - OVERLAP)
        windows *= 1 + max(0, math.ceil((full - side) / stride))
    return windows


def median_size(sites: Fingerprints, spacing: Sequence[float] | None = None) -> tuple[float, ...]:
    """Sides of the median image of all sites, as stored or after resampling to `spacing`
    (millimetres).
    """
    if spacing is None or not have_spacings(sites):
        return pooled_percentile(sites, "sizes", 50)
    lengths = pooled_percentile(sites, "extents", 50)
    return tuple(length / gap for length, gap in zip(lengths, spacing, strict=True))
