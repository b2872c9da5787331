"""FedSM's hyper-parameters, by the algorithm that owns them."""

from typing import Annotated, Final, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from medflare.core.hyper import param
from medflare.core.settings import STRICT
from medflare.methods.fedavg.server import FedAvgServerHyper
from medflare.methods.fedavg.site import FedAvgSiteHyper

SHARED_META: Final = ("perfedavg", "pfedme")  # personalizations whose sites also share a model of their own beside w_g


@dataclass(frozen=True, config=STRICT)
class PersonalSiteHyper(FedAvgSiteHyper):
    """How a site trains its personal model."""

    personalization: Literal["softpull", "finetune", "apfl", "perfedavg", "pfedme"] = param(
        "softpull", "where personal models come from", source="Table 6"
    )
    apfl_share: float = param(0.5, "APFL's share of the local model", symbol="α", source="Table 6", low=0, high=1)
    adapt_steps: int = param(1, "Per-FedAvg's adaptation steps", source="Table 6", low=1)
    pfedme_lambda: float = param(15.0, "pFedMe's pull to the shared model", symbol="λ", low=0)
    pfedme_steps: int = param(5, "pFedMe's inner steps per batch", symbol="K", low=1)


@dataclass(frozen=True, config=STRICT)
class FedSMSiteHyper(PersonalSiteHyper):
    """FedSM's site."""

    selector: Literal["ridge", "compact_selector", "vgg11"] = param(
        "ridge", "ridge: solved at the server in one exchange; or a trained network, VGG-11 being the paper's"
    )


@dataclass(frozen=True, config=STRICT)
class FedSMExtraSiteHyper(PersonalSiteHyper):
    """FedSM-extra's and the ensemble's site."""

    selector: Literal["auto", "compact_selector", "vgg11"] = param(
        "auto", "trained selector; auto: VGG-11 or, where that is larger than the task's network, the compact one"
    )
    combine: Literal["extra", "ensemble"] = param("extra", "label by the best model, or learn the weighted output", source="Sec. 3.1")


@dataclass(frozen=True, config=STRICT)
class PersonalServerHyper(FedAvgServerHyper):
    """What every server algorithm with personal models has."""

    lam: float = param(
        0.7, "SoftPull's share of the own model; 1/K is the mean, 1 leaves models alone", symbol="λ", source="Eq. 11", low=0, high=1
    )


@dataclass(frozen=True, config=STRICT)
class FedSMServerHyper(PersonalServerHyper):
    """FedSM's own server."""

    selector_updates: Annotated[int, Field(ge=1)] | Literal["auto"] = param(
        "auto", "updates of a trained selector a round, each further one an exchange of the selector alone; auto: at least 100 in the run"
    )
    choose_by: Literal["patient", "image"] = param("patient", "scores that choose: the mean over a patient's images, or each image's own")
    gamma: Annotated[float, Field(ge=0, le=1)] | Literal["tune"] = param(
        "tune",
        "confidence below which the global model answers; tune: the best of 13 values by the sites' validation gain over the global model",
        symbol="γ",
        source="Sec. 3.2",
    )


@dataclass(frozen=True, config=STRICT)
class FedSMExtraServerHyper(PersonalServerHyper):
    """The server of FedSM-extra and the ensemble; their K + 1 scores include the global model, so there is no γ."""

    selector_rounds: int = param(50, "extra rounds for the selector", source="Sec. 4", low=1)
