"""The task's network is validated before the run, and the memory of a step is estimated, without computing."""

from typing import Any

import pytest
import torch
from torch import nn

from helpers.small_tasks import small_task
from medflare.core.errors import ConfigError
from medflare.networks import dry_run
from medflare.networks.catalogue import initial_network
from medflare.networks.dry_run import check_network, step_bytes
from medflare.networks.features import FeatureNetwork
from medflare.tasks.config import load_task


def test_a_network_is_checked_without_memory_and_a_wrong_size_is_named_with_one_that_works() -> (
    None
):
    phantom = load_task("phantom").to_dict()
    network = check_network(load_task({**phantom, "size": [32, 32]}))
    for weight in network.parameters():
        assert weight.is_meta
    with pytest.raises(ConfigError, match=r"\[32, 32\]"):
        check_network(load_task({**phantom, "size": [32, 30]}))


@pytest.mark.parametrize("side", [20, 31])
def test_sizes_that_are_no_multiple_of_a_power_of_two_may_work(side: int) -> None:
    slim = {"network": {"name": "vgg16_slim"}}
    check_network(small_task("classification", **slim, size=[33, 33]))
    with pytest.raises(ConfigError, match=r"\[32, 32\]"):
        check_network(small_task("classification", **slim, size=[side, side]))


def test_the_output_must_have_the_shape_of_the_task() -> None:
    with pytest.raises(ConfigError, match="SegResNet"):
        check_network(small_task(network={"name": "SegResNet"}, size=[15, 16]))
    arguments = {"channels": [32, 32], "attention_levels": [False, False], "num_res_blocks": 1}
    with pytest.raises(ConfigError, match="DiffusionModelUNet"):
        check_network(small_task(network={"name": "DiffusionModelUNet", **arguments}))


@pytest.mark.parametrize(
    ("kind", "network", "other"),
    [
        ("segmentation", {"name": "DenseNet121", "block_config": [1, 1, 1, 1]}, "unet"),
        ("segmentation", {"name": "resnet18"}, "unet"),
        ("classification", {"name": "SegResNet", "init_filters": 8}, "resnet18"),
    ],
)
def test_a_network_of_the_other_kind_of_task_is_named_as_one(
    kind: str, network: dict[str, Any], other: str
) -> None:
    theirs = "classification" if kind == "segmentation" else "segmentation"
    with pytest.raises(ConfigError) as caught:
        check_network(small_task(kind, network=network, size=[32, 32]))
    message = str(caught.value)
    assert "\n" not in message
    assert f"network {network['name']} is a network for {theirs} (logits of shape [2, " in message
    assert message.endswith(f"; take one for {kind}, such as {other}")
    check_network(small_task(kind, network={"name": other}, size=[32, 32]))


def test_step_bytes_are_four_times_the_weights_and_the_same_for_every_image() -> None:
    task = small_task("classification", network={"name": "resnet18"}, size=[32, 32])
    weights = sum(weight.nbytes for weight in initial_network(task, 0).parameters())
    one = step_bytes(task, 1)
    two = step_bytes(task, 2)
    nine = step_bytes(task, 9)
    assert nine - one == 8 * (two - one) > 0 and one - (two - one) == 4 * weights


class Reading(nn.Module):
    """Reads its numbers, which do not exist on the meta device."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean(dim=(2, 3)) * (1 if bool(images.sum() > 0) else 2)


def test_of_a_network_that_does_not_run_on_the_meta_device_images_and_weights_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = FeatureNetwork(Reading(), nn.Linear(1, 3, device="meta"))
    monkeypatch.setattr(dry_run, "meta_network", lambda task: network)
    assert step_bytes(small_task("classification"), 2) == 4 * (2 * 16 * 16 + 4 * 6)
