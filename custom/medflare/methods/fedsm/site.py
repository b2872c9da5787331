"""FedSM's site half: every round a site trains two models on the same images, one after the other.

The global model w_g (averaged as in FedAvg) and its personal model w_p,k (pulled towards the others' by SoftPull, Eq. 11); a selector w_s
that is trained too (cross entropy with the site's own label, Eq. 2). After the last round it sends what the ridge selector is solved from,
and measures the selector's calibration and the candidates of γ on its validation images.
"""

import math
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medflare.core.errors import ConfigError
from medflare.core.manifest import Entry, Fact, Phase, count, listing, number, table, text
from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state
from medflare.data.sites.site import Site
from medflare.data.splits import Batch
from medflare.methods.base import MEASURED, Kept, Plan
from medflare.methods.fedavg.site import GLOBAL, SELECTED_ROUND, FedAvgSite, received, trained_model
from medflare.methods.fedsm.formulas import TEMPERATURES, UNLIKELY, calibration_losses
from medflare.methods.fedsm.hyper import SHARED_META, FedSMServerHyper, FedSMSiteHyper
from medflare.methods.fedsm.personalization import adapt, inner_rate, train_apfl, train_meta
from medflare.methods.fedsm.ridge import STATISTICS, is_ridge, site_statistics
from medflare.methods.fedsm.selector import SiteSelector, selector_entries, selector_spec
from medflare.methods.fedsm.super_model import super_model
from medflare.methods.fedsm.tuning import gain_by_gamma
from medflare.methods.parts.training import train_epochs, trainable
from medflare.tasks.config import TaskConfig
from medflare.tasks.schedules import is_scheduled

H = TypeVar("H", bound=FedSMSiteHyper)

MODEL = Entry("model", "the site's locally trained global model, for the weighted mean")
PERSONAL = Entry("personal", "the site's personal model, a part of everybody's super model")
META = Entry(
    "meta", "the site's copy of the model that personal models start from", when=lambda plan: plan.site_hyper.personalization in SHARED_META
)
ADAPTED = Entry("personal", PERSONAL.purpose, when=lambda plan: plan.site_hyper.personalization == "perfedavg")
PERSONAL_OF = Entry("personal/")  # every site's, where all are sent together
_SHARE = number(0.0, 1.0)
LOSSES = Fact("losses", "mean training loss of each model", table(number(optional=True)), "train")
UPDATE = Fact("update", "number of the selector's update within a round", count())
CALIBRATION = Fact(
    "calibration",
    "mean loss of the selector on validation images at each of a list of temperatures",
    listing(number(0.0, -math.log(UNLIKELY) + 0.01), len(TEMPERATURES)),
    "validation",
)
GAINS = Fact(
    "gains",
    "γ -> the super model's mean gain over the global one on validation images",
    table(number(-1.0, 1.0, optional=True)),
    "validation",
)
CLASSES = Fact("sites", "the selector's classes", listing(text()))
SPEC = Fact("selector", "the selector's network", table())
# what a super model is told with, and FedSM's own
ROUNDS = Fact("rounds", "site -> rounds of training behind its model", table(count(optional=True)), sometimes=True)
SUPER = (CLASSES, SPEC, ROUNDS, SELECTED_ROUND.maybe())
CHOOSING = (Fact("gamma", "γ", _SHARE), Fact("choose_by", "whose scores choose", text("image", "patient")))


def one_score_a_site(plan: Plan[Any, Any]) -> int:
    """Outputs of FedSM's selector."""
    return len(plan.sites)


SELECTOR, SENT, TRAINED = selector_entries(one_score_a_site)


