"""Events of a run: the list `events` of results.json.

An event is a dict {"round", "site", "kind", "message"}, so that a site can send its events as
metadata. `round` and `site` are None if the event belongs to no round or to the whole federation.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from medflare.core.text import Json, printable

Event = dict[str, Any]

KINDS = (
    "rejected",  # an update was not used: not finite, wrong shape, wrong entries, no samples
    "late",  # an update came after its step was closed
    "missing",  # a site sent no reply
    "suspicious",  # used although it is against all others: an error, attack or different patients
    "undefined",  # a metric has no value, for example AUC of an absent class
    "failed",  # a site's task, or the run, ended with an error
    "reverted",  # a deployed model reverted its adaptation
    "left_out",  # an image that cannot be used and that the task allows to skip
    "joined",  # a site enrolled after the first round
    "repeated",  # the request of a step was sent again
    "resumed",  # a run or a site continued from its stored state
    "stopped_early",  # training ended before its last round: no validated model became better
    "aborted",  # stopped from outside
    "constant_output",  # the deployed model always predicts one class, or no pixel of a structure
    "at_chance",  # the deployed model is no better than the constant prediction
    "few_validation_images",  # the deployed model was chosen on fewer than ten validation images
    "rare_class",  # a site has fewer than three training images of a class
    "warning",  # everything else
)
# Of the deployed model: shown before its metrics.
DOUBTS = ("constant_output", "at_chance", "few_validation_images", "rare_class")
_MOST_OF_SITE = 1000
# A site may send these; the others are the server's.
SENT_BY_SITES = ("undefined", "reverted", "left_out", *DOUBTS, "warning")


class EventLog:
    """Events in the order in which they were added."""

    def __init__(self, events: Iterable[Json] = ()):
        self._events: list[Event] = []
        self._of_site: Counter[str] = Counter()  # events of a site, but its doubts
        self.restored = 0  # events of an interrupted run, which come first
        self.extend(events)

    def add(
        self, kind: str, message: str, site: str | None = None, round: int | None = None
    ) -> None:
        """Add an event; `message` becomes one printable line, `round` is 0-based. Of a
        site the first 1000 are stored and all doubts about its model: they are in every checkpoint.

        ValueError: `kind` is not in `KINDS`.
        """
        if kind not in KINDS:
            raise ValueError(f"unknown kind of event {kind!r}; allowed are {', '.join(KINDS)}")
        event = {"round": round, "site": site, "kind": kind, "message": printable(str(message))}
        if site is not None and kind not in DOUBTS:
            self._of_site[site] += 1
            if self._of_site[site] > _MOST_OF_SITE:
                return
            if self._of_site[site] == _MOST_OF_SITE:
                event |= {"kind": "warning", "message": "further events of the site are left out"}
        self._events.append(event)

    def extend(
        self, events: Iterable[Json], site: str | None = None, round: int | None = None
    ) -> None:
        """Add events as mappings; `site` and `round` are used for those without."""
        for event in events:
            given = {name: value for name, value in event.items() if value is not None}
            self.add(**{"site": site, "round": round, **given})

    def restore(self, events: Iterable[Json]) -> None:
        """Put the events of the interrupted run before those of the run that resumes it."""
        earlier = EventLog(events)
        self.restored = len(earlier)
        self._events[:0] = earlier.to_list()
        self._of_site += earlier._of_site

    def of(self, *kinds: str) -> list[Event]:
        """The events of the given kinds."""
        return [event for event in self if event["kind"] in kinds]

    def to_list(self) -> list[Event]:
        """A copy of the events."""
        return [dict(event) for event in self._events]

    def __iter__(self) -> Iterator[Event]:
        return iter(tuple(self._events))  # a snapshot: another thread may add while this one reads

    def __len__(self) -> int:
        return len(self._events)
