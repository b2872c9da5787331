"""The class of all networks: a body that computes features and a head that turns them into logits;
any other module as such a network.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from medflare.core.errors import ConfigError
from medflare.core.states import StateDict, copy_state
from medflare.tasks.config import TaskConfig

T = TypeVar("T")
_LAYERS = (nn.modules.conv._ConvNd, nn.Linear)
# Operations (as autograd names them) that may follow the last layer: they move or resize numbers
# and have no weights.
_SHAPING = (
    "Alias",
    "AsStrided",
    "Clone",
    "Permute",
    "Select",
    "Slice",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
    "Upsample",
    "View",
    "Unsafe",
)


def in_precision(compute: Callable[[Any, Tensor], T]) -> Callable[[Any, Tensor], T]:
    """Decorator of a network's method (images -> one or several tensors): it computes in the
    network's `precision` and returns float32.
    """

    @wraps(compute)
    def run(network: Any, images: Tensor) -> T:
        if network.precision is None:
            return compute(network, images)
        with torch.autocast(images.device.type, network.precision):
            result: Any = compute(network, images)
        if isinstance(result, Tensor):
            return result.float()  # type: ignore[return-value]
        return tuple(tensor.float() for tensor in result)  # type: ignore[return-value]

    return run


_MOST_BYTES = 2**30


class FixedFeatures:
    """Features of images, of a body that never changes.

    Each image goes through the body once, and alone: last bits depend on the other images of a
    batch. Features beyond `_MOST_BYTES` are computed anew: D is the lead's choice.
    """

    def __init__(self) -> None:
        self._features: dict[bytes, Tensor] = {}  # SHA-256 of an image -> (1, D)
        self._bytes = 0

    def of(self, images: Tensor, body: nn.Module) -> Tensor:
        """Features (N, D) of images (N, C, H, W) on the CPU."""
        features = []
        for image in images.split(1):
            key = hashlib.sha256(image.contiguous().numpy()).digest()
            feature = self._features.get(key)
            if feature is None:
                feature = body(image)
                if self._bytes + feature.nbytes <= _MOST_BYTES:
                    self._features[key] = feature
                    self._bytes += feature.nbytes
            features.append(feature)
        return torch.cat(features)


def keeps_features(task: TaskConfig, device: torch.device) -> bool:
    """Whether the features (N, D) of a frozen body are computed once, see `FixedFeatures`."""
    is_fixed = "body" in task.freeze.parts and not task.augment
    return task.kind == "classification" and is_fixed and device.type == "cpu"


class FeatureNetwork(nn.Module):
    """A body that computes features and a head that turns them into logits.

    Segmentation: features (N, D, H, W), the last decoder map at the image's size; logits (N,
        outputs, H, W).
    Classification: features (N, D), the pooled vector before the last layer; logits (N, outputs).
    """

    # Of autocast (the weights stay float32); None: no autocast.
    precision: torch.dtype | None = None
    has_features = True  # whether `features_and_output` works

    def __init_subclass__(cls, **options: Any):
        """Decorates the methods that a subclass overrides."""
        super().__init_subclass__(**options)
        for name in {"forward", "features_and_output"} & vars(cls).keys():
            setattr(cls, name, in_precision(vars(cls)[name]))

    def __init__(self, body: nn.Module, head: nn.Module):
        super().__init__()
        self.body = body
        self.head = head
        # Arguments of `catalogue.build_network` for an equal network; empty if it was built
        # otherwise.
        self.settings: dict[str, Any] = {}
        self._frozen: tuple[str, ...] = ()
        self._fixed: FixedFeatures | None = None

    def train(self, mode: bool = True) -> "FeatureNetwork":
        """Sets the mode as for every module; frozen parts stay in evaluation mode."""
        super().train(mode)
        for path in self._frozen:
            self.get_submodule(path).eval()
        return self

    @contextmanager
    def frozen(self, paths: Sequence[str], fixed: FixedFeatures | None = None) -> Iterator[None]:
        """Within the context, the modules with these paths ("body") do not change: no gradients, no
        running statistics, no dropout.

        `fixed`: the body's features, which are kept there; the body has the same weights each time.
        """
        weights: list[nn.Parameter] = []
        for path in paths:
            weights += self.get_submodule(path).parameters()
        weights = [weight for weight in weights if weight.requires_grad]
        self._frozen = tuple(paths)
        self._fixed = fixed
        for weight in weights:
            weight.requires_grad_(False)
        try:
            yield
        finally:
            self._frozen = ()
            self._fixed = None
            for weight in weights:
                weight.requires_grad_(True)

    @in_precision
    def features_and_output(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(features, logits) of images (N, C, H, W)."""
        features = self._features(images)
        return features, self.head(features)

    def _features(self, images: Tensor) -> Tensor:
        if self._fixed is not None:
            return self._fixed.of(images, self.body)
        features: Tensor = self.body(images)
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Logits, (N, outputs, H, W) or (N, outputs), of images (N, C, H, W)."""
        return self.features_and_output(images)[1]


class Probabilities(nn.Module):
    """A network of logits followed by the task's sigmoid or softmax."""

    def __init__(self, network: nn.Module, task: TaskConfig):
        super().__init__()
        self.network = network
        self.task = task

    def forward(self, images: Tensor) -> Tensor:
        """Probabilities, (N, outputs, H, W) or (N, outputs), of images (N, C, H, W)."""
        return self.task.probabilities(self.network(images))


