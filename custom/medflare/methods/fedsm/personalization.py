"""Personal models: SoftPull's, and those that FedSM's Table 6 compares with it: fine-tuning, APFL
with fixed α, Per-FedAvg and pFedMe.

The latter use the functions of `families.second_models`; w is FedSM's global model, frozen while
APFL's v is trained. `SitePersonal` trains the site's personal model for a round; `SuperModelServer`
holds all of them. Per-FedAvg and pFedMe share a second model ("meta") from which personal models
start. Their gradient steps are those of the task's optimizer: plain SGD steps at the learning rate
of a task with Adam hardly move a model.
"""

from dataclasses import replace
from functools import partial
from typing import TypeVar

from medflare.methods import (
    LOSS,
    MEASURED,
    MODEL,
    VALIDATION,
    FedAvgSite,
    Message,
    MetaSpec,
    StateDict,
    TensorSpec,
    WeightedMean,
    copied_state,
    number,
    phase,
    states_of,
    table,
)
from medflare.methods.aggregation import Models
from medflare.methods.families.second_models.apfl import train_apfl
from medflare.methods.families.second_models.perfedavg import adapted, train_per_fedavg
from medflare.methods.families.second_models.pfedme import train_pfedme
from medflare.methods.fedsm.formulas import soft_pull
from medflare.methods.fedsm.hyper import PersonalSiteHyper

# Personalizations with a second shared model beside w_g.
SHARED_META = ("perfedavg", "pfedme")

F = TypeVar("F", bound=PersonalSiteHyper)

# Three specs of the entry "personal": a site's own model; the same, which `validate` sends (with
# Per-FedAvg alone, whose personal models are made at the sites); the models of all sites together.
PERSONAL = TensorSpec("personal", "the site's personal model, a part of everybody's super model")
ADAPTED = replace(PERSONAL, when=lambda plan: plan.site_hyper.personalization == "perfedavg")
PERSONALS = TensorSpec(PERSONAL.name, of=lambda plan: plan.sites)
META_MODEL = TensorSpec(
    "meta",
    "the site's copy of the model that personal models start from",
    when=lambda plan: plan.site_hyper.personalization in SHARED_META,
)
# The entry "model", with a purpose of its own.
TRAINED_GLOBAL = replace(
    MODEL, purpose="the site's locally trained global model, for the weighted mean"
)
REQUEST = (MODEL, PERSONAL, META_MODEL)
LOSSES = MetaSpec[dict[str, float | None]](
    "losses", "mean training loss of each model", table(number(optional=True)), "train"
)
APFL_LOCAL = TensorSpec("apfl_local")  # v, in a site's memory


# -- at a site ------------------------------------------------------------------------------------


class SitePersonal(FedAvgSite[F]):
    """FedAvg's site algorithm with a personal model, which comes from the server."""

    accumulates = False
    freezes = False

    @phase(request=REQUEST, reply=(TRAINED_GLOBAL, PERSONAL, META_MODEL), meta=(*MEASURED, LOSSES))
    def train(self, round: int, incoming: Message) -> Message:
        """Trains the global model, then the personal one.

        The reply has the personal model's validation metric and next version, and both losses.
        """
        reply = super().train(round, incoming)
        start = self._validate_personal(round, incoming, reply)
        reply[LOSSES] = {"global": reply[LOSS]}
        match self.hyper.personalization:
            case "apfl":
                reply[PERSONAL] = self._apfl(round, incoming, start)
            case "perfedavg":
                reply[PERSONAL] = start
                reply[META_MODEL] = self._per_fedavg(round, incoming)
            case "pfedme":
                reply[PERSONAL], reply[META_MODEL] = self._pfedme(round, incoming)
            case "finetune":
                reply[PERSONAL] = self._trained(round, incoming[MODEL])
            case _:
                reply[PERSONAL] = self._trained(round, start)
        return reply

    @phase(request=REQUEST, reply=(ADAPTED,), meta=MEASURED)
    def validate(self, round: int, incoming: Message) -> Message:
        """The validation metrics of the incoming models; with Per-FedAvg the reply also has the
        personal model, adapted from the last shared one.
        """
        reply = super().validate(round, incoming)
        personal = self._validate_personal(round, incoming, reply)
        if ADAPTED.when(self.plan):
            reply[ADAPTED] = personal
        return reply

    def _validate_personal(self, round: int, incoming: Message, reply: Message) -> StateDict:
        if ADAPTED.when(self.plan):
            state = adapted(self, round, incoming[META_MODEL], "meta")
        else:
            state = incoming[PERSONAL]
        reply[VALIDATION]["personal"] = self.validation(self.network("personal", state))
        return state

    def _trained(self, round: int, start: StateDict) -> StateDict:
        """One round of the personal model by the task's loss alone."""
        model = self.network("personal", start)
        self.train_model(model, round, "personal")
        return copied_state(model)

    def _apfl(self, round: int, incoming: Message, start: StateDict) -> StateDict:
        """One round of APFL's v; returns the mixture."""
        model = self.network("personal", self.memory.get(APFL_LOCAL) or start)
        train = partial(train_apfl, model, incoming[MODEL], self.site, round, share=0.5)  # α
        mixture = self.optimized(model, "personal", train)
        self.memory[APFL_LOCAL] = copied_state(model)
        return mixture

    def _per_fedavg(self, round: int, incoming: Message) -> StateDict:
        """One round of Per-FedAvg's shared model."""
        meta = self.network("meta", incoming[META_MODEL])
        self.optimized(meta, "meta", partial(train_per_fedavg, meta, self.site, round))
        return copied_state(meta)

    def _pfedme(self, round: int, incoming: Message) -> tuple[StateDict, StateDict]:
        """One round of pFedMe; returns the personal and the shared model."""
        meta = self.network("meta", incoming[META_MODEL])
        personal = self.network("personal", incoming[META_MODEL])
        # λ 15, and 5 inner steps on a batch
        train = partial(
            train_pfedme, meta, personal, self.site, round, strength=15.0, inner_steps=5
        )
        self.optimized(personal, "meta", train)
        return copied_state(personal), copied_state(meta)


# -- at the server --------------------------------------------------------------------------------


class SoftPull(WeightedMean):
    """The weighted mean for the global model, SoftPull (Eq. 11) for the sites' personal models."""

    def personal(self, models: Models, round: int) -> dict[str, StateDict]:
        """Site -> its personal model, pulled towards those of the others (Eq. 11)."""
        return soft_pull(states_of(models), self.hyper.lam)
