"""FedAvg (McMahan et al., AISTATS 2017): every site trains the global model, the server averages.

    w <- sum_k p_k w_k,   p_k = n_k / n
    (FedSM paper, Sec. 2; its printed 1/K in front is a double normalisation)

The algorithms of most other methods derive from these.
"""

from typing import TYPE_CHECKING

from medflare.core.lazy_imports import lazy_imports
from medflare.methods import Method

METHOD = Method(
    name="fedavg",
    title="Federated averaging",
    paper="McMahan et al., AISTATS 2017",
    site="medflare.methods.fedavg.site:FedAvgSite",
    server="medflare.methods.fedavg.server:FedAvgServer",
)

if TYPE_CHECKING:
    from medflare.methods.fedavg.server import FedAvgServer
    from medflare.methods.fedavg.site import FedAvgSite

__all__ = ["METHOD", "FedAvgServer", "FedAvgSite"]
__getattr__, __dir__ = lazy_imports(__name__, __file__)
