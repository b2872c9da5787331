"""Waiting for what other threads and processes do, with an end to it."""

import time
from collections.abc import Callable


def eventually(true: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether it becomes true within so many seconds."""
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return true()
