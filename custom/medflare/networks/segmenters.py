"""Segmentation networks: MONAI's U-Net and DeepLab-v2 on MONAI's ResNet-18."""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from medflare.networks.classifiers import resnet_body
from medflare.networks.features import FeatureNetwork


def unet(
    in_channels: int,
    out_channels: int,
    channels: Sequence[int] = (16, 32, 64, 128),
    norm: str = "instance",
    num_res_units: int = 0,
    spatial_dims: int = 2,
) -> FeatureNetwork:
    """MONAI's U-Net (stride 2 between levels) up to its last decoder map, and a 1 x 1 convolution
    as head.

    Args:
        channels: feature maps by level; the image's sides must be multiples of 2 ** (levels - 1).
        norm: "instance" (no state, as FedSM) or "batch"; ValueError for another.
        num_res_units: residual units per level, 0 for plain convolutions.
    """
    from monai.networks.blocks.acti_norm import ADN
    from monai.networks.layers.factories import Conv
    from monai.networks.nets.unet import UNet

    if norm not in ("instance", "batch"):
        raise ValueError(f"norm must be instance or batch, got {norm!r}")
    strides = [2] * (len(channels) - 1)
    body = UNet(
        spatial_dims,
        in_channels,
        channels[0],
        channels,
        strides=strides,
        num_res_units=num_res_units,
        norm=norm,
    )
    width = channels[0]
    last = ADN(ordering="NA", in_channels=width, act="prelu", norm=norm, norm_dim=spatial_dims)
    head = Conv["conv", spatial_dims](width, out_channels, kernel_size=1)
    return FeatureNetwork(nn.Sequential(body, last), head)


def _dilated_resnet(in_channels: int) -> nn.Module:
    """MONAI's ResNet-18 without the last pooling; the last two stages have dilation instead of
    stride: output at 1/8 of the size.
    """
    resnet = resnet_body(in_channels, "basic", [2, 2, 2, 2])
    stem = nn.Sequential(resnet.conv1, resnet.bn1, resnet.act, resnet.maxpool)
    stages = nn.Sequential(
        resnet.layer1, resnet.layer2, _dilated(resnet.layer3, 2), _dilated(resnet.layer4, 4)
    )
    return nn.Sequential(OrderedDict(stem=stem, stages=stages))


def _dilated(stage: nn.Module, dilation: int) -> nn.Module:
    for layer in stage.modules():
        if isinstance(layer, nn.Conv2d):
            layer.stride = (1, 1)
            if layer.kernel_size == (3, 3):
                layer.dilation = layer.padding = (dilation, dilation)
    return stage


class _AtrousPyramid(nn.Module):
    """Atrous spatial pyramid pooling (Chen et al., 2018, Sec. 3.2): parallel dilated convolutions,
    summed, at the image's size.
    """

    def __init__(self, backbone: nn.Module, width: int, rates: Sequence[int]):
        super().__init__()
        self.backbone = backbone
        self.branches = nn.ModuleList(
            nn.Conv2d(512, width, 3, padding=rate, dilation=rate) for rate in rates
        )

    def forward(self, images: Tensor) -> Tensor:
        deep = self.backbone(images)
        summed = torch.stack([branch(deep) for branch in self.branches]).sum(dim=0)
        size = images.shape[2:]
        return functional.interpolate(
            functional.relu(summed), size=size, mode="bilinear", align_corners=False
        )


def deeplab(
    in_channels: int, out_channels: int, width: int = 64, rates: Sequence[int] = (6, 12, 18, 24)
) -> FeatureNetwork:
    """DeepLab-v2 (Chen et al., 2018) with ResNet-18; features are the pyramid's sum at the image's
    size.

    In the paper every branch has its own 1 x 1 convolutions before the sum; here the branches share
    one after it, so that there is one feature map to align. Interpolation and a 1 x 1 convolution
    commute. `rates` are the dilations of the branches.
    """
    body = _AtrousPyramid(_dilated_resnet(in_channels), width, rates)
    return FeatureNetwork(body, nn.Conv2d(width, out_channels, kernel_size=1))
