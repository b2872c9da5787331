"""MEMO (Zhang, Levine and Finn, NeurIPS 2022, Algorithm 1): one step per image for predictions that
agree over its augmentations, and are certain.

    p(y | x) = 1/B sum_i p_θ(y | a_i(x)),   θ' = θ - η ∇_θ H(p(. | x)),   all parameters θ

The prediction is p_θ'(y | x); the next image starts from θ again. The augmentations here are
flips, a gain and an offset, in place of AugMix, which is for photographs; BatchNorm keeps the
statistics of the training, which the paper mixes with those of the image. Segmentation: the
predictions are flipped back, and H is the mean over the pixels.
"""

import copy
from functools import partial

import torch
from torch import Tensor, nn

from medflare.adaptation.online import Online
from medflare.adaptation.tent import prediction_entropy
from medflare.core.hyper import param
from medflare.core.rng import torch_generator
from medflare.core.settings import strict_dataclass


@strict_dataclass
class MEMOSettings:
    """Arguments of `MEMO`."""

    rate: float = param(2.5e-4, "learning rate of SGD", symbol="η", low=0)
    steps: int = param(1, "on each image", low=0, high=100)
    copies: int = param(
        16, "augmentations of an image; the paper has 32 or 64", symbol="B", low=1, high=64
    )
    intensity: float = param(0.1, "largest offset in the image's deviations, and gain - 1", low=0)


def flipped(images: Tensor, flips: Tensor) -> Tensor:
    """Images (B, C, ...) with those axes reversed that `flips`, bool (B, spatial axes), says; the
    same flips undo it.
    """
    result = []
    for image, axes in zip(images, flips, strict=True):
        result.append(image.flip([axis + 1 for axis in axes.nonzero().flatten().tolist()]))
    return torch.stack(result)


class MEMO(Online):
    """A model, images to probabilities, that is adapted to every image alone.

    Augmentations are the same for every image, so that a prediction does not depend on the order.
    """

    def __init__(self, model: nn.Module, target: str, settings: MEMOSettings):
        model = copy.deepcopy(model).eval()
        sgd = partial(torch.optim.SGD, lr=settings.rate)
        super().__init__(model, model.parameters(), sgd, batch_size=1)
        self.target = target
        self.settings = settings

    def adapted(self, images: Tensor) -> Tensor:
        self.reset()
        copies = self.settings.copies
        generator = torch_generator(0, "memo")
        flips = torch.rand(copies, images.ndim - 2, generator=generator) < 0.5
        numbers = 2 * torch.rand(2, copies, generator=generator) - 1
        shape = (2, copies, *[1] * (images.ndim - 1))
        gain, offset = (self.settings.intensity * numbers).reshape(shape).to(images)
        augmented = flipped(images.expand(copies, *images.shape[1:]), flips)
        augmented = (1 + gain) * augmented + offset * images.std(correction=0)
        for _ in range(self.settings.steps):
            self.descend(prediction_entropy(self.marginal(augmented, flips), self.target))
        return self.model(images)

    def marginal(self, augmented: Tensor, flips: Tensor) -> Tensor:
        """p(y | x), (1, outputs, ...), by the augmented images (B, C, ...) and their flips."""
        p = self.model(augmented)
        if p.ndim == augmented.ndim:
            p = flipped(p, flips)
        return p.mean(dim=0, keepdim=True)
