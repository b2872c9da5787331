"""Label shift (Saerens, Latinne and Decaestecker, Neural Computation 2002): the class shares of a
site by expectation maximisation from the predictions for its unlabelled images.

    p'(y | x) ~ p(y | x) q(y) / p(y)                                 (Eq. 2.4)
    q(y) <- mean over the images of p'(y | x), from q = p            (Eq. 2.9)

p are the class shares of the training and q those of the site. It assumes that images of a class
look the same at both, and that the model's probabilities are right for p.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from medflare.core.errors import ConfigError, StateError
from medflare.core.states import StateDict
from medflare.tasks.config import TaskConfig

CLASS_SHARES = "class_shares"  # item of a final model: class shares of the training
UNKNOWN_SHARES = (
    "the model does not hold the class shares of its training, which are taken as equal"
)
_CLOSE = 1e-7
_LEAST = 1e-6  # share of a class at the site
# Of the training, whose shares have three decimals: 0 may have been nearly this.
_LEAST_TRAINED = 5e-4


def corrected(p: Tensor, trained: Tensor, shares: Tensor) -> Tensor:
    """p'(y | x), (N, C), of probabilities (N, C) and class shares (C,) > 0 of training and site.

    Examples:
        >>> even = torch.tensor([[0.5, 0.5]])
        >>> corrected(even, torch.tensor([0.5, 0.5]), torch.tensor([0.2, 0.8]))
        tensor([[0.2000, 0.8000]])
    """
    weighted = p * (shares / trained)
    return weighted / weighted.sum(dim=1, keepdim=True)


def estimated_shares(p: Tensor, trained: Tensor) -> Tensor:
    """q (C,) by the fixed point of Eq. 2.9, in float64; arguments as of `corrected`."""
    p = p.double()
    shares = trained = trained.double()
    for _ in range(1000):
        before = shares
        shares = corrected(p, trained, before).mean(dim=0).clamp_min(_LEAST)
        if (shares - before).abs().max() < _CLOSE:
            break
    return shares


class LabelShift(nn.Module):
    """A classifier, images to probabilities, that `adapt` gives the class shares of a site; before,
    it has those of the training.

    Args:
        trained: class shares of the training; None: equal ones.

    Raises:
        ConfigError: the task has no exclusive classes of images.
        StateError: `trained` are not shares of its classes.
    """

    trained: Tensor
    shares: Tensor

    def __init__(self, model: nn.Module, task: TaskConfig, trained: Sequence[float] | None):
        super().__init__()
        if task.kind != "classification" or task.target == "multilabel":
            raise ConfigError(
                "adaptation labelshift: the task has no exclusive classes of images; "
                "use another adaptation"
            )
        count = len(task.classes)
        prior = torch.ones(count) if trained is None else torch.tensor(trained).float()
        if prior.shape != (count,) or not (prior >= 0).all() or not 0 < prior.sum() < torch.inf:
            raise StateError(f"{CLASS_SHARES}: not shares of {count} classes; train the model anew")
        self.model = model
        self.binary = task.target == "binary"
        prior = (prior / prior.sum()).clamp_min(_LEAST_TRAINED)
        self.register_buffer("trained", prior)
        self.register_buffer("shares", prior.clone())

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, C, H, W) to probabilities (N, outputs)."""
        p = corrected(self._classes(images), self.trained, self.shares)
        return p[:, 1:] if self.binary else p

    def _classes(self, images: Tensor) -> Tensor:
        """Probabilities (N, classes) by the model alone."""
        p = self.model(images)
        return torch.cat([1 - p, p], dim=1) if self.binary else p

    @torch.no_grad()
    def adapt(self, batches: Iterable[Tensor]) -> None:
        p = torch.cat([self._classes(images) for images in batches])
        self.shares.copy_(estimated_shares(p, self.trained))

    def statistics(self) -> StateDict:
        """The class shares that `adapt` estimated."""
        return {"shares": self.shares.detach().cpu().clone()}

    def load_statistics(self, state: StateDict) -> None:
        """Restore what `statistics` returned; StateError if it came from other classes."""
        shares = state.get("shares")
        if shares is None or shares.shape != self.shares.shape:
            raise StateError("these class shares belong to other classes; adapt the model anew")
        self.shares.copy_(shares)