class PersonalSite(FedAvgSite[H]):
    """Trains the global model and the site's personal model; what FedSM and its relatives share.

    Attributes:
        kind: of the deployed model.
    """

    unprotected = "what the selector learns from (statistics of the images, a gradient or weights) leaves the site without noise"
    kind: ClassVar[str]
    apfl_local = Kept("apfl_local")

    def __init__(self, site: Site, plan: Plan[H, Any]):
        super().__init__(site, plan)
        self.selector = SiteSelector(self, self.selector_outputs(plan))

    @classmethod
    def check(cls, task: TaskConfig, hyper: H, server_hyper: Any) -> None:
        """Refuse settings of the task's optimizer where personal models come from steps at rates of their own.

        Raises:
            ConfigError: Per-FedAvg or pFedMe at such a rate, with a schedule or clipping, which would reach the global model alone.
        """
        super().check(task, hyper, server_hyper)
        asked = [name for name, given in (("schedule", is_scheduled(task.schedule)), ("clip", any(task.clip.values()))) if given]
        rates = [name for name in ("adapt_lr", "meta_lr") if getattr(hyper, name) != "auto"]
        if hyper.personalization in SHARED_META and asked and rates:
            raise ConfigError(
                f"personalization = {hyper.personalization} takes steps at a rate of its own ({rates[0]}), which task {task.name}'s "
                f"{asked[0]} would not reach; leave out {asked[0]} or {rates[0]}"
            )

    def contradicted(self, incoming: Message) -> str | None:
        """A super model of other sites, or with another selector, than the plan has."""
        for fact, here in ((CLASSES, list(self.plan.sites)), (SPEC, dict(selector_spec(self.selector.plan)))):
            if fact in incoming.facts and incoming.facts[fact] != here:
                return f"fact {fact!r} is {incoming.facts[fact]!r:.100}, this run has {here!r:.100}"
        return None

    @staticmethod
    def selector_outputs(plan: Plan[Any, Any]) -> int:
        """How many scores the selector gives.

        Raises:
            NotImplementedError: a subclass does not say.
        """
        raise NotImplementedError

    def train(self, round: int, incoming: Message) -> Message:
        """Measure the incoming models, then train the global and the personal one on the same images."""
        validation = self.validations(round, incoming)
        model = self.network("model", incoming.states[GLOBAL])
        losses = {"global": self._fit(model, round, "model")}
        states = {MODEL: copy_state(model.state_dict()), **self._personal(round, incoming)}
        return Message(states, self.facts(loss=losses["global"], validation=validation, losses=losses))

    def validate(self, round: int, incoming: Message) -> Message:
        """The validation metrics of the incoming models; with Per-FedAvg the personal model that the last shared one becomes."""
        facts = self.facts(validation=self.validations(round, incoming))
        return Message({ADAPTED: self._adapted(round, incoming)} if ADAPTED.when(self.plan) else {}, facts)

    def validations(self, round: int, incoming: Message) -> dict[str, float | None]:
        """The task's metric of the incoming models on this site's validation images.

        Args:
            round: 0-based.
            incoming: the server's message.
        """
        personal = self._adapted(round, incoming) if ADAPTED.when(self.plan) else incoming.states[PERSONAL]
        found = {"global": self.validation(self.network("model", incoming.states[GLOBAL]))}
        found["personal"] = self.validation(self.network("personal", personal))
        return found

    def _adapted(self, round: int, incoming: Message) -> StateDict:
        """Per-FedAvg's personal model: a few steps on the site's images from the shared model as it comes from the server."""
        model = self.network("personal", incoming.states[META])
        optimizer = self.site.optimizer(trainable(model))
        if not self.hyper.reset_optimizer:
            self.optimizers.recall("meta", optimizer)  # and never kept: these steps are no training
        adapt(model, self.site, round, inner_rate(self.hyper, optimizer), self.hyper.adapt_steps)
        return copy_state(model.state_dict())

    def _fit(self, model: nn.Module, round: int, purpose: str) -> float:
        return self.optimized(model, purpose, lambda optimizer: train_epochs(model, optimizer, self.site, round, purpose))

    def _personal(self, round: int, incoming: Message) -> dict[str, StateDict]:
        """One round of the personal model (and of the shared model it starts from), by the chosen personalization."""
        kind, start = self.hyper.personalization, incoming.states[PERSONAL]
        personal = self.network("personal", incoming.states[GLOBAL] if kind == "finetune" else start)
        if kind == "apfl":
            local = start if self.apfl_local is None else self.apfl_local
            share = self.memory.facts.get("apfl_share", self.hyper.apfl_share)
            trained = train_apfl(personal, local, incoming.states[GLOBAL], self.site, round, share, self.hyper.apfl_rate)
            self.apfl_local, mixture, self.memory.facts["apfl_share"] = trained
            return {PERSONAL: mixture}
        if kind in SHARED_META:
            own = self._adapted(round, incoming) if ADAPTED.when(self.plan) else None
            meta = self.network("meta", incoming.states[META])
            optimizer = self.site.optimizer(trainable(personal if kind == "pfedme" else meta))
            with self.continued({"meta": optimizer}):
                train_meta(meta, personal, self.site, round, self.hyper, optimizer)
            return {PERSONAL: copy_state(personal.state_dict()) if own is None else own, META: copy_state(meta.state_dict())}
        self._fit(personal, round, "personal")
        return {PERSONAL: copy_state(personal.state_dict())}

    def deliver(self, incoming: Message) -> dict[str, Message]:
        """The global model, this site's personal model (inside), and the super model."""
        models = {"global": received(incoming)}
        own = PERSONAL_OF.of(self.site.name)
        if own in incoming.states:
            round = incoming.facts.get(ROUNDS, {}).get(self.site.name, incoming.facts.get(SELECTED_ROUND))
            models["personal"] = trained_model(incoming.states[own], round)
        models["deployed"] = Message(incoming.states, {**incoming.facts, "kind": self.kind})
        return models


