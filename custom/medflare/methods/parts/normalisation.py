"""Running statistics left alone: a network that normalises by the batch at hand, and remembers nothing of it."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


@contextmanager
def still_statistics(*networks: nn.Module) -> Iterator[None]:
    """Inside, no forward pass moves running statistics; each layer normalises as its mode says.

    Args:
        networks: may share layers.
    """
    layers = [layer for network in networks for layer in network.modules() if isinstance(layer, _NormBase) and layer.track_running_stats]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True


@contextmanager
def batch_statistics(*networks: nn.Module) -> Iterator[None]:
    """Inside, networks normalise by the batch as in training, and no forward pass moves running statistics.

    Nothing else changes its mode: dropout rests in a network in evaluation mode. Layers without running statistics, which normalise alike
    in both modes, are left as they are.

    Args:
        networks: in any mode, each layer's is given back.
    """
    modes = {
        layer: layer.training
        for network in networks
        for layer in network.modules()
        if isinstance(layer, _NormBase) and layer.track_running_stats
    }
    with still_statistics(*networks):
        for layer in modes:
            layer.training = True
        try:
            yield
        finally:
            for layer, mode in modes.items():
                layer.training = mode
