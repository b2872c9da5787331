"""What a site and the server tell each other beside FLARE's tasks: signs of life, and that there is work.

FLARE's own heartbeat is missing in its simulator and takes minutes elsewhere; its polls for work come a fixed time apart, and
half a second apart in the simulator; and a message that is lost in a cut network leaves a site deaf for five minutes, until FLARE
stops waiting for the answer.
"""

import threading
import time
from collections.abc import Mapping
from typing import Any

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.cellnet.fqcn import FQCN

ALIVE = "medflare.alive"  # site to server, while it has a task
WORK = "medflare.work"  # site to server, before a poll; the answer comes when there is work, at the latest after PATIENCE
TENSORS = "medflare.tensors"  # header of a sign of life: what the site sends next may hold torch's tensors
LATER = "medflare.later"  # header of that answer: there is no work, and the site shall itself wait for PATIENCE
PATIENCE = 0.5  # seconds
_EVERY = 2.0  # seconds between two signs of life
_TRANSPORT = 5.0  # seconds that request and answer may take on their way
_STALLED = 30.0  # seconds without a byte of progress after which a poll or a result counts as lost and is sent again
_FETCHED_SIZE = 64 << 20  # bytes from which the server fetches a result's tensors one by one while the site waits ...
_FETCHED = 300.0  # ... which may take this long without the site seeing progress; FLARE's own limit
_UNREACHABLE = 60.0  # seconds after which a site that cannot reach the server polls all the same
_PAUSE = 0.5  # seconds between two attempts to reach it
_UNANSWERED = (ReturnCode.COMMUNICATION_ERROR, ReturnCode.TIMEOUT)


class Pulse:
    """Sends a sign of life to the server every two seconds, so that it can tell a site at work from a dead process.

    At work is a site from the poll that brings a task until its answer has been sent: over a slow line a model travels for minutes, and
    what filters of the site's own take counts as well.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()

    def begin(self, fl_ctx: FLContext) -> None:
        """From now on.

        Args:
            fl_ctx: finds the site's engine.
        """
        self.end()
        self._stop = threading.Event()
        threading.Thread(target=self._beat, args=(fl_ctx.get_engine(), self._stop), name="medflare_pulse", daemon=True).start()

    def end(self) -> None:
        """No more of them."""
        self._stop.set()

    @staticmethod
    def _beat(engine: Any, stop: threading.Event) -> None:
        while not stop.wait(_EVERY):
            with engine.new_context() as fl_ctx:
                _tell_server(ALIVE, fl_ctx, timeout=0.0)


def wait_for_work(fl_ctx: FLContext) -> None:
    """Returns when the server has a task for this site, or has none for the moment: the poll that follows seldom comes in vain.

    The server's answer also tells that it can be reached: no poll is sent into a cut network.
    """
    expect_answers(fl_ctx)
    deadline = time.monotonic() + _UNREACHABLE
    while (answer := _tell_server(WORK, fl_ctx, timeout=PATIENCE + _TRANSPORT)) is None:
        if fl_ctx.get_run_abort_signal().triggered or time.monotonic() > deadline:
            return
        time.sleep(_PAUSE)
    if answer.get_header(LATER):
        time.sleep(PATIENCE)


def announce_tensors(fl_ctx: FLContext) -> None:
    """Returns when the server can read torch's tensors: its process in the simulator has not imported torch."""
    _tell_server(ALIVE, fl_ctx, timeout=_UNREACHABLE, headers={TENSORS: True})


def expect_answers(fl_ctx: FLContext, result_bytes: int = 0) -> None:
    """Set how long FLARE waits for the server's answer to the poll or the result that is sent next.

    Args:
        fl_ctx: finds the site's communicator.
        result_bytes: size of the result; 0 for a poll.
    """
    communicator = fl_ctx.get_engine().client.communicator
    communicator.timeout = _STALLED if result_bytes < _FETCHED_SIZE else _FETCHED


def _tell_server(topic: str, fl_ctx: FLContext, timeout: float, headers: Mapping[str, Any] | None = None) -> Shareable | None:
    """The server's answer; None where there is none, or where `timeout` is 0 and nobody waits."""
    request = Shareable()
    for name, value in (headers or {}).items():
        request.set_header(name, value)
    replies = fl_ctx.get_engine().send_aux_request(
        targets=[FQCN.ROOT_SERVER], topic=topic, request=request, timeout=timeout, fl_ctx=fl_ctx, optional=True
    )
    return next((reply for reply in replies.values() if reply.get_return_code() not in _UNANSWERED), None)