class FedSMSite(PersonalSite[FedSMSiteHyper]):
    """Helps to solve the selector, or trains it beside the global and the personal model; then to calibrate it and to tune γ."""

    Hyper: ClassVar[type] = FedSMSiteHyper
    server_hyper: ClassVar[type] = FedSMServerHyper
    kind = "super"
    selector_outputs = staticmethod(one_score_a_site)
    phases: ClassVar[tuple[Phase, ...]] = (
        Phase(
            "train",
            sends=(GLOBAL, PERSONAL, META, *SENT),
            answers=(MODEL, PERSONAL, META, *TRAINED),
            reports=(*MEASURED, LOSSES),
        ),
        Phase("train_selector", sends=SENT, answers=TRAINED, tells=(UPDATE,), reports=MEASURED),
        Phase("validate", sends=(GLOBAL, PERSONAL, META, *SENT), answers=(ADAPTED,), reports=MEASURED),
        Phase("describe", answers=(STATISTICS,), reports=MEASURED),
        Phase("calibrate", sends=(SELECTOR,), reports=(*MEASURED, CALIBRATION)),
        Phase("tune", sends=(GLOBAL, PERSONAL_OF, SELECTOR), tells=(*SUPER, *CHOOSING), reports=(*MEASURED, GAINS)),
    )
    delivery: ClassVar[Phase | None] = Phase("deliver", sends=(GLOBAL, PERSONAL_OF, SELECTOR), tells=(*SUPER, *CHOOSING))

    @classmethod
    def check(cls, task: TaskConfig, hyper: FedSMSiteHyper, server_hyper: Any) -> None:
        """Refuse further updates of a selector that takes none.

        Raises:
            ConfigError: selector_updates beside the ridge selector.
        """
        super().check(task, hyper, server_hyper)
        if hyper.selector == "ridge" and server_hyper.selector_updates not in ("auto", 1):
            raise ConfigError("selector = ridge is solved in one exchange and takes no updates; leave out selector_updates")

    def train(self, round: int, incoming: Message) -> Message:
        """Global and personal model, then an update of the selector."""
        reply = super().train(round, incoming)
        if is_ridge(self.plan):
            return reply
        selector, loss = self.selector.round(round, incoming, self._own_label_loss)
        reply.facts[LOSSES]["selector"] = loss
        return Message({**reply.states, **selector}, reply.facts)

    def train_selector(self, round: int, incoming: Message) -> Message:
        """A further update of the selector alone within a round."""
        states, loss = self.selector.round(round, incoming, self._own_label_loss)
        return Message(states, self.facts(loss=loss, validation={}))

    def validations(self, round: int, incoming: Message) -> dict[str, float | None]:
        """As for the other models; the selector's metric is its accuracy for the site's own label."""
        found = super().validations(round, incoming)
        if len(self.site.data.validation) and SELECTOR in incoming.states:
            choices = self.selector.logits(incoming.states[SELECTOR], "validation").argmax(dim=1)
            found["selector"] = float((choices == self.plan.sites.index(self.site.name)).float().mean())
        return found

    def _own_label_loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """y_s = one_hot(k) for all images of site k (Eq. 2)."""
        return F.cross_entropy(logits, torch.full((len(logits),), self.plan.sites.index(self.site.name), device=logits.device))

    def describe(self, round: int, incoming: Message) -> Message:
        """What the ridge selector is solved from: mean and mean product of the training images' features."""
        return Message({STATISTICS: site_statistics(self.site)}, self.facts(validation={}))

    def calibrate(self, round: int, incoming: Message) -> Message:
        """How well the selector's scores fit validation images at each temperature; nothing without images."""
        losses: list[float] = []
        if len(self.site.data.validation):
            by_patient = self.plan.server_hyper.choose_by == "patient" and self.site.task.fit != "patch"
            patients = self.site.data.validation.patients if by_patient else None
            logits = self.selector.logits(incoming.states[SELECTOR], "validation")
            losses = calibration_losses(logits, self.plan.sites.index(self.site.name), patients)
        return Message({}, {**self.facts(validation={}), CALIBRATION: losses})

    def tune(self, round: int, incoming: Message) -> Message:
        """What the super model gains over the global one on validation images, for every candidate γ."""
        model = super_model(self.site.task, incoming).to(self.site.device)
        return Message({}, {**self.facts(validation={}), GAINS: gain_by_gamma(model, self.site)})
