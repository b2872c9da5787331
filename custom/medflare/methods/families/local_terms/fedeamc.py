"""FedeAMC (Wang et al., IEEE Trans. Cogn. Commun. Netw. 8(1), 2022) as PRR's Table XI compares it.

The loss of a site is the cross entropy with class weights inverse to the site's numbers of training
samples (PRR, Sec. V-A), w_c = n / (C n_c) for its C classes with samples. It replaces the task's
loss; in segmentation Dice is added, as in PRR. A sigmoid counts as two classes. The authors' code
repeats the images of rare classes instead, which they call equivalent.
"""

from typing import Any

import torch

from medflare.methods import FeatureNetwork, FedAvgSite, FedAvgSiteHyper, Loss, TaskConfig
from medflare.methods.parts.class_groups import check_counted, groups_and_classes
from medflare.methods.prr.hyper import PRRSiteHyper
from medflare.methods.prr.transfer import Supervision

_LOSS = PRRSiteHyper(cpa="off", plain_loss="fedeamc")


class FedeAMCSite(FedAvgSite[FedAvgSiteHyper]):
    """FedAvg's site algorithm with the re-weighted loss."""

    dp_unsupported_reason = "its class weights are numbers of training samples without noise"

    @classmethod
    def check(cls, task: TaskConfig, hyper: FedAvgSiteHyper, server_hyper: Any) -> None:
        """Also raises ConfigError if not all classes can be counted."""
        super().check(task, hyper, server_hyper)
        check_counted(task)

    def round_loss(self, model: FeatureNetwork, round: int) -> Loss:
        """The re-weighted loss."""
        no_totals = torch.zeros(groups_and_classes(self.site.task))
        supervision = Supervision(self.site, _LOSS, no_totals, None)
        return lambda network, images, targets: supervision(network(images), targets)
