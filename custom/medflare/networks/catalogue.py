"""Networks by configuration. Every one is a `features.FeatureNetwork`: it returns features and output, as alignment and prototypes need."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from medflare.core.errors import ConfigError
from medflare.core.rng import seeded
from medflare.core.settings import refuse_arguments, unknown
from medflare.networks import classifiers, segmenters
from medflare.networks.features import FeatureNetwork
from medflare.tasks.config import TaskConfig

NETWORKS: dict[str, Callable[..., FeatureNetwork]] = {
    "compact_selector": classifiers.compact_selector,
    "deeplab": segmenters.deeplab,
    "efficientnet_b0": classifiers.efficientnet_b0,
    "resnet18": classifiers.resnet18,
    "resnet50": classifiers.resnet50,
    "small_cnn": classifiers.small_cnn,
    "unet": segmenters.unet,
    "vgg11": classifiers.vgg11,
    "vgg16_slim": classifiers.vgg16_slim,
}


def build_network(spec: Mapping[str, Any], in_channels: int, out_channels: int, spatial_dims: int = 2) -> FeatureNetwork:
    """The network that `spec` names, for example {"name": "unet", "channels": [16, 32, 64]}, with random weights.

    Args:
        spec: "name" and arguments of the network's function.
        in_channels: image channels.
        out_channels: channels of the logits.
        spatial_dims: of the images, 2 or 3.

    Raises:
        ConfigError: unknown name or argument, a value that the network refuses, or one that knows pictures only for volumes.
    """
    settings = dict(spec)
    name = settings.pop("name", None)
    if name not in NETWORKS:
        raise unknown("network", str(name), NETWORKS, "network")
    build = NETWORKS[name]
    given = ("in_channels", "out_channels", "spatial_dims")
    refuse_arguments(build, settings, f"network {name}", taken=given)
    dims = {"spatial_dims": spatial_dims} if _knows_volumes(build) else {}
    if spatial_dims != 2 and not dims:
        able = ", ".join(other for other, function in sorted(NETWORKS.items()) if _knows_volumes(function))
        raise ConfigError(f"network {name} is for pictures, the task has spatial_dims {spatial_dims}; use {able}")
    try:
        network = build(in_channels, out_channels, **settings, **dims)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise ConfigError(f"network {name}: {' '.join(str(error).split())}; check its arguments {settings}") from error
    network.settings = {"spec": dict(spec), "in_channels": in_channels, "out_channels": out_channels, "spatial_dims": spatial_dims}
    return network


def _knows_volumes(build: Callable[..., FeatureNetwork]) -> bool:
    return "spatial_dims" in inspect.signature(build).parameters


def initial_network(
    task: TaskConfig, seed: int, purpose: str = "model", spec: Mapping[str, Any] | None = None, outputs: int | None = None
) -> FeatureNetwork:
    """A network with its initial weights: a function of (seed, purpose) alone, hence equal on the server and at every site.

    Args:
        task: gives the image channels, and the network and the outputs unless the next arguments do.
        seed: of the run.
        purpose: "model", "selector", ...: another purpose, other weights.
        spec: another network than the task's.
        outputs: another number of output channels than the task's.
    """
    with seeded(seed, "initial", purpose):
        return build_network(spec or task.network, task.image_channels, outputs or task.outputs, task.spatial_dims)
