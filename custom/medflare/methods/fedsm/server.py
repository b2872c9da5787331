"""FedSM's server algorithm and schedule: it averages the global model, pulls the personal models
together (Eq. 11), and solves or steps the selector.
"""

from typing import Any, ClassVar, TypeVar

import torch

from medflare.core.message import FinalModels
from medflare.methods import (
    VALIDATION,
    Best,
    FedAvgServer,
    Message,
    ModelSelector,
    PersistentState,
    Replies,
    ServerContext,
    StateDict,
    Step,
    asks,
    copy_state,
    handles,
    site_models,
    trained_model,
)
from medflare.methods.aggregation import plain_mean
from medflare.methods.fedsm.formulas import (
    GAMMAS,
    adam_step,
    fitted_temperature,
    tempered,
    tuned_gamma,
)
from medflare.methods.fedsm.hyper import FedSMServerHyper, PersonalServerHyper
from medflare.methods.fedsm.personalization import (
    META_MODEL,
    PERSONAL,
    PERSONALS,
    SHARED_META,
    SoftPull,
)
from medflare.methods.fedsm.selector import (
    GRADIENT,
    RATES,
    SELECTOR,
    TRAINED_SELECTOR,
    UPDATE,
    is_ridge,
    selector_outputs,
    selector_spec,
    solved,
)
from medflare.methods.fedsm.site import CALIBRATION, GAINS, ROUNDS, FedSMSite, SuperModelSite
from medflare.methods.fedsm.super_model import CHOOSE_BY, CLASSES, GAMMA, SPEC

_UPDATES = 100  # of a trained selector in a run, as many as in the published code
_CANDIDATES = [f"{gamma:g}" for gamma in GAMMAS]
V = TypeVar("V", bound=PersonalServerHyper)


class SuperModelServer(FedAvgServer[V]):
    """FedAvg's global model, the personal models, and the super model of them and a selector.

    A personal model starts as the global one of the site's first round.

    Attributes:
        selector: its weights; `first` and `second` are its Adam moments.
        best_personal: site -> its best personal model by the site's validation metric.
    """

    site_algorithm: ClassVar[type[SuperModelSite]]
    aggregation_class = SoftPull
    freezes = False
    selector = PersistentState("selector")
    first = PersistentState("selector_exp_avg")
    second = PersistentState("selector_exp_avg_sq")

    def __init__(self, context: ServerContext):
        super().__init__(context)
        plan = context.plan
        self.personalization = plan.site_hyper.personalization
        self.best_personal: dict[str, Best] = {}
        for site in context.sites:
            self.best_personal[site] = Best(self.memory, PERSONALS.member(site).name)
        self.memory[META_MODEL] = copy_state(self.model)
        lam = self.hyper.lam
        count = len(context.sites)
        if self.personalization == "softpull" and lam * count < 1 < count:
            context.warn(
                f"lam = {lam:g} is below 1/K = {1 / count:.3g}: SoftPull overshoots the mean"
            )
        spec = selector_spec(plan)
        self.selector = context.initial_state("selector", spec, selector_outputs(plan))
        self.memory.meta["selector_step"] = 0
        self.ridge = is_ridge(plan)
        if not self.ridge:
            learnt = GRADIENT.template(plan)
            self.first = {name: torch.zeros_like(self.selector[name]) for name in learnt}
            self.second = dict(self.first)

    def personal(self, site: str) -> StateDict:
        """The personal model of a site; the global one until it has trained."""
        return self.memory.get(PERSONALS.member(site)) or self.model

    def request_of_model(self, step: Step, site: str) -> Message:
        """The global and the site's personal model; for Per-FedAvg and pFedMe also the shared model
        from which it starts.
        """
        message = super().request_of_model(step, site)
        message[PERSONAL] = self.personal(site)
        if self.personalization in SHARED_META:
            message[META_MODEL] = self.memory[META_MODEL]
        return message

    def select_model(self, step: Step, replies: Replies) -> None:
        """Enter the measured models in the selection, also Per-FedAvg's personal model, which the
        site makes, measures and sends.
        """
        super().select_model(step, replies)
        for site, reply in replies.items():
            if self.personalization == "perfedavg":
                self.memory[PERSONALS.member(site)] = reply[PERSONAL]
            value = reply[VALIDATION].get("personal")
            self.best_personal[site].propose(value, step.round, self.personal(site))

    def aggregate_models(self, step: Step, replies: Replies) -> None:
        """Make the next global and personal models. Sites that did not reply keep theirs."""
        super().aggregate_models(step, replies)
        models = {site: reply[PERSONAL] for site, reply in replies.items()}
        if self.personalization == "softpull":
            models = self.aggregation.personal(site_models(replies, PERSONAL), step.round)
        for site, state in models.items():
            self.memory[PERSONALS.member(site)] = state
        if self.personalization in SHARED_META:
            shared = site_models(replies, META_MODEL)
            self.memory[META_MODEL] = self.aggregation.shared(
                shared, step.round, self.memory[META_MODEL]
            )

    @handles(FedSMSite.train_selector)
    def step_selector(self, step: Step, replies: Replies) -> None:
        """Take a step of Adam along the sites' mean gradient.

        Sites, the selector's classes, have equal weights: otherwise it would choose the largest
        site.
        """
        count = self.memory.meta["selector_step"] + 1
        mean = plain_mean({site: reply[GRADIENT] for site, reply in replies.items()})
        rate = RATES[selector_spec(self.context.plan)["name"]]
        moments = {"exp_avg": self.first, "exp_avg_sq": self.second}
        self.selector, moments = adam_step(self.selector, mean, moments, count, rate)
        self.first = moments["exp_avg"]
        self.second = moments["exp_avg_sq"]
        self.memory.meta["selector_step"] = count

    @property
    def final_selector(self) -> StateDict:
        """The selector of the super model."""
        return self.selector

    def configure_final(self, site: str) -> Message:
        """The whole super model: every site may meet images that look like another site's."""
        message = super().configure_final(site)
        message[SELECTOR] = self.final_selector
        rounds = {}
        for name, best in self.best_personal.items():
            model, rounds[name] = best.chosen(self.hyper.selection, self.personal(name))
            message[PERSONALS.member(name)] = model
        message[CLASSES] = list(self.context.sites)
        message[SPEC] = dict(selector_spec(self.context.plan))
        if self.hyper.selection != "last":
            message[ROUNDS] = rounds
        return message

    def models(self) -> FinalModels:
        """The global model, every site's personal one, and the super model as "deployed"."""
        models = super().models()
        whole = self.configure_final(self.context.sites[0])
        rounds = whole.get(ROUNDS) or dict.fromkeys(self.context.sites, self.context.rounds)
        for site, rounds_trained in rounds.items():
            personal = PERSONALS.member(site)
            models[personal.name] = trained_model(whole[personal], rounds_trained)
        kind = self.site_algorithm.kind
        models["deployed"] = Message(whole.states, {**whole.meta, "kind": kind})
        return models


