"""FedDAG (Che et al., arXiv 2501.13967): sites train against adversarially generated domains.

On every batch (NDAG, Sec. III-B) a generator G learns perturbations x^ = x + α G(x) (Eq. 2) that
move the student's features away from the teacher's (Eq. 1, capped at m) while the image stays
classifiable (Eq. 3); then the student S learns to give x^ the features of x (Eq. 4) and its target,
and the teacher T is a moving average of S. The server aggregates with SHA, which works with any
site algorithm.
"""

from typing import TYPE_CHECKING

from medflare.core.lazy_imports import lazy_imports
from medflare.methods import Method

METHOD = Method(
    name="feddag",
    title="Domain-adversarial generation",
    paper="Che et al., FedDAG, arXiv 2501.13967",
    site="medflare.methods.feddag.site:FedDAGSite",
    server="medflare.methods.feddag.server:FedDAGServer",
    stays="teacher",
)
SHA = Method(
    name="sha",
    title="Sharpness-aware hierarchical aggregation",
    paper="Che et al., FedDAG, arXiv 2501.13967, Sec. III-C",
    site="medflare.methods.fedavg.site:FedAvgSite",
    server="medflare.methods.feddag.sha:SHAServer",
)

if TYPE_CHECKING:
    from medflare.methods.feddag.formulas import (
        discrepancy,
        sharpness_perturbation,
        soft_balancing_weights,
        within_client_average,
    )

__all__ = [
    "METHOD",
    "SHA",
    "discrepancy",
    "sharpness_perturbation",
    "soft_balancing_weights",
    "within_client_average",
]
__getattr__, __dir__ = lazy_imports(__name__, __file__)
