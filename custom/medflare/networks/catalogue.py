"""Networks by name: ours, those of `monai.networks.nets`, and those of trusted packages; each is a
`features.FeatureNetwork`.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from medflare.core.errors import ConfigError, one_line
from medflare.core.rng import seeded
from medflare.core.settings import refuse_arguments, unknown
from medflare.networks import classifiers, segmenters
from medflare.networks.features import FeatureNetwork, WholeNetwork, last_layer, zero_images
from medflare.networks.foreign import EXTENSIONS, NetworkSpec, foreign_module, imported
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
_SIDE = 64  # default image size; most networks do not depend on it
# What networks raise for arguments or images that they do not accept.
PROBLEMS = (
    TypeError,
    ValueError,
    RuntimeError,
    LookupError,
    AttributeError,
    AssertionError,
    ImportError,
    ZeroDivisionError,
)


class Shapes(NamedTuple):
    """What a task fixes of a network: channels of images and logits, dimensions and image size."""

    in_channels: int
    out_channels: int
    spatial_dims: int
    size: tuple[int, ...]


def build_network(
    spec: NetworkSpec,
    in_channels: int,
    out_channels: int,
    spatial_dims: int = 2,
    size: Sequence[int] | None = None,
) -> FeatureNetwork:
    """The network that `spec` names, for example {"name": "unet", "channels": [16, 32, 64]}, with
    random weights.

    Args:
        spec: "name", of `NETWORKS`, of a class in `monai.networks.nets` or of a trusted package
            (see `foreign`), and arguments.
        out_channels: channels of the logits.
        size: of the images, for networks that are built for one size; None: 64 a side.

    Raises:
        ConfigError: unknown name or argument, a value that the network does not accept, or a 2-D
            network for volumes.
    """
    # `networks.weights` loads initial weights.
    settings = {key: value for key, value in spec.items() if key != "weights"}
    spec = dict(settings)
    name = str(settings.pop("name", None))
    sides = tuple(size or [_SIDE] * spatial_dims)
    shapes = Shapes(in_channels, out_channels, spatial_dims, sides)
    build = _theirs
    if name in NETWORKS and not foreign_module(spec):
        build = _ours
    try:
        network: Any = build(name, settings, shapes)
    except PROBLEMS as error:
        raise ConfigError(f"network {name} with {settings}: {one_line(error)}") from error
    if not isinstance(network, FeatureNetwork):
        network = WholeNetwork(network, _last_layer(json.dumps(spec), shapes))
    network.settings = {"spec": spec, **shapes._asdict(), "size": list(sides)}
    return network


def _ours(name: str, settings: Mapping[str, Any], shapes: Shapes) -> nn.Module:
    """One of `NETWORKS`; those that have such an argument get `spatial_dims` and `size`."""
    build = NETWORKS[name]
    refuse_arguments(build, settings, f"network {name}", reserved=Shapes._fields)
    parameters = inspect.signature(build).parameters
    accepted = {key: value for key, value in shapes._asdict().items() if key in parameters}
    if "spatial_dims" not in accepted and shapes.spatial_dims != 2:
        raise ConfigError(
            f"network {name}: is 2-D, spatial_dims is {shapes.spatial_dims}; "
            "use unet, resnet18 or one of MONAI's"
        )
    return build(**settings, **accepted)


# -- networks of MONAI, and of trusted packages, whose arguments have the same names ---------------

_CHANNELS = ("in_channels", "n_input_channels")
_OUTPUTS = ("out_channels", "num_classes", "classes")
_SIZES = ("img_size", "input_image_size")
_SHAPE = "in_shape"  # (channels, ...)
# Random weights without a download, a classification head, no activation after the logits.
_FIXED: dict[str, Any] = {"pretrained": False, "progress": False, "classification": True}


@cache
def monai_networks() -> dict[str, Any]:
    """Name -> class or function: the networks of MONAI with arguments for dimensions, input and
    output channels.
    """
    from monai.networks import nets

    return {name: build for name, build in sorted(vars(nets).items()) if _is_usable(name, build)}


EXTENSIONS.builtin = lambda: {*NETWORKS, *monai_networks()}  # which `foreign` cannot import


def _is_usable(name: str, build: Any) -> bool:
    if inspect.isclass(build):
        is_network = issubclass(build, nn.Module) and build.__name__ == name
    else:
        is_network = inspect.isfunction(build) and _returned_class(build) is not None
    if not is_network:
        return False
    parameters = parameters_of(build).keys()
    inputs = "spatial_dims" in parameters and not parameters.isdisjoint(_CHANNELS)
    outputs = not parameters.isdisjoint(_OUTPUTS)
    return outputs and (inputs or _SHAPE in parameters)


def parameters_of(build: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a network's class or function, with those to which it passes **kwargs."""
    collected: dict[str, inspect.Parameter] = {}
    makers = build.__mro__ if inspect.isclass(build) else (build, _returned_class(build))
    for maker in filter(None, makers):
        passes_on = False
        named = {}
        for name, parameter in inspect.signature(maker).parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                passes_on = True
            else:
                named[name] = parameter
        collected = named | collected
        if not passes_on:
            break
    return collected


