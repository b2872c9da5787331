"""FedSM's server algorithm: averages the global model, pulls personal models together (Eq. 11), solves or steps the selector."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from medflare.core.message import Message
from medflare.core.states import StateDict
from medflare.methods.aggregation import Aggregation, SiteModel, WeightedMean, states_of
from medflare.methods.base import Capability, ServerContext, Step
from medflare.methods.fedavg.server import FedAvgServer
from medflare.methods.fedavg.site import trained_model
from medflare.methods.fedsm.formulas import GAMMAS, fitted_temperature, soft_pull, tempered, tuned_gamma
from medflare.methods.fedsm.personalization import PERSONAL_OF, ServerPersonal
from medflare.methods.fedsm.selector import ServerSelector, is_ridge, selector_spec
from medflare.methods.fedsm.site import CALIBRATION, GAINS, UPDATE, FedSMServerHyper, FedSMSiteHyper
from medflare.methods.parts.selection import ModelSelector

SELECTOR = "selector"
_UPDATES: Final = 100  # of a trained selector in a run with `selector_updates=auto`: as many as in the published code


class SoftPull(WeightedMean):
    """The weighted mean for the global model, SoftPull (Eq. 11) for the sites' personal models."""

    def own(self, models: Mapping[str, SiteModel], round: int) -> dict[str, StateDict]:
        """Site -> its personal model, pulled towards those of the others (Eq. 11)."""
        return soft_pull(states_of(models), self.hyper.lam)


