"""A site's sign of life while a task runs, so that the server can tell a long training from a dead process.

FLARE's own heartbeat is missing in the simulator and takes minutes elsewhere.
"""

import threading
from types import TracebackType

from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.cellnet.fqcn import FQCN

TOPIC = "medflare.alive"
_EVERY = 2.0  # seconds


class Pulse:
    """Sends a sign of life to the server every two seconds while the block runs."""

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
                self._engine.send_aux_request(
                    targets=[FQCN.ROOT_SERVER], topic=TOPIC, request=Shareable(), timeout=0.0, fl_ctx=fl_ctx, optional=True
                )
