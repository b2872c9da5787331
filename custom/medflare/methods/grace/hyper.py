"""The hyper-parameters of GRACE and of its neighbours, by the half that owns them."""

from typing import Literal

from pydantic.dataclasses import dataclass

from medflare.core.hyper import param
from medflare.core.settings import STRICT
from medflare.methods.base import SiteHyper
from medflare.methods.fedavg.server import FedAvgServerHyper
from medflare.methods.fedavg.site import FedAvgSiteHyper
from medflare.methods.grace.formulas import CoralForm, Granularity, MMDKernel, NegativeRule


@dataclass(frozen=True, config=STRICT)
class AdaptationHyper(SiteHyper):
    """Test-time adaptation at outside sites."""

    tta: Literal["none", "dsbn", "tent"] = param("none", "how the global model adapts at an outside site", source="Table 3")
    tent_rate: float = param(1e-3, "Tent's Adam rate", source="Table 3", low=0)
    tent_steps: int = param(1, "Tent's steps per batch", source="Table 3", low=1)
    tent_episodic: bool = param(False, "Tent forgets after every batch", source="Table 3")


@dataclass(frozen=True, config=STRICT)
class LocalModelHyper(AdaptationHyper, FedAvgSiteHyper):
    """What every half has whose site uses its local model."""

    reset_optimizer: bool = param(False, "start every round with a fresh optimizer; false keeps its moments at the site", source="code")
    batch_norm: Literal["average", "local"] = param("average", "local keeps BatchNorm's entries at the site, as FedBN", source="Table 1")
    probe: bool = param(False, "report the A-distance between global and local features every round", source="Fig. 2")


@dataclass(frozen=True, config=STRICT)
class GraceSiteHyper(LocalModelHyper):
    """Meta-train, meta-update and what aligns."""

    client: Literal["erm", "meta", "coral", "mmd", "adv"] = param(
        "coral",
        "plain training, two steps without alignment, or two steps with CORAL, MMD or adversarial alignment",
        source="Sec. 2.2, Table 4",
    )
    beta: float = param(1.0, "weight of the alignment", symbol="β", source="Eq. 2", low=0)
    warmup: int = param(0, "rounds before the alignment sets in", source="code", low=0)
    inner_rate: float | None = param(None, "rate of the meta-train step; none: the task's learning rate", symbol="η", source="Eq. 1", low=0)
    second_order: bool = param(False, "differentiate through the meta-train step", source="Sec. 2.2")
    adam_plus_sgd: bool = param(False, "both steps are one of the optimizer and a plain one of the same rate", source="code")
    coral_form: CoralForm = param("domainbed", "CORAL with means, or as in Deep CORAL", source="Eq. 2")
    mmd_kernel: MMDKernel = param("mixture", "seven fixed Gaussian kernels, or five around the mean distance", source="Eq. 2")
    align_pixels: int = param(0, "segmentation: align this many pixels of the feature maps; 0: the maps' means", source="Eq. 2", low=0)
    discriminator: Literal["mlp", "linear"] = param("mlp", "two layers or one", source="Table 4, Adv")
    adv_rate: float = param(7e-4, "the discriminator's Adam rate", source="code", low=0)
    reversal: float = param(1.0, "strength of the reversed gradient", symbol="α", source="Table 4, Adv", low=0)
    reversal_rounds: int = param(0, "rounds over which the reversal grows as in DANN; 0: full from the start", source="Table 4, Adv", low=0)


@dataclass(frozen=True, config=STRICT)
class GraceServerHyper(FedAvgServerHyper):
    """Consistency-enhanced re-weighting."""

    consistency: bool = param(True, "weights by consistency; false: FedAvg's", source="Table 4")
    include_self: bool = param(True, "consistency counts a site's cosine with itself; false as in the code", symbol="c", source="Eq. 3")
    negative: NegativeRule = param("shift", "what becomes of consistencies that are not positive", source="Eq. 3")
    granularity: Granularity = param("total", "cosines of whole models, or of single tensors", symbol="σ", source="Eq. 3")
    server_rate: float = param(1.0, "step of the server", symbol="η_g", source="Sec. 2.3", low=0)
