"""Losses by name, on logits: ours, those of `monai.losses` and extensions.

Every loss is a module called with logits (N, outputs, ...) and targets as in `data.loading.Split`;
it returns a scalar.
"""

import inspect
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from medflare.core.errors import ConfigError, one_line
from medflare.core.extensions import Extensions, check_callable
from medflare.core.settings import refuse_arguments, unknown
from medflare.core.text import Json
from medflare.tasks.config import TaskConfig

_ACTIVATIONS = ("sigmoid", "softmax", "other_act", "use_softmax")
# Pixels of the images that a loss of MONAI is tried on; structural similarity needs 11.
_SIDE = 16


def build_loss(task: TaskConfig, spec: Json | None = None) -> nn.Module:
    """The loss by `spec` (default: the task's): "name", of `LOSSES`, of a class in
    `monai.losses` or of an extension, and arguments.

    Raises:
        ConfigError: unknown name or argument, or a loss that does not accept the task's logits and
            targets.
    """
    settings = dict(spec or task.loss)
    name = settings.pop("name")
    foreign = EXTENSIONS.foreign(name)
    if name in LOSSES:
        refuse_arguments(LOSSES[name], settings, f"loss {name}", reserved=["task"])
        try:
            return LOSSES[name](task, **settings)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"loss {name}: {error}") from error
    if name not in EXTENSIONS:
        raise unknown("loss", name, EXTENSIONS, "loss")
    reserved = ["task", "to_onehot_y", "spatial_dims", "pretrained"]
    build = foreign or monai_losses()[name]
    refuse_arguments(build, settings, f"loss {name}", reserved=reserved)
    try:
        if foreign is not None and "task" in inspect.signature(foreign).parameters:
            settings["task"] = task
        loss = foreign(**settings) if foreign is not None else MonaiLoss(task, name, settings)
        logits, targets = example_batch(task)
        loss(logits.requires_grad_(), targets).backward()
    except Exception as error:  # whatever MONAI or the extension raises
        raise ConfigError(
            f"loss {name} with {settings} does not work for task {task.name}: {one_line(error)}"
        ) from error
    return loss


def like_logits(targets: Tensor, logits: Tensor, *, multiclass: bool) -> Tensor:
    """Targets, class indices (N, ...) (multiclass) or 0 and 1 of every output, in shape (N,
    outputs, ...) and dtype of the logits.
    """
    if multiclass:
        return functional.one_hot(targets, logits.shape[1]).movedim(-1, 1).to(logits.dtype)
    return targets.reshape(logits.shape).to(logits.dtype)


class CrossEntropy(nn.Module):
    """Softmax cross entropy (multiclass), or sigmoid cross entropy averaged over all outputs
    (binary, multilabel).

    `weights` are factors of every class (multiclass) or of every label's positives (binary,
    multilabel).
    """

    weights: Tensor | None

    def __init__(self, task: TaskConfig, weights: list[float] | None = None):
        super().__init__()
        self._multiclass = task.target == "multiclass"
        self.register_buffer("weights", _weights(task, weights), persistent=False)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self._multiclass:
            return functional.cross_entropy(logits, targets, weight=self.weights)
        positive = self.weights
        if positive is not None:
            positive = positive.reshape(-1, *[1] * (logits.ndim - 2))
        return functional.binary_cross_entropy_with_logits(
            logits, like_logits(targets, logits, multiclass=False), pos_weight=positive
        )


@cache
def monai_losses() -> Json:
    """Name -> class of every loss in `monai.losses`; those with a pretrained network would download
    its weights and are left out.
    """
    from monai import losses

    classes = {}
    for name, cls in vars(losses).items():
        is_loss = inspect.isclass(cls) and issubclass(cls, nn.Module)
        if not is_loss or cls.__name__ != name:  # an alias has another name
            continue
        if "pretrained" not in inspect.signature(cls).parameters:
            classes[name] = cls
    return classes


