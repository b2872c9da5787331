"""Local training: epochs, optimizer steps (over several batches, with scaled losses for fp16), and
the optimizer's memory.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.core.rng import Key, seeded
from medflare.core.states import StateDict, copy_on_device, copy_state, state_bytes
from medflare.data.loading import Batch
from medflare.training.computing import stays
from medflare.training.graph import Hook, StepReplay, copied_moments
from medflare.training.site import Site

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]  # (model, images, targets) -> scalar
_OPTIMIZER = "optimizer/"  # prefix of states in an algorithm's memory
_SCALER = "scaler"  # in place of an index: the scaler's numbers in an optimizer's state
# A scaler's numbers stay with its optimizer: `OptimizerMemory` restores both before `Steps` exists.
_SCALERS: WeakKeyDictionary[Optimizer, GradScaler] = WeakKeyDictionary()


def epochs(site: Site, *keys: Key, count: int | None = None) -> Iterator[Iterator[Batch]]:
    """Local epochs, each as its batches of training images; torch's random numbers (dropout) are
    keyed too.

    Args:
        keys: of this training, by convention round and purpose: two models of one round get
            different orders and augmentations.
        count: how many; None: the task's number.
    """
    with seeded(site.seed, site.name, *keys, "dropout"):
        for epoch in range(site.task.local_epochs if count is None else count):
            yield site.batches("train", *keys, epoch)


def samples_of_pass(site: Site) -> int:
    """Samples in one pass over the training images, each of which may give several patches; a
    single one fills a batch twice, see `batches.in_random_order`.
    """
    count = site.n["train"] * site.cutter.per_image
    if count == 1 and site.batch_size > 1:
        return 2
    return count


def run_epochs(
    site: Site, round: int, purpose: str, step: Callable[[Batch], Mapping[str, Tensor]]
) -> dict[str, float]:
    """Local epochs with `step` on every batch; returns the mean over all images of each loss that
    it returns.

    Args:
        round: 0-based; with `purpose` (names the model that is trained) the keys of `epochs`.
        step: trains on a batch and returns its losses by name.
    """
    means: dict[str, MeanLoss] = defaultdict(MeanLoss)
    for batches in epochs(site, round, purpose):
        for batch in batches:
            for name, loss in step(batch).items():
                means[name].add(loss, len(batch.images))
    return {name: mean.value() for name, mean in means.items()}


def weighted_sum(losses: Sequence[Tensor], weights: Sequence[float]) -> float:
    """Losses of batches (detached scalars on one device) times their weights, in double precision;
    0 for none.

    Only here losses are copied from the GPU: every copy waits for all pending work.

    Examples:
        >>> weighted_sum([torch.tensor(1.0), torch.tensor(4.0)], [2, 1])
        6.0
    """
    values = []
    if losses:
        values = torch.stack(list(losses)).tolist()
    total = 0.0
    for value, weight in zip(values, weights, strict=True):
        total += value * weight
    return total


class MeanLoss:
    """The mean over images of the losses of batches."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._images: list[int] = []

    def add(self, loss: Tensor, images: int) -> None:
        """Note a batch's mean loss, a scalar."""
        self._losses.append(loss.detach())
        self._images.append(images)

    def value(self) -> float:
        """The mean, NaN without a batch."""
        if not self._images:
            return math.nan
        return weighted_sum(self._losses, self._images) / sum(self._images)


def train_together(
    steps: "Sequence[Steps]",
    batches: Iterable[Batch],
    losses: Callable[[Batch], Sequence[Tensor]],
    means: Sequence[MeanLoss],
) -> None:
    """An epoch in which every batch moves several models.

    Args:
        losses: a batch -> the loss of each model.
        means: of each model; they get its losses.
    """
    for batch in batches:
        for step, mean, loss in zip(steps, means, losses(batch), strict=True):
            step.backward(loss, len(batch.images))
            mean.add(loss, len(batch.images))
    for step in steps:
        step.finish()


