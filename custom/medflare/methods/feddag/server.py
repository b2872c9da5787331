"""FedDAG's server algorithm: SHA with a warm-up of FedAvg rounds."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic.dataclasses import dataclass

from medflare.core.hyper import param
from medflare.core.message import Message
from medflare.core.settings import STRICT
from medflare.methods.base import ServerContext, Step
from medflare.methods.feddag.sha import COMPANION, SHAHyper, SHAServer
from medflare.methods.feddag.site import GENERATOR, STUDENT, FedDAGSiteHyper, initial_generator


@dataclass(frozen=True, config=STRICT)
class FedDAGServerHyper(SHAHyper):
    """SHA after a warm-up."""

    warmup: int = param(5, "first rounds as FedAvg, at most a quarter of all", source="Sec. IV-A2", low=0)


class FedDAGServer(SHAServer[FedDAGServerHyper]):
    """SHA with a warm-up of FedAvg rounds, whose models are not selected.

    The generator (and the global student of type 2) are averaged with the model.
    """

    Hyper: ClassVar[type] = FedDAGServerHyper
    site_hyper: ClassVar[type] = FedDAGSiteHyper

    def __init__(self, context: ServerContext):
        super().__init__(context)
        hyper: FedDAGSiteHyper = context.plan.site_hyper
        self.warmup = min(self.hyper.warmup, context.rounds // 4)
        if self.warmup < self.hyper.warmup:
            text = f"warm-up of {self.warmup} instead of {self.hyper.warmup} rounds: it takes at most a quarter of {context.rounds} rounds"
            context.events.add("warning", text)
        if hyper.ndag:
            self.memory.states[COMPANION.of(GENERATOR)] = initial_generator(context.task, context.seed, hyper).state_dict()
        if hyper.distribution == "type2":
            self.memory.states[COMPANION.of(STUDENT)] = self.model

    def steps(self) -> list[Step]:
        """FedAvg rounds for the warm-up, then SHA's schedule."""
        warm_up = [Step("warm_up", round) for round in range(self.warmup)]
        return [*warm_up, *(step for step in super().steps() if step.round >= self.warmup)]

    def aggregate(self, step: Step, replies: Mapping[str, Message]) -> None:
        """SHA's aggregation; during the warm-up the global student is the global model."""
        super().aggregate(step, replies)
        if step.phase == "warm_up" and STUDENT in self.companions:
            self.memory.states[COMPANION.of(STUDENT)] = self.model

    def configure_final(self, site: str) -> Message:
        """FedAvg's message; for inside sites also the generator, of which they make pictures."""
        message = super().configure_final(site)
        if GENERATOR in self.companions and site in self.context.sites:
            message.states[GENERATOR] = self.companions[GENERATOR]
        return message
