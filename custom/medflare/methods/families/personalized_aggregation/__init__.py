"""Personalized aggregation: the server combines the sites' models into a different one for each.

There is no global model, so outside sites get none. The papers have none for them either: a mean of
models that may differ freely promises nothing, and IFCA's clusters are chosen with labels. A site
that joins late starts from the initial model (IFCA: from the clusters).
"""

from functools import partial

from medflare.methods import Method

_row = partial(
    Method, roles=("personal", "deployed"), outside=False, family="personalized aggregation"
)

FEDAMP = _row(
    "fedamp",
    "Models of similar sites attract each other",
    "Huang et al., FedAMP, AAAI 2021",
    f"{__name__}.anchored:FedAMPSite",
    f"{__name__}.anchored:FedAMPServer",
    stays="model of its best round",
)
FEDMTL = _row(
    "fedmtl",
    "Multi-task learning, regularized by the relationship of the sites",
    "Smith et al., Federated multi-task learning (MOCHA), NeurIPS 2017",
    f"{__name__}.anchored:AnchoredSite",
    f"{__name__}.anchored:FedMTLServer",
    stays="model of its best round",
)
FEDFOMO = _row(
    "fedfomo",
    "Each site weighs the models of the other sites by its validation loss",
    "Zhang et al., FedFomo, ICLR 2021",
    f"{__name__}.fedfomo:FedFomoSite",
    f"{__name__}.fedfomo:FedFomoServer",
    stays="combined model",
)
IFCA = _row(
    "ifca",
    "Clusters of sites, each with one model",
    "Ghosh et al., IFCA, NeurIPS 2020",
    f"{__name__}.ifca:IFCASite",
    f"{__name__}.ifca:IFCAServer",
    stays="model of its best round",
)
