"""Ditto (Li et al., ICML 2021, Alg. 1): besides the global model, a personal one at every site.

It is trained with a proximal term to the global model.

    min_v h_k(v; w_g) = F_k(v) + λ/2 ||v - w_g||²        (Eq. 2)

The global model is FedAvg's. The personal model v_k starts as the first global model that the site
receives, is trained after it in every round with gradients ∇F_k(v_k) + λ (v_k - w_g), and never
leaves the site. λ = 0 is training alone.
"""

from typing import Any

import torch
from pydantic.dataclasses import dataclass

from medflare.core.hyper import param
from medflare.core.message import Message
from medflare.core.settings import STRICT
from medflare.core.states import copy_state
from medflare.methods.base import PersistentState, Plan
from medflare.methods.fedavg.personal import PersonalModel
from medflare.methods.fedavg.site import (
    MODEL,
    SELECTED_ROUND,
    FedAvgSite,
    FedAvgSiteHyper,
    delivered,
)
from medflare.methods.parts.measured import VALIDATION
from medflare.methods.parts.proximal import proximal_term
from medflare.training.epochs import train_epochs
from medflare.training.site import Site


@dataclass(frozen=True, config=STRICT)
class DittoHyper(FedAvgSiteHyper):
    """The proximal term of the personal model."""

    lam: float = param(
        1.0,
        "weight of the personal model's proximal term; 0: none",
        symbol="λ",
        source="Eq. 2",
        low=0,
    )


class DittoSite(FedAvgSite[DittoHyper]):
    """FedAvg's site algorithm with a personal model.

    The site uses that of the best round by its own validation.
    """

    freezes = False
    dp_unsupported_reason = (
        "the personal model learns from the same images without noise, "
        "and its validation metric leaves the site"
    )
    personal = PersistentState("personal")  # v_k, None before the first training

    def __init__(self, site: Site, plan: Plan[DittoHyper, Any]):
        super().__init__(site, plan)
        self.selection = PersonalModel(self)

    def train(self, round: int, incoming: Message) -> Message:
        """FedAvg's training, then that of the personal model.

        Its proximal term is to the incoming global model.
        """
        personal = self.selection.validated(round, self.personal, "personal")
        reply = super().train(round, incoming)
        if self.personal is None:  # v_k starts as w_g, which has just been validated
            personal = reply[VALIDATION]["global"]
        reply[VALIDATION]["personal"] = personal

        shared = incoming[MODEL]
        model = self.network("personal", self.personal or shared)
        proximal = proximal_term(model, shared, self.hyper.lam)

        def descend(optimizer: torch.optim.Optimizer) -> None:
            train_epochs(model, optimizer, self.site, round, "personal", gradient_hook=proximal)

        self.optimized(model, "personal", descend)
        self.personal = copy_state(model.state_dict())
        return reply

    def validate(self, round: int, incoming: Message) -> Message:
        """The validation metrics of the incoming global and of the personal model."""
        reply = super().validate(round, incoming)
        personal = self.selection.validated(round, self.personal, "personal")
        reply[VALIDATION]["personal"] = personal
        return reply

    def finalize(self, incoming: Message) -> dict[str, Message]:
        """A site that has trained uses its personal model, any other the global one."""
        if self.personal is None:
            return delivered(incoming, None)
        rounds = incoming.get(SELECTED_ROUND)
        return delivered(incoming, self.selection.final(self.personal, rounds))
