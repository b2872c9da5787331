"""Statistics by class: sites send statistics of features, the server solves for a head.

For segmentation every pixel has features. A site without usable statistics (see
`statistics.usable`) still gets the models.
"""

from functools import partial

from medflare.methods import Method

_row = partial(Method, family="class statistics")

FEDPROTO = _row(
    "fedproto",
    "Personal models whose class means of features are pulled together",
    "Tan et al., FedProto, AAAI 2022",
    f"{__name__}.fedproto:FedProtoSite",
    f"{__name__}.fedproto:FedProtoServer",
    roles=("personal", "deployed"),
    outside=False,
    stays="personal model",
)
FED_GAUSSIAN = _row(
    "fed_gaussian",
    "FedAvg's head, retrained on features drawn from Gaussians of the classes",
    "Luo et al., CCVR, NeurIPS 2021; Beitollahi et al., FedPFT, arXiv 2402.01862",
    f"{__name__}.fed_gaussian:FedGaussianSite",
    f"{__name__}.fed_gaussian:FedGaussianServer",
)
RIDGE = _row(
    "ridge",
    "A closed-form head (ridge regression) on the initial or pretrained features",
    "Fani et al., Fed3R, ICML 2024",
    f"{__name__}.ridge:RidgeSite",
    f"{__name__}.ridge:RidgeServer",
)
