"""First-order Per-FedAvg (Fallah et al. 2020, Alg. 1, FO): a shared model to adapt by one step.

Both steps are those of the task's optimizer: plain SGD steps at the learning rate of a task with
Adam hardly move a model.
"""

from collections.abc import Iterable, Iterator
from functools import partial

from torch import nn
from torch.optim import Optimizer

from medflare.core.rng import seeded
from medflare.data.loading import Batch
from medflare.methods import (
    FeatureNetwork,
    FedAvgSite,
    FedAvgSiteHyper,
    Site,
    StateDict,
    copied_state,
    epochs,
    trainable,
)
from medflare.methods.families.second_models.site import SecondModelSite, loss_gradients, take_step
from medflare.methods.parts.few_patients import first_batches, mean_gradients
from medflare.networks.features import overwrite
from medflare.training.epochs import preserved_moments


def train_per_fedavg(model: nn.Module, site: Site, round: int, optimizer: Optimizer) -> None:
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
                take_step(optimizer, weights, loss_gradients(model, site, first))
            gradients = loss_gradients(model, site, second)
            overwrite(weights, start)
            take_step(optimizer, weights, gradients)


def adapt(model: nn.Module, site: Site, round: int, optimizer: Optimizer) -> None:
    """Adapt a model in place by a step on one training batch, see `few_patients`."""
    model.train()
    with seeded(site.seed, site.name, round, "adapt", "dropout"):
        batches = first_batches(site, round, "adapt")
        gradients = mean_gradients(batches, partial(loss_gradients, model, site))
        take_step(optimizer, trainable(model), gradients)


def adapted(algorithm: FedAvgSite, round: int, shared: StateDict, purpose: str) -> StateDict:
    """The personal model: the shared one after `adapt`, whose optimizer starts from the shared
    model's moments (`purpose`) and does not change them.
    """
    model = algorithm.network("personal", shared)
    optimizer = algorithm.site.optimizer(trainable(model))
    if not algorithm.hyper.reset_optimizer:
        algorithm.optimizers.recall(purpose, optimizer)
    adapt(model, algorithm.site, round, optimizer)
    return copied_state(model)


def _pairs(batches: Iterable[Batch]) -> Iterator[tuple[Batch, Batch]]:
    first = None
    count = 0
    for batch in batches:
        count += 1
        if first is None:
            first = batch
        else:
            yield first, batch
            first = None
    if first is not None and count == 1:
        yield first, first


class PerFedAvgSite(SecondModelSite[FedAvgSiteHyper]):
    """Trains the shared model for the step after it; that step makes the personal model."""

    accumulates = False

    def validated(self, round: int, shared: StateDict) -> float | None:
        self.personal = adapted(self, round, shared, "model")
        return super().validated(round, shared)

    def fit(self, model: FeatureNetwork, optimizer: Optimizer, round: int) -> float | None:
        train_per_fedavg(model, self.site, round, optimizer)
        return None
