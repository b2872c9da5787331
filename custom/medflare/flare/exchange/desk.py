"""The server's desk: takes the sites' signs of life, and holds their questions for work until there is some."""

from typing import TYPE_CHECKING, Any

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply

from medflare.flare.exchange.signs import ALIVE, PATIENCE, WORK

if TYPE_CHECKING:
    from medflare.flare.exchange.tasks import TaskExchange


class Desk:
    """Answers what sites ask beside their tasks.

    Attributes:
        exchange: the run's; None before the run begins, when sites may ask already.
    """

    def __init__(self) -> None:
        self.exchange: TaskExchange | None = None

    def open(self, engine: Any) -> None:
        """Take messages from now on."""
        engine.register_aux_message_handler(ALIVE, self.alive)
        engine.register_aux_message_handler(WORK, self.work)

    def alive(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        """A sign of life.

        Args:
            topic: not read.
            request: not read.
            fl_ctx: names the site.
        """
        if self.exchange is not None:
            self.exchange.watch.sign_of_life(_sender(fl_ctx))
        return make_reply(ReturnCode.OK)

    def work(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        """Holds a site's question for work until there is some: its poll then finds it.

        Args:
            topic: not read.
            request: not read.
            fl_ctx: names the site.
        """
        if self.exchange is not None:
            self.exchange.wait_for_task(_sender(fl_ctx), PATIENCE)
        return make_reply(ReturnCode.OK)


def _sender(fl_ctx: FLContext) -> str:
    return fl_ctx.get_peer_context().get_identity_name()
