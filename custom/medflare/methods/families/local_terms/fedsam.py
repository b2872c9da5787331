"""FedSAM (Qu et al., ICML 2022, Alg. 1): every local step is one of sharpness-aware minimization.

    w~ = w + ρ g/||g||,   w <- w - η g(w~)

g is the gradient of the batch at w, with one norm over all weights (Foret et al., ICLR 2021). The
optimizer is the task's. Running statistics move with the first gradient only.
"""

from torch import Tensor, nn
from torch.optim import Optimizer

from medflare.data.loading import Batch
from medflare.methods import (
    FeatureNetwork,
    FedAvgSite,
    FedAvgSiteHyper,
    Site,
    param,
    run_epochs,
    strict_dataclass,
)
from medflare.methods.feddag.site import sharpness_aware_step


@strict_dataclass
class FedSAMHyper(FedAvgSiteHyper):
    """The ascent step."""

    rho: float = param(
        0.05,
        "length of the ascent step; 0: FedAvg",
        symbol="ρ",
        source="Alg. 1; 0.05 as in SAM (Foret et al., ICLR 2021) and HarmoFL",
        low=0,
    )


def sharpness_aware_epochs(
    site: Site, model: nn.Module, optimizer: Optimizer, round: int, rho: float
) -> float:
    """Epochs of sharpness-aware steps in place; returns the mean task loss before the ascent.

    `rho`: length of the ascent step.
    """
    model.train()

    def step(batch: Batch) -> dict[str, Tensor]:
        losses = []

        def loss() -> Tensor:
            losses.append(site.loss(model(batch.images), batch.targets))
            return losses[-1]

        sharpness_aware_step(model, optimizer, loss, rho)
        return {"task": losses[0]}

    return run_epochs(site, round, "model", step)["task"]


class FedSAMSite(FedAvgSite[FedSAMHyper]):
    """FedAvg's site algorithm with two gradients for every step."""

    accumulates = False

    def fit(self, model: FeatureNetwork, optimizer: Optimizer, round: int) -> float | None:
        return sharpness_aware_epochs(self.site, model, optimizer, round, self.hyper.rho)
