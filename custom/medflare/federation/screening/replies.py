"""The gate for every reply, whatever the phase: what it may look like before anybody works with it.

A site is believed to be honest and may still be wrong: a full disk, a wrong version, a method of one's own. Nothing that it sends may
raise an error anywhere behind this gate.
"""

import re
from collections.abc import Mapping
from typing import Final

from medflare.core.manifest import Fact, count, listing, models, number, table, text
from medflare.core.message import Message
from medflare.data.acquisition import TRAINED_ON, no_range
from medflare.federation.screening.answers import class_counts
from medflare.federation.screening.plain import not_events, not_plain, not_states, shown
from medflare.privacy.settings import cost
from medflare.tasks.metrics_table import METRICS

_MOST_IMAGES: Final = 10**9  # more than any hospital has, and few enough for sums of their pixels
_SPLITS: Final = ("train", "validation", "test")
_VERSION: Final = re.compile(r"[\w.+!-]{1,64}", re.ASCII)

METRIC: Final = number(0.0, 1.0, optional=True)
_DISTANCE: Final = number(0.0, 1e6, optional=True)  # pixels or millimetres


def _measured(value: object) -> str | None:
    """Metric -> value, each within what the metric can be."""
    if not isinstance(value, Mapping):
        return f"is {type(value).__name__}, expected a table of metrics"
    for name, found in value.items():
        if name not in METRICS:
            return f"{shown(name)} is no metric"
        if problem := (_DISTANCE if METRICS[name].lower_is_better else METRIC)(found):
            return f"{name!r} {problem}"
    return None


def _images(value: object) -> str | None:
    """Split -> number of images."""
    if problem := table(count(_MOST_IMAGES))(value):
        return problem
    splits: Mapping[str, int] = value  # type: ignore[assignment]  # it is a table
    if other := next((name for name in splits if name not in _SPLITS), None):
        return f"{shown(other)} is no split"
    return None if "train" in splits else "says nothing of 'train'"


def _version(value: object) -> str | None:
    """What an event can name."""
    if not isinstance(value, str):
        return text()(value)
    return None if _VERSION.fullmatch(value) else f"is {shown(value)}, expected a version"


VERSIONS: Final = Fact("versions", "of the packages that its results depend on; medflare 0.2.0 does not tell them", table(_version))

RANGE: Final = Fact(TRAINED_ON, "range of size, spacing and intensities of the training images, for the models' cards", no_range, "train")

# What the phases of every method report, see `settings.PHASES_OF_ALL`.
ENROLS: Final = (
    Fact("n", "images by split", _images),
    Fact("class_counts", "training images or pixels by class; none where the site keeps them", listing(count())),
    VERSIONS,
    RANGE,
)
DELIVERS: Final = (
    Fact("metrics", "model -> metric -> value on test images", models(_measured, 1000), "test"),
    Fact("n", "images by split", _images),
    Fact("reports", "what models say of their own work", models(table(), 1000), "test"),
    Fact("classes", "model -> confusion counts and ROC curves of test images", models(class_counts, 1000), "test"),
    Fact("privacy", "what the run has cost the site's patients", cost),
)


def unreadable(message: Message, site: str) -> str | None:
    """What of a reply nobody behind the gate can work with, in words, or None.

    Args:
        message: the reply.
        site: that sent it; it speaks for itself alone.
    """
    try:
        return not_states(message.states) or not_plain(message.facts) or not_events(message.facts.get("events", []), site)
    except Exception as error:  # whatever it is made of, it is the site's
        return f"it cannot be read ({type(error).__name__})"


def unfit(message: Message, declared: tuple[Fact, ...], required: tuple[str, ...] = ()) -> str | None:
    """Which fact of a reply is not what its declaration takes, in words, or None.

    Args:
        message: the reply, see `unreadable` first.
        declared: facts by name, with what they take; events need no declaration.
        required: names of facts that must be there.
    """
    if extra := sorted(message.facts.keys() - {*declared, "events"}):
        return f"unexpected fact {shown(extra[0])}"
    if missing := [name for name in required if name not in message.facts]:
        return f"fact {missing[0]!r} is missing"
    for fact in declared:
        if fact in message.facts and (problem := fact.takes(message.facts[fact])):
            return f"{fact} {problem}"
    return None


def stateful(message: Message) -> str | None:
    """The first state of a reply to a phase that has none, in words, or None."""
    return f"unexpected entry {shown(sorted(message.states)[0])}" if message.states else None
