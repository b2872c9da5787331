"""Who lives and who has work: heartbeats and questions for work from the sites, and the server's record of them.

FLARE's own heartbeat reaches no controller and is missing in its simulator; its polls for work come a fixed time apart, half a second in
the simulator. So a site says every two seconds that it lives while it has a task, and asks for work before it polls; the server answers
as soon as there is some (long polling).
"""

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.cellnet.fqcn import FQCN

from medflare.flare.flare_patches import notice_lost_answers

ALIVE = "medflare.alive"  # topic, site to server: while it has a task
WORK = "medflare.work"  # topic, site to server, before a poll: answered when there is work, at the latest after PATIENCE
PATIENCE = 0.5  # seconds
_EVERY = 2.0  # seconds between two heartbeats
_TRANSPORT = 5.0  # seconds that request and answer may take on their way
_UNREACHABLE = 60.0  # seconds after which a site that cannot reach the server polls all the same
_PAUSE = 0.5  # seconds between two attempts to reach it
_PROCESSES = 1.0  # seconds between two looks at the sites' processes, where they can be seen
_UNANSWERED = (ReturnCode.COMMUNICATION_ERROR, ReturnCode.TIMEOUT)


# -- at a site -----------------------------------------------------------------------------------------------------------------


class Heartbeat:
    """Tells the server that the site lives, from the poll that brings a task until its answer has been sent."""

    def __init__(self) -> None:
        self._stop = threading.Event()

    def begin(self, fl_ctx: FLContext) -> None:
        """From now on."""
        self.end()
        self._stop = threading.Event()
        threading.Thread(target=self._beat, args=(fl_ctx.get_engine(), self._stop), name="medflare_heartbeat", daemon=True).start()

    def end(self) -> None:
        """No more of them."""
        self._stop.set()

    @staticmethod
    def _beat(engine: Any, stop: threading.Event) -> None:
        while not stop.wait(_EVERY):
            with engine.new_context() as fl_ctx:
                _tell_server(ALIVE, fl_ctx, timeout=0.0)


def wait_for_work(fl_ctx: FLContext) -> None:
    """Return when the server has a task for this site, or none for the moment; no poll is sent into a cut network."""
    notice_lost_answers(fl_ctx)
    deadline = time.monotonic() + _UNREACHABLE
    while not _tell_server(WORK, fl_ctx, timeout=PATIENCE + _TRANSPORT):
        if fl_ctx.get_run_abort_signal().triggered or time.monotonic() > deadline:
            return
        time.sleep(_PAUSE)


def _tell_server(topic: str, fl_ctx: FLContext, timeout: float) -> bool:
    """Whether the server answers; with a `timeout` of 0 nobody waits for that."""
    replies = fl_ctx.get_engine().send_aux_request(
        targets=[FQCN.ROOT_SERVER], topic=topic, request=Shareable(), timeout=timeout, fl_ctx=fl_ctx, optional=True
    )
    return any(reply.get_return_code() not in _UNANSWERED for reply in replies.values())


# -- at the server -------------------------------------------------------------------------------------------------------------


@dataclass
class Liveness:
    """What the server hears of its sites.

    Attributes:
        heartbeat_timeout: seconds without a sign of life after which a site counts as gone.
        dead: tells the sites whose process ended, where processes can be seen, that is in the simulator.
        heard: site -> when it was heard of last, on the monotonic clock.
        lost: sites that are given up until they are heard of again.
        died: those of them whose process was seen to be gone.
        behind: sites whose enrolment was closed before they answered; they are asked again when they ask for work.
        served: sites that have fetched a task of this job, so that the server must know their registration.
        refused: sites that ask again and again for a task that lies ready and that FLARE does not give them, as after a preflight check
            of a running site has voided its registration. Their questions are no sign of life, else a run would wait for ever.
    """

    heartbeat_timeout: float
    dead: Callable[[], Collection[str]] | None = None
    heard: dict[str, float] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    died: set[str] = field(default_factory=set)
    behind: set[str] = field(default_factory=set)
    served: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    _asked: set[str] = field(default_factory=set)  # once for a task that lay ready
    _without_process: Collection[str] = ()
    _looked: float = field(default_factory=time.monotonic)

    def heard_of(self, site: str) -> None:
        """The site was heard of just now, and is not given up any more."""
        self.heard[site] = time.monotonic()
        self.lost.discard(site)
        self.died.discard(site)

    def question(self, site: str, ready: bool) -> None:
        """The site asks for work."""
        if ready and site not in self.served:
            (self.refused if site in self._asked else self._asked).add(site)
        if site not in self.refused:
            self.behind.discard(site)
            self.heard_of(site)

    def fetched(self, site: str) -> None:
        """The site got its task."""
        self.served.add(site)
        self.refused.discard(site)
        self.heard_of(site)

    def silent_since(self, site: str, *moments: float) -> float:
        """Seconds since the site was heard of or the latest of `moments`, whichever is shorter ago."""
        return time.monotonic() - max(self.heard.get(site, 0.0), *moments)

    def look(self) -> None:
        """Look at the sites' processes, if it is time to; what was seen holds until the next call, as a site may have another one then."""
        due = self.dead is not None and time.monotonic() - self._looked > _PROCESSES
        self._without_process = self.dead() if self.dead is not None and due else ()
        self._looked = time.monotonic() if due else self._looked

    def gone(self, site: str, step: str, fetched: bool, since: float, busy: float) -> str:
        """Why a site that was asked cannot be expected to answer; empty as long as it can.

        A site that has not fetched its task may be waiting for its turn (FLARE's simulator with fewer threads than sites): that it has no
        process means nothing then, and its silence counts only while no other site is at work either.

        Args:
            site: its name.
            step: what it was asked, as the reason names it.
            fetched: whether it has its task.
            since: when it was asked, on the monotonic clock.
            busy: when a site was at work last, on the monotonic clock.
        """
        if fetched and site in self._without_process:
            self.died.add(site)
        if site in self.died:
            return f"its process died; {step} goes on without the site"
        if self.silent_since(site, since if fetched else max(since, busy)) <= self.heartbeat_timeout:
            return ""
        if site in self.refused:
            return f"asks for work and is refused it in {step}: its registration is void, as after a preflight check; restart the site"
        return f"no sign of life in {step}; going on without the site"

    def there(self, site: str) -> bool:
        """Whether the site can be asked."""
        return site not in self.lost and site not in self.behind
