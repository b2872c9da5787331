"""What asks this process to end, as Ctrl-C does."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interruptible(handler: Callable[..., Any] = signal.default_int_handler) -> Iterator[None]:
    """Within the context, SIGTERM and the end of the terminal raise KeyboardInterrupt as Ctrl-C
    does, so that this process cleans up and ends its own processes. What it ignores stays ignored.
    """
    in_main = threading.current_thread() is threading.main_thread()
    before = {stop: signal.getsignal(stop) for stop in _STOPS if in_main}
    stops = [stop for stop, current in before.items() if current != signal.SIG_IGN]
    for stop in stops:
        signal.signal(stop, handler)
    try:
        yield
    finally:
        for stop in stops:
            signal.signal(stop, before[stop])
