"""What a site and the server tell each other beside FLARE's tasks: signs of life, and that there is work.

FLARE's own heartbeat is missing in its simulator and takes minutes elsewhere; its polls for work come a fixed time apart, and
half a second apart in the simulator.
"""

import threading
from types import TracebackType

from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.cellnet.fqcn import FQCN

ALIVE = "medflare.alive"  # site to server, while a task runs
WORK = "medflare.work"  # site to server, before a poll; the answer comes when there is work, at the latest after PATIENCE
PATIENCE = 0.5  # seconds
_EVERY = 2.0  # seconds between two signs of life
_TRANSPORT = 5.0  # seconds that request and answer may take on their way


class Pulse:
    """Sends a sign of life to the server every two seconds while the block runs, so that it can tell long training from a dead process."""

    def __init__(self, fl_ctx: FLContext):
        self._engine = fl_ctx.get_engine()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="medflare_pulse", daemon=True)

    def __enter__(self) -> "Pulse":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()

    def _beat(self) -> None:
        while not self._stop.wait(_EVERY):
            with self._engine.new_context() as fl_ctx:
                _tell_server(ALIVE, fl_ctx, timeout=0.0)


def wait_for_work(fl_ctx: FLContext) -> None:
    """Returns when the server has a task for this site, or has none for the moment: the poll that follows seldom comes in vain."""
    _tell_server(WORK, fl_ctx, timeout=PATIENCE + _TRANSPORT)


def _tell_server(topic: str, fl_ctx: FLContext, timeout: float) -> None:
    engine = fl_ctx.get_engine()
    engine.send_aux_request(targets=[FQCN.ROOT_SERVER], topic=topic, request=Shareable(), timeout=timeout, fl_ctx=fl_ctx, optional=True)
