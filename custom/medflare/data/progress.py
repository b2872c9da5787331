"""How far long work is: a line in the log now and then, once it has taken a while.

Commands print these lines, and so does FLARE's simulator; elsewhere they are in a site's own log. They say whose images and how many.
"""

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
    """The items; the log tells how many of them are done.

    Args:
        items: each is done when the next one is asked for.
        total: how many there are.
        what: they are, and whose: "site A, images read".
        size: for how many an item counts, as a batch does for its images.
    """
    began, done = time.monotonic(), 0
    due = began + _FIRST
    for item in items:
        now = time.monotonic()
        if now > due:
            _log.info("%s: %d of %d after %.0f s", what, done, total, now - began)
            due = now + _EVERY
        yield item
        done += size(item)


class _Lines(logging.Handler):
    """Prints what it is given."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"medflare: {record.getMessage()}\n")


def print_lines() -> None:
    """From now on this process prints the lines, and those that are forked from it do."""
    _log.setLevel(logging.INFO)
    _log.propagate = False
    _log.handlers = [_Lines()]
