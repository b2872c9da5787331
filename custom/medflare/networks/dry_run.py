"""The task's network tried before anything starts: whether the task's size suits it, and what a training step needs at least."""

import math
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn

from medflare.core.errors import ConfigError
from medflare.core.packages import installed
from medflare.networks.catalogue import meta_network
from medflare.networks.features import FeatureNetwork
from medflare.networks.library import PROBLEMS
from medflare.networks.structure import example
from medflare.tasks.config import TaskConfig

_DIVISORS = (2, 4, 8, 16, 32, 64)
_COPIES = 4  # of every weight: itself, its gradient and Adam's two moments
_BYTES = 4  # of a float32
_HALF = 2  # of a bfloat16 or float16
_SMALL = 10**10  # multiplications at most of a pass that is computed: it takes less than what it saves, see `_logits`


def check_network(task: TaskConfig) -> FeatureNetwork:
    """Before anything starts: the task's network takes the task's images and gives what the task's kind needs.

    Returns:
        The network without memory, see `catalogue.meta_network`.

    Raises:
        ConfigError: it cannot be built, or the images do not pass, with the nearest larger size that would, or the output is no logits
            of the task.
    """
    try:
        return _tried(task)
    except ConfigError:
        for divisor in _DIVISORS:
            larger = tuple(math.ceil(side / divisor) * divisor for side in task.size)
            if larger != task.size and _passes(replace(task, size=larger)):
                needs = f"task {task.name}: network {task.network['name']} needs sides divisible by {divisor}"
                raise ConfigError(f"{needs}, size is {list(task.size)}; use {list(larger)}") from None
        raise


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
    needed = least_bytes(task, batch)
    if needed > free:
        raise ConfigError(
            f"{place}: a training step on {batch} x {list(task.size)} needs at least {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are "
            f"free on {device}; make size or batch_size smaller (the site's own: batch_size in local/medflare.json)"
        )


def least_bytes(task: TaskConfig, batch: int) -> int:
    """What a training step needs at least: outputs of all layers for a batch, weights with gradient and Adam's moments.

    Args:
        task: gives network and size.
        batch: images or patches of a step.

    Returns:
        Bytes. Nothing is computed: the network has no memory.
    """
    outputs: list[int] = []

    def note(layer: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and not any(True for _ in layer.children()):
            outputs.append(output.numel() * (_BYTES if task.precision == "fp32" else _HALF))

    network = meta_network(task).eval()
    for layer in network.modules():
        layer.register_forward_hook(note)
    with torch.no_grad():
        network(torch.zeros(batch, task.image_channels, *task.size, device="meta"))
    return sum(outputs) + _COPIES * _BYTES * sum(weight.numel() for weight in network.parameters())


def training_operations(task: TaskConfig) -> int:
    """Floating-point operations of a training step on one image or patch, forward and backward, as torch counts them.

    Args:
        task: gives network and size.

    Returns:
        Of convolutions and matrix products, which are nearly all. Nothing is computed: the network has no memory.
    """
    from torch.utils.flop_counter import FlopCounterMode

    network = meta_network(task).train()
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros(2, task.image_channels, *task.size, device="meta")).sum().backward()
    return counter.get_total_flops() // 2


def _tried(task: TaskConfig) -> FeatureNetwork:
    """As `check_network`, for the task's own size."""
    network, place = meta_network(task), f"task {task.name}: network {task.network['name']}"
    wanted = (2, task.outputs, *(task.size if task.kind == "segmentation" else ()))
    try:
        found = tuple(_logits(network, task).shape)
    except PROBLEMS as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{place}: images of size {list(task.size)} do not pass ({reason}); change size or network") from error
    if found != wanted:
        raise ConfigError(f"{place}: two images give logits of shape {list(found)}, a {task.kind} task needs {list(wanted)}")
    return network


@torch.no_grad()
def _logits(network: nn.Module, task: TaskConfig) -> Tensor:
    """What two empty images give.

    To pass a normalisation without memory torch imports a third of itself, in more than a second. A server and who writes a job
    need nothing of it otherwise, and have a small network compute zeros sooner.
    """
    weights = sum(weight.numel() for weight in network.parameters())
    if weights * 2 * math.prod(task.size) <= _SMALL:
        with suppress(*PROBLEMS):  # some cannot be given memory afterwards
            computing = deepcopy(network).eval().to_empty(device="cpu")
            for tensor in chain(computing.parameters(), computing.buffers()):
                tensor.zero_()
            return cast(Tensor, computing(example(task.image_channels, task.size, "cpu")))
    return cast(Tensor, network.eval()(example(task.image_channels, task.size, "meta")))


def _passes(task: TaskConfig) -> bool:
    try:
        _tried(task)
    except ConfigError:
        return False
    return True


def _free(device: torch.device) -> int | None:
    """Bytes that are free on a device; None where nobody can tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if not installed("psutil"):
        return None
    import psutil

    return int(psutil.virtual_memory().available)