# Numbers of MONAI's losses outside these ranges can leave the gradient to a single image.
# Published: gamma 0 to 5 (Lin et al.), 0.1 to 0.9 (unified focal loss), alpha 2 (Karimi et al.).
_RANGES = {
    "gamma": (0, 10),
    "alpha": (0, 2),
    "beta": (0, 2),
    "smooth_nr": (0, 1),
    "smooth_dr": (0, math.inf),
}
_MOST_UNIFIED_GAMMA = 1


class MonaiLoss(nn.Module):
    """A loss of MONAI. Activation (unless the arguments have one), one-hot masks and dimensions
    follow from the task.

    Logits and targets of a classification task are passed as images of one pixel.
    """

    def __init__(self, task: TaskConfig, name: str, arguments: Json):
        super().__init__()
        cls = monai_losses()[name]
        self._multiclass = task.target == "multiclass"
        self._dims = task.spatial_dims
        values: dict[str, Any] = {"spatial_dims": task.spatial_dims}
        if arguments.keys().isdisjoint(_ACTIVATIONS):
            values["use_softmax"] = self._multiclass
            values["softmax"] = self._multiclass
            values["sigmoid"] = not self._multiclass
        if not self._multiclass:
            values["include_background"] = True  # the first output is a label like the others
        for argument in values.keys() - inspect.signature(cls).parameters:
            del values[argument]
        values.update(arguments)
        for argument, (low, high) in _RANGES.items():
            if name == "AsymmetricUnifiedFocalLoss" and argument == "gamma":
                high = _MOST_UNIFIED_GAMMA
            value = values.get(argument, low)
            if isinstance(value, int | float) and not low <= value <= high:
                raise ConfigError(
                    f"loss {name}: {argument} {value:g} could leave the gradient to a single "
                    f"image; take {low} to {high:g}"
                )
        if isinstance(values.get("weight"), list):
            values["weight"] = torch.tensor(values["weight"], dtype=torch.float32)
        self._loss = cls(**values)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        truth = like_logits(targets, logits, multiclass=self._multiclass)
        if logits.ndim == 2:
            one_pixel = (*logits.shape, *[1] * self._dims)
            logits = logits.reshape(one_pixel)
            truth = truth.reshape(one_pixel)
        return self._loss(logits, truth)


class SoftDice(MonaiLoss):
    """MONAI's soft Dice loss with its defaults, as FedSM trains: per image and class, smoothed by
    1e-5.

    Args:
        batch: pool the pixels of a batch, so that an image without foreground does not count as a
            miss.
        squared: square the denominator's terms (V-Net).
        include_background: whether class 0 of a multiclass task counts.

    Raises:
        ConfigError: a classification task.
    """

    def __init__(
        self,
        task: TaskConfig,
        batch: bool = False,
        squared: bool = False,
        include_background: bool = True,
    ):
        if task.kind != "segmentation":
            raise ConfigError(f"loss dice: task {task.name} is a classification; use ce or focal")
        background = include_background or task.target != "multiclass"
        arguments = {"include_background": background, "squared_pred": squared, "batch": batch}
        super().__init__(task, "DiceLoss", arguments)


class Focal(MonaiLoss):
    """Focal loss (Lin et al., 2017): cross entropy times (1 - p)^gamma, mean over images (and
    pixels).

    Multiclass uses the softmax probability of the true class, binary and multilabel one sigmoid per
    output.

    Args:
        gamma: focusing exponent, at least 0; 0 is cross entropy. Multiclass: not between 0 and 1,
            where the slope of (1 - p)^gamma is infinite at p = 1.
        weights: factor of every class (multiclass) or of every output, where there are several.

    Raises:
        ConfigError: weights for a task with one output, or a gamma without a gradient.
    """

    def __init__(self, task: TaskConfig, gamma: float = 2.0, weights: list[float] | None = None):
        if weights is not None and task.outputs == 1:
            raise ConfigError(
                f"loss focal: task {task.name} has one output, "
                "so weights would only scale the loss; leave them out"
            )
        if gamma < 0 or (task.target == "multiclass" and 0 < gamma < 1):
            raise ConfigError(
                f"loss focal: gamma {gamma:g} has no gradient where the network is certain; "
                "take 0, or 1 or more"
            )
        super().__init__(task, "FocalLoss", {"gamma": gamma, "weight": _weights(task, weights)})

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        truth = like_logits(targets, logits, multiclass=self._multiclass)
        value = self._loss(logits, truth)
        if self._multiclass:
            # MONAI averages over the classes too; all but one of the terms are 0.
            value = value * logits.shape[1]
        return value


