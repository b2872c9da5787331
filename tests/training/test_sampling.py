"""Draws of training images by class."""

import pytest
import torch

from helpers.small_tasks import small_task
from medflare.core.errors import ConfigError
from medflare.training.batches import in_random_order, sampling_groups, sampling_weights

LABELS = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 2])


def test_a_shuffle_needs_no_weights() -> None:
    assert sampling_weights(small_task("classification"), LABELS) is None


def test_classes_are_drawn_equally_often() -> None:
    weights = sampling_weights(small_task("classification", sampling="balanced"), LABELS)
    assert weights is not None
    torch.testing.assert_close(torch.stack([weights[label == LABELS].sum() for label in range(3)]), torch.ones(3, dtype=torch.float64))
    drawn = torch.cat([torch.cat(in_random_order(9, 4, False, seed, weights=weights)) for seed in range(200)])
    assert torch.bincount(LABELS[drawn], minlength=3).float().div(len(drawn)).sub(1 / 3).abs().max() < 0.05
    first, again = (torch.cat(in_random_order(9, 4, False, 5, "A", weights=weights)) for _ in range(2))
    assert torch.equal(first, again) and len(first) == 9


def test_own_weights_and_absent_classes() -> None:
    task = small_task("classification", sampling={"name": "weighted", "weights": [1.0, 3.0, 0.0]})
    weights = sampling_weights(task, LABELS)
    assert weights is not None and weights.tolist() == pytest.approx([1 / 6] * 6 + [1.5] * 2 + [0.0])
    with pytest.raises(ConfigError, match="weights are 0 for every image that this site has"):
        sampling_weights(task, torch.tensor([2, 2]))
    with pytest.raises(ConfigError, match=r"sampling.weights must be 3 numbers \(dark, medium, bright\), got 2"):
        sampling_weights(small_task("classification", sampling={"name": "weighted", "weights": [1.0, 3.0]}), LABELS)


def test_images_with_and_without_foreground() -> None:
    masks = torch.zeros(4, 1, 16, 16, dtype=torch.long)
    masks[3, 0, 5, 5] = 1
    weights = sampling_weights(small_task(sampling="balanced"), masks)
    assert weights is not None and weights.tolist() == pytest.approx([1 / 3] * 3 + [1.0])


def test_an_image_of_several_labels_has_the_share_of_each() -> None:
    task = small_task("classification", target="multilabel", labels=["a", "b"], sampling="balanced")
    assert sampling_groups(task) == ("no label", "a", "b")
    weights = sampling_weights(task, torch.tensor([[0.0, 0], [1, 0], [1, 1]]))
    assert weights is not None and weights.tolist() == pytest.approx([1.0, 0.5, 1.5])


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ("balance", "sampling"),
        ("weighted", "sampling"),
        ({"name": "balanced", "weights": [1.0]}, "sampling"),
    ],
)
def test_bad_sampling(sampling: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        small_task(sampling=sampling)


def test_labels_of_volumes_that_have_sizes_of_their_own() -> None:
    task = small_task("classification", sampling="balanced")
    assert torch.equal(torch.as_tensor(sampling_weights(task, tuple(LABELS))), torch.as_tensor(sampling_weights(task, LABELS)))
