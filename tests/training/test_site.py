from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helpers.fixture_types import TaskOf
from helpers.picture_sites import numbered_site
from helpers.small_tasks import predicted, score
from medflare.core.errors import Aborted, ConfigError
from medflare.data.loading import SiteData, Split
from medflare.training.scoring import evaluating, scoring_batch
from medflare.training.site import Site
from methods import squares

RANDOM = np.random.RandomState(0)


def _order(site: Site, *keys: Any) -> list[int]:
    return torch.cat([batch.index for batch in site.batches("train", *keys)]).tolist()


def test_batches_are_a_seeded_permutation(make_task: TaskOf) -> None:
    site = numbered_site(make_task())
    assert sorted(_order(site, 1)) == list(range(10))
    assert _order(site, 1) == _order(site, 1) == _order(numbered_site(make_task()), 1)
    others = (numbered_site(make_task(), name="B"), numbered_site(make_task(), seed=1))
    assert _order(site, 1) not in [
        _order(site, 2),
        _order(site, 1, "personal"),
        *(_order(other, 1) for other in others),
    ]
    for batch in site.batches("train", 0):
        assert batch.images[:, 0, 0, 0].tolist() == batch.index.tolist()
        assert batch.targets.flatten(1).sum(dim=1).tolist() == batch.index.tolist()


def test_one_image_trains_a_network_with_batch_norm(make_task: TaskOf) -> None:
    task = make_task("classification", network={"name": "vgg16_slim"}, size=[32, 32])
    one = Split(torch.rand(1, 1, 32, 32), torch.tensor([2]), ("p",), ("x.png",))
    site = Site("A", task, SiteData(one, one, one))
    network = site.network()
    for batch in site.batches("train", 0):
        site.loss(network(batch.images), batch.targets).backward()
    assert site.score(site.predictor(network)).values["accuracy"] in (0.0, 1.0)
    assert site.n == {"train": 1, "validation": 1, "test": 1}


def test_augmentation_is_keyed_and_does_not_touch_global_randomness(make_task: TaskOf) -> None:
    before = torch.random.get_rng_state()
    site = numbered_site(
        make_task(augment=[{"name": "RandGaussianNoise", "prob": 1.0, "std": 0.5}])
    )

    def images(*keys: Any) -> torch.Tensor:
        return torch.cat([batch.images for batch in site.batches("train", *keys)])

    torch.testing.assert_close(images(0), images(0), rtol=0, atol=0)
    assert not torch.equal(images(0), images(1))
    assert torch.cat([batch.images for batch in site.ordered("train")]).unique().numel() == 10
    assert torch.equal(torch.random.get_rng_state(), before)


def test_abort_is_checked_before_every_batch(make_task: TaskOf) -> None:
    site = numbered_site(make_task(batch_size=2))
    answers = iter([False, False, True])
    site.abort = lambda: next(answers)
    batches = site.batches("train", 0)
    assert len([next(batches), next(batches)]) == 2
    with pytest.raises(Aborted, match="site A"):
        next(batches)
    site.abort = lambda: True
    with pytest.raises(Aborted):
        site.score(lambda images: images)


def test_score_and_predict(make_task: TaskOf) -> None:
    site = numbered_site(make_task(), validation=70)

    def perfect(images: torch.Tensor) -> torch.Tensor:
        pixels = torch.arange(256).view(1, 1, 16, 16)
        return (pixels < images[:, :, :1, :1]).float()

    scores = site.score(perfect)
    # Image 0 has an empty mask.
    assert scores.values == {"dice": 1.0, "iou": 1.0} and scores.left_out["dice"] == 1
    assert set(site.score(perfect, "test").values) == {"dice", "iou", "hd95"}
    assert set(site.score(perfect, metrics=["hd95"]).values) == {"hd95"}
    assert predicted(site, perfect, "validation").shape == (70, 1, 16, 16)
    at_once = score(
        predicted(site, perfect, "test"),
        site.data.test.targets,
        site.data.test.patients,
        site.task,
        site.task.test_metrics,
    )
    assert at_once == site.score(perfect, "test")


