"""The task's network tried before anything starts: computed where it is small, without memory where it is not, with the same answer."""

from typing import Any

import pytest
import torch
from torch import nn

from medflare.core.errors import ConfigError
from medflare.networks import dry_run
from medflare.networks.dry_run import check_network
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
    with pytest.raises(ConfigError, match=r"needs sides divisible by 4, size is \[32, 30\]; use \[32, 32\]$"):
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
