"""Networks that normalise by the batch at hand and keep their running statistics."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

_MOVED = ("momentum", "running_mean", "running_var")  # what a forward pass moves, and how far


@contextmanager
def still_statistics(*networks: nn.Module) -> Iterator[None]:
    """Inside, no forward pass changes running statistics; each layer normalises as its mode says.
    Networks may share layers.
    """
    batch = []
    instance = []
    for layer in _tracking(networks):
        if isinstance(layer, _InstanceNorm):
            instance.append((layer, [getattr(layer, name) for name in _MOVED]))
        else:
            batch.append(layer)
    for layer in batch:
        layer.track_running_stats = False
    # Without tracking, instance normalisation would use the image in either mode, and still change
    # its statistics. A momentum of 0 changes copies by rounding only.
    for layer, (_, mean, variance) in instance:
        layer.momentum = 0.0
        layer.running_mean = mean.clone()
        layer.running_var = variance.clone()
    try:
        yield
    finally:
        for layer in batch:
            layer.track_running_stats = True
        for layer, before in instance:
            layer.momentum, layer.running_mean, layer.running_var = before


@contextmanager
def batch_statistics(*networks: nn.Module) -> Iterator[None]:
    """Inside, networks normalise by the batch as in training, and no forward pass changes running
    statistics.

    No other layer changes its mode: dropout of a network in evaluation mode stays off.
    """
    modes = {layer: layer.training for layer in _tracking(networks)}
    with still_statistics(*networks):
        for layer in modes:
            layer.training = True
        try:
            yield
        finally:
            for layer, mode in modes.items():
                layer.training = mode


def _tracking(networks: Sequence[nn.Module]) -> list[_NormBase]:
    layers = []
    for network in networks:
        for layer in network.modules():
            if isinstance(layer, _NormBase) and layer.track_running_stats:
                layers.append(layer)
    return layers
