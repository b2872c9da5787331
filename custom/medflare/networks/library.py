"""Networks of `monai.networks.nets` by their names, and others built like them: what the task fixes is given under MONAI's name for it."""

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

from torch import nn

from medflare.core.errors import ConfigError, one_line
from medflare.core.settings import unknown

# What MONAI's constructors call the things that the task fixes.
_CHANNELS: Final = ("in_channels", "n_input_channels")
_OUTPUTS: Final = ("out_channels", "num_classes", "classes")
_DIMS: Final = ("spatial_dims",)
_SIZES: Final = ("img_size", "input_image_size")
_SHAPES: Final = ("in_shape",)  # (channels, ...)
_TASKS: Final = (*_CHANNELS, *_OUTPUTS, *_DIMS, *_SIZES, *_SHAPES)
# What a network of logits with random weights needs where MONAI's default is another: no download, a classification head, no
# activation behind it. The first two are not for a task to change.
_FIXED: Final = {"pretrained": False, "progress": False, "classification": True}
_DEFAULTS: Final = {"post_activation": None}
# What networks raise that are given what they cannot take, while they are made or run.
PROBLEMS: Final = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError, ImportError, ZeroDivisionError)


@cache
def library_names() -> dict[str, Any]:
    """Name -> what builds it: the networks of MONAI that take images and give as many channels as they are told."""
    from monai.networks import nets

    found = {name: getattr(nets, name) for name in dir(nets)}
    classes = {name: build for name, build in found.items() if inspect.isclass(build) and issubclass(build, nn.Module)}
    functions = {name: build for name, build in found.items() if inspect.isfunction(build) and _made_by(build) is not None}
    named = {name: build for name, build in classes.items() if build.__name__ == name} | functions
    return {name: build for name, build in named.items() if _fits(parameters_of(build))}


def parameters_of(build: Any) -> dict[str, inspect.Parameter]:
    """Every argument of a network's class or function, those that it hands on with **kwargs included."""
    found: dict[str, inspect.Parameter] = {}
    makers = build.__mro__ if inspect.isclass(build) else (build, *[made for made in [_made_by(build)] if made])
    for maker in makers:
        own = inspect.signature(maker).parameters
        found = {**{name: parameter for name, parameter in own.items() if parameter.kind is not parameter.VAR_KEYWORD}, **found}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values()):
            break
    return found


def library_network(
    name: str, build: Any, settings: Mapping[str, Any], in_channels: int, out_channels: int, spatial_dims: int, size: Sequence[int]
) -> nn.Module:
    """MONAI's network, or one that is called like MONAI's, with what the task fixes and its own arguments.

    Args:
        spatial_dims: 2 or 3.

    Raises:
        ConfigError: an argument that it does not take or lacks, or a value that it refuses.
    """
    takes = parameters_of(build)
    own = [argument for argument in takes if argument not in _TASKS and argument not in _FIXED]
    for argument in settings:
        if argument not in own:
            raise _not_taken(name, argument, own)
    given = {
        **dict.fromkeys(_CHANNELS, in_channels),
        **dict.fromkeys(_OUTPUTS, out_channels),
        **dict.fromkeys(_DIMS, spatial_dims),
        **dict.fromkeys(_SIZES, tuple(size)),
        **dict.fromkeys(_SHAPES, (in_channels, *size)),
        **_FIXED,
        **_DEFAULTS,
    }
    if "dropout_dim" in takes and takes["dropout_dim"].default == 3:  # V-Net drops whole channels, of volumes unless it is told otherwise
        given["dropout_dim"] = spatial_dims
    arguments = {argument: value for argument, value in given.items() if argument in takes} | dict(settings)
    needed = [found for found in inspect.signature(build).parameters.values() if found.kind is not found.VAR_KEYWORD]
    if missing := [found.name for found in needed if found.default is found.empty and found.name not in arguments]:
        raise ConfigError(f"network {name}: argument {missing[0]!r} is missing; see its documentation")
    try:
        network = build(**arguments)
    except PROBLEMS as error:
        reason = "it needs the package einops; pip install 'medflare[transformers]'" if "einops" in str(error) else one_line(error)
        raise ConfigError(f"network {name}: {reason}; check its arguments {dict(settings)}") from error
    if not isinstance(network, nn.Module):
        raise ConfigError(f"network {name}: it made a {type(network).__name__}, which is no torch.nn.Module")
    return network


def _not_taken(name: str, argument: str, own: Sequence[str]) -> ConfigError:
    if argument == "pretrained":
        return ConfigError(f"network {name}: weights are not downloaded in a federation; leave out pretrained and set network.weights")
    if argument in (*_TASKS, *_FIXED):
        return ConfigError(f"network {name}: {argument} follows from the task; leave it out")
    return unknown("argument", argument, own, f"network {name}")


def _made_by(function: Any) -> Any:
    """The class that a function's annotation says it returns, where that is a network."""
    from monai.networks import nets

    made = getattr(nets, str(inspect.signature(function).return_annotation), None)
    return made if inspect.isclass(made) and issubclass(made, nn.Module) else None


def _fits(takes: Mapping[str, Any]) -> bool:
    """Whether a network says how many dimensions its images have, and how many channels go in and out."""
    whole = any(name in takes for name in _SHAPES)
    return any(name in takes for name in _OUTPUTS) and (whole or all(any(n in takes for n in names) for names in (_CHANNELS, _DIMS)))
