"""Personalized aggregation: the server combines the sites' models into a different one for each.

There is no global model, so outside sites get none. The papers have none for them either: a mean of
models that may differ freely promises nothing, and IFCA's clusters are chosen with labels. A site
that joins late starts from the initial model (IFCA: from the clusters).
"""

from medflare.methods.method import Method


def _personalized(name: str, title: str, paper: str, site: str, server: str, stays: str) -> Method:
    """A row: two algorithms of this package, "module:Class"."""
    return Method(
        name=name,
        title=title,
        paper=paper,
        site=f"{__name__}.{site}",
        server=f"{__name__}.{server}",
        roles=("personal", "deployed"),
        outside=False,
        family="personalized aggregation",
        stays=stays,
    )


FEDAMP = _personalized(
    "fedamp",
    "Models of similar sites attract each other",
    "Huang et al., FedAMP, AAAI 2021",
    "anchored:FedAMPSite",
    "anchored:FedAMPServer",
    "model of its best round",
)
FEDMTL = _personalized(
    "fedmtl",
    "Multi-task learning, regularized by the relationship of the sites",
    "Smith et al., Federated multi-task learning (MOCHA), NeurIPS 2017",
    "anchored:AnchoredSite",
    "anchored:FedMTLServer",
    "model of its best round",
)
FEDFOMO = _personalized(
    "fedfomo",
    "Each site weighs the models of the other sites by its validation loss",
    "Zhang et al., FedFomo, ICLR 2021",
    "fedfomo:FedFomoSite",
    "fedfomo:FedFomoServer",
    "combined model",
)
IFCA = _personalized(
    "ifca",
    "Clusters of sites, each with one model",
    "Ghosh et al., IFCA, NeurIPS 2020",
    "ifca:IFCASite",
    "ifca:IFCAServer",
    "model of its best round",
)
