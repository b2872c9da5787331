"""Partial sharing: a part of the network stays at the site, the rest is averaged.

A row names the part. With `freeze`, it is nowhere trained while the rest is.
"""

from medflare.methods.method import Method


def _partial(name: str, title: str, paper: str, site: str, stays: str) -> Method:
    """A row: FedAvg's server algorithm with a site algorithm of this package, "module:Class"."""
    return Method(
        name=name,
        title=title,
        paper=paper,
        site=f"{__name__}.{site}",
        server="medflare.methods.fedavg.server:FedAvgServer",
        family="partial sharing",
        stays=stays,
    )


FEDBN = _partial(
    "fedbn",
    "Local batch normalisation",
    "Li et al., FedBN, ICLR 2021",
    "site:FedBNSite",
    "batch normalisation",
)
SILOBN = _partial(
    "silobn",
    "Local statistics of batch normalisation",
    "Andreux et al., Siloed federated learning, DART 2020",
    "site:SiloBNSite",
    "running statistics",
)
FEDPER = _partial(
    "fedper",
    "Local heads, trained together with the body",
    "Arivazhagan et al., FedPer, arXiv 1912.00818",
    "site:FedPerSite",
    "head",
)
LG_FEDAVG = _partial(
    "lg_fedavg",
    "Local bodies, one shared head",
    "Liang et al., LG-FedAvg, arXiv 2001.01523",
    "site:LGFedAvgSite",
    "body",
)
FEDREP = _partial(
    "fedrep",
    "Shared body, local heads",
    "Collins et al., FedRep, ICML 2021",
    "fedrep:FedRepSite",
    "head",
)
FEDBABU = _partial(
    "fedbabu",
    "Shared body under a common random head, fine-tuned at the end",
    "Oh et al., FedBABU, ICLR 2022",
    "fedbabu:FedBABUSite",
    "fine-tuned model",
)
FEDLORA = Method(
    name="fedlora",
    title="Low-rank adapters of a frozen network",
    paper="Zhang et al., FedIT, ICASSP 2024; Guo et al., FedSA-LoRA, ICLR 2025; "
    "Sun et al., FFA-LoRA, ICLR 2024",
    site=f"{__name__}.fedlora:FedLoRASite",
    server=f"{__name__}.fedlora:FedLoRAServer",
    family="partial sharing",
    stays="factor B with share=a",
)
