"""IOP-FL's hyper-parameters. All are the site's: the server is FedAvg's."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from medflare.core.hyper import param
from medflare.core.settings import STRICT
from medflare.methods.base import SiteHyper
from medflare.methods.fedavg.site import FedAvgHyper
from medflare.methods.iop_fl.routing import Routing


@dataclass(frozen=True, config=STRICT)
class OutsideHyper(SiteHyper):
    """Test-time routing at a site that never trained."""

    routing: Literal["layer", "global"] = param(
        "layer", "coefficients for every layer, or one set for the network", symbol="R", source="Table III"
    )
    coefficients: Literal["softmax", "sigmoid"] = param(
        "softmax", "coefficients that add up to one, or the printed ones, which need not", symbol="r", source="Eq. 6"
    )
    bn_statistics: Literal["batch", "running"] = param("batch", "normalise by the test batch, or as in training", source="Sec. III-C")
    route_epochs: int = param(10, "passes over the test images", source="Sec. III-D", low=0)
    route_lr: float = param(1e-3, "Adam rate of the routers", source="Sec. III-D", low=0)
    beta: float = param(0.01, "weight of shape and entropy beside consistency", symbol="β", source="Eq. 10", low=0)
    radius: Annotated[int, Field(ge=0)] | Literal["auto"] = param(
        "auto", "the shape term's neighbourhood radius in pixels; auto: 10 / 384 of the image's shortest side", symbol="d", source="Eq. 8"
    )
    noise: float = param(0.5, "noise added to images, in each image's own standard deviation", symbol="ε", source="Eq. 7", low=0)
    use_consistency: bool = param(True, "the consistency term", symbol="L_cons", source="Eq. 7, Fig. 8")
    use_shape: bool = param(True, "the shape term (segmentation only)", symbol="L_s", source="Eq. 9, Fig. 8")
    use_entropy: bool = param(True, "the entropy term", symbol="L_e", source="Eq. 9, Fig. 8")
    objective: Literal["information", "paper"] = param(
        "information", "Eq. 10 with mutual information for entropy and a pull to the start; or Eq. 10", source="Eq. 10"
    )
    anchor: float = param(0.1, "objective information: weight of the divergence from the starting prediction", low=0)
    gate_information: float = param(0.8, "least share of the start's mutual information that a kept state has, 0: not asked", low=0, high=1)
    gate_agreement: float = param(0.9, "least agreement of its masks with the start's (Dice), 0: not asked", low=0, high=1)
    gate_share: float = param(3.0, "most times that its foreground may leave the inside sites' range, 0: not asked", low=0)
    comparisons: bool = param(False, "deliver each single model, their ensemble and Tent on the global model too", source="Table II")

    def routed(self, seed: int) -> Routing:
        """The routed network's own settings."""
        return Routing(self.routing == "layer", self.coefficients, self.bn_statistics, seed)


@dataclass(frozen=True, config=STRICT)
class IOPHyper(OutsideHyper, FedAvgHyper):
    """Training inside, routing outside."""

    tau: float = param(0.9, "accumulation rate; 1 gives the local model of the round", symbol="τ", source="Eq. 4, Fig. 6", low=0, high=1)
