"""Ditto (Li et al., ICML 2021, Alg. 1): besides the global model every site trains a personal one with a proximal term.

    min_v h_k(v; w_g) = F_k(v) + λ/2 ||v - w_g||²        (Eq. 2)

The global model is FedAvg's. The personal model v_k starts as the first global model that the site receives, is trained after it in
every round with gradients ∇F_k(v_k) + λ (v_k - w_g), and never leaves the site. λ = 0 is training alone.
"""

from typing import ClassVar

from pydantic.dataclasses import dataclass

from medflare.core.hyper import param
from medflare.core.message import Message
from medflare.core.settings import STRICT
from medflare.core.states import copy_state
from medflare.methods.base import PersistentState
from medflare.methods.fedavg.site import GLOBAL, SELECTED_ROUND, FedAvgSiteHyper, OwnModelSite, received, trained_model
from medflare.methods.method import Method
from medflare.methods.parts.proximal import proximal_term
from medflare.training.epochs import train_epochs

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


class DittoSite(OwnModelSite[DittoHyper]):
    """Trains the personal model v_k after the global one."""

    Hyper: ClassVar[type] = DittoHyper
    dp_unsupported_reason = "the personal model learns from the same images without noise, and its validation metric leaves the site"
    own = PersistentState("personal")

    def train(self, round: int, incoming: Message) -> Message:
        """FedAvg's training, then that of the personal model with a proximal term to the incoming global one."""
        reply, shared = super().train(round, incoming), incoming.states[GLOBAL]
        model = self.network("personal", self.own or shared)
        hook = proximal_term(model, shared, self.hyper.lam)
        self.optimized(
            model, "personal", lambda optimizer: train_epochs(model, optimizer, self.site, round, "personal", gradient_hook=hook)
        )
        self.own = copy_state(model.state_dict())
        return reply

    def finalize(self, incoming: Message) -> dict[str, Message]:
        """A site that has trained uses its personal model, any other the global one."""
        shared = received(incoming)
        if self.own is None:
            return {"global": shared, "deployed": shared}
        selected = self.best.chosen(self.plan.server_hyper.selection, self.own, incoming.meta.get(SELECTED_ROUND))
        personal = trained_model(*selected)
        return {"global": shared, "personal": personal, "deployed": personal}
