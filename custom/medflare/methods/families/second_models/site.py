"""A personal model beside the global one, as a site algorithm."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from medflare.core.message import FinalModels
from medflare.data.loading import Batch
from medflare.methods import (
    MODEL,
    SELECTED_ROUND,
    VALIDATION,
    Message,
    PersistentState,
    PersonalSite,
    Site,
    StateDict,
    Steps,
    epochs,
    trainable,
)
from medflare.methods.fedavg.site import F, final_models
from medflare.training.epochs import MeanLoss, train_together


class SecondModelSite(PersonalSite[F]):
    """FedAvg's site algorithm with a personal model, which `fit` or `personalize` sets; the site
    uses the one of the best round by its own validation.
    """

    dp_unsupported_reason = (
        "the personal model learns from the same images without noise, "
        "and its validation metric leaves the site"
    )
    personal = PersistentState("personal")  # None before the first training

    def personalize(self, round: int, shared: StateDict, trained: StateDict) -> None:
        """Sets the personal model after the global one's training.

        Args:
            round: 0-based.
            shared: the incoming global model.
            trained: the site's trained copy of it.
        """

    def validated(self, round: int, shared: StateDict) -> float | None:
        """The metric of the personal model at the start of a round; None without a model."""
        return self.selection.validated(round, self.personal, "personal")

    def train(self, round: int, incoming: Message) -> Message:
        """FedAvg's training and that of the personal model."""
        personal = self.validated(round, incoming[MODEL])
        starts = self.personal is None  # as the global model, whose metric is in the reply
        reply = super().train(round, incoming)
        reply[VALIDATION]["personal"] = reply[VALIDATION]["global"] if starts else personal
        self.personalize(round, incoming[MODEL], reply[MODEL])
        return reply

    def validate(self, round: int, incoming: Message) -> Message:
        """The validation metrics of the incoming global and of the personal model."""
        reply = super().validate(round, incoming)
        reply[VALIDATION]["personal"] = self.validated(round, incoming[MODEL])
        return reply

    def finalize(self, incoming: Message) -> FinalModels:
        """The final models: a site that has trained deploys its personal model, any other the
        global one.
        """
        if self.personal is None:
            return final_models(incoming, None)
        rounds = None
        if self.plan.server_hyper.selection == "last":  # else it is the global model's alone
            rounds = incoming.get(SELECTED_ROUND)
        return final_models(incoming, self.selection.final(self.personal, rounds))

    def fit_both(
        self,
        second: nn.Module,
        optimizer: Optimizer,
        round: int,
        losses: Callable[[Tensor, Tensor], Sequence[Tensor]],
    ) -> float:
        """A round in which every batch moves `second` and the shared model.

        Args:
            optimizer: of the shared model.
            losses: (images, targets) -> the loss of `second`, which may use the shared model's
                weights as constants, and that of the shared model.

        Returns:
            The mean loss of the shared model over all images.
        """

        def descend(of_second: Optimizer) -> float:
            steps = [Steps(of_second, self.site), Steps(optimizer, self.site)]
            means = [MeanLoss(), MeanLoss()]
            for batches in epochs(self.site, round, "model"):
                train_together(
                    steps, batches, lambda batch: losses(batch.images, batch.targets), means
                )
            return means[1].value()

        return self.optimized(second, "personal", descend)


def loss_gradients(model: nn.Module, site: Site, batch: Batch) -> list[Tensor]:
    """The gradient of the task's loss by the trainable parameters."""
    images, targets, _ = batch
    loss = site.loss(model(images), targets)
    return list(torch.autograd.grad(loss, trainable(model)))


def take_step(
    optimizer: Optimizer, weights: Sequence[nn.Parameter], gradients: Sequence[Tensor]
) -> None:
    """Take a step of the optimizer along given gradients of its weights."""
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    optimizer.step()
    optimizer.zero_grad()
