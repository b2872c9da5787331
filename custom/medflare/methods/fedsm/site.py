"""FedSM's site algorithm: every round a site trains two models on the same images, one after the other.

The global model w_g (FedAvg's training) and its personal model w_p,k (`SitePersonal`; the server pulls it towards the others, Eq. 11). For
a selector w_s that is trained, the reply also has its gradient (cross entropy with the site's own label, Eq. 2). After the last round the
site sends the statistics of the ridge selector, and evaluates the selector's calibration and the candidates of γ on validation images.
"""

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from medflare.core.hyper import param
from medflare.core.manifest import MetaSpec, Phase, TensorSpec, count, listing, number, table, text
from medflare.core.message import Message
from medflare.core.settings import STRICT
from medflare.methods.base import MEASURED, Capability, Plan
from medflare.methods.fedavg.site import GLOBAL, SELECTED_ROUND, FedAvgSite, received, trained_model
from medflare.methods.fedsm.formulas import TEMPERATURES, UNLIKELY, calibration_losses
from medflare.methods.fedsm.personalization import (
    ADAPTED,
    LOSSES,
    META,
    PERSONAL,
    PERSONAL_OF,
    PersonalServerHyper,
    PersonalSiteHyper,
    SitePersonal,
)
from medflare.methods.fedsm.selector import STATISTICS, SiteSelector, is_ridge, selector_entries, selector_spec, site_statistics
from medflare.methods.fedsm.super_model import gain_by_gamma, super_model
from medflare.training.site import Site

MODEL = TensorSpec("model", "the site's locally trained global model, for the weighted mean")
UPDATE = MetaSpec("update", "number of the selector's update within a round", count())
CALIBRATION = MetaSpec(
    "calibration",
    "mean loss of the selector on validation images at each of a list of temperatures",
    listing(number(0.0, -math.log(UNLIKELY) + 0.01), len(TEMPERATURES)),
    "validation",
)
GAINS = MetaSpec(
    "gains",
    "γ -> the super model's mean gain over the global one on validation images",
    table(number(-1.0, 1.0, optional=True)),
    "validation",
)
CLASSES = MetaSpec("sites", "the selector's classes", listing(text()))
SPEC = MetaSpec("selector", "the selector's network", table())
ROUNDS = MetaSpec("rounds", "site -> rounds of training behind its model", table(count(optional=True)), optional=True)
SUPER = (CLASSES, SPEC, ROUNDS, SELECTED_ROUND.as_optional())  # of a super model's message
CHOOSING = (MetaSpec("gamma", "γ", number(0.0, 1.0)), MetaSpec("choose_by", "whose scores choose", text("image", "patient")))
_SELECTOR, _TRAINED_SELECTOR, _GRADIENT = selector_entries(lambda plan: len(plan.sites))
_SUPER_MODEL: dict[str, Any] = {"request": (GLOBAL, PERSONAL_OF, _SELECTOR), "request_meta": (*SUPER, *CHOOSING)}


@dataclass(frozen=True, config=STRICT)
class FedSMSiteHyper(PersonalSiteHyper):
    """FedSM's site."""

    selector: Literal["ridge", "compact_selector", "vgg11"] = param("ridge", "solved at the server (ridge) or trained; VGG-11: the paper's")


@dataclass(frozen=True, config=STRICT)
class FedSMServerHyper(PersonalServerHyper):
    """FedSM's server."""

    selector_updates: Annotated[int, Field(ge=1)] | Literal["auto"] = param(
        "auto", "updates of a trained selector a round, each further one an exchange of the selector alone; auto: at least 100 in the run"
    )
    choose_by: Literal["patient", "image"] = param("patient", "scores that choose: the mean over a patient's images, or each image's own")
    gamma: Annotated[float, Field(ge=0, le=1)] | Literal["tune"] = param(
        "tune",
        "confidence below which the global model answers; tune: the best of 13 values by the sites' validation gain over the global model",
        symbol="γ",
        source="Sec. 3.2",
    )


