"""Server rules: sites train as in FedAvg, the server combines their models in another way."""

from medflare.methods.method import Method


def _rule(name: str, title: str, paper: str, server: str) -> Method:
    """A row: FedAvg's site algorithm with a server algorithm of this package, "module:Class"."""
    return Method(
        name=name,
        title=title,
        paper=paper,
        site="medflare.methods.fedavg.site:FedAvgSite",
        server=f"{__name__}.{server}",
        family="server rules",
    )


ROBUST = _rule(
    "robust",
    "Median, trimmed mean, Krum, geometric median or clipped updates",
    "Yin et al., ICML 2018",
    "robust:RobustServer",
)
FEDAVGM = _rule(
    "fedavgm", "A server step with momentum", "Hsu et al., FedAvgM, 2019", "fedopt:FedAvgMServer"
)
FEDADAGRAD = _rule(
    "fedadagrad",
    "A server step with Adagrad",
    "Reddi et al., FedOpt, ICLR 2021",
    "fedopt:FedAdagradServer",
)
FEDADAM = _rule(
    "fedadam", "A server step with Adam", "Reddi et al., FedOpt, ICLR 2021", "fedopt:FedAdamServer"
)
FEDYOGI = _rule(
    "fedyogi", "A server step with Yogi", "Reddi et al., FedOpt, ICLR 2021", "fedopt:FedYogiServer"
)
FEDNOVA = _rule(
    "fednova",
    "Updates normalised by local steps",
    "Wang et al., FedNova, NeurIPS 2020",
    "fednova:FedNovaServer",
)
IDA = _rule(
    "ida",
    "Weights by inverse distance to the mean",
    "Yeganeh et al., DART 2020",
    "weights:IDAServer",
)
FEDAWA = _rule(
    "fedawa",
    "Weights optimized by client vectors",
    "Shi et al., FedAWA, CVPR 2025",
    "weights:FedAWAServer",
)
FEDLWS = _rule(
    "fedlws",
    "Layer-wise shrinking of the mean model",
    "Shi et al., FedLWS, ICLR 2025",
    "fedlws:FedLWSServer",
)
FEDCE = _rule(
    "fedce",
    "Weights by estimated contribution",
    "Jiang et al., FedCE, CVPR 2023",
    "validated:FedCEServer",
)
FEDDG_GA = _rule(
    "feddg_ga",
    "Weights by generalization gap",
    "Zhang et al., FedDG-GA, CVPR 2023",
    "validated:FedDGGAServer",
)
FETS_PID = _rule(
    "fets_pid",
    "Weights by images, drop and sum of the cost",
    "Mächler et al., FedPIDAvg, FeTS 2022",
    "weights:FetsPIDServer",
)
