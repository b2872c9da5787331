"""Lessons of several sites as one batch: what each alone would have learnt, whatever the others' batches, numbers or troubles.

In double precision, where rounding is far below what is compared: Adam makes steps of any gradient, and that of a bias before a
normalisation is nothing but rounding.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import small
from medflare.core.errors import Aborted, ConfigError, DataError, MedflareError
from medflare.data.sites.site import Site
from medflare.data.splits import Split
from medflare.methods.parts.proximal import pull
from medflare.methods.parts.together import check_together, losses_together, stacked, train_together
from medflare.methods.parts.training import Lesson, pack_optimizer, train_epochs
from medflare.tasks.config import TaskConfig
from methods import squares

COUNTS = {"A": 12, "B": 7, "C": 5}  # with batches of 4: three; one and a smaller one; one that is larger
BATCH_NORM = {"name": "small_cnn", "channels": [4, 8], "batch_norm": True}
MOMENTUM = {"name": "sgd", "lr": 0.05, "momentum": 0.9}
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "unet with batch normalisation": ("segmentation", {"local_epochs": 2}),
    "unet with instance normalisation": ("segmentation", {"network": small.INSTANCE_UNET, "clip": {"norm": 0.1}, "optimizer": MOMENTUM}),
    "masks of several classes": ("segmentation", {"target": "multiclass", "labels": ["a", "b", "c"], "loss": {"name": "dice_ce"}}),
    "cnn": ("classification", {"optimizer": {"name": "adamw", "lr": 0.01}, "local_epochs": 2, "clip": {"value": 0.01}}),
    "cnn with batch normalisation": ("classification", {"network": BATCH_NORM, "augment": [{"name": "RandFlip", "prob": 0.5}]}),
    "a library's loss and optimizer": ("segmentation", {"loss": {"name": "TverskyLoss"}, "optimizer": {"name": "RMSprop", "lr": 0.001}}),
}


def task_of(name: str) -> TaskConfig:
    kind, changes = TASKS[name]
    return squares.task(kind, **{"batch_size": 4, **changes})


def lesson(site: Site, mu: float = 0.0) -> Lesson:
    train = site.data.train
    assert isinstance(train, Split)
    site.data = replace(site.data, train=replace(train, images=train.images.double()))
    model = site.network().double()
    correct = pull(model, model.state_dict(), mu) if mu else None
    return Lesson(model, site.optimizer(model.parameters()), site, 1, "model", correct, None)


def lessons(task: TaskConfig, **options: Any) -> list[Lesson]:
    return [lesson(squares.site(name, task, (count, 2, 2)), **options) for name, count in COUNTS.items()]


def learnt(task: TaskConfig, **options: Any) -> tuple[list[Lesson], list[float]]:
    """The lessons after training one by one, and their losses."""
    alone = lessons(task, **options)
    return alone, [train_epochs(one.model, one.optimizer, one.site, 1, "model", correct=one.correct) for one in alone]


def assert_equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], place: str) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-7, atol=1e-7, msg=f"{place} {name}")


@pytest.mark.parametrize("name", TASKS)
def test_each_learns_what_it_learns_alone(name: str) -> None:
    """Weights, running statistics, the optimizer's moments and the loss, with other numbers of batches and smaller last ones."""
    task = task_of(name)
    together, (alone, losses) = lessons(task), learnt(task)
    assert train_together(together) == pytest.approx(losses, abs=1e-7)
    for one, other in zip(together, alone, strict=True):
        assert_equal(one.model.state_dict(), other.model.state_dict(), one.site.name)
        assert_equal(pack_optimizer(one.optimizer), pack_optimizer(other.optimizer), one.site.name)
        assert one.model.training


def test_gradients_are_corrected_at_each_site() -> None:
    task = task_of("cnn")
    together, (alone, _) = lessons(task, mu=5.0), learnt(task, mu=5.0)
    train_together(together)
    for one, other, free in zip(together, alone, learnt(task)[0], strict=True):
        assert_equal(one.model.state_dict(), other.model.state_dict(), one.site.name)
        assert any((weight - free.model.state_dict()[name]).abs().max() > 1e-3 for name, weight in one.model.state_dict().items())


def test_one_lesson_and_none() -> None:
    task = task_of("unet with batch normalisation")
    together, (alone, losses) = lessons(task)[:1], learnt(task)
    assert train_together(together) == pytest.approx(losses[:1], abs=1e-7)
    assert_equal(together[0].model.state_dict(), alone[0].model.state_dict(), "A")
    start = lessons(task)
    (nothing,) = train_together([Lesson(start[0].model, start[0].optimizer, start[0].site, 1, "model", None, 0)])
    assert isinstance(nothing, float) and math.isnan(nothing)


def test_numbers_of_one_site_reach_no_other() -> None:
    task = task_of("unet with batch normalisation")
    together, (alone, losses) = lessons(task), learnt(task)
    small.stacked(together[1].site.data.train).images.fill_(math.nan)
    found = train_together(together)
    assert isinstance(found[1], float) and math.isnan(found[1])
    for place in (0, 2):
        assert found[place] == pytest.approx(losses[place], abs=1e-7)
        assert_equal(together[place].model.state_dict(), alone[place].model.state_dict(), str(place))


def stopped(site: Site, error: MedflareError) -> None:
    """From now on the site's second batch cannot be had."""
    batches = site.batches

    def ending(*arguments: Any, **options: Any) -> Iterator[Any]:
        yield next(batches(*arguments, **options))
        raise error

    site.batches = ending  # type: ignore[method-assign]


def test_a_site_that_cannot_go_on_does_not_stop_the_others() -> None:
    task = task_of("cnn")
    together, (alone, losses) = lessons(task), learnt(task)
    stopped(together[0].site, DataError("site A: gone"))
    found = train_together(together)
    assert isinstance(found[0], DataError)
    assert found[1:] == pytest.approx(losses[1:], abs=1e-7)
    assert_equal(together[2].model.state_dict(), alone[2].model.state_dict(), "C")


def test_one_that_is_asked_to_stop_stops_all() -> None:
    together = lessons(task_of("cnn"))
    stopped(together[0].site, Aborted("stopped"))
    with pytest.raises(Aborted):
        train_together(together)


def test_losses_of_stacked_networks() -> None:
    """K networks of one weight, by hand: (w x - y)²."""
    network = torch.nn.Linear(1, 1, bias=False)
    weights = stacked([{"weight": torch.tensor([[value]])} for value in (1.0, 2.0)])
    images, targets = torch.ones(2, 3, 1), torch.zeros(2, 3, 1)
    found = losses_together(network, lambda logits, truth: (logits - truth).square().mean(), weights, {}, images, targets)
    assert found.tolist() == [1.0, 4.0]


@pytest.mark.parametrize("name", TASKS)
def test_what_can_be_computed_together_is_not_refused(name: str) -> None:
    check_together(task_of(name))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "bf16"}, "together: sites train in fp32, a step for every batch; task.precision is 'bf16', set 'fp32'"),
        ({"accumulate": 2}, "task.accumulate is 2, set 1"),
        (
            {"network": {"name": "efficientnet_b0"}, "size": [32, 32]},
            "network efficientnet_b0 draws random numbers in training; switch off its dropout",
        ),
    ],
)
def test_what_cannot_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="together: ") as refused:
        check_together(squares.task("classification", **changes))
    assert message in str(refused.value)
