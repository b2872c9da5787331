"""The optimisers that a task may name."""

import pytest
import torch
from torch import nn

from medflare.core.errors import ConfigError
from medflare.tasks.optimizers import OPTIMIZERS, build_optimizer


@pytest.mark.parametrize(("name", "expected"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_each_is_torchs(name: str, expected: type) -> None:
    weights = [nn.Parameter(torch.ones(2))]
    optimizer = build_optimizer({"name": name, "lr": 0.25, "weight_decay": 0.5}, weights, "task x")
    assert type(optimizer) is expected
    assert optimizer.defaults["lr"] == 0.25 and optimizer.defaults["weight_decay"] == 0.5
    assert optimizer.param_groups[0]["params"] == weights


def test_the_table_is_complete() -> None:
    assert set(OPTIMIZERS) == {"adam", "adamw", "sgd"}


def test_settings_stay_as_they_were() -> None:
    settings = {"name": "sgd", "lr": 0.1}
    build_optimizer(settings, [nn.Parameter(torch.ones(1))], "task x")
    assert settings == {"name": "sgd", "lr": 0.1}


def test_what_torch_does_not_take() -> None:
    weights = [nn.Parameter(torch.ones(1))]
    with pytest.raises(ConfigError, match=r"^task x: optimizer adam: .*momentun.*; see torch\.optim\.Adam$"):
        build_optimizer({"name": "adam", "lr": 0.1, "momentun": 0.9}, weights, "task x")
    with pytest.raises(ConfigError, match=r"^task x: optimizer sgd: .*; see torch\.optim\.SGD$"):
        build_optimizer({"name": "sgd", "lr": 0.1, "momentum": -1.0}, weights, "task x")
    with pytest.raises(ConfigError, match=r"^task x: unknown optimizer 'adan'; did you mean adam"):
        build_optimizer({"name": "adan", "lr": 0.1}, weights, "task x")
