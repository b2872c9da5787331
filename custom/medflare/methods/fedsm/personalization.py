"""Personal models: SoftPull's, and those that FedSM's Table 6 compares with it.

Those are fine-tuning, APFL with fixed α, Per-FedAvg and pFedMe, by the functions of
`families.second_models`; w is FedSM's global model, frozen while APFL's v is trained.
`SitePersonal` trains the site's personal model for a round, `ServerPersonal` holds all of them.
Per-FedAvg and pFedMe share a second model ("meta") from which personal models start. Their gradient
steps are those of the task's optimizer: plain SGD steps at the learning rate of a task with Adam
hardly move a model.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, Literal

from medflare.core.hyper import param
from medflare.core.message import Message
from medflare.core.settings import strict_dataclass
from medflare.core.specs import MetaSpec, TensorSpec, number, table
from medflare.core.states import StateDict, copy_state
from medflare.methods.aggregation import (
    Aggregation,
    SiteModel,
    WeightedMean,
    site_models,
    states_of,
)
from medflare.methods.base import ServerContext, Step
from medflare.methods.families.second_models.apfl import train_apfl
from medflare.methods.families.second_models.perfedavg import adapt, train_per_fedavg
from medflare.methods.families.second_models.pfedme import train_pfedme
from medflare.methods.fedavg.server import FedAvgServerHyper
from medflare.methods.fedavg.site import MODEL, FedAvgSite, FedAvgSiteHyper
from medflare.methods.fedsm.formulas import soft_pull
from medflare.methods.parts.measured import LOSS, VALIDATION
from medflare.methods.parts.selection import Best
from medflare.training.epochs import train_epochs, trainable

# Personalizations with a second shared model beside w_g.
SHARED_META: Final = ("perfedavg", "pfedme")
APFL_SHARE: Final = 0.5  # α
PFEDME_LAMBDA: Final = 15.0
PFEDME_STEPS: Final = 5  # inner steps per batch


@strict_dataclass
class PersonalSiteHyper(FedAvgSiteHyper):
    """How a site trains its personal model."""

    personalization: Literal["softpull", "finetune", "apfl", "perfedavg", "pfedme"] = param(
        "softpull", "where personal models come from", source="Table 6"
    )


@strict_dataclass
class PersonalServerHyper(FedAvgServerHyper):
    """How the server combines personal models."""

    lam: float = param(
        0.7,
        "SoftPull's share of the own model; 1/K is the mean, 1 leaves models alone",
        symbol="λ",
        source="Eq. 11",
        low=0,
        high=1,
    )


def _shares_meta(plan: Any) -> bool:
    return plan.site_hyper.personalization in SHARED_META


PERSONAL = TensorSpec("personal", "the site's personal model, a part of everybody's super model")
PERSONALS = TensorSpec("personal", of=lambda plan: plan.sites)  # where all are sent together
META = TensorSpec(
    "meta", "the site's copy of the model that personal models start from", when=_shares_meta
)
# Per-FedAvg's personal model is made at the site.
ADAPTED = TensorSpec(
    "personal", PERSONAL.purpose, when=lambda plan: plan.site_hyper.personalization == "perfedavg"
)
LOSSES = MetaSpec[dict[str, float | None]](
    "losses", "mean training loss of each model", table(number(optional=True)), "train"
)
APFL_LOCAL = TensorSpec("apfl_local")  # v, in a site's memory


# -- at a site ------------------------------------------------------------------------------------


class SitePersonal:
    """The personal model at one site; its state is in the algorithm's memory."""

    def __init__(self, algorithm: FedAvgSite[Any]):
        self.algorithm = algorithm
        self.site = algorithm.site
        self.hyper = algorithm.plan.site_hyper
        self.adapts = ADAPTED.when(algorithm.plan)

    def train(self, round: int, incoming: Message, reply: Message) -> None:
        """Trains the personal model after the global one.

        The reply of the global model's round gets its validation metric, next version and losses.
        """
        start = self._measured(round, incoming, reply)
        reply[LOSSES] = {"global": reply[LOSS]}
        match self.hyper.personalization:
            case "apfl":
                reply[PERSONAL] = self._apfl(round, incoming, start)
            case "perfedavg":
                reply[PERSONAL] = start
                reply[META] = self._per_fedavg(round, incoming)
            case "pfedme":
                reply[PERSONAL], reply[META] = self._pfedme(round, incoming)
            case "finetune":
                reply[PERSONAL] = self._trained(round, incoming[MODEL])
            case _:
                reply[PERSONAL] = self._trained(round, start)

    def validate(self, round: int, incoming: Message, reply: Message) -> None:
        """Adds the personal model's validation metric to a reply.

        With Per-FedAvg also the model, adapted from the last shared one.
        """
        measured = self._measured(round, incoming, reply)
        if self.adapts:
            reply[ADAPTED] = measured

    def _measured(self, round: int, incoming: Message, reply: Message) -> StateDict:
        state = self._adapted(round, incoming) if self.adapts else incoming[PERSONAL]
        value = self.algorithm.validation(self.algorithm.network("personal", state))
        reply[VALIDATION]["personal"] = value
        return state

    def _adapted(self, round: int, incoming: Message) -> StateDict:
        """Per-FedAvg's personal model: a step on the site's images from the shared model."""
        model = self.algorithm.network("personal", incoming[META])
        optimizer = self.site.optimizer(trainable(model))
        if not self.hyper.reset_optimizer:
            # Read only: these steps do not train the shared model.
            self.algorithm.optimizers.recall("meta", optimizer)
        adapt(model, self.site, round, optimizer)
        return copy_state(model.state_dict())

    def _trained(self, round: int, start: StateDict) -> StateDict:
        """One round of the personal model by the task's loss alone."""
        model = self.algorithm.network("personal", start)
        train = partial(train_epochs, model, site=self.site, round=round, purpose="personal")
        self.algorithm.optimized(model, "personal", train)
        return copy_state(model.state_dict())

    def _apfl(self, round: int, incoming: Message, start: StateDict) -> StateDict:
        """One round of APFL's v; returns the mixture."""
        memory = self.algorithm.memory
        model = self.algorithm.network("personal", memory.get(APFL_LOCAL) or start)
        train = partial(train_apfl, model, incoming[MODEL], self.site, round, share=APFL_SHARE)
        mixture = self.algorithm.optimized(model, "personal", train)
        memory[APFL_LOCAL] = copy_state(model.state_dict())
        return mixture

    def _per_fedavg(self, round: int, incoming: Message) -> StateDict:
        """One round of Per-FedAvg's shared model."""
        meta = self.algorithm.network("meta", incoming[META])
        optimizer = self.site.optimizer(trainable(meta))
        with self.algorithm.continued({"meta": optimizer}):
            train_per_fedavg(meta, self.site, round, optimizer)
        return copy_state(meta.state_dict())

    def _pfedme(self, round: int, incoming: Message) -> tuple[StateDict, StateDict]:
        """One round of pFedMe; returns the personal and the shared model."""
        meta = self.algorithm.network("meta", incoming[META])
        personal = self.algorithm.network("personal", incoming[META])
        train = partial(
            train_pfedme,
            meta,
            personal,
            self.site,
            round,
            strength=PFEDME_LAMBDA,
            inner_steps=PFEDME_STEPS,
        )
        self.algorithm.optimized(personal, "meta", train)
        return copy_state(personal.state_dict()), copy_state(meta.state_dict())


