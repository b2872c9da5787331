"""FedRep (Collins et al., ICML 2021, Alg. 1): a shared body, and a head of its own at every site.

    h_k <- τ epochs of descent on F_k(h, φ) in h, from the site's last head, with φ from the server
    φ_k <- epochs of descent on F_k(h_k, φ) in φ
    φ   <- Σ_k p_k φ_k

The frozen part is in evaluation mode: its running statistics do not change, and the head is trained
on the features that it will be used with.
"""

from torch import Tensor, nn
from torch.optim import Optimizer

from medflare.methods import (
    FeatureNetwork,
    FedAvgSiteHyper,
    PartialSite,
    param,
    strict_dataclass,
    train_epochs,
)


@strict_dataclass
class FedRepHyper(FedAvgSiteHyper):
    """Epochs of head and body in a round."""

    head_epochs: int = param(
        10,
        "epochs of the head, with a frozen body",
        symbol="τ",
        source="Alg. 1; 10 in Sec. 5",
        low=0,
    )
    body_epochs: int | None = param(
        None,
        "epochs of the body, with a frozen head; none: the task's local epochs",
        source="Alg. 1",
        low=0,
    )

    def passes(self, local_epochs: int) -> int:
        body_epochs = local_epochs if self.body_epochs is None else self.body_epochs
        return self.head_epochs + body_epochs


class FedRepSite(PartialSite[FedRepHyper]):
    """Keeps the network's head; trains the head, then the body."""

    local_paths = ("head",)
    uses_features = True

    def fit(self, model: FeatureNetwork, optimizer: Optimizer, round: int) -> float | None:
        """Trains the head, then the body; returns the loss of the body's epochs or, without any, of
        the head's.
        """

        def loss(_part: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
            return self.site.loss(model(images), targets)

        def descend(part: nn.Module, purpose: str, count: int | None) -> float:
            model.train()
            return train_epochs(part, optimizer, self.site, round, purpose, loss=loss, count=count)

        with model.frozen(["body"]):
            head_loss = descend(model.head, "head", self.hyper.head_epochs)
        with model.frozen(["head"]):
            body_loss = descend(model.body, "model", self.hyper.body_epochs)
        if self.hyper.body_epochs == 0:
            return head_loss
        return body_loss
