"""The hyper-parameters of FedDAG and of SHA, by the algorithm that owns them."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from medflare.core.hyper import param
from medflare.core.settings import STRICT
from medflare.methods.fedavg.server import FedAvgServerHyper
from medflare.methods.fedavg.site import FedAvgSiteHyper


@dataclass(frozen=True, config=STRICT)
class SHAHyper(FedAvgServerHyper):
    """How sites are scored and averaged; the sites read from it what they are asked for."""

    rho: float = param(0.3, "length of the perturbation that a model is scored with; 0: CEA", symbol="ρ", source="Sec. III-C1", low=0)
    kappa: int = param(
        4,
        "earlier models of a site that may join its current one, once there are as many; 0: none",
        symbol="κ",
        source="Sec. III-C3",
        low=0,
    )
    beta: float = param(1.0, "exponent of the scores; negative: the inverse", symbol="β", source="Eq. 6")
    score_metric: str = param(
        "auto", "what a score is: a metric of the task; auto: AUC where the task has it, else its own metric", source="Eq. 5"
    )
    centred: bool = param(True, "take out of scores what is their evaluator's own; false: plain means over the other sites", source="Eq. 5")
    sha: bool = param(True, "false: one phase a round, weights as FedAvg, no history (w/o SHA)", source="Table V")
    evaluators: int = param(
        0, "sites that score each model, drawn anew every round; 0: all others", symbol="|E_i|", source="Fig. 10", low=0
    )

    @property
    def perturbs(self) -> bool:
        """Whether sites send a perturbed model beside their own."""
        return self.sha and self.rho > 0


@dataclass(frozen=True, config=STRICT)
class FedDAGServerHyper(SHAHyper):
    """SHA after a warm-up."""

    warmup: int = param(5, "first rounds as FedAvg, at most a quarter of all", source="Sec. IV-A2", low=0)


@dataclass(frozen=True, config=STRICT)
class FedDAGSiteHyper(FedAvgSiteHyper):
    """Domain-adversarial generation; the server reads from it what the sites send."""

    ndag: bool = param(True, "false: students learn from the original images alone (w/o NDAG)", source="Table V")
    alpha: float = param(
        0.3, "strength of the perturbation, in deviations of the site's training images", symbol="α", source="Eq. 2", low=0, high=1
    )
    m: float = param(0.1, "cap of the feature discrepancy 1 - cos; 2: none", symbol="m", source="Eq. 1", low=0)
    train_on: Literal["both", "perturbation"] = param(
        "both", "the student's images: generated and original, or the bare perturbations α G(x)", source="Eq. 4, Fig. 11"
    )
    discrepancy_weight: float = param(1.0, "weight of L_dis (2, with m/2: Eq. 1 without the 1/2)", source="Sec. IV-A2", low=0)
    similarity_weight: float = param(1.0, "weight of L_sim", source="Sec. IV-A2", low=0)
    ema: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = param(
        "auto", "decay of the teacher's average; auto: by the round's length, see round_decay", source="Sec. III-B3"
    )
    distribution: Literal["type1", "type2", "type3"] = param(
        "type3",
        "1: θ_g to both models, 2: a global student beside θ_g, 3: θ_g to one, the other stays at the site",
        source="Sec. III-D, Fig. 5",
    )
    chain: Literal["student_from_global", "teacher_from_global"] = param(
        "student_from_global",
        "types 1, 3: θ_g to the student and the teacher is sent back, or the reverse",
        source="Sec. III-D",
    )
    sam_rho: float = param(0.0, "FedSAM: length of the student's ascent step on every batch; 0: none", symbol="ρ", source="Fig. 9", low=0)
    generator_width: int = param(16, "the generator's feature channels (FCN16, FCN32)", source="Table VII", low=1)
    generator_scale: int = param(1, "the generator sees images shrunk by this factor; 4 is cheaper, for smooth perturbations alone", low=1)
    pictures: int = param(4, "generated images that each site shows in its own report; they stay there", source="Fig. 4", low=0)
