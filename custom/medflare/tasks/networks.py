"""Networks by configuration. Every one is a `FeatureNetwork`: it returns features and output, as alignment and prototypes need."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from medflare.core.errors import ConfigError
from medflare.core.rng import seeded
from medflare.tasks.config import TaskConfig, unknown


class FeatureNetwork(nn.Module):
    """A body that computes features and a head that turns them into logits.

    Segmentation: features (N, D, H, W), the last decoder map at the image's size; logits (N, outputs, H, W).
    Classification: features (N, D), the pooled vector before the last layer; logits (N, outputs).

    Attributes:
        settings: the arguments of `build_network` that build its like; empty where it was built otherwise.
    """

    def __init__(self, body: nn.Module, head: nn.Module):
        super().__init__()
        self.body = body
        self.head = head
        self.settings: dict[str, Any] = {}

    def features_and_output(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(images)
        return features, self.head(features)

    def forward(self, images: Tensor) -> Tensor:
        return self.features_and_output(images)[1]


def pooled(features: Tensor) -> Tensor:
    """One vector per image, (N, D): a feature map (N, D, H, W) by its mean over the pixels, vectors as they are."""
    return features.flatten(2).mean(dim=2) if features.ndim > 2 else features


def build_network(spec: Mapping[str, Any], in_channels: int, out_channels: int) -> FeatureNetwork:
    """The network that `spec` names, for example {"name": "unet", "channels": [16, 32, 64]}, with random weights.

    Raises:
        ConfigError: unknown name or argument, or a value that the network refuses.
    """
    settings = dict(spec)
    name = settings.pop("name", None)
    networks = _networks()
    if name not in networks:
        raise unknown("network", str(name), networks, "network")
    build = networks[name]
    accepted = [key for key in inspect.signature(build).parameters if key not in ("in_channels", "out_channels")]
    for key in settings:
        if key not in accepted:
            raise unknown("argument", key, accepted, f"network {name}")
    try:
        network = build(in_channels, out_channels, **settings)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise ConfigError(f"network {name}: {' '.join(str(error).split())}; check its arguments {settings}") from error
    network.settings = {"spec": dict(spec), "in_channels": in_channels, "out_channels": out_channels}
    return network


def initial_network(
    task: TaskConfig, seed: int, purpose: str = "model", spec: Mapping[str, Any] | None = None, outputs: int | None = None
) -> FeatureNetwork:
    """A network with its initial weights: a function of (seed, purpose) alone, hence equal on the server and at every site.

    Args:
        task: gives the image channels, and the network and the outputs unless the next arguments do.
        seed: of the run.
        purpose: "model", "selector", ...: another purpose, other weights.
        spec: another network than the task's.
        outputs: another number of output channels than the task's.
    """
    with seeded(seed, "initial", purpose):
        return build_network(spec or task.network, task.channels, outputs or task.outputs)


def _networks() -> dict[str, Callable[..., FeatureNetwork]]:
    from medflare.tasks import classifiers, segmenters

    return {
        "compact_selector": classifiers.compact_selector,
        "deeplab": segmenters.deeplab,
        "efficientnet_b0": classifiers.efficientnet_b0,
        "resnet18": classifiers.resnet18,
        "resnet50": classifiers.resnet50,
        "small_cnn": classifiers.small_cnn,
        "unet": segmenters.unet,
        "vgg11": classifiers.vgg11,
        "vgg16_slim": classifiers.vgg16_slim,
    }
