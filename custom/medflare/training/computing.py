"""How a site computes: device, precision, memory format, compilation."""

import atexit
import os
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from medflare.core.errors import ConfigError, one_line
from medflare.core.states import StateDict, transferred
from medflare.data.loading import Split
from medflare.networks.features import FeatureNetwork

# Precision of a task -> dtype of autocast.
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
# Most of a GPU's free memory that images, or an optimizer's moments, may take to stay there.
_RESIDENT = 0.25
# Dimensions of a kernel -> memory format.
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Computing:
    """Device, precision and memory format of a site's networks and batches."""

    device: torch.device
    precision: str = "fp32"  # the task's, one of `PRECISIONS`
    # Use torch's channels-last memory format; sums are in another order.
    channels_last: bool = False
    compiled: bool = False  # whether torch compiles networks at their first use
    graph: bool = True  # whether a GPU repeats training steps as CUDA graphs

    def placed(self, network: FeatureNetwork) -> FeatureNetwork:
        """The network, changed in place; names and values of its state stay the same."""
        network = network.to(self.device)
        network.precision = PRECISIONS[self.precision]
        if self.channels_last:
            for weight in network.parameters():
                if weight.ndim in _CHANNELS_LAST:
                    weight.data = weight.data.contiguous(memory_format=_CHANNELS_LAST[weight.ndim])
        if self.compiled:
            compile_apart()
            # Methods use features too, which compiling the whole would not cover.
            network.body.compile()
            network.head.compile()
        return network

    def on_device(self, tensor: Tensor) -> Tensor:
        """A tensor on the device; to a GPU through pinned memory, without waiting."""
        if self.device.type == "cuda" and tensor.device.type == "cpu":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)

    def state_on_device(self, state: StateDict) -> StateDict:
        """A state of the CPU on the device, in one copy of all tensors of a dtype."""
        if self.device.type == "cpu":
            return state
        return transferred(state, self.on_device, pinned=self.device.type == "cuda")

    def resident(self, data: Split) -> Split:
        """The split, with its images and targets on the device if they may stay there, see
        `stays`.
        """
        if data.in_memory and stays(data.nbytes, self.device):
            return data.on(self.device)
        return data


@cache
def compile_apart() -> None:
    """Have torch store what it compiles in a folder of this process: otherwise it loads, also by
    pickle, what another account has put into a folder of a known name.
    """
    from torch._inductor import config as inductor_config

    folder = tempfile.mkdtemp(prefix="medflare-compiled-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    inductor_config.cpp_cache_precompile_headers = False  # they would be in that other folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def free_memory(device: torch.device) -> float:
    """Free bytes of a GPU; 0 for other devices."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def stays(nbytes: int, device: torch.device) -> bool:
    """Whether tensors of so many bytes stay on the device between rounds: they take at most a
    quarter of its free memory.
    """
    return nbytes <= _RESIDENT * free_memory(device)


def check_precision(precision: str, device: torch.device, location: str) -> None:
    """Raises ConfigError for bf16 on a GPU that only emulates it."""
    if precision != "bf16" or device.type != "cuda":
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"{location}: device {str(device)!r} ({name}) has no bf16, which the task asks for; "
            "set precision 'fp16' or 'fp32'"
        )


def be_deterministic() -> None:
    """Have torch use deterministic algorithms on GPUs, in this process: the same job then gives the
    same weights on the same GPU.

    torch warns, once, of an operation that has none. That of the cross-entropy's sum over pixels
    changes the reported loss, not gradients.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    # It writes NaN into all new memory, so that an operation that reads it is found; that takes up
    # to a fifth of a training step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    warnings.filterwarnings("ignore", "nll_loss2d_forward")
    warnings.filterwarnings("ignore", "Synchronization debug mode")  # used by `graph`


def usable_device(name: str, location: str, *, initialize: bool = True) -> torch.device:
    """The torch device of that name; ConfigError if torch does not know it, or this machine does
    not have it.

    `initialize`: try it; a process that has initialized a GPU cannot be forked any more. Otherwise
    GPUs are only counted.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"{location}: unknown device {name!r}; use cpu, cuda or cuda:0"
        ) from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if not count and torch.version.cuda is None and torch.version.hip is None:
            raise ConfigError(
                f"{location}: device {name!r}: torch {torch.__version__} is a build without GPUs; "
                "use cpu, or install torch with CUDA, see pytorch.org"
            )
        if (device.index or 0) >= count:
            raise ConfigError(
                f"{location}: device {name!r} is not here, torch sees {count} GPUs (from cuda:0); "
                "use cpu, or install a driver"
            )
    if initialize:
        try:
            torch.zeros(1, device=device).item()
        except Exception as error:
            # torch accepts names of devices that its build lacks; every backend raises its own
            # exception.
            raise ConfigError(
                f"{location}: device {name!r} is not usable here ({one_line(error)}); "
                "use cpu, or install a driver"
            ) from error
    return device
