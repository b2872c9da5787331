"""How far long work is: a line in the log of FLARE's processes, and on every command's console."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from medflare.core.text import escaped, format_seconds

_FIRST = 5.0  # seconds until the first line ...
_EVERY = 10.0  # ... and between two
_LITTLE = 20.0  # seconds
_log = logging.getLogger(__name__)
T = TypeVar("T")


def with_progress(
    items: Iterable[T], total: int, what: str, size: Callable[[T], int] = lambda item: 1
) -> Iterator[T]:
    """The items, while the log tells how many of them are done, also between slow ones.

    Args:
        items: each is done when the next one is requested.
        total: how many there are.
        what: the items, for the log: "site A, images read".
        size: how many an item counts for, for example the images of a batch.
    """
    start = time.monotonic()
    due = start + _FIRST
    slowest = 0.0
    before = start
    done = 0
    for item in items:
        now = time.monotonic()
        if done:
            slowest = max(slowest, now - before)
        before = now
        if now + slowest > due:  # the next item may take as long
            seconds = now - start
            left = ""
            if done:
                left = f", about {format_seconds(seconds / done * (total - done))} left"
            _log.info("%s: %d of %d after %.0f s%s", what, done, total, seconds, left)
            due = now + _EVERY
        yield item
        done += size(item)


def announce(line: str) -> None:
    """Say in the log what begins now, if it can take seconds and nothing counts it."""
    _log.info("%s", line)


@dataclass
class RoundsLeft:
    """The time that the rest of a run takes, if its rounds go on as fast; "" within a round and
    when little is left.
    """

    rounds: int
    first: tuple[int, float] | None = None  # round and its time
    last: int = 0  # round

    def after(self, round: int) -> str:
        """ "about 5 min left", once a round; `round` counts from 0."""
        now = time.monotonic()
        if self.first is None:
            self.first = (round, now)
            self.last = round
        if round == self.last:
            return ""
        self.last = round
        first, start = self.first
        seconds = (now - start) / (round - first) * (self.rounds - round)
        if seconds <= _LITTLE:
            return ""
        return f"about {format_seconds(seconds)} left"


class _Printable(logging.Formatter):
    """Names of folders, which somebody else may have chosen, without terminal codes."""

    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


def print_lines() -> None:
    """Print the lines of this process and of those that are forked from it."""
    _log.setLevel(logging.INFO)
    _log.propagate = False
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable("medflare: %(message)s"))
    _log.handlers = [handler]
