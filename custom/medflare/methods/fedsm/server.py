"""FedSM's server half: averages the global model and the selector, pulls the personal models towards each other (Eq. 11)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final, TypeVar

from medflare.core.message import Message
from medflare.core.states import StateDict, blend, copy_state
from medflare.methods.aggregation import Aggregation, SiteModel, WeightedMean, site_models, states_of
from medflare.methods.base import ServerContext, Step
from medflare.methods.fedavg.server import FedAvgServer
from medflare.methods.fedavg.site import trained_model
from medflare.methods.fedsm.formulas import GAMMAS, fitted_temperature, soft_pull, tempered, tuned_gamma
from medflare.methods.fedsm.hyper import SHARED_META, FedSMServerHyper, FedSMSiteHyper, SuperServerHyper
from medflare.methods.fedsm.ridge import STATISTICS, is_ridge
from medflare.methods.fedsm.selector import ServerSelector, selector_spec
from medflare.methods.fedsm.site import (
    CALIBRATION,
    GAINS,
    GLOBAL,
    META,
    PERSONAL,
    PERSONAL_OF,
    SELECTOR,
    UPDATE,
    FedSMSite,
    PersonalSite,
)
from medflare.methods.parts.selection import Best, Election

W = TypeVar("W", bound=SuperServerHyper)
_UPDATES: Final = 100  # of a trained selector in a run, at least, unless said otherwise; as many as the published code takes


class SoftPull(WeightedMean):
    """The weighted mean for everybody, and SoftPull (Eq. 11) for each site's own model."""

    def own(self, models: Mapping[str, SiteModel], round: int) -> dict[str, StateDict]:
        """Site -> its personal model, pulled towards those of the others (Eq. 11)."""
        return soft_pull(states_of(models), self.hyper.lam)


class PersonalServer(FedAvgServer[W]):
    """A global model, every site's personal one and a selector; what FedSM and its relatives share."""

    aggregation_class: ClassVar[type[Aggregation[Any]]] = SoftPull
    site_class: ClassVar[type[PersonalSite[Any]]]
    aggregation: SoftPull

    def __init__(self, context: ServerContext):
        super().__init__(context)
        self.personalization = context.plan.site_hyper.personalization
        self.selector = ServerSelector(context, self.memory, self.site_class.selector_outputs(context.plan))
        for site in context.sites:
            self.memory.states[PERSONAL_OF.of(site)] = copy_state(self.model)
        self.memory.states[META] = copy_state(self.model)
        self.best_personal = {site: Best(self.memory, PERSONAL_OF.of(site)) for site in context.sites}
        lam, count = self.hyper.lam, len(context.sites)
        if self.personalization == "softpull" and lam * count < 1 < count:
            context.events.add("warning", f"lam = {lam:g} is below 1/K = {1 / count:.3g}: SoftPull overshoots the mean")

    @property
    def personal(self) -> dict[str, StateDict]:
        """site -> its personal model."""
        return {site: self.memory.states[PERSONAL_OF.of(site)] for site in self.context.sites}

    def configure(self, step: Step, site: str) -> Message:
        """The global model and the site's personal one; for Per-FedAvg and pFedMe also the shared model that it comes from."""
        message = Message({GLOBAL: self.model, PERSONAL: self.personal[site]})
        if self.personalization in SHARED_META:
            message.states[META] = self.memory.states[META]
        return message

    def aggregate(self, step: Step, replies: Mapping[str, Message]) -> None:
        """FedAvg's aggregation and, after training, the personal models' next versions."""
        adapted = self.personalization == "perfedavg"  # the reply brings the personal model that it measured
        if adapted:
            self.memory.states |= {PERSONAL_OF.of(site): reply.states[PERSONAL] for site, reply in replies.items()}
        personal = self.personal
        for site, reply in replies.items():
            self.best_personal[site].offer(reply.facts["validation"].get("personal"), step.round, personal[site])
        super().aggregate(step, replies)
        if step.phase == "train":
            self._aggregate_personal(step.round, replies)

    def _aggregate_personal(self, round: int, replies: Mapping[str, Message]) -> None:
        """SoftPull among the sites that answered; the others keep their models."""
        answered = site_models(replies, PERSONAL)
        pulled = self.aggregation.own(answered, round) if self.personalization == "softpull" else states_of(answered)
        self.memory.states |= {PERSONAL_OF.of(site): state for site, state in pulled.items()}
        if self.personalization in SHARED_META:
            known = self.memory.states[META]
            mean = self.aggregation.shared(site_models(replies, META), round, known)
            self.memory.states[META] = blend(known, mean, self.hyper.pfedme_beta) if self.personalization == "pfedme" else mean

    def aggregate_selector(self, replies: Mapping[str, Message]) -> None:
        """The selector's next version; its classes are sites, which count alike unless it is weighted as the global model is.

        Args:
            replies: site -> reply with its selector, or with its gradient.
        """
        samples = {site: SiteModel({}, float(reply.facts["n_samples"])) for site, reply in replies.items()}
        alike = self.hyper.selector_weighting == "balanced"
        self.selector.aggregate(replies, dict.fromkeys(replies, 1.0) if alike else self.aggregation.shares(samples))

    def configure_delivery(self, site: str) -> Message:
        """The whole super model: every site may meet images that another site's model knows better."""
        best = self.hyper.selection != "last"
        message = super().configure_delivery(site)
        message.states[SELECTOR] = self.delivered_selector
        for name, state in self.personal.items():
            message.states[PERSONAL_OF.of(name)] = (best and self.best_personal[name].state) or state
        message.facts |= {"sites": list(self.context.sites), "selector": dict(selector_spec(self.context.plan))}
        message.facts |= {"rounds": {name: found.round for name, found in sorted(self.best_personal.items())}} if best else {}
        return message

    @property
    def delivered_selector(self) -> StateDict:
        """The last round's."""
        return self.selector.state

    def models(self) -> dict[str, Message]:
        """The global model, every site's personal one, and the super model as "deployed"."""
        whole = self.configure_delivery(self.context.sites[0])
        rounds = whole.facts.get("rounds", dict.fromkeys(self.context.sites, self.context.rounds))
        personal = {PERSONAL_OF.of(site): trained_model(whole.states[PERSONAL_OF.of(site)], rounds[site]) for site in self.context.sites}
        return {**super().models(), **personal, "deployed": Message(whole.states, {**whole.facts, "kind": self.site_class.kind})}


