"""Heartbeats and requests for work, which show the server that a site is alive; `task_exchange` has
the server's record of them.

FLARE's own heartbeat reaches no controller and is missing in its simulator; FLARE's polls for tasks
come at fixed intervals. A site therefore sends a heartbeat every two seconds while it has a task.
Before it polls, it asks whether there is work, and the server answers as soon as there is.
"""

import threading
import time
from typing import Any

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.cellnet.fqcn import FQCN

from medflare.flare.flare_patches import notice_lost_answers

ALIVE = "medflare.alive"  # topic, site to server, while the site has a task
# Topic, site to server, before a poll; answered when there is work, at the latest after LONG_POLL.
WORK = "medflare.work"
LONG_POLL = 0.5  # seconds
_INTERVAL = 2.0  # seconds between two heartbeats
_TRANSPORT = 5.0  # seconds that a request and its answer may take on the network
_UNREACHABLE = 60.0  # seconds after which a site that cannot reach the server polls anyway
_RETRY = 0.5  # seconds between two attempts to reach the server
_UNANSWERED = (ReturnCode.COMMUNICATION_ERROR, ReturnCode.TIMEOUT)


class Heartbeat:
    """Tells the server that the site is alive, from the poll that brings a task until the reply has
    been sent.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()

    def begin(self, fl_ctx: FLContext) -> None:
        """Send heartbeats from now on."""
        self.end()
        self._stop = threading.Event()
        threading.Thread(
            target=self._beat,
            args=(fl_ctx.get_engine(), self._stop),
            name="medflare_heartbeat",
            daemon=True,
        ).start()

    def end(self) -> None:
        """Send no more heartbeats."""
        self._stop.set()

    @staticmethod
    def _beat(engine: Any, stop: threading.Event) -> None:
        while not stop.wait(_INTERVAL):
            with engine.new_context() as fl_ctx:
                _tell_server(ALIVE, fl_ctx, timeout=0.0)


def wait_for_work(fl_ctx: FLContext) -> None:
    """Wait until the server has a task for this site, or has none for now; while the network is
    cut, wait up to a minute for it.
    """
    notice_lost_answers(fl_ctx)
    deadline = time.monotonic() + _UNREACHABLE
    while not _tell_server(WORK, fl_ctx, timeout=LONG_POLL + _TRANSPORT):
        if fl_ctx.get_run_abort_signal().triggered or time.monotonic() > deadline:
            return
        time.sleep(_RETRY)


def _tell_server(topic: str, fl_ctx: FLContext, timeout: float) -> bool:
    """Whether the server answered; a `timeout` of 0 does not wait for the answer."""
    replies = fl_ctx.get_engine().send_aux_request(
        targets=[FQCN.ROOT_SERVER],
        topic=topic,
        request=Shareable(),
        timeout=timeout,
        fl_ctx=fl_ctx,
        optional=True,
    )
    return any(reply.get_return_code() not in _UNANSWERED for reply in replies.values())
