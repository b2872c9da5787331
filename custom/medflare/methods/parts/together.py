"""Lessons of several sites as one batch: what `train_epochs` does for one model after the other, by one pass over all of them.

The sites' networks are one network with other numbers, so that they are computed side by side over stacked weights (`torch.vmap`).
Batches, gradients, corrections, clipping, steps and moments stay each site's own: a site that has fewer batches, or a smaller last one,
goes through the same numbers as alone, up to the order of sums.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from medflare.core.errors import Aborted, ConfigError, MedflareError, one_line
from medflare.core.states import StateDict
from medflare.data.splits import Batch
from medflare.methods.parts.steps import Steps
from medflare.methods.parts.training import Lesson, passes, weighted_sum
from medflare.networks.catalogue import meta_network
from medflare.networks.library import PROBLEMS
from medflare.networks.structure import example
from medflare.tasks.config import TaskConfig
from medflare.tasks.library_losses import trial
from medflare.tasks.losses import build_loss

Loss = Callable[[Tensor, Tensor], Tensor]  # (logits, targets) -> scalar


def train_together(lessons: Sequence[Lesson]) -> list[float | MedflareError]:
    """Every lesson as `train_epochs` does it; models and optimizers are changed in place.

    Args:
        lessons: of one task, on one device.

    Returns:
        Of each lesson the mean loss over its images, NaN without any; or why its site could not go on.

    Raises:
        Aborted: a site was asked to stop.
    """
    learners = [_Learner(lesson) for lesson in lessons]
    own = [dict(lesson.model.named_buffers()) for lesson in lessons]
    statistics = stacked(own)
    while groups := _alike(learners):
        for rows in groups:
            _learn(learners, rows, statistics)
    with torch.no_grad():
        for row, buffers in enumerate(own):
            for name, buffer in buffers.items():
                buffer.copy_(statistics[name][row])
    return [learner.outcome for learner in learners]


class _Learner:
    """A lesson on its way.

    Attributes:
        batch: what is learnt from next; None: nothing is left.
        outcome: mean loss so far, or what ended the lesson.
    """

    def __init__(self, lesson: Lesson):
        self.lesson = lesson
        self.model = lesson.model.train()
        self.weights: StateDict = dict(lesson.model.named_parameters())
        self.steps = Steps(lesson.optimizer, lesson.site, lesson.correct)
        self.batch: Batch | None = None
        self._batches = self._all_batches()
        self._losses: list[Tensor] = []
        self._sizes: list[int] = []
        self._problem: MedflareError | None = None

    def advance(self) -> Batch | None:
        """The next batch; a site that cannot give it has none left, and the others go on."""
        try:
            self.batch = next(self._batches, None)
        except Aborted:
            raise
        except MedflareError as error:
            self.batch, self._problem = None, error
        return self.batch

    def take(self, loss: Tensor) -> Tensor:
        """Note the batch's loss; returns what to go backward from."""
        assert self.batch is not None
        images = len(self.batch.images)
        self._losses.append(loss.detach())
        self._sizes.append(images)
        return self.steps.share(loss, images)

    @property
    def outcome(self) -> float | MedflareError:
        """The mean loss over the images so far, or the problem."""
        if self._problem is not None:
            return self._problem
        return weighted_sum(self._losses, self._sizes) / sum(self._sizes) if self._sizes else math.nan

    def _all_batches(self) -> Iterator[Batch]:
        lesson = self.lesson
        for batches in passes(lesson.site, lesson.round, lesson.purpose, count=lesson.count):
            yield from batches


def _alike(learners: Sequence[_Learner]) -> list[list[int]]:
    """Who has a batch left, by number; those whose batches have one size stand together, since layers may mix the images of a batch.

    Their sites have annotated the same structures, too, so that they have one loss.
    """
    groups: dict[object, list[int]] = {}
    for row, learner in enumerate(learners):
        if (batch := learner.advance()) is not None:
            groups.setdefault((batch.images.shape, batch.targets.shape, learner.lesson.site.annotation.names), []).append(row)
    return list(groups.values())