class FedSMServer(PersonalServer[FedSMServerHyper]):
    """At the end the selector is solved, unless it has learnt in every round, and calibrated; then γ is tuned on validation images."""

    Hyper: ClassVar[type] = FedSMServerHyper
    site_hyper: ClassVar[type] = FedSMSiteHyper
    site_class: ClassVar[type[PersonalSite[Any]]] = FedSMSite

    def __init__(self, context: ServerContext):
        super().__init__(context)
        self.best_selector = Election(self.memory, SELECTOR, self.hyper.selection, rivals=True)
        self.memory.facts |= {"gamma": 0.0 if isinstance(self.hyper.gamma, str) else float(self.hyper.gamma), "temperature": 1.0}

    @property
    def gamma(self) -> float:
        """γ in [0, 1], as set or as tuned."""
        return self.memory.facts["gamma"]

    def steps(self) -> list[Step]:
        """FedAvg's schedule with the updates of a trained selector; at the end the ridge selector, the temperature, and the tuning of γ."""
        steps = []
        ridge, asked = is_ridge(self.context.plan), self.hyper.selector_updates
        updates = 1 if ridge else -(-_UPDATES // max(1, self.context.rounds)) if isinstance(asked, str) else asked
        for step in super().steps():
            further = updates - 1 if step.phase == "train" else 0
            steps += [step, *(Step("train_selector", step.round, part=part + 1) for part in range(further))]
        last = [*(["describe"] if ridge else []), "calibrate", *(["tune"] if self.hyper.gamma == "tune" else [])]
        return [*steps, *(Step(phase, self.context.rounds, everyone=True) for phase in last)]

    def configure(self, step: Step, site: str) -> Message:
        """As the base says, with the selector; at the end the selector alone, and then the whole super model, to tune γ."""
        if step.phase == "tune":
            return self.configure_delivery(site)
        if step.phase in ("describe", "calibrate"):
            return Message({SELECTOR: self.delivered_selector} if step.phase == "calibrate" else {})
        if step.phase == "train_selector":
            return Message(dict(self.selector.sent), {UPDATE: step.part})
        message = super().configure(step, site)
        message.states |= self.selector.sent
        return message

    def aggregate(self, step: Step, replies: Mapping[str, Message]) -> None:
        """As the base says, with the selector's next version; at the end the ridge selector, its temperature, and γ."""
        if step.phase == "tune":
            told = {site: reply.facts[GAINS] for site, reply in replies.items() if GAINS in reply.facts}
            gains = {site: {name: known.get(name) for name in map("{:g}".format, GAMMAS)} for site, known in told.items()}
            self.memory.facts |= {"gains": gains, "gamma": tuned_gamma(gains)}
        elif step.phase == "calibrate":
            losses = {site: reply.facts[CALIBRATION] for site, reply in replies.items() if CALIBRATION in reply.facts}
            self.memory.facts["temperature"] = fitted_temperature(losses)
        elif step.phase == "describe":
            told = {site: reply.states[STATISTICS] for site, reply in replies.items()}
            self.selector.solve({site: state for site, state in told.items() if state["products"].any()}, self.hyper.ridge_penalty)
        elif step.phase == "train_selector":
            self.aggregate_selector(replies)
        else:
            self._aggregate_round(step, replies)

    def _aggregate_round(self, step: Step, replies: Mapping[str, Message]) -> None:
        """The base's part of a round or of the last look, and the selector beside it."""
        ridge = is_ridge(self.context.plan)
        if not ridge:
            self.best_selector.hold(replies, "selector", step.round, self.selector.state)
        super().aggregate(step, replies)
        if step.phase != "validate" and not ridge:
            self.aggregate_selector(replies)

    @property
    def delivered_selector(self) -> StateDict:
        """Of the round with the best accuracy, or the last one, at its temperature."""
        chosen = (self.hyper.selection != "last" and self.best_selector.state) or self.selector.state
        return tempered(chosen, self.memory.facts["temperature"])

    def elections(self) -> dict[str, Election]:
        """The global model and the selector."""
        found = super().elections()
        return {**found, SELECTOR: self.best_selector} if found else {}

    def selector_summary(self) -> dict[str, Any]:
        """γ, the selector's temperature, and the sites' votes on the candidates where γ was tuned."""
        gains = {site: of for site, of in self.memory.facts.get("gains", {}).items() if any(gain is not None for gain in of.values())}
        known = [gain for of in gains.values() if (gain := of[f"{self.gamma:g}"]) is not None]
        return {
            "gamma": self.gamma,
            "temperature": self.memory.facts["temperature"],
            "candidates": list(GAMMAS) if self.hyper.gamma == "tune" else [],
            "votes": {site: [of[f"{gamma:g}"] for gamma in GAMMAS] for site, of in sorted(gains.items())},
            "mean_gain": sum(known) / len(known) if known else None,
        }

    def configure_delivery(self, site: str) -> Message:
        """The whole super model with its γ, and whose scores choose."""
        message = super().configure_delivery(site)
        message.facts |= {"gamma": self.gamma, "choose_by": self.hyper.choose_by}
        return message
