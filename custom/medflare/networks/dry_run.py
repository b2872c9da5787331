"""The task's network tried without memory (meta device): whether the task's size suits it, and what a training step needs at least."""

import math

import torch
from torch import Tensor, nn

from medflare.core.errors import ConfigError
from medflare.core.packages import installed
from medflare.networks.catalogue import build_network
from medflare.tasks.config import TaskConfig

_DIVISORS = (2, 4, 8, 16, 32, 64)
_COPIES = 4  # of every weight: itself, its gradient and Adam's two moments
_BYTES = 4  # of a float32


def check_size(task: TaskConfig) -> None:
    """Refuse a size of volumes or patches that the network cannot take, before anything starts.

    Raises:
        ConfigError: it cannot; names the nearest larger size that works.
    """
    if task.spatial_dims == 2 and task.fit == "resize":
        return  # `data check` trains a step on pictures; it would be done twice
    reason = _refusal(task, task.size)
    if reason is None:
        return
    for divisor in _DIVISORS:
        larger = tuple(math.ceil(side / divisor) * divisor for side in task.size)
        if _refusal(task, larger) is None:
            name = task.network["name"]
            raise ConfigError(
                f"task {task.name}: network {name} needs sides divisible by {divisor}, size is {list(task.size)}; use {list(larger)}"
            )
    raise ConfigError(f"task {task.name}: network {task.network['name']} cannot take size {list(task.size)} ({reason}); change one of them")


def check_memory(task: TaskConfig, batch: int, device: torch.device, place: str) -> None:
    """Refuse a training step that certainly does not fit into what is free on a device.

    Counted are the outputs of all layers for a batch, and weights with gradient and Adam's moments; the true need is larger.

    Args:
        task: gives network and size.
        batch: images or patches of a step.
        device: where it would run.
        place: the beginning of the message.

    Raises:
        ConfigError: it needs more.
    """
    free = _free(device)
    if free is None:
        return
    needed = _least_bytes(task, batch)
    if needed > free:
        raise ConfigError(
            f"{place}: a training step on {batch} x {list(task.size)} needs at least {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are "
            f"free on {device}; make size or batch_size smaller (the site's own: batch_size in local/medflare.json)"
        )


def _tried(task: TaskConfig, size: tuple[int, ...], batch: int) -> tuple[Tensor, int, nn.Module]:
    """Logits, bytes of all layers' outputs, and the network."""
    outputs: list[int] = []

    def note(layer: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and not any(True for _ in layer.children()):
            outputs.append(output.numel() * _BYTES)

    with torch.device("meta"), torch.no_grad():
        network = build_network(task.network, task.image_channels, task.outputs, task.spatial_dims).eval()
        for layer in network.modules():
            layer.register_forward_hook(note)
        logits = network(torch.zeros(batch, task.image_channels, *size))
    return logits, sum(outputs), network


def _refusal(task: TaskConfig, size: tuple[int, ...]) -> str | None:
    """Why the network cannot take images of a size; None where it can, or where that cannot be tried."""
    try:
        logits, _, _ = _tried(task, size, batch=1)
    except NotImplementedError:  # an operation that the meta device lacks
        return None
    except (RuntimeError, ValueError) as error:
        return " ".join(str(error).split())[:160]
    if task.kind == "segmentation" and logits.shape[2:] != size:
        return f"its output is {list(logits.shape[2:])}"
    return None


def _least_bytes(task: TaskConfig, batch: int) -> int:
    try:
        _, activations, network = _tried(task, task.size, batch)
    except (RuntimeError, ValueError):  # `check_size` tells
        return 0
    return activations + _COPIES * _BYTES * sum(weight.numel() for weight in network.parameters())


def _free(device: torch.device) -> int | None:
    """Bytes that are free on a device; None where nobody can tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if not installed("psutil"):
        return None
    import psutil

    return int(psutil.virtual_memory().available)
