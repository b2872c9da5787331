"""GRACE, a generalized and personalized method (Zhang et al., MICCAI 2023).

The paper: "GRACE: A Generalized and Personalized Federated Learning Method for Medical Imaging".
Sites train in two steps with feature alignment; the server weights updates by their consistency.
Inside sites use their local model, outside sites the global one, on request with test-time
adaptation.
"""

from typing import TYPE_CHECKING

from medflare.core.lazy_imports import lazy_imports
from medflare.methods import Method

METHOD = Method(
    name="grace",
    title="Two-step alignment and consistency-enhanced re-weighting",
    paper="Zhang et al., GRACE, MICCAI 2023",
    site="medflare.methods.grace.site:GraceSite",
    server="medflare.methods.grace.server:GraceServer",
    stays="local model",
)

if TYPE_CHECKING:
    from medflare.methods.grace.formulas import (
        a_distance,
        consistency_weights,
        consistent_aggregate,
        coral,
        mmd,
    )

__all__ = ["METHOD", "a_distance", "consistency_weights", "consistent_aggregate", "coral", "mmd"]
__getattr__, __dir__ = lazy_imports(__name__, __file__)
