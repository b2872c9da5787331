"""What a message may be made of, whoever sent it: plain tensors by name, plain numbers and names, and events in nobody else's name."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

from medflare.core.events import OF_SITES
from medflare.core.text import printable
from medflare.federation.settings import FACTS_LIMIT

_DEPTH: Final = 8  # of tables within tables
_LARGEST: Final = 2**63  # of numbers; larger ones are no counts, and break what computes with them
_NAME: Final = 500  # characters of a name; those of tensors deep in a network are long
_EVENTS: Final = 100
_EVENT: Final = ("kind", "message", "round", "site")
_MESSAGE: Final = 2_000  # characters of an event
_ROUNDS: Final = 10**6


def not_states(states: object) -> str | None:
    """What in states nobody can compute with, in words, or None.

    Args:
        states: of a message.
    """
    if not isinstance(states, Mapping):
        return f"its states are {type(states).__name__}"
    for entry, state in states.items():
        if not _is_name(entry):
            return f"an entry's name is {shown(entry)}"
        if not isinstance(state, Mapping):
            return f"entry {shown(entry)} is {type(state).__name__}, not a state"
        for name, tensor in state.items():
            if not _is_name(name):
                return f"{shown(entry)} holds a tensor of the name {shown(name)}"
            if type(tensor) is not Tensor:
                return f"{entry}/{name} is {type(tensor).__name__}, not a tensor"
            if reason := _no_numbers(tensor):
                return f"{entry}/{name} {reason}"
    return None


def _no_numbers(tensor: Tensor) -> str:
    """Why a tensor is more, or less, than numbers in memory; empty where it is just that."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested or tensor.is_quantized:
        return "holds no numbers of its own (it is sparse, nested, quantized or without memory)"
    if tensor.requires_grad or tensor.is_neg() or tensor.is_conj():
        return "is a step of a computation (detach and clone it)"
    return ""


def not_plain(facts: object, most: int = FACTS_LIMIT) -> str | None:
    """What in facts cannot be written down as numbers and names, or is more than those need, in words, or None.

    Args:
        facts: of a message.
        most: bytes of JSON.
    """
    if not isinstance(facts, dict):
        return f"its facts are {type(facts).__name__}"
    for place, value in enumerate(_walk(facts, 0)):
        if problem := _no_leaf(value):
            return problem
        if place > most // 2:  # each takes two bytes at least; few objects may be millions when they are written down
            return f"over {most} bytes of facts, more than counts and metrics need"
    named = {name: value for name, value in facts.items() if name != "events"}  # whose text `core.events` makes printable
    if text := next((value for value in _walk(named, 0) if isinstance(value, str) and not value.isprintable()), None):
        return f"facts hold text with characters that cannot be printed: {shown(text)}"
    size = len(json.dumps(facts))
    return f"{size} bytes of facts, more than the {most} that counts and metrics need" if size > most else None


_TOO_DEEP: Final[list[object]] = []  # stands for what lies deeper; told apart by identity


def _walk(value: object, depth: int) -> Iterator[object]:
    """A value and all within it, however nested, but none deeper than the limit."""
    if depth > _DEPTH:
        yield _TOO_DEEP
        return
    yield value
    inner: Iterable[object] = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for item in inner:
        yield from _walk(item, depth + 1)


def _no_leaf(value: object) -> str | None:
    """Why a value, taken by itself, is neither plain nor a list or table, or None."""
    if value is _TOO_DEEP:
        return f"facts are nested more than {_DEPTH} deep"
    if isinstance(value, dict):
        return next((f"facts have the name {shown(name)}" for name in value if not _is_name(name)), None)
    if isinstance(value, int) and abs(value) > _LARGEST:
        return f"facts hold a number of {value.bit_length()} bits"
    if isinstance(value, str):
        return None if _is_unicode(value) else "facts hold text that is no Unicode"
    if value is None or isinstance(value, int | float | list | tuple):
        return None
    return f"facts hold something that is neither number nor text ({type(value).__name__})"


def not_events(events: object, site: str) -> str | None:
    """Which event of a reply the record cannot take, in words, or None.

    Args:
        events: of a reply.
        site: that sent them; it speaks for itself alone.
    """
    if not isinstance(events, list | tuple):
        return f"its events are {type(events).__name__}, expected a list"
    if len(events) > _EVENTS:
        return f"{len(events)} events, more than {_EVENTS}"
    return next((problem for event in events if (problem := _no_event(event, site))), None)


def _no_event(event: object, site: str) -> str | None:
    if not isinstance(event, dict):
        return f"an event is {type(event).__name__}, expected an object"
    if other := sorted(event.keys() - set(_EVENT)):
        return f"an event with {shown(other[0])}, expected {', '.join(_EVENT)}"
    if event.get("kind") not in OF_SITES:
        return f"an event of the kind {shown(event.get('kind'))}; a site's are {', '.join(OF_SITES)}"
    message, round = event.get("message"), event.get("round")
    if not isinstance(message, str) or not message.strip() or len(message) > _MESSAGE:
        return f"an event without a message of up to {_MESSAGE} characters"
    if event.get("site") not in (None, site):
        return f"an event in the name of {shown(event['site'])}; a site speaks for itself alone"
    if round is not None and (type(round) is not int or not 0 <= round <= _ROUNDS):
        return f"an event in round {shown(round)}"
    return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_name(name: object) -> bool:
    return isinstance(name, str) and len(name) <= _NAME and name.isprintable()


def shown(value: object) -> str:
    """A value for a message: a text in part, of anything else its kind.

    Args:
        value: whatever a site sent.

    Examples:
        >>> shown("all"), shown(7), shown([1])
        ("'all'", '7', 'list')
    """
    if isinstance(value, str):
        return repr(value[:60])
    return str(value) if isinstance(value, int) and abs(value) < _LARGEST else type(value).__name__


def one_line(text: object) -> str:
    """A reason as an event may say it: one printable line, not too long.

    Args:
        text: a site's own words.

    Examples:
        >>> one_line("no\\n data"), one_line(""), len(one_line("x" * 9999))
        ('no data', 'it does not say why', 2000)
    """
    if not isinstance(text, str):
        return f"its reason is {type(text).__name__}, expected text"
    line = printable(text[: 2 * _MESSAGE])
    if not line:
        return "it does not say why"
    return line if len(line) <= _MESSAGE else f"{line[: _MESSAGE - 3]}..."
