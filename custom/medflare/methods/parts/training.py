"""Local training: the loop that every method's site half shares."""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from medflare.core.message import Message
from medflare.core.rng import seeded
from medflare.core.states import StateDict
from medflare.sites.site import Batch, Site


def run_epochs(site: Site, round: int, purpose: str, step: Callable[[Batch], Mapping[str, Tensor]]) -> dict[str, float]:
    """The task's local epochs, `step` on every batch of training images; returns the mean over all images of each loss it returned.

    Args:
        purpose: keys the order of the images, the augmentation and dropout, so that two models of one round differ.
        step: trains on a batch and returns its losses by name.
    """
    totals: dict[str, float] = {}
    seen = 0
    with seeded(site.seed, site.name, round, purpose, "dropout"):
        for epoch in range(site.task.local_epochs):
            for batch in site.batches("train", round, purpose, epoch):
                for name, loss in step(batch).items():
                    totals[name] = totals.get(name, 0.0) + loss.item() * len(batch.images)
                seen += len(batch.images)
    return {name: total / seen for name, total in totals.items()}


def train_epochs(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    site: Site,
    round: int,
    purpose: str,
    *,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
) -> float:
    """The task's local epochs of `model` in place, see `run_epochs`; returns the mean loss over all images, NaN without any.

    Args:
        loss: (model, images, targets) -> scalar; default: the task's loss of the model's output.
    """
    model.train()

    def step(batch: Batch) -> dict[str, Tensor]:
        images, targets, _ = batch
        optimizer.zero_grad(set_to_none=True)
        value = site.loss(model(images), targets) if loss is None else loss(model, images, targets)
        value.backward()
        optimizer.step()
        return {"loss": value}

    return run_epochs(site, round, purpose, step).get("loss", math.nan)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def pack_optimizer(optimizer: torch.optim.Optimizer) -> StateDict:
    """The optimizer's per-parameter tensors (Adam's moments and step, momentum buffers) as a flat state, parameters by their place."""
    packed: StateDict = {}
    for place, slots in optimizer.state_dict()["state"].items():
        for slot, value in slots.items():
            if value is not None:
                packed[f"{place}.{slot}"] = torch.as_tensor(value)
    return packed


def unpack_optimizer(optimizer: torch.optim.Optimizer, packed: StateDict) -> None:
    """Give the optimizer the tensors that `pack_optimizer` took; its learning rate and other settings stay its own."""
    slots: dict[int, dict[str, Tensor]] = {}
    for key, value in packed.items():
        place, slot = key.split(".", 1)
        slots.setdefault(int(place), {})[slot] = value.clone()
    optimizer.load_state_dict({"state": slots, "param_groups": optimizer.state_dict()["param_groups"]})


class OptimizerMemory:
    """Optimizer states that a site half keeps from round to round, by purpose.

    The weights are replaced every round while the moments stay: what the published FedSM and GRACE code does. Kept as packed
    tensors, so a half restored in a new process goes on with the very same numbers.
    """

    def __init__(self) -> None:
        self._packed: dict[str, StateDict] = {}

    def recall(self, purpose: str, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if purpose in self._packed:
            unpack_optimizer(optimizer, self._packed[purpose])
        return optimizer

    def keep(self, purpose: str, optimizer: torch.optim.Optimizer) -> None:
        self._packed[purpose] = {name: tensor.detach().cpu().clone() for name, tensor in pack_optimizer(optimizer).items()}

    def pack(self, message: Message) -> None:
        message.states.update({f"optimizer/{purpose}": packed for purpose, packed in self._packed.items()})

    def unpack(self, message: Message) -> None:
        prefix = "optimizer/"
        self._packed = {entry.removeprefix(prefix): state for entry, state in message.states.items() if entry.startswith(prefix)}


def finite_or_none(value: float | None) -> float | None:
    """JSON has no NaN: an undefined number travels as None."""
    return value if value is not None and math.isfinite(value) else None


def total_bytes(messages: Iterable[Message]) -> int:
    return sum(message.nbytes for message in messages)
