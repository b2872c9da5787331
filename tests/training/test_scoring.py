"""How a finished model is measured at a site."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from helpers.picture_sites import numbered_site
from medflare.tasks.config import TaskConfig
from medflare.training.scoring import evaluating, scoring_batch

TaskOf = Callable[..., TaskConfig]


def test_at_least_eight_images_at_once(make_task: TaskOf) -> None:
    assert scoring_batch(make_task(batch_size=2)) == 8 and scoring_batch(make_task(batch_size=32)) == 32


def test_predictions_come_in_order_and_without_gradients(make_task: TaskOf) -> None:
    site, weight = numbered_site(make_task()), nn.Parameter(torch.ones(1))
    probabilities, _, rows = (
        torch.cat(parts) for parts in zip(*site.predictions(lambda images: images.double() * weight, "test"), strict=True)
    )
    assert rows.tolist() == list(range(site.n["test"])) and probabilities.dtype == torch.float32 and not probabilities.requires_grad
    assert torch.equal(probabilities, site.data.test.images) and torch.is_grad_enabled()


def test_metrics_that_are_asked_for(make_task: TaskOf) -> None:
    site = numbered_site(make_task())

    def perfect(images: torch.Tensor) -> torch.Tensor:
        return (torch.arange(256).view(1, 1, 16, 16) < images[:, :, :1, :1]).float()

    assert site.score(perfect).values == {"dice": 1.0, "iou": 1.0}
    assert site.score(perfect, metrics=["hd95"]).values == {"hd95": 0.0}


def test_evaluation_mode_ends_where_scoring_fails() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Identity().eval())

    def score_and_fail() -> None:
        with evaluating(model):
            assert not any(part.training for part in model.modules())
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError):
        score_and_fail()
    assert [part.training for part in model.modules()] == [True, True, False]


def test_scoring_uses_evaluation_mode_and_restores(make_task: TaskOf) -> None:
    site = numbered_site(make_task(network={"name": "unet", "channels": [4, 8], "norm": "batch"}))
    network = site.network().train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    site.score(site.predictor(network))
    assert all(part.training for part in network.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
    frozen = network.eval()
    site.score(site.predictor(frozen))
    assert not any(part.training for part in frozen.modules())
