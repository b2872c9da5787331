"""GRACE (Zhang et al., "GRACE: A Generalized and Personalized Federated Learning Method for Medical Imaging", MICCAI 2023).

Sites train in two steps with feature alignment; the server weighs updates by their consistency. Inside, a site uses its local
model; outside, the global one is used, adapted at test time where asked for.
"""

from typing import Any

from medflare.core.facade import public
from medflare.methods.method import Method

METHOD = Method(
    name="grace",
    title="Two-step alignment and consistency-enhanced re-weighting",
    paper="Zhang et al., GRACE, MICCAI 2023",
    site="medflare.methods.grace.site:GraceSite",
    server="medflare.methods.grace.server:GraceServer",
)

_PUBLIC = dict.fromkeys(("a_distance", "consistency_weights", "consistent_aggregate", "coral", "mmd"), "formulas")


def __getattr__(name: str) -> Any:
    return public(__name__, _PUBLIC, name)
