"""FedProx (Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020): a proximal
term in local training.

    min_w h_k(w; w_g) = F_k(w) + μ/2 ||w - w_g||²        (Eq. 2)

Every local step follows the gradient of h_k: that of the task plus μ (w - w_g). μ = 0 is FedAvg.
"""

from medflare.methods import (
    FeatureNetwork,
    FedAvgSite,
    FedAvgSiteHyper,
    param,
    proximal_term,
    strict_dataclass,
)
from medflare.training.graph import Hook


@strict_dataclass
class FedProxHyper(FedAvgSiteHyper):
    """The proximal term."""

    mu: float = param(
        0.1,
        "weight of the proximal term; 0: FedAvg",
        symbol="μ",
        source="Eq. 2; 0.1 as in GRACE's code",
        low=0,
    )


class FedProxSite(FedAvgSite[FedProxHyper]):
    """FedAvg's site algorithm with a proximal term to the round's global model."""

    @classmethod
    def proximal_strength(cls, hyper: FedProxHyper) -> float:
        return hyper.mu

    def round_hook(self, model: FeatureNetwork, round: int) -> Hook:
        """The hook that adds μ (w - w_g) to the gradients; the loss that is reported is the
        task's.
        """
        return proximal_term(model, model.state_dict(), self.hyper.mu)
