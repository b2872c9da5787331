"""One site of three sends what it likes: the run completes, the others are as they would be without it, and the liar is named."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from federation import strategies
from federation.replayed import FEDERATIONS, LIAR, ROUNDS, SITES, Place, Recorded, recorded
from federation.strategies import cases, copied
from medflare.core.events import EventLog
from medflare.core.manifest import non_finite
from medflare.core.message import Message
from medflare.evaluation.results import REPORT_FILE, append_round, validate_results
from medflare.federation.exchange import Reply, Transport
from medflare.federation.outcome import Outcome
from medflare.federation.settings import ENROL, FINALIZE
from medflare.federation.update_validation.updates import lost_votes, screen
from medflare.methods.base import Step

NAMED: Final = ("rejected", "suspicious", "undefined", "warning")
METHODS: Final = ("fedavg", "fedsm", "prr", "grace", "iop_fl", "feddag")
Lie = Callable[[Recorded, Place], Message]


def numbers(change: Callable[[Any], Any], *only: str) -> Lie:
    """Every number among the meta, or within those that are named, replaced."""

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: replaced(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [replaced(inner) for inner in value]
        return change(value) if isinstance(value, int | float) else value

    def lie(found: Recorded, place: Place) -> Message:
        reply = copied(found.replies[place][LIAR])
        reply.meta = {name: replaced(value) if name in only or not only else value for name, value in reply.meta.items()}
        return reply

    return lie


def meta(**more: Any) -> Lie:
    """Metadata added, or replaced."""

    def lie(found: Recorded, place: Place) -> Message:
        reply = copied(found.replies[place][LIAR])
        reply.meta |= more
        return reply

    return lie


def tensors(change: Callable[[torch.Tensor], torch.Tensor]) -> Lie:
    """Every floating tensor replaced."""

    def lie(found: Recorded, place: Place) -> Message:
        reply = copied(found.replies[place][LIAR])
        for state in reply.states.values():
            state |= {name: change(tensor) for name, tensor in state.items() if tensor.is_floating_point()}
        return reply

    return lie


def of_another_step(found: Recorded, place: Place) -> Message:
    """What it answers to the step after this one, or to the first one."""
    places = sorted(found.replies)
    return copied(found.replies[places[(places.index(place) + 1) % len(places)]][LIAR])


LIES: Final[dict[str, Lie]] = {
    "text for numbers": numbers(str),
    "NaN": numbers(lambda value: math.nan),
    "truths for numbers": numbers(lambda value: True),
    "1e308": numbers(lambda value: 1e308),
    "negative": numbers(lambda value: -1 - value),
    "false counts": numbers(lambda value: 1000 * value, "n_samples"),
    "events in another's name": meta(events=[{"kind": "warning", "message": "it was A", "site": "A"}]),
    "the server's events": meta(events=[{"kind": "rejected", "message": "A"}]),
    "names that look alike": meta(**{"n_s\u0430mples": 3, "B\u200b": 0.5}),
    "nested without end": meta(validation=strategies.nested(3000), metrics=strategies.nested(3000), n=strategies.nested(3000)),
    "of another step": of_another_step,
    "largest": tensors(lambda tensor: torch.full_like(tensor, torch.finfo(tensor.dtype).max)),
    "NaN in tensors": tensors(lambda tensor: tensor * math.nan),
    "a thousand times": tensors(lambda tensor: 1000 * tensor),
}
# Plausible, so that nobody need be named: none of them ends a run, or spoils a model.
PLAUSIBLE: Final[dict[str, Lie]] = {
    "best of all": numbers(lambda value: 1.0, "validation", "metrics", "gains", "scores"),
    "turned": tensors(lambda tensor: -tensor),
    "another site's": lambda found, place: copied(found.replies[place].get("A") or found.replies[place][LIAR]),
    "no states": lambda found, place: Message({}, copied(found.replies[place][LIAR]).meta),
}


def lied(name: str, lie: Lie, places: list[Place] | None = None, folder: Path | None = None) -> dict[str, Any]:
    """A run whose liar lies wherever it trains or delivers, or at these places."""
    found = recorded(name)
    places = [place for place in found.replies if place[0] != ENROL] if places is None else places
    exchange = found.answers({place: lambda place=place: Reply(lie(found, place)) for place in places})  # type: ignore[misc]
    results = found.run(folder).execute(exchange)
    assert results["status"] == "COMPLETED", results["reason"]
    validate_results(results)
    json.dumps(results, allow_nan=False).encode()
    assert all(non_finite(message) is None for sent in exchange.sent.values() for message in sent.values())
    assert exchange.sent[FINALIZE, ROUNDS, 0].keys() >= set(SITES) - {LIAR}
    assert {event["site"] for event in results["events"] if event["kind"] == "rejected"} <= {LIAR}, results["events"]
    return results


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("name", METHODS)
def test_a_site_that_always_lies_is_named(name: str, lie: str) -> None:
    assert any(event["site"] == LIAR and event["kind"] in NAMED for event in lied(name, LIES[lie])["events"])


@pytest.mark.parametrize("lie", PLAUSIBLE)
@pytest.mark.parametrize("name", METHODS)
def test_a_plausible_lie_ends_no_run(name: str, lie: str) -> None:
    lied(name, PLAUSIBLE[lie], [*recorded(name).replies])


def test_a_rejected_update_leaves_the_others_as_they_are_without_it(tmp_path: Path) -> None:
    place = ("train", 0, 0)
    found = recorded("fedavg")
    bad = lied("fedavg", LIES["NaN in tensors"], [place], tmp_path)
    silent = found.run().execute(found.answers({place: lambda: Reply(problem="no answer")}))
    assert bad["mean"] == silent["mean"] and bad["sites"] == silent["sites"]
    assert (tmp_path / REPORT_FILE).is_file()


# What once ended a run: (federation, phase, round, lie, token of the event).
FOUND: Final[dict[str, tuple[str, str, int, Lie, str]]] = {
    "a gain that no metric has": ("fedsm", "evaluate_gamma", ROUNDS, meta(gains={"0": 1e308}), "gains"),
    "a thousand temperatures": ("fedsm", "selector_confidence", ROUNDS, meta(calibration=[0.5] * 1000), "calibration"),
    "a stage that there is not": ("prr", "train", 0, meta(stages=[7]), "stages"),
    "an A-distance of 1e300": ("grace", "train", 0, meta(a_distance=1e300), "a_distance"),
    "a selected round as text": ("iop_fl", "submit", ROUNDS, meta(selected_round="last"), "selected_round"),
    "a loss that cannot be drawn": ("fedavg", "train", 0, meta(loss=1e308), "loss"),
    "a model that cannot be drawn": ("fedavg", "train", 0, meta(validation={"$\\frac{$": 0.5}), "validation"),
    "a distance beyond all images": ("fedavg", FINALIZE, ROUNDS, meta(metrics={"global": {"hd95": 1e308}}), "hd95"),
    "too few class counts": ("prr", ENROL, 0, meta(class_counts=[1]), "class_counts"),
    "counts that are text": ("fedavg", ENROL, 0, meta(n="many"), "n:"),
    "half a character": ("fedavg", "train", 0, meta(**{"\ud800": 1}), "name"),
    "votes on a thousand models": ("fedavg", "train", 0, meta(validation={str(place): 0.5 for place in range(1000)}), "validation"),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_once_ended_a_run_is_rejected_by_name(name: str) -> None:
    federation, phase, round, lie, token = FOUND[name]
    events = lied(federation, lie, [(phase, round, 0)])["events"]
    assert any(token in event["message"] for event in events if event["site"] == LIAR and event["kind"] == "rejected"), events


@pytest.mark.parametrize("name", FEDERATIONS)
def test_no_reply_that_is_nearly_right_ends_a_run(name: str) -> None:
    found = recorded(name)

    @cases(8)
    @given(st.data())
    def one(data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(found.replies)))
        lie = data.draw(strategies.nearly(found.replies[place][LIAR]))
        lied(name, lambda found, place: lie, [place])

    one()


class Once:
    """An exchange with one answer."""

    def __init__(self, reply: Reply):
        self.reply = reply

    def present(self, round: int) -> list[str]:
        return [LIAR]

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, Reply]:
        return {LIAR: self.reply}


@cases(1000)
@given(st.sampled_from(["enrol", "train", "finalize"]), strategies.states, strategies.meta, st.booleans())
def test_nothing_that_a_site_sends_raises_an_error(tmp_path: Path, phase: str, states: Any, meta: Any, with_states: bool) -> None:
    message = Message(states if with_states else {}, {} if with_states else meta)
    (reply,) = Transport(Once(Reply(message)), Outcome()).ask(Step(phase, 0), {LIAR: Message()}).values()
    if reply.message is None:
        assert reply.kind == "rejected" and reply.problem.strip() and "\n" not in reply.problem and len(reply.problem) <= 2000
        return
    for accepted in screen({LIAR: message}, {}, {}, {}).accepted.values():  # and on, as the schedule does
        lost_votes(accepted.meta)
        EventLog().extend(accepted.meta.get("events", []), site=LIAR)
        append_round(tmp_path, {"sites": {LIAR: accepted.meta}})
