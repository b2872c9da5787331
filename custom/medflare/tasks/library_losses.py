"""The losses of `monai.losses` by their names, called with logits and targets as every loss here is."""

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from medflare.core.errors import ConfigError, one_line
from medflare.core.settings import refuse_arguments
from medflare.tasks.config import TaskConfig

_SIDE: Final = 16  # pixels of the images that a loss is tried on; structural similarity looks through a window of 11
_ACTIVATIONS: Final = ("sigmoid", "softmax", "other_act", "use_softmax")


@cache
def library_losses() -> dict[str, Any]:
    """Name -> class of every loss in `monai.losses`."""
    from monai import losses

    found = {name: cls for name, cls in vars(losses).items() if inspect.isclass(cls) and issubclass(cls, nn.Module)}
    return {name: cls for name, cls in found.items() if cls.__name__ == name}


class LibraryLoss(nn.Module):
    """One of MONAI's losses. What follows from the task is given to it: the activation by the target, one-hot masks, dimensions.

    A classification task's logits and targets are to it images of one pixel. It is tried on one batch first.

    Args:
        task: gives target and dimensions.
        arguments: of the class; an activation among them replaces the one that the target asks for.

    Raises:
        ConfigError: an argument or value that the class does not take, or a loss that does not take the task's logits and targets.
    """

    def __init__(self, task: TaskConfig, name: str, arguments: Mapping[str, Any]):
        super().__init__()
        cls = library_losses()[name]
        refuse_arguments(cls, arguments, f"loss {name}", taken=["to_onehot_y", "spatial_dims"])
        self._multiclass, self._dims = task.target == "multiclass", task.spatial_dims
        given: dict[str, Any] = {"spatial_dims": task.spatial_dims}
        if not any(activation in arguments for activation in _ACTIVATIONS):
            given |= {"use_softmax": self._multiclass, "softmax": self._multiclass, "sigmoid": not self._multiclass}
        if not self._multiclass:
            given["include_background"] = True  # the first output is a label like the others
        takes = inspect.signature(cls).parameters
        if "pretrained" in takes:
            raise ConfigError(f"loss {name}: it looks through a network whose weights it would download; take another loss")
        values = {argument: value for argument, value in given.items() if argument in takes} | dict(arguments)
        if isinstance(values.get("weight"), list):
            values["weight"] = torch.tensor(values["weight"], dtype=torch.float32)
        try:
            self._loss = cls(**values)
        except Exception as error:  # whatever MONAI raises: its losses have no common error
            raise ConfigError(f"loss {name}: {one_line(error)}; check its arguments {dict(arguments)}") from error
        self._try(task, name)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of logits (N, outputs, ...), a scalar."""
        truth = like_logits(targets, logits, multiclass=self._multiclass)
        if logits.ndim == 2:
            logits, truth = (values.reshape(*values.shape, *[1] * self._dims) for values in (logits, truth))
        return self._loss(logits, truth)

    def _try(self, task: TaskConfig, name: str) -> None:
        """One batch forth and back."""
        logits, targets = trial(task)
        try:
            value = self(logits.requires_grad_(), targets)
            value.backward()
        except Exception as error:
            raise ConfigError(f"loss {name}: it does not take logits and targets of task {task.name} ({one_line(error)})") from error
        if value.ndim or not value.isfinite() or logits.grad is None:
            raise ConfigError(f"loss {name}: task {task.name} needs one finite number that has a gradient; check its arguments")


def like_logits(targets: Tensor, logits: Tensor, *, multiclass: bool) -> Tensor:
    """Targets in the logits' shape (N, outputs, ...) and type.

    Args:
        targets: class indices (N, ...) (multiclass), or 0 and 1 of every output.
        logits: (N, outputs, ...).
        multiclass: whether the one-hot form of indices is meant.
    """
    truth = functional.one_hot(targets, logits.shape[1]).movedim(-1, 1) if multiclass else targets.reshape(logits.shape)
    return truth.to(logits.dtype)


def trial(task: TaskConfig) -> tuple[Tensor, Tensor]:
    """Logits (2, outputs, ...) and targets of two small images in which the classes have other shares.

    Args:
        task: gives kind, target and dimensions.
    """
    area = [_SIDE] * task.spatial_dims if task.kind == "segmentation" else []
    logits = torch.linspace(-2, 2, 2 * task.outputs * _SIDE ** len(area)).reshape(2, task.outputs, *area)
    if task.target == "multiclass":
        shares = torch.linspace(0, 0.99, 2 * _SIDE ** len(area)).square() * len(task.labels)
        return logits, shares.long().reshape(2, *area)
    return logits, (torch.arange(logits.numel()).reshape(logits.shape) % 3 == 0).long()


def mixes_images(task: TaskConfig, loss: nn.Module) -> bool:
    """Whether the loss of two images is another number than the mean of their losses.

    Args:
        loss: called with logits and targets.
    """
    logits, targets = trial(task)
    apart = torch.stack([loss(logits[row : row + 1], targets[row : row + 1]) for row in range(2)]).mean()
    return not torch.allclose(loss(logits, targets), apart, rtol=1e-4)
