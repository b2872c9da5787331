"""Rows of a split read before they are needed, where they are not in memory."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from torch import Tensor

from medflare.data.splits import Samples

_AHEAD: Final = 2  # portions that are read, or waiting, while one is worked with

T = TypeVar("T")


def read_ahead(data: Samples, portions: Iterable[Tensor], read: Callable[[Tensor], T]) -> Iterator[tuple[Tensor, T]]:
    """Portions of rows with what was read of them, in order; from a disk by a thread, while the caller works with those before.

    Reading draws nothing, so that what is read does not depend on when it is.

    Args:
        data: the split.
        portions: rows, long (B,) each.
        read: rows -> what the caller needs of them.
    """
    if data.in_memory:
        yield from ((rows, read(rows)) for rows in portions)
        return
    waiting: deque[tuple[Tensor, Future[T]]] = deque()
    reader = ThreadPoolExecutor(1, "read-ahead")
    try:
        for rows in portions:
            waiting.append((rows, reader.submit(read, rows)))
            if len(waiting) > _AHEAD:
                yield _first(waiting)
        while waiting:
            yield _first(waiting)
    finally:  # the caller may have had enough, or be asked to stop
        reader.shutdown(cancel_futures=True)


def _first(waiting: deque[tuple[Tensor, Future[T]]]) -> tuple[Tensor, T]:
    rows, found = waiting.popleft()
    return rows, found.result()
