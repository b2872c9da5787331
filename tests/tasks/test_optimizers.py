"""The optimisers that a task may name."""

import pytest
import torch
from torch import nn

from medflare.core.errors import ConfigError
from medflare.tasks.optimizers import build_optimizer, check_optimizer, clip_gradients
from medflare.training.epochs import pack_optimizer, unpack_optimizer

BY_NAME = ["Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adadelta", "Adamax", "RMSprop", "Rprop", "ASGD", "SGD", "Adafactor"]


@pytest.mark.parametrize(("name", "expected"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_each_is_torchs(name: str, expected: type) -> None:
    weights = [nn.Parameter(torch.ones(2))]
    optimizer = build_optimizer({"name": name, "lr": 0.25, "weight_decay": 0.5}, weights, "task x")
    assert type(optimizer) is expected
    assert optimizer.defaults["lr"] == 0.25 and optimizer.defaults["weight_decay"] == 0.5
    assert optimizer.param_groups[0]["params"] == weights


@pytest.mark.parametrize("name", BY_NAME)
def test_moments_go_on_in_another_process(name: str) -> None:
    settings = {"name": name, "lr": 0.1, **({"momentum": 0.9} if name in ("SGD", "RMSprop") else {})}
    check_optimizer(settings, "task x")

    def steps(optimizer: torch.optim.Optimizer, weight: nn.Parameter, *gradients: float) -> None:
        for gradient in gradients:
            weight.grad = torch.full_like(weight, gradient)
            optimizer.step()

    first = nn.Parameter(torch.ones(2, 2))
    optimizer = build_optimizer(settings, [first], "task x")
    steps(optimizer, first, 1.0, -0.5)
    second = nn.Parameter(first.detach().clone())
    fresh = build_optimizer(settings, [second], "task x")
    unpack_optimizer(fresh, pack_optimizer(optimizer))
    steps(optimizer, first, 0.25, 0.5)
    steps(fresh, second, 0.25, 0.5)
    assert torch.equal(first, second)


def test_a_name_or_argument_that_torch_lacks_is_refused() -> None:
    weights = [nn.Parameter(torch.ones(1))]
    with pytest.raises(ConfigError, match="weight_deca"):
        build_optimizer({"name": "adam", "lr": 0.1, "weight_deca": 0.9}, weights, "task x")
    with pytest.raises(ConfigError, match="sgd"):
        build_optimizer({"name": "sgd", "lr": 0.1, "momentum": -1.0}, weights, "task x")
    with pytest.raises(ConfigError, match="adan"):
        build_optimizer({"name": "adan", "lr": 0.1}, weights, "task x")
    with pytest.raises(ConfigError, match="Adam"):
        check_optimizer({"name": "Adam", "lr": 0.1, "betas": [0.9, 0.99], "capturable": True, "foreach": True}, "task x")


@pytest.mark.parametrize("name", BY_NAME)
def test_usual_numbers_are_checked_without_an_optimiser(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where another torch takes parameters before it looks at values, and where the check makes it import what trains."""
    monkeypatch.setattr(torch.optim.Optimizer, "add_param_group", lambda *_: pytest.fail("an optimiser was made"))
    check_optimizer({"name": name, "lr": 0.1}, "task x")
    for wrong in ({"lr": -1.0}, {"lr": 0.1, "weight_decay": -1.0}, {"lr": "fast"}):
        with pytest.raises(ConfigError, match=name):
            check_optimizer({"name": name, **wrong}, "task x")


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam", "Muon"])
def test_an_optimizer_that_cannot_train_here_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        build_optimizer({"name": name, "lr": 0.1}, [nn.Parameter(torch.ones(1))], "task x")


def test_every_step_clips_what_it_is_given() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = build_optimizer({"name": "sgd", "lr": 1.0}, [weight], "task x")
    clip_gradients(optimizer, norm=1.0)
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))
    optimizer = build_optimizer({"name": "sgd", "lr": 1.0}, [weight], "task x")
    clip_gradients(optimizer, value=0.5)
    weight.grad = torch.tensor([3.0, -0.1])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-1.1, -0.7]))
