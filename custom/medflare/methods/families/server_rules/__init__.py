"""Server rules: sites train as in FedAvg, the server combines their models in another way."""

from functools import partial

from medflare.methods import Method

_row = partial(Method, site="medflare.methods.fedavg.site:FedAvgSite", family="server rules")

ROBUST = _row(
    "robust",
    "Median, trimmed mean, Krum, geometric median or clipped updates",
    "Yin et al., ICML 2018",
    server=f"{__name__}.robust:RobustServer",
)
FEDAVGM = _row(
    "fedavgm",
    "A server step with momentum",
    "Hsu et al., FedAvgM, 2019",
    server=f"{__name__}.fedopt:FedAvgMServer",
)
FEDADAGRAD = _row(
    "fedadagrad",
    "A server step with Adagrad",
    "Reddi et al., FedOpt, ICLR 2021",
    server=f"{__name__}.fedopt:FedAdagradServer",
)
FEDADAM = _row(
    "fedadam",
    "A server step with Adam",
    "Reddi et al., FedOpt, ICLR 2021",
    server=f"{__name__}.fedopt:FedAdamServer",
)
FEDYOGI = _row(
    "fedyogi",
    "A server step with Yogi",
    "Reddi et al., FedOpt, ICLR 2021",
    server=f"{__name__}.fedopt:FedYogiServer",
)
FEDNOVA = _row(
    "fednova",
    "Updates normalised by local steps",
    "Wang et al., FedNova, NeurIPS 2020",
    server=f"{__name__}.fednova:FedNovaServer",
)
IDA = _row(
    "ida",
    "Weights by inverse distance to the mean",
    "Yeganeh et al., DART 2020",
    server=f"{__name__}.weights:IDAServer",
)
FEDAWA = _row(
    "fedawa",
    "Weights optimized by client vectors",
    "Shi et al., FedAWA, CVPR 2025",
    server=f"{__name__}.weights:FedAWAServer",
)
FEDLWS = _row(
    "fedlws",
    "Layer-wise shrinking of the mean model",
    "Shi et al., FedLWS, ICLR 2025",
    server=f"{__name__}.fedlws:FedLWSServer",
)
FEDCE = _row(
    "fedce",
    "Weights by estimated contribution",
    "Jiang et al., FedCE, CVPR 2023",
    server=f"{__name__}.validated:FedCEServer",
)
FEDDG_GA = _row(
    "feddg_ga",
    "Weights by generalization gap",
    "Zhang et al., FedDG-GA, CVPR 2023",
    server=f"{__name__}.validated:FedDGGAServer",
)
FETS_PID = _row(
    "fets_pid",
    "Weights by images, drop and sum of the cost",
    "Mächler et al., FedPIDAvg, FeTS 2022",
    server=f"{__name__}.weights:FetsPIDServer",
)
