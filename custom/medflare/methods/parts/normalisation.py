"""Networks that normalise by the batch at hand and keep their running statistics."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

# What a forward pass moves, and how far.
_MOVED = ("momentum", "running_mean", "running_var", "num_batches_tracked")
_statistics = attrgetter(*_MOVED)


@contextmanager
def still_statistics(*networks: nn.Module) -> Iterator[None]:
    """Within the context, no forward pass changes running statistics; each layer normalises as its
    mode says. Networks may share layers.
    """
    before = {layer: _statistics(layer) for layer in _tracking(networks)}
    for layer, (_, mean, variance, batches) in before.items():
        layer.momentum = 0.0  # changes copies by rounding only
        layer.running_mean = mean.clone()
        layer.running_var = variance.clone()
        layer.num_batches_tracked = batches.clone()
    try:
        yield
    finally:
        for layer, statistics in before.items():
            for name, value in zip(_MOVED, statistics, strict=True):
                setattr(layer, name, value)


@contextmanager
def batch_statistics(*networks: nn.Module) -> Iterator[None]:
    """Within the context, networks normalise by the batch as in training, and no forward pass
    changes running statistics.

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
