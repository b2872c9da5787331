"""The task's network tried before anything starts: computed where it is small, without memory where it is not, with the same answer."""

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

PHANTOM: dict[str, Any] = load_task("phantom").to_dict()


@pytest.fixture(params=[0, 10**10], ids=["without memory", "computed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Multiplications up to which a pass is computed."""
    limit = int(request.param)
    monkeypatch.setattr(dry_run, "_SMALL", limit)
    return limit


def test_either_way_the_answer_is_the_same(way: int) -> None:
    network = check_network(load_task({**PHANTOM, "size": [32, 32]}))
    assert all(weight.is_meta for weight in network.parameters()), "nobody gets weights of zeros"
    with pytest.raises(ConfigError, match=r"\[32, 32\]"):
        check_network(load_task({**PHANTOM, "size": [32, 30]}))


def test_the_small_one_is_computed_and_the_large_one_is_not(way: int, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = []
    forward = FeatureNetwork.forward

    def noted(network: FeatureNetwork, images: torch.Tensor) -> torch.Tensor:
        devices.append(images.device.type)
        return forward(network, images)

    monkeypatch.setattr(FeatureNetwork, "forward", noted)
    check_network(load_task({**PHANTOM, "size": [32, 32]}))
    assert devices == ["cpu" if way else "meta"]


class Remembering(nn.Module):
    """Holds a tensor that is neither weight nor buffer: nobody gives it memory afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 1)
        self.grid = torch.ones(4, 1, 1, device="meta")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.layer(images) * self.grid
        return features


def test_a_network_that_cannot_be_given_memory_is_tried_without(way: int, monkeypatch: pytest.MonkeyPatch) -> None:
    network = FeatureNetwork(Remembering().to("meta"), nn.Conv2d(4, 2, 1, device="meta"))
    monkeypatch.setattr(dry_run, "meta_network", lambda task: network)
    assert check_network(load_task({**PHANTOM, "size": [32, 32]})) is network


@pytest.mark.parametrize("side", [20, 31])
def test_no_reason_is_invented_for_a_size_that_does_not_work(side: int) -> None:
    """The network takes 33, which no divisor divides: it algorithms five times, and something must be left."""
    slim = {"network": {"name": "vgg16_slim"}}
    check_network(small_task("classification", **slim, size=[33, 33]))
    with pytest.raises(ConfigError, match=r"\[32, 32\]"):
        check_network(small_task("classification", **slim, size=[side, side]))


def test_every_image_of_a_step_takes_the_same_beside_weights_gradients_and_moments() -> None:
    task = small_task("classification", network={"name": "resnet18"}, size=[32, 32])
    weights = sum(weight.nbytes for weight in initial_network(task, 0).parameters())
    one, two, nine = (step_bytes(task, batch) for batch in (1, 2, 9))
    assert nine - one == 8 * (two - one) > 0 and one - (two - one) == 4 * weights


class Reading(nn.Module):
    """Asks for its numbers, which there are not without memory."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean(dim=(2, 3)) * (1 if bool(images.sum() > 0) else 2)


def test_of_a_network_that_cannot_do_without_memory_images_and_weights_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    network = FeatureNetwork(Reading(), nn.Linear(1, 3, device="meta"))
    monkeypatch.setattr(dry_run, "meta_network", lambda task: network)
    assert step_bytes(small_task("classification"), 2) == 4 * (2 * 16 * 16 + 4 * 6)
