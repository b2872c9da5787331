"""IOP-FL (Jiang et al., IEEE TMI 2023): personal models for sites inside and outside a federation.

Inside, FedAvg runs unchanged and every site keeps a local adapted model
P_k <- (1 - τ) P_k + τ w_k (Eq. 4), which is not sent during training. An outside site receives
{P_1, ..., P_K, w_g} and mixes their layers by coefficients that it fits to its unlabelled images
(Eq. 5-10).
"""

from typing import TYPE_CHECKING

from medflare.core.lazy_imports import lazy_imports
from medflare.methods import Method

METHOD = Method(
    name="iop_fl",
    title="Local adapted models inside, test-time routing outside",
    paper="Jiang et al., IOP-FL, IEEE TMI 2023",
    site="medflare.methods.iop_fl.site:IOPSite",
    server="medflare.methods.iop_fl.server:IOPServer",
    models={
        "ensemble": "medflare.methods.iop_fl.outside:ensemble_model",
        "routed": "medflare.methods.iop_fl.outside:routed_model",
    },
    stays="adapted model",
)

if TYPE_CHECKING:
    from medflare.methods.iop_fl.formulas import (
        consistency_loss,
        entropy_loss,
        local_adapted,
        shape_loss,
    )

__all__ = ["METHOD", "consistency_loss", "entropy_loss", "local_adapted", "shape_loss"]
__getattr__, __dir__ = lazy_imports(__name__, __file__)
