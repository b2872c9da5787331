"""IOP-FL's server algorithm: FedAvg's, which at the end collects every P_k and sends them with w_g
to outside sites.
"""

from medflare.methods import (
    SELECTED_ROUND,
    FedAvgServer,
    FedAvgServerHyper,
    Message,
    Replies,
    Step,
    handles,
    trained_model,
)
from medflare.methods.iop_fl.outside import EXPERTS
from medflare.methods.iop_fl.site import ADAPTED, IOPSite

ROUNDS = "expert_rounds"  # in the memory: site -> rounds of training of its P_k


class IOPServer(FedAvgServer[FedAvgServerHyper]):
    """Asks for the local adapted models once, after the last round, and only for outside sites."""

    site_algorithm = IOPSite
    freezes = False

    def steps(self) -> list[Step]:
        """FedAvg's schedule and, for outside sites, the submission of every P_k at its end."""
        steps = super().steps()
        if self.context.outside:
            steps.append(self.final_step(IOPSite.submit))
        return steps

    @handles(IOPSite.submit)
    def collect_experts(self, step: Step, replies: Replies) -> None:
        """Store every P_k with its rounds of training."""
        rounds = dict(self.memory.meta.get(ROUNDS, {}))
        for site, reply in replies.items():
            self.memory[EXPERTS.member(site)] = reply[ADAPTED]
            rounds[site] = reply[SELECTED_ROUND]
        self.memory.meta[ROUNDS] = rounds

    def configure_final(self, site: str) -> Message:
        message = super().configure_final(site)
        if site in self.context.outside:
            for name, state in self.memory.family(EXPERTS).items():
                message[EXPERTS.member(name)] = state
        return message

    def models(self) -> dict[str, Message]:
        rounds = self.memory.meta.get(ROUNDS, {})
        models = super().models()
        for site, state in self.memory.family(EXPERTS).items():
            models[f"personal/{site}"] = trained_model(state, rounds.get(site))
        return models
