"""FedBN, SiloBN, FedPer and LG-FedAvg: which part of the network stays at the site.

Layers of batch normalisation are found by type: a site's own statistics, scales and shifts
compensate what its scanner, stain or camera does to the images.
"""

from typing import Any

from torch import nn

from medflare.methods import ConfigError, FedAvgSiteHyper, LocalPart, PartialSite, TaskConfig
from medflare.networks.catalogue import meta_network


class FedBNSite(PartialSite[FedAvgSiteHyper]):
    """Keeps weights and running statistics of every batch-normalisation layer (Li et al. 2021)."""

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
                "so the method would be fedavg; set task.network.norm=batch (unet) or "
                "task.network.batch_norm=true (small_cnn), or run fedavg"
            )


class SiloBNSite(FedBNSite):
    """Keeps the running statistics; scales and shifts are averaged (Andreux et al. 2020)."""

    @classmethod
    def local_part(cls, network: nn.Module) -> LocalPart:
        learned = {name for name, _ in network.named_parameters(remove_duplicate=False)}
        return LocalPart(LocalPart.of_batch_norm(network).names - learned)


class FedPerSite(PartialSite[FedAvgSiteHyper]):
    """Keeps the head, which is trained together with the body (Arivazhagan et al. 2019)."""

    local_paths = ("head",)
    uses_features = True


class LGFedAvgSite(FedPerSite):
    """Keeps the body: local representations under a shared head (Liang et al. 2020)."""

    local_paths = ("body",)
