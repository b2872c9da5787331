"""GRACE, a generalized and personalized method (Zhang et al., MICCAI 2023).

The paper: "GRACE: A Generalized and Personalized Federated Learning Method for Medical Imaging".
Sites train in two steps with feature alignment; the server weights updates by their consistency.
Inside sites use their local model, outside sites the global one, on request with test-time
adaptation.
"""

from functools import partial

from medflare.core.facade import public
from medflare.methods.method import Method

METHOD = Method(
    name="grace",
    title="Two-step alignment and consistency-enhanced re-weighting",
    paper="Zhang et al., GRACE, MICCAI 2023",
    site="medflare.methods.grace.site:GraceSite",
    server="medflare.methods.grace.server:GraceServer",
    stays="local model",
)

_PUBLIC = dict.fromkeys(
    ("a_distance", "consistency_weights", "consistent_aggregate", "coral", "mmd"), "formulas"
)
__getattr__ = partial(public, __name__, _PUBLIC)
