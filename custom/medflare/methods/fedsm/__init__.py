"""FedSM (Xu et al., CVPR 2022): a "super model" of a global one, personal ones and a selector.

There is one personal model per site. For each image, the personal model of the selector's most
probable site predicts if the probability exceeds γ, else the global model.
"""

from typing import TYPE_CHECKING

from medflare.core.lazy_imports import lazy_imports
from medflare.methods import Method

METHOD = Method(
    name="fedsm",
    title="Super model of personal models and a selector",
    paper="Xu et al., FedSM, CVPR 2022",
    site="medflare.methods.fedsm.site:FedSMSite",
    server="medflare.methods.fedsm.server:FedSMServer",
    models={"super": "medflare.methods.fedsm.super_model:super_model"},
)
EXTRA = Method(
    name="fedsm_extra",
    title="FedSM-extra and the ensemble",
    paper="Xu et al., FedSM, CVPR 2022, Sec. 3.1",
    site="medflare.methods.fedsm.extra:FedSMExtraSite",
    server="medflare.methods.fedsm.extra:FedSMExtraServer",
    models={"super_extra": "medflare.methods.fedsm.extra:extra_super_model"},
)

if TYPE_CHECKING:
    from medflare.methods.fedsm.formulas import (
        GAMMAS,
        apfl_mixture,
        choose_model,
        ensemble_output,
        extra_labels,
        pfedme_outer,
        soft_pull,
        tuned_gamma,
    )

__all__ = [
    "EXTRA",
    "GAMMAS",
    "METHOD",
    "apfl_mixture",
    "choose_model",
    "ensemble_output",
    "extra_labels",
    "pfedme_outer",
    "soft_pull",
    "tuned_gamma",
]
__getattr__, __dir__ = lazy_imports(__name__, __file__)
