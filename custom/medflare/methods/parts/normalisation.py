"""Running statistics left alone: a network that normalises by the batch at hand, and remembers nothing of it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

_MOVED = ("momentum", "running_mean", "running_var")  # what a forward pass moves, and how far


@contextmanager
def still_statistics(*networks: nn.Module) -> Iterator[None]:
    """Inside, no forward pass moves running statistics; each layer normalises as its mode says.

    Args:
        networks: may share layers.
    """
    layers = _tracking(networks)
    batch = [layer for layer in layers if not isinstance(layer, _InstanceNorm)]
    instance = [(layer, [getattr(layer, name) for name in _MOVED]) for layer in layers if isinstance(layer, _InstanceNorm)]
    for layer in batch:
        layer.track_running_stats = False
    # Untracked, instance normalisation would go by the image in either mode, and move its statistics nevertheless. A momentum of 0 leaves
    # them where they are but for rounding, which copies take.
    for layer, (_, mean, variance) in instance:
        layer.momentum, layer.running_mean, layer.running_var = 0.0, mean.clone(), variance.clone()
    try:
        yield
    finally:
        for layer in batch:
            layer.track_running_stats = True
        for layer, before in instance:
            layer.momentum, layer.running_mean, layer.running_var = before


@contextmanager
def batch_statistics(*networks: nn.Module) -> Iterator[None]:
    """Inside, networks normalise by the batch as in training, and no forward pass moves running statistics.

    Nothing else changes its mode: dropout rests in a network in evaluation mode. Layers without running statistics, which normalise alike
    in both modes, are left as they are.

    Args:
        networks: in any mode, each layer's is given back.
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
    return [layer for network in networks for layer in network.modules() if isinstance(layer, _NormBase) and layer.track_running_stats]