def _learn(learners: Sequence[_Learner], rows: list[int], statistics: StateDict) -> None:
    """A step of those in `rows`, whose batches have one size.

    Args:
        learners: all of them.
        rows: who steps.
        statistics: name -> buffers of all networks (K, ...), changed in place.
    """
    stepping = [learners[row] for row in rows]
    whole = len(rows) == len(learners)
    part = statistics if whole else {name: tensor[rows] for name, tensor in statistics.items()}
    batches = [learner.batch for learner in stepping if learner.batch is not None]
    images, targets = (torch.stack([batch[place] for batch in batches]) for place in range(2))
    weights = stacked([learner.weights for learner in stepping])
    losses = losses_together(stepping[0].model, stepping[0].lesson.site.loss, weights, part, images, targets)
    torch.stack([learner.take(loss) for learner, loss in zip(stepping, losses, strict=True)]).sum().backward()
    for learner in stepping:
        learner.steps.settle()
    if not whole:
        for name, tensor in part.items():
            statistics[name][rows] = tensor


def losses_together(network: nn.Module, loss: Loss, weights: StateDict, statistics: StateDict, images: Tensor, targets: Tensor) -> Tensor:
    """Losses (K,) of K networks that differ in their numbers alone, each of its own batch.

    Args:
        network: one of them; its own numbers are not used.
        loss: of logits and targets, a scalar.
        weights: name -> parameters (K, ...).
        statistics: name -> buffers (K, ...); what a pass changes of them is changed in place.
        images: (K, N, C, ...).
        targets: (K, N, ...).
    """

    def of_one(weights: StateDict, statistics: StateDict, images: Tensor, targets: Tensor) -> Tensor:
        return loss(functional_call(network, {**weights, **statistics}, (images,)), targets)

    losses: Tensor = vmap(of_one)(weights, statistics, images, targets)
    return losses


def stacked(states: Sequence[StateDict]) -> StateDict:
    """States of one kind as one, name -> (K, ...); gradients find their way back.

    Args:
        states: K of them.

    Examples:
        >>> stacked([{"w": torch.tensor(1.0)}, {"w": torch.tensor(2.0)}])
        {'w': tensor([1., 2.])}
    """
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def check_together(task: TaskConfig) -> None:
    """Before anything starts: the task's networks and losses can be computed side by side; see `networks.dry_run`.

    Args:
        task: what is to be learnt.

    Raises:
        ConfigError: the task's steps are others than those of fp32 after every batch; its network draws random numbers in training, or
            asks for what stacked weights do not tell; or its loss does.
    """
    for setting, plain in (("precision", "fp32"), ("accumulate", 1)):
        if (value := getattr(task, setting)) != plain:
            raise ConfigError(f"together: sites train in fp32, a step for every batch; task.{setting} is {value!r}, set {plain!r}")
    network = meta_network(task).train()
    images = torch.stack([example(task.image_channels, task.size, "meta")] * 2)
    weights, statistics = (stacked([dict(found)] * 2) for found in (network.named_parameters(), network.named_buffers()))
    _try(
        f"network {task.network['name']}",
        lambda: losses_together(network, lambda logits, _: logits.sum(), weights, statistics, images, images),
    )
    logits, targets = (torch.stack([values] * 2) for values in trial(task))
    _try(f"loss {task.loss['name']}", lambda: vmap(build_loss(task))(logits, targets))


def _try(what: str, compute: Callable[[], object]) -> None:
    try:
        compute()
    except PROBLEMS as error:
        reason = one_line(error)
        if "random operation" in reason:
            remedy = "switch off its dropout, or leave out together"
            raise ConfigError(f"together: {what} draws random numbers in training; {remedy}") from error
        raise ConfigError(f"together: {what} cannot be computed for several sites at once ({reason}); leave out together") from error
