"""Networks by configuration. Every one is a `features.FeatureNetwork`: it returns features and output, as alignment and prototypes need."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from medflare.core.errors import ConfigError, one_line
from medflare.core.rng import seeded
from medflare.core.settings import refuse_arguments, unknown
from medflare.networks import classifiers, segmenters
from medflare.networks.features import FeatureNetwork
from medflare.networks.library import PROBLEMS, library_names, library_network
from medflare.networks.own import imported, own_module
from medflare.networks.structure import WholeNetwork, example, last_layer
from medflare.tasks.config import TaskConfig

NETWORKS: dict[str, Callable[..., FeatureNetwork]] = {
    "compact_selector": classifiers.compact_selector,
    "deeplab": segmenters.deeplab,
    "efficientnet_b0": classifiers.efficientnet_b0,
    "efficientnet_lite0": classifiers.efficientnet_lite0,
    "mlp": classifiers.mlp,
    "resnet18": classifiers.resnet18,
    "resnet50": classifiers.resnet50,
    "ridge_selector": classifiers.ridge_selector,
    "small_cnn": classifiers.small_cnn,
    "unet": segmenters.unet,
    "vgg11": classifiers.vgg11,
    "vgg16_slim": classifiers.vgg16_slim,
}
_SIDE = 64  # of the images that a network is built for where nobody says: most depend on no size


def build_network(
    spec: Mapping[str, Any], in_channels: int, out_channels: int, spatial_dims: int = 2, size: Sequence[int] | None = None
) -> FeatureNetwork:
    """The network that `spec` names, for example {"name": "unet", "channels": [16, 32, 64]}, with random weights.

    Args:
        spec: "name", of `NETWORKS`, of a class in `monai.networks.nets` or of one's own ("package.module:name"), and its arguments.
        out_channels: channels of the logits.
        spatial_dims: 2, or 3 for volumes.
        size: of the images, for networks that are built for one size; None: 64 a side.

    Raises:
        ConfigError: unknown name or argument, a value that the network refuses, or one for pictures where volumes are asked for.
    """
    settings = {name: value for name, value in spec.items() if name != "weights"}  # what training starts from, see `weights`
    spec = dict(settings)
    name = settings.pop("name", None)
    sides = tuple(size or [_SIDE] * spatial_dims)
    if name in NETWORKS:
        network = _own(name, settings, in_channels, out_channels, {"spatial_dims": spatial_dims, "size": sides})
    else:
        whole = library_network(str(name), _found(str(name)), settings, in_channels, out_channels, spatial_dims, sides)
        if isinstance(whole, FeatureNetwork):
            network = whole
        else:
            network = WholeNetwork(whole, _last_layer(json.dumps(spec), in_channels, out_channels, spatial_dims, sides))
    network.settings = {"spec": spec, "in_channels": in_channels, "out_channels": out_channels}
    network.settings |= {"spatial_dims": spatial_dims, "size": list(sides)}
    return network


def _found(name: str) -> Callable[..., Any]:
    """What builds a network that is none of `NETWORKS`."""
    if own_module({"name": name}):
        return imported(name)
    if name not in library_names():
        raise unknown("network", name, {*NETWORKS, *library_names()}, "network")
    return library_names()[name]


def _own(name: str, settings: Mapping[str, Any], in_channels: int, out_channels: int, images: Mapping[str, Any]) -> FeatureNetwork:
    """One of `NETWORKS`; `images` says their "spatial_dims" and "size", for those that want to know."""
    build = NETWORKS[name]
    refuse_arguments(build, settings, f"network {name}", taken=["in_channels", "out_channels", *images])
    told = {key: value for key, value in images.items() if _asks(build, key)}
    if "spatial_dims" not in told and (dims := images["spatial_dims"]) != 2:
        others = ", ".join(sorted(other for other, made in NETWORKS.items() if _asks(made, "spatial_dims")))
        raise ConfigError(f"network {name}: it is for pictures, spatial_dims is {dims}; take {others} or one of MONAI's")
    try:
        return build(in_channels, out_channels, **settings, **told)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise ConfigError(f"network {name}: {' '.join(str(error).split())}; check its arguments {dict(settings)}") from error


def _asks(build: Callable[..., FeatureNetwork], argument: str) -> bool:
    return argument in inspect.signature(build).parameters


@lru_cache(maxsize=64)
def _last_layer(spec: str, in_channels: int, out_channels: int, spatial_dims: int, size: tuple[int, ...]) -> str | None:
    """`structure.last_layer` of MONAI's network; found once, on the meta device, since it depends on the settings alone."""
    settings = json.loads(spec)
    name = settings.pop("name")

    def build() -> nn.Module:
        return library_network(name, _found(name), settings, in_channels, out_channels, spatial_dims, size)

    try:
        return last_layer(_without_memory(build), example(in_channels, size, "meta"))
    except (*PROBLEMS, ConfigError) as error:
        raise ConfigError(f"network {name}: images of size {list(size)} do not pass ({one_line(error)})") from error


def _without_memory(build: Callable[[], nn.Module]) -> Any:
    """What `build` makes, on the meta device; some of MONAI's networks read their own numbers while they are made, and move there after."""
    try:
        with torch.device("meta"):
            return build()
    except (ConfigError, RuntimeError):
        with seeded(0, "shapes"):
            return build().to("meta")


def task_network(task: TaskConfig, spec: Mapping[str, Any] | None = None, outputs: int | None = None) -> FeatureNetwork:
    """The task's network, or one by `spec` for its images, with random weights.

    Args:
        task: gives channels, dimensions and size, and what the others leave open.
        spec: the network; None: the task's.
        outputs: output channels; None: the task's.
    """
    return build_network(spec or task.network, task.image_channels, outputs or task.outputs, task.spatial_dims, task.size)


def meta_network(task: TaskConfig, spec: Mapping[str, Any] | None = None, outputs: int | None = None) -> FeatureNetwork:
    """The same without memory or random numbers (meta device): for names, shapes and layer types."""
    return _without_memory(lambda: task_network(task, spec, outputs))


def initial_network(
    task: TaskConfig,
    seed: int,
    purpose: str = "model",
    spec: Mapping[str, Any] | None = None,
    outputs: int | None = None,
    start: Mapping[str, Tensor] | None = None,
) -> FeatureNetwork:
    """A network with its initial weights: a function of (seed, purpose) alone, hence equal on the server and at every site.

    Args:
        task: gives the image channels, and the network and the outputs unless the next arguments do.
        purpose: "model", "selector", ...: another purpose, other weights.
        spec: another network than the task's.
        outputs: another number of output channels than the task's.
        start: weights that every network of the task's own kind has instead, see `weights.starting_state`; None: none.
    """
    with seeded(seed, "initial", purpose):
        network = task_network(task, spec, outputs)
    if start is not None and spec is None and outputs is None:
        network.load_state_dict(dict(start))
    return network
