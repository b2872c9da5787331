"""A batch split over devices; the CPU stands for two devices here."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from helpers.small_tasks import INSTANCE_UNET, small_task
from medflare.methods.grace.formulas import meta_trained
from medflare.networks.catalogue import initial_network
from medflare.networks.features import FeatureNetwork
from medflare.training.computing import Computing

CPU = torch.device("cpu")
MONAI: dict[str, Any] = {"name": "UNet", "channels": [4, 8], "strides": [2]}
IMAGES = torch.rand(5, 1, 16, 16, generator=torch.Generator().manual_seed(0))


def pair(spec: dict[str, Any] = INSTANCE_UNET) -> tuple[FeatureNetwork, FeatureNetwork]:
    """An equal network on one device and on two."""
    return initial_network(small_task(network=spec), 0), Computing(CPU, further=(CPU,)).placed(initial_network(small_task(network=spec), 0))


def sizes(network: FeatureNetwork) -> list[int]:
    """Filled with the number of images of every share."""
    shares: list[int] = []
    network.body.register_forward_hook(lambda _body, given, _answer: shares.append(len(given[0])))
    return shares


@pytest.mark.parametrize("spec", [INSTANCE_UNET, MONAI], ids=["ours", "MONAI's"])
def test_gradients_are_those_of_the_whole_batch(spec: dict[str, Any]) -> None:
    one, two = pair(spec)
    seen = sizes(two)
    for network in (one, two):
        features, logits = network.features_and_output(IMAGES)
        (logits.square().mean() + features.mean()).backward()
    assert seen == [3, 2]
    torch.testing.assert_close(two(IMAGES), one(IMAGES))
    for (name, expected), found in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, msg=name, rtol=1e-4, atol=1e-6)
    assert list(two.state_dict()) == list(one.state_dict())


def test_running_statistics_are_those_of_the_first_share() -> None:
    one, two = pair({"name": "unet", "channels": [4, 8], "norm": "batch"})
    one(IMAGES[:3])
    two(IMAGES)
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[name], tensor, msg=name)
    torch.testing.assert_close(two.eval()(IMAGES), one.eval()(IMAGES))


def test_fewer_images_than_devices_are_not_split() -> None:
    _, two = pair()
    seen = sizes(two)
    two(IMAGES[:1])
    assert seen == [1]


def test_gradients_through_a_step_are_those_of_one_device() -> None:
    """As in GRACE."""

    def gradients(network: FeatureNetwork) -> tuple[Tensor, ...]:
        def loss(weights: Mapping[str, Tensor]) -> Tensor:
            return functional_call(network, dict(weights), (IMAGES,)).square().mean()

        weights = dict(network.named_parameters())
        return torch.autograd.grad(loss(meta_trained(weights, loss, 0.1, second_order=True)), list(weights.values()))

    one, two = pair()
    for expected, found in zip(gradients(one), gradients(two), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
