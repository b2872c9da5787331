"""The constant prediction: the best prediction that does not depend on the image. A useful model is
better.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from medflare.data.loading import Split
from medflare.tasks.config import TaskConfig
from medflare.tasks.metrics import Images, Scores
from medflare.training.scoring import BatchPrediction
from medflare.training.site import Site


def constant_value(site: Site, *, of_training: bool = True) -> float | None:
    """The task's metric of the constant prediction on a site's test images; None where it is
    undefined.

    The prediction comes from the site's training images, see `best_constant`. A site without any,
    or with `of_training` false, takes the best, in hindsight, of `plain_constants`.
    """
    if not len(site.data.test):
        return None
    task = site.task
    training = site.data.train
    constants = list(plain_constants(task))
    if of_training and len(training):
        constants = [best_constant(task, training, [site])]
    return max(_defined_metrics(task, constants, [site], "test"), default=None)


def best_constant(task: TaskConfig, training: Split, sites: Sequence[Site]) -> Tensor:
    """The first of `constant_predictions` of the training targets with the best mean of the sites'
    validation metrics.
    """
    constants = list(constant_predictions(task, training.targets))

    def mean_metric(constant: Tensor) -> float:
        values = _defined_metrics(task, [constant], sites, "validation")
        return sum(values) / len(values) if values else float("-inf")

    if len(constants) == 1:
        return constants[0]
    return max(constants, key=mean_metric)


def _defined_metrics(
    task: TaskConfig, constants: Sequence[Tensor], sites: Sequence[Site], split: str
) -> list[float]:
    """The task's metric of every constant at every site, where it is defined."""
    defined = []
    for constant in constants:
        for site in sites:
            value = score_constant(site, constant, split, (task.metric,)).values[task.metric]
            if value is not None:
                defined.append(value)
    return defined


def score_constant(site: Site, constant: Tensor, split: str, metrics: Sequence[str]) -> Scores:
    """The metrics of a constant prediction, see `constant_predictions`, on a site's split."""
    data = site.data.split(split)
    if not len(data):
        return Scores(dict.fromkeys(metrics))
    return site.measure(_repeated(constant, data, site.task), split, metrics).scores(data.patients)


def _repeated(constant: Tensor, data: Split, task: TaskConfig) -> Iterator[BatchPrediction]:
    """The prediction (outputs,) or (outputs, ...) for every image, one by one, in the size of its
    target.
    """
    sides = task.spatial_dims if task.kind == "segmentation" else 0
    for row in range(len(data)):
        target = data.targets[row]
        shape = target.shape[target.ndim - sides :]
        probabilities = constant
        if constant.ndim < 2:
            probabilities = constant.reshape(-1, *[1] * sides).expand(-1, *shape)
        yield probabilities[None], target[None], torch.tensor([row])


def constant_predictions(task: TaskConfig, targets: Images) -> Iterator[Tensor]:
    """The constant predictions that training targets suggest.

    Classification: the class frequencies, whose maximum is the majority class. Segmentation:
    `plain_constants`, and the mean of the training masks.

    Yields:
        Probabilities (outputs,), or (outputs, H, W) for a mean mask, which needs targets of one
        size.

    Examples:
        >>> from types import SimpleNamespace
        >>> grades = SimpleNamespace(kind="classification", target="multiclass", outputs=3)
        >>> list(constant_predictions(grades, torch.tensor([0, 2, 2, 2])))
        [tensor([0.2500, 0.0000, 0.7500])]
    """
    if task.kind == "classification":
        yield _probabilities(task, targets).mean(dim=0)
        return
    yield from plain_constants(task)
    if task.image_mode == "resize" and len(targets):
        total = torch.zeros(())
        for target in targets:
            total = total + _probabilities(task, target[None])[0]
        mean = total / len(targets)
        if task.target == "multiclass":
            yield mean
            return
        # Of the masks that must cover a pixel for the mean mask to cover it.
        for fraction in (0.1, 0.2, 0.3, 0.4, 0.5):
            yield (mean > fraction).float()


def plain_constants(task: TaskConfig) -> Iterator[Tensor]:
    """Probabilities (outputs,) without any training image: one class everywhere (multiclass), else
    nothing and everything.
    """
    if task.target == "multiclass":
        yield from torch.eye(task.outputs)  # in segmentation class 0 is the background
    else:
        yield torch.zeros(task.outputs)
        yield torch.ones(task.outputs)


def _probabilities(task: TaskConfig, targets: Tensor) -> Tensor:
    """Targets as probabilities, float (N, outputs, ...)."""
    if task.target == "multiclass":
        return F.one_hot(targets.long(), task.outputs).movedim(-1, 1).float()
    return targets[:, None].float() if task.target == "binary" else targets.float()
