"""Validation of a task's network before the run, and the approximate memory of a training step,
both without computing (meta device).
"""

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from medflare.core.errors import ConfigError, one_line
from medflare.networks.catalogue import PROBLEMS, meta_network
from medflare.networks.features import FeatureNetwork, zero_images
from medflare.tasks.config import TaskConfig

# Kind of task -> a network for it.
_EXAMPLES = {"segmentation": "unet", "classification": "resnet18"}
_COPIES = 4  # of the weights: themselves, their gradients and Adam's two moments


def check_network(task: TaskConfig) -> FeatureNetwork:
    """The task's network on the meta device.

    Raises:
        ConfigError: it does not accept the task's images, or returns logits of another shape than
            the task's; for a wrong image size, with a larger size that works.
    """
    try:
        return _checked(task)
    except ConfigError:
        size = _larger_size(task)
        if size is None:
            raise
    raise ConfigError(
        f"task {task.name}: network {task.network['name']} needs a size such as {size}, "
        f"not {list(task.size)}"
    )


def _larger_size(task: TaskConfig) -> list[int] | None:
    """The smallest size with a common divisor that the network accepts; None if it accepts none."""
    for divisor in (2, 4, 8, 16, 32, 64):
        size = tuple(math.ceil(side / divisor) * divisor for side in task.size)
        with suppress(ConfigError):
            _checked(replace(task, size=size))
            return list(size)
    return None


def step_bytes(task: TaskConfig, batch: int) -> int:
    """Approximate bytes of a training step: the outputs of all layers, weights, gradients and
    Adam's moments.

    `batch` is the number of images or patches. If the network does not run on the meta device, only
    images and weights count.
    """
    network = meta_network(task).train()
    outputs = {}

    def note(layer: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            outputs[output.untyped_storage()] = output.untyped_storage().nbytes()

    for layer in network.modules():
        if not any(layer.children()):
            layer.register_forward_hook(note)
    images = zero_images(task)
    with suppress(*PROBLEMS):
        network(images)
    weights = sum(weight.nbytes for weight in network.parameters())
    per_image = (images.nbytes + sum(outputs.values())) / len(images)
    if task.precision != "fp32":
        per_image /= 2
    return _COPIES * weights + math.ceil(batch * per_image)


@torch.no_grad()
def _checked(task: TaskConfig) -> FeatureNetwork:
    """The network of `check_network`, for the task's own size only."""
    network = meta_network(task)
    location = f"task {task.name}: network {task.network['name']}"
    expected = [2, task.outputs]
    if task.kind == "segmentation":
        expected += task.size
    try:
        shape = list(network.eval()(zero_images(task)).shape)
    except PROBLEMS as error:
        raise ConfigError(
            f"{location} does not accept images of size {list(task.size)} ({one_line(error)})"
        ) from error
    kind = {2: "classification", task.spatial_dims + 2: "segmentation"}.get(len(shape), task.kind)
    if kind != task.kind:
        raise ConfigError(
            f"{location} is a network for {kind} (logits of shape {shape}); "
            f"take one for {task.kind}, such as {_EXAMPLES[task.kind]}"
        )
    if shape != expected:
        raise ConfigError(
            f"{location}: two images give logits of shape {shape}, the task needs {expected}"
        )
    return network
