"""A site that lies whenever it is asked, in every federation of a paper: the run completes, the others' models are finite, it is named."""

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import pytest
import torch

from federation.replayed import LIAR, ROUNDS, SITES, Place, Recorded, recorded
from federation.strategies import ALIKE, copied, nested, shared_wide
from medflare.core.manifest import non_finite
from medflare.core.message import Message
from medflare.evaluation.contract import validate_results
from medflare.federation.exchange import Reply
from medflare.federation.settings import DELIVER, ENROL

KINDS: Final = ("rejected", "suspicious", "undefined", "warning")
METHODS: Final = ("fedavg", "fedsm", "fedsm ridge", "prr", "grace", "iop_fl", "feddag")
Lie = Callable[[Recorded, Place], Message]


def honest(found: Recorded, place: Place, site: str = LIAR) -> Message:
    return copied(found.replies[place].get(site) or found.replies[place][LIAR])


def numbers(change: Callable[[Any], Any], *only: str) -> Lie:
    """Every number among the facts, or within those that are named, replaced."""

    def lie(found: Recorded, place: Place) -> Message:
        reply = honest(found, place)
        reply.facts = {name: _numbers(value, change) if name in only or not only else value for name, value in reply.facts.items()}
        return reply

    return lie


def _numbers(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {name: _numbers(inner, change) for name, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner, change) for inner in value]
    return change(value) if isinstance(value, int | float) else value


def facts(**more: Any) -> Lie:
    """Facts added, or replaced."""

    def lie(found: Recorded, place: Place) -> Message:
        reply = honest(found, place)
        reply.facts |= copy.copy(more)
        return reply

    return lie


def renamed(new: Callable[[str], Mapping[str, Any]]) -> Lie:
    """Every fact, and every name within one, under the names that stand for it."""

    def lie(found: Recorded, place: Place) -> Message:
        reply = honest(found, place)
        reply.facts = _renamed(reply.facts, new)
        return reply

    return lie


def _renamed(table: Any, new: Callable[[str], Mapping[str, Any]]) -> Any:
    if not isinstance(table, dict):
        return table
    return {other: _renamed(value, new) for name, value in table.items() for other in new(name)}


def tensors(change: Callable[[torch.Tensor], torch.Tensor]) -> Lie:
    """Every floating tensor replaced."""

    def lie(found: Recorded, place: Place) -> Message:
        reply = honest(found, place)
        for state in reply.states.values():
            state |= {name: change(tensor) for name, tensor in state.items() if tensor.is_floating_point()}
        return reply

    return lie


def of_another_step(found: Recorded, place: Place) -> Message:
    """What it answers to the step after this one, or to the first one."""
    places = sorted(found.replies)
    return honest(found, places[(places.index(place) + 1) % len(places)])


def other_images(found: Recorded, place: Place) -> Message:
    """Twice as many images whenever it is asked what it has, and as many as it has when it trains."""
    reply = honest(found, place)
    if place[0] == ENROL:
        counts = reply.facts["class_counts"]
        reply.facts |= {"n": {**reply.facts["n"], "train": 2 * reply.facts["n"]["train"]}, "class_counts": [2 * count for count in counts]}
    return reply


LIES: Final[dict[str, Lie]] = {
    "text for numbers": numbers(str),
    "NaN as text": numbers(lambda value: "NaN"),
    "NaN": numbers(lambda value: math.nan),
    "truths for numbers": numbers(lambda value: True),
    "halves of counts": numbers(lambda value: value + 0.5),
    "1e308": numbers(lambda value: 1e308),
    "negative": numbers(lambda value: -1 - value),
    "false counts": numbers(lambda value: 1000 * value, "n", "class_counts", "n_samples"),
    "events of other sites": facts(events=[{"kind": "warning", "message": "it was A", "site": "A"}]),
    "events of unknown kinds": facts(events=[{"kind": "rejected", "message": "A"}]),
    "deep": facts(validation=nested(3000), metrics=nested(3000), n=nested(3000)),
    "wide": facts(validation=shared_wide(200), metrics=shared_wide(200), n=shared_wide(200)),
    "names that look alike": renamed(lambda name: {name.replace("a", "\u0430").replace("o", "\u043e").replace("n", "\uff4e"): None}),
    "names twice": renamed(lambda name: dict.fromkeys((name, f"{name}\u200b"))),
    "sites that look alike": facts(**dict.fromkeys(ALIKE, 0.5)),
    "of another step": of_another_step,
    "largest": tensors(lambda tensor: torch.full_like(tensor, torch.finfo(tensor.dtype).max)),
    "NaN in tensors": tensors(lambda tensor: tensor * math.nan),
    "a thousand times": tensors(lambda tensor: 1000 * tensor),
}
# Plausible, so that nobody need be named: none of them ends a run, or spoils a model.
PLAUSIBLE: Final[dict[str, Lie]] = {
    "best of all": numbers(lambda value: 1.0, "validation", "metrics", "gains", "scores"),
    "minus zero": numbers(lambda value: -0.0 if isinstance(value, float) else value),
    "minus zero in tensors": tensors(lambda tensor: torch.full_like(tensor, -0.0)),
    "turned": tensors(lambda tensor: -tensor),
    "another site's": partial(honest, site="A"),
    "other images when asked what it has": other_images,
    "none": lambda found, place: Message(honest(found, place).states, {}),
}


def lied(name: str, lie: Lie, *, enrolling: bool = False) -> dict[str, Any]:
    """A run with a liar; `enrolling`, it lies when it enrols too, and is mostly turned away there."""
    found = recorded(name)
    places = [place for place in found.replies if enrolling or place[0] != ENROL]
    exchange = found.answers({place: partial(_reply, lie, found, place) for place in places})
    results = found.run().execute(exchange)
    assert results["status"] == "COMPLETED", results["reason"]
    validate_results(results)
    for sent in exchange.sent.values():
        assert all(non_finite(message) is None for message in sent.values())
    assert exchange.sent[DELIVER, ROUNDS, 0].keys() >= set(SITES) - {LIAR}
    assert {event["site"] for event in results["events"] if event["kind"] == "rejected"} <= {LIAR}, results["events"]
    return results


def _reply(lie: Lie, found: Recorded, place: Place) -> Reply:
    return Reply(lie(found, place))


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("name", METHODS)
def test_a_site_that_always_lies_is_named(name: str, lie: str) -> None:
    assert named(lied(name, LIES[lie]))


@pytest.mark.parametrize("lie", LIES)
def test_a_site_that_lies_from_enrolment_on_is_named(lie: str) -> None:
    assert named(lied("prr", LIES[lie], enrolling=True))


def named(results: Mapping[str, Any]) -> bool:
    return any(event["site"] == LIAR and event["kind"] in KINDS for event in results["events"])


@pytest.mark.parametrize("lie", PLAUSIBLE)
@pytest.mark.parametrize("name", METHODS)
def test_a_plausible_lie_ends_nothing(name: str, lie: str) -> None:
    lied(name, PLAUSIBLE[lie], enrolling=True)
