"""What makes a run's deployed model doubtful, in plain words and with the remedy: above the report, and under the result table."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from medflare.core.events import DOUBTS

_MOST: Final = 5  # events that a line tells in full
_WORDS: Final = {
    "constant_output": (
        "The deployed model gives one answer for all test images",
        "Do not use it: train more rounds, start from pretrained weights (--pretrained), lower the learning rate, or bring more images",
    ),
    "at_chance": (
        "The deployed model is not better than the constant answer, which looks at no image",
        "Train more rounds, start from pretrained weights (--pretrained), or bring more images",
    ),
    "few_validation_images": (
        "The deployed model was chosen on fewer than ten validation images",
        "Give validation more patients (medflare data init --shares), or deliver the last round (--set selection=last)",
    ),
    "rare_class": (
        "Classes with too few training images to be learnt at a site",
        "Join them with other classes, bring more images of them, or do not trust the model on them",
    ),
}


@dataclass(frozen=True)
class Doubt:
    """One reason to doubt the deployed model.

    Attributes:
        kind: of its events, one of `core.events.DOUBTS`.
        words: what is wrong.
        where: at which sites, with what they say.
        remedy: what helps.
    """

    kind: str
    words: str
    where: str
    remedy: str

    @property
    def line(self) -> str:
        """All of it as one line."""
        return f"{self.kind}: {self.words} ({self.where}). {self.remedy}."


def doubts(events: Iterable[Mapping[str, Any]]) -> list[Doubt]:
    """The reasons to doubt a deployed model, in the order of `core.events.DOUBTS`.

    Examples:
        >>> event = {"kind": "rare_class", "site": "A", "message": "few"}
        >>> [doubt.where for doubt in doubts([event, {"kind": "warning", "site": "A", "message": "late"}])]
        ['A: few']
    """
    told: dict[str, dict[str, None]] = {}
    for event in events:
        if event["kind"] in DOUBTS:
            told.setdefault(event["kind"], {})[f"{event['site']}: {event['message']}" if event["site"] else event["message"]] = None
    return [Doubt(kind, _WORDS[kind][0], _shortened(list(told[kind])), _WORDS[kind][1]) for kind in DOUBTS if kind in told]


def _shortened(lines: list[str]) -> str:
    more = len(lines) - _MOST
    return "; ".join(lines[:_MOST]) + (f"; and {more} more, see the events" if more > 0 else "")
