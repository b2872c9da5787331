"""The task's network tried before anything starts: whether the task's size suits it, and what a training step needs at least."""

import math
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from medflare.core.errors import ConfigError, one_line
from medflare.core.packages import installed
from medflare.networks.catalogue import meta_network
from medflare.networks.features import FeatureNetwork
from medflare.networks.library import PROBLEMS
from medflare.networks.structure import example
from medflare.tasks.config import TaskConfig
from medflare.tasks.optimizers import build_optimizer

_DIVISORS = (2, 4, 8, 16, 32, 64)
_SMALL = 10**10  # multiplications at most of a pass that is computed: it takes less than what it saves, see `_logits`
# What these keep for backward depends on the device: some fuse them and keep no noise and no matrix of attention.
_FUSED = (functional.dropout, functional.scaled_dot_product_attention, functional.multi_head_attention_forward)


class _Need(NamedTuple):
    """Bytes of a training step that is not its optimizer's first.

    Attributes:
        kept: what the forward pass keeps for backward, and the images.
        weights: one copy of each.
        moments: what the optimizer keeps.
        gradients: of all weights that learn.
    """

    kept: int
    weights: int
    moments: int
    gradients: int

    @property
    def before_backward(self) -> int:
        """There are no gradients yet."""
        return self.weights + self.moments + self.kept

    @property
    def after_backward(self) -> int:
        """What was kept is gone."""
        return self.weights + self.moments + self.gradients


def check_network(task: TaskConfig) -> FeatureNetwork:
    """Before anything starts: the task's network takes the task's images and gives what the task's kind needs.

    Returns:
        The network without memory, see `catalogue.meta_network`.

    Raises:
        ConfigError: it cannot be built, or the images do not pass, with a larger size that was tried and does, or the output is no logits
            of the task.
    """
    try:
        return _tried(task)
    except ConfigError:
        for size in dict.fromkeys(tuple(math.ceil(side / divisor) * divisor for side in task.size) for divisor in _DIVISORS):
            if size != task.size and _passes(replace(task, size=size)):
                fails = f"task {task.name}: network {task.network['name']} does not work on images of size {list(task.size)}"
                raise ConfigError(f"{fails}, it does on {list(size)}; use that") from None
        raise


def check_memory(task: TaskConfig, batch: int, device: torch.device, place: str) -> None:
    """Refuse a training step that certainly does not fit into what is free on a device.

    Counted is what `least_bytes` counts, or weights with gradients and moments where these are more; the true need is larger.

    Args:
        task: gives network, size and optimizer.
        batch: images or patches of a step.
        device: where it would run.
        place: the beginning of the message.

    Raises:
        ConfigError: it needs more.
    """
    free = _free(device)
    if free is None:
        return
    need = _need(task, batch)
    needed = max(need.before_backward, need.after_backward)
    if needed > free:
        raise ConfigError(
            f"{place}: a training step on {batch} x {list(task.size)} needs at least {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are "
            f"free on {device}; make size or batch_size smaller (the site's own: batch_size in local/medflare.json)"
        )


def least_bytes(task: TaskConfig, batch: int) -> int:
    """What a training step needs at least when its backward pass begins: what is kept for it, weights, and what the optimizer keeps.

    Gradients are not added: each comes into being while what was kept for it goes. So every further image adds the same.

    Args:
        task: gives network, size and optimizer.
        batch: images or patches of a step.

    Returns:
        Bytes. Nothing is computed: the network has no memory.
    """
    return _need(task, batch).before_backward


def _need(task: TaskConfig, batch: int) -> _Need:
    network = meta_network(task)
    parts = dict(network.named_modules()).keys() & set(task.freeze["parts"])  # others are refused where a method is checked
    with network.at_rest(sorted(parts)):
        weights = sum(weight.nbytes for weight in network.parameters())
        gradients = sum(weight.nbytes for weight in network.parameters() if weight.requires_grad)
        kept = _kept(network, torch.zeros(batch, task.image_channels, *task.size, device="meta"), task.precision)
    return _Need(kept, weights, _moments(task) * gradients, gradients)


