"""FedDAG's server algorithm: SHA with a warm-up of FedAvg rounds."""

from medflare.methods import (
    MODEL,
    Message,
    Replies,
    ServerContext,
    Step,
    asks,
    handles,
    param,
    strict_dataclass,
)
from medflare.methods.feddag.sha import COMPANIONS, SHAHyper, SHAServer
from medflare.methods.feddag.site import GENERATOR, STUDENT, FedDAGSite, initial_generator

_GENERATOR = COMPANIONS.member(GENERATOR.name)
_STUDENT = COMPANIONS.member(STUDENT.name)


@strict_dataclass
class FedDAGServerHyper(SHAHyper):
    """SHA after a warm-up."""

    warmup: int = param(
        5, "first rounds as FedAvg, at most a quarter of all", source="Sec. IV-A2", low=0
    )


class FedDAGServer(SHAServer[FedDAGServerHyper]):
    """SHA with a warm-up of FedAvg rounds, whose models are not selected.

    The generator (and the global student of type 2) are averaged with the model.
    """

    site_algorithm = FedDAGSite

    def __init__(self, context: ServerContext):
        super().__init__(context)
        hyper = context.plan.site_hyper
        self.warmup = min(self.hyper.warmup, context.rounds // 4)
        if self.warmup < self.hyper.warmup:
            context.warn(
                f"warm-up of {self.warmup} instead of {self.hyper.warmup} rounds: "
                f"it takes at most a quarter of {context.rounds} rounds"
            )
        if hyper.ndag:
            generator = initial_generator(context.task, context.seed, hyper)
            self.memory[_GENERATOR] = generator.state_dict()
        if hyper.distribution == "type2":
            self.memory[_STUDENT] = self.model

    def steps(self) -> list[Step]:
        """FedAvg rounds for the warm-up, then SHA's schedule."""
        steps = [Step.of(FedDAGSite.warm_up, round) for round in range(self.warmup)]
        return steps + [step for step in super().steps() if step.round >= self.warmup]

    @asks(FedDAGSite.warm_up)
    def request_of_warm_up(self, step: Step, site: str) -> Message:
        """The global model alone."""
        return Message.of({MODEL: self.model})

    @handles(FedDAGSite.warm_up)
    def average_warm_up(self, step: Step, replies: Replies) -> None:
        """FedAvg's mean; the global student is the global model."""
        self.average_models(step, replies)
        if _STUDENT in self.memory:
            self.memory[_STUDENT] = self.model

    def configure_final(self, site: str) -> Message:
        """FedAvg's message; for inside sites also the generator, of which they make pictures."""
        message = super().configure_final(site)
        if _GENERATOR in self.memory and site in self.context.sites:
            message[GENERATOR] = self.memory[_GENERATOR]
        return message