def _returned_class(function: Any) -> Any:
    """The network class in a function's return annotation; None if there is none."""
    from monai.networks import nets

    cls = getattr(nets, str(inspect.signature(function).return_annotation), None)
    return cls if inspect.isclass(cls) and issubclass(cls, nn.Module) else None


def _theirs(name: str, settings: Mapping[str, Any], shapes: Shapes) -> nn.Module:
    """A network of MONAI or a trusted package, from its own arguments and what the task fixes."""
    build = imported(name) if foreign_module({"name": name}) else monai_networks().get(name)
    if build is None:
        raise unknown("network", name, EXTENSIONS, "network")
    fixed = {
        **_FIXED,
        **dict.fromkeys(_CHANNELS, shapes.in_channels),
        **dict.fromkeys(_OUTPUTS, shapes.out_channels),
        **dict.fromkeys(_SIZES, shapes.size),
        "spatial_dims": shapes.spatial_dims,
        _SHAPE: (shapes.in_channels, *shapes.size),
    }
    parameters = parameters_of(build)
    free = [parameter for parameter in parameters if parameter not in fixed]
    for argument in settings:
        if argument not in free:
            raise unknown("argument", argument, free, f"network {name}")
    arguments = {**fixed, "post_activation": None}
    # V-Net drops whole channels, of volumes by default.
    if "dropout_dim" in parameters and parameters["dropout_dim"].default == 3:
        arguments["dropout_dim"] = shapes.spatial_dims
    arguments = {name: value for name, value in arguments.items() if name in parameters}
    arguments.update(settings)
    network = build(**arguments)
    if not isinstance(network, nn.Module):
        raise ConfigError(
            f"network {name}: returns a {type(network).__name__}, not a torch.nn.Module"
        )
    return network


@lru_cache(maxsize=64)
def _last_layer(spec: str, shapes: Shapes) -> str | None:
    """`features.last_layer` of a network of MONAI, on the meta device; cached, since it depends on
    the settings only.
    """
    settings = json.loads(spec)
    name = settings.pop("name")
    images = torch.zeros(2, shapes.in_channels, *shapes.size, device="meta")
    try:
        return last_layer(_on_meta(partial(_theirs, name, settings, shapes)), images)
    except (*PROBLEMS, ConfigError) as error:
        raise ConfigError(
            f"network {name} does not accept images of size {list(shapes.size)} ({one_line(error)})"
        ) from error


def _on_meta(build: Callable[[], nn.Module]) -> Any:
    """The network on the meta device; some of MONAI's read their own numbers while they are built,
    and are moved there afterwards.
    """
    network = _without_memory(build)
    if network is not None:
        return network
    with seeded(0, "shapes"):
        return build().to("meta")


def _without_memory(build: Callable[[], nn.Module]) -> nn.Module | None:
    """The network, built on the meta device; None if that fails."""
    try:
        with torch.device("meta"):
            return build()
    except (*PROBLEMS, ConfigError):
        return None


def task_network(
    task: TaskConfig, spec: NetworkSpec | None = None, outputs: int | None = None
) -> FeatureNetwork:
    """The task's network, or one by `spec` and with other output channels for its images, with
    random weights.
    """
    spec = spec or task.network
    outputs = outputs or task.outputs
    return build_network(spec, task.image_channels, outputs, task.spatial_dims, task.size)


def meta_network(
    task: TaskConfig, spec: NetworkSpec | None = None, outputs: int | None = None
) -> FeatureNetwork:
    """As `task_network`, on the meta device (no memory, no random numbers): for names, shapes and
    layer types.
    """
    return _on_meta(partial(task_network, task, spec, outputs))


def builds_on_meta(task: TaskConfig) -> bool:
    """Whether `meta_network` takes no memory for the task's network, not even to fail."""
    return _without_memory(partial(task_network, task)) is not None


@torch.no_grad()
def feature_width(task: TaskConfig, spec: NetworkSpec | None = None) -> int:
    """D, the channels of the features of the task's network or of one by `spec`."""
    images = zero_images(task)
    features, _ = meta_network(task, spec).eval().features_and_output(images)
    return features.shape[1]


def initial_network(
    task: TaskConfig,
    seed: int,
    purpose: str = "model",
    spec: NetworkSpec | None = None,
    outputs: int | None = None,
    start: Mapping[str, Tensor] | None = None,
) -> FeatureNetwork:
    """As `task_network`, with initial weights that depend on (seed, purpose) only: equal on the
    server and at every site.

    Args:
        purpose: "model", "selector", ...
        start: pretrained weights of the task's own network, see `weights.starting_state`; not used
            with `spec` or `outputs`.
    """
    with seeded(seed, "initial", purpose):
        network = task_network(task, spec, outputs)
    if start is not None and spec is None and outputs is None:
        network.load_state_dict(dict(start))
    return network