class FedSMServer(FedAvgServer[FedSMServerHyper]):
    """FedAvg's global model, the personal models and the selector; at the end temperature and γ are chosen on validation images."""

    Hyper: ClassVar[type] = FedSMServerHyper
    site_hyper: ClassVar[type] = FedSMSiteHyper
    aggregation_class: ClassVar[type[Aggregation[Any]]] = SoftPull
    capabilities: ClassVar[frozenset[Capability]] = frozenset()

    def __init__(self, context: ServerContext):
        super().__init__(context)
        self.ridge = is_ridge(context.plan)
        self.personal = ServerPersonal(context, self.memory, self.model)
        self.selector = ServerSelector(context, self.memory, len(context.sites))
        self.best_selector = ModelSelector(self.memory, SELECTOR, self.hyper.selection, zero_sum=True)
        self.memory.meta |= {"gamma": 0.0 if isinstance(self.hyper.gamma, str) else float(self.hyper.gamma), "temperature": 1.0}

    @property
    def gamma(self) -> float:
        """γ in [0, 1], as set or as tuned."""
        return self.memory.meta["gamma"]

    def steps(self) -> list[Step]:
        """FedAvg's schedule with the updates of a trained selector; at the end the ridge selector, the temperature, and the tuning of γ."""
        rounds, updates = self.context.rounds, self.hyper.selector_updates
        if self.ridge:
            updates = 1
        elif isinstance(updates, str):
            updates = -(-_UPDATES // max(1, rounds))
        steps = []
        for step in super().steps():
            further = range(1, updates) if step.phase == "train" else ()
            steps += [step, *(Step("train_selector", step.round, part=part) for part in further)]
        last = ["selector_features"] * self.ridge + ["selector_confidence"] + ["evaluate_gamma"] * (self.hyper.gamma == "tune")
        return [*steps, *(Step(phase, rounds, everyone=True) for phase in last)]

    def configure(self, step: Step, site: str) -> Message:
        """In a round the site's models; to train or calibrate the selector the selector alone; to tune γ the whole super model."""
        match step.phase:
            case "train_selector":
                return Message(self.selector.sent, {UPDATE: step.part})
            case "selector_features":
                return Message()
            case "selector_confidence":
                return Message({SELECTOR: self.delivered_selector})
            case "evaluate_gamma":
                return self.configure_final(site)
        return Message({**super().configure(step, site).states, **self.personal.sent(site), **self.selector.sent})

    def aggregate(self, step: Step, replies: Mapping[str, Message]) -> None:
        """The next models; at the end the ridge selector, its temperature, and γ."""
        match step.phase:
            case "train_selector":
                self.selector.step(replies)
            case "selector_features":
                if not self.selector.solve(replies):
                    self.context.events.add("warning", "the sites' statistics give no selector: the models that it selects mean nothing")
            case "selector_confidence":
                losses = {site: reply.meta[CALIBRATION] for site, reply in replies.items() if CALIBRATION in reply.meta}
                self.memory.meta["temperature"] = fitted_temperature(losses)
            case "evaluate_gamma":
                replied = {site: reply.meta[GAINS] for site, reply in replies.items() if GAINS in reply.meta}
                gains = {site: {name: by_gamma.get(name) for name in map("{:g}".format, GAMMAS)} for site, by_gamma in replied.items()}
                self.memory.meta |= {"gains": gains, "gamma": tuned_gamma(gains)}
            case _:  # "train" and the last "validate": the measured models are candidates, then come the next ones
                super().aggregate(step, replies)
                self.personal.aggregate(step, replies, self.aggregation)
                if not self.ridge:
                    self.best_selector.update(replies, "selector", step.round, self.selector.state)
                    if step.phase == "train":
                        self.selector.step(replies)

    @property
    def delivered_selector(self) -> StateDict:
        """The selector of the round with the best accuracy, or the last one, at its temperature."""
        chosen = (self.hyper.selection != "last" and self.best_selector.state) or self.selector.state
        return tempered(chosen, self.memory.meta["temperature"])

    def model_selectors(self) -> dict[str, ModelSelector]:
        """Those of the global model and of the selector."""
        selectors = super().model_selectors()
        return {**selectors, SELECTOR: self.best_selector} if selectors else {}

    def selector_summary(self) -> dict[str, Any]:
        """γ, the selector's temperature, and the sites' gains by candidate if γ was tuned."""
        gains = {site: by_gamma for site, by_gamma in self.memory.meta.get("gains", {}).items() if set(by_gamma.values()) - {None}}
        reached = [gain for by_gamma in gains.values() if (gain := by_gamma[f"{self.gamma:g}"]) is not None]
        return {
            "gamma": self.gamma,
            "temperature": self.memory.meta["temperature"],
            "candidates": list(GAMMAS) if self.hyper.gamma == "tune" else [],
            "votes": {site: [by_gamma[f"{gamma:g}"] for gamma in GAMMAS] for site, by_gamma in sorted(gains.items())},
            "mean_gain": sum(reached) / len(reached) if reached else None,
        }

    def configure_final(self, site: str) -> Message:
        """The whole super model: every site may meet images that look like another site's."""
        message = with_members(super().configure_final(site), self.context, self.personal, self.delivered_selector)
        message.meta |= {"gamma": self.gamma, "choose_by": self.hyper.choose_by}
        return message

    def models(self) -> dict[str, Message]:
        """The global model, every site's personal one, and the super model as "deployed"."""
        return {**super().models(), **members(self.configure_final(self.context.sites[0]), self.context, "super")}


def with_members(message: Message, context: ServerContext, personal: ServerPersonal, selector: StateDict) -> Message:
    """The final message of the global model with personal models and selector: a super model's."""
    states, rounds = personal.delivered(best=context.plan.server_hyper.selection != "last")
    meta = {"sites": list(context.sites), "selector": dict(selector_spec(context.plan)), **({"rounds": rounds} if rounds else {})}
    return Message({**message.states, SELECTOR: selector, **states}, {**message.meta, **meta})


def members(whole: Message, context: ServerContext, kind: str) -> dict[str, Message]:
    """Every site's personal model of a super model, and the super model itself as "deployed", of a `Method.models` kind."""
    rounds = whole.meta.get("rounds", dict.fromkeys(context.sites, context.rounds))
    personal = {PERSONAL_OF.of(site): trained_model(whole.states[PERSONAL_OF.of(site)], rounds[site]) for site in context.sites}
    return {**personal, "deployed": Message(whole.states, {**whole.meta, "kind": kind})}
