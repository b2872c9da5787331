"""What is read ahead comes in order, and stops when nobody wants more of it."""

import threading
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from medflare.data.loading import Split
from medflare.training.batches import read_ahead


@dataclass(frozen=True)
class _Slow(Split):
    """A split that is not in memory, and notes what is read and where."""

    in_memory = False
    read: list[tuple[int, bool]] = field(default_factory=list)

    def noted(self, rows: Tensor) -> int:
        self.read.append((int(rows[0]), threading.current_thread() is threading.main_thread()))
        if rows[0] == 6:
            raise OSError("the disk is gone")
        return int(rows[0])


def _slow() -> _Slow:
    return _Slow(torch.zeros(8, 1, 2, 2), torch.zeros(8), ("p",) * 8, tuple(map(str, range(8))))


def test_in_order_by_another_thread() -> None:
    data = _slow()
    found = list(read_ahead(data, torch.arange(6).split(1), data.noted))
    assert [int(rows) for rows, _ in found] == [what for _, what in found] == list(range(6))
    assert data.read == [(row, False) for row in range(6)]
    assert list(read_ahead(data, [], data.noted)) == []


def test_two_portions_ahead_and_no_more() -> None:
    data = _slow()
    portions = read_ahead(data, torch.arange(6).split(1), data.noted)
    assert next(portions)[1] == 0
    portions.close()  # type: ignore[attr-defined]  # a generator
    assert len(data.read) <= 3 and not [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_an_error_comes_where_the_portion_would() -> None:
    data = _slow()
    portions = read_ahead(data, torch.arange(8).split(1), data.noted)
    assert [next(portions)[1] for _ in range(6)] == list(range(6))
    with pytest.raises(OSError, match="the disk is gone"):
        next(portions)


def test_what_is_in_memory_needs_no_thread() -> None:
    data = Split(torch.zeros(2, 1, 2, 2), torch.zeros(2), ("p", "p"), ("a", "b"))
    on_main = [thread for _, thread in read_ahead(data, torch.arange(2).split(1), lambda rows: threading.current_thread())]
    assert set(on_main) == {threading.main_thread()}
