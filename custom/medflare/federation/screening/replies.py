"""The gate for every reply, whatever the phase: what it may look like before anybody works with it.

A site is believed to be honest and may still be wrong: a full disk, a wrong version, a method of one's own. Nothing that it sends may
raise an error anywhere behind this gate.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from medflare.core.events import KINDS
from medflare.core.manifest import Fact, count, listing, number, table
from medflare.core.message import Message
from medflare.federation.screening.answers import class_counts
from medflare.federation.settings import FACTS_LIMIT
from medflare.tasks.metrics_table import METRICS

_DEPTH: Final = 8  # of tables within tables
_LARGEST: Final = 2**63  # of numbers; larger ones are no counts, and break what computes with them
_MESSAGE: Final = 2_000  # characters of an event
_EVENTS: Final = 100
_MOST_IMAGES: Final = 10**9  # more than any hospital has, and few enough for sums of their pixels

METRIC: Final = number(0.0, 1.0, optional=True)
_DISTANCE: Final = number(0.0, optional=True)


def _measured(value: object) -> str | None:
    """Metric -> value, each within what the metric can be."""
    if not isinstance(value, Mapping):
        return f"is {type(value).__name__}, expected a table of metrics"
    for name, found in value.items():
        metric = METRICS.get(name)
        if problem := (_DISTANCE if metric is not None and metric.lower_is_better else METRIC)(found):
            return f"{name!r} {problem}"
    return None


def _images(value: object) -> str | None:
    """Split -> number of images."""
    if problem := table(count(_MOST_IMAGES))(value):
        return problem
    return None if isinstance(value, Mapping) and "train" in value else "says nothing of 'train'"


_COST: Final = ("epsilon", "delta", "steps")


def _cost(value: object) -> str | None:
    """What the results say of differential privacy; nothing without it."""
    problem = table(number(0.0, optional=True))(value)
    if problem or not isinstance(value, Mapping) or not value:
        return problem
    missing = [name for name in _COST if name not in value or (name != "epsilon" and value[name] is None)]
    return f"says nothing of {missing[0]!r}" if missing else None


# What the phases of every method report, see `exchange.PHASES_OF_ALL`.
ENROLS: Final = (Fact("n", "images by split", _images), Fact("class_counts", "training images or pixels by class", listing(count())))
DELIVERS: Final = (
    Fact("metrics", "model -> metric -> value on test images", table(_measured), "test"),
    Fact("n", "images by split", _images),
    Fact("reports", "what models say of their own work", table(), "test"),
    Fact("classes", "model -> confusion counts and ROC curves of test images", table(class_counts), "test"),
    Fact("privacy", "what the run has cost the site's patients", _cost),
)


def unreadable(message: Message, site: str) -> str | None:
    """What of a reply nobody behind the gate can work with, in words, or None.

    Args:
        message: the reply.
        site: that sent it; it speaks for itself alone.
    """
    try:
        return _no_states(message.states) or not_plain(message.facts) or _no_events(message.facts.get("events", []), site)
    except Exception as error:  # whatever it is made of, it is the site's
        return f"it cannot be read ({type(error).__name__})"


def unfit(message: Message, declared: tuple[Fact, ...], required: tuple[str, ...] = ()) -> str | None:
    """Which fact of a reply is not what its declaration takes, in words, or None.

    Args:
        message: the reply, see `unreadable` first.
        declared: facts by name, with what they take.
        required: names of facts that must be there.
    """
    if missing := [name for name in required if name not in message.facts]:
        return f"fact {missing[0]!r} is missing"
    for fact in declared:
        if fact in message.facts and (problem := fact.takes(message.facts[fact])):
            return f"{fact} {problem}"
    return None


def _no_states(states: object) -> str | None:
    if not isinstance(states, Mapping):
        return f"its states are {type(states).__name__}"
    for entry, state in states.items():
        if not isinstance(entry, str) or not isinstance(state, Mapping):
            return f"entry {_short(entry)} is {type(state).__name__}, not a state"
        for name, tensor in state.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                return f"{entry}/{_short(name)} is {type(tensor).__name__}, not a tensor"
            if tensor.layout != torch.strided or tensor.is_meta:
                return f"{entry}/{name} holds no numbers of its own (it is sparse, or without memory)"
    return None


def not_plain(facts: object) -> str | None:
    """What in facts cannot be written down as numbers and names, or is more than those need, in words, or None.

    Args:
        facts: of a message.
    """
    if not isinstance(facts, Mapping):
        return f"its facts are {type(facts).__name__}"
    for value in _walk(facts, 0):
        if isinstance(value, int | float) and not isinstance(value, bool):
            if isinstance(value, int) and abs(value) > _LARGEST:
                return f"facts hold a number of {value.bit_length()} bits"
        elif isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                return "facts hold text that is no Unicode"
        elif value is not None and not isinstance(value, bool | Mapping | list | tuple):
            return f"facts hold something that is neither number nor text ({type(value).__name__})"
        elif value is _TOO_DEEP:
            return f"facts are nested more than {_DEPTH} deep"
    size = len(json.dumps(facts))
    return f"{size} bytes of facts, more than the {FACTS_LIMIT} that counts and metrics need" if size > FACTS_LIMIT else None


_TOO_DEEP: Final[list[object]] = []  # stands for what lies deeper; told apart by identity


def _walk(value: object, depth: int) -> Iterator[object]:
    """Every key and value, however nested, but none deeper than the limit."""
    if depth > _DEPTH:
        yield _TOO_DEEP
        return
    yield value
    items: list[Any] = [*value, *value.values()] if isinstance(value, Mapping) else list(value) if isinstance(value, list | tuple) else []
    for item in items:
        yield from _walk(item, depth + 1)


def _no_events(events: object, site: str) -> str | None:
    if not isinstance(events, list | tuple):
        return f"its events are {type(events).__name__}, expected a list"
    if len(events) > _EVENTS:
        return f"{len(events)} events, more than {_EVENTS}"
    for event in events:
        if not isinstance(event, Mapping):
            return f"an event is {type(event).__name__}, expected an object"
        if event.get("kind") not in KINDS:
            return f"an event of an unknown kind {_short(event.get('kind'))}"
        if not isinstance(event.get("message"), str) or len(event["message"]) > _MESSAGE:
            return f"an event without a message of up to {_MESSAGE} characters"
        if event.get("site") not in (None, site):
            return f"an event in the name of {_short(event['site'])}; a site speaks for itself alone"
        if not isinstance(event.get("round"), int | None) or isinstance(event.get("round"), bool):
            return f"an event in round {_short(event['round'])}"
    return None


def _short(value: object) -> str:
    """A value for a message: a text in part, of anything else its kind."""
    if isinstance(value, str):
        return repr(value[:60])
    return str(value) if isinstance(value, int) and abs(value) < _LARGEST else type(value).__name__


def is_number(value: object) -> bool:
    """Whether a value is a finite number, and no truth value.

    Examples:
        >>> is_number(0.5), is_number(True), is_number(math.nan), is_number(10**400)
        (True, False, False, False)
    """
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False
