"""Test-time routing: one network whose convolutions and linear layers are mixtures of K+1 trained
ones (IOP-FL, Eq. 5-6).

    W_o^l = sum_k r_k^l W_k^l,   r_k^l = sigmoid(theta_k^l(GAP(h^l)))

with h^l the layer's input, so every sample of a batch has its own weights. The sum of sigmoids is
not fixed, so a layer's weights can shrink to 0; a softmax over the experts prevents this. Layers
are found by type and run by their own `forward`, so any network of convolutions, transposed
convolutions and linear layers can be routed. All other entries (normalisation, learnt activations,
embeddings) are those of one expert, the base: the last one, the global model, unless `set_base` is
called.
"""

import copy
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from medflare.adaptation.dsbn import TestTimeNorm, normalise_by_batch, replace_layer
from medflare.core.errors import StateError
from medflare.core.rng import seeded
from medflare.core.states import StateDict, copy_state, misfit
from medflare.networks.features import overwrite
from medflare.training.epochs import named_trainable

Coefficients = Literal["softmax", "sigmoid"]
Statistics = Literal["batch", "running"]
_NEARLY_ALL = 0.97  # coefficient of a preferred expert; at 1 the softmax would have no gradient

# Exact types: a subclass can use its weight outside `forward` (attention's output projection does).
ROUTED_TYPES = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)


class MLPRouter(nn.Module):
    """Computes coefficients from the layer's pooled input: linear C -> 2C, dropout, linear 2C ->
    experts, softmax or sigmoid (Eq. 6).

    The last layer starts with weight 0 and a bias for which every coefficient is 1/experts: 0, or
    logit(1/experts) for sigmoids.
    """

    def __init__(self, channels: int, experts: int, kind: Coefficients = "softmax"):
        super().__init__()
        self.kind = kind
        self.fc1 = nn.Linear(channels, 2 * channels)
        self.fc2 = nn.Linear(2 * channels, experts)
        self.dropout = nn.Dropout(0.2)  # during fitting, as in the published code
        nn.init.zeros_(self.fc2.weight)
        nn.init.constant_(self.fc2.bias, 0.0 if kind == "softmax" else -math.log(experts - 1))

    @torch.no_grad()
    def prefer(self, expert: int) -> None:
        """Give nearly all weight to one expert, whatever the input (softmax only)."""
        others = len(self.fc2.bias) - 1
        nn.init.zeros_(self.fc2.weight)
        nn.init.constant_(self.fc2.bias, math.log((1 - _NEARLY_ALL) / others))
        self.fc2.bias[expert] = math.log(_NEARLY_ALL)

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs (N, C, ...) -> coefficients (N, experts) in (0, 1)."""
        pooled = inputs
        if inputs.dim() > 2:
            pooled = inputs.flatten(2).mean(dim=2)
        logits = self.fc2(self.dropout(self.fc1(pooled)))
        # Eq. 6, or its softmax
        coefficients = logits.softmax(dim=-1) if self.kind == "softmax" else logits.sigmoid()
        self.coefficients = coefficients.detach()  # of the latest inputs
        return coefficients


class _SharedCoefficients(nn.Module):
    """Takes a router's place in every layer: gives the coefficients that the network's only router
    computed from the image.
    """

    coefficients: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        return self.coefficients


class RoutedLayer(nn.Module):
    """One layer whose weight and bias are the experts', mixed by the coefficients of its router.

    Args:
        layer: is run with the mixed weights instead of its own.
        experts: weight and bias of every expert, by name.
        router: the layer's input, channels second -> coefficients (N, K+1).
    """

    def __init__(
        self,
        layer: nn.Module,
        experts: Sequence[StateDict],
        router: "MLPRouter | _SharedCoefficients",
    ):
        super().__init__()
        self.layer = layer
        self.router = router
        self.parts = tuple(experts[0])
        for part in self.parts:
            stacked = torch.stack([expert[part] for expert in experts])
            self.register_buffer(f"experts_{part}", stacked, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """The layer's output, for every sample with its own weights."""
        channels_second = inputs
        if isinstance(self.layer, nn.Linear):  # there the channels are last
            channels_second = inputs.movedim(-1, 1)
        mixed = self.mixed(self.router(channels_second))
        if len(inputs) == 1:
            weights = {part: mixture[0] for part, mixture in mixed.items()}
            return functional_call(self.layer, weights, (inputs,))

        def one_sample(sample: Tensor, parts: dict[str, Tensor]) -> Tensor:
            return functional_call(self.layer, parts, (sample[None],))[0]

        return vmap(one_sample)(inputs, mixed)

    def mixed(self, coefficients: Tensor) -> dict[str, Tensor]:
        """coefficients (B, experts) -> weights and biases (B, ...) (Eq. 5)."""
        mixed = {}
        for part in self.parts:
            experts = getattr(self, f"experts_{part}")
            mixed[part] = torch.tensordot(coefficients, experts, dims=1)
        return mixed


@dataclass(frozen=True)
class Routing:
    """Settings of a routed network.

    Attributes:
        per_layer: a router for every layer, or one for all layers, whose input is the image
            (Table III, "global").
        coefficients: "sigmoid" is the printed form.
        statistics: BatchNorm's: of the test batch, or the global model's running ones.
        seed: of the routers' initial weights.
    """

    per_layer: bool = True
    coefficients: Coefficients = "softmax"
    statistics: Statistics = "batch"
    seed: int = 0


