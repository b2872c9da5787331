"""Partial participation: the sites drawn for a round, and those chosen in place of a site that fails."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from medflare.core.message import Message
from medflare.federation.exchange import Reply
from medflare.federation.local.exchange import LocalExchange
from medflare.federation.participant import Participant
from medflare.federation.run import Run
from medflare.federation.settings import run_settings
from medflare.methods.base import Step
from medflare.methods.catalogue import get_method
from medflare.methods.method import Method
from methods import squares

SITES: Final = ("A", "B", "C")
Fault = Callable[[str, Step, Message], Message | None]


class RecordingExchange(LocalExchange):
    """Records which sites get requests, and changes replies by `fault`."""

    def __init__(self, method: Method, fault: Fault):
        super().__init__(SITES, lambda name: Participant(name, lambda role: squares.site(name), method, {}))
        self.fault = fault
        self.requests: list[tuple[str, int, str]] = []

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, Reply]:
        self.requests.append((step.phase, step.round, "".join(sorted(outgoing))))
        return super().__call__(step, outgoing)

    def answer(self, site: str, step: Step, message: Message) -> Reply:
        reply = super().answer(site, step, message)
        assert reply.message is not None, reply.problem
        return Reply(self.fault(site, step, reply.message))


def run(
    rounds: int, method: Method | None = None, fault: Fault = lambda site, step, message: message
) -> tuple[dict[str, Any], RecordingExchange]:
    """A run of three sites, two of them a round, and the requests in it."""
    method = method or get_method("fedavg")
    settings = run_settings({"rounds": rounds, "seed": squares.SEED, "sites_per_round": 2})
    exchange = RecordingExchange(method, fault)
    return Run(method, squares.SEGMENTATION, {}, settings, SITES).execute(exchange), exchange


def broken(site: str, step: Step, message: Message) -> Message:
    """B sends NaN."""
    if (site, step.phase) == ("B", "train"):
        next(iter(message.states["model"].values())).fill_(math.nan)
    return message


def of_phase(exchange: RecordingExchange, phase: str) -> list[tuple[int, str]]:
    return [(round, sites) for name, round, sites in exchange.requests if name == phase]


def test_another_site_is_drawn_in_place_of_a_site_that_fails() -> None:
    """Once; a site that has answered gets a second request, and other rounds have the draws that they have without the fault."""
    (_, fine), (results, exchange) = run(5), run(5, fault=broken)
    drawn, requests = of_phase(fine, "train"), of_phase(exchange, "train")
    with_b = [(round, pair) for round, pair in drawn if "B" in pair]
    assert results["status"] == "COMPLETED" and {pair for _, pair in with_b} == {"AB", "BC"}
    assert sorted(requests) == sorted([*drawn, *((round, "AC") for round, _ in with_b)])
    assert [event["round"] for event in results["events"] if event["kind"] == "repeated"] == [round for round, _ in with_b]


def test_later_steps_of_a_round_ask_the_sites_of_its_first_step() -> None:
    """Models that were trained in a round are scored by those who trained them."""
    results, exchange = run(3, get_method("robust", server="sha"), broken)
    assert results["status"] == "COMPLETED" and "undefined" not in {event["kind"] for event in results["events"]}
    assert of_phase(exchange, "score") == [(round, "AC") for round in range(3)]


def test_if_all_fail_the_run_fails() -> None:
    results, exchange = run(1, fault=lambda site, step, message: None if step.phase == "train" else message)
    assert results["status"] == "FAILED" and "0 usable replies" in results["reason"]
    assert [len(sites) for _, sites in of_phase(exchange, "train")] == [2, 2]
