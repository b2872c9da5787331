"""Any module as a `FeatureNetwork`: its head is the last layer, found by following the output back to the layer that computed it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medflare.core.errors import ConfigError
from medflare.networks.features import FeatureNetwork

_LAYERS = (nn.modules.conv._ConvNd, nn.Linear)
# What may stand between the last layer and the output, as autograd names it: it moves or resizes numbers and learns nothing.
_SHAPING = ("Alias", "AsStrided", "Clone", "Permute", "Select", "Slice", "Squeeze", "Transpose", "Unsqueeze", "Upsample", "View", "Unsafe")


class WholeNetwork(FeatureNetwork):
    """A network that was not written as body and head. It runs as it is; the last layer is the head, all the rest is the body.

    The names of the body's entries are the network's own after "body."; those of the last layer are "head.weight" and "head.bias".

    Args:
        network: images to logits; of a list or tuple the first item counts, of stacked outputs (deep supervision) the first.
        last: path of the last layer in it, see `last_layer`; None: it has none, and no features.
    """

    def __init__(self, network: nn.Module, last: str | None):
        layer = nn.Identity() if last is None else network.get_submodule(last)
        super().__init__(network, layer)
        self.last = last
        if last is not None:
            parent, _, name = last.rpartition(".")
            setattr(network.get_submodule(parent), name, _Slot(layer))

    @property
    def has_features(self) -> bool:
        """Whether a last layer was found."""
        return self.last is not None

    def forward(self, images: Tensor) -> Tensor:
        """The network's own output, the main one where there are several."""
        return main_output(self.body(images), images)

    def features_and_output(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """What the last layer was given, and the network's output.

        Raises:
            ConfigError: there is no last layer.
        """
        if self.last is None:
            raise ConfigError(f"network {self.settings.get('spec', {}).get('name')} has no features: its output is that of no single layer")
        slot: Any = self.body.get_submodule(self.last)
        slot.given = []
        try:
            logits = self(images)
            (features,) = slot.given
        finally:
            slot.given = None
        return features, logits

    def names(self) -> dict[str, str]:
        """Name of an entry in the network as it was -> its name in `state_dict`."""
        prefix = f"{self.last}." if self.last is not None else ""
        own = {name: f"{prefix}{name[5:]}" if name.startswith("head.") else name[5:] for name in self.state_dict()}
        return {theirs: name for name, theirs in own.items()}


class _Slot(nn.Module):
    """Stands where the last layer stood: calls it, and takes note of what it is given while somebody asks."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self._layer = (layer,)  # in a tuple PyTorch does not see it: its parameters are the head's
        self.given: Any = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.given is not None:
            self.given.append(inputs)
        return self._layer[0](inputs)


def main_output(output: Any, images: Tensor) -> Tensor:
    """The logits (N, outputs, ...) in what a network returns.

    Args:
        output: a tensor, or a list or tuple that begins with it; (N, heads, outputs, ...) is stacked deep supervision.
        images: (N, C, ...), what the network was given.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(output, list | tuple) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise ConfigError(f"it returns a {type(output).__name__}, where logits or a list that begins with them are needed")
    return output[:, 0] if output.ndim == images.ndim + 1 else output


def last_layer(network: nn.Module, images: Tensor) -> str | None:
    """Path of the convolution or linear layer whose output is the network's, resized or reshaped at most; None where there is none.

    Args:
        network: in any mode, on any device (meta included: nothing is computed there); left as it was.
        images: (N, C, ...) on that device.
    """
    made: dict[Any, tuple[str, Tensor]] = {}
    calls: dict[str, int] = {}

    def note(name: str) -> Any:
        def hook(_layer: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
            calls[name] = calls.get(name, 0) + 1
            made[result.grad_fn] = (name, given[0])

        return hook

    layers = [(name, layer) for name, layer in network.named_modules() if name and isinstance(layer, _LAYERS)]
    hooks = [layer.register_forward_hook(note(name)) for name, layer in layers]
    before = {module: module.training for module in network.modules()}
    try:
        with torch.enable_grad():
            node = main_output(network.eval()(images), images).grad_fn
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in before.items():
            module.training = training
    while node is not None and node not in made and node.name().startswith(_SHAPING):
        node = node.next_functions[0][0]
    if node not in made:
        return None
    name, features = made[node]
    return name if calls[name] == 1 and features.ndim in (2, images.ndim) else None


def example(in_channels: int, size: Sequence[int], device: torch.device | str) -> Tensor:
    """Two empty images, (2, C, ...)."""
    return torch.zeros(2, in_channels, *size, device=device)
