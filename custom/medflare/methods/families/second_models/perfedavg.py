"""First-order Per-FedAvg (Fallah et al. 2020, Alg. 1, FO): a shared model to adapt by one step.

Both steps are those of the task's optimizer: plain SGD steps at the learning rate of a task with
Adam hardly move a model.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import nn

from medflare.core.rng import seeded
from medflare.core.states import StateDict, copy_state
from medflare.data.loading import Batch
from medflare.methods.families.second_models.site import SecondModelSite, gradients_of, take_step
from medflare.methods.fedavg.site import FedAvgSiteHyper
from medflare.networks.features import FeatureNetwork
from medflare.training.epochs import epochs, preserved_moments, trainable
from medflare.training.site import Site


def train_per_fedavg(
    model: nn.Module, site: Site, round: int, optimizer: torch.optim.Optimizer
) -> None:
    """One round of the shared model in place.

        θ' = θ - α g(θ; B1),   θ <- θ - β g(θ'; B2)

    Both steps are the optimizer's; the inner one uses its moments without changing them. B1 and B2
    are consecutive mini-batches; a last batch without a partner is left out, unless it is the only
    one, which is then both.
    """
    weights = trainable(model)
    model.train()
    for epoch in epochs(site, round, "personal"):
        for first, second in _pairs(epoch):
            start = [weight.detach().clone() for weight in weights]
            with preserved_moments(optimizer):
                take_step(optimizer, weights, gradients_of(model, site, first))
            gradients = gradients_of(model, site, second)
            with torch.no_grad():
                for weight, origin in zip(weights, start, strict=True):
                    weight.copy_(origin)
            take_step(optimizer, weights, gradients)


def adapt(model: nn.Module, site: Site, round: int, optimizer: torch.optim.Optimizer) -> None:
    """The adaptation in place: a step on one training batch."""
    model.train()
    with seeded(site.seed, site.name, round, "adapt", "dropout"):
        batch = next(site.batches("train", round, "adapt", 0))
        take_step(optimizer, trainable(model), gradients_of(model, site, batch))


def _pairs(batches: Iterable[Batch]) -> Iterator[tuple[Batch, Batch]]:
    rest = iter(batches)
    for first in islice(rest, 1):
        yield first, next(rest, first)
    yield from zip(rest, rest, strict=False)


class PerFedAvgSite(SecondModelSite[FedAvgSiteHyper]):
    """Trains the shared model for the step after it; that step makes the personal model."""

    accumulates = False

    def validated(self, round: int, shared: StateDict) -> float | None:
        model = self.network("personal", shared)
        optimizer = self.site.optimizer(trainable(model))
        if not self.hyper.reset_optimizer:
            self.optimizers.recall("model", optimizer)  # read only
        adapt(model, self.site, round, optimizer)
        self.personal = copy_state(model.state_dict())
        return super().validated(round, shared)

    def fit(
        self, model: FeatureNetwork, optimizer: torch.optim.Optimizer, round: int
    ) -> float | None:
        train_per_fedavg(model, self.site, round, optimizer)
        return None
