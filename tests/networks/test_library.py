"""MONAI's networks by name: built from the task, run unchanged, with features if there is a last layer."""

from typing import Any

import pytest
import torch

from helpers.small_tasks import small_task
from medflare.core.errors import ConfigError
from medflare.core.rng import seeded
from medflare.methods.catalogue import get_method
from medflare.networks.catalogue import build_network, initial_network, monai_networks
from medflare.networks.features import WholeNetwork

TRANSFORMER = {"hidden_size": 24, "mlp_dim": 24, "num_heads": 2}
# spec, sides, channels of the features
SEGMENTERS: list[tuple[dict[str, Any], int, int]] = [
    ({"name": "UNet", "channels": [4, 8], "strides": [2]}, 16, 12),
    ({"name": "BasicUNet", "features": [4, 4, 4, 4, 4, 6]}, 32, 6),
    (
        {
            "name": "DynUNet",
            "kernel_size": [3, 3, 3],
            "strides": [1, 2, 2],
            "upsample_kernel_size": [2, 2],
            "filters": [4, 6, 8],
        },
        16,
        4,
    ),
    ({"name": "SegResNet"}, 16, 8),
    ({"name": "AttentionUnet", "channels": [4, 8], "strides": [2]}, 16, 4),
    ({"name": "VNet"}, 16, 2),
    ({"name": "UNETR", "feature_size": 4, **TRANSFORMER}, 32, 4),
    ({"name": "SwinUNETR", "feature_size": 12, "depths": [1, 1, 1, 1], "window_size": 2}, 64, 12),
]
CLASSIFIERS: list[tuple[dict[str, Any], int, int]] = [
    ({"name": "DenseNet121", "block_config": [1, 1, 1, 1]}, 32, 68),
    ({"name": "EfficientNetBN", "model_name": "efficientnet-b0"}, 32, 1280),
    ({"name": "resnet10"}, 32, 512),
    ({"name": "ViT", "patch_size": 8, "num_layers": 1, **TRANSFORMER}, 16, 24),
]


def built(spec: dict[str, Any], side: int, dims: int = 2) -> WholeNetwork:
    with seeded(0, "test"):
        network = build_network(spec, 1, 2, dims, [side] * dims)
    assert isinstance(network, WholeNetwork)
    return network


@pytest.mark.parametrize(
    ("spec", "side", "width"),
    [*SEGMENTERS, *CLASSIFIERS],
    ids=[found[0]["name"] for found in [*SEGMENTERS, *CLASSIFIERS]],
)
@pytest.mark.parametrize("dims", [2, 3])
def test_each_takes_both_dimensions_and_has_features(
    spec: dict[str, Any], side: int, width: int, dims: int
) -> None:
    network = built(spec, side, dims).eval()
    if dims == 3:  # shapes are enough
        network = network.to("meta")
    images = torch.rand(2, 1, *[side] * dims, device="meta" if dims == 3 else "cpu")
    with torch.no_grad():
        features, logits = network.features_and_output(images)
        again = network(images)
    area = images.shape[2:] if any(spec is actual for actual, *_ in SEGMENTERS) else ()
    assert logits.shape == (2, 2, *area)
    assert features.shape[:2] == (2, width) and features.ndim == (images.ndim if area else 2)
    if dims == 2:
        torch.testing.assert_close(again, logits)
        torch.testing.assert_close(network.head(features), logits)


def test_weights_are_monais_under_names_of_body_and_head() -> None:
    from monai.networks.nets.segresnet import SegResNet

    network = built({"name": "SegResNet"}, 16)
    theirs = SegResNet(spatial_dims=2, in_channels=1, out_channels=2)
    names = network.names()
    assert set(names) == set(theirs.state_dict())
    assert {name for name in names.values() if not name.startswith("body.")} == {
        "head.weight",
        "head.bias",
    }
    theirs.load_state_dict({name: network.state_dict()[ours] for name, ours in names.items()})
    images = torch.rand(1, 1, 16, 16)
    torch.testing.assert_close(network.eval()(images), theirs.eval()(images))


def test_features_are_followed_through_what_resizes_the_output() -> None:
    network = built(
        {"name": "FlexibleUNet", "backbone": "resnet10", "decoder_channels": [8, 8, 8, 8, 8]}, 32
    ).eval()
    features, logits = network.features_and_output(torch.rand(2, 1, 32, 32))
    assert features.shape[:2] == (2, 8) and logits.shape == (2, 2, 32, 32)


def test_deep_supervision_gives_the_main_output() -> None:
    spec = {
        "name": "DynUNet",
        "kernel_size": [3, 3, 3],
        "strides": [1, 2, 2],
        "upsample_kernel_size": [2, 2],
        "filters": [4, 6, 8],
    }
    network = built({**spec, "deep_supervision": True}, 16)
    assert network.train()(torch.rand(2, 1, 16, 16)).shape == (2, 2, 16, 16)
    assert network.features_and_output(torch.rand(2, 1, 16, 16))[0].shape == (2, 4, 16, 16)


def test_without_a_last_layer_methods_that_need_features_are_refused_by_name() -> None:
    task = small_task(
        network={"name": "UNet", "channels": [4, 8], "strides": [2], "num_res_units": 1}
    )
    network = initial_network(task, 0)
    assert not network.has_features and network(torch.rand(2, 1, 16, 16)).shape == (2, 1, 16, 16)
    with pytest.raises(ConfigError, match="UNet"):
        network.features_and_output(torch.rand(2, 1, 16, 16))
    get_method("fedavg").check({}, task)
    for name in ("fedrep", "moon", "prr", "feddag", "grace"):
        with pytest.raises(ConfigError, match=name):
            get_method(name).check({}, task)
    get_method("feddag").check({"ndag": False}, task)
    get_method("grace").check({"client": "erm"}, task)


def test_only_networks_of_images_with_channels_are_known() -> None:
    assert {"SegResNet", "UNet", "ViT", "resnet34", "DenseNet169", "Classifier"} <= set(
        monai_networks()
    )
    assert not {"BertOutput", "drop_connect", "MILModel", "Discriminator", "Unet", "os"} & set(
        monai_networks()
    )


@pytest.mark.parametrize(
    "name", ["unet", "small_cnn", "compact_selector", "resnet18", "efficientnet_b0"]
)
def test_our_networks_in_three_dimensions(name: str) -> None:
    network = build_network({"name": name}, 2, 3, 3).eval().to("meta")
    features, logits = network.features_and_output(torch.rand(2, 2, 32, 32, 32, device="meta"))
    assert logits.shape == ((2, 3, 32, 32, 32) if name == "unet" else (2, 3)) and len(features) == 2
    with pytest.raises(ConfigError, match="vgg11"):
        build_network({"name": "vgg11"}, 1, 1, 3)
