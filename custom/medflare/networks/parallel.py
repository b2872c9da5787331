"""A batch split over several devices: each computes a share of the images with a copy of the weights, as torch's DataParallel does."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


def split(network: nn.Module, devices: tuple[torch.device, ...], method: str, images: Tensor) -> Any:
    """What a network's method answers, computed in shares.

    Copies are made anew for every batch, as part of its graph: gradients add up in the network's own weights, whatever those are at the
    moment. Layers that mix images see one share each, and running statistics follow the first one.

    Args:
        network: on the first device; its `method` must not split again meanwhile.
        devices: at least two.
        method: name of a method, images -> a tensor or several of them, each with a row for an image.
        images: (N, C, ...) on the first device, at least one for each device.

    Returns:
        As of the method, on the first device.
    """
    weights, statistics = dict(network.named_parameters()), dict(network.named_buffers())
    answers = []
    for place, (device, share) in enumerate(zip(devices, images.tensor_split(len(devices)), strict=True)):
        copies = {name: weight.to(device) for name, weight in weights.items()}
        copies |= {name: tensor.to(device, copy=place > 0) for name, tensor in statistics.items()}
        answers.append(functional_call(_Asked(network, method), {f"network.{name}": t for name, t in copies.items()}, (share.to(device),)))
    if isinstance(answers[0], Tensor):
        return _gathered(answers, devices[0])
    return tuple(_gathered(list(shares), devices[0]) for shares in zip(*answers, strict=True))


def _gathered(shares: list[Tensor], device: torch.device) -> Tensor:
    return torch.cat([share.to(device) for share in shares])


class _Asked(nn.Module):
    """`functional_call` reaches `forward` alone."""

    def __init__(self, network: nn.Module, method: str):
        super().__init__()
        self.network, self.method = network, method

    def forward(self, images: Tensor) -> Any:
        return getattr(self.network, self.method)(images)
