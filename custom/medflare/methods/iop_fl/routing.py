"""Test-time routing: one network whose convolutions and linear layers are mixtures of K+1 trained ones (IOP-FL, Eq. 5-6).

    W_o^l = sum_k r_k^l W_k^l,   r_k^l = sigmoid(theta_k^l(GAP(h^l)))

with h^l the layer's own input, so every sample of a batch has weights of its own. Sigmoids need not add up to anything, so a layer's
weights may shrink to nothing; a softmax over the experts in their place keeps the mixture between them. The layers are found by type
and run by their own `forward`, so any network of convolutions, transposed convolutions and linear layers can be routed. Whatever else a
network has (normalisation, learnt activations, embeddings) is taken from the last expert, the global model.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from medflare.adaptation.dsbn import TestTimeNorm
from medflare.core.errors import StateError
from medflare.core.rng import seeded
from medflare.core.states import StateDict, copy_state, misfit

Coefficients = Literal["softmax", "sigmoid"]
Statistics = Literal["batch", "running"]
_DROPOUT = 0.2  # of a router while it is fitted; the published code's

# Exact types: a subclass may read its weight elsewhere than in `forward` (attention's output projection does).
ROUTED_TYPES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)


class MLPRouter(nn.Module):
    """Coefficients from the layer's pooled input: linear C -> 2C, dropout, linear 2C -> experts, softmax or sigmoid (Eq. 6).

    The last layer starts at weight 0 and the bias of `uniform_logit`: every coefficient is 1/experts whatever the input, and its
    gradient does not vanish.
    """

    def __init__(self, channels: int, experts: int, kind: Coefficients = "softmax"):
        super().__init__()
        self.kind = kind
        self.fc1 = nn.Linear(channels, 2 * channels)
        self.fc2 = nn.Linear(2 * channels, experts)
        self.dropout = nn.Dropout(_DROPOUT)
        nn.init.zeros_(self.fc2.weight)
        nn.init.constant_(self.fc2.bias, uniform_logit(experts, kind))

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs (N, C, ...) -> coefficients (N, experts) in (0, 1).

        Examples:
            >>> MLPRouter(3, 4)(torch.zeros(1, 3, 2, 2)).detach()
            tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
        """
        pooled = inputs.flatten(2).mean(dim=2) if inputs.dim() > 2 else inputs
        return coefficients_of(self.fc2(self.dropout(self.fc1(pooled))), self.kind)


class _Given(nn.Module):
    """Stands where a layer's router would: hands out coefficients that were computed once from the image."""

    coefficients: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        return self.coefficients


def coefficients_of(logits: Tensor, kind: Coefficients) -> Tensor:
    """Coefficients of the experts from a router's logits (..., experts): their softmax, or sigmoids that need not add up to one (Eq. 6).

    Examples:
        >>> coefficients_of(torch.zeros(1, 4), "softmax"), coefficients_of(torch.zeros(1, 4), "sigmoid")
        (tensor([[0.2500, 0.2500, 0.2500, 0.2500]]), tensor([[0.5000, 0.5000, 0.5000, 0.5000]]))
    """
    return logits.softmax(dim=-1) if kind == "softmax" else logits.sigmoid()


def uniform_logit(experts: int, kind: Coefficients) -> float:
    """The logit of which, given to all experts, `coefficients_of` makes 1/experts: 0, or logit(1/experts) for sigmoids.

    Examples:
        >>> uniform_logit(4, "softmax"), round(torch.sigmoid(torch.tensor(uniform_logit(4, "sigmoid"))).item(), 6)
        (0.0, 0.25)
    """
    if experts < 2:
        raise ValueError(f"routing needs at least two models, got {experts}")
    return 0.0 if kind == "softmax" else -math.log(experts - 1)


