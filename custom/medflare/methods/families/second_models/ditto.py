"""Ditto (Li et al., ICML 2021, Alg. 1): besides the global model, every site trains a personal one
with a proximal term to the global model.

    min_v h_k(v; w_g) = F_k(v) + λ/2 ||v - w_g||²        (Eq. 2)

The global model is FedAvg's. The personal model v_k starts as the first global model that the site
receives, is trained after it in every round with gradients ∇F_k(v_k) + λ (v_k - w_g), and never
leaves the site. λ = 0 is training alone.
"""

from medflare.methods import (
    FedAvgSiteHyper,
    StateDict,
    copied_state,
    param,
    proximal_term,
    strict_dataclass,
)
from medflare.methods.families.second_models.site import SecondModelSite


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

    def personalize(self, round: int, shared: StateDict, trained: StateDict) -> None:
        model = self.network("personal", self.personal or shared)
        proximal = proximal_term(model, shared, self.hyper.lam)
        self.train_model(model, round, "personal", proximal)
        self.personal = copied_state(model)
