import threading
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from helpers.small_tasks import small_task
from medflare.core.errors import ConfigError
from medflare.data.loading import Split
from medflare.training.batches import (
    check_drawn,
    in_order,
    in_random_order,
    read_ahead,
    sampling_weights,
)

LABELS = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 2])


def test_in_order() -> None:
    assert [part.tolist() for part in in_order(5, 2)] == [[0, 1], [2, 3], [4]]
    assert [part.tolist() for part in in_order(2, 8)] == [[0, 1]] and in_order(0, 2) == []


def test_every_row_once_in_an_order_of_the_keys() -> None:
    order = torch.cat(in_random_order(10, 4, 0, "A", 1)).tolist()
    assert sorted(order) == list(range(10)) != order
    assert order == torch.cat(in_random_order(10, 3, 0, "A", 1)).tolist(), "whatever the size"
    others = [
        in_random_order(10, 4, *keys)
        for keys in ((1, "A", 1), (0, "B", 1), (0, "A", 2), (0, "A", 1, "more"))
    ]
    for other in others:
        assert torch.cat(other).tolist() != order


@pytest.mark.parametrize(
    ("images", "size", "expected"),
    [
        (10, 4, [4, 4, 2]),
        (9, 4, [4, 5]),  # a lone last image joins the batch before it
        (1, 4, [2]),  # the only image fills a batch twice
        (1, 1, [1]),
        (3, 1, [1, 1, 1]),
        (0, 4, []),
    ],
)
def test_sizes(images: int, size: int, expected: list[int]) -> None:
    assert list(map(len, in_random_order(images, size, 0, "A"))) == expected


def test_classes_are_drawn_equally_often() -> None:
    assert sampling_weights(small_task("classification"), LABELS) is None
    weights = sampling_weights(small_task("classification", sampling="balanced"), LABELS)
    assert weights is not None
    torch.testing.assert_close(
        torch.stack([weights[label == LABELS].sum() for label in range(3)]),
        torch.ones(3, dtype=torch.float64),
    )
    drawn = torch.cat(
        [torch.cat(in_random_order(9, 4, seed, weights=weights)) for seed in range(200)]
    )
    assert (
        torch.bincount(LABELS[drawn], minlength=3).float().div(len(drawn)).sub(1 / 3).abs().max()
        < 0.05
    )
    first, again = (torch.cat(in_random_order(9, 4, 5, "A", weights=weights)) for _ in range(2))
    assert torch.equal(first, again) and len(first) == 9


def test_weights_of_the_task_and_absent_classes() -> None:
    task = small_task("classification", sampling={"name": "weighted", "weights": [1.0, 3.0, 0.0]})
    weights = sampling_weights(task, LABELS)
    assert weights is not None and weights.tolist() == pytest.approx(
        [1 / 6] * 6 + [1.5] * 2 + [0.0]
    )
    with pytest.raises(ConfigError, match="weights"):
        check_drawn(task, sampling_weights(task, torch.tensor([2, 2])))
    with pytest.raises(ConfigError, match="weights"):
        sampling_weights(
            small_task("classification", sampling={"name": "weighted", "weights": [1.0, 3.0]}),
            LABELS,
        )


def test_images_with_and_without_foreground() -> None:
    masks = torch.zeros(4, 1, 16, 16, dtype=torch.long)
    masks[3, 0, 5, 5] = 1
    weights = sampling_weights(small_task(sampling="balanced"), masks)
    assert weights is not None and weights.tolist() == pytest.approx([1 / 3] * 3 + [1.0])


def test_an_image_of_several_labels_has_the_share_of_each() -> None:
    task = small_task("classification", target="multilabel", labels=["a", "b"], sampling="balanced")
    weights = sampling_weights(task, torch.tensor([[0.0, 0], [1, 0], [1, 1]]))
    assert weights is not None and weights.tolist() == pytest.approx([1.0, 0.5, 1.5])


@dataclass(frozen=True)
class _OnDisk(Split):
    """A split that is not in memory; it records which rows are read, and whether by the main thread."""

    in_memory = False
    read: list[tuple[int, bool]] = field(default_factory=list)

    def load(self, rows: Tensor) -> int:
        self.read.append((int(rows[0]), threading.current_thread() is threading.main_thread()))
        if rows[0] == 6:
            raise OSError("the disk is gone")
        return int(rows[0])


def _on_disk() -> _OnDisk:
    return _OnDisk(torch.zeros(8, 1, 2, 2), torch.zeros(8), ("p",) * 8, tuple(map(str, range(8))))


def test_images_on_disk_are_read_in_order_by_another_thread() -> None:
    data = _on_disk()
    batches = list(read_ahead(data, torch.arange(6).split(1), data.load))
    assert [int(rows) for rows, _ in batches] == [row for _, row in batches] == list(range(6))
    assert data.read == [(row, False) for row in range(6)]
    assert list(read_ahead(data, [], data.load)) == []


def test_images_for_a_gpu_are_read_ahead_into_pinned_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: list[Tensor] = []
    data = Split(
        torch.arange(8.0).view(8, 1, 1, 1), torch.arange(8), ("p",) * 8, tuple(map(str, range(8)))
    )
    expected = list(read_ahead(data, torch.arange(8).split(3), data.take))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    def pin_memory(tensor: Tensor) -> Tensor:
        pinned.append(tensor)
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    for (rows, batch), (others, other) in zip(
        read_ahead(data, torch.arange(8).split(3), data.take), expected, strict=True
    ):
        assert torch.equal(rows, others) and all(map(torch.equal, batch, other))
    assert len(pinned) == 2 * 3


def test_two_batches_are_read_ahead() -> None:
    data = _on_disk()
    batches = read_ahead(data, torch.arange(6).split(1), data.load)
    assert next(batches)[1] == 0
    batches.close()  # type: ignore[attr-defined]  # a generator
    assert len(data.read) <= 3 and not [
        thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")
    ]


def test_an_error_is_raised_at_its_batch() -> None:
    data = _on_disk()
    batches = read_ahead(data, torch.arange(8).split(1), data.load)
    assert [next(batches)[1] for _ in range(6)] == list(range(6))
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