class FedSMServer(SuperModelServer[FedSMServerHyper]):
    """FedAvg's global model, the personal models and the selector, whose temperature and γ are
    chosen at the end on validation images.
    """

    site_algorithm = FedSMSite

    def __init__(self, context: ServerContext):
        super().__init__(context)
        self.planned = max(1, context.rounds)  # early stopping may lower the context's
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
        """The number of updates of a trained selector in each round."""
        if self.ridge:
            return 1
        if isinstance(self.hyper.selector_updates, str):
            return -(-_UPDATES // self.planned)
        return self.hyper.selector_updates

    def steps(self) -> list[Step]:
        """FedAvg's schedule with the updates of a trained selector; at the end come the ridge
        selector, the temperature, and the tuning of γ.
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
        if not self.ridge:
            message[TRAINED_SELECTOR] = self.selector
        return message

    def select_model(self, step: Step, replies: Replies) -> None:
        """Enter the measured models, and a trained selector, in the selection."""
        super().select_model(step, replies)
        if not self.ridge:
            self.best_selector.update(replies, "selector", step.round, self.selector)

    def aggregate_models(self, step: Step, replies: Replies) -> None:
        """Make the next global and personal models, and step the selector if it is trained."""
        super().aggregate_models(step, replies)
        if not self.ridge:
            self.step_selector(step, replies)

    # -- the selector -----------------------------------------------------------------------------

    @asks(FedSMSite.train_selector)
    def request_of_selector(self, step: Step, site: str) -> Message:
        """The selector alone."""
        return Message.of({UPDATE: step.part, TRAINED_SELECTOR: self.selector})

    @handles(FedSMSite.selector_features)
    def solve_selector(self, step: Step, replies: Replies) -> None:
        """Solve for the ridge selector; a warning if the statistics give none."""
        solution = solved(replies, self.context.sites)
        if solution is None:
            self.context.warn(
                "the sites' statistics give no selector: the models that it selects mean nothing"
            )
            return
        weight, bias = solution
        self.selector = {
            name: weight if name.endswith("weight") else bias for name in self.selector
        }

    @asks(FedSMSite.selector_confidence)
    def request_of_confidence(self, step: Step, site: str) -> Message:
        """The finished selector."""
        return Message.of({SELECTOR: self.final_selector})

    @handles(FedSMSite.selector_confidence)
    def fit_temperature(self, step: Step, replies: Replies) -> None:
        """Choose the selector's temperature."""
        losses = {site: reply.get(CALIBRATION) or [] for site, reply in replies.items()}
        self.memory.meta["temperature"] = fitted_temperature(losses)

    @asks(FedSMSite.evaluate_gamma)
    def request_of_gains(self, step: Step, site: str) -> Message:
        """The whole super model."""
        return self.configure_final(site)

    @handles(FedSMSite.evaluate_gamma)
    def tune_gamma(self, step: Step, replies: Replies) -> None:
        """Choose γ by the sites' gains over the global model, see `tuned_gamma`."""
        gains = {}
        for site, reply in replies.items():
            if GAINS in reply:
                by_gamma = reply[GAINS]
                gains[site] = {name: by_gamma.get(name) for name in _CANDIDATES}
        self.memory.meta |= {"gains": gains, "gamma": tuned_gamma(gains)}

    @property
    def final_selector(self) -> StateDict:
        """The selector of the round with the best accuracy, or the last one, at its temperature."""
        chosen, _ = self.best_selector.chosen(self.hyper.selection, self.selector)
        return tempered(chosen, self.memory.meta["temperature"])

    # -- results ----------------------------------------------------------------------------------

    def model_selectors(self) -> dict[str, ModelSelector]:
        """The selections of the global model and of the selector."""
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
        """The whole super model, with γ and whose scores choose, an image's or a patient's."""
        message = super().configure_final(site)
        message[GAMMA] = self.gamma
        message[CHOOSE_BY] = self.hyper.choose_by
        return message
