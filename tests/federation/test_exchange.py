"""The transport: a reply for every site with a request, and counted bytes."""

from collections.abc import Mapping

import pytest
import torch

from medflare.core.message import Message
from medflare.federation.exchange import SiteReply, Transport
from medflare.federation.outcome import Outcome, SiteCost
from medflare.methods.base import Step

STEP = Step("train", 2)


def message(size: int, **meta: object) -> Message:
    return Message({"model": {"w": torch.zeros(size)}}, meta)


class Answering:
    """An exchange with prepared answers."""

    def __init__(self, **answers: SiteReply):
        self.answers = answers
        self.calls = 0

    def present(self, round: int) -> list[str]:
        return sorted(self.answers)

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, SiteReply]:
        self.calls += 1
        return self.answers


def test_every_site_with_a_request_has_a_reply_in_sorted_order() -> None:
    exchange = Answering(C=SiteReply(message(1)), A=SiteReply(message(2)), Z=SiteReply(message(9)))
    transport = Transport(exchange, Outcome())
    replies = transport.ask(STEP, {name: message(4) for name in "CBA"})
    assert list(replies) == ["A", "B", "C"], "sorted, and no site without a request"
    assert replies["B"] == SiteReply(problem="no reply to 'train' of round 3", kind="missing")


def test_bytes_and_seconds_are_counted() -> None:
    outcome = Outcome()
    transport = Transport(
        Answering(A=SiteReply(message(2), seconds=1.5), B=SiteReply(problem="broken", seconds=0.5)),
        outcome,
    )
    for calls in (1, 2):
        transport.ask(STEP, {"A": message(10), "B": message(5)})
        assert (
            outcome.costs["A"].down_bytes == calls * 10 * 4
            and outcome.costs["A"].up_bytes == calls * 2 * 4
        )
    assert outcome.costs == {"A": SiteCost(80, 16, 3.0), "B": SiteCost(40, 0, 1.0)}, (
        "work that came to nothing took its time too"
    )


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ("no data\n\n  here", "no data here"),
        ("half a character: \ud800", "half a character: ?"),
        ("", "no reason given"),
        ("x" * 10**6, "x" * 2000),
    ],
)
def test_a_sites_reason_is_one_printable_line(problem: str, expected: str) -> None:
    (reply,) = (
        Transport(Answering(A=SiteReply(problem=problem)), Outcome())
        .ask(STEP, {"A": Message()})
        .values()
    )
    assert reply.problem == expected and reply.kind == "failed"


@pytest.mark.parametrize("phase", ["enrol", "finalize"])
def test_tensors_in_a_phase_without_tensors_are_rejected(phase: str) -> None:
    meta = {"n": {"train": 1}, "class_counts": [1]} if phase == "enrol" else {"metrics": {}}
    outcome = Outcome()
    (reply,) = (
        Transport(Answering(A=SiteReply(message(9, **meta))), outcome)
        .ask(Step(phase, 0), {"A": Message()})
        .values()
    )
    assert (reply.kind, reply.problem, outcome.costs["A"].up_bytes) == (
        "rejected",
        "unexpected tensors",
        0,
    )
