"""What a site's optimizer follows beside its own settings: the schedule's factor, and clipping before every step."""

from collections.abc import Callable

import torch
from torch import nn

from helpers.picture_sites import numbered_site
from medflare.tasks.config import TaskConfig

TaskOf = Callable[..., TaskConfig]


def test_the_factor_of_the_round_is_on_top_of_every_rate(make_task: TaskOf) -> None:
    site = numbered_site(make_task(optimizer={"name": "sgd", "lr": 0.5}))
    weights = [nn.Parameter(torch.ones(1))]
    assert site.optimizer(weights).param_groups[0]["lr"] == 0.5
    site.rate_factor = 0.25
    assert site.optimizer(weights).param_groups[0]["lr"] == 0.125
    assert site.optimizer(weights, lr=2.0).param_groups[0]["lr"] == 0.5


def test_gradients_are_clipped_as_the_task_says(make_task: TaskOf) -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = numbered_site(make_task(optimizer={"name": "SGD", "lr": 1.0}, clip={"norm": 1.0})).optimizer([weight])
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))


def test_sampling_is_of_training_images_alone(make_task: TaskOf) -> None:
    site = numbered_site(make_task(sampling={"name": "weighted", "weights": [0.0, 1.0]}))
    drawn = torch.cat([batch.index for batch in site.batches("train", 0)])
    assert len(drawn) == 10 and len(drawn.unique()) < 10 and 0 not in drawn, "image 0 has no foreground"
    assert sorted(torch.cat([batch.index for batch in site.batches("validation", 0)]).tolist()) == list(range(site.n["validation"]))
