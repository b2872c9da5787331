"""The schedule: which sites are drawn and get requests, what happens to replies that are missing or unusable."""

import math
from collections.abc import Callable, Mapping

import pytest

from medflare.core.errors import FederationFailed
from medflare.core.message import Message
from medflare.federation.enrolment import identity_of
from medflare.federation.exchange import SiteReply
from medflare.federation.participant import Participant
from medflare.federation.schedule import Federation
from medflare.federation.settings import Rules
from medflare.methods.base import ServerContext, Step
from medflare.methods.catalogue import get_method
from medflare.methods.method import Method
from methods import squares

SITES = ("A", "B", "C")
FEDAVG = get_method("fedavg")
FRESH = {"reset_optimizer": True}  # updates of every round then are as long as those of the first


class Sites:
    """An exchange with three sites whose answers and presence a test may change."""

    def __init__(
        self,
        absent: Mapping[int, set[str]] | None = None,
        spoil: Callable[[str, Step, Message], Message | None] = lambda site, step, message: message,
        method: Method = FEDAVG,
    ) -> None:
        self.absent, self.spoil, self.method = absent or {}, spoil, method
        self.members = {name: self.member(name) for name in (*SITES, "O")}
        self.requests: list[tuple[str, int, tuple[str, ...]]] = []

    def member(self, name: str) -> Participant:
        return Participant(name, lambda role: squares.site(name), self.method, FRESH)

    def of_phase(self, phase: str) -> list[tuple[int, str]]:
        """The requests: (round, names of the sites)."""
        return [(round, "".join(sites)) for name, round, sites in self.requests if name == phase]

    def present(self, round: int) -> list[str]:
        return [name for name in self.members if name not in self.absent.get(round, set())]

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, SiteReply]:
        self.requests.append((step.phase, step.round, tuple(outgoing)))
        answers = {
            site: self.members[site].reply(step.phase, step.round, message)
            for site, message in outgoing.items()
        }
        spoilt = {site: self.spoil(site, step, answer) for site, answer in answers.items()}
        return {site: SiteReply(answer) for site, answer in spoilt.items() if answer is not None}


def run(
    exchange: Sites, rounds: int = 2, rules: Rules | None = None, outside: tuple[str, ...] = ()
) -> Federation:
    method = exchange.method
    plan = method.plan(squares.SEGMENTATION, SITES, FRESH)
    server = method.make_server(
        ServerContext(plan, squares.SEED, rounds, outside, phases=method.site_class.phases)
    )
    identity = identity_of(method, FRESH, squares.SEGMENTATION.fingerprint(), squares.SEED)
    federation = Federation(server, exchange, rules or Rules(), identity)
    federation.run()
    return federation


def kinds(federation: Federation) -> list[tuple[str, str | None, int | None]]:
    return [(event["kind"], event["site"], event["round"]) for event in federation.events]


def changing(change: Callable[[Message], object], *victims: str, method: Method = FEDAVG) -> Sites:
    """Sites of which the victims' replies to "train" are changed."""

    def spoil(site: str, step: Step, message: Message) -> Message:
        if site in victims and step.phase == "train":
            change(message)
        return message

    return Sites(spoil=spoil, method=method)


def poisoned(*victims: str, method: Method = FEDAVG) -> Sites:
    """Sites of which the victims send NaN in their models."""
    return changing(
        lambda message: next(iter(message.states["model"].values())).fill_(math.nan),
        *victims,
        method=method,
    )


def praised(value: float) -> Sites:
    """Sites of which B sends this as its validation metric."""
    return changing(lambda message: message.meta.update(validation={"global": value}), "B")


# -- updates: test_faulty_sites.py has more of them ------------------------------------------------------------------------------


def test_every_update_unusable_repeats_the_step_and_then_fails() -> None:
    exchange = poisoned(*SITES)
    with pytest.raises(FederationFailed, match=r"A, B, C: .*NaN"):
        run(exchange)
    assert [phase for phase, _, _ in exchange.requests] == ["enrol", "train", "train"]


def test_min_sites_decides_how_many_are_enough() -> None:
    rejected = run(poisoned("B")).events.of("rejected")
    assert [(event["site"], event["round"]) for event in rejected] == [("B", 0), ("B", 1)]
    with pytest.raises(FederationFailed, match="3"):
        run(poisoned("B"), rules=Rules(min_sites=3))


def test_an_update_against_the_others_is_used_and_named() -> None:
    start = squares.start()

    def flip(message: Message) -> None:
        model = message.states["model"]
        for name, tensor in model.items():
            if tensor.is_floating_point():
                model[name] = 2 * start[name] - tensor

    events = run(changing(flip, "B"), rounds=1).events
    assert [(event["site"], event["round"]) for event in events.of("suspicious")] == [
        ("B", 0)
    ] and not events.of("rejected")


def test_if_no_site_evaluates_the_final_models_the_first_reason_is_named() -> None:
    def spoil(site: str, step: Step, message: Message) -> Message:
        if step.phase == "finalize":
            message.meta["metrics"]["global"]["dice"] = 1.5
        return message

    with pytest.raises(FederationFailed, match=r"^no site evaluated .* \(A: .*'dice'.*1\.5"):
        run(Sites(spoil=spoil), rounds=1)


# -- votes and counts ------------------------------------------------------------------------------------------------------------


def test_a_metric_that_is_not_a_number_does_not_cost_the_update() -> None:
    federation = run(praised(math.nan))
    assert ("undefined", "B", 0) in kinds(federation) and not federation.events.of("rejected")


