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
from medflare.methods.fedsm.hyper import FedSMServerHyper, FedSMSiteHyper
from medflare.methods.fedsm.personalization import PERSONAL_OF, ServerPersonal
from medflare.methods.fedsm.selector import ServerSelector, is_ridge, selector_spec
from medflare.methods.fedsm.site import CALIBRATION, GAINS, UPDATE
from medflare.methods.parts.selection import ModelSelector

SELECTOR = "selector"
_UPDATES: Final = 100  # of a trained selector in a run, at least, unless said otherwise; as many as the published code takes


class SoftPull(WeightedMean):
    """The weighted mean for everybody, and SoftPull (Eq. 11) for each site's own model."""

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
        self.personal = ServerPersonal(context, self.memory, self.model)
        self.selector = ServerSelector(context, self.memory, len(context.sites))
        self.best_selector = ModelSelector(self.memory, SELECTOR, self.hyper.selection, rivals=True)
        self.memory.meta |= {"gamma": 0.0 if isinstance(self.hyper.gamma, str) else float(self.hyper.gamma), "temperature": 1.0}

    @property
    def gamma(self) -> float:
        """γ in [0, 1], as set or as tuned."""
        return self.memory.meta["gamma"]

    def steps(self) -> list[Step]:
        """FedAvg's schedule with the updates of a trained selector; at the end the ridge selector, the temperature, and the tuning of γ."""
        steps = []
        ridge, asked = is_ridge(self.context.plan), self.hyper.selector_updates
        updates = 1 if ridge else -(-_UPDATES // max(1, self.context.rounds)) if isinstance(asked, str) else asked
        for step in super().steps():
            further = updates - 1 if step.phase == "train" else 0
            steps += [step, *(Step("train_selector", step.round, part=part + 1) for part in range(further))]
        last = [
            *(["selector_features"] if ridge else []),
            "selector_confidence",
            *(["evaluate_gamma"] if self.hyper.gamma == "tune" else []),
        ]
        return [*steps, *(Step(phase, self.context.rounds, everyone=True) for phase in last)]

    def configure(self, step: Step, site: str) -> Message:
        """In a round the site's three models; the selector alone to train or calibrate it; the whole super model to tune γ."""
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
        """The models' next versions; at the end the ridge selector, its temperature, and γ."""
        match step.phase:
            case "train_selector":
                self.selector.step(replies)
            case "selector_features":
                self.selector.solve(replies)
            case "selector_confidence":
                losses = {site: reply.meta[CALIBRATION] for site, reply in replies.items() if CALIBRATION in reply.meta}
                self.memory.meta["temperature"] = fitted_temperature(losses)
            case "evaluate_gamma":
                told = {site: reply.meta[GAINS] for site, reply in replies.items() if GAINS in reply.meta}
                gains = {site: {name: known.get(name) for name in map("{:g}".format, GAMMAS)} for site, known in told.items()}
                self.memory.meta |= {"gains": gains, "gamma": tuned_gamma(gains)}
            case _:
                self._aggregate_round(step, replies)

    def _aggregate_round(self, step: Step, replies: Mapping[str, Message]) -> None:
        """A round, or the last look: every model that was measured is a candidate, then comes its next version."""
        super().aggregate(step, replies)
        self.personal.aggregate(step, replies, self.aggregation)
        if not is_ridge(self.context.plan):
            self.best_selector.hold(replies, "selector", step.round, self.selector.state)
            if step.phase == "train":
                self.selector.step(replies)

    @property
    def delivered_selector(self) -> StateDict:
        """Of the round with the best accuracy, or the last one, at its temperature."""
        chosen = (self.hyper.selection != "last" and self.best_selector.state) or self.selector.state
        return tempered(chosen, self.memory.meta["temperature"])

    def model_selectors(self) -> dict[str, ModelSelector]:
        """The global model and the selector."""
        found = super().model_selectors()
        return {**found, SELECTOR: self.best_selector} if found else {}

    def selector_summary(self) -> dict[str, Any]:
        """γ, the selector's temperature, and the sites' votes on the candidates where γ was tuned."""
        gains = {site: of for site, of in self.memory.meta.get("gains", {}).items() if any(gain is not None for gain in of.values())}
        known = [gain for of in gains.values() if (gain := of[f"{self.gamma:g}"]) is not None]
        return {
            "gamma": self.gamma,
            "temperature": self.memory.meta["temperature"],
            "candidates": list(GAMMAS) if self.hyper.gamma == "tune" else [],
            "votes": {site: [of[f"{gamma:g}"] for gamma in GAMMAS] for site, of in sorted(gains.items())},
            "mean_gain": sum(known) / len(known) if known else None,
        }

    def configure_final(self, site: str) -> Message:
        """The whole super model: every site may meet images that another site's model knows better."""
        message = with_members(super().configure_final(site), self.context, self.personal, self.delivered_selector)
        message.meta |= {"gamma": self.gamma, "choose_by": self.hyper.choose_by}
        return message

    def models(self) -> dict[str, Message]:
        """The global model, every site's personal one, and the super model as "deployed"."""
        return {**super().models(), **members(self.configure_final(self.context.sites[0]), self.context, "super")}


def with_members(message: Message, context: ServerContext, personal: ServerPersonal, selector: StateDict) -> Message:
    """The delivery of a global model made that of a super model.

    Args:
        message: with the global model.
        context: of the server algorithm.
        personal: the personal models.
        selector: weights of the selector.
    """
    states, rounds = personal.delivered(best=context.plan.server_hyper.selection != "last")
    meta = {"sites": list(context.sites), "selector": dict(selector_spec(context.plan)), **({"rounds": rounds} if rounds else {})}
    return Message({**message.states, SELECTOR: selector, **states}, {**message.meta, **meta})


def members(whole: Message, context: ServerContext, kind: str) -> dict[str, Message]:
    """Every site's personal model, and the super model as "deployed".

    Args:
        whole: the super model's delivery.
        context: of the server algorithm.
        kind: of the deployed model, see `Method.models`.
    """
    rounds = whole.meta.get("rounds", dict.fromkeys(context.sites, context.rounds))
    personal = {PERSONAL_OF.of(site): trained_model(whole.states[PERSONAL_OF.of(site)], rounds[site]) for site in context.sites}
    return {**personal, "deployed": Message(whole.states, {**whole.meta, "kind": kind})}
