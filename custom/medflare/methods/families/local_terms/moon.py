"""MOON (Li et al., "Model-Contrastive Federated Learning", CVPR 2021).

A contrastive loss pulls a site's features to those of the global model and away from those of its
own model of the previous round. As in GRACE's Tables 2 and 4, a site uses its own local model;
`--server-algorithm grace` is their "+ GRACE".
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from medflare.methods import (
    MODEL,
    FeatureNetwork,
    FedAvgSiteHyper,
    Loss,
    Message,
    PersistentState,
    PersonalSite,
    PrivacyHyper,
    param,
    strict_dataclass,
)
from medflare.methods.parts.normalisation import batch_statistics


def contrastive_loss(
    z: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float = 0.5
) -> Tensor:
    """L_con (MOON, Eq. 3), mean over images.

    -log exp(cos(z, z_glob) / tau) / (exp(cos(z, z_glob) / tau) + exp(cos(z, z_prev) / tau));
    log 2, without a gradient, where the global and the previous model agree.

    Args:
        z: features (N, ...) under the local model, flattened per image.
        z_global: features of the same images under the global model.
        z_previous: features of the same images under the site's model of the previous round.
        temperature: tau.
    """
    local = z.flatten(1)
    to_global = F.cosine_similarity(local, z_global.flatten(1), dim=1)
    to_previous = F.cosine_similarity(local, z_previous.flatten(1), dim=1)
    logits = torch.stack([to_global, to_previous], dim=1) / temperature
    of_global = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    return F.cross_entropy(logits, of_global)


@strict_dataclass
class MoonHyper(PrivacyHyper, FedAvgSiteHyper):
    """The contrastive loss."""

    mu: float = param(
        1.0, "weight of the contrastive loss", symbol="μ", source="MOON, Eq. 4", low=0
    )
    temperature: float = param(
        0.5, "of the contrastive loss", symbol="τ", source="MOON, Eq. 3", low=1e-6
    )


class MoonSite(PersonalSite[MoonHyper]):
    """Adds the contrastive loss from the second round on; the site uses its local model of the best
    round.
    """

    uses_features = True
    previous = PersistentState("previous")

    def train(self, round: int, incoming: Message) -> Message:
        """FedAvg's training; the trained model is validated, and is the previous model of the next
        round.
        """
        reply = super().train(round, incoming)
        self.previous = reply[MODEL]
        self.selection.add_trained(round, reply[MODEL], reply)
        return reply

    def round_loss(self, model: FeatureNetwork, round: int) -> Loss | None:
        """L_sup + μ L_con (MOON, Eq. 4), L_sup alone in the first round.

        All three models normalise by the same batch, so that equal models give equal features.
        """
        if self.previous is None:
            return None
        of_global = self.frozen(model.state_dict())
        of_previous = self.frozen(self.previous, "previous")

        def loss(network: Any, images: Tensor, targets: Tensor) -> Tensor:
            features, logits = network.features_and_output(images)
            with torch.no_grad(), batch_statistics(of_global, of_previous):
                z_global, _ = of_global.features_and_output(images)
                z_previous, _ = of_previous.features_and_output(images)
            contrast = contrastive_loss(features, z_global, z_previous, self.hyper.temperature)
            return self.site.loss(logits, targets) + self.hyper.mu * contrast

        return loss
