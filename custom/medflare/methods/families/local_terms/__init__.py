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
