"""How much a loss weighs images by the classes that they show, measured from its gradient.

Arguments do not tell it: losses name their weights differently, and alpha = 0 of a Tversky loss
takes all weight from the images without a structure.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from medflare.core.errors import ConfigError, one_line
from medflare.tasks.annotation import Annotation
from medflare.tasks.config import TaskConfig
from medflare.tasks.losses import like_logits

_UNDECIDED: tuple[float, ...] = (0.0,)  # sizes of the logits
# A Dice loss with its smoothing of 1e-5 has a gradient on masks without foreground only where the
# network is nearly certain.
_TO_CERTAIN: tuple[float, ...] = (0.0, 4.0, 8.0, 12.0, 16.0, 20.0)
_SIDES = {2: 16, 3: 12}  # pixels; structural similarity needs 11
_MOST_NUMBERS = 2**26  # of logits at once


def loss_weights(task: TaskConfig, annotated: Sequence[str] | None = None) -> list[Tensor]:
    """The weights of an image in the task's loss by what it shows, float64 (patterns, outputs)
    each, in units of plain cross entropy.

    The patterns: one class each (multiclass), or no label, then each label alone. In segmentation
    half of the image shows it. All patterns are one batch, as losses may divide by what a batch
    holds. The weight is the norm of the gradient with respect to the logits of an output, summed
    over networks that are right and wrong, from undecided to certain: an image has none only where
    no network gives it one. In classification the undecided network also counts alone: there a Dice
    loss trains on positives only. Every output counts for itself, since the lead can give it a part
    of the network for itself; an output without any gradient has zeros.

    Raises:
        ConfigError: the loss fails on these images, or its gradient is not finite or 0 everywhere.
    """
    targets = _patterns(task)
    annotation = Annotation(task, annotated)
    plain = annotation.loss({"name": "ce"})
    sizes = [_TO_CERTAIN]
    if task.kind == "classification":
        sizes.append(_UNDECIDED)
    weights = []
    for levels in sizes:
        try:
            gradient = _gradient(annotation.loss(), task, targets, levels)
        except Exception as error:  # whatever MONAI or an extension raises
            raise _unusable(task, one_line(error)) from error
        if not gradient.isfinite().all():
            raise _unusable(task, "the gradient is not finite")
        if not gradient.any():
            if levels is _UNDECIDED:  # an undecided network does not learn from any image
                continue
            raise _unusable(task, "the gradient is 0")
        unit = _gradient(plain, task, targets, levels)
        weights.append(torch.where(unit > 0, gradient / unit, 0.0))
    return weights


def image_weights(task: TaskConfig, weights: Tensor, shown: Tensor) -> Tensor:
    """The weight of every image for every output, float64 (N, outputs).

    Args:
        weights: one of `loss_weights`.
        shown: bool (N, classes), whether an image shows a class of `task.classes`.
    """
    if task.target == "multiclass":
        # An image of several structures has the weight of the heaviest.
        columns = [(shown * column).amax(dim=1) for column in weights.T]
        return torch.stack(columns, dim=1)
    own = weights[1:].diagonal()
    labels = shown[:, -len(task.labels) :]
    return torch.where(labels, own, weights[0])


def _patterns(task: TaskConfig) -> Tensor:
    """Targets of one image for each pattern, as in `data.loading.Split`."""
    labels = len(task.labels)
    if task.target == "multilabel":
        rows = torch.cat([torch.zeros(1, labels), torch.eye(labels)])
    else:
        rows = torch.arange(len(task.classes))
    sides = _sides(task)
    if len(rows) * task.outputs * math.prod(sides) > _MOST_NUMBERS:
        raise _unusable(task, "the task has too many labels")
    if not sides:
        return rows
    masks = rows.reshape(*rows.shape, *[1] * len(sides)).repeat(*[1] * rows.ndim, *sides)
    masks[..., sides[-1] // 2 :] = 0
    return masks


def _sides(task: TaskConfig) -> list[int]:
    if task.kind == "classification":
        return []
    return [_SIDES[task.spatial_dims]] * task.spatial_dims


def _gradient(
    loss: nn.Module, task: TaskConfig, targets: Tensor, levels: Sequence[float]
) -> Tensor:
    """The sums of the absolute gradient by image and output, float64 (patterns, outputs)."""
    zeros = torch.zeros(len(targets), task.outputs, *_sides(task))
    multiclass = task.target == "multiclass"
    truth = like_logits(targets, zeros, multiclass=multiclass)
    right = truth if multiclass else 2 * truth - 1
    total = torch.zeros(zeros.shape[:2], dtype=torch.float64)
    for level in levels:
        for sign in (1, -1):
            logits = (sign * level * right).requires_grad_()
            (slope,) = torch.autograd.grad(loss(logits, targets), logits)
            total += slope.double().abs().flatten(1).reshape(*total.shape, -1).sum(dim=2)
    return total


def _unusable(task: TaskConfig, reason: str) -> ConfigError:
    return ConfigError(
        f"loss {task.loss['name']}: a site with minimum_patients cannot tell how it weighs images "
        f"({reason}); take another loss, such as ce, dice, dice_ce or focal"
    )
