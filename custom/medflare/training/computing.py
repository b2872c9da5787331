"""How a site computes: device, precision, memory format, compilation."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from medflare.core.errors import ConfigError
from medflare.networks.features import FeatureNetwork

PRECISIONS: Final = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}  # of tasks -> dtype of autocast
_CHANNELS_LAST: Final = {4: torch.channels_last, 5: torch.channels_last_3d}  # dimensions of a kernel -> memory format


@dataclass(frozen=True)
class Computing:
    """Device, precision and memory format of a site's networks and batches.

    Attributes:
        device: of networks and batches.
        precision: the task's, one of `PRECISIONS`.
        channels_last: use torch's channels-last memory format; sums are in another order.
        compiled: whether torch compiles networks at their first use.
    """

    device: torch.device
    precision: str = "fp32"
    channels_last: bool = False
    compiled: bool = False

    def placed(self, network: FeatureNetwork) -> FeatureNetwork:
        """The network, changed in place; names and values of its state stay the same."""
        network = network.to(self.device)
        network.precision = PRECISIONS[self.precision]
        if self.channels_last:
            for weight in network.parameters():
                if weight.ndim in _CHANNELS_LAST:
                    weight.data = weight.data.contiguous(memory_format=_CHANNELS_LAST[weight.ndim])
        if self.compiled:
            for part in (network.body, network.head):  # methods use features too, which compiling the whole would not cover
                part.compile()
        return network

    def moved(self, tensor: Tensor) -> Tensor:
        """A tensor on the device; to a GPU through pinned memory, without waiting."""
        if self.device.type == "cuda" and tensor.device.type == "cpu":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)


def check_precision(precision: str, device: torch.device, place: str) -> None:
    """Refuse bf16 on a GPU that only emulates it.

    Raises:
        ConfigError: the device does not have the task's precision.
    """
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"{place}: device {str(device)!r} ({name}) has no bf16, which the task asks for; set precision 'fp16' or 'fp32'")


def usable_device(name: str, place: str) -> torch.device:
    """The torch device of that name.

    Raises:
        ConfigError: torch does not know it, or this machine does not have it.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{place}: unknown device {name!r}; use cpu, cuda or cuda:0") from error
    try:
        available = torch.cuda.is_available() if device.type == "cuda" else not torch.zeros(1, device=device).item()
    except Exception:  # torch accepts names of devices that its build lacks; every backend raises its own exception
        available = False
    if not available:
        raise ConfigError(f"{place}: device {name!r} is not available here; use cpu or install a driver")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"{place}: there is no device {name!r}, this machine has {torch.cuda.device_count()} GPUs, counted from cuda:0")
    return device
