"""Personal models: SoftPull's, and those that FedSM's Table 6 compares with it (fine-tuning, APFL, Per-FedAvg, pFedMe).

`SitePersonal` trains the site's personal model for a round, `ServerPersonal` holds all of them. Per-FedAvg and pFedMe share a second model
("meta") from which personal models start. Their gradient steps are those of the task's optimizer: plain SGD steps at the learning rate of
a task with Adam hardly move a model.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.func import functional_call

from medflare.core.hyper import param
from medflare.core.manifest import MetaSpec, TensorSpec, number, table
from medflare.core.message import Message
from medflare.core.rng import seeded
from medflare.core.settings import STRICT
from medflare.core.states import StateDict, copy_state
from medflare.data.loading import Batch
from medflare.methods.aggregation import Aggregation, site_models
from medflare.methods.base import ServerContext, Step
from medflare.methods.fedavg.server import FedAvgServerHyper
from medflare.methods.fedavg.site import GLOBAL, FedAvgSite, FedAvgSiteHyper
from medflare.methods.fedsm.formulas import apfl_mixture, pfedme_outer
from medflare.methods.parts.proximal import proximal_gradients
from medflare.methods.parts.selection import Best
from medflare.training.epochs import epochs, preserved_moments, train_epochs, trainable
from medflare.training.site import Site

SHARED_META: Final = ("perfedavg", "pfedme")  # personalizations with a second shared model beside w_g
APFL_SHARE: Final = 0.5  # α
PFEDME_LAMBDA: Final = 15.0
PFEDME_STEPS: Final = 5  # inner steps per batch


@dataclass(frozen=True, config=STRICT)
class PersonalSiteHyper(FedAvgSiteHyper):
    """How a site trains its personal model."""

    personalization: Literal["softpull", "finetune", "apfl", "perfedavg", "pfedme"] = param(
        "softpull", "where personal models come from", source="Table 6"
    )


@dataclass(frozen=True, config=STRICT)
class PersonalServerHyper(FedAvgServerHyper):
    """How the server combines personal models."""

    lam: float = param(
        0.7, "SoftPull's share of the own model; 1/K is the mean, 1 leaves models alone", symbol="λ", source="Eq. 11", low=0, high=1
    )


def _shares_meta(plan: Any) -> bool:
    return plan.site_hyper.personalization in SHARED_META


PERSONAL = TensorSpec("personal", "the site's personal model, a part of everybody's super model")
META = TensorSpec("meta", "the site's copy of the model that personal models start from", when=_shares_meta)
ADAPTED = TensorSpec("personal", PERSONAL.purpose, when=lambda plan: plan.site_hyper.personalization == "perfedavg")
PERSONAL_OF = TensorSpec("personal/")  # those of all sites, where they are sent together
LOSSES = MetaSpec("losses", "mean training loss of each model", table(number(optional=True)), "train")


# -- at a site ---------------------------------------------------------------------------------------------------------------


class SitePersonal:
    """The personal model at one site; its state is in the algorithm's memory."""

    def __init__(self, algorithm: FedAvgSite[Any]):
        self.algorithm, self.site, self.hyper = algorithm, algorithm.site, algorithm.plan.site_hyper

    def train(self, round: int, incoming: Message, reply: Message) -> Message:
        """Adds to the reply of the global model's round: the personal model's validation metric, its next version and losses."""
        start = self._measured(round, incoming, reply)
        reply.meta[LOSSES] = {"global": reply.meta["loss"]}
        return Message({**reply.states, **self._trained(round, incoming, start)}, reply.meta)

    def validate(self, round: int, incoming: Message, reply: Message) -> Message:
        """Adds the personal model's validation metric to a reply; with Per-FedAvg also the model, adapted from the last shared one."""
        measured = self._measured(round, incoming, reply)
        return Message({ADAPTED: measured} if ADAPTED.when(self.algorithm.plan) else {}, reply.meta)

    def _measured(self, round: int, incoming: Message, reply: Message) -> StateDict:
        state = self._adapted(round, incoming) if ADAPTED.when(self.algorithm.plan) else incoming.states[PERSONAL]
        reply.meta["validation"]["personal"] = self.algorithm.validation(self.algorithm.network("personal", state))
        return state

    def _adapted(self, round: int, incoming: Message) -> StateDict:
        """Per-FedAvg's personal model: a step on the site's images from the shared model of the server."""
        model = self.algorithm.network("personal", incoming.states[META])
        optimizer = self.site.optimizer(trainable(model))
        if not self.hyper.reset_optimizer:
            self.algorithm.optimizers.recall("meta", optimizer)  # read only: these steps do not train the shared model
        adapt(model, self.site, round, optimizer)
        return copy_state(model.state_dict())

    def _trained(self, round: int, incoming: Message, start: StateDict) -> dict[str, StateDict]:
        """One round of the personal model, and of the shared model that it starts from."""
        kind, algorithm = self.hyper.personalization, self.algorithm
        if kind == "apfl":
            model = algorithm.network("personal", algorithm.memory.states.get("apfl_local", start))
            anchor = incoming.states[GLOBAL]
            mixture = algorithm.optimized(
                model, "personal", lambda optimizer: train_apfl(model, anchor, self.site, round, optimizer, share=APFL_SHARE)
            )
            algorithm.memory.states["apfl_local"] = copy_state(model.state_dict())
            return {PERSONAL: mixture}
        if kind in SHARED_META:
            meta, personal = algorithm.network("meta", incoming.states[META]), algorithm.network("personal", incoming.states[META])
            optimizer = self.site.optimizer(trainable(personal if kind == "pfedme" else meta))
            with algorithm.continued({"meta": optimizer}):
                if kind == "perfedavg":
                    train_per_fedavg(meta, self.site, round, optimizer)
                else:
                    train_pfedme(meta, personal, self.site, round, optimizer, strength=PFEDME_LAMBDA, inner_steps=PFEDME_STEPS)
            return {PERSONAL: start if kind == "perfedavg" else copy_state(personal.state_dict()), META: copy_state(meta.state_dict())}
        model = algorithm.network("personal", incoming.states[GLOBAL] if kind == "finetune" else start)
        algorithm.optimized(model, "personal", lambda optimizer: train_epochs(model, optimizer, self.site, round, "personal"))
        return {PERSONAL: copy_state(model.state_dict())}


