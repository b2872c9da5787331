"""The constant answer: the best that looks at no image. A model that is not above it has learnt nothing that helps."""

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from medflare.data.loading import Split
from medflare.tasks.classes import Cases
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Images, Scores
from medflare.training.scoring import BatchPrediction
from medflare.training.site import Site

NEAR: Final = 0.01  # of a metric; a value this near to the constant answer's says no more than the constant does
_SHARES: Final = (0.1, 0.2, 0.3, 0.4, 0.5)  # of training masks that must cover a pixel for a mean mask to cover it


def is_at_chance(value: float, constant: float) -> bool:
    """Whether a metric from 0 to 1, of which more is better, is not above that of the constant answer; 1 is never at chance.

    Args:
        value: of a model.
        constant: of the constant answer on the same images.

    Examples:
        >>> is_at_chance(0.505, 0.5), is_at_chance(0.25, 0.5), is_at_chance(0.75, 0.5), is_at_chance(1.0, 1.0)
        (True, True, False, False)
    """
    return value <= constant + NEAR and value < 1 - NEAR


def constant_value(site: Site) -> float | None:
    """The task's metric of the constant answer on a site's test images; None where it is undefined.

    The answer is that of the site's training images, see `best_constant`. A site without any (one that never trains) takes the best, in
    hindsight, of those that need none: every class, no pixel, all of a structure.

    Args:
        site: whose images are answered for.
    """
    task, training = site.task, site.data.train
    answers = [best_constant(task, training, [site])] if len(training) else list(plain_constants(task))
    values = [score_constant(site, answer, "test", (task.metric,)).values[task.metric] for answer in answers]
    return max((value for value in values if value is not None), default=None)


def best_constant(task: TaskConfig, training: Split, judges: Sequence[Site]) -> Tensor:
    """The constant answer that is best by the mean of the judges' validation metrics; ties go to the earliest.

    Args:
        task: gives kind, target, classes and metric.
        training: whose targets suggest answers.
        judges: sites with validation images.

    Returns:
        Probabilities, see `constant_predictions`.
    """
    answers = list(constant_predictions(task, training.targets))

    def value(answer: Tensor) -> float:
        found = [score_constant(judge, answer, "validation", (task.metric,)).values[task.metric] for judge in judges]
        defined = [one for one in found if one is not None]
        return sum(defined) / len(defined) if defined else float("-inf")

    return answers[0] if len(answers) == 1 else max(answers, key=value)


def score_constant(site: Site, answer: Tensor, split: str, metrics: Sequence[str]) -> Scores:
    """The metrics of a constant answer on a split.

    Args:
        site: whose images are answered for.
        answer: probabilities, see `constant_predictions`.
        split: "validation" or "test".
        metrics: names, of `TaskConfig.metrics`.
    """
    samples = site.data.split(split)
    if not len(samples):
        return Scores(dict.fromkeys(metrics), cases=Cases())
    return site.measure(_repeated(answer, samples, site.task), split, metrics).scores(samples.patients)


def _repeated(answer: Tensor, samples: Split, task: TaskConfig) -> Iterator[BatchPrediction]:
    """The answer (outputs,) or (outputs, ...) for every image, one by one, in the size of its target."""
    sides = task.spatial_dims if task.kind == "segmentation" else 0
    for row in range(len(samples)):
        target = samples.targets[row]
        shape = target.shape[target.ndim - sides :]
        whole = answer if answer.ndim > 1 else answer.reshape(-1, *[1] * sides).expand(-1, *shape)
        yield whole[None], target[None], torch.tensor([row])


def constant_predictions(task: TaskConfig, targets: Images) -> Iterator[Tensor]:
    """The constant answers that training targets suggest.

    Classification: the classes' shares of the training images, so that the majority class is chosen. Segmentation: `plain_constants`, and
    the mean of the training masks.

    Args:
        task: gives kind, target and classes.
        targets: of the training images, as in `data.loading.Split`.

    Yields:
        Probabilities (outputs,), or (outputs, H, W) for a mean mask, which needs targets of one size.

    Examples:
        >>> from types import SimpleNamespace
        >>> grades = SimpleNamespace(kind="classification", target="multiclass", outputs=3)
        >>> list(constant_predictions(grades, torch.tensor([0, 2, 2, 2])))
        [tensor([0.2500, 0.0000, 0.7500])]
    """
    if task.kind == "classification":
        yield _frequencies(task, targets, task.outputs).mean(dim=0)
        return
    yield from plain_constants(task)
    if task.image_mode == "resize" and len(targets):
        mean = sum((_frequencies(task, target[None], task.outputs)[0] for target in targets), torch.zeros(())) / len(targets)
        if task.target == "multiclass":
            yield mean
        else:
            yield from ((mean > share).float() for share in _SHARES)


def plain_constants(task: TaskConfig) -> Iterator[Tensor]:
    """The constant answers that need no training image: one class for every image or pixel (multiclass), else nothing or everything.

    Args:
        task: gives target and outputs.

    Yields:
        Probabilities (outputs,).
    """
    if task.target == "multiclass":
        yield from torch.eye(task.outputs)  # in segmentation class 0 is the background
    else:
        yield from (torch.zeros(task.outputs), torch.ones(task.outputs))


def _frequencies(task: TaskConfig, targets: Tensor, outputs: int) -> Tensor:
    """Targets as probabilities, float (N, outputs, ...)."""
    if task.target == "multiclass":
        return F.one_hot(targets.long(), outputs).movedim(-1, 1).float()
    return targets[:, None].float() if task.target == "binary" else targets.float()
