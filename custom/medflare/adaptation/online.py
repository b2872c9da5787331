"""Models that adapt while they predict: some weights take steps on the images of each batch."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from medflare.networks.features import overwrite

Optimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


class Online(nn.Module):
    """A model, images to probabilities, that adapts to each batch which it predicts.

    Args:
        model: a copy of the trained model, which changes.
        weights: those of its parameters that adapt.
        optimizer: makes their optimizer.
        batch_size: maximum size of the even batches into which images are cut; None: one batch.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Iterable[nn.Parameter],
        optimizer: Optimizer,
        batch_size: int | None,
    ):
        super().__init__()
        self.model = model.requires_grad_(False)
        self.weights = list(weights)
        self.batch_size = batch_size
        self._new_optimizer = optimizer
        self._trained = [weight.detach().clone() for weight in self.weights]
        self.reset()

    def reset(self) -> None:
        """Restore the trained model, with a fresh optimizer."""
        overwrite(self.weights, self._trained)
        for weight in self.weights:
            weight.requires_grad_()
        self.optimizer = self._new_optimizer(self.weights)

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, C, H, W) to probabilities, also inside `torch.no_grad` and
        `torch.inference_mode`.
        """
        parts = math.ceil(len(images) / self.batch_size) if self.batch_size else 1
        with torch.inference_mode(False), torch.enable_grad():
            if images.is_inference():
                images = images.clone()
            batches = images.tensor_split(parts)
            return torch.cat([self.adapted(batch).detach() for batch in batches])

    def adapted(self, images: Tensor) -> Tensor:
        """Adapts to a batch, and returns its probabilities."""
        raise NotImplementedError

    def descend(self, loss: Tensor) -> None:
        """Take a step of the optimizer."""
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
