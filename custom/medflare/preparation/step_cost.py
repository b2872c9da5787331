"""Time and memory of a task's training step, measured on this device; and an estimate for a network
that is too large to try.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from medflare.core.errors import ConfigError, one_line
from medflare.core.rng import numpy_generator, seeded
from medflare.data.transforms import Augmentation
from medflare.networks.catalogue import PROBLEMS, initial_network, meta_network
from medflare.networks.dry_run import step_bytes
from medflare.networks.features import zero_images
from medflare.tasks.config import TaskConfig
from medflare.tasks.losses import build_loss
from medflare.tasks.optimizers import build_optimizer
from medflare.training.epochs import trainable

_STEPS = 3  # that are measured, after a first one


@dataclass(frozen=True)
class StepCost:
    """What a training step takes."""

    seconds: float
    gibibytes: float  # weights, gradients, moments and what the step keeps for its gradient


def measure_step(task: TaskConfig, device: torch.device) -> StepCost:
    """Train on noise for a few steps, with the task's augmentation and batch size.

    On a CPU the time is the smaller of the clock's and the processor's, so that other programs do
    not count.

    Raises:
        ConfigError: the task's loss cannot be computed of its network's output.
    """
    before = _reset_peak(device)
    images, targets = noise(task, task.batch_size)
    augmentation = Augmentation(task)
    loss = build_loss(task).to(device)
    network = initial_network(task, seed=0).to(device).train()
    draws = np.random.RandomState(0)
    seconds = []
    with seeded(0, "measure step"), network.frozen(task.freeze.parts):
        optimizer = build_optimizer(task.optimizer, trainable(network), f"task {task.name}")
        for _ in range(1 + _STEPS):
            clock = time.perf_counter()
            processor = time.process_time()
            batch, truth = augmentation(images, targets, draws)
            optimizer.zero_grad(set_to_none=True)
            output = network(batch.to(device))
            with step_explained(task):
                value = loss(output, truth.to(device))
            value.backward()
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            elapsed = time.perf_counter() - clock
            if device.type == "cpu":
                elapsed = min(elapsed, time.process_time() - processor)
            seconds.append(elapsed)
    taken = 0
    if before is not None:
        taken = _peak(device) - before
    if device.type != "cuda":
        # A process takes memory that it has freed before, which is not seen as growth.
        taken = max(taken, step_bytes(task, task.batch_size))
    # Augmentation makes steps differ.
    return StepCost(mean(seconds[1:]), taken / 2**30)


@contextmanager
def step_explained(task: TaskConfig) -> Iterator[None]:
    """Raise ConfigError for a training step that fails, for example as the network is for masks."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        raise ConfigError(
            f"task {task.name}: a training step on {task.size} images fails ({one_line(error)}); "
            "change size, network or augment"
        ) from error


def noise(task: TaskConfig, images: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images and targets for a step."""
    shape = (images, task.image_channels, *task.size)
    pixels = numpy_generator(0, "noise").random(shape, dtype=np.float32)
    return torch.tensor(pixels), noise_targets(task, images)


def noise_targets(task: TaskConfig, images: int) -> torch.Tensor:
    """Targets for a step on noise: every class occurs."""
    area = task.size if task.kind == "segmentation" else ()
    if task.target == "multilabel":
        return torch.ones(images, len(task.labels), *area)
    count = 2 if task.target == "binary" else len(task.labels)
    numbers = torch.arange(images * int(np.prod(area)), dtype=torch.long) % count
    return numbers.reshape(images, *area)


def _reset_peak(device: torch.device) -> int | None:
    """Count the peak of the memory from now on; return the bytes that are used now, None where this
    system does not say.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:  # of Linux alone
        return None
    return _resident("VmRSS")


def _peak(device: torch.device) -> int:
    """The peak of the memory, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _resident("VmHWM")


def _resident(field: str) -> int:
    """A number of bytes of /proc/self/status; 0 if it is missing."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return 1024 * int(value.split()[0])
    return 0


def step_operations(task: TaskConfig) -> float:
    """Floating-point operations of the forward pass of one image, counted without computing;
    infinite if torch cannot count them.
    """
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter:
            meta_network(task).train()(zero_images(task))
    except PROBLEMS:
        return float("inf")
    return float(counter.get_total_flops()) / 2  # of two images
