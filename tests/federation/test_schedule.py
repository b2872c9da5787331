"""The schedule: which sites get requests, what happens to replies that are missing, unusable or come from newcomers."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from medflare.core.errors import FederationFailed
from medflare.core.message import Message
from medflare.federation.exchange import Reply
from medflare.federation.participant import Participant, identity_of
from medflare.federation.schedule import Federation
from medflare.federation.settings import Rules
from medflare.methods.base import ServerContext, Step
from medflare.methods.catalogue import get_method
from methods import squares

SITES = ("A", "B", "C")
FEDAVG = get_method("fedavg")
FRESH = {"reset_optimizer": True}  # updates of every round then are as long as those of the first


def participant(name: str) -> Participant:
    return Participant(name, lambda role: squares.site(name), FEDAVG, FRESH)


class Sites:
    """An exchange with three sites whose answers and presence a test may change."""

    def __init__(self, absent: Mapping[int, set[str]] | None = None) -> None:
        self.members = {name: participant(name) for name in (*SITES, "O")}
        self.absent = absent or {}
        self.requests: list[tuple[str, int, tuple[str, ...]]] = []
        self.spoil: Callable[[str, Step, Message], Message | Reply | None] = lambda site, step, message: message

    def present(self, round: int) -> list[str]:
        return [name for name in self.members if name not in self.absent.get(round, set())]

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, Reply]:
        self.requests.append((step.phase, step.round, tuple(outgoing)))
        replies = {}
        for site, message in outgoing.items():
            answer = self.spoil(site, step, self.members[site].answer(step.phase, step.round, message))
            if answer is not None:
                replies[site] = answer if isinstance(answer, Reply) else Reply(answer)
        return replies


@pytest.fixture
def run() -> Callable[..., Federation]:
    def start(exchange: Sites, rounds: int = 2, rules: Rules | None = None, outside: tuple[str, ...] = (), **identity: Any) -> Federation:
        task = squares.SEGMENTATION
        plan = FEDAVG.plan(task, SITES, FRESH)
        server = FEDAVG.make_server(ServerContext(plan, squares.SEED, rounds, outside, phases=FEDAVG.site_class.phases))
        expected = {**identity_of(FEDAVG, FRESH, task.fingerprint(), squares.SEED), **identity}
        federation = Federation(server, exchange, rules or Rules(), expected)
        federation.run()
        return federation

    return start


def kinds(federation: Federation) -> list[tuple[str, str | None, int | None]]:
    return [(event["kind"], event["site"], event["round"]) for event in federation.events]


def poison(entry: Callable[[dict[str, torch.Tensor]], Any], victims: tuple[str, ...] = ("B",), round: int | None = None) -> Any:
    """Changes the model that the victims send, by `entry(state)`."""

    def spoil(site: str, step: Step, message: Message) -> Message:
        if site in victims and step.phase == "train" and round in (None, step.round):
            entry(message.states["model"])
        return message

    return spoil


def meta(**changes: Any) -> Any:
    def spoil(site: str, step: Step, message: Message) -> Message:
        if site == "B" and step.phase == "train":
            message.meta.update(changes)
        return message

    return spoil


def flip(state: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]) -> None:
    """The update in the opposite direction."""
    state.update({name: 2 * sent[name] - tensor if tensor.is_floating_point() else tensor for name, tensor in state.items()})


def first(state: dict[str, torch.Tensor]) -> str:
    return next(iter(state))


FAULTS = {
    "NaN": (poison(lambda s: s[first(s)].fill_(math.nan)), "NaN"),
    "huge": (poison(lambda s: s[first(s)].fill_(1e30)), "median"),
    "missing tensor": (poison(lambda s: s.pop(first(s))), "missing"),
    "shape": (poison(lambda s: s.update({first(s): torch.zeros(1)})), "shape"),
    "n_samples": (meta(n_samples=10**6), "n_samples"),
    "loss NaN": (meta(loss=math.nan), "loss"),
}


class TestBadUpdates:
    @pytest.mark.parametrize("fault", FAULTS)
    def test_one_bad_site_is_named_and_the_others_go_on(self, run: Any, fault: str) -> None:
        spoil, words = FAULTS[fault]
        exchange = Sites()
        exchange.spoil = spoil
        federation = run(exchange)
        rejected = federation.events.of("rejected", site="B")
        assert [event["round"] for event in rejected] == [0, 1]
        assert all(words in event["message"] for event in rejected)
        assert all(torch.isfinite(tensor).all() for tensor in federation.server.model.values())

    def test_a_metric_that_is_not_a_number_does_not_cost_the_update(self, run: Any) -> None:
        exchange = Sites()
        exchange.spoil = meta(validation={"global": math.nan})
        federation = run(exchange)
        assert ("undefined", "B", 0) in kinds(federation)
        assert not federation.events.of("rejected")

    def test_every_update_unusable_repeats_the_step_and_then_fails(self, run: Any) -> None:
        exchange = Sites()
        exchange.spoil = poison(lambda s: s[first(s)].fill_(math.nan), victims=SITES)
        with pytest.raises(FederationFailed, match=r"A: .*NaN"):
            run(exchange)
        assert [phase for phase, _, _ in exchange.requests] == ["enrol", "train", "train"]

    def test_min_sites_decides_how_many_are_enough(self, run: Any) -> None:
        exchange = Sites()
        exchange.spoil = FAULTS["NaN"][0]
        with pytest.raises(FederationFailed, match="3"):
            run(exchange, rules=Rules(min_sites=3))


class TestOddUpdates:
    def test_an_update_against_the_others_is_used_and_named(self, run: Any) -> None:
        exchange, start = Sites(), squares.start()
        exchange.spoil = poison(lambda state: flip(state, start), round=0)
        events = run(exchange, rounds=1).events
        assert [(event["site"], event["round"]) for event in events.of("suspicious")] == [("B", 0)] and not events.of("rejected")


class TestVotes:
    def test_one_site_does_not_choose_the_round(self, run: Any) -> None:
        """B praises the model after the first round; its vote stands in the outcome."""
        exchange = Sites()

        def lie(site: str, step: Step, message: Message) -> Message:
            if step.phase in ("train", "validate"):
                message.meta["validation"]["global"] = float(step.round == 1) if site == "B" else 0.2 * step.round
            return message

        exchange.spoil = lie
        federation = run(exchange, rounds=4)
        election = federation.outcome.model_selection["global"]
        assert (election["round"], election["rule"]) == (4, "median")
        assert election["candidates"][0] == {"round": 1, "value": 0.2, "votes": {"A": 0.2, "B": 1.0, "C": 0.2}}

    def test_a_metric_outside_its_range_is_no_vote(self, run: Any) -> None:
        exchange = Sites()
        exchange.spoil = meta(validation={"global": 1e9})
        federation = run(exchange)
        assert [event["round"] for event in federation.events.of("rejected", site="B")] == [0, 1]
        assert "its vote does not count" in federation.events.of("rejected")[0]["message"]
        assert federation.outcome.model_selection["global"]["candidates"][0]["votes"].keys() == {"A", "C"}


class TestCounts:
    def test_no_site_counts_for_more_than_its_share(self, run: Any) -> None:
        """B enrols with a thousand million images; capped at an algorithm it counts for as much as the two others together."""
        exchange = Sites()

        def lie(site: str, step: Step, message: Message) -> Message:
            if site == "B" and step.phase == "enrol":
                message.meta |= {"n": {**message.meta["n"], "train": 10**9}, "class_counts": [10**9 * 16 * 16 - 4, 4]}
            if site == "B" and "n_samples" in message.meta:
                message.meta["n_samples"] = 10**9
            return message

        exchange.spoil = lie
        free, bound = run(exchange, rounds=1), run(exchange, rounds=1, rules=Rules(max_client_weight=0.5))
        for federation, counts in ((free, 10**9), (bound, 24)):
            assert federation.outcome.history[0]["sites"]["B"]["n_samples"] == counts
            assert "has 100% of all training images" in federation.events.of("warning", site="B")[0]["message"]


class TestPresence:
    def test_a_site_that_misses_a_round_is_noted_and_gets_the_next_request(self, run: Any) -> None:
        exchange = Sites(absent={1: {"C"}})
        federation = run(exchange, rounds=3)
        assert [requests for phase, _, requests in exchange.requests if phase == "train"] == [SITES, ("A", "B"), SITES]
        assert ("missing", "C", 1) in kinds(federation)

    def test_a_site_that_is_gone_is_among_the_reasons(self, run: Any) -> None:
        """Of three sites one is rejected and one is not there: without the other neither would have ended the run."""
        exchange = Sites(absent={1: {"C"}})
        exchange.spoil = lambda site, step, message: None if (site, step.round) == ("B", 1) else message
        reason = r"1 usable replies to 'train' in round 1, 2 are needed \(B: no answer .*; C: not there\)"
        with pytest.raises(FederationFailed, match=reason):
            run(exchange)

    def test_another_task_at_a_site_is_refused(self, run: Any) -> None:
        with pytest.raises(Exception, match="site A and the server differ in task"):
            run(Sites(), task="another fingerprint")

    def test_outside_sites_are_delivered_to_and_never_train(self, run: Any) -> None:
        exchange = Sites()
        federation = run(exchange, outside=("O",))
        assert all("O" not in requests for phase, _, requests in exchange.requests if phase in ("train", "validate"))
        assert federation.outcome.delivered["O"]["metrics"]["global"]["dice"] is not None
