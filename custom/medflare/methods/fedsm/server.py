"""FedSM's server half: averages the global model and the selector, pulls the personal models towards each other (Eq. 11)."""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from medflare.core.message import Message
from medflare.core.states import StateDict, blend, copy_state
from medflare.methods.aggregation import Aggregation, SiteModel, WeightedMean, site_models, states_of
from medflare.methods.base import ServerContext, Step
from medflare.methods.fedavg.server import FedAvgServer
from medflare.methods.fedavg.site import trained_model
from medflare.methods.fedsm.formulas import GAMMAS as GAMMA_GRID
from medflare.methods.fedsm.formulas import (
    gamma_candidates,
    gamma_within_error,
    impossible_head_gradient,
    median_by_gamma,
    soft_pull,
    tuned_gamma,
)
from medflare.methods.fedsm.hyper import SHARED_META, FedSMServerHyper, FedSMSiteHyper, SuperServerHyper
from medflare.methods.fedsm.ridge import STATISTICS, impossible_statistics
from medflare.methods.fedsm.selector import GRADIENT, ServerSelector, head_of, is_ridge, selector_spec
from medflare.methods.fedsm.site import (
    CANDIDATES,
    CONFIDENCE,
    ERRORS,
    GAMMAS,
    GLOBAL,
    META,
    N_VALIDATION,
    PERSONAL,
    PERSONAL_OF,
    SELECTOR,
    UPDATE,
    FedSMSite,
    PersonalSite,
)
from medflare.methods.parts.selection import Best, Election

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
    """The selector learns in every round; γ is tuned on the sites' validation images at the end."""

    Hyper: ClassVar[type] = FedSMServerHyper
    site_hyper: ClassVar[type] = FedSMSiteHyper
    site_class: ClassVar[type[PersonalSite[Any]]] = FedSMSite

    def __init__(self, context: ServerContext):
        super().__init__(context)
        self.best_selector = Election(self.memory, SELECTOR, self.hyper.selection, rivals=True)
        self.memory.facts["gamma"] = 0.0 if isinstance(self.hyper.gamma, str) else float(self.hyper.gamma)

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
        solved = ["describe"] if is_ridge(self.context.plan) else []
        tuned = {"tune": ["confide", "tune"], "grid": ["tune"]}.get(str(self.hyper.gamma), [])
        return [*steps, *(Step(phase, self.context.rounds, everyone=True) for phase in [*solved, *tuned])]

    def configure(self, step: Step, site: str) -> Message:
        """As the base says, with the selector; to tune γ, first the selector and then the whole super model with the candidates."""
        if step.phase == "tune":
            message = self.configure_delivery(site)
            message.facts[CANDIDATES] = self._candidates
            return message
        if step.phase in ("describe", "confide"):
            return Message({SELECTOR: self.delivered_selector} if step.phase == "confide" else {})
        if step.phase == "train_selector":
            return Message(dict(self.selector.sent), {UPDATE: step.part})
        message = super().configure(step, site)
        message.states |= self.selector.sent
        return message

    def aggregate(self, step: Step, replies: Mapping[str, Message]) -> None:
        """As the base says, with the selector's next version; at the end the ridge selector, the candidates of γ, and γ."""
        if step.phase == "tune":
            votes = self._votes_on_gamma(replies)
            self.memory.facts["gamma"] = tuned_gamma(votes) if self.hyper.gamma == "grid" else gamma_within_error(votes)
        elif step.phase == "confide":
            known = {site: reply.facts for site, reply in replies.items() if {CONFIDENCE, N_VALIDATION} <= reply.facts.keys()}
            images = {site: facts[N_VALIDATION] for site, facts in known.items()}
            self.memory.facts["candidates"] = gamma_candidates({site: facts[CONFIDENCE] for site, facts in known.items()}, images)
        elif step.phase == "describe":
            told = {site: reply.states[STATISTICS] for site, reply in replies.items()}
            self.selector.solve({site: state for site, state in told.items() if state["products"].any()}, self.hyper.ridge_penalty)
        elif step.phase == "train_selector":
            self.aggregate_selector(replies)
        else:
            self._aggregate_round(step, replies)

    def contradicted(self, step: Step, site: str, reply: Message) -> str | None:
        """A gradient of the selector, or features for the ridge selector, that no images of the site have."""
        if GRADIENT in reply.states:
            weight, bias = head_of(reply.states[GRADIENT])
            return impossible_head_gradient(weight, bias, self.context.plan.sites.index(site))
        if step.phase != "describe":
            return None
        task, images = self.context.task, int(reply.facts["n_samples"])
        known = None if task.fit == "patch" else images  # of patches nobody knows how many there are
        problem = impossible_statistics(reply.states[STATISTICS], task.image_channels, task.spatial_dims, known)
        return problem and f"{STATISTICS}: {problem}"

    def _aggregate_round(self, step: Step, replies: Mapping[str, Message]) -> None:
        """The base's part of a round or of the last look, and the selector beside it."""
        ridge = is_ridge(self.context.plan)
        if not ridge:
            self.best_selector.hold(replies, "selector", step.round, self.selector.state)
        super().aggregate(step, replies)
        if step.phase != "validate" and not ridge:
            self.aggregate_selector(replies)

    def _votes_on_gamma(self, replies: Mapping[str, Message]) -> dict[str, dict[str, Any]]:
        """What γ is tuned by: the sites' median for every candidate, or with `selection=mean` what each site says; half a vote is none."""
        names = [f"{gamma:g}" for gamma in self._candidates]
        known = {site: reply.facts for site, reply in replies.items() if {GAMMAS, ERRORS, N_VALIDATION} <= reply.facts.keys()}
        whole = {site: facts for site, facts in known.items() if facts[GAMMAS].keys() & facts[ERRORS].keys() >= set(names)}
        if self.hyper.selection == "mean":
            return {site: dict(facts) for site, facts in whole.items()}
        return {"median": {**median_by_gamma(whole, names), N_VALIDATION: 1}}

    @property
    def _candidates(self) -> list[float]:
        return list(GAMMA_GRID) if self.hyper.gamma == "grid" else self.memory.facts["candidates"]

    @property
    def delivered_selector(self) -> StateDict:
        """Of the round with the best accuracy, or the last one."""
        return (self.hyper.selection != "last" and self.best_selector.state) or self.selector.state

    def elections(self) -> dict[str, Election]:
        """The global model and the selector."""
        found = super().elections()
        return {**found, SELECTOR: self.best_selector} if found else {}

    def configure_delivery(self, site: str) -> Message:
        """The whole super model with its γ, and whose scores choose."""
        message = super().configure_delivery(site)
        message.facts |= {"gamma": self.gamma, "choose_by": self.hyper.choose_by}
        return message
