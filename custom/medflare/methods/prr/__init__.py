"""PRR-Imbalance (Chen et al., IEEE TMI 2022): personalized models that do not lose what they knew at every exchange.

The server gives every site a model of its own (Progressive Fourier Aggregation): low frequencies averaged, high ones the
site's. It lands in a deputy model D_k; the personal model P_k is never overwritten. Deputy-Enhanced Transfer trains both on
the same batches and lets them teach each other in stages. The CPA loss balances classes by their counts over all sites and by
how far a site's class prototypes are from the others'. Batch normalisation stays at the site.

Without any of the three parts (pfa=false det=false cpa=off) this is FedBN (Li et al., ICLR 2021).
"""

from typing import Any

from medflare.core.facade import public
from medflare.methods.method import Method

METHOD = Method(
    name="prr",
    title="Fourier aggregation, deputy-enhanced transfer and the CPA loss",
    paper="Chen et al., PRR-Imbalance, IEEE TMI 2022",
    site="medflare.methods.prr.site:PRRSite",
    server="medflare.methods.prr.server:PRRServer",
)

_PUBLIC = {
    "conjoint_mask": "formulas",
    "cpa_loss": "formulas",
    "fourier_aggregate": "fourier",
    "frequency_ratio": "fourier",
    "next_stage": "formulas",
    "prototype_gamma": "formulas",
}


def __getattr__(name: str) -> Any:
    return public(__name__, _PUBLIC, name)