class _WeightedSum(nn.Module):
    """dice_weight * a Dice loss + other_weight * another loss."""

    def __init__(self, dice: nn.Module, other: nn.Module, dice_weight: float, other_weight: float):
        super().__init__()
        self._dice = dice
        self._other = other
        self._dice_weight = dice_weight
        self._other_weight = other_weight

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        dice: Tensor = self._dice_weight * self._dice(logits, targets)
        return dice + self._other_weight * self._other(logits, targets)


class DiceCE(_WeightedSum):
    """dice_weight * `SoftDice` + ce_weight * `CrossEntropy`."""

    def __init__(
        self,
        task: TaskConfig,
        batch: bool = False,
        squared: bool = False,
        include_background: bool = True,
        weights: list[float] | None = None,
        dice_weight: float = 1.0,
        ce_weight: float = 1.0,
    ):
        dice = SoftDice(task, batch, squared, include_background)
        super().__init__(dice, CrossEntropy(task, weights), dice_weight, ce_weight)


class DiceFocal(_WeightedSum):
    """`SoftDice` + focal loss, the mean over the classes (`Focal`: their sum)."""

    def __init__(
        self,
        task: TaskConfig,
        batch: bool = False,
        squared: bool = False,
        include_background: bool = True,
        gamma: float = 2.0,
    ):
        dice = SoftDice(task, batch, squared, include_background)
        focal_weight = 1 / task.outputs if task.target == "multiclass" else 1.0
        super().__init__(dice, Focal(task, gamma), 1.0, focal_weight)


LOSSES = {
    "ce": CrossEntropy,
    "dice": SoftDice,
    "dice_ce": DiceCE,
    "dice_focal": DiceFocal,
    "focal": Focal,
}
EXTENSIONS = Extensions("loss", "losses", lambda: {*LOSSES, *monai_losses()}, check_callable)


def _weights(task: TaskConfig, weights: list[float] | None) -> Tensor | None:
    if weights is None:
        return None
    if len(weights) != task.outputs or any(not weight > 0 for weight in weights):
        raise ConfigError(
            f"loss: weights must be {task.outputs} positive numbers ({', '.join(task.labels)}), "
            f"got {weights}"
        )
    return torch.tensor(weights, dtype=torch.float32)


def example_batch(task: TaskConfig, size: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Logits (2, outputs, ...) and targets of two images, small ones without a `size`."""
    sides = size or [_SIDE] * task.spatial_dims
    shape = (2, task.outputs, *(sides if task.kind == "segmentation" else ()))
    logits = torch.arange(math.prod(shape)).sin().reshape(shape)
    if task.target == "multiclass":
        return logits, logits.argmax(dim=1)
    return logits, (logits > 0).long()


def pools_images(task: TaskConfig) -> str | None:
    """Why the loss of a batch may not be the mean of its images' losses (as DP-SGD needs), with the
    remedy; None if it is that mean.
    """
    loss = task.loss
    if loss["name"] not in LOSSES:
        return "losses of other packages may pool the images of a batch; use ce, dice or focal"
    if loss.get("batch"):
        return "batch=true pools the pixels of a batch; set task.loss.batch=false"
    has_cross_entropy = loss["name"] in ("ce", "dice_ce")
    if has_cross_entropy and loss.get("weights") and task.target == "multiclass":
        return (
            "cross entropy divides by the class weights of a batch; "
            "leave out weights, or use the loss focal with gamma 0"
        )
    return None