class FedSMSite(FedAvgSite[FedSMSiteHyper]):
    """FedAvg's global model, a personal model and a selector; at the end the selector's calibration and the tuning of γ."""

    Hyper: ClassVar[type] = FedSMSiteHyper
    server_hyper: ClassVar[type] = FedSMServerHyper
    phases: ClassVar[tuple[Phase, ...]] = (
        Phase(
            "train",
            request=(GLOBAL, PERSONAL, META, _TRAINED_SELECTOR),
            reply=(MODEL, PERSONAL, META, _GRADIENT),
            reply_meta=(*MEASURED, LOSSES),
        ),
        Phase("train_selector", request=(_TRAINED_SELECTOR,), reply=(_GRADIENT,), request_meta=(UPDATE,), reply_meta=MEASURED),
        Phase("validate", request=(GLOBAL, PERSONAL, META, _TRAINED_SELECTOR), reply=(ADAPTED,), reply_meta=MEASURED),
        Phase("selector_features", reply=(STATISTICS,), reply_meta=MEASURED),
        Phase("selector_confidence", request=(_SELECTOR,), reply_meta=(*MEASURED, CALIBRATION)),
        Phase("evaluate_gamma", reply_meta=(*MEASURED, GAINS), **_SUPER_MODEL),
    )
    delivery: ClassVar[Phase | None] = Phase("finalize", **_SUPER_MODEL)
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    dp_unsupported_reason = "what the selector learns from (statistics of the images, or a gradient) leaves the site without noise"

    def __init__(self, site: Site, plan: Plan[FedSMSiteHyper, Any]):
        super().__init__(site, plan)
        self.personal = SitePersonal(self)
        self.selector = SiteSelector(self, len(plan.sites))

    def validate_request(self, incoming: Message) -> str | None:
        """Refuses a super model of other sites, or with another selector, than the plan's."""
        return other_super_model(self.plan, incoming)

    def train(self, round: int, incoming: Message) -> Message:
        """Trains the global and the personal model; then the selector's gradient if it is trained."""
        reply = self.personal.train(round, incoming, super().train(round, incoming))
        self._measure_selector(incoming, reply)
        if not is_ridge(self.plan):
            gradient, reply.meta[LOSSES]["selector"] = self.selector.gradient(round, incoming, self.selector.own_label_loss)
            reply.states |= gradient
        return reply

    def train_selector(self, round: int, incoming: Message) -> Message:
        """A further gradient of the selector alone within a round."""
        states, loss = self.selector.gradient(round, incoming, self.selector.own_label_loss)
        return Message(states, self.meta(loss=loss, validation={}))

    def validate(self, round: int, incoming: Message) -> Message:
        """The validation metrics of the incoming models, and the selector's accuracy."""
        reply = self.personal.validate(round, incoming, super().validate(round, incoming))
        self._measure_selector(incoming, reply)
        return reply

    def _measure_selector(self, incoming: Message, reply: Message) -> None:
        if len(self.site.data.validation) and _SELECTOR in incoming.states:
            reply.meta["validation"]["selector"] = self.selector.accuracy(incoming.states[_SELECTOR])

    def selector_features(self, round: int, incoming: Message) -> Message:
        """Mean and mean product of the training images' features, for the ridge selector."""
        return Message({STATISTICS: site_statistics(self.site)}, self.meta(validation={}))

    def selector_confidence(self, round: int, incoming: Message) -> Message:
        """The selector's loss on validation images at each temperature; an empty list without images."""
        losses: list[float] = []
        if len(self.site.data.validation):
            by_patient = self.plan.server_hyper.choose_by == "patient" and self.site.task.image_mode != "patch"
            patients = self.site.data.validation.patients if by_patient else None
            losses = calibration_losses(self.selector.logits(incoming.states[_SELECTOR], "validation"), self.selector.label, patients)
        return Message({}, {**self.meta(validation={}), CALIBRATION: losses})

    def evaluate_gamma(self, round: int, incoming: Message) -> Message:
        """The super model's gain over the global model on validation images, for every candidate of γ."""
        model = super_model(self.site.task, incoming).to(self.site.device)
        return Message({}, {**self.meta(validation={}), GAINS: gain_by_gamma(model, self.site)})

    def finalize(self, incoming: Message) -> dict[str, Message]:
        """The global model, this site's personal model (inside), and the super model."""
        return delivered_models(self.site.name, incoming, "super")


def other_super_model(plan: Plan[Any, Any], incoming: Message) -> str | None:
    """What in a super model's sites or selector differs from the plan, or None."""
    for item, expected in ((CLASSES, list(plan.sites)), (SPEC, dict(selector_spec(plan)))):
        if item in incoming.meta and incoming.meta[item] != expected:
            return f"item {item!r} is {incoming.meta[item]!r:.100}, this run has {expected!r:.100}"
    return None


def delivered_models(site: str, incoming: Message, kind: str) -> dict[str, Message]:
    """A site's final models by role, from the super model that the server sent; `kind` as in `Method.models`."""
    models, personal = {"global": received(incoming)}, PERSONAL_OF.of(site)
    if personal in incoming.states:
        round = incoming.meta.get(ROUNDS, {}).get(site, incoming.meta.get(SELECTED_ROUND))
        models["personal"] = trained_model(incoming.states[personal], round)
    return {**models, "deployed": Message(incoming.states, {**incoming.meta, "kind": kind})}
