"""Sites that annotated only some of a task's structures: their losses and metrics."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from medflare.core.errors import ConfigError
from medflare.core.text import Json, JsonDict
from medflare.tasks.config import TaskConfig
from medflare.tasks.losses import build_loss

# Arguments of losses, ours and MONAI's, with a number for every class.
_PER_CLASS = ("weights", "weight", "dist_matrix")
# Loss -> its weights, which for one class would only scale it, and are refused or ignored there.
_SCALES = {
    "focal": "weights",
    "DiceLoss": "weight",
    "DiceFocalLoss": "weight",
    "FocalLoss": "weight",
}


def marginal_logits(logits: Tensor, kept: Sequence[int]) -> Tensor:
    """Logits over the annotated classes, in which class 0 stands for the background and all classes
    that are not annotated.

    The softmax of the result is the marginal probability: q_0 = p_0 + sum of p_c over the classes c
    that were not annotated, and q_c = p_c for the others (Shi et al., "Marginal loss and exclusion
    loss for partially supervised multi-organ segmentation", Medical Image Analysis 70, 2021,
    Sec. 3.2), since log(sum of exp(logit)) is the logit of a sum of probabilities.

    Args:
        logits: (N, classes, ...), class 0 is the background.
        kept: the remaining classes in order: 0 and the annotated ones, at least one.

    Returns:
        (N, len(kept), ...); the logits themselves if all classes are kept.

    Raises:
        ValueError: `kept` does not begin with the background, or has no other class.

    Examples:
        >>> probabilities = torch.tensor([[0.5, 0.2, 0.3]])
        >>> marginal_logits(probabilities.log(), [0, 1]).softmax(dim=1)
        tensor([[0.8000, 0.2000]])
    """
    if len(kept) < 2 or kept[0] != 0:
        raise ValueError(
            f"the background and at least one structure must remain, got classes {list(kept)}"
        )
    if len(kept) == logits.shape[1]:
        return logits
    annotated = list(kept[1:])
    merged = [channel for channel in range(logits.shape[1]) if channel not in annotated]
    # Sec. 3.2: q_0 is the sum of the probabilities that are merged.
    background = logits[:, merged].logsumexp(dim=1, keepdim=True)
    return torch.cat([background, logits[:, annotated]], dim=1)


class Annotation:
    """The structures of a segmentation task that a site annotated.

    Structures that are not annotated are neither learned nor measured: a softmax is marginal over
    them, see `marginal_logits`; sigmoid outputs are left out. ConfigError for an unknown name, or
    names for a classification task; None: all are annotated; no name: the site has no labels, also
    for classification.

    Attributes:
        names: the annotated structures in the task's order.
        missing: the others.
        complete: whether there are no others.
        outputs: outputs of the network that remain; with a softmax the background's first.
    """

    def __init__(self, task: TaskConfig, names: Sequence[str] | None = None):
        structures = task.structures
        if names is None:
            names = structures
        elif names and task.kind != "segmentation":
            raise ConfigError(
                f"annotated is for segmentation, task {task.name} is a classification; leave it out"
            )
        unknown = [name for name in names if name not in task.labels]
        self.task = task
        self.names = tuple(name for name in structures if name in names)
        self.missing = tuple(name for name in structures if name not in names)
        self.complete = not self.missing
        if unknown or (names and not self.names):
            raise ConfigError(
                f"annotated needs structures of task {task.name} ({', '.join(structures)}), "
                f"got {unknown or list(names)}"
            )
        self._columns = [structures.index(name) for name in self.names]
        is_kept = [label not in self.missing for label in task.labels]
        self.outputs = tuple(output for output, kept in enumerate(is_kept) if kept)

    @cached_property
    def reduced(self) -> TaskConfig:
        """The task with the annotated structures only."""
        if self.complete:
            return self.task
        labels = tuple(self.task.labels[output] for output in self.outputs)
        return replace(self.task, labels=labels, label_values={}, codes={})

    def logits(self, logits: Tensor) -> Tensor:
        """Logits (N, outputs, ...) of the task as logits of `reduced`."""
        if self.complete:
            return logits
        if self.task.target == "multiclass":
            return marginal_logits(logits, self.outputs)
        return logits[:, list(self.outputs)]

    def targets(self, targets: Tensor) -> Tensor:
        """Targets of the task, as in `data.loading.Split`, as targets of `reduced`: structures that
        are not annotated are background.
        """
        if self.complete:
            return targets
        if self.task.target == "multilabel":
            return targets[:, list(self.outputs)]
        table = torch.zeros(len(self.task.labels), dtype=targets.dtype, device=targets.device)
        for index, output in enumerate(self.outputs):
            table[output] = index
        return table[targets]

    def masks(self, masks: Tensor) -> Tensor:
        """The annotated ones of masks (N, structures, ...), see `tasks.metrics.structures`."""
        return masks if self.complete else masks[:, self._columns]

    def loss(self, spec: Json | None = None) -> nn.Module:
        """The loss by `spec` (default: the task's) of a site with these annotations; class weights
        are those of the remaining classes.
        """
        if self.complete:
            return build_loss(self.task, spec)
        if not self.names:
            return _NoLoss()
        settings = _for_outputs(dict(spec or self.task.loss), self)
        scale = 1.0
        argument = _SCALES.get(settings["name"], "")
        weights = settings.get(argument)
        if isinstance(weights, list | tuple) and len(weights) == 1:
            (scale,) = settings.pop(argument)
        return _Marginal(self, build_loss(self.reduced, settings), scale)


class _NoLoss(nn.Module):
    """The loss of a site without labels."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        raise ConfigError(
            "the site has no labels, and the method trains with labels; "
            "run mean_teacher, or take the site out"
        )


class _Marginal(nn.Module):
    """A loss of the annotated structures, of logits (N, outputs, ...) of the whole task."""

    def __init__(self, annotation: Annotation, loss: nn.Module, scale: float):
        super().__init__()
        self._annotation = annotation
        self._loss = loss
        self._scale = scale

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        logits = self._annotation.logits(logits)
        value = self._loss(logits, self._annotation.targets(targets))
        return self._scale * value


def _for_outputs(spec: JsonDict, annotation: Annotation) -> JsonDict:
    """The arguments of a loss with the weights and distances of the remaining classes only."""
    classes = annotation.task.outputs
    is_multiclass = annotation.task.target == "multiclass"
    without_background = is_multiclass and not spec.get("include_background", True)

    def of_outputs(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        if len(value) == classes - 1 and without_background:
            return [of_outputs(value[output - 1]) for output in annotation.outputs[1:]]
        if len(value) == classes:
            return [of_outputs(value[output]) for output in annotation.outputs]
        return value

    return spec | {name: of_outputs(spec[name]) for name in _PER_CLASS if name in spec}
