"""Everything in which medflare changes or reaches into FLARE 2.9's internals; docs/flare.md has the measurements and when each can go."""

import asyncio
import random
import socket
import sys
import threading
import weakref
from contextlib import suppress
from functools import cache
from typing import Any, Final

from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.streaming.byte_receiver import RxTask

_SIMULATOR: Final = "nvflare.private.fed.app.simulator.simulator_runner"
_PORTS: Final = range(10_000, 30_000)  # above those of services, below those that Linux (from 32768) and others (from 49152) hand out
_ANSWER: Final = 30.0  # seconds after which the answer to a poll for a task counts as lost; FLARE waits 300 s


def share_cleanup_thread() -> None:
    """One thread forgets all received streams of this process; FLARE starts a timer thread, which lives for 65 s, for each of them."""
    RxTask._schedule_remove_task = _schedule_remove_task


class _Scheduled:
    """Stands where FLARE has its timer; a stream that is removed earlier is forgotten with it."""

    def cancel(self) -> None:
        """As of a timer."""


def _schedule_remove_task(task: RxTask, ttl: float | None = None) -> None:
    with task.stop_lock:
        if task.cleanup_timer is None:
            task.cleanup_timer = _Scheduled()
            seconds = task.completed_task_ttl if ttl is None else ttl
            _cleanup_loop().call_soon_threadsafe(_cleanup_loop().call_later, seconds, _remove, weakref.ref(task))


def _remove(stream: "weakref.ref[RxTask]") -> None:
    if (task := stream()) is not None:
        task._remove_task()


@cache
def _cleanup_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="stream_cleanup", daemon=True).start()
    return loop


class _Sent(dict[str, Any]):
    """FLARE's map of the tasks that sites have, from which one may be taken twice."""

    def pop(self, key: str, default: Any = None) -> Any:
        """The task, or the default."""
        return super().pop(key, default)


def survive_resends(communicator: Any) -> None:
    """FLARE's task monitor survives a site that fetches its task twice (a lost answer, a restart), where it dies of a KeyError.

    No task would be forgotten from then on, its model neither, and no dead site noticed.
    """
    communicator._client_task_map = _Sent(communicator._client_task_map)


def notice_lost_answers(fl_ctx: FLContext) -> None:
    """A site's poll for a task is sent again after half a minute instead of five, as after a cut network."""
    fl_ctx.get_engine().client.communicator.timeout = _ANSWER


def keep_ports_apart() -> None:
    """The simulator of this process, if it is one, gives its sites ports that the system gives to no connection."""
    if runner := sys.modules.get(_SIMULATOR):
        runner.get_open_ports = quiet_ports  # type: ignore[attr-defined]


def quiet_ports(number: int) -> list[int]:
    """So many different ports below those that the system hands out.

    Bound, never listened on: FLARE's forks would inherit a listening socket, and a site that connects to it is reset.
    """
    found: set[int] = set()
    draw = random.SystemRandom()  # no seed: two simulators of one machine must not draw the same
    while len(found) < number:
        port = draw.choice(_PORTS)
        with suppress(OSError), socket.socket() as bound:
            bound.bind(("localhost", port))
            found.add(port)
    return sorted(found)
