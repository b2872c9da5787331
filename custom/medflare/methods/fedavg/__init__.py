"""FedAvg (McMahan et al., AISTATS 2017): every site trains the global model, the server averages.

    w <- sum_k p_k w_k,   p_k = n_k / n
    (FedSM paper, Sec. 2; its printed 1/K in front is a double normalisation)

The algorithms of most other methods derive from these.
"""

from functools import partial

from medflare.core.facade import public
from medflare.methods.method import Method

METHOD = Method(
    name="fedavg",
    title="Federated averaging",
    paper="McMahan et al., AISTATS 2017",
    site="medflare.methods.fedavg.site:FedAvgSite",
    server="medflare.methods.fedavg.server:FedAvgServer",
)

_PUBLIC = {"FedAvgSite": "site", "FedAvgServer": "server"}
__getattr__ = partial(public, __name__, _PUBLIC)
