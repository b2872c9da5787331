"""PRR's site algorithm: trains a deputy and a personal model together; only the deputy, without
batch normalisation, leaves the site.
"""

from typing import Any

import torch
from torch import nn

from medflare.core.message import FinalModels
from medflare.core.specs import by_model
from medflare.inference.deployed import KEPT
from medflare.methods import (
    MEASURED,
    MODEL,
    Best,
    ConfigError,
    FeatureNetwork,
    LocalPart,
    Message,
    MetaSpec,
    PersistentState,
    Plan,
    Site,
    SiteAlgorithm,
    StateDict,
    TaskConfig,
    TensorSpec,
    copied_state,
    count,
    listing,
    number,
    phase,
    plain_message,
    table,
    trained_model,
)
from medflare.methods.parts.class_groups import check_counted, rows_not_annotated, without_rows
from medflare.methods.prr.formulas import better_model
from medflare.methods.prr.fourier import without_rule
from medflare.methods.prr.hyper import PRRServerHyper, PRRSiteHyper
from medflare.methods.prr.transfer import SitePrototypes, Supervision, Transfer, TransferResult
from medflare.networks.catalogue import feature_width, meta_network
from medflare.tasks.classes import class_names

PRRPlan = Plan[PRRSiteHyper, PRRServerHyper]


def local_part(plan: PRRPlan) -> LocalPart:
    """The batch normalisation, which stays at the site."""
    return LocalPart.of_batch_norm(plan.network())


def _prototypes(plan: PRRPlan) -> StateDict:
    return SitePrototypes(plan.task, feature_width(plan.task), "meta").state()


DEPUTY = TensorSpec(
    "model",
    "the site's deputy model without batch normalisation, for the Fourier aggregation",
    lambda plan: local_part(plan).shared(plan.template()),
)
PROTOTYPES = TensorSpec(
    "prototypes",
    "mean embedding of each class over the training images or pixels, "
    "and whether the site has the class",
    _prototypes,
    lambda plan: plan.site_hyper.refines,
    measured="train",
    per_class="values",
)
# Absent in the first round.
GLOBAL_PROTOTYPES = TensorSpec(
    "prototypes",
    template=lambda plan: {"prototypes": _prototypes(plan)["prototypes"]},
    when=PROTOTYPES.when,
    optional=True,
)
NORMALISATION = TensorSpec(
    "normalisation",
    "the deputy's batch normalisation, for the mean that outside sites get",
    lambda plan: local_part(plan).local(plan.template()),
)
PERSONAL = TensorSpec("personal", "the site's personal model, a candidate for outside sites")
CLASS_TOTALS = MetaSpec[list[list[float]]](
    "class_totals",
    "training images or pixels of each class over all sites",
    listing(listing(number(0.0))),
)
STAGES = MetaSpec[list[int]](
    "stages", "the stage of every epoch: 1 Recover, 2 Exchange, 3 Sublimate", listing(count(3))
)
GAMMA = MetaSpec[dict[str, float]](
    "gamma",
    "γ of every class in the last epoch; 1 before the refinement",
    table(number(0.0)),
    "train",
    per_class="values",
)
GAMMA_CURVES = MetaSpec[dict[str, list[float]]](
    "gammas",
    "γ of every class, epoch by epoch",
    table(listing(number(0.0))),
    "train",
    per_class="values",
)
TRAINED = MetaSpec[dict[str, float | None]](
    "validation_trained",
    "model -> the metric after training, before aggregation",
    by_model(number(optional=True)),
    "validation",
)
REQUEST = (DEPUTY, GLOBAL_PROTOTYPES)


