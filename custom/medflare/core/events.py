"""What went wrong or deserves notice in a run, by name: the list that ends up under `events` in results.json.

An event is a plain mapping {"round", "site", "kind", "message"}, so that a site can send its events among the meta of a
message and the server can join them to its own. `round` and `site` are None where an event belongs to no round or to the
whole federation.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from medflare.core.text import printable

Event = dict[str, Any]

KINDS: Final = (
    "rejected",  # an update came and was not used: not finite, wrong shape, missing or unknown entry, no samples
    "late",  # an update came after its step was closed
    "missing",  # no update came from a site that was asked for one
    "suspicious",  # an update or a vote was used though it is against all others: wrong, a lie, or patients unlike the others'
    "undefined",  # a metric has no value, for example AUC of a class that is absent
    "failed",  # a site's task, or the run, ended with an error
    "reverted",  # a delivered model's own safeguard took back what the model had adapted to
    "left_out",  # an image that cannot be used and that the task allows to skip
    "joined",  # a site came in after the first round
    "left",  # a site went away before the last round
    "repeated",  # a step or round was done again, for example after a restart
    "resumed",  # a run or a site went on from its stored state
    "stopped_early",  # training ended before its last round, since nothing became better any more
    "aborted",  # stopped from outside
    "constant_output",  # the deployed model says the same of every test image: one class, no pixel, or no pixel of a structure
    "at_chance",  # the deployed model is not above the constant answer by the task's metric
    "few_validation_images",  # the deployed model was chosen on fewer than ten validation images
    "rare_class",  # a site has fewer than three training images of a class
    "warning",  # everything else that a reader of the results should know
)
DOUBTS: Final = ("constant_output", "at_chance", "few_validation_images", "rare_class")  # of the deployed model: shown before its metrics
OF_SITES: Final = ("undefined", "reverted", "left_out", *DOUBTS, "warning")  # what a site may say of itself; the others are the server's


class EventLog:
    """Events in the order in which they were added.

    Args:
        events: those to begin with, see the module.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]] = ()):
        self._events: list[Event] = []
        self.extend(events)

    def add(self, kind: str, message: str, *, site: str | None = None, round: int | None = None) -> Event:
        """Note one event and return it.

        Args:
            kind: one of `KINDS`.
            message: one line that says what happened and what was done about it.
            site: the site concerned, None for the federation as a whole.
            round: 0-based round, None where no round is concerned.

        Raises:
            ValueError: `kind` is not one of `KINDS`.
        """
        if kind not in KINDS:
            raise ValueError(f"unknown kind of event {kind!r}; known are {', '.join(KINDS)}")
        event = {"round": round, "site": site, "kind": kind, "message": printable(str(message))}
        self._events.append(event)
        return event

    def extend(self, events: Iterable[Mapping[str, Any]], *, site: str | None = None, round: int | None = None) -> None:
        """Add events that came from elsewhere, filling in `site` and `round` where they leave them open.

        Args:
            events: mappings with "kind" and "message"; "site" and "round" may be None or missing.
            site: for events that name none.
            round: for events that name none.
        """
        for event in events:
            own_site, own_round = event.get("site"), event.get("round")
            self.add(
                event["kind"],
                event["message"],
                site=site if own_site is None else own_site,
                round=round if own_round is None else own_round,
            )

    def replace(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Start over with these events: a resumed run takes up those of the run before it."""
        self._events.clear()
        self.extend(events)

    def of(self, *kinds: str, site: str | None = None) -> list[Event]:
        """The events of the given kinds (all kinds where none is given), of one site where `site` is given."""
        return [event for event in self if (not kinds or event["kind"] in kinds) and site in (None, event["site"])]

    def to_list(self) -> list[Event]:
        """A copy that is safe to change and to write as JSON."""
        return [dict(event) for event in self._events]

    def __iter__(self) -> Iterator[Event]:
        return iter(tuple(self._events))  # a snapshot: another thread may add while this one reads

    def __len__(self) -> int:
        return len(self._events)