def pooled(features: Tensor) -> Tensor:
    """One vector per image, (N, D): the mean over the pixels of a feature map (N, D, ...), or
    vectors (N, D) unchanged.

    Examples:
        >>> import torch
        >>> pooled(torch.tensor([[[[1.0, 3.0]]]])), pooled(torch.tensor([[5.0]]))
        (tensor([[2.]]), tensor([[5.]]))
    """
    return features.flatten(2).mean(dim=2) if features.ndim > 2 else features


def copied_state(network: nn.Module) -> StateDict:
    """A copy of a network's state on the CPU."""
    return copy_state(network.state_dict())


@torch.no_grad()
def overwrite(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Copies values into the tensors of a network, in place."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def zero_images(task: TaskConfig, device: torch.device | str = "meta") -> Tensor:
    """Two images of zeros of the task's size, (2, C, ...)."""
    return torch.zeros(2, task.image_channels, *task.size, device=device)


class WholeNetwork(FeatureNetwork):
    """A network of another library, which runs unchanged; its last layer is the head, the rest is
    the body.

    The names of the body's weights are the network's names after "body."; those of the last layer
    are "head.weight" and "head.bias".

    Args:
        network: images to logits, see `main_output`.
        last: path of the last layer, see `last_layer`; None: no head and no features.
    """

    def __init__(self, network: nn.Module, last: str | None):
        layer = nn.Identity() if last is None else network.get_submodule(last)
        super().__init__(network, layer)
        self.last = last
        self.has_features = last is not None
        if last is not None:
            parent, _, name = last.rpartition(".")
            setattr(network.get_submodule(parent), name, _LastLayer(self))

    def forward(self, images: Tensor) -> Tensor:
        """The network's main output."""
        return main_output(self.body(images), images)

    def features_and_output(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the last layer, and the network's output; ConfigError if there is no last
        layer.
        """
        if self.last is None:
            name = self.settings.get("spec", {}).get("name")
            raise ConfigError(
                f"network {name} has no feature layer (its output is not that of one layer); "
                "use another network"
            )
        layer: Any = self.body.get_submodule(self.last)
        layer.inputs = []
        try:
            logits = self(images)
            (features,) = layer.inputs
        finally:
            layer.inputs = None
        return features, logits

    def names(self) -> dict[str, str]:
        """Name of a weight in the original network -> its name in `state_dict`."""
        names = {}
        for name in self.state_dict():
            part, _, rest = name.partition(".")
            original = f"{self.last}.{rest}" if part == "head" else rest
            names[original] = name
        return names


class _LastLayer(nn.Module):
    """Replaces the last layer: calls the network's head, which may be replaced, and records its
    inputs while `inputs` is a list.
    """

    def __init__(self, network: WholeNetwork):
        super().__init__()
        self._network = (network,)  # a tuple hides it from PyTorch, which would go in circles
        self.inputs: Any = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.inputs is not None:
            self.inputs.append(inputs)
        return self._network[0].head(inputs)


def main_output(output: Any, images: Tensor) -> Tensor:
    """The logits (N, outputs, ...) in the output of a network for images (N, C, ...).

    Args:
        output: a tensor, or a list or tuple that begins with it; (N, heads, outputs, ...) is
            stacked deep supervision.

    Raises:
        ConfigError: any other output.
    """
    if isinstance(output, list | tuple) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise ConfigError(
            f"the network returns a {type(output).__name__} instead of logits, "
            "or a list that begins with them"
        )
    return output[:, 0] if output.ndim == images.ndim + 1 else output


def last_layer(network: nn.Module, images: Tensor) -> str | None:
    """Path of the convolution or linear layer whose output, possibly resized or reshaped, is the
    network's output; None if there is none.

    Args:
        network: on any device (meta included); it keeps hooks and evaluation mode.
        images: (N, C, ...) on that device.
    """
    outputs = {}
    calls: Counter[str] = Counter()

    def note(name: str, _layer: nn.Module, inputs: tuple[Tensor, ...], result: Tensor) -> None:
        calls[name] += 1
        outputs[result.grad_fn] = (name, inputs[0])

    for name, layer in network.named_modules():
        if name and isinstance(layer, _LAYERS):
            layer.register_forward_hook(partial(note, name))
    with torch.enable_grad():
        node = main_output(network.eval()(images), images).grad_fn
    while node is not None and node not in outputs and node.name().startswith(_SHAPING):
        node = node.next_functions[0][0]
    if node not in outputs:
        return None
    name, features = outputs[node]
    return name if calls[name] == 1 and features.ndim in (2, images.ndim) else None
