"""What every network of this room is: a body that computes features and a head that turns them into logits."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from medflare.networks.parallel import split
from medflare.tasks.config import TaskConfig

T = TypeVar("T")


def as_placed(compute: Callable[[Any, Tensor], T]) -> Callable[[Any, Tensor], T]:
    """A network's method that computes on the network's `devices` and in its `precision`; losses and methods see one device and float32.

    Args:
        compute: (network, images) -> a tensor, or several.
    """

    @wraps(compute)
    def run(network: Any, images: Tensor) -> T:
        devices = network.devices
        if len(devices) > 1 and len(images) >= len(devices):
            network.devices = ()
            try:
                return split(network, devices, compute.__name__, images)
            finally:
                network.devices = devices
        if network.precision is None:
            return compute(network, images)
        with torch.autocast(images.device.type, network.precision):
            found: Any = compute(network, images)
        return found.float() if isinstance(found, Tensor) else tuple(tensor.float() for tensor in found)  # type: ignore[return-value]

    return run


class FeatureNetwork(nn.Module):
    """A body that computes features and a head that turns them into logits.

    Segmentation: features (N, D, H, W), the last decoder map at the image's size; logits (N, outputs, H, W).
    Classification: features (N, D), the pooled vector before the last layer; logits (N, outputs).

    Attributes:
        settings: the arguments of `catalogue.build_network` that build its like; empty where it was built otherwise.
        precision: what it computes in by autocast (its weights stay float32); None: as its weights are.
        devices: over which batches are split, the first of them its own; fewer than two: they are not.
    """

    precision: torch.dtype | None = None
    devices: tuple[torch.device, ...] = ()

    def __init_subclass__(cls, **options: Any):
        """A network that is one in its own way computes as it is placed too."""
        super().__init_subclass__(**options)
        for name in {"forward", "features_and_output"} & vars(cls).keys():
            setattr(cls, name, as_placed(vars(cls)[name]))

    def __init__(self, body: nn.Module, head: nn.Module):
        super().__init__()
        self.body = body
        self.head = head
        self.settings: dict[str, Any] = {}
        self._resting: tuple[str, ...] = ()

    @property
    def has_features(self) -> bool:
        """Whether there are features beside the output; methods that need them ask before anything starts."""
        return True

    def train(self, mode: bool = True) -> "FeatureNetwork":
        """As of every module; what is at rest stays in evaluation mode."""
        super().train(mode)
        for path in self._resting:
            self.get_submodule(path).eval()
        return self

    @contextmanager
    def at_rest(self, paths: Sequence[str]) -> Iterator[None]:
        """Inside, nothing of some parts moves: no gradient, no running statistics, no dropout, in whatever mode the network is.

        Args:
            paths: of modules, for example "body".
        """
        moved = [weight for path in paths for weight in self.get_submodule(path).parameters() if weight.requires_grad]
        self._resting = tuple(paths)
        for weight in moved:
            weight.requires_grad_(False)
        try:
            yield
        finally:
            self._resting = ()
            for weight in moved:
                weight.requires_grad_(True)

    @as_placed
    def features_and_output(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(features, logits) of images (N, C, H, W).

        Args:
            images: at the task's size.
        """
        features = self.body(images)
        return features, self.head(features)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of images (N, C, H, W).

        Args:
            images: at the task's size.

        Returns:
            (N, outputs, H, W) or (N, outputs).
        """
        return self.features_and_output(images)[1]


class Probabilities(nn.Module):
    """A network of logits followed by the task's sigmoid or softmax."""

    def __init__(self, network: nn.Module, task: TaskConfig):
        super().__init__()
        self.network = network
        self.task = task

    def forward(self, images: Tensor) -> Tensor:
        """Probabilities of images (N, C, H, W).

        Args:
            images: at the task's size.

        Returns:
            (N, outputs, H, W) or (N, outputs).
        """
        return self.task.probabilities(self.network(images))


def pooled(features: Tensor) -> Tensor:
    """One vector per image, (N, D): a feature map (N, D, ...) by its mean over the pixels, vectors as they are.

    Args:
        features: (N, D) or (N, D, ...).

    Examples:
        >>> import torch
        >>> pooled(torch.tensor([[[[1.0, 3.0]]]])), pooled(torch.tensor([[5.0]]))
        (tensor([[2.]]), tensor([[5.]]))
    """
    return features.flatten(2).mean(dim=2) if features.ndim > 2 else features
