"""Ditto (Li et al., ICML 2021, Alg. 1): besides the global model, a personal one at every site.

It is trained with a proximal term to the global model.

    min_v h_k(v; w_g) = F_k(v) + λ/2 ||v - w_g||²        (Eq. 2)

The global model is FedAvg's. The personal model v_k starts as the first global model that the site
receives, is trained after it in every round with gradients ∇F_k(v_k) + λ (v_k - w_g), and never
leaves the site. λ = 0 is training alone.
"""

import torch

from medflare.core.hyper import param
from medflare.core.settings import strict_dataclass
from medflare.core.states import StateDict, copy_state
from medflare.methods.families.second_models.site import SecondModelSite
from medflare.methods.fedavg.site import FedAvgSiteHyper
from medflare.methods.parts.proximal import proximal_term
from medflare.training.epochs import train_epochs


@strict_dataclass
class DittoHyper(FedAvgSiteHyper):
    """The proximal term of the personal model."""

    lam: float = param(
        1.0,
        "weight of the personal model's proximal term; 0: none",
        symbol="λ",
        source="Eq. 2",
        low=0,
    )


class DittoSite(SecondModelSite[DittoHyper]):
    """Trains the personal model after the global one, near the incoming global model."""

    def personalize(self, round: int, shared: StateDict) -> None:
        model = self.network("personal", self.personal or shared)
        proximal = proximal_term(model, shared, self.hyper.lam)

        def descend(optimizer: torch.optim.Optimizer) -> None:
            train_epochs(model, optimizer, self.site, round, "personal", gradient_hook=proximal)

        self.optimized(model, "personal", descend)
        self.personal = copy_state(model.state_dict())
