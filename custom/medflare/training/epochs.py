"""Local training: the loops that every method's site algorithm shares, and the optimizer's memory."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from medflare.core.message import Message
from medflare.core.rng import Key, seeded
from medflare.core.states import StateDict
from medflare.data.loading import Batch
from medflare.training.accumulation import Steps, pack_scaling, unpack_scaling
from medflare.training.batches import samples_in
from medflare.training.site import Site

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]  # (model, images, targets) -> scalar
_OPTIMIZER = "optimizer/"  # entries of an algorithm's memory


def epochs(site: Site, *keys: Key, count: int | None = None) -> Iterator[Iterator[Batch]]:
    """Local epochs, each as its batches of training images; dropout and everything else that draws is keyed.

    Args:
        site: gives the batches.
        keys: what sets this training apart, by habit round and purpose: two models of one round see other orders and augmentations.
        count: how many; None: the task's number.
    """
    with seeded(site.seed, site.name, *keys, "dropout"):
        for epoch in range(site.task.local_epochs if count is None else count):
            yield site.batches("train", *keys, epoch)


def samples_of_pass(site: Site) -> int:
    """Samples in one pass over the training images, of which each may give several patches."""
    return samples_in(site.n["train"] * site.image_mode.per_image, site.batch_size)


def run_epochs(
    site: Site,
    round: int,
    purpose: str,
    step: Callable[[Batch], Mapping[str, Tensor]],
    *,
    count: int | None = None,
    after: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Local epochs, `step` on every batch; returns the mean over all images of each loss it returned.

    Args:
        site: gives the batches.
        round: 0-based; with `purpose` the keys of `epochs`.
        purpose: names the model that is trained.
        step: trains on a batch and returns its losses by name.
        count: how many epochs; None: the task's number.
        after: called at the end of every epoch.
    """
    losses: dict[str, list[Tensor]] = {}
    sizes: list[int] = []
    for batches in epochs(site, round, purpose, count=count):
        for batch in batches:
            for name, loss in step(batch).items():
                losses.setdefault(name, []).append(loss.detach())
            sizes.append(len(batch.images))
        after()
    return {name: weighted_sum(values, sizes) / sum(sizes) for name, values in losses.items()}


def weighted_sum(losses: Sequence[Tensor], weights: Sequence[float]) -> float:
    """Losses of batches times their weights. Here alone they are read: each read waits for all that a GPU still computes.

    Args:
        losses: of each batch, detached scalars on one device.
        weights: for example images of each batch.

    Returns:
        The sum in their order, in double precision; 0 of none.

    Examples:
        >>> weighted_sum([torch.tensor(1.0), torch.tensor(4.0)], [2, 1])
        6.0
    """
    total = 0.0
    for loss, weight in zip(torch.stack(list(losses)).tolist() if losses else [], weights, strict=True):
        total += loss * weight
    return total


def train_epochs(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    site: Site,
    round: int,
    purpose: str,
    *,
    loss: Loss | None = None,
    gradient_hook: Callable[[], None] | None = None,
    count: int | None = None,
) -> float:
    """Local epochs of `model` in place, see `run_epochs`; returns the mean loss over all images, NaN without any.

    Args:
        model: trained in place.
        optimizer: of its trainable parameters.
        site: gives batches and the task's loss.
        round: 0-based; with `purpose` the keys of `epochs`.
        purpose: names the model that is trained.
        loss: (model, images, targets) -> scalar; default: the task's loss of the model's output.
        gradient_hook: called between gradient and step, to change the gradients in place (a proximal term, control variates).
        count: how many epochs; None: the task's number.
    """
    model.train()
    steps = Steps(optimizer, site, gradient_hook)

    def step(batch: Batch) -> dict[str, Tensor]:
        images, targets, _ = batch
        value = site.loss(model(images), targets) if loss is None else loss(model, images, targets)
        steps.follow(value, len(images))
        return {"loss": value}

    return run_epochs(site, round, purpose, step, count=count, after=steps.finish).get("loss", math.nan)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that take a gradient, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def pack_optimizer(optimizer: torch.optim.Optimizer) -> StateDict:
    """The optimizer's per-parameter tensors (Adam's moments and step, momentum buffers) as a flat state, parameters by their place.

    With the scale of the losses, where one belongs to the optimizer.
    """
    packed = pack_scaling(optimizer)
    for place, slots in optimizer.state_dict()["state"].items():
        for slot, value in slots.items():
            if value is not None:
                packed[f"{place}.{slot}"] = torch.as_tensor(value)
    return packed


def unpack_optimizer(optimizer: torch.optim.Optimizer, packed: StateDict) -> None:
    """Give the optimizer (of as many parameters, in the same order) what `pack_optimizer` took; its learning rate stays its own."""
    slots: dict[int, dict[str, Tensor]] = {}
    for key, value in unpack_scaling(optimizer, packed).items():
        place, slot = key.split(".", 1)
        slots.setdefault(int(place), {})[slot] = value.clone()
    optimizer.load_state_dict({"state": slots, "param_groups": optimizer.state_dict()["param_groups"]})


class OptimizerMemory:
    """Optimizer states that a site algorithm keeps from round to round, by purpose, in its memory.

    The weights are replaced every round while the moments stay: what the published FedSM and GRACE code does. PersistentState as packed
    tensors, so an algorithm restored in a new process goes on with the very same numbers.
    """

    def __init__(self, memory: Message):
        self._memory = memory

    def recall(self, purpose: str, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer with the moments of its purpose, where there are any."""
        packed = self._memory.states.get(_OPTIMIZER + purpose)
        if packed is not None:
            unpack_optimizer(optimizer, packed)
        return optimizer

    def keep(self, purpose: str, optimizer: torch.optim.Optimizer) -> None:
        """Remember the optimizer's moments."""
        packed = pack_optimizer(optimizer)
        self._memory.states[_OPTIMIZER + purpose] = {name: tensor.detach().cpu().clone() for name, tensor in packed.items()}


def finite_or_none(value: float | None) -> float | None:
    """JSON has no NaN: an undefined number travels as None.

    Examples:
        >>> finite_or_none(0.5), finite_or_none(math.nan), finite_or_none(None)
        (0.5, None, None)
    """
    return value if value is not None and math.isfinite(value) else None
