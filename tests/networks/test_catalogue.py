from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.fixture_types import TaskOf
from medflare.core.errors import ConfigError
from medflare.networks.catalogue import build_network, initial_network

# spec, feature channels
SEGMENTERS = [
    ({"name": "unet", "channels": [8, 16, 32]}, 8),
    ({"name": "unet", "channels": [8, 16], "norm": "batch"}, 8),
    ({"name": "unet", "channels": [8, 16], "num_res_units": 2}, 8),
    ({"name": "deeplab"}, 64),
    ({"name": "deeplab", "width": 16, "rates": [1, 2]}, 16),
]
CLASSIFIERS = [
    ({"name": "compact_selector"}, 64),
    ({"name": "ridge_selector"}, 151),
    ({"name": "small_cnn"}, 64),
    ({"name": "small_cnn", "batch_norm": True}, 64),
    ({"name": "mlp"}, 64),
    ({"name": "mlp", "hidden": [16, 8], "batch_norm": True}, 8),
    ({"name": "vgg16_slim"}, 64),
    ({"name": "vgg16_slim", "dimension": 16}, 16),
    ({"name": "resnet18"}, 512),
    ({"name": "resnet18", "small_images": True}, 512),
    ({"name": "resnet50"}, 2048),
    ({"name": "efficientnet_b0"}, 1280),
    ({"name": "efficientnet_lite0"}, 1280),
]


@pytest.mark.parametrize(("spec", "width"), [*SEGMENTERS, *CLASSIFIERS], ids=str)
def test_every_parameter_takes_part_and_the_head_turns_features_into_the_output(
    spec: dict[str, Any], width: int
) -> None:
    size = (32, 48) if spec["name"] in ("unet", "deeplab") else (32, 32)
    area = size if spec["name"] in ("unet", "deeplab") else ()
    network = build_network(spec, 1, 5, size=size)
    images = torch.randn(3, 1, *size)
    features, logits = network.features_and_output(images)
    assert features.shape == (3, width, *area) and logits.shape == (3, 5, *area)
    logits.square().mean().backward()
    for parameter in network.parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all()
    network.eval()
    features, logits = network.features_and_output(images)
    torch.testing.assert_close(network(images), logits)
    torch.testing.assert_close(network.head(features), logits)
    torch.testing.assert_close(network(images[:1]), logits[:1], rtol=1e-4, atol=1e-4)


def _size(spec: dict[str, Any], in_channels: int, out_channels: int) -> int:
    with torch.device("meta"):
        return sum(
            parameter.numel()
            for parameter in build_network(spec, in_channels, out_channels).parameters()
        )


def test_published_sizes() -> None:
    # Simonyan and Zisserman's configuration A.
    assert _size({"name": "vgg11"}, 3, 1000) == 132_863_336
    assert 128e6 < _size({"name": "vgg11"}, 1, 6) < 130e6  # FedSM's selector
    assert _size({"name": "resnet18"}, 3, 1000) == 11_689_512
    assert _size({"name": "resnet50"}, 3, 1000) == 25_557_032
    assert _size({"name": "efficientnet_b0"}, 3, 1000) == 5_288_548
    assert _size({"name": "efficientnet_lite0"}, 3, 1000) == 4_652_008
    assert _size({"name": "compact_selector"}, 3, 4) < 30_000
    with torch.device("meta"):  # half a gigabyte of weights that need not exist
        features, logits = build_network({"name": "vgg11"}, 1, 3).features_and_output(
            torch.zeros(1, 1, 32, 32)
        )
    assert features.shape == (1, 4096) and logits.shape == (1, 3)


def test_vgg16_slim_is_as_published() -> None:
    network = build_network({"name": "vgg16_slim"}, 3, 3)
    convolutions = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == [
        32,
        32,
        64,
        64,
        128,
        128,
        128,
        128,
        128,
        128,
        256,
        256,
        256,
    ]
    linear = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in linear] == [(256, 64), (64, 3)]
    for layer in [*convolutions, *linear]:
        assert layer.bias is None
    assert (network.features_and_output(torch.randn(4, 3, 32, 32))[0] >= 0).all()


def _gradients(network: nn.Module, images: Tensor, *, twice: bool = False) -> list[Tensor]:
    """Of the mean squared output, in the order of the parameters; `twice`: they can be
    differentiated.
    """
    torch.manual_seed(0)  # some layers leave out parts at random
    loss = network(images).square().mean()
    return list(torch.autograd.grad(loss, list(network.parameters()), create_graph=twice))


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


@pytest.mark.parametrize(
    "spec", [{"name": "efficientnet_b0"}, {"name": "unet", "channels": [4, 8]}], ids=str
)
def test_second_derivatives_are_finite_and_those_of_the_gradient(spec: dict[str, Any]) -> None:
    """GRACE's second-order meta step differentiates a gradient.

    The product of the Hessian and the gradient is compared with the difference of two gradients, a
    small step apart.
    """
    torch.manual_seed(0)
    network = build_network(spec, 1, 1).double()
    images = torch.randn(2, 1, 64, 64, dtype=torch.float64)
    parameters = list(network.parameters())
    gradients = _gradients(network, images, twice=True)
    direction = [gradient.detach() for gradient in gradients]
    second = _joined(torch.autograd.grad(gradients, parameters, grad_outputs=direction))
    assert second.isfinite().all() and second.norm() > 1e-6

    step = 1e-7
    with torch.no_grad():
        for parameter, gradient in zip(parameters, direction, strict=True):
            parameter.add_(gradient, alpha=step)
    expected = (_joined(_gradients(network, images)) - _joined(direction)) / step
    assert (second - expected).norm() < 0.01 * expected.norm()


def test_initial_weights_depend_on_seed_and_purpose_alone(make_task: TaskOf) -> None:
    task = make_task()
    torch.manual_seed(1)
    first = initial_network(task, 7).state_dict()
    before = torch.random.get_rng_state()
    again = initial_network(task, 7).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    for name in first:
        assert torch.equal(first[name], again[name])
    for other in (initial_network(task, 8), initial_network(task, 7, "selector")):
        assert not torch.equal(first["head.weight"], other.state_dict()["head.weight"])
    selector = initial_network(task, 7, "selector", {"name": "compact_selector"}, outputs=4)
    assert selector(torch.zeros(1, 1, 16, 16)).shape == (1, 4)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"name": "unett"}, "unett"),
        ({}, "None"),
        ({"name": "unet", "chanels": [4, 8]}, "chanels"),
        ({"name": "unet", "channels": [4]}, "unet"),
        ({"name": "unet", "norm": "layer"}, "layer"),
        ({"name": "unet", "in_channels": 3}, "in_channels"),
        ({"name": "SegResNet", "init_filter": 8}, "init_filter"),
        ({"name": "SegResNet", "out_channels": 8}, "out_channels"),
        ({"name": "UNet", "channels": [4, 8]}, "strides"),
        ({"name": "DenseNet121", "pretrained": True}, "DenseNet121"),
    ],
)
def test_a_wrong_network_is_refused(spec: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build_network(spec, 1, 1)
