"""Sites that annotated some of a task's structures only: what losses and metrics of such a site are about."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor, nn

from medflare.core.errors import ConfigError
from medflare.tasks.config import TaskConfig
from medflare.tasks.losses import build_loss

_BY_CLASS: Final = ("weights", "weight", "dist_matrix")  # arguments of losses, ours and MONAI's, that have a number for every class


def marginal_logits(logits: Tensor, kept: Sequence[int]) -> Tensor:
    """Logits over the classes that were annotated, in which the background stands for itself and for all others.

    The softmax of the result is the marginal probability: q_0 = p_0 + sum of p_c over the classes c that were not annotated, and q_c = p_c
    for the others (Shi et al., "Marginal loss and exclusion loss for partially supervised multi-organ segmentation", Medical Image
    Analysis 70, 2021, Sec. 3.2), since log(sum of exp(logit)) is the logit of a sum of probabilities.

    Args:
        logits: (N, classes, ...), class 0 is the background.
        kept: the classes that remain, in order: 0 and those that were annotated.

    Returns:
        (N, len(kept), ...); the logits themselves where all classes are kept.

    Raises:
        ValueError: `kept` does not begin with the background, or holds no other class.

    Examples:
        >>> probabilities = torch.tensor([[0.5, 0.2, 0.3]])
        >>> marginal_logits(probabilities.log(), [0, 1]).softmax(dim=1)
        tensor([[0.8000, 0.2000]])
    """
    if len(kept) < 2 or kept[0] != 0:
        raise ValueError(f"the background and at least one structure must remain, got classes {list(kept)}")
    if len(kept) == logits.shape[1]:
        return logits
    merged = [place for place in range(logits.shape[1]) if place not in kept[1:]]
    return torch.cat([logits[:, merged].logsumexp(dim=1, keepdim=True), logits[:, list(kept[1:])]], dim=1)


class Annotation:
    """The structures of a segmentation task that a site annotated.

    Where it is not all of them, what was not annotated is neither learnt nor measured: a softmax is marginal over it, see
    `marginal_logits`, and of several sigmoids the others are left out.

    Args:
        names: labels of the structures; None: all.

    Raises:
        ConfigError: none, one that the task does not have, or names for a classification task.

    Attributes:
        names: the annotated structures in the task's order.
        missing: the others.
        outputs: outputs of the network that remain; with a softmax the background's first.
    """

    def __init__(self, task: TaskConfig, names: Sequence[str] | None = None):
        structures = structures_of(task)
        if names is not None and task.kind != "segmentation":
            raise ConfigError(f"annotated is for structures that are segmented, task {task.name} classifies; leave it out")
        strange = [name for name in names or () if name not in task.labels]
        if strange or (names is not None and not set(names) & set(structures)):
            wrong = f"{strange[0]!r} is none of them" if strange else "it names none"
            raise ConfigError(f"annotated takes structures of task {task.name} ({', '.join(structures)}); {wrong}")
        self.task = task
        self.names = structures if names is None else tuple(name for name in structures if name in names)
        self.missing = tuple(name for name in structures if name not in self.names)
        self._columns = [place for place, name in enumerate(structures) if name in self.names]
        background = task.target == "multiclass" and task.kind == "segmentation"
        self.outputs = (0, *(place + 1 for place in self._columns)) if background else tuple(self._columns)

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not self.missing

    @cached_property
    def reduced(self) -> TaskConfig:
        """The task as if it had no other structures."""
        return self.task if self.complete else replace(self.task, labels=tuple(self.task.labels[place] for place in self.outputs))

    def logits(self, logits: Tensor) -> Tensor:
        """Logits (N, outputs, ...) of the task as those of `reduced`."""
        if self.complete:
            return logits
        return marginal_logits(logits, self.outputs) if self.task.target == "multiclass" else logits[:, list(self.outputs)]

    def targets(self, targets: Tensor) -> Tensor:
        """Targets of the task, as in `data.splits.Split`, as those of `reduced`: what was not annotated is background."""
        if self.complete:
            return targets
        if self.task.target == "multilabel":
            return targets[:, list(self.outputs)]
        table = torch.zeros(len(self.task.labels), dtype=targets.dtype, device=targets.device)
        for place, output in enumerate(self.outputs):
            table[output] = place
        return table[targets]

    def masks(self, masks: Tensor) -> Tensor:
        """Masks (N, structures, ...), see `tasks.metrics.structures`, of what was annotated."""
        return masks if self.complete else masks[:, self._columns]

    def loss(self, spec: Mapping[str, Any] | None = None) -> nn.Module:
        """The loss of a site with these annotations, see `losses.build_loss`; numbers of single classes are those of the ones that remain.

        Args:
            spec: of the loss; None: the task's.
        """
        if self.complete:
            return build_loss(self.task, spec)
        settings, scale = _of_outputs(dict(spec or self.task.loss), self), 1.0
        if settings["name"] == "focal" and len(self.outputs) == 1 and settings.get("weights") is not None:
            (scale,) = settings.pop("weights")  # that loss takes none for one output, which they would only scale
        return _Marginal(self, build_loss(self.reduced, settings), scale)


class _Marginal(nn.Module):
    """A loss of the structures that were annotated."""

    def __init__(self, annotation: Annotation, loss: nn.Module, scale: float):
        super().__init__()
        self._annotation, self._loss, self._scale = annotation, loss, scale

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of logits (N, outputs, ...) of the whole task, a scalar."""
        value: Tensor = self._loss(self._annotation.logits(logits), self._annotation.targets(targets))
        return self._scale * value


def structures_of(task: TaskConfig) -> tuple[str, ...]:
    """Labels of what a task segments: all but the background of exclusive classes.

    Args:
        task: of segmentation; of classification all labels are given.
    """
    return task.labels[1:] if task.kind == "segmentation" and task.target == "multiclass" else task.labels


def _of_outputs(spec: dict[str, Any], annotation: Annotation) -> dict[str, Any]:
    """The arguments of a loss with the weights and distances of those classes alone that remain."""
    count, outputs = annotation.task.outputs, annotation.outputs
    without_background = not spec.get("include_background", True) and annotation.task.target == "multiclass"

    def chosen(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        if len(value) == count - 1 and without_background:
            return [chosen(value[place - 1]) for place in outputs[1:]]
        return [chosen(value[place]) for place in outputs] if len(value) == count else value

    return spec | {name: chosen(spec[name]) for name in _BY_CLASS if name in spec}
