"""FedDAG's server algorithm: SHA with a warm-up of FedAvg rounds."""

from collections.abc import Mapping
from typing import ClassVar

from medflare.core.message import Message
from medflare.methods.base import ServerContext, Step
from medflare.methods.feddag.generation import initial_generator
from medflare.methods.feddag.hyper import FedDAGServerHyper, FedDAGSiteHyper
from medflare.methods.feddag.sha import COMPANION, SHAServer
from medflare.methods.feddag.site import GENERATOR, STUDENT


class FedDAGServer(SHAServer[FedDAGServerHyper]):
    """SHA with a warm-up of FedAvg rounds, whose models are never delivered.

    The generator (and the global student of type 2) are averaged along with the model.
    """

    Hyper: ClassVar[type] = FedDAGServerHyper
    site_hyper: ClassVar[type] = FedDAGSiteHyper

    def __init__(self, context: ServerContext):
        super().__init__(context)
        self.sites_hyper: FedDAGSiteHyper = context.plan.site_hyper
        self.warmup = min(self.hyper.warmup, context.rounds // 4)
        if self.warmup < self.hyper.warmup:
            text = f"warm-up of {self.warmup} instead of {self.hyper.warmup} rounds: it takes at most a quarter of {context.rounds} rounds"
            context.events.add("warning", text)
        if self.sites_hyper.ndag:
            generator = initial_generator(context.task, context.seed, self.sites_hyper)
            self.memory.states[COMPANION.of(GENERATOR)] = generator.state_dict()
        if self.sites_hyper.distribution == "type2":
            self.memory.states[COMPANION.of(STUDENT)] = self.model

    def steps(self) -> list[Step]:
        """FedAvg rounds for the warm-up, SHA's schedule after them."""
        warm_up = [Step("warm_up", round) for round in range(self.warmup)]
        return [*warm_up, *(step for step in super().steps() if step.round >= self.warmup)]

    def aggregate(self, step: Step, replies: Mapping[str, Message]) -> None:
        """SHA's aggregation; after the warm-up the global student begins as the global model."""
        super().aggregate(step, replies)
        if step.phase == "warm_up" and STUDENT in self.companions:
            self.memory.states[COMPANION.of(STUDENT)] = self.model

    def configure_final(self, site: str) -> Message:
        """FedAvg's message; for pictures also the generator."""
        message = super().configure_final(site)
        if self.sites_hyper.pictures and GENERATOR in self.companions and site in self.context.sites:
            message.states[GENERATOR] = self.companions[GENERATOR]
        return message
