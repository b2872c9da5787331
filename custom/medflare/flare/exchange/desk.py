"""The server's desk: takes the sites' signs of life, and holds their questions for work until there is some.

A question that is held keeps one of FLARE's threads for incoming messages. FLARE 2.9 has a hundred for all of them and 64 for what comes
in pieces, as results do: with more idle sites than that, nobody would read the results of the others. Beyond some questions the desk
therefore lets the site itself wait.
"""

import threading
from typing import TYPE_CHECKING, Any, Final

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply

from medflare.flare.exchange.signs import ALIVE, LATER, PATIENCE, TENSORS, WORK
from medflare.flare.exchange.wire import register_tensors

if TYPE_CHECKING:
    from medflare.flare.exchange.tasks import TaskExchange

HELD: Final = 32  # questions at the same time


class Desk:
    """Answers what sites ask beside their tasks.

    Attributes:
        exchange: the run's; None before the run begins, when sites may ask already.
    """

    def __init__(self) -> None:
        self.exchange: TaskExchange | None = None
        self._places = threading.BoundedSemaphore(HELD)

    def open(self, engine: Any) -> None:
        """Take messages from now on."""
        engine.register_aux_message_handler(ALIVE, self.alive)
        engine.register_aux_message_handler(WORK, self.work)

    def alive(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        """A sign of life.

        Args:
            topic: not read.
            request: may announce tensors.
            fl_ctx: names the site.
        """
        if request.get_header(TENSORS):
            register_tensors()
        if self.exchange is not None:
            self.exchange.watch.sign_of_life(_sender(fl_ctx))
        return make_reply(ReturnCode.OK)

    def work(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        """Holds a site's question for work until there is some: its poll then finds it. Where many are held, the site is to wait itself.

        Args:
            topic: not read.
            request: not read.
            fl_ctx: names the site.
        """
        reply = make_reply(ReturnCode.OK)
        if self.exchange is not None:
            held = self._places.acquire(blocking=False)
            try:
                ready = self.exchange.wait_for_task(_sender(fl_ctx), PATIENCE if held else 0.0)
            finally:
                if held:
                    self._places.release()
            reply.set_header(LATER, not (held or ready))
        return reply


def _sender(fl_ctx: FLContext) -> str:
    return fl_ctx.get_peer_context().get_identity_name()
