"""FedSM's server half: averages the global model and the selector, pulls the personal models towards each other (Eq. 11)."""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from medflare.core.message import Message
from medflare.core.states import StateDict, blend, copy_state
from medflare.inference.deployed import plain_message
from medflare.methods.aggregation import Aggregation, SiteModel, WeightedMean, states_of
from medflare.methods.base import ServerContext, Step, site_models
from medflare.methods.fedavg.server import FedAvgServer
from medflare.methods.fedsm.formulas import GAMMAS as GAMMA_GRID
from medflare.methods.fedsm.formulas import soft_pull, tuned_gamma
from medflare.methods.fedsm.hyper import SHARED_META, FedSMServerHyper, FedSMSiteHyper, SuperServerHyper
from medflare.methods.fedsm.selector import ServerSelector, selector_spec
from medflare.methods.fedsm.site import GAMMAS, GLOBAL, META, N_VALIDATION, PERSONAL, PERSONAL_OF, SELECTOR, UPDATE, FedSMSite, PersonalSite
from medflare.methods.parts.selection import Best, Election, agreed

W = TypeVar("W", bound=SuperServerHyper)


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
        """The selector's next version, with the weights of the global model.

        Args:
            replies: site -> reply with its selector, or with its gradient.
        """
        samples = {site: SiteModel({}, float(reply.facts["n_samples"])) for site, reply in replies.items()}
        self.selector.aggregate(replies, self.aggregation.shares(samples))

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
        personal = {PERSONAL_OF.of(site): plain_message(whole.states[PERSONAL_OF.of(site)]) for site in self.context.sites}
        return {**super().models(), **personal, "deployed": Message(whole.states, {**whole.facts, "kind": self.site_class.kind})}


class FedSMServer(PersonalServer[FedSMServerHyper]):
    """The selector learns in every round; γ is tuned on the sites' validation images at the end."""

    Hyper: ClassVar[type] = FedSMServerHyper
    site_hyper: ClassVar[type] = FedSMSiteHyper
    site_class: ClassVar[type[PersonalSite[Any]]] = FedSMSite

    def __init__(self, context: ServerContext):
        super().__init__(context)
        self.best_selector = Election(self.memory, SELECTOR, self.hyper.selection, rivals=True)
        self.memory.facts["gamma"] = 0.0 if self.hyper.gamma == "tune" else float(self.hyper.gamma)

    @property
    def gamma(self) -> float:
        """γ in [0, 1], as set or as tuned."""
        return self.memory.facts["gamma"]

    def steps(self) -> list[Step]:
        """FedAvg's schedule with `selector_updates` of the selector per round, and the tuning of γ at the end."""
        steps = []
        for step in super().steps():
            further = self.hyper.selector_updates - 1 if step.phase == "train" else 0
            steps += [step, *(Step("train_selector", step.round, part=part + 1) for part in range(further))]
        tune = [Step("tune", self.context.rounds, everyone=True)] if self.hyper.gamma == "tune" else []
        return [*steps, *tune]

    def configure(self, step: Step, site: str) -> Message:
        """As the base says, with the selector; to tune γ, the whole super model."""
        if step.phase == "tune":
            return self.configure_delivery(site)
        if step.phase == "train_selector":
            return Message(dict(self.selector.sent), {UPDATE: step.part})
        message = super().configure(step, site)
        message.states |= self.selector.sent
        return message

    def aggregate(self, step: Step, replies: Mapping[str, Message]) -> None:
        """As the base says, with the selector's next version; after "tune" the best γ (`tuned_gamma`)."""
        if step.phase == "tune":
            self.memory.facts["gamma"] = tuned_gamma(self._votes_on_gamma(replies))
            return
        if step.phase != "train_selector":
            self.best_selector.hold(replies, "selector", step.round, self.selector.state)
            super().aggregate(step, replies)
        if step.phase != "validate":
            self.aggregate_selector(replies)

    def _votes_on_gamma(self, replies: Mapping[str, Message]) -> dict[str, dict[str, Any]]:
        """What γ is tuned by: the sites' median for every γ, or with `selection=mean` what each site says; half a vote is none."""
        names = [f"{gamma:g}" for gamma in GAMMA_GRID]
        known = {site: reply.facts for site, reply in replies.items() if {GAMMAS, N_VALIDATION} <= reply.facts.keys()}
        whole = {site: facts for site, facts in known.items() if facts[GAMMAS].keys() >= set(names)}
        if self.hyper.selection == "mean":
            return {site: dict(facts) for site, facts in whole.items()}
        voted = {name: {site: value for site, facts in whole.items() if (value := facts[GAMMAS][name]) is not None} for name in names}
        return {"median": {GAMMAS: {name: agreed(votes, {}) for name, votes in voted.items()}, N_VALIDATION: 1}}

    @property
    def delivered_selector(self) -> StateDict:
        """Of the round with the best accuracy, or the last one."""
        return (self.hyper.selection != "last" and self.best_selector.state) or self.selector.state

    def elections(self) -> dict[str, Election]:
        """The global model and the selector."""
        found = super().elections()
        return {**found, SELECTOR: self.best_selector} if found else {}

    def configure_delivery(self, site: str) -> Message:
        """The whole super model with its γ."""
        message = super().configure_delivery(site)
        message.facts["gamma"] = self.gamma
        return message
