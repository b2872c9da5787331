"""Tent (Wang et al., ICLR 2021): a trained model that is adapted to unlabelled test images, batch
by batch.

Every BatchNorm layer normalises by the current batch, and one Adam step per batch on the scales and
shifts of these layers lowers the entropy of the predictions. Nothing else of the model changes.
"""

import math

import torch
from torch import Tensor, nn

from medflare.adaptation.dsbn import with_batch_statistics
from medflare.core.errors import ConfigError


def prediction_entropy(probabilities: Tensor, target: str) -> Tensor:
    """Mean Shannon entropy of the predictions, in nats: (N, C, ...) -> scalar.

    Args:
        probabilities: of C exclusive classes (target "multiclass") or of C independent findings
            ("binary", "multilabel").

    Examples:
        >>> certain, even = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]])
        >>> [round(prediction_entropy(p, "multiclass").item(), 3) for p in (certain, even)]
        [0.0, 0.693]
    """
    # The logarithm of 0 has no gradient; a saturated prediction gets none.
    epsilon = torch.finfo(probabilities.dtype).eps
    p = probabilities.clamp(epsilon, 1 - epsilon)
    if target == "multiclass":
        return torch.special.entr(p).sum(dim=1).mean()
    return (torch.special.entr(p) + torch.special.entr(1 - p)).mean()


class Tent(nn.Module):
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
        self,
        model: nn.Module,
        target: str,
        *,
        rate: float = 1e-3,
        steps: int = 1,
        episodic: bool = False,
        batch_size: int | None = None,
    ):
        super().__init__()
        self.model, layers = with_batch_statistics(model)
        self.model.requires_grad_(False)
        self._affine: list[nn.Parameter] = []
        for layer in dict.fromkeys(layers.values()):
            self._affine += layer.parameters()
        if not self._affine:
            raise ConfigError(
                "the BatchNorm layers of this network have no scale and shift, which Tent adapts; "
                "use dsbn instead"
            )
        self.target = target
        self.rate = rate
        self.steps = steps
        self.episodic = episodic
        self.batch_size = batch_size
        self._trained = [parameter.detach().clone() for parameter in self._affine]
        self.reset()

    def reset(self) -> None:
        """Restore the trained model, with a fresh optimizer."""
        with torch.no_grad():
            for parameter, trained in zip(self._affine, self._trained, strict=True):
                parameter.copy_(trained)
        for parameter in self._affine:
            parameter.requires_grad_()
        self.optimizer = torch.optim.Adam(self._affine, lr=self.rate)

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, C, H, W) to probabilities, also inside `torch.no_grad` and
        `torch.inference_mode`.
        """
        parts = math.ceil(len(images) / self.batch_size) if self.batch_size else 1
        batches = images.tensor_split(parts)
        with torch.inference_mode(False), torch.enable_grad():
            return torch.cat([self._adapted(batch) for batch in batches])

    def _adapted(self, images: Tensor) -> Tensor:
        if images.is_inference():
            images = images.clone()
        if self.episodic:
            self.reset()
        for _ in range(self.steps):
            probabilities = self.model(images)
            self.optimizer.zero_grad()
            prediction_entropy(probabilities, self.target).backward()
            self.optimizer.step()
        if self.episodic:
            probabilities = self.model(images)
        return probabilities.detach()
