"""PRR's site algorithm: trains a deputy and a personal model together; only the deputy, without batch normalisation, leaves the site."""

from typing import Any, ClassVar

import torch
from torch import nn

from medflare.core.errors import ConfigError
from medflare.core.manifest import MetaSpec, Phase, TensorSpec, count, listing, models, number, table
from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state
from medflare.inference.deployed import KEPT, MODEL, plain_message
from medflare.methods.base import MEASURED, Capability, PersistentState, Plan, SiteAlgorithm
from medflare.methods.fedavg.site import trained_model
from medflare.methods.parts.partial import LocalPart
from medflare.methods.parts.selection import Best
from medflare.methods.prr.formulas import better_model
from medflare.methods.prr.fourier import without_rule
from medflare.methods.prr.hyper import PRRServerHyper, PRRSiteHyper
from medflare.methods.prr.transfer import SitePrototypes, Supervision, Transfer, prototype_width
from medflare.networks.catalogue import meta_network
from medflare.networks.features import FeatureNetwork
from medflare.tasks.classes import class_names
from medflare.tasks.config import TaskConfig
from medflare.training.site import Site

PRRPlan = Plan[PRRSiteHyper, PRRServerHyper]


def local_part(plan: PRRPlan) -> LocalPart:
    """Batch normalisation stays at the site."""
    return LocalPart.of_batch_norm(plan.network())


def _prototypes(plan: PRRPlan) -> StateDict:
    return SitePrototypes(plan.task, prototype_width(plan.task), "meta").state()


DEPUTY = TensorSpec(
    "model",
    "the site's deputy model without batch normalisation, for the Fourier aggregation",
    lambda plan: local_part(plan).shared(plan.template()),
)
PROTOTYPES = TensorSpec(
    "prototypes",
    "mean embedding of each class over the training images or pixels, and whether the site has the class",
    _prototypes,
    lambda plan: plan.site_hyper.refines,
    measured="train",
    per_class="values",
)
_GLOBAL_PROTOTYPES = TensorSpec(
    "prototypes", template=lambda plan: {"prototypes": _prototypes(plan)["prototypes"]}, when=PROTOTYPES.when, optional=True
)  # absent in the first round
NORMALISATION = TensorSpec(
    "normalisation",
    "the deputy's batch normalisation, for the mean that outside sites get",
    lambda plan: local_part(plan).kept(plan.template()),
)
PERSONAL = TensorSpec("personal", "the site's personal model, a candidate for outside sites")
CLASS_TOTALS = MetaSpec("class_totals", "training images or pixels of each class over all sites", listing(listing(number(0.0))))
STAGES = MetaSpec("stages", "the stage of every epoch: 1 Recover, 2 Exchange, 3 Sublimate", listing(count(3)))
GAMMA = MetaSpec("gamma", "γ of every class in the last epoch; 1 before the refinement", table(number(0.0)), per_class="values")
GAMMAS = MetaSpec("gammas", "γ of every class, epoch by epoch", table(listing(number(0.0))), "train", per_class="values")
TRAINED = MetaSpec(
    "validation_trained", "model -> the metric after training, before aggregation", models(number(optional=True)), "validation"
)
_REQUEST: dict[str, Any] = {"request": (DEPUTY, _GLOBAL_PROTOTYPES), "request_meta": (CLASS_TOTALS,)}


