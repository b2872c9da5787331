"""The gate under fire: whatever one site of three sends, the run completes, the others are as they would be, and results are written."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from federation import strategies
from federation.replayed import FEDERATIONS, LIAR, ROUNDS, Place, Recorded, Replay, recorded
from federation.strategies import cases
from medflare.core.events import KINDS, EventLog
from medflare.core.manifest import non_finite
from medflare.core.message import Message
from medflare.evaluation.contract import validate_results
from medflare.evaluation.results import REPORT_FILE, RESULTS_FILE, append_round
from medflare.federation.exchange import Courier, Reply
from medflare.federation.outcome import Outcome
from medflare.federation.screening.updates import lost_votes, screen
from medflare.methods.base import Step

ENROLMENT, TRAIN, DELIVERY = ("enrol", 0, 0), ("train", 0, 0), ("deliver", ROUNDS, 0)


class Once:
    """An exchange with one answer."""

    def __init__(self, reply: Reply):
        self.reply = reply

    def present(self, round: int) -> list[str]:
        return [LIAR]

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, Reply]:
        return {LIAR: self.reply}


def one_line(text: str) -> bool:
    """Whether a text is what an event may say."""
    text.encode()
    return bool(text.strip()) and "\n" not in text and len(text) <= 2000


def through(phase: str, message: Message, folder: Path) -> bool:
    """Send a reply through the gate, and do with it whatever the schedule does with a usable one; whether it is usable."""
    (reply,) = Courier(Once(Reply(message)), Outcome()).ask(Step(phase, 0), {LIAR: Message()}).values()
    if reply.message is None:
        assert reply.kind == "rejected" and one_line(reply.problem), reply.problem
        return False
    screened = screen({LIAR: message}, {}, {}, {})
    assert all(map(one_line, screened.rejected.values())), screened.rejected
    for accepted in screened.accepted.values():
        for kind, problem in lost_votes(accepted.facts).values():
            assert kind in KINDS and one_line(problem)
        EventLog().extend(accepted.facts.get("events", []), site=LIAR)
        append_round(folder, {"sites": {LIAR: accepted.facts}})
        json.dumps(accepted.facts, sort_keys=True).encode()
    return bool(screened.accepted)


@cases(1200)
@given(st.sampled_from(["enrol", "train", "deliver"]), strategies.facts)
def test_no_facts_raise_anything(tmp_path: Path, phase: str, facts: Any) -> None:
    event(f"usable: {through(phase, Message({}, facts), tmp_path)}")


@cases(800)
@given(st.sampled_from(["enrol", "train", "deliver"]), strategies.states)
def test_no_states_raise_anything(tmp_path: Path, phase: str, states: Any) -> None:
    event(f"usable: {through(phase, Message(states, {}), tmp_path)}")


@cache
def _without(name: str, place: Place) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run in which the liar's answer at one place is turned away unread: its results, and what is delivered."""
    exchange = recorded(name).answers({place: lambda: Reply(problem="turned away", kind="rejected")})
    results = recorded(name).run().execute(exchange)
    return results, exchange.sent[DELIVERY]


def places(found: Recorded) -> list[Place]:
    return sorted(found.replies)


def rejected_by(results: Mapping[str, Any]) -> set[str | None]:
    return {found["site"] for found in results["events"] if found["kind"] == "rejected"}


def check(name: str, place: Place, lie: Message, folder: Path | None) -> dict[str, Any]:
    """A run with one lie comes to its end, as it would without it where the lie is rejected."""
    found = recorded(name)
    exchange = found.answers({place: lambda: Reply(strategies.copied(lie) if _plain(lie) else lie)})
    results = found.run(folder).execute(exchange)
    assert results["status"] == "COMPLETED", results["reason"]
    validate_results(results)
    assert rejected_by(results) <= {LIAR}
    assert all(found["message"].strip() and len(found["message"]) < 3000 for found in results["events"])
    json.dumps(results, allow_nan=False).encode()
    for sent in exchange.sent.values():
        for message in sent.values():
            assert non_finite(message) is None
    if folder is not None:
        assert (folder / RESULTS_FILE).is_file() and (folder / REPORT_FILE).is_file()
    if _turned_away(place, results["events"], exchange):
        other, delivered = _without(name, place)
        for site in exchange.sent[DELIVERY]:
            assert _same(exchange.sent[DELIVERY][site], delivered[site]), site
        honest = [site for site in results["sites"] if site != LIAR]
        assert [results["sites"][site] for site in honest] == [other["sites"][site] for site in honest]
        assert results["mean"] == other["mean"]
    return results


def _turned_away(place: Place, events: list[dict[str, Any]], exchange: Replay) -> bool:
    """Whether it was this reply that was rejected; one with other counts may be taken, and the next ones not be like it."""
    if place == ENROLMENT:
        return LIAR not in exchange.sent[DELIVERY]
    verdicts = [found for found in events if found["kind"] == "rejected" and found["round"] == place[1]]
    return any("its vote does not count" not in found["message"] for found in verdicts)


