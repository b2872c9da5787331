"""MOON's loss by hand, and its effect on local training."""

import math
from typing import Any

import pytest
import torch

from medflare.methods.families.local_terms import moon
from medflare.methods.families.local_terms.moon import MoonSite, contrastive_loss
from medflare.methods.fedavg.site import FedAvgSite
from methods import squares


def test_loss_by_hand() -> None:
    z = torch.tensor([[3.0, 0.0]])
    same = torch.tensor([[1.0, 0.0]])
    orthogonal = torch.tensor([[0.0, 2.0]])
    assert contrastive_loss(z, same, orthogonal, 0.5).item() == pytest.approx(
        math.log(1 + math.exp(-2))
    )
    assert contrastive_loss(z, orthogonal, same, 0.5).item() == pytest.approx(
        math.log(1 + math.exp(2))
    )
    both = torch.cat([z, z]), torch.cat([same, orthogonal]), torch.cat([orthogonal, same])
    assert contrastive_loss(*both, 1.0).item() == pytest.approx(
        (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(1))) / 2
    )


def test_agreeing_models_give_log_two_without_a_gradient() -> None:
    z = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    other = torch.ones(4, 5)
    loss = contrastive_loss(z, other, other)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    torch.testing.assert_close(z.grad, torch.zeros(4, 5))


@pytest.mark.parametrize("kind", ["segmentation", "classification"])
def test_the_contrastive_loss_starts_in_the_second_round(kind: str) -> None:
    task = squares.task(kind)
    assert squares.equal(squares.trained(MoonSite, task)[0], squares.trained(FedAvgSite, task)[0])
    second = squares.trained(MoonSite, task, rounds=2)[0]
    assert not squares.equal(second, squares.trained(FedAvgSite, task, rounds=2)[0])
    assert not squares.equal(second, squares.trained(MoonSite, task, rounds=2, temperature=2.0)[0])


def test_all_three_models_normalise_by_the_batch() -> None:
    """With equal weights they give equal features for any running statistics, which do not change."""
    algorithm = squares.algorithm(MoonSite)
    state = {
        name: tensor + 3.0 if "running" in name else tensor
        for name, tensor in squares.start().items()
    }
    model = algorithm.network("model", state).train()
    train = squares.site().data.train
    algorithm.previous = state
    compared: list[torch.Tensor] = []

    def note(*features: Any) -> torch.Tensor:
        compared.extend(features[:3])
        return torch.zeros(())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moon, "contrastive_loss", note)
        loss = algorithm.round_loss(model, round=1)
        assert loss is not None
        loss(model, train.images[:6], train.targets[:6])
    local, shared, previous = compared
    torch.testing.assert_close(shared, local)
    torch.testing.assert_close(previous, local)
    for purpose in ("frozen", "previous"):
        assert squares.equal({**algorithm._networks[purpose].state_dict()}, state)