# -- at the server --------------------------------------------------------------------------------


class SoftPull(WeightedMean):
    """The weighted mean for the global model, SoftPull (Eq. 11) for the sites' personal models."""

    def personal(self, models: Mapping[str, SiteModel], round: int) -> dict[str, StateDict]:
        """Site -> its personal model, pulled towards those of the others (Eq. 11)."""
        return soft_pull(states_of(models), self.hyper.lam)


class ServerPersonal:
    """Every site's personal model in the server algorithm's memory.

    Also the best one of each by its site's validation metric. All start from the initial global
    model `model`.
    """

    def __init__(self, context: ServerContext, memory: Message, model: StateDict):
        self.kind = context.plan.site_hyper.personalization
        self.memory = memory
        self.best: dict[str, Best] = {}
        for site in context.sites:
            personal = PERSONALS.member(site)
            memory[personal] = copy_state(model)
            self.best[site] = Best(memory, personal.name)
        memory[META] = copy_state(model)
        lam = context.plan.server_hyper.lam
        count = len(context.sites)
        if self.kind == "softpull" and lam * count < 1 < count:
            context.events.add(
                "warning",
                f"lam = {lam:g} is below 1/K = {1 / count:.3g}: SoftPull overshoots the mean",
            )

    def __getitem__(self, site: str) -> StateDict:
        """The personal model of a site."""
        return self.memory[PERSONALS.member(site)]

    def add_request(self, site: str, message: Message) -> None:
        """Adds the site's personal model.

        For Per-FedAvg and pFedMe also the shared model that it comes from.
        """
        message[PERSONAL] = self[site]
        if self.kind in SHARED_META:
            message[META] = self.memory[META]

    def validated(self, step: Step, replies: Mapping[str, Message]) -> None:
        """Offers the measured models for selection.

        Per-FedAvg's model is made, measured and sent by the site.
        """
        for site, reply in replies.items():
            if self.kind == "perfedavg":
                self.memory[PERSONALS.member(site)] = reply[PERSONAL]
            self.best[site].propose(reply[VALIDATION].get("personal"), step.round, self[site])

    def trained(
        self, step: Step, replies: Mapping[str, Message], aggregation: Aggregation[Any]
    ) -> None:
        """The next models, combined by SoftPull. Sites that did not reply keep their models."""
        models = {site: reply[PERSONAL] for site, reply in replies.items()}
        if self.kind == "softpull":
            models = aggregation.personal(site_models(replies, PERSONAL), step.round)
        for site, state in models.items():
            self.memory[PERSONALS.member(site)] = state
        if self.kind in SHARED_META:
            shared = site_models(replies, META)
            self.memory[META] = aggregation.shared(shared, step.round, self.memory[META])
