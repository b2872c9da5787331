"""Partial sharing: a part of the network stays at the site, the rest is averaged.

A row names the part. With `freeze`, it is nowhere trained while the rest is.
"""

from functools import partial

from medflare.methods import Method

_row = partial(
    Method, server="medflare.methods.fedavg.server:FedAvgServer", family="partial sharing"
)

FEDBN = _row(
    "fedbn",
    "Local batch normalisation",
    "Li et al., FedBN, ICLR 2021",
    f"{__name__}.site:FedBNSite",
    stays="batch normalisation",
)
SILOBN = _row(
    "silobn",
    "Local statistics of batch normalisation",
    "Andreux et al., Siloed federated learning, DART 2020",
    f"{__name__}.site:SiloBNSite",
    stays="running statistics",
)
FEDPER = _row(
    "fedper",
    "Local heads, trained together with the body",
    "Arivazhagan et al., FedPer, arXiv 1912.00818",
    f"{__name__}.site:FedPerSite",
    stays="head",
)
LG_FEDAVG = _row(
    "lg_fedavg",
    "Local bodies, one shared head",
    "Liang et al., LG-FedAvg, arXiv 2001.01523",
    f"{__name__}.site:LGFedAvgSite",
    stays="body",
)
FEDREP = _row(
    "fedrep",
    "Shared body, local heads",
    "Collins et al., FedRep, ICML 2021",
    f"{__name__}.fedrep:FedRepSite",
    stays="head",
)
FEDBABU = _row(
    "fedbabu",
    "Shared body under a common random head, fine-tuned at the end",
    "Oh et al., FedBABU, ICLR 2022",
    f"{__name__}.fedbabu:FedBABUSite",
    stays="fine-tuned model",
)
FEDLORA = _row(
    "fedlora",
    "Low-rank adapters of a frozen network",
    "Zhang et al., FedIT, ICASSP 2024; Guo et al., FedSA-LoRA, ICLR 2025; "
    "Sun et al., FFA-LoRA, ICLR 2024",
    f"{__name__}.fedlora:FedLoRASite",
    server=f"{__name__}.fedlora:FedLoRAServer",
    stays="factor B with share=a",
)
