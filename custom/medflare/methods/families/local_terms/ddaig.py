"""DDAIG (Zhou et al., "Deep Domain-Adversarial Image Generation for Domain Generalisation", AAAI
2020), with FedAvg as in FedDAG's tables.

    G: min  l(F(x^), y) - l(D(x^), d),   x^ = x + λ G(x)
    F: min  (1 - α) l(F(x), y) + α l(F(x^), y),   D: min  l(D(x), d)

The generator G makes images whose label F still recognizes and whose domain D does not. FedDAG's
comparison isolates the data of the sites and averages by FedAvg; it remarks that DDAIG depends on
the domain labels. A site has one domain, its number d, and D alone at a site would learn a
constant: so G and D are averaged beside F, and D tells the sites apart through the mean.

l is the task's loss for F and the cross entropy for D, a small_cnn. λ is in deviations of the batch
by channel, as the paper's images have values from 0 to 1. F's running statistics are those of the
originals. A warm-up without x^ (the code's default is none) is left out.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from medflare.core.rng import seeded
from medflare.methods import (
    MEASURED,
    MODEL,
    FeatureNetwork,
    FedAvgServer,
    FedAvgServerHyper,
    FedAvgSite,
    FedAvgSiteHyper,
    Message,
    PersistentState,
    Plan,
    Replies,
    ServerContext,
    StateDict,
    Step,
    TensorSpec,
    asks,
    copied_state,
    param,
    phase,
    site_models,
    strict_dataclass,
)
from medflare.methods.feddag.generator import DomainGenerator, generated
from medflare.methods.parts.normalisation import still_statistics
from medflare.networks.catalogue import task_network


@strict_dataclass
class DDAIGHyper(FedAvgSiteHyper):
    """The generated images."""

    lam: float = param(
        0.3, "strength of the perturbation", symbol="λ", source="authors' code", low=0
    )
    alpha: float = param(
        0.5,
        "weight of generated images; 0: FedAvg",
        symbol="α",
        source="authors' code",
        low=0,
        high=1,
    )


def _networks(plan: Plan, seed: int) -> nn.ModuleList:
    """The common initial G and D."""
    task = plan.task
    with seeded(seed, "initial", "ddaig"):
        generator = DomainGenerator(task.image_channels, dims=task.spatial_dims)
        domains = task_network(task, {"name": "small_cnn"}, len(plan.sites))
    return nn.ModuleList([generator, domains])


def _template(plan: Plan) -> StateDict:
    with torch.device("meta"):
        return _networks(plan, 0).state_dict()


NETWORKS = TensorSpec(
    "networks",
    "the site's generator of perturbations and its classifier of sites, for the mean",
    _template,
)


class DDAIGSite(FedAvgSite[DDAIGHyper]):
    """Trains generator, domain classifier and model on every batch."""

    accumulates = False
    freezes = False
    networks: nn.ModuleList  # G and D of the round, set by `train`

    @phase(request=(MODEL, NETWORKS), reply=(MODEL, NETWORKS), meta=MEASURED)
    def train(self, round: int, incoming: Message) -> Message:
        """FedAvg's training; the reply holds all three networks."""
        self.networks = _networks(self.plan, self.site.seed).to(self.site.device)
        self.networks.load_state_dict(incoming[NETWORKS])
        reply = super().train(round, incoming)
        reply[NETWORKS] = copied_state(self.networks)
        return reply

    def fit(self, model: FeatureNetwork, optimizer: Optimizer, round: int) -> float | None:
        """Epochs of all three networks; returns the model's mean loss."""
        generator, domains = self.networks
        second = self.site.optimizer(self.networks.parameters())
        number = self.plan.sites.index(self.site.name)

        def descend(value: Tensor, network: nn.Module) -> None:
            second.zero_grad()
            value.backward(inputs=list(network.parameters()))
            second.step()

        def perturbed(images: Tensor) -> Tensor:
            unit = images.std((0, *range(2, images.ndim)), correction=0, keepdim=True)
            return generated(images, generator(images), self.hyper.lam, unit)

        def loss(network: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
            domain = torch.full((len(images),), number, device=images.device)
            with still_statistics(network):
                x_hat = perturbed(images)
                of_domain = functional.cross_entropy(domains(x_hat), domain)
                descend(self.site.loss(network(x_hat), targets) - of_domain, generator)
                x_hat = perturbed(images).detach()
                of_generated = self.site.loss(network(x_hat), targets)
            descend(functional.cross_entropy(domains(images), domain), domains)
            of_originals = self.site.loss(network(images), targets)
            return (1 - self.hyper.alpha) * of_originals + self.hyper.alpha * of_generated

        with self.continued({"ddaig": second}):
            return self.descend(model, optimizer, round, loss)


class DDAIGServer(FedAvgServer[FedAvgServerHyper]):
    """FedAvg's server algorithm; it averages G and D as the model."""

    site_algorithm = DDAIGSite
    freezes = False
    networks = PersistentState("networks")

    def __init__(self, context: ServerContext):
        super().__init__(context)
        self.networks = copied_state(_networks(context.plan, context.seed))

    @asks(DDAIGSite.train)
    def request_of_training(self, step: Step, site: str) -> Message:
        """FedAvg's message with G and D."""
        message = self.request_of_model(step, site)
        message[NETWORKS] = self.networks
        return message

    def aggregate_models(self, step: Step, replies: Replies) -> None:
        super().aggregate_models(step, replies)
        models = site_models(replies, NETWORKS)
        self.networks = self.aggregation.shared(models, step.round, self.networks)
