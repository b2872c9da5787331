"""A site's data in memory."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from medflare.data.loading import load_site_data
from medflare.data.splits import Batch, SiteData, Split, joined
from medflare.data.targets import class_counts
from medflare.tasks.config import TaskConfig

TaskOf = Callable[..., TaskConfig]
SiteOf = Callable[..., Path]


def test_splits(make_site: SiteOf, make_task: TaskOf) -> None:
    data = load_site_data("A", make_task(), make_site())
    assert [len(data.train), len(data.validation), len(data.test)] == [5, 2, 3]
    assert data.train.patients == ("p0", "p0", "p1", "p2", "p3") and data.test.names == ("7.png", "8.png", "9.png")
    assert data.split("train") is data.train is data.split("training")
    with pytest.raises(KeyError, match="no split 'training set'"):
        data.split("training set")
    assert data.notes == ()


def test_class_counts(make_site: SiteOf, make_task: TaskOf) -> None:
    task = make_task()
    data = load_site_data("A", task, make_site())
    assert class_counts(data.train.targets, task).tolist() == [5 * 256 - 5 * 16, 5 * 16]
    shades = make_task("classification")
    data = load_site_data("B", shades, make_site(kind="classification", name="B"))
    assert class_counts(data.train.targets, shades).tolist() == [2, 2, 1]
    several = make_task(target="multilabel", labels=["a", "b"])
    assert class_counts(torch.tensor([[[[1.0, 0]], [[1, 1]]]]), several).tolist() == [1, 2]
    findings = make_task("classification", target="multilabel", labels=["a", "b"])
    assert class_counts(torch.tensor([[1.0, 0], [1, 1]]), findings).tolist() == [2, 1]


def test_a_batch_is_its_parts() -> None:
    images, targets, index = Batch(torch.zeros(2, 1, 4, 4), torch.ones(2), torch.tensor([3, 5]))
    assert images.shape == (2, 1, 4, 4) and targets.sum() == 2 and index.tolist() == [3, 5]


def test_the_length_of_a_split() -> None:
    split = Split(torch.zeros(2, 1, 4, 4), torch.zeros(2), ("p", "p"), ("a.png", "b.png"))
    assert len(split) == 2 and SiteData(split, split, split).notes == ()


def test_joined_splits_keep_patients_apart_and_images_as_they_are() -> None:
    pictures = Split(torch.rand(2, 1, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long), ("p", "q"), ("a", "b"))
    both = joined([pictures, pictures], ["0", "1"])
    assert isinstance(both.images, torch.Tensor) and both.images.shape == (4, 1, 4, 4) and both.patients == ("0/p", "0/q", "1/p", "1/q")
    volumes = Split((torch.ones(1, 3, 4, 5), torch.ones(1, 2, 2, 2)), (torch.ones(3, 4, 5), torch.ones(2, 2, 2)), ("p", "q"), ("a", "b"))
    several = joined([volumes, volumes], ["0", "1"])
    assert several.in_memory
    assert [tuple(several.image(row).shape[1:]) for row in range(4)] == [(3, 4, 5), (2, 2, 2)] * 2
    assert len(several.targets) == len(several) == 4 and several.targets[-1].shape == (2, 2, 2)
    images, targets = several.take(torch.tensor([1, 3]))
    assert images.shape == (2, 1, 2, 2, 2) and targets.shape == (2, 2, 2, 2)
    for split in (several, volumes):
        assert [part.shape for part in split.take(torch.zeros(0, dtype=torch.long))] == [(0, 1, 3, 4, 5), (0, 3, 4, 5)]
