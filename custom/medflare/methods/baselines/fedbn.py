"""FedBN (Li et al., ICLR 2021): batch normalisation stays at the site, everything else is averaged.

A site's own statistics, scales and shifts compensate what its scanner, stain or camera does to the
images. Layers are found by type.
"""

from typing import Any

from torch import nn

from medflare.core.errors import ConfigError
from medflare.methods.fedavg.partial import PartialSite
from medflare.methods.fedavg.site import FedAvgSiteHyper
from medflare.methods.method import Method
from medflare.methods.parts.partial import LocalPart
from medflare.networks.catalogue import meta_network
from medflare.tasks.config import TaskConfig

METHOD = Method(
    name="fedbn",
    title="Local batch normalisation",
    paper="Li et al., FedBN, ICLR 2021",
    site="medflare.methods.baselines.fedbn:FedBNSite",
    server="medflare.methods.fedavg.server:FedAvgServer",
)


class FedBNSite(PartialSite[FedAvgSiteHyper]):
    """Keeps weights and running statistics of every batch-normalisation layer."""

    @classmethod
    def local_part(cls, network: nn.Module) -> LocalPart:
        return LocalPart.of_batch_norm(network)

    @classmethod
    def check(cls, task: TaskConfig, hyper: FedAvgSiteHyper, server_hyper: Any) -> None:
        """Also raises ConfigError if the network has no batch normalisation."""
        super().check(task, hyper, server_hyper)
        if not cls.local_part(meta_network(task)).names:
            raise ConfigError(
                f"task {task.name}: network {task.network['name']} has no batch normalisation, "
                "so fedbn would be fedavg; set task.network.norm=batch (unet) or "
                "task.network.batch_norm=true (small_cnn), or run fedavg"
            )