def _kept(network: nn.Module, images: Tensor, precision: str) -> int:
    """Bytes of different memory that a forward pass keeps for backward beside weights and buffers; of the images alone where it fails."""
    own = {tensor.untyped_storage() for tensor in chain(network.parameters(), network.buffers())}
    for training in (True, False):  # batch normalisation refuses to learn from one number
        kept = {images.untyped_storage(): _size(images, precision)}

        def note(tensor: Tensor, kept: dict[UntypedStorage, int] = kept) -> Tensor:
            if tensor.untyped_storage() not in own:
                kept[tensor.untyped_storage()] = _size(tensor, precision)
            return tensor

        with suppress(*PROBLEMS), saved_tensors_hooks(note, _same), _Uncounted():
            network.train(training)(images)
            return sum(kept.values())
    return _size(images, precision)


def _size(tensor: Tensor, precision: str) -> int:
    """Bytes of the memory that a tensor lies in; of numbers that autocast may halve, half."""
    halved = precision != "fp32" and tensor.is_floating_point()
    return tensor.untyped_storage().nbytes() // (2 if halved else 1)


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _Uncounted(TorchFunctionMode):
    """Inside, what `_FUSED` keep is not told to the hooks of `_kept`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The function itself, under hooks that do nothing where it is one of those."""
        with saved_tensors_hooks(_same, _same) if func in _FUSED else nullcontext():
            return func(*args, **kwargs or {})


def _moments(task: TaskConfig) -> int:
    """How many numbers the task's optimizer keeps of each weight, as a step of a small one shows."""
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    optimizer = build_optimizer(task.optimizer, [weight], f"task {task.name}")
    with suppress(*PROBLEMS):  # told by `check_optimizer`
        optimizer.step()
    return sum(isinstance(kept, Tensor) and kept.shape == weight.shape for kept in optimizer.state[weight].values())


def training_operations(task: TaskConfig) -> int:
    """Floating-point operations of a training step on one image or patch, forward and backward, as torch counts them.

    Args:
        task: gives network and size.

    Returns:
        Of convolutions and matrix products, which are nearly all. Nothing is computed: the network has no memory.
    """
    from torch.utils.flop_counter import FlopCounterMode

    network = meta_network(task).train()
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros(2, task.image_channels, *task.size, device="meta")).sum().backward()
    return counter.get_total_flops() // 2


def _tried(task: TaskConfig) -> FeatureNetwork:
    """As `check_network`, for the task's own size."""
    network, place = meta_network(task), f"task {task.name}: network {task.network['name']}"
    wanted = (2, task.outputs, *(task.size if task.kind == "segmentation" else ()))
    try:
        found = tuple(_logits(network, task).shape)
    except PROBLEMS as error:
        raise ConfigError(f"{place}: images of size {list(task.size)} do not pass ({one_line(error)}); change size or network") from error
    if found != wanted:
        raise ConfigError(f"{place}: two images give logits of shape {list(found)}, a {task.kind} task needs {list(wanted)}")
    return network


@torch.no_grad()
def _logits(network: nn.Module, task: TaskConfig) -> Tensor:
    """What two empty images give.

    To pass a normalisation without memory torch imports a third of itself, in more than a second. A server and who writes a job
    need nothing of it otherwise, and have a small network compute zeros sooner.
    """
    weights = sum(weight.numel() for weight in network.parameters())
    if weights * 2 * math.prod(task.size) <= _SMALL:
        with suppress(*PROBLEMS):  # some cannot be given memory afterwards
            computing = deepcopy(network).eval().to_empty(device="cpu")
            for tensor in chain(computing.parameters(), computing.buffers()):
                tensor.zero_()
            return cast(Tensor, computing(example(task.image_channels, task.size, "cpu")))
    return cast(Tensor, network.eval()(example(task.image_channels, task.size, "meta")))


def _passes(task: TaskConfig) -> bool:
    try:
        _tried(task)
    except ConfigError:
        return False
    return True


def _free(device: torch.device) -> int | None:
    """Bytes that are free on a device; None where nobody can tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if not installed("psutil"):
        return None
    import psutil

    return int(psutil.virtual_memory().available)