def train_epochs(
    model: nn.Module,
    optimizer: Optimizer,
    site: Site,
    round: int,
    purpose: str,
    *,
    loss: Loss | None = None,
    gradient_hook: Hook | None = None,
    count: int | None = None,
) -> float:
    """Local epochs of `model` in place, see `epochs`; returns the mean loss over all images, NaN
    without any.

    Args:
        loss: (model, images, targets) -> scalar; default: the task's loss of the model's output.
        gradient_hook: called between gradient and step, to change the gradients in place (a
            proximal term, control variates).

    On a GPU, steps on full batches may be CUDA graphs, see `graph.can_capture`.
    """
    model.train()
    steps = Steps(optimizer, site, gradient_hook)
    passes = site.task.local_epochs if count is None else count
    full_batches = passes * (samples_of_pass(site) // site.batch_size)
    replay = StepReplay(model, optimizer, site, gradient_hook, full_batches)
    mean = MeanLoss()
    for batches in epochs(site, round, purpose, count=count):
        for images, targets, _ in batches:
            # Python may change another loss from step to step.
            value = replay(images, targets) if loss is None else None
            if value is None:
                if loss is None:
                    value = site.loss(model(images), targets)
                else:
                    value = loss(model, images, targets)
                steps.backward(value, len(images))  # after `TaskConfig.accumulate` batches a step
            mean.add(value, len(images))
        steps.finish()
    replay.finish()
    return mean.value()


def named_trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient by name, in the model's order."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that require a gradient, in the model's order."""
    return list(named_trainable(model).values())


class Steps:
    """An optimizer's steps at a site.

    With `TaskConfig.accumulate`, a step uses the gradient of the mean loss over all images of that
    many batches. It equals the step of one large batch if the loss is a mean over images and no
    layer mixes images. With fp16, losses are scaled by torch's `GradScaler`, and steps with
    infinite or NaN gradients are skipped.

    `gradient_hook` is called between gradient and step, to change the gradients in place.
    """

    def __init__(self, optimizer: Optimizer, site: Site, gradient_hook: Hook | None = None):
        self.optimizer = optimizer
        self.gradient_hook = gradient_hook
        self._every = site.task.accumulate
        self._full = self._every * site.batch_size  # images of a step
        self._scaler = scaler_of(optimizer) if site.task.precision == "fp16" else None
        self._batches = 0  # since the last step
        self._images = 0
        optimizer.zero_grad()

    def backward(self, loss: Tensor, images: int) -> None:
        """Add the gradient of a batch's mean loss, and step after the last batch of a step.

        Raises:
            ConfigError: the loss has several numbers, or no gradient.
        """
        if loss.dim():
            shape = tuple(loss.shape)
            raise ConfigError(f"the loss of a batch has shape {shape}; return the mean of it")
        if not loss.requires_grad:
            raise ConfigError("the loss of a batch has no gradient; compute it from the outputs")
        self._batches += 1
        self._images += images
        if self._every > 1:
            loss = loss * (images / self._full)
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        loss.backward()
        if self._batches == self._every:
            self.finish()

    def finish(self) -> None:
        """Step with the gradients since the last step, if there are any; called at the end of an
        epoch.
        """
        if not self._batches:
            return
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        if self._every > 1 and self._images != self._full:
            for group in self.optimizer.param_groups:
                for weight in group["params"]:
                    if weight.grad is not None:
                        weight.grad.mul_(self._full / self._images)
        if self.gradient_hook is not None:
            self.gradient_hook()
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        self.optimizer.zero_grad()
        self._batches = 0
        self._images = 0


def scaler_of(optimizer: Optimizer) -> GradScaler:
    """The scaler of an optimizer's losses, made at its first use."""
    if optimizer not in _SCALERS:
        _SCALERS[optimizer] = GradScaler(optimizer.param_groups[0]["params"][0].device.type)
    return _SCALERS[optimizer]


@contextmanager
def preserved_moments(optimizer: Optimizer) -> Iterator[None]:
    """A context that restores the optimizer's moments at its end."""
    before = copied_moments(optimizer)
    try:
        yield
    finally:
        optimizer.state.clear()
        optimizer.state.update(before)


def pack_optimizer(optimizer: Optimizer) -> StateDict:
    """Copies of the optimizer's tensors (Adam's moments and step, momentum) as "index of the
    parameter.slot", on their device; of its scaler the numbers.
    """
    packed = {}
    if optimizer in _SCALERS:
        for name, number in _SCALERS[optimizer].state_dict().items():
            packed[f"{_SCALER}.{name}"] = torch.tensor(number)
    for index, slots in optimizer.state_dict()["state"].items():
        for slot, value in slots.items():
            if value is not None:
                packed[f"{index}.{slot}"] = torch.as_tensor(value)
    return copy_on_device(packed)


def unpack_optimizer(optimizer: Optimizer, packed: StateDict) -> None:
    """Restore what `pack_optimizer` returned, into an optimizer of the same parameters; its
    learning rate is kept.
    """
    slots: dict[int, dict[str, Tensor]] = {}
    numbers = {}  # of the scaler
    for key, tensor in copy_on_device(packed).items():
        owner, slot = key.split(".", 1)
        if owner == _SCALER:
            numbers[slot] = tensor.item()
        else:
            slots.setdefault(int(owner), {})[slot] = tensor
    if numbers:
        scaler_of(optimizer).load_state_dict(numbers)
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": slots, "param_groups": groups})


@dataclass
class OptimizerMemory:
    """Optimizer states that a site algorithm stores from round to round, by purpose.

    The weights are replaced every round while the moments stay, as in the published code of FedSM
    and GRACE.
    """

    memory: Message

    def recall(self, purpose: str, optimizer: Optimizer) -> Optimizer:
        """Give the optimizer the stored moments of its purpose, if there are any."""
        packed = self.memory.states.get(_OPTIMIZER + purpose)
        if packed is not None:
            unpack_optimizer(optimizer, packed)
        return optimizer

    def keep(self, purpose: str, optimizer: Optimizer) -> None:
        """Store the optimizer's moments, on their device where they may stay there."""
        packed = pack_optimizer(optimizer)
        devices = {tensor.device for tensor in packed.values() if not tensor.is_cpu}
        if not all(stays(state_bytes(packed), device) for device in devices):
            packed = copy_state(packed)
        self.memory.states[_OPTIMIZER + purpose] = packed