class PRRSite(SiteAlgorithm[PRRSiteHyper]):
    """Deputy-Enhanced Transfer under the CPA loss.

    With DET off there is one model: the incoming one with the site's own normalisation.
    """

    accumulates = True
    uses_features = True
    server_hyper = PRRServerHyper
    dp_unsupported_reason = (
        "class prototypes are means of image features that leave the site, "
        "and two models teach each other on every batch"
    )
    personal = PersistentState("personal")  # P_k, None before the first training
    normalisation = PersistentState("normalisation")  # the deputy's
    prototypes = PersistentState("prototypes")
    # {"few": (G C,)}: classes that fewer than `minimum_patients` patients show in `prototypes`
    few = PersistentState("few")

    def __init__(self, site: Site, plan: Plan[PRRSiteHyper, Any]):
        super().__init__(site, plan)
        self.part = local_part(plan)
        self.width = feature_width(site.task) if self.hyper.refines else 0
        self.best = {name: Best(self.memory, name) for name in ("global", "personal")}

    @classmethod
    def check(cls, task: TaskConfig, hyper: PRRSiteHyper, server_hyper: Any) -> None:
        """Also raises ConfigError for a layer without a rule in Fourier aggregation, and for class
        totals that patches do not give.
        """
        super().check(task, hyper, server_hyper)
        if server_hyper.pfa:
            layer = without_rule(meta_network(task))
            if layer is not None:
                raise ConfigError(
                    f"prr: layer {layer} of network {task.network['name']} has no rule in Fourier "
                    "aggregation; set pfa=false"
                )
        if hyper.supervision in ("both", "global", "fedeamc"):
            check_counted(task, "cpa=local, or ")

    def validate_request(self, incoming: Message) -> str | None:
        """Why class totals are not of the task's classes, or None."""
        totals = incoming.get(CLASS_TOTALS)
        expected = [len(group) for group in class_names(self.site.task)]
        if totals is None or [len(group) for group in totals] == expected:
            return None
        return f"item {CLASS_TOTALS.name!r} is not of the task's classes"

    @phase(
        request=REQUEST,
        request_meta=(CLASS_TOTALS,),
        reply=(DEPUTY, PROTOTYPES),
        meta=(*MEASURED, STAGES, GAMMA, GAMMA_CURVES, TRAINED.as_optional()),
    )
    def train(self, round: int, incoming: Message) -> Message:
        """A round of `Transfer`; the reply holds the deputy without normalisation, and the
        prototypes if the loss uses them.
        """
        personal, deputy = self._models(incoming)
        validation = self._measure(round, personal, deputy)
        transfer = Transfer(
            self.site,
            self.hyper,
            personal,
            deputy,
            supervision=self._supervision(round, incoming),
            measure=self.validation,
            validation=validation,
            width=self.width,
            prototypes=self.prototypes or {},
            few=(self.few or {}).get("few"),
        )
        result = transfer.run(round)
        trained = copied_state(deputy)
        self.personal = copied_state(personal)
        self.normalisation = self.part.local(trained)
        self.prototypes = result.prototypes
        entries = {DEPUTY: self.part.shared(trained), STAGES: result.stages}
        reply = self.reply(entries, loss=result.loss, validation=validation)
        if self.hyper.refines:
            hidden = rows_not_annotated(self.site.annotation)
            if result.few is not None:
                self.few = {"few": result.few}
                hidden |= result.few
            reply[PROTOTYPES] = without_rows(result.prototypes, hidden)
            self._add_gammas(reply, result)
        if self.hyper.retrogress:
            reply[TRAINED] = self._metrics_of_both(personal, deputy)
        return reply

    def _supervision(self, round: int, incoming: Message) -> Supervision:
        """The losses of the round; global prototypes from the end of the warm-up."""
        prototypes = None
        if round >= self.hyper.warm_up and GLOBAL_PROTOTYPES in incoming:
            prototypes = incoming[GLOBAL_PROTOTYPES]["prototypes"]
        totals = torch.tensor(incoming[CLASS_TOTALS])
        return Supervision(self.site, self.hyper, totals, prototypes)

    def _add_gammas(self, reply: Message, result: TransferResult) -> None:
        """Add the curves of γ by class to a reply, if there are any."""
        if not result.gammas:
            return
        names = [name for group in class_names(self.site.task) for name in group]
        curves = dict(zip(names, torch.stack(result.gammas, dim=1).tolist(), strict=True))
        for row in result.hidden:
            del curves[names[row]]
        reply[GAMMA] = {name: curve[-1] for name, curve in curves.items()}
        reply[GAMMA_CURVES] = curves

    @phase(request=REQUEST, request_meta=(CLASS_TOTALS,), meta=MEASURED)
    def validate(self, round: int, incoming: Message) -> Message:
        """The validation metrics of the incoming deputy and of the personal model."""
        return self.reply(validation=self._measure(round, *self._models(incoming)))

    @phase(request=REQUEST, request_meta=(CLASS_TOTALS,), reply=(NORMALISATION,), meta=MEASURED)
    def share_normalisation(self, round: int, incoming: Message) -> Message:
        """Sends the deputy's normalisation, once, after the last round, if there are outside
        sites.
        """
        return self.reply({NORMALISATION: self.part.local(self._deputy_state(incoming))})

    @phase(request=REQUEST, request_meta=(CLASS_TOTALS,), reply=(PERSONAL,), meta=MEASURED)
    def share_personal(self, round: int, incoming: Message) -> Message:
        """Sends the personal model, once, after the last round, as a candidate for outside sites
        (`outside_model`).
        """
        return self.reply({PERSONAL: self._final_models(incoming)["personal"][MODEL]})

    def _deputy_state(self, incoming: Message) -> StateDict:
        """S_k with the site's own batch normalisation, before the first training with that of the
        common initial model.
        """
        if self.normalisation is None:
            self.normalisation = self.part.local(copied_state(self.site.network()))
        return {**self.normalisation, **incoming[DEPUTY]}

    def _models(self, incoming: Message) -> tuple[FeatureNetwork, FeatureNetwork]:
        """(P_k, D_k); P_k starts as the first model that the site receives; with DET off both are
        the deputy.
        """
        state = self._deputy_state(incoming)
        deputy = self.network("model", state)
        if not self.hyper.det:
            return deputy, deputy
        return self.network("personal", self.personal or state), deputy

    def _metrics_of_both(self, personal: nn.Module, deputy: nn.Module) -> dict[str, float | None]:
        value = self.validation(deputy)
        if personal is deputy:
            return {"global": value, "personal": value}
        return {"global": value, "personal": self.validation(personal)}

    def _measure(
        self, round: int, personal: nn.Module, deputy: nn.Module
    ) -> dict[str, float | None]:
        """Validation metrics of both models at the start of the round, in which each model is a
        candidate.
        """
        values = self._metrics_of_both(personal, deputy)
        self.best["global"].propose(values["global"], round, deputy.state_dict())
        self.best["personal"].propose(values["personal"], round, personal.state_dict())
        return values

    def _final_models(self, incoming: Message) -> FinalModels:
        """The site's final deputy and personal model, of their best rounds or of the last one."""
        deputy = self._deputy_state(incoming)
        last = {"global": deputy, "personal": deputy}
        if self.hyper.det and self.personal:
            last["personal"] = self.personal
        rule = self.plan.server_hyper.selection
        best = self.best.items()
        return {name: trained_model(*saved.chosen(rule, last[name])) for name, saved in best}

    @phase(request=(DEPUTY, MODEL))  # an outside site's model is whole
    def finalize(self, incoming: Message) -> FinalModels:
        """The final models: an inside site deploys its deputy or its personal model, the better one
        by validation (Sec. IV-A), an outside site what it gets.
        """
        if self.personal is None:
            whole = plain_message(self._deputy_state(incoming))
            return {"global": whole, "deployed": whole}
        models = self._final_models(incoming)
        if not self.hyper.det:
            return {**models, "deployed": models["personal"]}
        metrics = {
            name: self.validation(self.network(name, model[MODEL]))
            for name, model in models.items()
        }
        better = better_model(metrics["personal"], metrics["global"])
        choice = {"keep": "best", "model": better, "validation": metrics}
        deployed = Message(models[better].states, {**models[better].meta, KEPT: choice})
        return {**models, "deployed": deployed}
