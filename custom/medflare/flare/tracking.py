"""The progress of a run as lines for the job's log and FLARE's job statistics, and the MLflow
server that a job names.
"""

import threading
from collections import deque

from nvflare.apis.fl_component import FLComponent

from medflare.core.events import Event, EventLog
from medflare.core.text import JsonDict, Say

GROUP = "medflare"  # in FLARE's statistics of the job
MLFLOW = "mlflow"  # id of the component `MLflowTracker`
NOTED = "medflare: noted: "  # in the job's log, before an event
_LINES = 200  # that the statistics hold: who asks every few seconds misses none


class Progress:
    """The lines of a run and its events, for the job's log and FLARE's statistics.

    `medflare job watch` and `nvflare job stats` show the statistics.

    Attributes:
        log: writes a line to the job's log.
    """

    def __init__(self, events: EventLog):
        self.log: Say = lambda line: None
        self._events = events
        self._taken = 0  # events of this run that are among the lines
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._lock = threading.RLock()

    def say(self, line: str) -> None:
        """Take a line."""
        with self._lock:
            self.take_events()
            self._add(line, "")

    def take_events(self) -> None:
        """Take the new events; `jobs.watching` finds them in the log after the end of the job."""
        with self._lock:
            new = list(self._events)[self._events.restored + self._taken :]
            self._taken += len(new)
            for event in new:
                self._add(event_line(event), NOTED)

    def to_dict(self) -> JsonDict:
        """The last lines, under `lines`."""
        with self._lock:
            self.take_events()
            return {"lines": list(self._lines)}

    def _add(self, line: str, prefix: str) -> None:
        self.log(f"{prefix}{line}")
        self._lines.append(line)


def event_line(event: Event) -> str:
    """An event in one line.

    Examples:
        >>> event_line({"kind": "missing", "site": "B", "round": 3, "message": "no sign of life"})
        'missing: B (round 4): no sign of life'
    """
    where = event["site"] or ""
    if event["round"] is not None:
        where = f"{where} (round {event['round'] + 1})".lstrip()
    return ": ".join(part for part in (event["kind"], where, event["message"]) if part)


class MLflowTracker(FLComponent):
    """A component with the job's setting `track` if it is "mlflow" or "mlflow=URI".

    A server whose class_allow_list lacks this class refuses such jobs.
    """

    def __init__(self, track: str = MLFLOW):
        super().__init__()
        self.track = track
