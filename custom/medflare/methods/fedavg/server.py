"""FedAvg's server algorithm: the global model, its aggregation and the best round's selection."""

from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeVar

from medflare.core.errors import ConfigError
from medflare.core.hyper import param
from medflare.core.message import FinalModels, Message
from medflare.core.phases import asks, handles
from medflare.core.settings import strict_dataclass
from medflare.core.states import StateDict
from medflare.methods.aggregation import Aggregation, WeightedMean, site_models
from medflare.methods.base import (
    PersistentState,
    Replies,
    ServerAlgorithm,
    ServerContext,
    ServerHyper,
    Step,
)
from medflare.methods.fedavg.fine_tuning import FineTunedSite
from medflare.methods.fedavg.partial import LOCAL, PartialSite
from medflare.methods.fedavg.site import (
    MODEL,
    MODEL_PART,
    SELECTED_ROUND,
    FedAvgSite,
    trainable_part,
    trained_model,
)
from medflare.methods.parts.robust import RobustLimits, RobustRule
from medflare.methods.parts.selection import ModelSelector


@strict_dataclass
class FedAvgServerHyper(ServerHyper):
    """Hyper-parameters of every server algorithm that averages."""

    rule: Literal["mean"] | RobustRule = param(
        "mean", "the mean of the sites' models, or a robust rule, see robust"
    )
    weighting: Literal["samples", "uniform"] = param(
        "samples", "aggregation weights: n_k/n or 1/K", symbol="p_k"
    )


G = TypeVar("G", bound=ServerHyper)


class FedAvgServer(ServerAlgorithm[G]):
    """Aggregates the sites' models into the next global one and selects the best round.

    It works with every site algorithm that replies with the entry "model". If the site algorithm
    declares only a part of the network, sites receive that part, and send the rest once if an
    outside site needs a whole model (`partial.PartialSite`).
    """

    Hyper: ClassVar[type] = FedAvgServerHyper
    aggregation_class: ClassVar[type[Aggregation]] = WeightedMean
    freezes = True
    model = PersistentState("model")  # the global one

    @classmethod
    def fewest_combined(cls, hyper: Any, sites: int) -> int:
        """1 for rules whose result can be the model of one site: Krum, the geometric median, if the
        site has more images than all others, and every rule of another distribution.
        """
        rule = getattr(hyper, "rule", "mean")
        return sites if rule in ("mean", "median", "trimmed", "clipped") else 1

    def __init__(self, context: ServerContext):
        super().__init__(context)
        rule = getattr(self.hyper, "rule", "mean")
        count = len(context.sites)
        trim = getattr(self.hyper, "trim", RobustLimits().trim)
        if rule != "mean" and count < 3:
            context.warn(f"{rule} of {count} sites is their mean: robustness needs three or more")
        elif rule == "trimmed" and trim * count < 1:
            context.warn(
                f"trimmed cuts none of {count} sites at trim {trim:g}, and is their mean: "
                f"take method robust with trim of 1/{count} or more, or rule median"
            )
        self.model = context.initial_state()
        self.best = ModelSelector(self.memory, "global", self.hyper.selection)
        declared = context.reply_spec("train", MODEL)
        self._sent = list(self.model)  # entries that travel
        self.partial = False  # whether each site has a part of the model of its own
        if declared is not None:
            self._sent = list(declared.spec(context.plan).tensors)
            self.partial = len(self._sent) < len(self.model) and declared.rest == "local"

    def steps(self) -> list[Step]:
        """The usual schedule, its first rounds with frozen parts (`task.freeze`).

        "fine_tune" follows if sites fine-tune, "share" if outside sites need the local parts.
        """
        steps = []
        for step in super().steps():
            if step.phase == "train" and step.round < self.context.task.freeze.rounds:
                step = replace(step, phase="train_part")
            steps.append(step)
        if FineTunedSite.fine_tune.__name__ in self.context.phases:
            steps.append(self.final_step(FineTunedSite.fine_tune))
        if self.partial and self.context.outside:
            steps.append(self.final_step(PartialSite.share))
        return steps

    @asks(FedAvgSite.train, FedAvgSite.validate)
    def request_of_model(self, step: Step, site: str) -> Message:
        """The entries of the global model that the sites share."""
        return Message.of({MODEL: {name: self.model[name] for name in self._sent}})

    @asks(FedAvgSite.train_part)
    def request_of_part(self, step: Step, site: str) -> Message:
        """The entries of the global model that the sites train."""
        trained = trainable_part(self.context.plan)
        return Message.of({MODEL_PART: {name: self.model[name] for name in trained}})

    @handles(FedAvgSite.train, FedAvgSite.train_part)
    def aggregate_models(self, step: Step, replies: Replies) -> None:
        """Enter the round's initial model in the selection, then aggregate."""
        self.select_model(step, replies)
        models = site_models(replies, MODEL)
        aggregated = self.aggregation.shared(models, step.round, self.model)
        missing = models[min(models)].state.keys() - aggregated.keys()
        if missing:
            raise ConfigError(
                f"{type(self.aggregation).__name__} lost {min(missing)!r}: return an entry for "
                "every entry of the sites' models"
            )
        self.model = {**self.model, **aggregated}
        self.context.note(weight=self.aggregation.weights)

    @handles(FedAvgSite.validate)
    def select_model(self, step: Step, replies: Replies) -> None:
        """Enter the validated model in the selection."""
        self.best.update(replies, "global", step.round, self.model)

    @asks(FineTunedSite.fine_tune)
    def request_of_selected(self, step: Step, site: str) -> Message:
        """The final global model."""
        return self.configure_final(site)

    @handles(PartialSite.share)
    def add_local_parts(self, step: Step, replies: Replies) -> None:
        """Complete the model for outside sites by the mean of the local parts."""
        local = self.aggregation.shared(site_models(replies, LOCAL), step.round)
        self.model = {**self.model, **local}
        self.memory.meta["whole"] = True

    @property
    def selected(self) -> tuple[StateDict, int]:
        """The final model, of the best or of the last round, and its number of rounds trained."""
        best = self.best.state if "global" in self.model_selectors() else None
        if best is None:
            return self.model, self.context.rounds
        return best, self.best.round or self.context.rounds

    def model_selectors(self) -> dict[str, ModelSelector]:
        """The selection of the global model, if all of it is shared."""
        if self.hyper.selection == "last" or self.partial:
            return {}
        return {"global": self.best}

    def configure_final(self, site: str) -> Message:
        model, rounds_trained = self.selected
        return Message.of({MODEL: model, SELECTED_ROUND: rounds_trained})

    def models(self) -> FinalModels:
        """The selected global model as "global", if the server has all of it."""
        if self.partial and "whole" not in self.memory.meta:
            return {}
        return {"global": trained_model(*self.selected)}
