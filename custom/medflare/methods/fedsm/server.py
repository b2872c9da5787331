"""FedSM's server algorithm: the global model, the personal models and the selector.

It averages the first, pulls the second together (Eq. 11), and solves or steps the third.
"""

from typing import Any, ClassVar, TypeVar

from medflare.methods import (
    FedAvgServer,
    Message,
    ModelSelector,
    Replies,
    ServerContext,
    StateDict,
    Step,
    asks,
    handles,
    trained_model,
)
from medflare.methods.fedsm.formulas import GAMMAS, fitted_temperature, tempered, tuned_gamma
from medflare.methods.fedsm.personalization import (
    PERSONALS,
    PersonalServerHyper,
    ServerPersonal,
    SoftPull,
)
from medflare.methods.fedsm.selector import (
    OF_SITES,
    UPDATE,
    ServerSelector,
    is_ridge,
    selector_spec,
)
from medflare.methods.fedsm.site import (
    CALIBRATION,
    GAINS,
    ROUNDS,
    FedSMServerHyper,
    FedSMSite,
    SuperModelSite,
)
from medflare.methods.fedsm.super_model import CHOOSE_BY, CLASSES, GAMMA, SPEC

_UPDATES = 100  # of a trained selector in a run, as many as in the published code
_CANDIDATES = [f"{gamma:g}" for gamma in GAMMAS]
V = TypeVar("V", bound=PersonalServerHyper)


class SuperModelServer(FedAvgServer[V]):
    """FedAvg's global model, the personal models, and the super model of them and a selector."""

    site_algorithm: ClassVar[type[SuperModelSite]]
    aggregation_class = SoftPull
    freezes = False

    def __init__(self, context: ServerContext):
        super().__init__(context)
        self.personal = ServerPersonal(context, self.memory, self.model)
        self.selector = ServerSelector(context, self.memory, self.site_algorithm.entries)

    def request_of_model(self, step: Step, site: str) -> Message:
        """The global and the site's personal model."""
        message = super().request_of_model(step, site)
        self.personal.add_request(site, message)
        return message

    def select_model(self, step: Step, replies: Replies) -> None:
        """The measured models are candidates."""
        super().select_model(step, replies)
        self.personal.validated(step, replies)

    def aggregate_models(self, step: Step, replies: Replies) -> None:
        """The next global and personal models."""
        super().aggregate_models(step, replies)
        self.personal.trained(step, replies, self.aggregation)

    @property
    def delivered_selector(self) -> StateDict:
        """The selector of the super model."""
        return self.selector.state

    def configure_final(self, site: str) -> Message:
        """The whole super model: every site may meet images that look like another site's."""
        message = super().configure_final(site)
        message[self.site_algorithm.entries.weights] = self.delivered_selector
        rounds = {}
        for name, best in self.personal.best.items():
            model, rounds[name] = best.chosen(self.hyper.selection, self.personal[name])
            message[PERSONALS.member(name)] = model
        message[CLASSES] = list(self.context.sites)
        message[SPEC] = dict(selector_spec(self.context.plan))
        if self.hyper.selection != "last":
            message[ROUNDS] = rounds
        return message

    def models(self) -> dict[str, Message]:
        """The global model, every site's personal one, and the super model as "deployed"."""
        models = super().models()
        whole = self.configure_final(self.context.sites[0])
        rounds = whole.get(ROUNDS) or dict.fromkeys(self.context.sites, self.context.rounds)
        for site, round in rounds.items():
            personal = PERSONALS.member(site)
            models[personal.name] = trained_model(whole[personal], round)
        kind = self.site_algorithm.kind
        models["deployed"] = Message(whole.states, {**whole.meta, "kind": kind})
        return models


