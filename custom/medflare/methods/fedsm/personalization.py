"""What the algorithms of FedSM and FedSM-extra share: a global model, personal models, and the super model that is made of them.

Personal models are SoftPull's, or those that FedSM's Table 6 compares with it (fine-tuning, APFL, Per-FedAvg, pFedMe). Per-FedAvg and
pFedMe share a second model ("meta") from which personal models start. Their gradient steps are those of the task's optimizer: plain SGD
steps at the learning rate of a task with Adam hardly move a model.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, ClassVar, Final, Literal, TypeVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.func import functional_call

from medflare.core.hyper import param
from medflare.core.manifest import MetaSpec, TensorSpec, count, listing, number, table, text
from medflare.core.message import Message
from medflare.core.rng import seeded
from medflare.core.settings import STRICT
from medflare.core.states import StateDict, copy_state
from medflare.data.loading import Batch
from medflare.methods.aggregation import Aggregation, SiteModel, WeightedMean, site_models, states_of
from medflare.methods.base import Capability, Plan, ServerContext, Step
from medflare.methods.fedavg.server import FedAvgServer, FedAvgServerHyper
from medflare.methods.fedavg.site import GLOBAL, SELECTED_ROUND, FedAvgSite, FedAvgSiteHyper, received, trained_model
from medflare.methods.fedsm.formulas import apfl_mixture, pfedme_outer, soft_pull
from medflare.methods.fedsm.selector import ServerSelector, SiteSelector, selector_spec
from medflare.methods.parts.proximal import proximal_gradients
from medflare.methods.parts.selection import Best
from medflare.training.epochs import epochs, finite_or_none, preserved_moments, train_epochs, trainable
from medflare.training.site import Site

SHARED_META: Final = ("perfedavg", "pfedme")  # personalizations with a second shared model beside w_g
APFL_SHARE: Final = 0.5  # α
ADAPTATION_STEPS: Final = 1  # of Per-FedAvg
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


P = TypeVar("P", bound=PersonalSiteHyper)
Q = TypeVar("Q", bound=PersonalServerHyper)

PERSONAL = TensorSpec("personal", "the site's personal model, a part of everybody's super model")
META = TensorSpec(
    "meta",
    "the site's copy of the model that personal models start from",
    when=lambda plan: plan.site_hyper.personalization in SHARED_META,
)
ADAPTED = TensorSpec("personal", PERSONAL.purpose, when=lambda plan: plan.site_hyper.personalization == "perfedavg")
PERSONAL_OF = TensorSpec("personal/")  # those of all sites, where they are sent together
LOSSES = MetaSpec("losses", "mean training loss of each model", table(number(optional=True)), "train")
CLASSES = MetaSpec("sites", "the selector's classes", listing(text()))
SPEC = MetaSpec("selector", "the selector's network", table())
ROUNDS = MetaSpec("rounds", "site -> rounds of training behind its model", table(count(optional=True)), optional=True)
SUPER = (CLASSES, SPEC, ROUNDS, SELECTED_ROUND.as_optional())  # of a super model's message


class SuperModelSite(FedAvgSite[P]):
    """Trains the global model, then the site's personal one on the same images; subclasses train a selector.

    Attributes:
        kind: of the super model, as in `Method.models`.
        further_scores: of the selector, beside one for every site.
    """

    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    kind: ClassVar[str]
    further_scores: ClassVar[int] = 0

    def __init__(self, site: Site, plan: Plan[P, Any]):
        super().__init__(site, plan)
        self.selector = SiteSelector(self, len(plan.sites) + self.further_scores)

    def validate_request(self, incoming: Message) -> str | None:
        """Refuses a super model of other sites, or with another selector, than the plan's."""
        for item, expected in ((CLASSES, list(self.plan.sites)), (SPEC, dict(selector_spec(self.plan)))):
            if item in incoming.meta and incoming.meta[item] != expected:
                return f"item {item!r} is {incoming.meta[item]!r:.100}, this run has {expected!r:.100}"
        return None

    def train(self, round: int, incoming: Message) -> Message:
        """FedAvg's training; then the personal model's validation metric, its next version and losses."""
        reply = super().train(round, incoming)
        start = self._measured(round, incoming, reply)
        reply.meta[LOSSES] = {"global": reply.meta["loss"]}
        return Message({**reply.states, **self._trained(round, incoming, start)}, reply.meta)

    def validate(self, round: int, incoming: Message) -> Message:
        """The validation metrics of both models; with Per-FedAvg also the personal model, adapted from the last shared one."""
        reply = super().validate(round, incoming)
        measured = self._measured(round, incoming, reply)
        return Message({ADAPTED: measured} if ADAPTED.when(self.plan) else {}, reply.meta)

    def _measured(self, round: int, incoming: Message, reply: Message) -> StateDict:
        """The personal model at the start of the round, whose metric is added to the reply."""
        state = self._adapted(round, incoming) if ADAPTED.when(self.plan) else incoming.states[PERSONAL]
        reply.meta["validation"]["personal"] = finite_or_none(self.validation(self.network("personal", state)))
        return state

    def _adapted(self, round: int, incoming: Message) -> StateDict:
        """Per-FedAvg's personal model: a few steps on the site's images from the shared model of the server."""
        model = self.network("personal", incoming.states[META])
        optimizer = self.site.optimizer(trainable(model))
        if not self.hyper.reset_optimizer:
            self.optimizers.recall("meta", optimizer)  # read only: these steps do not train the shared model
        adapt(model, self.site, round, optimizer, ADAPTATION_STEPS)
        return copy_state(model.state_dict())

    def _trained(self, round: int, incoming: Message, start: StateDict) -> dict[str, StateDict]:
        """One round of the personal model, and of the shared model that it starts from."""
        kind = self.hyper.personalization
        if kind == "apfl":
            local = self.memory.states.get("apfl_local", start)
            model = self.network("personal", start)
            self.memory.states["apfl_local"], mixture = train_apfl(model, local, incoming.states[GLOBAL], self.site, round, APFL_SHARE)
            return {PERSONAL: mixture}
        if kind in SHARED_META:
            meta, personal = self.network("meta", incoming.states[META]), self.network("personal", incoming.states[META])
            optimizer = self.site.optimizer(trainable(personal if kind == "pfedme" else meta))
            with self.continued({"meta": optimizer}):
                if kind == "perfedavg":
                    train_per_fedavg(meta, self.site, round, optimizer)
                else:
                    train_pfedme(meta, personal, self.site, round, optimizer, strength=PFEDME_LAMBDA, inner_steps=PFEDME_STEPS)
            return {PERSONAL: start if kind == "perfedavg" else copy_state(personal.state_dict()), META: copy_state(meta.state_dict())}
        model = self.network("personal", incoming.states[GLOBAL] if kind == "finetune" else start)
        self.optimized(model, "personal", lambda optimizer: train_epochs(model, optimizer, self.site, round, "personal"))
        return {PERSONAL: copy_state(model.state_dict())}

    def finalize(self, incoming: Message) -> dict[str, Message]:
        """The global model, this site's personal model (inside), and the super model."""
        models, personal = {"global": received(incoming)}, PERSONAL_OF.of(self.site.name)
        if personal in incoming.states:
            round = incoming.meta.get(ROUNDS, {}).get(self.site.name, incoming.meta.get(SELECTED_ROUND))
            models["personal"] = trained_model(incoming.states[personal], round)
        return {**models, "deployed": Message(incoming.states, {**incoming.meta, "kind": self.kind})}


