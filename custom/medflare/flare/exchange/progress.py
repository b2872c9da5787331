"""What a running job tells who asks FLARE for its statistics (`medflare job watch`, `nvflare job stats`), by the right "view"."""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext

from medflare.core.events import Event, EventLog

if TYPE_CHECKING:
    from medflare.flare.exchange.tasks import TaskExchange

GROUP: Final = "medflare"  # in FLARE's statistics of the job
NOTED: Final = "medflare: noted: "  # before an event in the job's log
_KEPT = 200  # lines: who asks every few seconds misses none


class Progress:
    """The lines that a run says, those of its events among them, and whom it waits for.

    Args:
        events: of the run; new ones are noticed when a line comes or somebody asks.
    """

    def __init__(self, events: EventLog):
        self._events = events
        self._seen = self._logged = 0
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._count = 0
        self._lock = threading.Lock()

    def say(self, line: str) -> None:
        """Take a line."""
        with self._lock:
            self._take_events()
            self._add(line)

    def unlogged(self) -> list[str]:
        """The lines for the log of all events that came since this was asked last."""
        with self._lock:
            new = list(self._events)[self._logged :]
            self._logged += len(new)
        return [f"{NOTED}{event_line(event)}" for event in new]

    def to_dict(self, exchange: "TaskExchange | None") -> dict[str, Any]:
        """As JSON has it: `count` of all lines so far, the last of them as `lines`, and what `TaskExchange.waiting` says.

        Args:
            exchange: of the run; None before it begins.
        """
        with self._lock:
            self._take_events()
            told = {"count": self._count, "lines": list(self._lines)}
        return told if exchange is None else {**told, **exchange.waiting()}

    def _take_events(self) -> None:
        new = list(self._events)[self._seen :]
        self._seen += len(new)
        for event in new:
            self._add(event_line(event))

    def _add(self, line: str) -> None:
        self._lines.append(line)
        self._count += 1


class Journal:
    """What a run tells while it goes on: to the job's log, to who asks for statistics, to FLARE's trackers.

    Args:
        component: writes to the log.
        fl_ctx: of the job.
        events: of the run.
        progress: of the same events.
        observe: takes steps, see `StepReport.line`.
    """

    def __init__(
        self, component: FLComponent, fl_ctx: FLContext, events: EventLog, progress: Progress, observe: Callable[[Mapping[str, Any]], None]
    ):
        self.events, self.observe = events, observe
        self._component, self._fl_ctx, self._progress = component, fl_ctx, progress

    def say(self, line: str) -> None:
        """Take a line of the run's."""
        self.log_events()
        self._component.log_info(self._fl_ctx, line)
        self._progress.say(line)

    def log_events(self) -> None:
        """Events go to the log as they come: there finds them who begins to watch when the job is over, see `jobs.watching`."""
        for line in self._progress.unlogged():
            self._component.log_info(self._fl_ctx, line)


def event_line(event: Event) -> str:
    """An event in one line.

    Args:
        event: see `core.events`.

    Examples:
        >>> event_line({"kind": "missing", "site": "B", "round": 3, "message": "no sign of life"})
        'missing: B (round 3): no sign of life'
        >>> event_line({"kind": "warning", "site": None, "round": None, "message": "two sites only"})
        'warning: two sites only'
    """
    where = " ".join(filter(None, [event["site"], "" if event["round"] is None else f"(round {event['round']})"]))
    return ": ".join(filter(None, [event["kind"], where, event["message"]]))
