"""IOP-FL's server algorithm: FedAvg's; for outside sites it collects every P_k at the end and sends them with w_g."""

from collections.abc import Mapping
from typing import ClassVar, Final

from medflare.core.message import Message
from medflare.core.states import StateDict
from medflare.methods.base import Capability, Step
from medflare.methods.fedavg.server import FedAvgServer, FedAvgServerHyper
from medflare.methods.fedavg.site import SELECTED_ROUND, trained_model
from medflare.methods.iop_fl.outside import EXPERT
from medflare.methods.iop_fl.site import ADAPTED, IOPHyper

ROUNDS: Final = "expert_rounds"  # in the memory: site -> rounds of training of its P_k


class IOPServer(FedAvgServer[FedAvgServerHyper]):
    """Asks for the local adapted models once, after the last round, and only for outside sites."""

    site_hyper: ClassVar[type] = IOPHyper
    capabilities: ClassVar[frozenset[Capability]] = frozenset()

    @property
    def experts(self) -> dict[str, StateDict]:
        """site -> submitted P_k."""
        return EXPERT.family(self.memory.states)

    def steps(self) -> list[Step]:
        """FedAvg's schedule and, for outside sites, the submission of every P_k at its end."""
        submit = [Step("submit", self.context.rounds, everyone=True)] if self.context.outside else []
        return [*super().steps(), *submit]

    def configure(self, step: Step, site: str) -> Message:
        return Message() if step.phase == "submit" else super().configure(step, site)

    def aggregate(self, step: Step, replies: Mapping[str, Message]) -> None:
        if step.phase == "submit":
            self.memory.states |= {EXPERT.of(site): reply.states[ADAPTED] for site, reply in replies.items()}
            rounds = {site: reply.meta[SELECTED_ROUND] for site, reply in replies.items()}
            self.memory.meta[ROUNDS] = self.memory.meta.get(ROUNDS, {}) | rounds
        else:
            super().aggregate(step, replies)

    def configure_final(self, site: str) -> Message:
        message = super().configure_final(site)
        if site in self.context.outside:
            message.states |= {EXPERT.of(name): state for name, state in self.experts.items()}
        return message

    def models(self) -> dict[str, Message]:
        rounds = self.memory.meta.get(ROUNDS, {})
        return {**super().models(), **{f"personal/{site}": trained_model(state, rounds.get(site)) for site, state in self.experts.items()}}