def train_apfl(
    model: nn.Module, global_: StateDict, site: Site, round: int, optimizer: torch.optim.Optimizer, *, share: float
) -> StateDict:
    """One round of APFL: v (`model`) is trained through the mixture with w (`global_`), α = `share`.

    Running statistics are collected by the mixture's forward passes, so they are v̄'s already and
    are not blended.

    Returns:
        The mixture v̄.
    """
    anchor = {name: global_[name].to(site.device) for name, _ in model.named_parameters()}

    def mixed_loss(network: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        mixture = {name: share * weight + (1 - share) * anchor[name] for name, weight in network.named_parameters()}
        return site.loss(functional_call(network, mixture, (images,)), targets)

    train_epochs(model, optimizer, site, round, "personal", loss=mixed_loss)
    statistics = [name for name, _ in model.named_buffers()]
    return apfl_mixture(copy_state(model.state_dict()), global_, share, kept=statistics)


def train_per_fedavg(model: nn.Module, site: Site, round: int, optimizer: torch.optim.Optimizer) -> None:
    """One round of first-order Per-FedAvg in place: θ' = θ - α g(θ; B1), θ <- θ - β g(θ'; B2) (Fallah et al. 2020, Alg. 1, FO).

    Both steps are the optimizer's; the inner one uses its moments without changing them. B1 and B2 are consecutive mini-batches; a last
    batch without a partner is left out, unless it is the only one, which is then both.
    """
    weights = trainable(model)
    model.train()
    for epoch in epochs(site, round, "personal"):
        for first, second in _pairs(epoch):
            start = [weight.detach().clone() for weight in weights]
            with preserved_moments(optimizer):
                _step(optimizer, weights, _gradients(model, site, first))
            gradients = _gradients(model, site, second)
            with torch.no_grad():
                for weight, origin in zip(weights, start, strict=True):
                    weight.copy_(origin)
            _step(optimizer, weights, gradients)


def adapt(model: nn.Module, site: Site, round: int, optimizer: torch.optim.Optimizer) -> None:
    """Per-FedAvg's adaptation in place: a step on one training batch."""
    model.train()
    with seeded(site.seed, site.name, round, "adapt", "dropout"):
        _step(optimizer, trainable(model), _gradients(model, site, next(site.batches("train", round, "adapt", 0))))


def train_pfedme(
    shared: nn.Module, personal: nn.Module, site: Site, round: int, optimizer: torch.optim.Optimizer, *, strength: float, inner_steps: int
) -> None:
    """One round of pFedMe in place: θ approximates the proximal point of w on each batch, then w moves towards θ.

    w (`shared`) moves as far as θ (`personal`), η = 1 / λ: the largest step along the gradient λ (w - θ) that does not go beyond it. The
    optimizer is θ's and takes `inner_steps` steps per batch; `strength` is λ.
    """
    weights, thetas = trainable(shared), trainable(personal)
    eta = 1 / strength if strength else 0.0
    personal.train()
    for batches in epochs(site, round, "personal"):
        for batch in batches:
            for _ in range(inner_steps):
                _step(optimizer, thetas, proximal_gradients(_gradients(personal, site, batch), thetas, weights, strength))
            with torch.no_grad():
                for weight, moved in zip(weights, pfedme_outer(weights, thetas, eta, strength), strict=True):
                    weight.copy_(moved)
    with torch.no_grad():  # running statistics are those of the model that saw the images
        for statistic, measured in zip(shared.buffers(), personal.buffers(), strict=True):
            statistic.copy_(measured)


def _step(optimizer: torch.optim.Optimizer, weights: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _pairs(batches: Iterable[Batch]) -> Iterator[tuple[Batch, Batch]]:
    rest = iter(batches)
    for first in islice(rest, 1):
        yield first, next(rest, first)
    yield from zip(rest, rest, strict=False)


def _gradients(model: nn.Module, site: Site, batch: Batch) -> list[Tensor]:
    images, targets, _ = batch
    return list(torch.autograd.grad(site.loss(model(images), targets), trainable(model)))


# -- at the server -----------------------------------------------------------------------------------------------------------


class ServerPersonal:
    """Every site's personal model in the server algorithm's memory, and the best one of each by its site's validation metric.

    All start from the initial global model `model`.
    """

    def __init__(self, context: ServerContext, memory: Message, model: StateDict):
        self.kind, self.sites, self.memory = context.plan.site_hyper.personalization, context.sites, memory
        memory.states |= {entry: copy_state(model) for entry in (*map(PERSONAL_OF.of, self.sites), META)}
        self.best = {site: Best(memory, PERSONAL_OF.of(site)) for site in self.sites}
        lam, count = context.plan.server_hyper.lam, len(self.sites)
        if self.kind == "softpull" and lam * count < 1 < count:
            context.events.add("warning", f"lam = {lam:g} is below 1/K = {1 / count:.3g}: SoftPull overshoots the mean")

    def __getitem__(self, site: str) -> StateDict:
        """The personal model of a site."""
        return self.memory.states[PERSONAL_OF.of(site)]

    def sent(self, site: str) -> dict[str, StateDict]:
        """The site's personal model; for Per-FedAvg and pFedMe also the shared model that it comes from."""
        return {PERSONAL: self[site], **({META: self.memory.states[META]} if self.kind in SHARED_META else {})}

    def aggregate(self, step: Step, replies: Mapping[str, Message], aggregation: Aggregation[Any]) -> None:
        """Offers the measured models for selection; after training stores the next ones, combined by SoftPull.

        Sites that did not reply keep their models.
        """
        replied = {site: reply.states[PERSONAL] for site, reply in replies.items() if PERSONAL in reply.states}
        for site, reply in replies.items():  # Per-FedAvg's model is made, measured and sent by the site
            measured = replied[site] if self.kind == "perfedavg" else self[site]
            self.best[site].offer(reply.meta["validation"].get("personal"), step.round, measured)
        if self.kind == "softpull" and replied:
            replied = aggregation.own(site_models(replies, PERSONAL), step.round)
        self.memory.states |= {PERSONAL_OF.of(site): state for site, state in replied.items()}
        if self.kind in SHARED_META and step.phase == "train":
            self.memory.states[META] = aggregation.shared(site_models(replies, META), step.round, self.memory.states[META])

    def delivered(self, best: bool) -> tuple[dict[str, StateDict], dict[str, int | None]]:
        """(entry -> personal model, site -> rounds of training behind it), of each site's best round, or without rounds the last ones."""
        models = {PERSONAL_OF.of(site): (best and self.best[site].state) or self[site] for site in self.sites}
        return models, {site: kept.round for site, kept in sorted(self.best.items())} if best else {}
