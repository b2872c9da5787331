"""Task losses by configuration, on logits; MONAI's where it has one.

Every loss is a module called with logits (N, outputs, ...) and targets as in `data.splits.Split`, and returns the scalar mean.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from medflare.core.errors import ConfigError
from medflare.core.settings import refuse_arguments, unknown
from medflare.tasks.config import TaskConfig
from medflare.tasks.library_losses import LibraryLoss, library_losses, like_logits, mixes_images


def build_loss(task: TaskConfig, spec: Mapping[str, Any] | None = None) -> nn.Module:
    """The loss named by `spec` (default: the task's), for example {"name": "dice_ce", "ce_weight": 0.5}.

    Args:
        spec: "name", of `LOSSES` or of a class in `monai.losses`, and arguments of the loss; None: the task's.

    Raises:
        ConfigError: unknown name or argument, or a loss that does not fit the task.
    """
    settings = dict(spec or task.loss)
    name = settings.pop("name")
    if name not in LOSSES:
        if name not in library_losses():
            raise unknown("loss", name, {*LOSSES, *library_losses()}, "loss")
        return LibraryLoss(task, name, settings)
    build = LOSSES[name]
    refuse_arguments(build, settings, f"loss {name}", taken=["task"])
    try:
        return build(task, **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"loss {name}: {error}; see tasks/losses.py") from error


class CrossEntropy(nn.Module):
    """Softmax cross entropy (multiclass), or sigmoid cross entropy averaged over all outputs (binary, multilabel).

    Args:
        task: gives target and classes.
        weights: factor of every class (multiclass) or of every label's positives (binary, multilabel).
    """

    weights: Tensor | None

    def __init__(self, task: TaskConfig, weights: list[float] | None = None):
        super().__init__()
        self._multiclass = task.target == "multiclass"
        self.register_buffer("weights", _weights(task, weights), persistent=False)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of logits (N, outputs, ...), a scalar."""
        if self._multiclass:
            return functional.cross_entropy(logits, targets, weight=self.weights)
        positive = self.weights
        if positive is not None:
            positive = positive.reshape(-1, *[1] * (logits.ndim - 2))
        return functional.binary_cross_entropy_with_logits(logits, like_logits(targets, logits, multiclass=False), pos_weight=positive)


class SoftDice(nn.Module):
    """MONAI's soft Dice loss with its defaults, as FedSM trains: per image and class, smoothed by 1e-5.

    Args:
        task: gives target and classes.
        batch: pool the pixels of a batch, so that images without foreground do not each count as a miss.
        squared: square the denominator's terms (V-Net).
        include_background: whether class 0 of a multiclass task counts.

    Raises:
        ConfigError: a classification task.
    """

    def __init__(self, task: TaskConfig, batch: bool = False, squared: bool = False, include_background: bool = True):
        super().__init__()
        if task.kind != "segmentation":
            raise ConfigError(f"loss dice: task {task.name} is a classification task; use ce or focal")
        from monai.losses.dice import DiceLoss

        multiclass = task.target == "multiclass"
        self._loss = DiceLoss(
            include_background=include_background or not multiclass,
            sigmoid=not multiclass,
            softmax=multiclass,
            squared_pred=squared,
            batch=batch,
        )
        self._multiclass = multiclass

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """1 - soft Dice of logits (N, outputs, H, W), a scalar between 0 and 1."""
        return self._loss(logits, like_logits(targets, logits, multiclass=self._multiclass))


class Focal(nn.Module):
    """Focal loss (Lin et al., 2017): cross entropy times (1 - p)^gamma, mean over images (and pixels).

    Multiclass uses the softmax probability of the true class, binary and multilabel one sigmoid per output.

    Args:
        task: gives target and classes.
        gamma: focusing exponent, at least 0; 0 is cross entropy. Multiclass takes none between 0 and 1, where the slope of (1 - p)^gamma is
            infinite at p = 1.
        weights: factor of every class (multiclass) or of every output, where there are several.

    Raises:
        ConfigError: weights for a task with one output, or a gamma without a gradient.
    """

    def __init__(self, task: TaskConfig, gamma: float = 2.0, weights: list[float] | None = None):
        super().__init__()
        if weights is not None and task.outputs == 1:
            raise ConfigError(f"loss focal: task {task.name} has one output, which weights would only scale; leave them out")
        self._multiclass = task.target == "multiclass"
        if gamma < 0 or (self._multiclass and 0 < gamma < 1):
            raise ConfigError(f"loss focal: gamma {gamma:g} has no gradient where the network is certain; take 0, or 1 or more")
        from monai.losses.focal_loss import FocalLoss

        self._loss = FocalLoss(gamma=gamma, use_softmax=self._multiclass, weight=_weights(task, weights))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean focal loss of logits (N, outputs, ...), a scalar."""
        value: Tensor = self._loss(logits, like_logits(targets, logits, multiclass=self._multiclass))
        # MONAI averages over the classes too, all but one of which are zero: undo it.
        return value * logits.shape[1] if self._multiclass else value


class Sum(nn.Module):
    """dice_weight * soft Dice + ce_weight * cross entropy.

    Args:
        dice: `SoftDice`.
        cross_entropy: `CrossEntropy`.
        dice_weight: factor of the one.
        ce_weight: factor of the other.
    """

    def __init__(self, dice: nn.Module, cross_entropy: nn.Module, dice_weight: float, ce_weight: float):
        super().__init__()
        self._dice, self._cross_entropy = dice, cross_entropy
        self._dice_weight, self._ce_weight = dice_weight, ce_weight

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The weighted sum of both, a scalar."""
        return self._dice_weight * self._dice(logits, targets) + self._ce_weight * self._cross_entropy(logits, targets)


def _dice_ce(
    task: TaskConfig,
    batch: bool = False,
    squared: bool = False,
    include_background: bool = True,
    weights: list[float] | None = None,
    dice_weight: float = 1.0,
    ce_weight: float = 1.0,
) -> Sum:
    return Sum(SoftDice(task, batch, squared, include_background), CrossEntropy(task, weights), dice_weight, ce_weight)


LOSSES: dict[str, Callable[..., nn.Module]] = {
    "ce": CrossEntropy,
    "dice": SoftDice,
    "dice_ce": _dice_ce,
    "focal": Focal,
}


def pools_images(task: TaskConfig) -> str | None:
    """Why the task's loss of a batch is not the mean of its images' losses, with the remedy; None where it is that mean."""
    if task.loss["name"] not in LOSSES and mixes_images(task, build_loss(task)):
        return "what it gives a batch is not the mean of its images' losses; take ce, dice or focal, or other arguments"
    if task.loss.get("batch"):
        return "batch=true pools the pixels of a batch; set task.loss.batch=false"
    if task.loss.get("weights") and task.target == "multiclass" and task.loss["name"] in ("ce", "dice_ce"):
        return "cross entropy divides by the class weights of a batch; leave out weights, or take the loss focal with gamma 0"
    return None


def _weights(task: TaskConfig, weights: list[float] | None) -> Tensor | None:
    if weights is None:
        return None
    if len(weights) != task.outputs or any(not weight > 0 for weight in weights):
        raise ConfigError(f"loss: weights must be {task.outputs} positive numbers ({', '.join(task.labels)}), got {weights}")
    return torch.tensor(weights, dtype=torch.float32)
