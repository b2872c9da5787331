"""How a site computes: on which device, in what precision, in which order of memory, compiled or not."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from medflare.core.errors import ConfigError
from medflare.networks.features import FeatureNetwork

PRECISIONS: Final = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}  # as tasks say it -> what autocast takes
_CHANNELS_LAST: Final = {4: torch.channels_last, 5: torch.channels_last_3d}  # dimensions of a kernel -> its order of memory


@dataclass(frozen=True)
class Computing:
    """How networks and batches come to a site's device, and what they compute in there.

    Attributes:
        device: where they go.
        precision: the task's, one of `PRECISIONS`.
        further: devices that take a share of every batch, see `networks.parallel`.
        channels_last: whether kernels lie in memory with their channels last, and feature maps follow them as far as layers let them
            (instance normalisation does not): the same sums in another order.
        compiled: whether torch compiles networks when they are first used.
    """

    device: torch.device
    precision: str = "fp32"
    further: tuple[torch.device, ...] = ()
    channels_last: bool = False
    compiled: bool = False

    def placed(self, network: FeatureNetwork) -> FeatureNetwork:
        """A network, in place, as this site computes with it; names and values of its state stay as they are.

        Args:
            network: on any device.
        """
        network = network.to(self.device)
        network.precision, network.devices = PRECISIONS[self.precision], (self.device, *self.further)
        if self.channels_last:
            for weight in network.parameters():
                if weight.ndim in _CHANNELS_LAST:
                    weight.data = weight.data.contiguous(memory_format=_CHANNELS_LAST[weight.ndim])
        if self.compiled:
            for part in (network.body, network.head):  # methods ask for features too, which the network as a whole does not give
                part.compile()
        return network

    def moved(self, tensor: Tensor) -> Tensor:
        """A tensor on the device; to a GPU it goes through pinned memory, while the processor already does the next thing.

        Args:
            tensor: of a batch, on the CPU or on the device.
        """
        if self.device.type == "cuda" and tensor.device.type == "cpu":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)


def check_precision(precision: str, device: torch.device, place: str) -> None:
    """Before anything is read: the device can compute in the task's precision.

    Args:
        precision: one of `PRECISIONS`.
        device: that exists.
        place: the beginning of a message.

    Raises:
        ConfigError: it cannot, or only by imitating it in fp32.
    """
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"{place}: device {str(device)!r} ({name}) has no bf16, which the task asks for; set precision 'fp16' or 'fp32'")


def usable_device(name: str, place: str) -> torch.device:
    """The device of that name.

    Args:
        name: as torch spells it.
        place: the beginning of a message.

    Raises:
        ConfigError: torch does not know it, or this machine lacks it.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{place}: unknown device {name!r}; use cpu, cuda or cuda:0") from error
    if not (torch.cuda.is_available() if device.type == "cuda" else _computes(device)):
        raise ConfigError(f"{place}: device {name!r} is not available here; use cpu or install a driver")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"{place}: there is no device {name!r}, this machine has {torch.cuda.device_count()} GPUs, counted from cuda:0")
    return device


def _computes(device: torch.device) -> bool:
    """Whether a number can be brought to a device and back; torch knows the names of many that this machine or its build lacks."""
    try:
        torch.zeros(1, device=device).item()
    except Exception:  # every backend says in its own way that it is not there
        return False
    return True
