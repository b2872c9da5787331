"""A network that normalises by the batch at hand and remembers nothing of it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from medflare.core.states import copy_state
from medflare.methods.parts.normalisation import batch_statistics, still_statistics
from methods import squares


def network() -> nn.Sequential:
    without = nn.BatchNorm1d(2, track_running_stats=False)
    return nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.InstanceNorm1d(2)), nn.Dropout(0.5), without)


IMAGES = 3 + torch.randn(8, 2, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("training", [True, False])
def test_modes_and_statistics_are_given_back(training: bool) -> None:
    model = network().train(training)
    before, modes = copy_state(model.state_dict()), [layer.training for layer in model.modules()]
    with batch_statistics(model):
        first = model[0](IMAGES)
        assert model[2].training is training  # dropout goes on as it was
    torch.testing.assert_close(first.mean(dim=0), torch.zeros(2), rtol=0, atol=1e-5)
    assert squares.equal(copy_state(model.state_dict()), before) and [layer.training for layer in model.modules()] == modes
    assert model[0].track_running_stats and not model[3].track_running_stats


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("still", [still_statistics, batch_statistics])
def test_instance_normalisation_that_remembers_is_still_too(still: Any, training: bool) -> None:
    """Torch moves its statistics even where they are not tracked, and does not normalise by them then."""
    model = nn.InstanceNorm2d(2, track_running_stats=True).train(training)
    images = IMAGES[:6].reshape(3, 2, 2, 1).repeat(1, 1, 1, 2)
    model.load_state_dict({**model.state_dict(), "running_mean": torch.tensor([1 / 3, -1 / 3])})
    before, expected = copy_state(model.state_dict()), copy.deepcopy(model).train(training or still is batch_statistics)(images)
    with still(model, model):
        assert torch.equal(model(images), expected)
        torch.testing.assert_close(copy_state(model.state_dict()), before)
    assert squares.equal(copy_state(model.state_dict()), before) and model.momentum == 0.1 and model.training is training
    model.train()(images)
    assert not squares.equal(copy_state(model.state_dict()), before)


def test_an_error_inside_changes_nothing() -> None:
    model = network().eval()
    with pytest.raises(RuntimeError), batch_statistics(model):
        raise RuntimeError
    assert model[0].track_running_stats and not model[0].training
