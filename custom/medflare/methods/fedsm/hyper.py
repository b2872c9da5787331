"""Hyper-parameters of FedSM and FedSM-extra."""

from typing import Annotated, Literal

from pydantic import Field

from medflare.methods import FedAvgServerHyper, FedAvgSiteHyper, param, strict_dataclass


@strict_dataclass
class PersonalSiteHyper(FedAvgSiteHyper):
    """How a site trains its personal model."""

    personalization: Literal["softpull", "finetune", "apfl", "perfedavg", "pfedme"] = param(
        "softpull", "where personal models come from", source="Table 6"
    )


@strict_dataclass
class PersonalServerHyper(FedAvgServerHyper):
    """How the server combines personal models."""

    lam: float = param(
        0.7,
        "SoftPull's share of the own model; 1/K is the mean, 1 leaves models alone",
        symbol="λ",
        source="Eq. 11",
        low=0,
        high=1,
    )


@strict_dataclass
class FedSMSiteHyper(PersonalSiteHyper):
    """Hyper-parameters of FedSM's site algorithm."""

    selector: Literal["ridge", "compact_selector", "vgg11"] = param(
        "ridge", "solved at the server (ridge) or trained; VGG-11: the paper's"
    )


@strict_dataclass
class FedSMServerHyper(PersonalServerHyper):
    """Hyper-parameters of FedSM's server algorithm."""

    selector_updates: Annotated[int, Field(ge=1)] | Literal["auto"] = param(
        "auto",
        "updates of a trained selector a round, each further one an exchange of the selector "
        "alone; auto: at least 100 in the run",
    )
    choose_by: Literal["patient", "image"] = param(
        "patient", "scores that choose: the mean over a patient's images, or each image's own"
    )
    gamma: Annotated[float, Field(ge=0, le=1)] | Literal["tune"] = param(
        "tune",
        "confidence below which the global model answers; "
        "tune: the best of 13 values by the sites' validation gain over the global model",
        symbol="γ",
        source="Sec. 3.2",
    )


@strict_dataclass
class FedSMExtraSiteHyper(PersonalSiteHyper):
    """Hyper-parameters of the site algorithm of FedSM-extra and the ensemble."""

    selector: Literal["auto", "compact_selector", "vgg11"] = param(
        "auto",
        "trained selector; auto: VGG-11 or, where that is larger than the task's network, "
        "the compact one",
    )
    combine: Literal["extra", "ensemble"] = param(
        "extra", "label by the best model, or learn the weighted output", source="Sec. 3.1"
    )


@strict_dataclass
class FedSMExtraServerHyper(PersonalServerHyper):
    """Hyper-parameters of the server algorithm of FedSM-extra and the ensemble.

    Their K + 1 scores include the global model, so there is no γ.
    """

    selector_rounds: int = param(50, "extra rounds for the selector", source="Sec. 4", low=1)
