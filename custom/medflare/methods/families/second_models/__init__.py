"""Second models: beside the global model, every site trains one that never leaves it."""

from functools import partial

from medflare.methods import Method

_row = partial(
    Method,
    server="medflare.methods.fedavg.server:FedAvgServer",
    family="second models",
    stays="personal model",
)

DITTO = _row(
    "ditto",
    "Personal models with a proximal term to the global one",
    "Li et al., Ditto, ICML 2021",
    f"{__name__}.ditto:DittoSite",
)
FINETUNE = _row(
    "finetune",
    "The global model, fine-tuned at every site",
    "Wang et al., Federated evaluation of on-device personalization, arXiv 1910.10252",
    "medflare.methods.fedavg.fine_tuning:FineTunedSite",
)
APFL = _row(
    "apfl",
    "Learned mixture of a local and the global model",
    "Deng et al., Adaptive personalized federated learning, arXiv 2003.13461",
    f"{__name__}.apfl:APFLSite",
    stays="local model, mixing weight",
)
PFEDME = _row(
    "pfedme",
    "Personal models near the shared one (Moreau envelopes)",
    "Dinh et al., pFedMe, NeurIPS 2020",
    f"{__name__}.pfedme:PFedMeSite",
    server=f"{__name__}.pfedme:PFedMeServer",
)
PERFEDAVG = _row(
    "perfedavg",
    "A shared model that one step adapts to a site",
    "Fallah et al., Per-FedAvg, NeurIPS 2020",
    f"{__name__}.perfedavg:PerFedAvgSite",
)
FML = _row(
    "fml",
    "Personal and deputy model learn from each other",
    "Shen et al., Federated mutual learning, arXiv 2006.16765",
    f"{__name__}.fml:FMLSite",
)
FEDROD = _row(
    "fedrod",
    "Balanced generic head plus a personal head",
    "Chen and Chao, FedRoD, ICLR 2022",
    f"{__name__}.fedrod:FedRoDSite",
    stays="personal head",
)
