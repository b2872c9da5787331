"""Which rows of a split go together, and in which order."""

import pytest
import torch

from medflare.training.batches import in_order, in_random_order


def test_in_order() -> None:
    assert [part.tolist() for part in in_order(5, 2)] == [[0, 1], [2, 3], [4]]
    assert [part.tolist() for part in in_order(2, 8)] == [[0, 1]] and in_order(0, 2) == []


def test_every_row_once_in_an_order_of_the_keys() -> None:
    order = torch.cat(in_random_order(10, 4, False, 0, "A", 1)).tolist()
    assert sorted(order) == list(range(10)) != order
    assert order == torch.cat(in_random_order(10, 3, False, 0, "A", 1)).tolist(), "whatever the size"
    others = [in_random_order(10, 4, False, *keys) for keys in ((1, "A", 1), (0, "B", 1), (0, "A", 2), (0, "A", 1, "more"))]
    assert all(torch.cat(other).tolist() != order for other in others)


@pytest.mark.parametrize(
    ("images", "size", "drop_last", "expected"),
    [
        (10, 4, False, [4, 4, 2]),
        (9, 4, False, [4, 5]),  # a lone last image joins the batch before it
        (9, 4, True, [4, 4]),
        (8, 4, True, [4, 4]),
        (3, 4, True, [3]),  # the only batch is never dropped
        (1, 4, False, [2]),  # the only image fills a batch twice
        (1, 1, False, [1]),
        (3, 1, False, [1, 1, 1]),
        (0, 4, False, []),
    ],
)
def test_sizes(images: int, size: int, drop_last: bool, expected: list[int]) -> None:
    assert [len(part) for part in in_random_order(images, size, drop_last, 0, "A")] == expected