def test_chosen_rows_are_not_augmented(make_task: TaskOf) -> None:
    site = numbered_site(
        make_task(augment=[{"name": "RandGaussianNoise", "prob": 1.0, "std": 0.5}])
    )
    batch = site.take("train", torch.tensor([7, 0, 7]), RANDOM)
    assert batch.images[:, 0, 0, 0].tolist() == [7, 0, 7] and batch.index.tolist() == [7, 0, 7]
    assert batch.targets.flatten(1).sum(dim=1).tolist() == [7, 0, 7]
    assert len(site.take("test", torch.tensor([], dtype=torch.long), RANDOM).images) == 0
    site.abort = lambda: True
    with pytest.raises(Aborted, match="site A"):
        site.take("train", torch.tensor([0]), RANDOM)


def test_a_limit_bounds_every_batch(make_task: TaskOf) -> None:
    site = numbered_site(make_task(batch_size=8))
    site.batch_limit = 3
    assert site.batch_size == site.scoring_batch == 3
    assert [len(batch.images) for batch in site.batches("train", 0)] == [3, 3, 4]
    assert [batch.index.tolist() for batch in site.ordered("train")] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9],
    ]
    site.batch_limit = 100
    assert site.batch_size == 8 and site.scoring_batch == scoring_batch(site.task) == 8


def test_the_rate_factor_multiplies_every_learning_rate(make_task: TaskOf) -> None:
    site = numbered_site(make_task(optimizer={"name": "sgd", "lr": 0.5}))
    weights = [nn.Parameter(torch.ones(1))]
    assert site.optimizer(weights).param_groups[0]["lr"] == 0.5
    site.rate_factor = 0.25
    assert site.optimizer(weights).param_groups[0]["lr"] == 0.125
    assert site.optimizer(weights, lr=2.0).param_groups[0]["lr"] == 0.5


def test_sampling_is_of_training_images_alone(make_task: TaskOf) -> None:
    site = numbered_site(make_task(sampling={"name": "weighted", "weights": [0.0, 1.0]}))
    drawn = torch.cat([batch.index for batch in site.batches("train", 0)])
    assert len(drawn) == 10 and len(drawn.unique()) < 10 and 0 not in drawn, (
        "image 0 has no foreground"
    )
    assert sorted(
        torch.cat([batch.index for batch in site.batches("validation", 0)]).tolist()
    ) == list(range(site.n["validation"]))


def test_predictions_come_in_order_and_without_gradients(make_task: TaskOf) -> None:
    site = numbered_site(make_task())
    weight = nn.Parameter(torch.ones(1))
    batches = site.predictions(lambda images: images.double() * weight, "test")
    probabilities, _, rows = map(torch.cat, zip(*batches, strict=True))
    assert (
        rows.tolist() == list(range(site.n["test"]))
        and probabilities.dtype == torch.float32
        and not probabilities.requires_grad
    )
    assert torch.equal(probabilities, site.data.test.images) and torch.is_grad_enabled()


def test_probabilities_of_another_number_of_classes_are_named() -> None:
    site = squares.site("A", squares.SEGMENTATION, (1, 1, 2))
    with pytest.raises(ConfigError, match=r"shape \(2, 7, .*needs \(images, "):
        site.score(lambda images: images.new_zeros(len(images), 7, *images.shape[2:]), "test")


def test_evaluation_mode_ends_where_scoring_fails() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Identity().eval())

    def score_and_fail() -> None:
        with evaluating(model):
            for part in model.modules():
                assert not part.training
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError):
        score_and_fail()
    assert [part.training for part in model.modules()] == [True, True, False]


def test_scoring_uses_evaluation_mode_and_restores(make_task: TaskOf) -> None:
    site = numbered_site(make_task(network={"name": "unet", "channels": [4, 8], "norm": "batch"}))
    network = site.network().train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    site.score(site.predictor(network))
    for part in network.modules():
        assert part.training
    for name, tensor in network.state_dict().items():
        assert torch.equal(before[name], tensor)
    frozen = network.eval()
    site.score(site.predictor(frozen))
    for part in frozen.modules():
        assert not part.training
