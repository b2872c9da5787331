"""Second models: beside the global model, every site trains one that never leaves it."""

from medflare.methods.method import Method


def _second(name: str, title: str, paper: str, site: str, stays: str = "personal model") -> Method:
    """A row: a site algorithm, "package.module:Class", with FedAvg's server algorithm."""
    return Method(
        name=name,
        title=title,
        paper=paper,
        site=site,
        server="medflare.methods.fedavg.server:FedAvgServer",
        family="second models",
        stays=stays,
    )


DITTO = _second(
    "ditto",
    "Personal models with a proximal term to the global one",
    "Li et al., Ditto, ICML 2021",
    f"{__name__}.ditto:DittoSite",
)
FINETUNE = _second(
    "finetune",
    "The global model, fine-tuned at every site",
    "Wang et al., Federated evaluation of on-device personalization, arXiv 1910.10252",
    "medflare.methods.fedavg.fine_tuning:FineTunedSite",
)
