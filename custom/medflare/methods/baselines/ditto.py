"""Ditto (Li et al., ICML 2021, Alg. 1): beside the global model every site trains one of its own that is drawn to it.

    min_v h_k(v; w_g) = F_k(v) + λ/2 ||v - w_g||²        (Eq. 2)

The global model is FedAvg's. The personal model v_k starts as the first global model that its site is sent, trains after it in every
round with gradients ∇F_k(v_k) + λ (v_k - w_g), and never leaves the site. λ = 0 is training alone.
"""

from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from medflare.core.hyper import param
from medflare.core.message import Message
from medflare.core.settings import STRICT
from medflare.core.states import StateDict, copy_state
from medflare.methods.base import Capability, PersistentState, Plan
from medflare.methods.fedavg.site import GLOBAL, SELECTED_ROUND, FedAvgSite, FedAvgSiteHyper, received, trained_model
from medflare.methods.method import Method
from medflare.methods.parts.proximal import proximal_term
from medflare.methods.parts.selection import Best
from medflare.training.epochs import finite_or_none, train_epochs
from medflare.training.site import Site

METHOD = Method(
    name="ditto",
    title="A personal model drawn to the global one",
    paper="Li et al., Ditto, ICML 2021",
    site="medflare.methods.baselines.ditto:DittoSite",
    server="medflare.methods.fedavg.server:FedAvgServer",
)


@dataclass(frozen=True, config=STRICT)
class DittoHyper(FedAvgSiteHyper):
    """The pull on the personal model."""

    lam: float = param(
        1.0,
        "how strongly the personal model is drawn to the global one; 0: not at all",
        symbol="λ",
        source="Eq. 2; 1 is the paper's for sites with few validation images",
        low=0,
    )


class DittoSite(FedAvgSite[DittoHyper]):
    """FedAvg's site algorithm and a personal model, of the best round by the site's own validation."""

    Hyper: ClassVar[type] = DittoHyper
    capabilities: ClassVar[frozenset[Capability]] = frozenset({"accumulate"})
    dp_unsupported_reason = "the personal model learns from the same images without noise, and its validation metric leaves the site"
    personal = PersistentState("personal")  # v_k, None before the first training

    def __init__(self, site: Site, plan: Plan[DittoHyper, Any]):
        super().__init__(site, plan)
        self.best = Best(self.memory, "personal")

    def train(self, round: int, incoming: Message) -> Message:
        """FedAvg's training, and after it that of the personal model towards the incoming global one."""
        before = self._measured(round)
        reply = super().train(round, incoming)
        measured = reply.meta["validation"]
        measured["personal"] = measured["global"] if self.personal is None else before  # v_k begins as w_g
        self._train_personal(round, incoming.states[GLOBAL])
        return reply

    def validate(self, round: int, incoming: Message) -> Message:
        """The validation metrics of the incoming global and of the personal model."""
        reply = super().validate(round, incoming)
        reply.meta["validation"]["personal"] = self._measured(round)
        return reply

    def _measured(self, round: int) -> float | None:
        """The validation metric of v_k as the round begins, which is offered for delivery; None where there is none."""
        if self.personal is None:
            return None
        value = finite_or_none(self.validation(self.network("personal", self.personal)))
        self.best.offer(value, round, self.personal)
        return value

    def _train_personal(self, round: int, shared: StateDict) -> None:
        model = self.network("personal", self.personal or shared)
        gradient_hook = proximal_term(model, shared, self.hyper.lam)
        self.optimized(
            model, "personal", lambda optimizer: train_epochs(model, optimizer, self.site, round, "personal", gradient_hook=gradient_hook)
        )
        self.personal = copy_state(model.state_dict())

    def finalize(self, incoming: Message) -> dict[str, Message]:
        """Inside, a site uses its personal model. One that never trained uses the global one."""
        shared = received(incoming)
        if self.personal is None:
            return {"global": shared, "deployed": shared}
        chosen = self.best.chosen(self.plan.server_hyper.selection, self.personal, incoming.meta.get(SELECTED_ROUND))
        own = trained_model(*chosen)
        return {"global": shared, "personal": own, "deployed": own}
