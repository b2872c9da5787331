"""The schedule: who is asked, what happens to answers that are missing, unusable or come from newcomers."""

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


def participant(name: str) -> Participant:
    return Participant(name, lambda role: squares.site(name), FEDAVG, {})


class Sites:
    """An exchange with three sites whose answers and presence a test may change."""

    def __init__(self, absent: Mapping[int, set[str]] | None = None) -> None:
        self.members = {name: participant(name) for name in (*SITES, "O")}
        self.absent = absent or {}
        self.asked: list[tuple[str, int, tuple[str, ...]]] = []
        self.spoil: Callable[[str, Step, Message], Message | Reply | None] = lambda site, step, message: message

    def present(self, round: int) -> list[str]:
        return [name for name in self.members if name not in self.absent.get(round, set())]

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, Reply]:
        self.asked.append((step.phase, step.round, tuple(outgoing)))
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
        plan = FEDAVG.plan(task, SITES, {})
        server = FEDAVG.make_server(ServerContext(plan, squares.SEED, rounds, outside, phases=FEDAVG.site_class.phases))
        own = {**identity_of(FEDAVG, {}, task.fingerprint(), squares.SEED), **identity}
        federation = Federation(server, exchange, lambda phase: FEDAVG.site_class.manifest(phase, plan), rules or Rules(), own)
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


def facts(**changes: Any) -> Any:
    def spoil(site: str, step: Step, message: Message) -> Message:
        if site == "B" and step.phase == "train":
            message.facts.update(changes)
        return message

    return spoil


def first(state: dict[str, torch.Tensor]) -> str:
    return next(iter(state))


FAULTS = {
    "NaN": (poison(lambda s: s[first(s)].fill_(math.nan)), "NaN or infinity"),
    "infinity": (poison(lambda s: s[first(s)].fill_(math.inf)), "NaN or infinity"),
    "huge": (poison(lambda s: s[first(s)].fill_(1e30)), "times the round's median"),
    "missing tensor": (poison(lambda s: s.pop(first(s))), "missing tensor"),
    "extra tensor": (poison(lambda s: s.update(extra=torch.zeros(1))), "unexpected tensor 'extra'"),
    "shape": (poison(lambda s: s.update({first(s): torch.zeros(1)})), "has shape (1,), expected"),
    "dtype": (poison(lambda s: s.update({first(s): s[first(s)].double()})), "has dtype torch.float64"),
    "n_samples 0": (facts(n_samples=0), "n_samples is 0"),
    "n_samples negative": (facts(n_samples=-3), "n_samples is -3"),
    "n_samples NaN": (facts(n_samples=math.nan), "n_samples is nan"),
    "n_samples too many": (facts(n_samples=10**6), "more than the 12 training images"),
    "loss NaN": (facts(loss=math.nan), "diverged"),
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

    def test_the_mean_is_that_of_the_other_sites(self, run: Any) -> None:
        bad, without = Sites(), Sites()
        bad.spoil = FAULTS["NaN"][0]
        without.spoil = lambda site, step, message: Reply(problem="out") if site == "B" and step.phase == "train" else message
        assert squares.equal(run(bad).server.model, run(without).server.model)

    def test_a_metric_that_is_not_a_number_does_not_cost_the_update(self, run: Any) -> None:
        exchange = Sites()
        exchange.spoil = facts(validation={"global": math.nan})
        federation = run(exchange)
        assert ("undefined", "B", 0) in kinds(federation)
        assert not federation.events.of("rejected")

    def test_every_update_unusable_repeats_the_step_and_then_fails(self, run: Any) -> None:
        exchange = Sites()
        exchange.spoil = poison(lambda s: s[first(s)].fill_(math.nan), victims=SITES)
        with pytest.raises(FederationFailed, match=r"0 usable replies to 'train' in round 0, 2 are needed \(A: .*NaN"):
            run(exchange)
        assert [phase for phase, _, _ in exchange.asked] == ["enrol", "train", "train"]

    def test_a_fault_that_passes_costs_one_repetition(self, run: Any) -> None:
        exchange, seen = Sites(), []

        def once(site: str, step: Step, message: Message) -> Message:
            if step.phase == "train" and site not in seen:
                seen.append(site)
                message.facts["n_samples"] = 0
            return message

        exchange.spoil = once
        federation = run(exchange)
        assert len(federation.events.of("repeated")) == 1

    def test_min_sites_decides_how_many_are_enough(self, run: Any) -> None:
        exchange = Sites()
        exchange.spoil = FAULTS["NaN"][0]
        with pytest.raises(FederationFailed, match=r"2 usable replies .* 3 are needed"):
            run(exchange, rules=Rules(min_sites=3))


class TestPresence:
    def test_a_site_that_misses_a_round_is_noted_and_asked_again(self, run: Any) -> None:
        exchange = Sites(absent={1: {"C"}})
        federation = run(exchange, rounds=3)
        assert [asked for phase, _, asked in exchange.asked if phase == "train"] == [SITES, ("A", "B"), SITES]
        assert ("missing", "C", 1) in kinds(federation)

    def test_a_site_that_joins_late_enrols_then(self, run: Any) -> None:
        exchange = Sites(absent={0: {"C"}})
        federation = run(exchange)
        assert ("missing", "C", 0) in kinds(federation)
        assert ("joined", "C", 1) in kinds(federation)
        assert ("train", 1, SITES) in exchange.asked

    def test_a_site_that_says_nothing_is_missing(self, run: Any) -> None:
        exchange = Sites()
        exchange.spoil = lambda site, step, message: None if site == "A" and step.phase == "train" else message
        assert ("missing", "A", 0) in kinds(run(exchange))

    def test_too_few_sites_fail_before_training(self, run: Any) -> None:
        exchange = Sites(absent={0: {"A", "B"}})
        with pytest.raises(FederationFailed, match="1 of the sites A, B, C enrolled"):
            run(exchange)
        assert [phase for phase, _, _ in exchange.asked] == ["enrol"]

    def test_a_site_that_cannot_enrol_ends_the_run_by_name(self, run: Any) -> None:
        exchange = Sites()
        exchange.spoil = lambda site, step, message: Reply(problem="no images") if (site, step.phase) == ("B", "enrol") else message
        with pytest.raises(FederationFailed, match=r"^B: no images$"):
            run(exchange)

    def test_another_task_at_a_site_is_refused(self, run: Any) -> None:
        with pytest.raises(Exception, match="site A and the server differ in task"):
            run(Sites(), task="another fingerprint")

    def test_partial_participation_draws_the_same_sites_every_time(self, run: Any) -> None:
        drawn = []
        for _ in range(2):
            exchange = Sites()
            run(exchange, rounds=4, rules=Rules(sites_per_round=2))
            drawn.append([asked for phase, _, asked in exchange.asked if phase == "train"])
        assert drawn[0] == drawn[1]
        assert {len(asked) for asked in drawn[0]} == {2}
        assert len(set(drawn[0])) > 1

    def test_outside_sites_are_delivered_to_and_never_train(self, run: Any) -> None:
        exchange = Sites()
        federation = run(exchange, outside=("O",))
        assert all("O" not in asked for phase, _, asked in exchange.asked if phase in ("train", "validate"))
        assert federation.outcome.delivered["O"]["metrics"]["global"]["dice"] is not None
