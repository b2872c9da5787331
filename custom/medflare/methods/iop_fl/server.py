"""IOP-FL's server algorithm: FedAvg's; where outside sites take part, it collects every P_k at the end and hands them on with w_g."""

from collections.abc import Mapping
from typing import ClassVar, Final

from medflare.core.message import Message
from medflare.core.states import StateDict
from medflare.methods.base import Capability, Step
from medflare.methods.fedavg.server import FedAvgServer, FedAvgServerHyper
from medflare.methods.fedavg.site import SELECTED_ROUND, trained_model
from medflare.methods.iop_fl.gate import ranges_of
from medflare.methods.iop_fl.hyper import IOPHyper
from medflare.methods.iop_fl.outside import EXPERT, SHARES
from medflare.methods.iop_fl.site import ADAPTED

BEHIND: Final = "expert_rounds"  # in the algorithm's memory: site -> rounds of training behind its P_k


class IOPServer(FedAvgServer[FedAvgServerHyper]):
    """Asks for the local adapted models once, after the last round, and only for outside sites."""

    site_hyper: ClassVar[type] = IOPHyper
    capabilities: ClassVar[frozenset[Capability]] = frozenset()

    @property
    def experts(self) -> dict[str, StateDict]:
        """site -> P_k, of those that have submitted theirs."""
        return EXPERT.family(self.memory.states)

    def steps(self) -> list[Step]:
        """FedAvg's schedule and, for outside sites, the submission of every P_k at its end."""
        submit = [Step("submit", self.context.rounds, everyone=True)] if self.context.outside else []
        return [*super().steps(), *submit]

    def configure(self, step: Step, site: str) -> Message:
        """FedAvg's message; an empty one for "submit"."""
        return Message() if step.phase == "submit" else super().configure(step, site)

    def aggregate(self, step: Step, replies: Mapping[str, Message]) -> None:
        """Keep the submitted P_k as they are, else as FedAvg."""
        if step.phase == "submit":
            self.memory.states |= {EXPERT.of(site): reply.states[ADAPTED] for site, reply in replies.items()}
            behind = {site: reply.meta[SELECTED_ROUND] for site, reply in replies.items()}
            self.memory.meta[BEHIND] = self.memory.meta.get(BEHIND, {}) | behind
            for site in replies:
                if self.context.site_counts.get(site, {}).get("class_counts") == []:
                    text = "keeps its counts by class (minimum_patients): routing is held to the other sites' range of a class's share"
                    self.context.events.add("warning", text, site=site)
        else:
            super().aggregate(step, replies)

    def configure_final(self, site: str) -> Message:
        """FedAvg's message; an outside site gets every P_k beside it, and how much of an image the inside sites' foreground covers."""
        message = super().configure_final(site)
        if site in self.context.outside:
            message.states |= {EXPERT.of(name): state for name, state in self.experts.items()}
            known = [self.context.site_counts.get(name, {}).get("class_counts") for name in self.experts]
            message.meta[SHARES] = ranges_of([counts for counts in known if counts], self.context.task)
        return message

    def models(self) -> dict[str, Message]:
        """The selected global model and every P_k that was submitted."""
        behind = self.memory.meta.get(BEHIND, {})
        return {**super().models(), **{f"personal/{site}": trained_model(state, behind.get(site)) for site, state in self.experts.items()}}
