"""PRR-Imbalance (Chen et al., IEEE TMI 2022): models that do not retrogress at every exchange.

PFA (server): each site gets a model of its own, low frequencies averaged, high frequencies its own.
DET (site): this model becomes the deputy D_k; it and the personal model P_k, which is never
overwritten, teach each other in stages. CPA (site): a loss for classes that are imbalanced
differently at each site. Without the three parts (pfa=false det=false cpa=off) the method is FedBN
(Li et al., ICLR 2021).
"""

from typing import TYPE_CHECKING

from medflare.core.lazy_imports import lazy_imports
from medflare.methods import Method

METHOD = Method(
    name="prr",
    title="Fourier aggregation, deputy-enhanced transfer and the CPA loss",
    paper="Chen et al., PRR-Imbalance, IEEE TMI 2022",
    site="medflare.methods.prr.site:PRRSite",
    server="medflare.methods.prr.server:PRRServer",
    stays="personal model, normalisation of the deputy",
)

if TYPE_CHECKING:
    from medflare.methods.prr.formulas import conjoint_mask, cpa_loss, next_stage, prototype_gamma
    from medflare.methods.prr.fourier import fourier_aggregate, frequency_ratio

__all__ = [
    "METHOD",
    "conjoint_mask",
    "cpa_loss",
    "fourier_aggregate",
    "frequency_ratio",
    "next_stage",
    "prototype_gamma",
]
__getattr__, __dir__ = lazy_imports(__name__, __file__)
