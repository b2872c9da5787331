"""Local terms: a site's loss, gradient or features get a further term; the server averages."""

from functools import partial

from medflare.methods import Method

_row = partial(Method, server="medflare.methods.fedavg.server:FedAvgServer", family="local terms")

FEDPROX = _row(
    "fedprox",
    "A proximal term in local training",
    "Li et al., FedProx, MLSys 2020",
    f"{__name__}.fedprox:FedProxSite",
)
MOON = _row(
    "moon",
    "Model-contrastive training",
    "Li et al., MOON, CVPR 2021",
    f"{__name__}.moon:MoonSite",
    stays="local model of the last round",
)
SCAFFOLD = _row(
    "scaffold",
    "Control variates against client drift",
    "Karimireddy et al., SCAFFOLD, ICML 2020",
    f"{__name__}.scaffold:ScaffoldSite",
    server=f"{__name__}.scaffold:ScaffoldServer",
    stays="control variate",
)
FEDDYN = _row(
    "feddyn",
    "A regularizer that follows the global model",
    "Acar et al., FedDyn, ICLR 2021",
    f"{__name__}.feddyn:FedDynSite",
    server=f"{__name__}.feddyn:FedDynServer",
    stays="linear term of the regularizer",
)
FEDSAM = _row(
    "fedsam",
    "Sharpness-aware local steps",
    "Qu et al., FedSAM, ICML 2022",
    f"{__name__}.fedsam:FedSAMSite",
)
FEDEAMC = _row(
    "fedeamc",
    "Class weights by the site's class counts",
    "Wang et al., FedeAMC, IEEE TCCN 2022",
    f"{__name__}.fedeamc:FedeAMCSite",
)
FEDSR = _row(
    "fedsr",
    "Regularized stochastic features",
    "Nguyen et al., FedSR, NeurIPS 2022",
    f"{__name__}.features:FedSRSite",
    stays="feature distributions of the classes",
)
RSC = _row(
    "rsc",
    "Self-challenged features",
    "Huang et al., RSC, ECCV 2020",
    f"{__name__}.features:RSCSite",
)
MIXSTYLE = _row(
    "mixstyle",
    "Mixed styles in early layers",
    "Zhou et al., MixStyle, ICLR 2021",
    f"{__name__}.mixstyle:MixStyleSite",
)
DDAIG = _row(
    "ddaig",
    "Adversarially generated domains",
    "Zhou et al., DDAIG, AAAI 2020",
    f"{__name__}.ddaig:DDAIGSite",
    server=f"{__name__}.ddaig:DDAIGServer",
)
