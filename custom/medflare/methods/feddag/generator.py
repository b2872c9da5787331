"""FedDAG's generator, a small fully convolutional network that perturbs an image (Eq. 2), and a
picture of what it makes.
"""

import numpy as np
import torch
from torch import Tensor, nn

from medflare.core.pictures import png
from medflare.data.transforms import middle_slice
from medflare.training.montage import tile

_CONVOLUTIONS = {2: nn.Conv2d, 3: nn.Conv3d}  # by spatial dimensions
_NORMS = {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


class _ResidualBlock(nn.Module):
    """x + norm(conv(relu(norm(conv(x))))), at constant size and width."""

    def __init__(self, width: int, dims: int):
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(width, width, dims),
            nn.ReLU(inplace=True),
            *_convolution(width, width, dims),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def _convolution(inputs: int, outputs: int, dims: int, kernel: int = 3) -> list[nn.Module]:
    """Bias-free convolution (same size, reflected border); instance norm without parameters."""
    convolution = _CONVOLUTIONS[dims](
        inputs, outputs, kernel, padding=kernel // 2, padding_mode="reflect", bias=False
    )
    return [convolution, _NORMS[dims](outputs)]


class DomainGenerator(nn.Module):
    """A fully convolutional perturbation network with global context.

    FedDAG takes the form of DDAIG's (Zhou et al., AAAI 2020): a 3x3 convolution, residual blocks,
    fusion with the features' mean over the image (so that a change of style can depend on the whole
    image), and a 1x1 convolution with tanh. It has no buffers.

    Args:
        width: feature channels; the paper's FCN16 and FCN32.
        dims: spatial dimensions of the image, 2 (the paper's) or 3.
    """

    def __init__(self, channels: int, width: int = 32, blocks: int = 3, dims: int = 2):
        super().__init__()
        backbone = [*_convolution(channels, width, dims), nn.ReLU(inplace=True)]
        backbone += [_ResidualBlock(width, dims) for _ in range(blocks)]
        self.backbone = nn.Sequential(*backbone)
        self.fusion = nn.Sequential(
            *_convolution(2 * width, width, dims, kernel=1), nn.ReLU(inplace=True)
        )
        self.head = _CONVOLUTIONS[dims](width, channels, 1)
        for layer in self.modules():
            if isinstance(layer, _CONVOLUTIONS[dims]):
                nn.init.normal_(layer.weight, std=0.02)
        nn.init.zeros_(self.head.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, C, ...), 2 pixels a side or more -> perturbations of that shape in [-1, 1]."""
        features = self.backbone(x)
        mean = features.mean(dim=tuple(range(2, features.ndim)), keepdim=True)
        fused = self.fusion(torch.cat([features, mean.expand_as(features)], dim=1))
        return torch.tanh(self.head(fused))


def generated(
    images: Tensor, perturbation: Tensor, alpha: float, unit: Tensor | float = 1.0
) -> Tensor:
    """x^ = x + alpha G(x) (Eq. 2): generated images; alpha = 0 returns the images themselves.

    Args:
        images: x, as the network's input, (N, C, H, W).
        perturbation: G(x), of the same shape, in [-1, 1].
        alpha: strength of the perturbation, in [0, 1].
        unit: of alpha, in values of x: one number, or one for each channel (C, 1, 1); about 1 for
            the paper's images.
    """
    if alpha == 0:
        return images
    return images + alpha * unit * perturbation


def picture_grid(images: Tensor, perturbations: Tensor, x_hat: Tensor) -> bytes:
    """A PNG with a column for each image: the original, G(x) and the generated image (the paper's
    Fig. 4).

    Args:
        images: the originals (N, C, H, W), or volumes, whose middle slices are shown; RGB for three
            channels, else the first one. They have the same intensity range as the generated
            images.
        perturbations: G(x) of the same shape, with the range [-1, 1].
    """
    limits = tuple(np.percentile(images.numpy(), [0.5, 99.5]))
    rows = []
    for pictures, shown in ((images, limits), (perturbations, (-1.0, 1.0)), (x_hat, limits)):
        tiles = [tile(middle_slice(picture), [], (1.0, 1.0), shown, 96) for picture in pictures]
        rows.append(np.concatenate(tiles, axis=1))
    return png(np.concatenate(rows))
