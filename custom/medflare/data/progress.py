"""How far long work is: a line in the log of FLARE's processes, and on the console of every command."""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

_FIRST: Final = 5.0  # seconds until the first line ...
_EVERY: Final = 30.0  # ... and between two
_log = logging.getLogger(__name__)
T = TypeVar("T")


def counted(items: Iterable[T], total: int, what: str, size: Callable[[T], int] = lambda item: 1) -> Iterator[T]:
    """The items, while the log tells how many of them are done.

    Args:
        items: each is done when the next one is requested.
        total: how many there are.
        what: the items, for the log: "site A, images read".
        size: how many an item counts for, for example the images of a batch.
    """
    start, done = time.monotonic(), 0
    due = start + _FIRST
    for item in items:
        now = time.monotonic()
        if now > due:
            _log.info("%s: %d of %d after %.0f s", what, done, total, now - start)
            due = now + _EVERY
        yield item
        done += size(item)


class _StandardError(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"medflare: {record.getMessage()}\n")


def print_lines() -> None:
    """Print the lines of this process and of those that are forked from it."""
    _log.setLevel(logging.INFO)
    _log.propagate = False
    _log.handlers = [_StandardError()]