def _plain(message: Message) -> bool:
    try:
        strategies.copied(message)
    except Exception:
        return False
    return True


def _same(first: Message, second: Message) -> bool:
    def flat(message: Message) -> dict[str, Any]:
        return {f"{entry}/{name}": tensor for entry, state in message.states.items() for name, tensor in state.items()}

    one, other = flat(first), flat(second)
    return one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one) and first.facts == second.facts


def fact(**changes: Any) -> Callable[[Message], None]:
    return lambda message: message.facts.update(changes)


def below_zero(entry: str, ending: str) -> Callable[[Message], None]:
    def change(message: Message) -> None:
        state = message.states[entry]
        state |= {name: -tensor.abs() - 0.1 for name, tensor in state.items() if name.endswith(ending)}

    return change


def every(entry: str, tensor: str, factor: float, shift: float = 0.0) -> Callable[[Message], None]:
    def change(message: Message) -> None:
        state = message.states[entry]
        state[tensor] = (state[tensor] * factor + shift).to(state[tensor].dtype)

    return change


LIES: dict[str, tuple[str, Place, Callable[[Message], Any], str]] = {
    "a variance below 0": ("fedavg", TRAIN, below_zero("model", "running_var"), "holds a number below 0"),
    "a gain that no metric has": ("fedsm", ("tune", ROUNDS, 0), fact(gains={"0": 1e308}), "expected a number from -1 to 1"),
    "a thousand temperatures": ("fedsm", ("calibrate", ROUNDS, 0), fact(calibration=[0.5] * 1000), "more than 21"),
    "a likelihood above 1": ("fedsm", ("calibrate", ROUNDS, 0), fact(calibration=[-1.0] * 21), "expected a number from 0 to"),
    "a stage that there is not": ("prr", TRAIN, fact(stages=[7]), "stages [0] is 7"),
    "an A-distance of 1e300": ("grace", TRAIN, fact(a_distance=1e300), "expected a number from -2 to 2"),
    "a selected round as text": ("iop_fl", ("submit", ROUNDS, 0), fact(selected_round="last"), "expected a count"),
    "a loss that cannot be drawn": ("fedavg", TRAIN, fact(loss=1e308), "training diverged"),
    "a model that cannot be drawn": ("fedavg", TRAIN, fact(validation={"$\\frac{$": 0.5}), "no name of a model"),
    "metrics of a model that cannot be drawn": ("fedavg", DELIVERY, fact(metrics={"$\\frac{$": {"dice": 0.5}}), "no name of a model"),
    "a distance beyond all images": ("fedavg", DELIVERY, fact(metrics={"global": {"hd95": 1e308}}), "from 0 to 1e+06"),
    "a gigabyte at the end": ("fedavg", DELIVERY, lambda message: message.states.update(patients={"x": torch.ones(9)}), "unexpected entry"),
    "tensors to enrol with": ("fedavg", ENROLMENT, lambda message: message.states.update(x={"x": torch.ones(9)}), "unexpected entry"),
    "prototypes of no image": ("prr", TRAIN, every("prototypes", "present", 0.0), "prototype 0 is of an absent class"),
    "a score of its own model": ("feddag", ("score", 0, 0), fact(scores={"A": 0.5, LIAR: 1.0}), "whose model the site was not sent"),
    "pixels that its images do not have": ("prr", ENROLMENT, fact(class_counts=[0, 2**53]), "class_counts add up to 9007199254740992"),
    "names that are numbers": ("fedavg", ENROLMENT, lambda message: message.facts["n"].update({3: 4}), "facts have the name 3"),
}


@pytest.mark.parametrize("name", LIES)
def test_what_was_found_to_end_a_run(name: str, tmp_path: Path) -> None:
    federation, place, change, words = LIES[name]
    lie = strategies.copied(recorded(federation).replies[place][LIAR])
    change(lie)
    results = check(federation, place, lie, tmp_path if "drawn" in name else None)
    assert any(words in found["message"] for found in results["events"] if found["site"] == LIAR), results["events"]


@pytest.mark.parametrize("name", FEDERATIONS)
def test_no_reply_that_is_nearly_right_ends_a_run(name: str, tmp_path: Path) -> None:
    found = recorded(name)
    count = 0

    @cases(10)
    @given(st.data())
    def one(data: st.DataObject) -> None:
        nonlocal count
        count += 1
        place = data.draw(st.sampled_from(places(found)))
        lie = data.draw(strategies.nearly(found.replies[place][LIAR]))
        results = check(name, place, lie, tmp_path if count == 1 else None)
        event(f"{place[0]} rejected: {bool(rejected_by(results))}")

    one()
