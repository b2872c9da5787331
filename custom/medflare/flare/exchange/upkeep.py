"""Keeps the threads and the memory of a process constant while a federation runs.

FLARE 2.9 remembers every received stream for 65 s, so that it can acknowledge chunks that are sent again, and starts a
sleeping timer thread for each of them. Every answer to a site's poll for work is such a stream: at ten polls a second a
process collects hundreds of threads. Here one thread looks after all of them; what is remembered, and for how long, stays.

Messages are made and read by many threads, and the C library keeps for each what it has freed: in four hundred rounds of a small
network a site's process in the simulator grew by half. What is free goes back to the system after every task.
"""

import ctypes
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from nvflare.fuel.f3.streaming.byte_receiver import RxTask

_log = logging.getLogger(__name__)


class DelayedCall:
    """A call that is due at a moment of the monotonic clock, unless it is cancelled before."""

    def __init__(self, due: float, function: Callable[[], None]):
        self.due = due
        self.function: Callable[[], None] | None = function

    def cancel(self) -> None:
        """Nothing happens when the call is due."""
        self.function = None  # the heap forgets it when it is due


class DelayedCalls:
    """Any number of delayed calls on one daemon thread, which exists only while something is due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, DelayedCall]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def after(self, seconds: float, function: Callable[[], None]) -> DelayedCall:
        """Call `function` in so many seconds, unless what is returned is cancelled."""
        call = DelayedCall(time.monotonic() + seconds, function)
        with self._changed:
            heapq.heappush(self._heap, (call.due, next(self._order), call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="stream_cleanup", daemon=True)
                self._thread.start()
            self._changed.notify()
        return call

    def _run(self) -> None:
        while (call := self._next()) is not None:
            if (function := call.function) is None:
                continue
            try:
                function()
            except Exception:  # one stream's trouble must not keep the others in memory
                _log.exception("clean-up of a stream failed")

    def _next(self) -> DelayedCall | None:
        """Waits for the call that is due first; None, which ends the thread, where none is left."""
        with self._changed:
            while self._heap:
                wait = self._heap[0][0] - time.monotonic()
                if wait <= 0:
                    return heapq.heappop(self._heap)[2]
                self._changed.wait(wait)
            self._thread = None
            return None


_CLEANUPS = DelayedCalls()


def share_cleanup_thread() -> None:
    """Let all received streams of this process share one clean-up thread; calling it again changes nothing."""
    RxTask._schedule_remove_task = _schedule_remove_task


def _schedule_remove_task(task: RxTask, ttl: float | None = None) -> None:
    with task.stop_lock:
        if task.cleanup_timer is None:
            task.cleanup_timer = _CLEANUPS.after(task.completed_task_ttl if ttl is None else ttl, task._remove_task)


def give_back_memory() -> None:
    """Give the system what this process has freed, where its C library can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
