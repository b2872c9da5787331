"""IOP-FL's hyper-parameters. All are the site's: the server is FedAvg's."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from medflare.core.hyper import param
from medflare.core.settings import STRICT
from medflare.inference.routing import Routing
from medflare.methods.base import SiteHyper
from medflare.methods.fedavg.site import FedAvgHyper


@dataclass(frozen=True, config=STRICT)
class OutsideHyper(SiteHyper):
    """Test-time routing at a site that never trained."""

    router: Literal["mlp", "free"] = param("mlp", "coefficients from a layer's pooled input, or free numbers", symbol="θ", source="Eq. 6")
    routing: Literal["layer", "global"] = param(
        "layer", "coefficients for every layer, or one set for the network", symbol="R", source="Table III"
    )
    coefficients: Literal["softmax", "sigmoid"] = param(
        "softmax", "coefficients that add up to one, or the printed ones, which need not", symbol="r", source="Eq. 6"
    )
    router_start: Literal["uniform", "random"] = param("uniform", "every coefficient 1/(K+1), or random as in the code", source="Alg. 1")
    router_dropout: float = param(0.2, "dropout of the mlp router while it is fitted", source="code", low=0, high=0.99)
    predict_dropout: bool = param(False, "leave that dropout on for predictions, as in the code", source="code")
    fixed_layers: str = param("", "layers, separated by commas, that keep their first coefficients (code: the bottleneck)", source="code")
    bn_statistics: Literal["batch", "instance", "running"] = param(
        "batch", "normalise by the test batch, each image, or as in training", source="Sec. III-C"
    )
    train_bn_affine: bool = param(False, "fit scale and shift of BatchNorm too, as in the code", source="code")
    route_epochs: int = param(10, "passes over the test images", source="Sec. III-D", low=0)
    route_lr: float = param(1e-3, "Adam rate of the routers", source="Sec. III-D", low=0)
    beta: float = param(0.01, "weight of shape and entropy beside consistency", symbol="β", source="Eq. 10", low=0)
    radius: Annotated[int, Field(ge=0)] | Literal["auto"] = param(
        "auto", "the shape term's neighbourhood radius in pixels; auto: 10 / 384 of the image's shortest side", symbol="d", source="Eq. 8"
    )
    noise: float = param(0.5, "standard deviation of the noise added to images, in `noise_unit`", symbol="ε", source="Eq. 7", low=0)
    noise_unit: Literal["spread", "intensity"] = param(
        "spread", "each image's own standard deviation, which the paper's inputs have at one, or intensities as they are", source="Eq. 7"
    )
    perturbation: Literal["noise", "noise+turns"] = param("noise", "noise alone, or quarter turns and flips too", source="Eq. 7 / code")
    fresh_noise: bool = param(True, "new noise at every step; false: the same each time, as in the code", source="code")
    stop_gradient: bool = param(False, "treat the prediction of the clean image as fixed in the consistency term", source="Eq. 7")
    use_consistency: bool = param(True, "the consistency term", symbol="L_cons", source="Eq. 7, Fig. 8")
    use_shape: bool = param(True, "the shape term (segmentation only)", symbol="L_s", source="Eq. 9, Fig. 8")
    use_entropy: bool = param(True, "the entropy term", symbol="L_e", source="Eq. 9, Fig. 8")
    shape_classes: Literal["all", "foreground"] = param("all", "classes in the shape term", source="Eq. 8")
    shape_sum: Literal["mean", "sum"] = param("mean", "shape term per pixel, or summed over an image as printed", source="Eq. 9")
    objective: Literal["information", "paper", "official"] = param(
        "information", "Eq. 10 with mutual information for entropy and a pull to the start; Eq. 10; the code's", source="Eq. 10 / code"
    )
    anchor: float = param(0.1, "objective information: weight of the divergence from the starting prediction", low=0)
    choose: Literal["lowest", "last"] = param("lowest", "keep the state with the lowest loss, or the last one", source="Sec. III-D")
    gate_information: float = param(0.8, "least share of the start's mutual information that a kept state has, 0: not asked", low=0, high=1)
    gate_agreement: float = param(0.9, "least agreement of its masks with the start's (Dice), 0: not asked", low=0, high=1)
    gate_share: float = param(3.0, "most times that its foreground may leave the inside sites' range, 0: not asked", low=0)
    online: bool = param(False, "one more step on every batch just before it is predicted", source="code")
    comparisons: bool = param(False, "deliver each single model, their ensemble and Tent on the global model too", source="Table II")
    ensemble_global: bool = param(False, "the global model takes part in the ensemble", source="Table II")

    def routed(self, seed: int) -> Routing:
        """The routed network's own settings."""
        return Routing(
            router="mlp" if self.router == "mlp" else "free",
            per_layer=self.routing == "layer",
            uniform=self.router_start == "uniform",
            dropout=self.router_dropout,
            coefficients=self.coefficients,
            statistics=self.bn_statistics,
            train_affine=self.train_bn_affine,
            fixed_layers=tuple(name.strip() for name in self.fixed_layers.split(",") if name.strip()),
            seed=seed,
        )


@dataclass(frozen=True, config=STRICT)
class IOPHyper(OutsideHyper, FedAvgHyper):
    """Training inside, routing outside."""

    tau: float = param(0.9, "accumulation rate; 1 gives the local model of the round", symbol="τ", source="Eq. 4, Fig. 6", low=0, high=1)
    reading: Literal["ema_local", "explicit", "incremental"] = param(
        "ema_local",
        "what P_k moves to: w_k; this round's w_g and then the local step; or both steps without averaging",
        source="Eq. 4",
    )
    start: Literal["global", "local"] = param(
        "global", "P_k^0: the initial global model, or the first local one as in the code", source="Alg. 1"
    )
