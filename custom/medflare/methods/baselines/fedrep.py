"""FedRep (Collins et al., ICML 2021, Alg. 1): sites share the body of the network, and each has a head of its own.

    h_k <- τ epochs of descent on F_k(h, φ) in h,   from the site's last head, φ as the server sent it
    φ_k <- epochs of descent on F_k(h_k, φ) in φ
    φ   <- Σ_k p_k φ_k

The part that rests is in evaluation mode, so that it does not move at all: its running statistics stay as they are, and the new
head learns from the very features that it will be used on.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from medflare.core.hyper import param
from medflare.core.settings import STRICT
from medflare.methods.fedavg.partial import PartialSite
from medflare.methods.fedavg.site import FedAvgSiteHyper
from medflare.methods.method import Method
from medflare.methods.parts.partial import LocalPart
from medflare.networks.features import FeatureNetwork
from medflare.training.epochs import train_epochs

METHOD = Method(
    name="fedrep",
    title="Shared body, local heads",
    paper="Collins et al., FedRep, ICML 2021",
    site="medflare.methods.baselines.fedrep:FedRepSite",
    server="medflare.methods.fedavg.server:FedAvgServer",
)


@dataclass(frozen=True, config=STRICT)
class FedRepHyper(FedAvgSiteHyper):
    """How long head and body train in a round."""

    head_epochs: int = param(10, "epochs of the head, the body at rest", symbol="τ", source="Alg. 1; 10 in Sec. 5", low=0)
    body_epochs: int | None = param(None, "epochs of the body, the head at rest; none: the task's local epochs", source="Alg. 1", low=0)


@contextmanager
def resting(part: nn.Module) -> Iterator[None]:
    """Inside, nothing of a part of a network moves: no gradient, no running statistics, no dropout."""
    trained = [weight for weight in part.parameters() if weight.requires_grad]
    part.eval().requires_grad_(False)
    try:
        yield
    finally:
        for weight in trained:
            weight.requires_grad_(True)
        part.train()


class FedRepSite(PartialSite[FedRepHyper]):
    """Keeps the network's head; trains the head first and the body after it."""

    Hyper: ClassVar[type] = FedRepHyper

    @classmethod
    def local_part(cls, network: nn.Module) -> LocalPart:
        """The network's head."""
        return LocalPart.of_paths(network, ["head"])

    @classmethod
    def needs_features(cls, hyper: FedRepHyper) -> bool:
        """The head is what lies behind the features."""
        return True

    def fit(self, model: FeatureNetwork, optimizer: torch.optim.Optimizer, round: int) -> float | None:
        """The loss of the body's epochs; of the head's, where the body has none."""

        def loss(_part: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
            return self.site.loss(model(images), targets)

        with resting(model.body):
            of_head = train_epochs(model.head, optimizer, self.site, round, "head", loss=loss, count=self.hyper.head_epochs)
        with resting(model.head):
            of_body = train_epochs(model.body, optimizer, self.site, round, "model", loss=loss, count=self.hyper.body_epochs)
        return of_head if self.hyper.body_epochs == 0 else of_body