class FedSMServer(SuperModelServer[FedSMServerHyper]):
    """FedAvg's global model, the personal models and the selector.

    At the end temperature and γ are chosen on validation images.
    """

    site_algorithm = FedSMSite

    def __init__(self, context: ServerContext):
        super().__init__(context)
        self.ridge = is_ridge(context.plan)
        rule = self.hyper.selection
        self.best_selector = ModelSelector(self.memory, "selector", rule, zero_sum=True)
        gamma = 0.0 if isinstance(self.hyper.gamma, str) else float(self.hyper.gamma)
        self.memory.meta |= {"gamma": gamma, "temperature": 1.0}

    @property
    def gamma(self) -> float:
        """γ in [0, 1], as set or as tuned."""
        return self.memory.meta["gamma"]

    @property
    def updates(self) -> int:
        """Of a trained selector in each round."""
        if self.ridge:
            return 1
        if isinstance(self.hyper.selector_updates, str):
            return -(-_UPDATES // max(1, self.context.rounds))
        return self.hyper.selector_updates

    def steps(self) -> list[Step]:
        """FedAvg's schedule with the updates of a trained selector.

        At the end the ridge selector, the temperature, and the tuning of γ.
        """
        steps = []
        for step in super().steps():
            steps.append(step)
            if step.phase == "train":
                for part in range(1, self.updates):
                    steps.append(Step.of(FedSMSite.train_selector, step.round, part=part))
        if self.ridge:
            steps.append(self.final_step(FedSMSite.selector_features))
        steps.append(self.final_step(FedSMSite.selector_confidence))
        if self.hyper.gamma == "tune":
            steps.append(self.final_step(FedSMSite.evaluate_gamma))
        return steps

    def request_of_model(self, step: Step, site: str) -> Message:
        """The global model, the site's personal one, and the selector if it is trained."""
        message = super().request_of_model(step, site)
        self.selector.add_request(message)
        return message

    def select_model(self, step: Step, replies: Replies) -> None:
        """The measured models are candidates."""
        super().select_model(step, replies)
        if not self.ridge:
            self.best_selector.update(replies, "selector", step.round, self.selector.state)

    def aggregate_models(self, step: Step, replies: Replies) -> None:
        """The next global and personal models, and a step of the selector if it is trained."""
        super().aggregate_models(step, replies)
        if not self.ridge:
            self.selector.step(replies)

    # -- the selector -----------------------------------------------------------------------------

    @asks(FedSMSite.train_selector)
    def request_of_selector(self, step: Step, site: str) -> Message:
        """The selector alone."""
        message = Message.of({UPDATE: step.part})
        self.selector.add_request(message)
        return message

    @handles(FedSMSite.train_selector)
    def step_selector(self, step: Step, replies: Replies) -> None:
        """A further update of the selector within a round."""
        self.selector.step(replies)

    @handles(FedSMSite.selector_features)
    def solve_selector(self, step: Step, replies: Replies) -> None:
        """The ridge selector."""
        if not self.selector.solve(replies):
            self.context.warn(
                "the sites' statistics give no selector: the models that it selects mean nothing"
            )

    @asks(FedSMSite.selector_confidence)
    def request_of_confidence(self, step: Step, site: str) -> Message:
        """The finished selector."""
        return Message.of({OF_SITES.weights: self.delivered_selector})

    @handles(FedSMSite.selector_confidence)
    def fit_temperature(self, step: Step, replies: Replies) -> None:
        """The selector's temperature."""
        losses = {site: reply.get(CALIBRATION) or [] for site, reply in replies.items()}
        self.memory.meta["temperature"] = fitted_temperature(losses)

    @asks(FedSMSite.evaluate_gamma)
    def request_of_gains(self, step: Step, site: str) -> Message:
        """The whole super model."""
        return self.configure_final(site)

    @handles(FedSMSite.evaluate_gamma)
    def tune_gamma(self, step: Step, replies: Replies) -> None:
        """γ with the best mean gain over the global model."""
        gains = {}
        for site, reply in replies.items():
            if GAINS in reply:
                by_gamma = reply[GAINS]
                gains[site] = {name: by_gamma.get(name) for name in _CANDIDATES}
        self.memory.meta |= {"gains": gains, "gamma": tuned_gamma(gains)}

    @property
    def delivered_selector(self) -> StateDict:
        """The selector of the round with the best accuracy, or the last one, at its temperature."""
        chosen, _ = self.best_selector.chosen(self.hyper.selection, self.selector.state)
        return tempered(chosen, self.memory.meta["temperature"])

    # -- results ----------------------------------------------------------------------------------

    def model_selectors(self) -> dict[str, ModelSelector]:
        """Those of the global model and of the selector."""
        selectors = super().model_selectors()
        if selectors:
            selectors["selector"] = self.best_selector
        return selectors

    def selector_summary(self) -> dict[str, Any]:
        """γ, the selector's temperature, and the sites' gains by candidate if γ was tuned."""
        votes = {}
        gains = []
        for site, by_gamma in sorted(self.memory.meta.get("gains", {}).items()):
            if all(gain is None for gain in by_gamma.values()):
                continue
            votes[site] = [by_gamma[name] for name in _CANDIDATES]
            gain = by_gamma[f"{self.gamma:g}"]
            if gain is not None:
                gains.append(gain)
        return {
            "gamma": self.gamma,
            "temperature": self.memory.meta["temperature"],
            "candidates": list(GAMMAS) if self.hyper.gamma == "tune" else [],
            "votes": votes,
            "mean_gain": sum(gains) / len(gains) if gains else None,
        }

    def configure_final(self, site: str) -> Message:
        """The whole super model, with γ and whose scores choose."""
        message = super().configure_final(site)
        message[GAMMA] = self.gamma
        message[CHOOSE_BY] = self.hyper.choose_by
        return message
