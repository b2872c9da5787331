"""One site of three sends wrong replies: the run completes, the other sites get the same results, and the faulty site is named."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from federation.replayed import (
    FAULTY,
    FEDERATIONS,
    ROUNDS,
    SITES,
    Place,
    Recorded,
    Replay,
    cases,
    copied,
    nearly,
    recorded,
)
from medflare.core.message import Message
from medflare.evaluation.results import REPORT_FILE, validate_results
from medflare.federation.exchange import SiteReply
from medflare.federation.protocol import non_finite
from medflare.federation.settings import ENROL, FINALIZE

METHODS: Final = ("fedavg", "fedsm", "prr", "grace", "iop_fl", "feddag")
Fault = Callable[[Recorded, Place], Message]


def changed(change: Callable[[Message], object]) -> Fault:
    """The site's own reply with a change."""

    def fault(recording: Recorded, place: Place) -> Message:
        reply = copied(recording.replies[place][FAULTY])
        change(reply)
        return reply

    return fault


def numbers(change: Callable[[Any], Any], *only: str) -> Fault:
    """Every number of the metadata, or of these items, replaced."""

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: replaced(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return list(map(replaced, value))
        return change(value) if isinstance(value, int | float) else value

    return changed(
        lambda reply: reply.meta.update(
            {
                name: replaced(value)
                for name, value in reply.meta.items()
                if name in only or not only
            }
        )
    )


def meta(**more: Any) -> Fault:
    """Metadata added, or replaced."""
    return changed(lambda reply: reply.meta.update(more))


def tensors(change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    """Every floating tensor replaced."""

    def replace(reply: Message) -> None:
        for state in reply.states.values():
            state |= {
                name: change(tensor) for name, tensor in state.items() if tensor.is_floating_point()
            }

    return changed(replace)


def of_another_step(recording: Recorded, place: Place) -> Message:
    """The reply to the next step, or to the first one."""
    places = sorted(recording.replies)
    return copied(recording.replies[places[(places.index(place) + 1) % len(places)]][FAULTY])


FAULTS: Final[dict[str, Fault]] = {
    "text for numbers": numbers(str),
    "NaN": numbers(lambda value: math.nan),
    "1e308": numbers(lambda value: 1e308),
    "negative": numbers(lambda value: -1 - value),
    "false counts": numbers(lambda value: 1000 * value, "n_samples"),
    "events of another site": meta(
        events=[{"kind": "warning", "message": "it was A", "site": "A"}]
    ),
    "events of the server": meta(events=[{"kind": "rejected", "message": "A"}]),
    "of another step": of_another_step,
    "NaN in tensors": tensors(lambda tensor: tensor * math.nan),
    "a thousand times": tensors(lambda tensor: 1000 * tensor),
}
# Plausible replies: the site need not be named, but the run must complete with finite models.
PLAUSIBLE: Final[dict[str, Fault]] = {
    "perfect metrics": numbers(lambda value: 1.0, "validation", "metrics", "gains", "scores"),
    "flipped sign": tensors(lambda tensor: -tensor),
    "no states": changed(lambda reply: reply.states.clear()),
}


def run_with(
    name: str, fault: Fault, places: list[Place] | None = None, folder: Path | None = None
) -> dict[str, Any]:
    """The results of a run with the fault at these places; by default at all but enrollment."""
    recording = recorded(name)
    places = (
        [place for place in recording.replies if place[0] != ENROL] if places is None else places
    )
    exchange = Replay(recording, {place: SiteReply(fault(recording, place)) for place in places})
    results = recording.run(folder).execute(exchange, checked=True)  # the recording is
    assert results["status"] == "COMPLETED", results["reason"]
    validate_results(results)
    json.dumps(results, allow_nan=False).encode()
    for sent in exchange.sent.values():
        for message in sent.values():
            assert non_finite(message) is None
    assert exchange.sent[FINALIZE, ROUNDS, 0].keys() >= set(SITES) - {FAULTY}
    assert {event["site"] for event in results["events"] if event["kind"] == "rejected"} <= {
        FAULTY
    }, results["events"]
    return results


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", METHODS)
def test_a_faulty_site_is_named(name: str, fault: str) -> None:
    kinds = ("rejected", "suspicious", "undefined", "warning")
    assert any(
        event["site"] == FAULTY and event["kind"] in kinds
        for event in run_with(name, FAULTS[fault])["events"]
    )


@pytest.mark.parametrize("fault", PLAUSIBLE)
@pytest.mark.parametrize("name", METHODS)
def test_a_plausible_fault_ends_no_run(name: str, fault: str) -> None:
    run_with(name, PLAUSIBLE[fault], [*recorded(name).replies])


def test_a_rejected_update_has_no_effect_on_the_results(tmp_path: Path) -> None:
    place = ("train", 0, 0)
    recording = recorded("fedavg")
    rejected = run_with("fedavg", FAULTS["NaN in tensors"], [place], tmp_path)
    missing = recording.run().execute(Replay(recording, {place: SiteReply(problem="no answer")}))
    assert rejected["mean"] == missing["mean"] and rejected["sites"] == missing["sites"]
    assert (tmp_path / REPORT_FILE).is_file()


# (federation, phase, round, fault, token of the event)
REJECTED: Final[dict[str, tuple[str, str, int, Fault, str]]] = {
    "NaN": ("fedavg", "train", 0, FAULTS["NaN in tensors"], "NaN"),
    "a thousand times as long": ("fedavg", "train", 0, FAULTS["a thousand times"], "median"),
    "another shape": ("fedavg", "train", 0, tensors(lambda tensor: tensor.reshape(-1)), "shape"),
    "no tensors": ("fedavg", "train", 0, PLAUSIBLE["no states"], "missing"),
    "false counts": ("fedavg", "train", 0, FAULTS["false counts"], "n_samples"),
    "an impossible gain": ("fedsm", "evaluate_gamma", ROUNDS, meta(gains={"0": 1e308}), "gains"),
    "a thousand temperatures": (
        "fedsm",
        "selector_confidence",
        ROUNDS,
        meta(calibration=[0.5] * 1000),
        "calibration",
    ),
    "an unknown stage": ("prr", "train", 0, meta(stages=[7]), "stages"),
    "an A-distance of 1e300": ("grace", "train", 0, meta(a_distance=1e300), "a_distance"),
    "a selected round as text": (
        "iop_fl",
        "submit",
        ROUNDS,
        meta(selected_round="last"),
        "selected_round",
    ),
    "a loss that cannot be drawn": ("fedavg", "train", 0, meta(loss=1e308), "loss"),
    "a distance beyond all images": (
        "fedavg",
        FINALIZE,
        ROUNDS,
        meta(metrics={"global": {"hd95": 1e308}}),
        "hd95",
    ),
    "counts that are text": ("fedavg", ENROL, 0, meta(n="many"), "n:"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_an_impossible_item_is_rejected_by_name(name: str) -> None:
    federation, phase, round, fault, token = REJECTED[name]
    events = run_with(federation, fault, [(phase, round, 0)])["events"]
    assert any(
        token in event["message"]
        for event in events
        if event["site"] == FAULTY and event["kind"] == "rejected"
    ), events


@pytest.mark.parametrize("name", FEDERATIONS)
def test_no_reply_that_is_nearly_right_ends_a_run(name: str) -> None:
    recording = recorded(name)

    @cases(8)
    @given(st.data())
    def one(data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(recording.replies)))
        reply = data.draw(nearly(recording.replies[place][FAULTY]))
        run_with(name, lambda recording, place: reply, [place])

    one()
