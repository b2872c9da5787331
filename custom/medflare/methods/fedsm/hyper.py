"""FedSM's hyper-parameters, by the half that owns them."""

from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from medflare.core.hyper import param
from medflare.core.settings import STRICT
from medflare.methods.fedavg.server import FedAvgServerHyper
from medflare.methods.fedavg.site import FedAvgSiteHyper

SHARED_META: Final = ("perfedavg", "pfedme")  # personalizations whose sites also share a model of their own beside w_g


def _renamed(value: object) -> object:
    return "tune" if value == "grid" else value  # what jobs of older versions say


@dataclass(frozen=True, config=STRICT)
class FedSMSiteHyper(FedAvgSiteHyper):
    """What a site trains, and how; the server reads from it what the sites send."""

    personalization: Literal["softpull", "finetune", "apfl", "perfedavg", "pfedme"] = param(
        "softpull", "where personal models come from", source="Table 6"
    )
    selector: Literal["auto", "compact_selector", "vgg11", "ridge"] = param(
        "auto",
        "selector; ridge: solved in one exchange; auto: ridge; in fedsm_extra, and where a setting of trained selectors is changed, VGG-11 "
        "or, where that is larger than the task's network, the compact one",
    )
    selector_lr: Annotated[float, Field(ge=0)] | Literal["auto"] = param(
        "auto", "Adam rate of the selector; auto: 0.001 for VGG-11, 0.01 for the compact one"
    )
    selector_steps: Literal["server", "fullbatch", "minibatch"] = param(
        "server",
        "server: one Adam step with the sites' mean gradient; fullbatch: one at each site; minibatch: one a batch",
        source="code / Alg. 1",
    )
    sync_moments: bool = param(True, "fullbatch, minibatch: average Adam's moments; a site sees one label only", source="code")
    apfl_share: float = param(0.5, "APFL's share of the local model", symbol="α", source="Table 6", low=0, high=1)
    apfl_rate: float = param(0.0, "APFL: rate at which that share is learnt, a step a batch; 0 leaves it", source="APFL, Eq. 11", low=0)
    adapt_steps: int = param(1, "Per-FedAvg's adaptation steps", source="Table 6", low=1)
    adapt_lr: Annotated[float, Field(ge=0)] | Literal["auto"] = param(
        "auto", "Per-FedAvg's and pFedMe's inner steps: auto, the task's optimizer takes them; or the rate of plain steps", symbol="α"
    )
    meta_lr: Annotated[float, Field(ge=0)] | Literal["auto"] = param(
        "auto", "their outer steps: auto, Per-FedAvg's are the task's optimizer's and pFedMe's η is 1/λ; or a rate", symbol="β, η"
    )
    pfedme_lambda: float = param(15.0, "pFedMe's pull to the shared model", symbol="λ", low=0)
    pfedme_steps: int = param(5, "pFedMe's inner steps per batch", symbol="K", low=1)


@dataclass(frozen=True, config=STRICT)
class FedSMExtraSiteHyper(FedSMSiteHyper):
    """FedSM-extra's and the ensemble's site."""

    combine: Literal["extra", "ensemble"] = param("extra", "label by the best model, or learn the weighted output", source="Sec. 3.1")


@dataclass(frozen=True, config=STRICT)
class SuperServerHyper(FedAvgServerHyper):
    """What every server half with personal models has."""

    lam: float = param(
        0.7, "SoftPull's share of the own model; 1/K is the mean, 1 leaves models alone", symbol="λ", source="Eq. 11", low=0, high=1
    )
    selector_weighting: Literal["balanced", "samples"] = param(
        "balanced", "sites count alike in the selector's gradient, or as for the global model", source="Sec. 3.2"
    )
    pfedme_beta: float = param(1.0, "pFedMe's server mixing", symbol="β", source="Table 6", low=0, high=1)


@dataclass(frozen=True, config=STRICT)
class FedSMServerHyper(SuperServerHyper):
    """FedSM's own server."""

    selector_updates: Annotated[int, Field(ge=1)] | Literal["auto"] = param(
        "auto", "updates of a trained selector a round, each further one an exchange of the selector alone; auto: at least 100 in the run"
    )
    ridge_penalty: float = param(0.01, "selector ridge: penalty, as a share of each feature's variance", low=0)
    choose_by: Literal["patient", "image"] = param("patient", "scores that choose: the mean over a patient's images, or each image's own")
    gamma: Annotated[Annotated[float, Field(ge=0, le=1)] | Literal["tune"], BeforeValidator(_renamed)] = param(
        "tune",
        "confidence below which the global model answers; tune: the best of 13 values by the sites' validation gain over the global model",
        symbol="γ",
        source="Sec. 3.2",
    )


@dataclass(frozen=True, config=STRICT)
class FedSMExtraServerHyper(SuperServerHyper):
    """The server of FedSM-extra and the ensemble; their K + 1 scores include the global model, so there is no γ."""

    selector_rounds: int = param(50, "extra rounds for the selector", source="Sec. 4", low=1)
