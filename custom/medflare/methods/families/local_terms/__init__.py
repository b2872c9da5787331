"""Local terms: a site's loss, gradient or features get a further term; the server averages."""

from medflare.methods.method import Method

_FEDAVG_SERVER = "medflare.methods.fedavg.server:FedAvgServer"


def _local(
    name: str, title: str, paper: str, site: str, server: str = "", stays: str = ""
) -> Method:
    """A row: a site algorithm of this package, "module:Class", with FedAvg's server algorithm or
    one of this package.
    """
    return Method(
        name=name,
        title=title,
        paper=paper,
        site=f"{__name__}.{site}",
        server=f"{__name__}.{server}" if server else _FEDAVG_SERVER,
        family="local terms",
        stays=stays,
    )


FEDPROX = _local(
    "fedprox",
    "A proximal term in local training",
    "Li et al., FedProx, MLSys 2020",
    "fedprox:FedProxSite",
)
MOON = _local(
    "moon",
    "Model-contrastive training",
    "Li et al., MOON, CVPR 2021",
    "moon:MoonSite",
    stays="local model of the last round",
)
SCAFFOLD = _local(
    "scaffold",
    "Control variates against client drift",
    "Karimireddy et al., SCAFFOLD, ICML 2020",
    "scaffold:ScaffoldSite",
    "scaffold:ScaffoldServer",
    stays="control variate",
)
FEDDYN = _local(
    "feddyn",
    "A regularizer that follows the global model",
    "Acar et al., FedDyn, ICLR 2021",
    "feddyn:FedDynSite",
    "feddyn:FedDynServer",
    stays="linear term of the regularizer",
)
FEDSAM = _local(
    "fedsam", "Sharpness-aware local steps", "Qu et al., FedSAM, ICML 2022", "fedsam:FedSAMSite"
)
FEDEAMC = _local(
    "fedeamc",
    "Class weights by the site's class counts",
    "Wang et al., FedeAMC, IEEE TCCN 2022",
    "fedeamc:FedeAMCSite",
)
FEDSR = _local(
    "fedsr",
    "Regularized stochastic features",
    "Nguyen et al., FedSR, NeurIPS 2022",
    "features:FedSRSite",
    stays="feature distributions of the classes",
)
RSC = _local("rsc", "Self-challenged features", "Huang et al., RSC, ECCV 2020", "features:RSCSite")
MIXSTYLE = _local(
    "mixstyle",
    "Mixed styles in early layers",
    "Zhou et al., MixStyle, ICLR 2021",
    "mixstyle:MixStyleSite",
)
DDAIG = _local(
    "ddaig",
    "Adversarially generated domains",
    "Zhou et al., DDAIG, AAAI 2020",
    "ddaig:DDAIGSite",
    "ddaig:DDAIGServer",
)
