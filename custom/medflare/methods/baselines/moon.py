"""MOON (Li et al., "Model-Contrastive Federated Learning", CVPR 2021) as GRACE's Table 4 compares it, with either server.

A site's features are drawn to those of the global model and pushed away from those of its own model of the round before.
"""

from typing import Any, ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional as F

from medflare.core.errors import ConfigError
from medflare.core.hyper import param
from medflare.core.message import Message
from medflare.core.settings import STRICT
from medflare.core.states import StateDict
from medflare.methods.base import Kept
from medflare.methods.fedavg.site import MODEL
from medflare.methods.grace.hyper import GraceServerHyper, LocalModelHyper
from medflare.methods.grace.local_model import LocalModelSite
from medflare.methods.grace.server import GraceServer
from medflare.methods.grace.two_step import Penalty
from medflare.methods.method import Method, refuse_other_steps
from medflare.methods.parts.normalisation import batch_statistics
from medflare.networks.features import FeatureNetwork
from medflare.privacy.settings import PrivacyHyper, is_private
from medflare.tasks.config import TaskConfig

METHOD = Method(
    name="moon",
    title="Model-contrastive training",
    paper="Li et al., MOON, CVPR 2021",
    site="medflare.methods.baselines.moon:MoonSite",
    server="medflare.methods.baselines.moon:MoonServer",
)


def contrastive_loss(z: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float = 0.5) -> Tensor:
    """-log exp(cos(z, z_glob) / tau) / (exp(cos(z, z_glob) / tau) + exp(cos(z, z_prev) / tau)), mean over images (MOON, Eq. 3).

    log 2, without a gradient, where the global and the previous model agree.

    Args:
        z: features (N, ...) under the local model; feature maps count as one long vector.
        z_global: features of the same images under the global model.
        z_previous: features of the same images under the site's model of the round before.
        temperature: tau.

    Returns:
        The scalar mean over the images.

    Examples:
        >>> z = torch.tensor([[1.0, 0.0]])
        >>> contrastive_loss(z, z, z)
        tensor(0.6931)
        >>> contrastive_loss(z, z, -z, temperature=0.01)
        tensor(0.)
    """
    own = z.flatten(1)
    cosines = [F.cosine_similarity(own, other.flatten(1), dim=1) for other in (z_global, z_previous)]
    logits = torch.stack(cosines, dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))


@dataclass(frozen=True, config=STRICT)
class MoonSiteHyper(PrivacyHyper, LocalModelHyper):
    """The contrastive loss."""

    mu: float = param(1.0, "weight of the contrastive loss", symbol="μ", source="MOON, Eq. 4", low=0)
    temperature: float = param(0.5, "of the contrastive loss", symbol="τ", source="MOON, Eq. 3", low=1e-6)
    two_step: bool = param(False, "GRACE's meta-train and meta-update with this loss as alignment", source="GRACE's code")


@dataclass(frozen=True, config=STRICT)
class MoonServerHyper(GraceServerHyper):
    """FedAvg's, or GRACE's."""

    consistency: bool = param(False, "GRACE's weights by consistency; false: FedAvg's", source="GRACE, Table 4")


class MoonSite(LocalModelSite[MoonSiteHyper]):
    """Adds the contrastive loss to local training from the second round on, when there is a previous model."""

    Hyper: ClassVar[type] = MoonSiteHyper
    plain_steps: ClassVar[bool] = True

    previous = Kept("previous")

    @classmethod
    def check(cls, task: TaskConfig, hyper: MoonSiteHyper, server_hyper: Any) -> None:
        """Refuse differential privacy beside what would go around it, and other steps than those of `two_step`.

        Raises:
            ConfigError: one of both.
        """
        super().check(task, hyper, server_hyper)
        if hyper.two_step:
            refuse_other_steps(task, "two_step takes a step within every step")
        if is_private(hyper) and (hyper.two_step or hyper.probe):
            reason = "meta-train follows a gradient without noise" if hyper.two_step else "the A-distance is measured on training images"
            raise ConfigError(f"dp_noise: {reason}; set two_step=false probe=false")

    @classmethod
    def needs_features(cls, hyper: MoonSiteHyper) -> bool:
        """Features are what is contrasted."""
        return True

    def train(self, round: int, incoming: Message) -> Message:
        """Training as in `LocalModelSite`; the trained model is kept as the next round's previous one."""
        reply = super().train(round, incoming)
        self.previous = reply.states[MODEL]
        return reply

    def fit(self, model: FeatureNetwork, optimizer: torch.optim.Optimizer, round: int) -> float | None:
        """Epochs of L_sup + μ L_con (MOON, Eq. 4), of L_sup alone in the first round; returns the mean loss."""
        penalty = None if self.previous is None else self._contrast(model, self.previous)
        if self.hyper.two_step:
            return self.two_steps(model, optimizer, round, penalty)
        if penalty is None:
            return super().fit(model, optimizer, round)
        contrast = penalty

        def loss(network: Any, images: Tensor, targets: Tensor) -> Tensor:
            features, logits = network.features_and_output(images)
            return self.site.loss(logits, targets) + contrast(images, features)

        return self.descend(model, optimizer, round, loss)

    def _contrast(self, model: FeatureNetwork, previous: StateDict) -> Penalty:
        """μ L_con. All three models normalise by the same batch, or their features would differ by the mode of batch normalisation."""
        others = [self.frozen(model.state_dict()), self.frozen(previous, "previous")]

        def penalty(images: Tensor, features: Tensor) -> Tensor:
            with torch.no_grad(), batch_statistics(*others):
                z_global, z_previous = (other.features_and_output(images)[0] for other in others)
            return self.hyper.mu * contrastive_loss(features, z_global, z_previous, self.hyper.temperature)

        return penalty


class MoonServer(GraceServer):
    """FedAvg's server unless GRACE's is asked for ("+GRACE" in GRACE's Table 4)."""

    Hyper: ClassVar[type] = MoonServerHyper
