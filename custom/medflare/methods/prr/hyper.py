"""PRR's hyper-parameters."""

from typing import Annotated, Any, Literal

from pydantic import Field

from medflare.methods import ConfigError, ServerHyper, SiteHyper, param, strict_dataclass
from medflare.methods.prr.fourier import Components


@strict_dataclass
class PRRSiteHyper(SiteHyper):
    """Deputy-Enhanced Transfer and the CPA loss."""

    det: bool = param(
        True,
        "a deputy beside the personal model; false: one model, replaced every round",
        source="Eq. 5-6, Table IV",
    )
    det_steps: Literal["E", "RE", "RES"] = param(
        "RES", "Exchange; Recover + Exchange; + Sublimate", source="Table VI"
    )
    lam1: float = param(
        0.7,
        "share of the personal metric from which the deputy teaches",
        symbol="λ_1",
        source="Table VIII",
        low=0,
    )
    lam2: float = param(
        0.9,
        "share from which the deputy learns from labels alone",
        symbol="λ_2",
        source="Table VIII",
        low=0,
    )
    cpa: Literal["both", "global", "local", "off"] = param(
        "both", "CPA loss, one of its parts, or off", source="Eq. 13, Table IV"
    )
    beta: float = param(
        0.8, "exponent of the conjoint objective", symbol="β", source="Eq. 9, Table IX", low=0
    )
    tau: float = param(
        3.0, "smoothing of the prototype distance", symbol="τ", source="Eq. 12, Table IX", low=1
    )
    warm_up: int = param(
        0,
        "first rounds with the global objective alone (γ = 1); "
        "the official code: 15 of 50, segmentation 1",
        low=0,
    )
    plain_loss: Literal["task", "ce", "focal", "fedeamc"] = param(
        "task", "L_sup where cpa is off", source="Table XI"
    )
    halve_every: Annotated[int, Field(ge=0)] | Literal["auto"] = param(
        "auto",
        "rounds after which the learning rate halves, 0 never; auto: after every 25 local epochs",
        source="Sec. IV-A",
    )
    retrogress: bool = param(
        False,
        "measure the trained models before they are aggregated too, as Fig. 1 (a) does",
        source="Fig. 1",
    )

    def __post_init__(self) -> None:
        _in_order(self, "lam1", "lam2")

    @property
    def supervision(self) -> str:
        """The loss of a round, see `transfer.Supervision`."""
        if self.cpa == "off":
            return self.plain_loss
        return self.cpa

    @property
    def refines(self) -> bool:
        """Whether the loss uses prototypes, which then travel."""
        return self.cpa in ("both", "local")


@strict_dataclass
class PRRServerHyper(ServerHyper):
    """Progressive Fourier Aggregation, and the model of outside sites.

    Each site selects its own models by `selection`.
    """

    pfa: bool = param(
        True,
        "Fourier aggregation at the server; false is the plain mean, as FedBN",
        source="Eq. 1-4, Table IV",
    )
    r0: float = param(
        0.35,
        "low-frequency threshold of the first round",
        symbol="r_0",
        source="Table VII",
        low=0,
        high=0.5,
    )
    r1: float = param(
        0.48,
        "threshold it grows to; the official code ends at 0.475",
        symbol="r_1",
        source="Table VII",
        low=0,
        high=0.5,
    )
    components: Components = param("both", "what is averaged", source="Table V")
    outside_model: Literal["mean", "personal"] = param(
        "mean", "for outside sites: mean deputy, or the most typical site's personal model"
    )

    def __post_init__(self) -> None:
        _in_order(self, "r0", "r1")


def _in_order(hyper: Any, low: str, high: str) -> None:
    lower = getattr(hyper, low)
    higher = getattr(hyper, high)
    if lower > higher:
        raise ConfigError(
            f"hyper-parameters {low} = {lower}, {high} = {higher}: {low} must not be larger"
        )