class RoutedLayer(nn.Module):
    """One layer with the experts' weights W_k and biases, mixed by the coefficients that its router gives.

    Args:
        layer: run with the mixed weights; its own do not matter.
        experts: weight and bias of every expert, by name.
        router: the layer's input, channels second -> coefficients (N, K+1).
    """

    def __init__(self, layer: nn.Module, experts: Sequence[StateDict], router: nn.Module):
        super().__init__()
        self.layer, self.router = layer, router
        self.parts = tuple(experts[0])
        for part in self.parts:
            self.register_buffer(f"experts_{part}", torch.stack([expert[part] for expert in experts]), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """What the layer gives for `inputs`, with weights of its own for every sample."""
        mixed = self.mixed(self.router(_channels_second(self.layer, inputs)))
        if len(inputs) == 1:
            return functional_call(self.layer, {part: mixture[0] for part, mixture in mixed.items()}, (inputs,))
        return vmap(self._one)(inputs, mixed)

    def mixed(self, coefficients: Tensor) -> dict[str, Tensor]:
        """coefficients (B, experts) -> weights and biases (B, ...): the same coefficient for both (Eq. 5).

        Examples:
            >>> experts = [{"weight": torch.tensor([[value]])} for value in (1.0, 3.0)]
            >>> layer = RoutedLayer(nn.Linear(1, 1, bias=False), experts, MLPRouter(1, 2))
            >>> layer.mixed(torch.tensor([[0.5, 0.5]])), layer(torch.ones(1, 1))
            ({'weight': tensor([[[2.]]])}, tensor([[2.]], grad_fn=...))
        """
        stacked = {part: getattr(self, f"experts_{part}") for part in self.parts}
        return {part: torch.tensordot(coefficients, experts, dims=1) for part, experts in stacked.items()}

    def _one(self, sample: Tensor, parts: dict[str, Tensor]) -> Tensor:
        return functional_call(self.layer, parts, (sample[None],))[0]


def _channels_second(layer: nn.Module, inputs: Tensor) -> Tensor:
    """A linear layer keeps its features last, a router reads them second."""
    return inputs.movedim(-1, 1) if isinstance(layer, nn.Linear) else inputs


@dataclass(frozen=True)
class Routing:
    """How a network is routed.

    Attributes:
        per_layer: a router for every layer, or one for all layers, fed with the image (Table III, "global").
        coefficients: "softmax", which adds up to one, or the printed "sigmoid", which need not.
        statistics: of BatchNorm: of the test "batch", or the global model's "running" ones.
        seed: of the routers' initial weights.
    """

    per_layer: bool = True
    coefficients: Coefficients = "softmax"
    statistics: Statistics = "batch"
    seed: int = 0


class RoutedNetwork(nn.Module):
    """A network routed over K+1 experts: images go in, whatever the original network returns comes out.

    Args:
        network: the architecture; it is copied, its weights do not matter.
        experts: states of (P_1, ..., P_K, w_g), at least two; the last gives all entries that are not routed.

    Raises:
        StateError: an expert that does not fit the network, or no layer to route.
    """

    def __init__(self, network: nn.Module, experts: Sequence[StateDict], routing: Routing = Routing()):
        super().__init__()
        _check_experts(network, experts)
        self.network = copy.deepcopy(network)
        self.network.load_state_dict(experts[-1])
        self.network.requires_grad_(False)
        self._shared = _Given()
        self.router: MLPRouter | None = None
        with seeded(routing.seed, "router"):
            self._route(experts, routing)
        if routing.statistics == "batch":
            for name, layer in list(self.network.named_modules()):
                if isinstance(layer, _BatchNorm):
                    self._replace(name, TestTimeNorm(layer))
        self.eval()

    def _route(self, experts: Sequence[StateDict], routing: Routing) -> None:
        layers = [(name, layer) for name, layer in self.network.named_modules(remove_duplicate=False) if type(layer) in ROUTED_TYPES]
        if not layers:
            raise StateError(f"{type(self.network).__name__} has no convolution and no linear layer to route")
        if not routing.per_layer:
            self.router = MLPRouter(_input_channels(layers[0][1]), len(experts), routing.coefficients)
        routed: dict[nn.Module, RoutedLayer] = {}
        for name, layer in layers:  # a layer that is used in two places has two names and is replaced at both
            if layer not in routed:
                parts = [{part: expert[f"{name}.{part}" if name else part] for part, _ in layer.named_parameters()} for expert in experts]
                own = MLPRouter(_input_channels(layer), len(experts), routing.coefficients) if routing.per_layer else self._shared
                routed[layer] = RoutedLayer(layer, parts, own)
            self._replace(name, routed[layer])

    def forward(self, images: Tensor) -> Any:
        """What the network gives for images (N, C, H, W), with the coefficients of the moment."""
        if self.router is not None:
            self._shared.coefficients = self.router(images)
        return self.network(images)

    def train(self, mode: bool = True) -> "RoutedNetwork":
        """Training mode is for the routers' dropout alone; the network itself stays as it is used."""
        super().train(False)
        for module in self.modules():
            if isinstance(module, MLPRouter):
                module.train(mode)
        return self

    def adaptable(self) -> dict[str, nn.Parameter]:
        """What test-time adaptation may change, by name: the routers."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def adapted_state(self) -> StateDict:
        """A copy of what adaptation may change, by name, on the CPU."""
        return copy_state(self.adaptable())

    def load_adapted_state(self, state: StateDict) -> None:
        """Take up what `adapted_state` of such a network gave.

        Raises:
            StateError: it belongs to other settings.
        """
        own = self.adaptable()
        if reason := misfit(state, own):
            raise StateError(f"this routing state belongs to other settings: {reason}")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(state[name])

    @torch.no_grad()
    def coefficients(self, images: Tensor) -> dict[str, Tensor]:
        """R for these images: layer -> (N, K+1), in the network's order."""
        found: dict[str, Tensor] = {}
        layers = {name: module for name, module in self.network.named_modules() if isinstance(module, RoutedLayer)}
        hooks = [
            layer.router.register_forward_hook(lambda _module, _inputs, output, name=name: found.update({name: output}))
            for name, layer in layers.items()
            if self.router is None
        ]
        try:
            self(images)
        finally:
            for hook in hooks:
                hook.remove()
        return found or dict.fromkeys(layers, self._shared.coefficients)

    def _replace(self, name: str, module: nn.Module) -> None:
        if not name:
            self.network = module
            return
        parent, _, child = name.rpartition(".")
        setattr(self.network.get_submodule(parent), child, module)


def _input_channels(layer: nn.Module) -> int:
    return int(layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels)  # type: ignore[arg-type]


def _check_experts(network: nn.Module, experts: Sequence[StateDict]) -> None:
    if len(experts) < 2:
        raise StateError(f"routing needs at least two models (one site's and the global one), got {len(experts)}")
    for place, expert in enumerate(experts):
        if reason := misfit(expert, network.state_dict()):
            raise StateError(f"model {place} of {len(experts)} does not fit the network: {reason}")
