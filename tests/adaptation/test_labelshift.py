"""Class shares by expectation maximisation: against the likelihood itself, and where nothing can be learnt."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medflare.adaptation.labelshift import LabelShift, corrected, estimated_shares
from medflare.core.errors import ConfigError, StateError
from methods import squares


class Given(nn.Module):
    """A model whose images are its probabilities."""

    def forward(self, images: Tensor) -> Tensor:
        return images


def predictions(n: int = 60) -> Tensor:
    p = torch.rand(n, generator=torch.Generator().manual_seed(1)).double() ** 2
    return torch.stack([1 - p, p], dim=1)


def test_the_estimate_maximises_the_likelihood() -> None:
    trained = torch.tensor([0.6, 0.4]).double()
    p = predictions()
    grid = torch.linspace(0.001, 0.999, 9981).double()
    shares = torch.stack([1 - grid, grid], dim=1)  # (grid, 2)
    likelihood = (p[:, None] * shares / trained).sum(dim=2).log().sum(dim=0)
    best = grid[likelihood.argmax()]
    assert 0.01 < best < 0.9
    assert estimated_shares(p, trained)[1].item() == pytest.approx(best.item(), abs=2e-4)


def test_certain_predictions_are_counted_and_uninformative_ones_change_nothing() -> None:
    certain = torch.eye(3)[[0, 0, 0, 2]]
    trained = torch.tensor([0.2, 0.3, 0.5])
    torch.testing.assert_close(
        estimated_shares(certain, trained).float(), torch.tensor([0.75, 0, 0.25]), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        estimated_shares(trained.expand(5, 3), trained).float(), trained, atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("task", [squares.CLASSIFICATION, squares.BINARY_CLASSIFICATION])
def test_the_model_is_corrected_and_its_shares_are_stored(task: Any) -> None:
    count = len(task.classes)
    trained = [0.5, 0.2, 0.3][:count]
    binary = task.target == "binary"
    classes = torch.rand(20, count, generator=torch.Generator().manual_seed(0)) ** 2
    classes = classes / classes.sum(dim=1, keepdim=True)
    images = classes[:, 1:] if binary else classes
    model = LabelShift(Given(), task, trained)
    torch.testing.assert_close(model(images), images)  # before `adapt`
    model.adapt(images.split(7))
    shares = torch.tensor(trained) / sum(trained)
    expected = corrected(classes, shares, estimated_shares(classes, shares).float())
    torch.testing.assert_close(model(images), expected[:, 1:] if binary else expected)
    assert not torch.allclose(model(images), images, atol=1e-2)
    other = LabelShift(Given(), task, trained)
    other.load_statistics(model.statistics())
    assert torch.equal(other(images), model(images))
    with pytest.raises(StateError, match="other classes"):
        other.load_statistics({"shares": torch.ones(7)})


def test_a_share_that_was_rounded_to_zero_is_no_shift() -> None:
    share = 4e-4  # at the site as in the training
    generator = torch.Generator().manual_seed(0)
    positive = torch.rand(20000, generator=generator) < share
    evidence = torch.randn(20000, generator=generator) + 3 * positive - 1.5
    log_odds = 3 * evidence + math.log(share / (1 - share))
    model = LabelShift(Given(), squares.BINARY_CLASSIFICATION, [1.0, 0.0])
    model.adapt([log_odds.sigmoid()[:, None]])
    assert model.shares[1] < 1e-3


def test_other_tasks_and_wrong_shares_are_refused() -> None:
    for task in (squares.SEGMENTATION, squares.MULTILABEL):
        with pytest.raises(ConfigError, match="labelshift"):
            LabelShift(Given(), task, None)
    for wrong in ([0.5], [-1.0] * 3, [0.0] * 3, [float("nan")] * 3):
        with pytest.raises(StateError, match="class_shares"):
            LabelShift(Given(), squares.CLASSIFICATION, wrong)
    even = LabelShift(Given(), squares.CLASSIFICATION, None).trained
    torch.testing.assert_close(even, torch.full_like(even, 1 / len(even)))
