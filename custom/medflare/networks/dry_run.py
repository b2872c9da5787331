"""The task's network tried before anything starts: whether the task's size suits it, and about how much memory a training step takes."""

import math
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from typing import Any, Final, cast

import torch
from torch import Tensor, UntypedStorage, nn

from medflare.core.errors import ConfigError, one_line
from medflare.networks.catalogue import meta_network
from medflare.networks.features import FeatureNetwork
from medflare.networks.library import PROBLEMS
from medflare.networks.structure import example
from medflare.tasks.config import TaskConfig

_DIVISORS: Final = (2, 4, 8, 16, 32, 64)
_SMALL: Final = 10**10  # multiplications at most of a pass that is computed: it takes less than what it saves, see `_logits`
_COPIES: Final = 4  # of the weights: themselves, their gradients and Adam's two moments


def check_network(task: TaskConfig) -> FeatureNetwork:
    """Before anything starts: the task's network takes the task's images and gives what the task's kind needs.

    Returns:
        The network without memory, see `catalogue.meta_network`.

    Raises:
        ConfigError: it cannot be built, or the images do not pass, with a larger size that was tried and does, or the output is no logits
            of the task.
    """
    try:
        return _tried(task)
    except ConfigError:
        for size in dict.fromkeys(tuple(math.ceil(side / divisor) * divisor for side in task.size) for divisor in _DIVISORS):
            if size != task.size and _passes(replace(task, size=size)):
                fails = f"task {task.name}: network {task.network['name']} does not work on images of size {list(task.size)}"
                raise ConfigError(f"{fails}, it does on {list(size)}; use that") from None
        raise


def step_bytes(task: TaskConfig, batch: int) -> int:
    """About what a training step takes: the outputs of all layers, and four numbers for each weight (itself, gradient, Adam's moments).

    Args:
        task: gives network, size and precision.
        batch: images or patches of a step.

    Returns:
        Bytes. Nothing is computed: the network has no memory. Of one that fails so, images and weights alone are counted.
    """
    network = meta_network(task).train()
    given: dict[UntypedStorage, int] = {}

    def note(layer: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            given[output.untyped_storage()] = output.untyped_storage().nbytes()

    images = torch.zeros(2, task.image_channels, *task.size, device="meta")
    for layer in network.modules():
        if not any(layer.children()):
            layer.register_forward_hook(note)
    with suppress(*PROBLEMS):
        network(images)
    weights = sum(weight.nbytes for weight in network.parameters())
    per_image = (images.nbytes + sum(given.values())) / 2 / (1 if task.precision == "fp32" else 2)
    return _COPIES * weights + math.ceil(batch * per_image)


def _tried(task: TaskConfig) -> FeatureNetwork:
    """As `check_network`, for the task's own size."""
    network, place = meta_network(task), f"task {task.name}: network {task.network['name']}"
    wanted = (2, task.outputs, *(task.size if task.kind == "segmentation" else ()))
    try:
        found = tuple(_logits(network, task).shape)
    except PROBLEMS as error:
        raise ConfigError(f"{place}: images of size {list(task.size)} do not pass ({one_line(error)}); change size or network") from error
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
