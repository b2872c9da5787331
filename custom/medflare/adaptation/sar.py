"""SAR (Niu et al., "Towards Stable Test-Time Adaptation in Dynamic Wild World", ICLR 2023,
Algorithm 1): Tent with reliable predictions only, and steps to flat minima.

    S(x) = 1[E(x; Θ) < E_0],  E_0 = 0.4 ln C         reliable predictions alone count
    ε = ρ ∇E(x; Θ) / |∇E(x; Θ)|                      steepest ascent
    Θ <- Θ - η S(x) ∇E(x; Θ + ε)                     SGD with momentum, on scales and shifts

The trained model returns when the moving mean (0.9) of the loss is below e_0 = 0.2, which a
collapsed model has. That is for the 1000 classes of ImageNet; here it is the same share of the
largest entropy, e_0 = 0.2 ln C / ln 1000, as two classes have less than ln 2 in any case.
Segmentation: x is a pixel, and the means are over all reliable pixels of the batch. All
normalisations are adapted; the published code leaves out those of the last layers (`layer4`,
`blocks.9` to `blocks.11` and the final norm).
"""

import copy
import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from medflare.adaptation.dsbn import with_batch_statistics
from medflare.adaptation.online import Online
from medflare.adaptation.tent import entropies
from medflare.core.errors import ConfigError
from medflare.core.hyper import param
from medflare.core.settings import strict_dataclass
from medflare.networks.features import overwrite


@strict_dataclass
class SARSettings:
    """Arguments of `SAR`."""

    batch_size: int = param(0, "images of a batch; 0: those of the task", low=0)
    rate: float = param(2.5e-4, "learning rate of SGD", symbol="η", low=0)
    rho: float = param(0.05, "length of the ascent", symbol="ρ", low=0)
    margin: float = param(0.4, "E_0 as a share of ln C", symbol="E_0", low=0)
    reset: float = param(0.2 / math.log(1000), "e_0 as a share of ln C", symbol="e_0", low=0)


def ascent(gradients: Sequence[Tensor], rho: float) -> list[Tensor]:
    """ε: the gradients (of all weights as one vector) with length ρ; zeros stay zeros.

    Examples:
        >>> ascent([torch.tensor([3.0]), torch.tensor([4.0])], rho=1.0)
        [tensor([0.6000]), tensor([0.8000])]
    """
    length = torch.stack([gradient.norm() for gradient in gradients]).norm()
    return [gradient * rho / length.clamp_min(1e-12) for gradient in gradients]


class SAR(Online):
    """A model, images to probabilities, that is adapted while it predicts.

    A batch is predicted before its own step. BatchNorm normalises by the batch; without BatchNorm
    the scales and shifts of the other normalisations are adapted.

    Raises:
        ConfigError: the model has no normalisation with scale and shift.
    """

    def __init__(self, model: nn.Module, target: str, settings: SARSettings, batch_size: int):
        if any(isinstance(layer, _BatchNorm) for layer in model.modules()):
            model, _ = with_batch_statistics(model)
        else:
            model = copy.deepcopy(model).eval()
        affine: list[nn.Parameter] = []
        for layer in model.modules():
            if isinstance(layer, _NormBase | nn.GroupNorm | nn.LayerNorm):
                affine += layer.parameters()
        if not affine:
            raise ConfigError(
                "adaptation sar: the network has no normalisation with scale and shift; "
                "use a network with BatchNorm, or adaptation memo"
            )
        sgd = partial(torch.optim.SGD, lr=settings.rate, momentum=0.9)
        super().__init__(model, affine, sgd, batch_size)
        self.target = target
        self.settings = settings
        self._moving: float | None = None  # mean of the loss

    def adapted(self, images: Tensor) -> Tensor:
        probabilities = self.model(images)
        largest = math.log(probabilities.shape[1] if self.target == "multiclass" else 2)
        limit = self.settings.margin * largest
        first = entropies(probabilities, self.target)
        reliable = first.detach() < limit
        if reliable.any():
            # A layer may have no part in the output, as of a network that no image chose.
            gradients = torch.autograd.grad(
                first[reliable].mean(), self.weights, allow_unused=True, materialize_grads=True
            )
            trained = [weight.detach().clone() for weight in self.weights]
            moves = zip(trained, ascent(gradients, self.settings.rho), strict=True)
            overwrite(self.weights, [weight + move for weight, move in moves])
            second = entropies(self.model(images), self.target)
            reliable &= second.detach() < limit
            loss = second[reliable].mean()
            self.optimizer.zero_grad()
            loss.backward()
            overwrite(self.weights, trained)
            if reliable.any():
                self.optimizer.step()
                self._watch(loss.item(), self.settings.reset * largest)
        return probabilities

    def _watch(self, loss: float, least: float) -> None:
        """Restores the trained model if the moving mean of the loss is below `least`."""
        self._moving = loss if self._moving is None else 0.9 * self._moving + 0.1 * loss
        if self._moving < least:
            self._moving = None
            self.reset()
