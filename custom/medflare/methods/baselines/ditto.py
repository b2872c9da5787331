"""Ditto (Li et al., ICML 2021, Alg. 1): besides the global model every site trains a personal one with a proximal term.

    min_v h_k(v; w_g) = F_k(v) + λ/2 ||v - w_g||²        (Eq. 2)

The global model is FedAvg's. The personal model v_k starts as the first global model that the site receives, is trained after it in
every round with gradients ∇F_k(v_k) + λ (v_k - w_g), and never leaves the site. λ = 0 is training alone.
"""

from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from medflare.core.hyper import param
from medflare.core.message import Message
from medflare.core.settings import STRICT
from medflare.core.states import copy_state
from medflare.methods.base import Capability, PersistentState, Plan
from medflare.methods.fedavg.site import GLOBAL, SELECTED_ROUND, FedAvgSite, FedAvgSiteHyper, delivered, trained_model
from medflare.methods.method import Method
from medflare.methods.parts.proximal import proximal_term
from medflare.methods.parts.selection import Best
from medflare.training.epochs import train_epochs
from medflare.training.site import Site

METHOD = Method(
    name="ditto",
    title="Personal models with a proximal term to the global one",
    paper="Li et al., Ditto, ICML 2021",
    site="medflare.methods.baselines.ditto:DittoSite",
    server="medflare.methods.fedavg.server:FedAvgServer",
)


@dataclass(frozen=True, config=STRICT)
class DittoHyper(FedAvgSiteHyper):
    """The proximal term of the personal model."""

    lam: float = param(1.0, "weight of the personal model's proximal term; 0: none", symbol="λ", source="Eq. 2", low=0)


class DittoSite(FedAvgSite[DittoHyper]):
    """FedAvg's site algorithm with a personal model, of the best round by the site's own validation."""

    Hyper: ClassVar[type] = DittoHyper
    capabilities: ClassVar[frozenset[Capability]] = frozenset({"accumulate"})
    dp_unsupported_reason = "the personal model learns from the same images without noise, and its validation metric leaves the site"
    personal = PersistentState("personal")  # v_k, None before the first training

    def __init__(self, site: Site, plan: Plan[DittoHyper, Any]):
        super().__init__(site, plan)
        self.best = Best(self.memory, "personal")

    def train(self, round: int, incoming: Message) -> Message:
        """FedAvg's training, then that of the personal model with a proximal term to the incoming global one."""
        shared, personal = incoming.states[GLOBAL], self.offered(self.best, round, self.personal, "personal")
        reply = super().train(round, incoming)
        validation = reply.meta["validation"]
        validation["personal"] = validation["global"] if self.personal is None else personal  # v_k starts as w_g
        model = self.network("personal", self.personal or shared)
        hook = proximal_term(model, shared, self.hyper.lam)
        self.optimized(
            model, "personal", lambda optimizer: train_epochs(model, optimizer, self.site, round, "personal", gradient_hook=hook)
        )
        self.personal = copy_state(model.state_dict())
        return reply

    def validate(self, round: int, incoming: Message) -> Message:
        """The validation metrics of the incoming global and of the personal model."""
        reply = super().validate(round, incoming)
        reply.meta["validation"]["personal"] = self.offered(self.best, round, self.personal, "personal")
        return reply

    def finalize(self, incoming: Message) -> dict[str, Message]:
        """A site that has trained uses its personal model, any other the global one."""
        if self.personal is None:
            return delivered(incoming, None)
        selected = self.best.chosen(self.plan.server_hyper.selection, self.personal, incoming.meta.get(SELECTED_ROUND))
        return delivered(incoming, trained_model(*selected))
