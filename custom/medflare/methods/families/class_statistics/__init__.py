"""Statistics by class: sites send statistics of features, the server solves for a head.

For segmentation every pixel has features. A site without usable statistics (see
`statistics.usable`) still gets the models.
"""

from medflare.methods.method import MODEL_ROLES, Method


def _statistics(
    name: str,
    title: str,
    paper: str,
    algorithms: tuple[str, str],
    stays: str = "",
    roles: tuple[str, ...] = MODEL_ROLES,
) -> Method:
    """A row: site and server algorithm of this package, "module:Class"; outside sites get the
    global model, if there is one.
    """
    return Method(
        name=name,
        title=title,
        paper=paper,
        site=f"{__name__}.{algorithms[0]}",
        server=f"{__name__}.{algorithms[1]}",
        roles=roles,
        outside="global" in roles,
        family="class statistics",
        stays=stays,
    )


FEDPROTO = _statistics(
    "fedproto",
    "Personal models whose class means of features are pulled together",
    "Tan et al., FedProto, AAAI 2022",
    ("fedproto:FedProtoSite", "fedproto:FedProtoServer"),
    "personal model",
    ("personal", "deployed"),
)
FED_GAUSSIAN = _statistics(
    "fed_gaussian",
    "FedAvg's head, retrained on features drawn from Gaussians of the classes",
    "Luo et al., CCVR, NeurIPS 2021; Beitollahi et al., FedPFT, arXiv 2402.01862",
    ("fed_gaussian:FedGaussianSite", "fed_gaussian:FedGaussianServer"),
)
RIDGE = _statistics(
    "ridge",
    "A closed-form head (ridge regression) on the initial or pretrained features",
    "Fani et al., Fed3R, ICML 2024",
    ("ridge:RidgeSite", "ridge:RidgeServer"),
)
