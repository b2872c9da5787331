"""The hyper-parameters of GRACE and of its neighbours, by the algorithm that owns them."""

from typing import Literal

from pydantic.dataclasses import dataclass

from medflare.core.hyper import param
from medflare.core.settings import STRICT
from medflare.methods.fedavg.server import FedAvgServerHyper
from medflare.methods.fedavg.site import FedAvgSiteHyper
from medflare.methods.grace.formulas import Inner


@dataclass(frozen=True, config=STRICT)
class GraceSiteHyper(FedAvgSiteHyper):
    """Meta-train, meta-update and what aligns."""

    tta: Literal["none", "dsbn", "tent"] = param("none", "how the global model adapts at an outside site", source="Table 3")
    tent_rate: float = param(1e-3, "Tent's Adam rate", source="Table 3", low=0)
    probe: bool = param(False, "report the A-distance between global and local features every round", source="Fig. 2")
    client: Literal["erm", "meta", "coral", "mmd", "adv"] = param(
        "coral",
        "plain training, two steps without alignment, or two steps with CORAL, MMD or adversarial alignment",
        source="Sec. 2.2, Table 4",
    )
    beta: float = param(1.0, "weight of the alignment", symbol="β", source="Eq. 2", low=0)
    inner: Inner = param("optimizer", "the meta-train step: one of the task's optimizer, or a plain gradient step", source="Eq. 1")
    inner_rate: float | None = param(None, "rate of inner=sgd; none: the task's learning rate", symbol="η", source="Eq. 1", low=0)
    swap: bool = param(True, "each half of a batch is meta-test once; false: the first half is meta-train alone", source="Sec. 2.2")


@dataclass(frozen=True, config=STRICT)
class GraceServerHyper(FedAvgServerHyper):
    """Consistency-enhanced re-weighting."""

    consistency: bool = param(True, "weights by consistency; false: FedAvg's", source="Table 4")
    server_rate: float = param(1.0, "step of the server", symbol="η_g", source="Sec. 2.3", low=0)
