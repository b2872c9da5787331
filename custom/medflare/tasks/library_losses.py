"""The losses of `monai.losses` by their names, called with logits and targets as every loss here is."""

import inspect
import math
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
_CERTAIN, _LEARNING = 25.0, 3.0  # logits: whose probability is 1 in float32, and of a network that still learns
_ACTIVATIONS: Final = ("sigmoid", "softmax", "other_act", "use_softmax")


@cache
def library_losses() -> dict[str, Any]:
    """Name -> class of every loss in `monai.losses`."""
    from monai import losses

    found = {name: cls for name, cls in vars(losses).items() if inspect.isclass(cls) and issubclass(cls, nn.Module)}
    return {name: cls for name, cls in found.items() if cls.__name__ == name}


class LibraryLoss(nn.Module):
    """One of MONAI's losses. What follows from the task is given to it: the activation by the target, one-hot masks, dimensions.

    It is tried on made-up cases first: many classes there compare images, want probabilities, or have no sigmoid, and say nothing.

    A classification task's logits and targets are to it images of one pixel.

    Args:
        task: gives target and dimensions.
        name: of the class in `monai.losses`.
        arguments: of the class; an activation among them replaces the one that the target asks for.

    Raises:
        ConfigError: an argument or value that the class does not take, or a loss that does not teach logits what the targets say.
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
        self._try(task, name, first=1 if self._multiclass and values.get("include_background") is False else 0)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of logits (N, outputs, ...), a scalar."""
        truth = like_logits(targets, logits, multiclass=self._multiclass)
        if logits.ndim == 2:
            logits, truth = (values.reshape(*values.shape, *[1] * self._dims) for values in (logits, truth))
        return self._loss(logits, truth)

    def _try(self, task: TaskConfig, name: str, first: int) -> None:
        """One batch forth and back, and cases whose answer is known, of the outputs from `first` on."""
        logits, targets = trial(task)
        try:
            value = self(logits.requires_grad_(), targets)
            value.backward()
            fit = not value.ndim and bool(value.isfinite()) and logits.grad is not None
            fault = self._fault(task, range(first, task.outputs)) if fit else None
        except Exception as error:
            raise ConfigError(f"loss {name}: it does not take logits and targets of task {task.name} ({one_line(error)})") from error
        if not fit:
            raise ConfigError(f"loss {name}: task {task.name} needs one finite number that has a gradient; check its arguments")
        if fault:
            own = "ce, dice, dice_ce or focal" if task.kind == "segmentation" else "ce or focal"
            raise ConfigError(f"loss {name}: of task {task.name}, {fault}; check its arguments, or take {own}")

    def _fault(self, task: TaskConfig, outputs: range) -> str | None:
        """How the loss does not teach logits what the targets say; None where it does."""
        targets = _known(task)
        shape = (len(targets), task.outputs, *targets.shape[1:]) if self._multiclass else targets.shape
        right = 2 * like_logits(targets, torch.empty(shape), multiclass=self._multiclass) - 1
        sure = _CERTAIN * right
        best = self(sure, targets)
        for output in outputs:
            if not bool(best < self(_with(sure, output, -sure[:, output]), targets)):
                return f"it finds wrong logits of {task.labels[output]} no worse than right ones"
        for logits in (-_LEARNING * right, _LEARNING * right, torch.zeros_like(right)):
            (gradient,) = torch.autograd.grad(self(logits.requires_grad_(), targets), logits)
            for output in outputs:
                if not 0 < float(gradient[:, output].abs().sum()) < math.inf:
                    return f"it gives the logits of {task.labels[output]} no gradient"
        if task.target == "multilabel" and any(self._competes(right, output) for output in outputs):
            return "its outputs compete as in a softmax, while several labels, or none, may be true"
        return None

    def _competes(self, like: Tensor, output: int) -> bool:
        """Whether it is worse to be sure of one output, where it is rightly so and nothing is known of the others."""
        unsure = torch.zeros_like(like)
        for sure, truth in ((_CERTAIN, torch.ones_like(like)), (-_CERTAIN, torch.zeros_like(like))):
            before, after = self(unsure, truth), self(_with(unsure, output, sure), truth)
            if bool(after > before + 1e-4 * before.abs()):
                return True
        return False


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


def _known(task: TaskConfig) -> Tensor:
    """Targets of small images in which every class or label is there, and is not."""
    masks = task.kind == "segmentation"
    count = _SIDE**task.spatial_dims if masks else 6 * task.outputs
    place = torch.arange(count)
    if task.target == "multiclass":
        truth = place * task.outputs // count
    else:
        truth = ((place * 6 // count)[:, None] + torch.arange(task.outputs)).remainder(3).eq(0).long()
    if not masks:
        return truth
    images = torch.stack([truth, truth.flip(0)])
    area = [_SIDE] * task.spatial_dims
    return images.reshape(2, *area) if task.target == "multiclass" else images.movedim(-1, 1).reshape(2, task.outputs, *area)


def _with(logits: Tensor, output: int, values: Tensor | float) -> Tensor:
    """A copy whose logits of one output are others."""
    changed = logits.clone()
    changed[:, output] = values
    return changed


def mixes_images(task: TaskConfig, loss: nn.Module) -> bool:
    """Whether the loss of two images is another number than the mean of their losses.

    Args:
        task: what the loss was made for.
        loss: called with logits and targets.
    """
    logits, targets = trial(task)
    apart = torch.stack([loss(logits[row : row + 1], targets[row : row + 1]) for row in range(2)]).mean()
    return not torch.allclose(loss(logits, targets), apart, rtol=1e-4)