def train_apfl(model: nn.Module, local: StateDict, global_: StateDict, site: Site, round: int, share: float) -> tuple[StateDict, StateDict]:
    """One round of APFL: v (`local`) is trained through the mixture with w (`global_`) at α = `share`; returns (v, mixture v̄).

    Running statistics are collected by the mixture's forward passes, so they are v̄'s already and are not blended. `model` is a workspace.
    """
    model.load_state_dict(local)
    anchor = {name: global_[name].to(site.device) for name, _ in model.named_parameters()}

    def mixed_loss(network: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        mixture = {name: share * weight + (1 - share) * anchor[name] for name, weight in network.named_parameters()}
        return site.loss(functional_call(network, mixture, (images,)), targets)

    train_epochs(model, site.optimizer(trainable(model)), site, round, "personal", loss=mixed_loss)
    local = copy_state(model.state_dict())
    return local, apfl_mixture(local, global_, share, kept=[name for name, _ in model.named_buffers()])


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


def adapt(model: nn.Module, site: Site, round: int, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Per-FedAvg's adaptation in place: `steps` steps on one training batch each; the batches begin again after the last one."""
    weights = trainable(model)
    model.train()
    passes = (site.batches("train", round, "adapt", 0) for _ in range(steps))  # equal keys: equal batches
    with seeded(site.seed, site.name, round, "adapt", "dropout"):
        for batch in islice(chain.from_iterable(passes), steps):
            _step(optimizer, weights, _gradients(model, site, batch))


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


class SoftPull(WeightedMean):
    """The weighted mean for the global model, SoftPull (Eq. 11) for the sites' personal models."""

    def own(self, models: Mapping[str, SiteModel], round: int) -> dict[str, StateDict]:
        return soft_pull(states_of(models), self.hyper.lam)


class SuperModelServer(FedAvgServer[Q]):
    """FedAvg's global model, every site's personal model and the selector; personal models start from the initial global one.

    Attributes:
        kind, further_scores: as of `SuperModelSite`.
        best_personal: site -> its best personal model by its own validation metric.
    """

    aggregation_class: ClassVar[type[Aggregation[Any]]] = SoftPull
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    kind: ClassVar[str]
    further_scores: ClassVar[int] = 0

    def __init__(self, context: ServerContext):
        super().__init__(context)
        self.personalization, count = context.plan.site_hyper.personalization, len(context.sites)
        self.memory.states |= {entry: copy_state(self.model) for entry in (*map(PERSONAL_OF.of, context.sites), META)}
        self.best_personal = {site: Best(self.memory, PERSONAL_OF.of(site)) for site in context.sites}
        self.selector = ServerSelector(context, self.memory, count + self.further_scores)
        if self.personalization == "softpull" and self.hyper.lam * count < 1 < count:
            text = f"lam = {self.hyper.lam:g} is below 1/K = {1 / count:.3g}: SoftPull overshoots the mean"
            context.events.add("warning", text)

    @property
    def personal(self) -> dict[str, StateDict]:
        """Site -> its personal model."""
        return {site: self.memory.states[PERSONAL_OF.of(site)] for site in self.context.sites}

    @property
    def delivered_selector(self) -> StateDict:
        """The selector of the super model."""
        return self.selector.state

    def configure(self, step: Step, site: str) -> Message:
        """The global and the site's personal model; for Per-FedAvg and pFedMe also the shared model that it comes from."""
        shared: dict[str, StateDict] = {META: self.memory.states[META]} if self.personalization in SHARED_META else {}
        return Message({**super().configure(step, site).states, PERSONAL: self.personal[site], **shared})

    def aggregate(self, step: Step, replies: Mapping[str, Message]) -> None:
        """FedAvg's aggregation; then the measured personal models are candidates, and the next ones are combined by SoftPull.

        Sites that did not reply keep their models.
        """
        super().aggregate(step, replies)
        replied = {site: reply.states[PERSONAL] for site, reply in replies.items() if PERSONAL in reply.states}
        for site, reply in replies.items():  # Per-FedAvg's model is made, measured and sent by the site
            measured = replied[site] if self.personalization == "perfedavg" else self.personal[site]
            self.best_personal[site].offer(reply.meta["validation"].get("personal"), step.round, measured)
        if self.personalization == "softpull" and replied:
            replied = self.aggregation.own(site_models(replies, PERSONAL), step.round)
        self.memory.states |= {PERSONAL_OF.of(site): state for site, state in replied.items()}
        if self.personalization in SHARED_META and step.phase == "train":
            self.memory.states[META] = self.aggregation.shared(site_models(replies, META), step.round, self.memory.states[META])

    def configure_final(self, site: str) -> Message:
        """The whole super model: every site may meet images that look like another site's."""
        message, best = super().configure_final(site), self.hyper.selection != "last"
        personal = {PERSONAL_OF.of(name): (best and self.best_personal[name].state) or state for name, state in self.personal.items()}
        meta: dict[str, Any] = {CLASSES: list(self.context.sites), SPEC: dict(selector_spec(self.context.plan))}
        if best:
            meta[ROUNDS] = {name: kept.round for name, kept in sorted(self.best_personal.items())}
        return Message({**message.states, "selector": self.delivered_selector, **personal}, {**message.meta, **meta})

    def models(self) -> dict[str, Message]:
        """The global model, every site's personal one, and the super model as "deployed"."""
        whole = self.configure_final(self.context.sites[0])
        rounds = whole.meta.get(ROUNDS, dict.fromkeys(self.context.sites, self.context.rounds))
        personal = {PERSONAL_OF.of(site): trained_model(whole.states[PERSONAL_OF.of(site)], rounds[site]) for site in self.context.sites}
        return {**super().models(), **personal, "deployed": Message(whole.states, {**whole.meta, "kind": self.kind})}
