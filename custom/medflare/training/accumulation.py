"""Steps of an optimizer: one a batch, or one for several batches (`TaskConfig.accumulate`), with losses scaled where fp16 needs it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from medflare.core.states import StateDict
from medflare.training.site import Site

_SCALERS: WeakKeyDictionary[torch.optim.Optimizer, GradScaler] = WeakKeyDictionary()
_SCALER = "scaler."  # begins the names of a scaler's numbers among those of its optimizer


class Steps:
    """An optimizer's steps at a site.

    With `accumulate`, a step follows the gradient of the mean loss over all images of so many batches: where the loss of a batch is the
    mean of its images' losses and no layer mixes images, that of one batch so many times as large. With fp16 losses are scaled by
    torch's `GradScaler`, so that small gradients do not vanish, and a step whose gradients are not finite is left out.

    Args:
        optimizer: takes the steps.
        site: gives the task's settings and the size of a batch.
        gradient_hook: called between gradient and step, to change the gradients in place.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, site: Site, gradient_hook: Callable[[], None] | None = None):
        self.optimizer, self.gradient_hook = optimizer, gradient_hook
        self._every = site.task.accumulate
        self._full = self._every * site.batch_size  # images behind a step
        self._scaler = scaler_of(optimizer) if site.task.precision == "fp16" else None
        self._batches = self._images = 0
        optimizer.zero_grad(set_to_none=True)

    def follow(self, loss: Tensor, images: int) -> None:
        """Take in a batch, and step where it is the last one behind a step.

        Args:
            loss: mean loss of the batch, with its graph.
            images: of the batch.
        """
        self._batches, self._images = self._batches + 1, self._images + images
        share = loss if self._every == 1 else loss * (images / self._full)
        (share if self._scaler is None else self._scaler.scale(share)).backward()
        if self._batches == self._every:
            self.finish()

    def finish(self) -> None:
        """Step along what has been taken in since the last step, if anything has: at the end of an epoch."""
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
        self.optimizer.zero_grad(set_to_none=True)
        self._batches = self._images = 0


@contextmanager
def preserved_moments(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Steps of the optimizer inside start from its moments, and leave these as they were."""
    before = {
        weight: {slot: value.clone() if isinstance(value, Tensor) else value for slot, value in slots.items()}
        for weight, slots in optimizer.state.items()
    }
    try:
        yield
    finally:
        optimizer.state.clear()
        optimizer.state.update(before)


def scaler_of(optimizer: torch.optim.Optimizer) -> GradScaler:
    """What scales the losses that an optimizer's gradients come from; made when first asked for."""
    if optimizer not in _SCALERS:
        _SCALERS[optimizer] = GradScaler(optimizer.param_groups[0]["params"][0].device.type)
    return _SCALERS[optimizer]


def pack_scaling(optimizer: torch.optim.Optimizer) -> StateDict:
    """The numbers of an optimizer's scaler, by names that no parameter's slot has; none where it has no scaler."""
    if optimizer not in _SCALERS:
        return {}
    return {f"{_SCALER}{name}": torch.tensor(float(value)) for name, value in _SCALERS[optimizer].state_dict().items()}


def unpack_scaling(optimizer: torch.optim.Optimizer, packed: StateDict) -> StateDict:
    """Give the optimizer's scaler the numbers that `pack_scaling` took; returns what is left."""
    numbers = {name.removeprefix(_SCALER): value.item() for name, value in packed.items() if name.startswith(_SCALER)}
    if numbers:
        scaler = scaler_of(optimizer)
        scaler.load_state_dict({name: type(value)(numbers[name]) for name, value in scaler.state_dict().items()})
    return {name: value for name, value in packed.items() if not name.startswith(_SCALER)}
