"""Time and memory of a task's training step, measured on this device; and an estimate for a network
that is too large to try.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from medflare.core.rng import numpy_generator, seeded
from medflare.data.transforms import Augmentation
from medflare.networks.catalogue import PROBLEMS, initial_network, meta_network
from medflare.networks.dry_run import step_bytes
from medflare.networks.features import example
from medflare.tasks.config import TaskConfig
from medflare.tasks.losses import build_loss
from medflare.tasks.optimizers import build_optimizer
from medflare.training.epochs import trainable

_STEPS: Final = 2  # that are measured, after a first one


@dataclass(frozen=True)
class StepCost:
    """What a training step takes."""

    seconds: float
    gibibytes: float  # weights, gradients, moments and what the step keeps for its gradient


def measure_step(task: TaskConfig, device: torch.device) -> StepCost:
    """Train on noise for a few steps, with the task's augmentation and batch size.

    On a CPU the time is the smaller of the clock's and the processor's, so that other programs do
    not count.
    """
    memory = _Memory(device)
    random = numpy_generator(0, "measure step")
    shape = (task.batch_size, task.image_channels, *task.size)
    images = torch.tensor(random.random(shape, dtype=np.float32))
    targets = noise_targets(task, task.batch_size)
    augmentation = Augmentation(task)
    loss = build_loss(task).to(device)
    network = initial_network(task, seed=0).to(device).train()
    draws = np.random.RandomState(0)
    seconds: list[float] = []
    with seeded(0, "measure step"), network.frozen(task.freeze.parts):
        optimizer = build_optimizer(task.optimizer, trainable(network), f"task {task.name}")
        for _ in range(1 + _STEPS):
            clock = time.perf_counter()
            processor = time.process_time()
            batch, truth = augmentation(images, targets, draws)
            optimizer.zero_grad(set_to_none=True)
            loss(network(batch.to(device)), truth.to(device)).backward()
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            elapsed = time.perf_counter() - clock
            if device.type == "cpu":
                elapsed = min(elapsed, time.process_time() - processor)
            seconds.append(elapsed)
    taken = memory.peak() or 0
    if device.type != "cuda":
        # A process takes memory that it has freed before, which is not seen as growth.
        taken = max(taken, step_bytes(task, task.batch_size))
    return StepCost(min(seconds[1:]), taken / 2**30)


def noise_targets(task: TaskConfig, images: int) -> torch.Tensor:
    """Targets for a step on noise: every class occurs."""
    area = task.size if task.kind == "segmentation" else ()
    if task.target == "multilabel":
        return torch.ones(images, len(task.labels), *area)
    count = 2 if task.target == "binary" else len(task.labels)
    numbers = torch.arange(images * int(np.prod(area)), dtype=torch.long) % count
    return numbers.reshape(images, *area)


class _Memory:
    """The peak of the memory that is taken from now on."""

    def __init__(self, device: torch.device):
        self._device = device
        self._before: int | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        elif device.type == "cpu" and _forget_peak():
            self._before = _resident("VmRSS")

    def peak(self) -> int | None:
        """Bytes; None where this system does not say."""
        if self._before is None:
            return None
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        highest = _resident("VmHWM")
        if highest is None:
            return None
        return highest - self._before


def _forget_peak() -> bool:
    """Set the peak of this process's memory to its present size; False where Linux's /proc is
    missing.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _resident(field: str) -> int | None:
    """A number of bytes of /proc/self/status."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return 1024 * int(value.split()[0])
    return None


def step_operations(task: TaskConfig) -> float:
    """Floating-point operations of the forward pass of one image, counted without computing;
    infinite if torch cannot count them.
    """
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter:
            meta_network(task).train()(example(task.image_channels, task.size, "meta"))
    except PROBLEMS:
        return float("inf")
    return float(counter.get_total_flops()) / 2  # `example` has two images
