"""Tent (Wang et al., ICLR 2021): a trained model that is adapted to unlabelled test images, batch
by batch.

Every BatchNorm layer normalises by the current batch, and one Adam step per batch on the scales and
shifts of these layers lowers the entropy of the predictions. Nothing else of the model changes.
"""

from functools import partial

import torch
from torch import Tensor, nn

from medflare.adaptation.dsbn import with_batch_statistics
from medflare.adaptation.online import Online
from medflare.core.errors import ConfigError
from medflare.core.hyper import param
from medflare.core.settings import strict_dataclass


@strict_dataclass
class TentSettings:
    """Arguments of `Tent`."""

    batch_size: int = param(0, "images of a batch; 0: those of the task", low=0)
    rate: float = param(1e-3, "Adam's learning rate", low=0)
    steps: int = param(1, "on each batch", low=0, high=100)
    episodic: bool = param(False, "start every batch from the trained model")


def entropies(probabilities: Tensor, target: str) -> Tensor:
    """Shannon entropy in nats of every prediction: (N, C, ...) -> (N, ...) of exclusive classes
    (target "multiclass"), -> (N, C, ...) of independent findings ("binary", "multilabel").
    """
    # The logarithm of 0 has no gradient; a saturated prediction gets none.
    epsilon = torch.finfo(probabilities.dtype).eps
    p = probabilities.clamp(epsilon, 1 - epsilon)
    if target == "multiclass":
        return torch.special.entr(p).sum(dim=1)
    return torch.special.entr(p) + torch.special.entr(1 - p)


def prediction_entropy(probabilities: Tensor, target: str) -> Tensor:
    """Mean of `entropies`, a scalar.

    Examples:
        >>> certain, even = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]])
        >>> [round(prediction_entropy(p, "multiclass").item(), 3) for p in (certain, even)]
        [0.0, 0.693]
    """
    return entropies(probabilities, target).mean()


class Tent(Online):
    """A model, images to probabilities, that is adapted while it predicts.

    Online, a batch is predicted before its own step, by the model that the batches before it have
    adapted (Sec. 3.3), so predictions depend on the order of the batches. Episodic, every batch
    starts from the trained model and is predicted after its own steps.

    Args:
        model: images (N, C, H, W) to probabilities; it is copied and not changed.
        batch_size: maximum size of the even batches into which images are cut; None: one batch.

    Raises:
        ConfigError: the model has no BatchNorm, or none with scale and shift.
    """

    def __init__(
        self, model: nn.Module, target: str, settings: TentSettings, batch_size: int | None = None
    ):
        model, layers = with_batch_statistics(model)
        affine: list[nn.Parameter] = []
        for layer in dict.fromkeys(layers.values()):
            affine += layer.parameters()
        if not affine:
            raise ConfigError(
                "the BatchNorm layers of this network have no scale and shift, which Tent adapts; "
                "use dsbn instead"
            )
        super().__init__(model, affine, partial(torch.optim.Adam, lr=settings.rate), batch_size)
        self.target = target
        self.settings = settings

    def adapted(self, images: Tensor) -> Tensor:
        if self.settings.episodic:
            self.reset()
        for _ in range(self.settings.steps):
            probabilities = self.model(images)
            self.descend(prediction_entropy(probabilities, self.target))
        if self.settings.episodic or not self.settings.steps:
            probabilities = self.model(images)
        return probabilities