class PRRSite(SiteAlgorithm[PRRSiteHyper]):
    """Deputy-Enhanced Transfer under the CPA loss. With DET off there is one model: the incoming one with the site's own normalisation."""

    Hyper: ClassVar[type] = PRRSiteHyper
    capabilities: ClassVar[frozenset[Capability]] = frozenset({"accumulate"})
    server_hyper: ClassVar[type] = PRRServerHyper
    phases: ClassVar[tuple[Phase, ...]] = (
        Phase("train", reply=(DEPUTY, PROTOTYPES), reply_meta=(*MEASURED, STAGES, GAMMA, GAMMAS, TRAINED), **_REQUEST),
        Phase("validate", reply_meta=MEASURED, **_REQUEST),
        Phase("share_normalisation", reply=(NORMALISATION,), reply_meta=MEASURED, **_REQUEST),
        Phase("share_personal", reply=(PERSONAL,), reply_meta=MEASURED, **_REQUEST),
    )
    delivery: ClassVar[Phase | None] = Phase("finalize", request=(DEPUTY, TensorSpec("model")))  # an outside site's model is whole
    dp_unsupported_reason = (
        "class prototypes are means of image features that leave the site, and two models teach each other on every batch"
    )
    personal = PersistentState("personal")  # P_k, None before the first training
    normalisation = PersistentState("normalisation")  # the deputy's
    prototypes = PersistentState("prototypes")

    def __init__(self, site: Site, plan: Plan[PRRSiteHyper, Any]):
        super().__init__(site, plan)
        self.part = local_part(plan)
        self.width = prototype_width(site.task) if self.hyper.refines else 0
        self.best = {role: Best(self.memory, role) for role in ("global", "personal")}

    @classmethod
    def needs_features(cls, hyper: PRRSiteHyper) -> bool:
        return True

    @classmethod
    def check(cls, task: TaskConfig, hyper: PRRSiteHyper, server_hyper: Any) -> None:
        """Raises ConfigError for a layer without a rule in Fourier aggregation, and for class totals that patches do not give."""
        super().check(task, hyper, server_hyper)
        if server_hyper.pfa and (layer := without_rule(meta_network(task))):
            raise ConfigError(f"prr: layer {layer} of network {task.network['name']} has no rule in Fourier aggregation; set pfa=false")
        if task.image_mode == "patch" and task.target == "multilabel" and hyper.supervision in ("both", "global", "fedeamc"):
            raise ConfigError(
                "prr: negatives of a multilabel task cannot be counted with image_mode 'patch'; set cpa=local, or image_mode 'resize'"
            )

    def validate_request(self, incoming: Message) -> str | None:
        """Refuses class totals of other classes than the task's."""
        names, totals = class_names(self.site.task), incoming.meta.get(CLASS_TOTALS)
        if totals is None or [len(group) for group in totals] == [len(group) for group in names]:
            return None
        return f"item {CLASS_TOTALS!r} is not of the task's classes"

    def train(self, round: int, incoming: Message) -> Message:
        """A round of `Transfer`; the reply holds the deputy without normalisation, and the prototypes if the loss uses them."""
        personal, deputy = self._models(incoming)
        validation = self._measure(round, personal, deputy)
        totals = torch.tensor(incoming.meta[CLASS_TOTALS])
        refined = round >= self.hyper.warm_up
        prototypes = incoming.states.get(PROTOTYPES, {}).get("prototypes") if refined else None
        supervision = Supervision(self.site, self.hyper, totals, prototypes)
        transfer = Transfer(self.site, self.hyper, personal, deputy, supervision, self.validation, self.width, self.prototypes or {})
        loss = transfer.run(round, validation)
        trained = copy_state(deputy.state_dict())
        self.personal, self.normalisation = copy_state(personal.state_dict()), self.part.kept(trained)
        self.prototypes = transfer.prototypes
        states: dict[str, StateDict] = {DEPUTY: self.part.shared(trained)}
        if self.hyper.refines:
            states[PROTOTYPES] = transfer.prototypes
        more = self._gammas(transfer)
        if self.hyper.retrogress:
            more[TRAINED] = self._validation(personal, deputy)
        return Message(states, self.meta(loss=loss, validation=validation, stages=transfer.stages, **more))

    def _gammas(self, transfer: Transfer) -> dict[str, Any]:
        """The curves of γ by class, if the loss was refined."""
        if not (self.hyper.refines and transfer.gammas):
            return {}
        names = [name for group in class_names(self.site.task) for name in group]
        curves = [list(curve) for curve in zip(*([g for group in gamma for g in group] for gamma in transfer.gammas), strict=True)]
        by_class = dict(zip(names, curves, strict=True))
        return {GAMMA: {name: curve[-1] for name, curve in by_class.items()}, GAMMAS: by_class}

    def validate(self, round: int, incoming: Message) -> Message:
        return Message({}, self.meta(validation=self._measure(round, *self._models(incoming))))

    def share_normalisation(self, round: int, incoming: Message) -> Message:
        """The deputy's normalisation; asked for once, after the last round, if there are outside sites."""
        return Message({NORMALISATION: self.part.kept(self._deputy_state(incoming))}, self.meta(validation={}))

    def share_personal(self, round: int, incoming: Message) -> Message:
        """The personal model as a candidate for outside sites (`outside_model`); asked for once, after the last round."""
        return Message({PERSONAL: self._delivered(incoming)["personal"][0]}, self.meta(validation={}))

    def _deputy_state(self, incoming: Message) -> StateDict:
        """S_k with the site's own batch normalisation; that of the common initial model before the first training."""
        if self.normalisation is None:
            self.normalisation = self.part.kept(copy_state(self.site.network().state_dict()))
        return {**self.normalisation, **incoming.states[DEPUTY]}

    def _models(self, incoming: Message) -> tuple[FeatureNetwork, FeatureNetwork]:
        """(P_k, D_k); P_k starts as the first model that the site receives. With DET off both are the deputy."""
        state = self._deputy_state(incoming)
        deputy = self.network("model", state)
        if not self.hyper.det:
            return deputy, deputy
        return self.network("personal", self.personal or state), deputy

    def _validation(self, personal: nn.Module, deputy: nn.Module) -> dict[str, float | None]:
        value = self.validation(deputy)
        return {"global": value, "personal": value if personal is deputy else self.validation(personal)}

    def _measure(self, round: int, personal: nn.Module, deputy: nn.Module) -> dict[str, float | None]:
        """Validation metrics of both models at the start of the round; the site keeps the best model of each role."""
        values = self._validation(personal, deputy)
        for role, model in (("global", deputy), ("personal", personal)):
            self.best[role].offer(values[role], round, model.state_dict())
        return values

    def _delivered(self, incoming: Message) -> dict[str, tuple[StateDict, int | None]]:
        """The site's final deputy and personal model with their rounds: of its best round or of the last one."""
        deputy = self._deputy_state(incoming)
        last = {"global": deputy, "personal": self.personal if self.hyper.det and self.personal else deputy}
        return {role: self.best[role].chosen(self.plan.server_hyper.selection, state) for role, state in last.items()}

    def finalize(self, incoming: Message) -> dict[str, Message]:
        """An inside site deploys the better of its deputy and its personal model by validation (Sec. IV-A), an outside site what it got."""
        if self.personal is None:
            return dict.fromkeys(("global", "deployed"), plain_message(self._deputy_state(incoming)))
        models = {role: trained_model(*delivered) for role, delivered in self._delivered(incoming).items()}
        if not self.hyper.det:
            return {**models, "deployed": models["personal"]}
        reached = {role: self.validation(self.network(role, models[role].states[MODEL])) for role in models}
        role = better_model(reached["personal"], reached["global"])
        meta = {**models[role].meta, KEPT: {"keep": "best", "model": role, "validation": reached}}
        return {**models, "deployed": Message(models[role].states, meta)}