class RoutedNetwork(nn.Module):
    """A network routed over K+1 experts, with the inputs and outputs of the original network.

    Args:
        network: the architecture; it is copied, its weights are not used.
        experts: states of (P_1, ..., P_K, w_g), at least two.

    Raises:
        StateError: no layer to route.
    """

    def __init__(
        self, network: nn.Module, experts: Sequence[StateDict], routing: Routing = Routing()
    ):
        super().__init__()
        self._experts = list(experts)
        self.network = copy.deepcopy(network)
        self.network.load_state_dict(experts[-1])
        self.network.requires_grad_(False)
        self._shared = _SharedCoefficients()
        self.router: MLPRouter | None = None
        with seeded(routing.seed, "router"):
            self._route(routing)
        self.norms: dict[str, TestTimeNorm] = {}  # BatchNorm that normalises by the test batch
        if routing.statistics == "batch":
            self.norms = normalise_by_batch(self.network)
        self.eval()

    def _replace(self, name: str, layer: nn.Module) -> None:
        """Put a layer in the place of the network's layer of this name, "" for the network
        itself.
        """
        replace_layer(self, f"network.{name}".rstrip("."), layer)

    def _route(self, routing: Routing) -> None:
        # A layer that is used in two places has two names and is replaced at both.
        modules = self.network.named_modules(remove_duplicate=False)
        layers = {name: layer for name, layer in modules if type(layer) in ROUTED_TYPES}
        if not layers:
            network = type(self.network).__name__
            raise StateError(f"{network} has no convolution and no linear layer to route")
        self._unrouted = _entries(self.network, without=layers)
        if not routing.per_layer:
            self.router = self._new_router(next(iter(layers.values())), routing)
        routed: dict[nn.Module, RoutedLayer] = {}
        for name, layer in layers.items():
            if layer not in routed:
                router: MLPRouter | _SharedCoefficients = self._shared
                if routing.per_layer:
                    router = self._new_router(layer, routing)
                routed[layer] = RoutedLayer(layer, self._weights_of(name, layer), router)
            self._replace(name, routed[layer])

    def _new_router(self, layer: nn.Module, routing: Routing) -> MLPRouter:
        """A router whose input is that of the layer."""
        return MLPRouter(_input_channels(layer), len(self._experts), routing.coefficients)

    def _weights_of(self, name: str, layer: nn.Module) -> list[StateDict]:
        """Weight and bias of a layer in every expert."""
        parts = dict(layer.named_parameters())
        states = []
        for expert in self._experts:
            states.append({part: expert[_entry(name, part)] for part in parts})
        return states

    def forward(self, images: Tensor) -> Any:
        if self.router is not None:
            self._shared.coefficients = self.router(images)
        return self.network(images)

    def train(self, mode: bool = True) -> "RoutedNetwork":
        """Set the training mode of the routers' dropout alone; the network stays in evaluation
        mode.
        """
        super().train(False)
        for router in self.routers():
            router.train(mode)
        return self

    def routers(self) -> list[MLPRouter]:
        return [module for module in self.modules() if isinstance(module, MLPRouter)]

    def adaptable(self) -> dict[str, nn.Parameter]:
        return named_trainable(self)

    def adapted_state(self) -> StateDict:
        """A copy of the routers' parameters, by name, on the CPU."""
        return copy_state(self.adaptable())

    def load_adapted_state(self, state: StateDict) -> None:
        """Restore what `adapted_state` returned; raises StateError if it belongs to other
        settings.
        """
        parameters = self.adaptable()
        reason = misfit(state, parameters)
        if reason:
            raise StateError(f"this routing state belongs to other settings: {reason}")
        overwrite(parameters.values(), [state[name] for name in parameters])

    @torch.no_grad()
    def set_base(self, expert: int, running: bool = False) -> None:
        """Take the entries that are not routed from this expert; a network that then prefers it
        nearly equals it.

        Args:
            running: normalise by the running statistics of this expert, not by the test batch.
        """
        for name, (module, part) in self._unrouted.items():
            getattr(module, part).copy_(self._experts[expert][name])
        for norm in self.norms.values():
            norm.running = running

    def prefer(self, expert: int) -> None:
        """Let all routers prefer this expert, see `MLPRouter.prefer`."""
        for router in self.routers():
            router.prefer(expert)

    @torch.no_grad()
    def coefficients(self, images: Tensor) -> dict[str, Tensor]:
        """R for these images: layer -> (N, K+1), in the network's order."""
        self(images)
        return {
            name: module.router.coefficients
            for name, module in self.network.named_modules()
            if isinstance(module, RoutedLayer)
        }


def _entries(network: nn.Module, without: Collection[str]) -> dict[str, tuple[nn.Module, str]]:
    """Entry of the network's state -> its module and its name there, without the entries of some
    layers.
    """
    entries = {}
    names = network.state_dict().keys()
    for name, module in network.named_modules(remove_duplicate=False):
        if name in without:
            continue
        for part in (*module._parameters, *module._buffers):
            entry = _entry(name, part)
            if entry in names:
                entries[entry] = (module, part)
    return entries


def _entry(layer: str, part: str) -> str:
    """The name in a network's state of a part of its layer, "" for the network itself."""
    return f"{layer}.{part}".lstrip(".")


def _input_channels(layer: nn.Module) -> int:
    if isinstance(layer, nn.Linear):
        return layer.in_features
    return int(layer.in_channels)  # type: ignore[arg-type]
