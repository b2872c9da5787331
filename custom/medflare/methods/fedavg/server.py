"""FedAvg's server algorithm: the global model, its aggregation and the selection of the best round."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeVar

from pydantic.dataclasses import dataclass

from medflare.core.hyper import param
from medflare.core.message import Message
from medflare.core.settings import STRICT
from medflare.core.states import StateDict
from medflare.methods.aggregation import Aggregation, WeightedMean, site_models
from medflare.methods.base import Capability, PersistentState, ServerAlgorithm, ServerContext, ServerHyper, Step
from medflare.methods.fedavg.site import GLOBAL, LOCAL, MODEL, SELECTED_ROUND, trainable_part, trained_model
from medflare.methods.parts.robust import RobustRule
from medflare.methods.parts.selection import ModelSelector


@dataclass(frozen=True, config=STRICT)
class FedAvgServerHyper(ServerHyper):
    """Hyper-parameters of every server algorithm that averages."""

    rule: Literal["mean"] | RobustRule = param("mean", "the mean of the sites' models, or a robust rule, see robust")
    weighting: Literal["samples", "uniform"] = param("samples", "aggregation weights: n_k/n or 1/K", symbol="p_k")


G = TypeVar("G", bound=ServerHyper)


class FedAvgServer(ServerAlgorithm[G]):
    """Aggregates the sites' models into the next global one and selects the best round.

    Works with every site algorithm that replies with the entry "model". If the site algorithm declares only a part of the network, sites
    receive that part, and send the rest once if an outside site needs a whole model (`partial.PartialSite`).
    """

    Hyper: ClassVar[type] = FedAvgServerHyper
    aggregation_class: ClassVar[type[Aggregation[Any]]] = WeightedMean
    capabilities: ClassVar[frozenset[Capability]] = frozenset({"freeze"})
    model = PersistentState("model")  # the global one

    def __init__(self, context: ServerContext):
        super().__init__(context)
        rule = getattr(self.hyper, "rule", "mean")
        if rule != "mean" and len(context.sites) < 3:
            context.events.add("warning", f"{rule} of {len(context.sites)} sites is their mean: robustness needs three or more")
        self.model = context.initial_state()
        self.best = ModelSelector(self.memory, "global", self.hyper.selection)
        declared = context.reply_spec("train", MODEL)
        self._sent = list(self.model if declared is None else declared.tensors)  # entries that travel

    @property
    def partial(self) -> bool:
        """Whether the sites keep a part of the model."""
        return len(self._sent) < len(self.model)

    def steps(self) -> list[Step]:
        """The usual schedule, its first rounds with frozen parts (`task.freeze`); then "share", if outside sites need the local parts."""
        share = [Step("share", self.context.rounds, everyone=True)] if self.partial and self.context.outside else []
        frozen = self.context.task.freeze.rounds
        usual = super().steps()
        return [*(replace(step, phase="train_part") if step.phase == "train" and step.round < frozen else step for step in usual), *share]

    def configure(self, step: Step, site: str) -> Message:
        """The entries of the global model that the sites share or train; none for the phase "share"."""
        if step.phase == "share":
            return Message()
        sent = trainable_part(self.context.plan) if step.phase == "train_part" else self._sent
        return Message({GLOBAL: {name: self.model[name] for name in sent}})

    def aggregate(self, step: Step, replies: Mapping[str, Message]) -> None:
        """Enter the round's initial model in the selection, then aggregate; in "share" add the mean of the local parts."""
        if step.phase == "share":
            self.model = {**self.model, **self.aggregation.shared(site_models(replies, LOCAL), step.round)}
            self.memory.meta["whole"] = True
            return
        self.best.update(replies, "global", step.round, self.model)
        if step.phase in ("train", "train_part"):
            self.model = {**self.model, **self.aggregation.shared(site_models(replies, MODEL), step.round, self.model)}
            self.context.note(weight=self.aggregation.weights)

    @property
    def selected(self) -> tuple[StateDict, int]:
        """The final model, of the best or of the last round, and its rounds of training."""
        best = self.best.state if "global" in self.model_selectors() else None
        return (self.model, self.context.rounds) if best is None else (best, self.best.round or self.context.rounds)

    def model_selectors(self) -> dict[str, ModelSelector]:
        """The global model's, if all of it is shared."""
        return {} if self.hyper.selection == "last" or self.partial else {"global": self.best}

    def configure_final(self, site: str) -> Message:
        model, round = self.selected
        return Message({GLOBAL: model}, {SELECTED_ROUND: round})

    def models(self) -> dict[str, Message]:
        """The selected global model as "global", if the server has all of it."""
        whole = not self.partial or "whole" in self.memory.meta
        model, round = self.selected
        return {"global": trained_model(model, round)} if whole else {}