def test_a_metric_outside_its_range_is_no_vote() -> None:
    federation = run(praised(1e9))
    rejected = federation.events.of("rejected")
    assert [event["round"] for event in rejected if event["site"] == "B"] == [0, 1]
    assert "its vote does not count" in federation.events.of("rejected")[0]["message"]
    assert federation.outcome.model_selection["global"]["candidates"][0]["votes"].keys() == {
        "A",
        "C",
    }


def test_one_site_does_not_choose_the_round() -> None:

    def lie(site: str, step: Step, message: Message) -> Message:
        if step.phase in ("train", "validate"):
            message.meta["validation"]["global"] = (
                float(step.round == 1) if site == "B" else 0.2 * step.round
            )
        return message

    election = run(Sites(spoil=lie), rounds=4).outcome.model_selection["global"]
    assert (election["round"], election["rule"]) == (4, "median")
    assert election["candidates"][0] == {
        "round": 1,
        "value": 0.2,
        "votes": {"A": 0.2, "B": 1.0, "C": 0.2},
    }


def test_no_site_counts_for_more_than_its_share() -> None:
    """B enrols with a thousand million images; capped at an algorithm it counts for as much as the two others together."""

    def lie(site: str, step: Step, message: Message) -> Message:
        if site == "B" and step.phase == "enrol":
            message.meta |= {
                "n": {**message.meta["n"], "train": 10**9},
                "class_counts": [10**9 * 16 * 16 - 4, 4],
            }
        if site == "B" and "n_samples" in message.meta:
            message.meta["n_samples"] = 10**9
        return message

    for rules, counts in ((None, 10**9), (Rules(max_client_weight=0.5), 24)):
        federation = run(Sites(spoil=lie), rounds=1, rules=rules)
        assert federation.outcome.history[0]["sites"]["B"]["n_samples"] == counts
        most = rules.max_client_weight if rules else None
        assert federation.server.aggregation.max_client_weight == most
        warnings = federation.events.of("warning")
        (share,) = [event["message"] for event in warnings if event["site"] == "B"]
        assert "has 100% of all training images" in share


# -- presence --------------------------------------------------------------------------------------------------------------------


def test_a_site_that_misses_a_round_is_noted_and_gets_the_next_request() -> None:
    exchange = Sites(absent={1: {"C"}})
    federation = run(exchange, rounds=3)
    assert [requests for phase, _, requests in exchange.requests if phase == "train"] == [
        SITES,
        ("A", "B"),
        SITES,
    ]
    assert ("missing", "C", 1) in kinds(federation)


def test_a_site_that_is_gone_is_among_the_reasons() -> None:
    """Of three sites one is rejected and one is not there: without the other neither would have ended the run."""
    reason = (
        r"1 of 2 needed replies to 'train' of round 2 are usable "
        r"\(B: no reply .*; C: not there\); correct this and resume the run"
    )
    with pytest.raises(FederationFailed, match=reason):
        run(
            Sites(
                {1: {"C"}},
                lambda site, step, message: None if (site, step.round) == ("B", 1) else message,
            )
        )


def test_outside_sites_are_delivered_to_and_never_train() -> None:
    exchange = Sites()
    federation = run(exchange, outside=("O",))
    for phase, _, requests in exchange.requests:
        if phase in ("train", "validate"):
            assert "O" not in requests
    assert federation.outcome.final_metadata["O"]["metrics"]["global"]["dice"] is not None


# -- partial participation -------------------------------------------------------------------------------------------------------

TWO = Rules(sites_per_round=2)


def test_another_site_is_drawn_in_place_of_a_site_that_fails() -> None:
    """Once; a site that has answered gets a second request, and other rounds have the draws that they have without the fault."""
    fine = Sites()
    faulty = poisoned("B")
    run(fine, 5, TWO)
    repeated = run(faulty, 5, TWO).events.of("repeated")
    with_b = [(round, pair) for round, pair in fine.of_phase("train") if "B" in pair]
    assert {pair for _, pair in with_b} == {"AB", "BC"} and [
        event["round"] for event in repeated
    ] == [round for round, _ in with_b]
    assert sorted(faulty.of_phase("train")) == sorted(
        [*fine.of_phase("train"), *((round, "AC") for round, _ in with_b)]
    )


def test_later_steps_of_a_round_ask_the_sites_of_its_first_step() -> None:
    exchange = poisoned("B", method=get_method("robust", server="sha"))
    assert not run(exchange, 3, TWO).events.of("undefined")
    assert exchange.of_phase("score") == [(round, "AC") for round in range(3)]


def test_if_all_that_are_drawn_fail_twice_the_run_fails() -> None:
    exchange = Sites(spoil=lambda site, step, message: None if step.phase == "train" else message)
    with pytest.raises(FederationFailed, match="0 of 2 needed replies"):
        run(exchange, 1, TWO)
    assert [len(sites) for _, sites in exchange.of_phase("train")] == [2, 2]


@pytest.mark.parametrize(
    ("rules", "combined"),
    [
        (Rules(), 2),
        (Rules(min_sites=3), 3),
        (Rules(min_sites=1), 1),
        (Rules(min_sites=3, sites_per_round=2), 2),
        (Rules(sites_per_round=1), 1),
    ],
)
def test_an_invitation_says_how_few_updates_a_step_may_combine(rules: Rules, combined: int) -> None:
    invitations: list[Message] = []

    class Noting(Sites):
        def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, SiteReply]:
            if step.phase == "enrol":
                invitations.extend(outgoing.values())
            return super().__call__(step, outgoing)

    run(Noting(), 1, rules)
    assert [message.meta["combined_sites"] for message in invitations] == [combined] * 3


def test_a_failure_names_the_replies_that_the_drawn_sites_had_to_send() -> None:
    exchange = poisoned("A", "B", "C")
    with pytest.raises(FederationFailed, match="0 of 2 needed replies"):
        run(exchange, 1, Rules(min_sites=3, sites_per_round=2))
