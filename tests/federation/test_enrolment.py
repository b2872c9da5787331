"""Who takes part: what newcomers are told and tell, who is missing, who may not join."""

from collections.abc import Mapping
from typing import Any, Final

import pytest

from medflare.core.errors import FederationFailed
from medflare.core.message import Message
from medflare.federation.enrolment import Enrolment, join_problems, versions_here
from medflare.federation.exchange import Reply, Transport
from medflare.federation.outcome import Outcome
from medflare.federation.settings import ENROL
from medflare.methods.base import ServerContext, Step
from medflare.methods.catalogue import get_method
from methods import squares

PIXELS: Final = 16 * 16


def counts(train: int) -> dict[str, Any]:
    """What a site with so many training images enrols with."""
    return {"n": {"train": train}, "class_counts": [train * PIXELS - 4, 4]}


COUNTS: Final = counts(7)


class Places:
    """An exchange with sites that are there in some rounds, of which some cannot take part."""

    def __init__(self, present: Mapping[int, str], broken: Mapping[str, Reply] | None = None):
        self.there, self.broken = present, broken or {}
        self.told: dict[str, dict[str, Any]] = {}

    def present(self, round: int) -> list[str]:
        return list(self.there[round])

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, Reply]:
        assert step.phase == ENROL and not any(message.states for message in outgoing.values())
        self.told |= {site: message.meta for site, message in outgoing.items()}
        events = [{"kind": "warning", "message": "a note"}]
        answers = {site: Reply(Message({}, {**COUNTS, "events": list(events)})) for site in outgoing}
        return {site: self.broken.get(site, answer) for site, answer in answers.items()}


def enrolment(places: Places, returning: Mapping[str, Mapping[str, int]] | None = None, finished: int = 0) -> Enrolment:
    plan = get_method("fedavg").plan(squares.SEGMENTATION, squares.SITES, {})
    context = ServerContext(plan, squares.SEED, 3, squares.OUTSIDE)
    return Enrolment(context, Transport(places, Outcome()), {"method": "fedavg"}, returning, finished)


def said(found: Enrolment, kind: str) -> list[tuple[str | None, int | None]]:
    return [(event["site"], event["round"]) for event in found.context.events.of(kind)]


def test_everybody_is_told_the_federation_and_remembered() -> None:
    places = Places({0: "OCBA"})
    found = enrolment(places)
    found.open(3)
    assert places.told["A"] == {"method": "fedavg", "sites": ["A", "B", "C"], "role": "inside", "finished": 0}
    assert places.told["O"]["role"] == "outside"
    assert list(found.enrolled) == ["A", "B", "C", "O"] and found.inside == ["A", "B", "C"]
    assert found.enrolled["O"] == {**COUNTS, "role": "outside"} == found.context.site_counts["O"]
    assert found.transport.outcome.enrolled is found.enrolled
    assert said(found, "warning") == [(site, None) for site in "ABCO"], "what sites note becomes events of theirs"


def test_strangers_are_not_asked() -> None:
    places = Places({0: "ABCXO"})
    enrolment(places).open(1)
    assert sorted(places.told) == ["A", "B", "C", "O"]


def test_who_comes_back_goes_on_and_a_newcomer_starts_afresh() -> None:
    places = Places({0: "ABC"})
    enrolment(places, returning=dict.fromkeys("AB", COUNTS["n"]), finished=4).open(2)
    assert {site: meta["finished"] for site, meta in places.told.items()} == {"A": 4, "B": 4, "C": 0}


def test_who_comes_back_with_other_images_is_turned_away() -> None:
    places = Places({0: "ABC"})
    found = enrolment(places, returning={"A": COUNTS["n"], "B": {**COUNTS["n"], "train": 10**9}}, finished=4)
    found.open(2)
    assert sorted(found.enrolled) == ["A", "C"] and said(found, "rejected") == [("B", 0)]
    (event,) = found.context.events.of("rejected")
    assert "counts" in event["message"] and "\n" not in event["message"]


def test_a_site_with_more_images_than_the_others_together_is_named_once() -> None:
    places = Places({0: "AB", 1: "ABC"})
    places.broken = {site: Reply(Message({}, counts(train))) for site, train in zip("ABC", (5, 5, 90), strict=True)}
    found = enrolment(places)
    found.open(2)
    assert not said(found, "warning"), "algorithm is not more than half, and of two sites nearly always one has more"
    for _ in range(2):
        found.members(Step("train", 1))
    assert [(event["site"], event["message"][:30]) for event in found.context.events.of("warning")] == [
        ("C", "has 90% of all training images")
    ]


@pytest.mark.parametrize(("told", "taken"), [({"class_counts": [7]}, False), ({"class_counts": []}, True)])
def test_counts_by_class_are_one_a_class_or_kept(told: dict[str, Any], taken: bool) -> None:
    found = enrolment(Places({0: "ABC"}, {"B": Reply(Message({}, {**COUNTS, **told}))}))
    found.open(2)
    assert ("B" in found.enrolled) == taken and said(found, "rejected") == [("B", 0)] * (not taken)


def test_a_share_is_limited_for_counts_by_class_too() -> None:
    places = Places({0: "ABC"}, {"C": Reply(Message({}, counts(28)))})
    for most, counted in ((None, {}), (0.5, {"A": 1.0, "B": 1.0, "C": 0.5})):
        found = enrolment(places)
        found.max_client_weight = most
        found.open(2)
        assert found.context.counted == counted


def test_the_absent_are_noted_at_the_start_and_at_every_step() -> None:
    found = enrolment(Places({0: "AB", 1: "A"}))
    found.open(2)
    assert said(found, "missing") == [("C", 0), ("O", 0)]
    assert found.members(Step("train", 1)) == ["A"]
    assert said(found, "missing")[2:] == [("B", 1)], "those who never came are not missed again"


def test_a_late_site_joins_by_name_and_is_asked_once() -> None:
    places = Places({0: "AB", 1: "ABC", 2: "ABC"})
    found = enrolment(places)
    found.open(2)
    places.told.clear()
    assert [found.members(Step("train", round)) for round in (1, 2)] == [["A", "B", "C"]] * 2
    assert said(found, "joined") == [("C", 1)] and list(places.told) == ["C"]


def test_a_late_site_that_cannot_take_part_stops_nobody_and_is_named_once() -> None:
    places = Places({0: "AB", 1: "ABC", 2: "ABC", 3: "ABC"}, {"C": Reply(problem="no images")})
    found = enrolment(places)
    found.open(2)
    assert [found.members(Step("train", round)) for round in (1, 2)] == [["A", "B"]] * 2
    assert said(found, "failed") == [("C", 1)]
    places.broken = {}
    assert found.members(Step("train", 3)) == ["A", "B", "C"]


def test_a_site_that_cannot_take_part_ends_the_run_before_it_begins() -> None:
    found = enrolment(Places({0: "ABC"}, {"B": Reply(problem="no images"), "C": Reply(problem="site C: another task")}))
    with pytest.raises(FederationFailed, match=r"B: no images.*site C: another task"):
        found.open(1)


def test_who_does_not_answer_in_time_is_named_and_may_join_later() -> None:
    late = Reply(problem="'enrol' of round 0 was closed after 9 s; the site was still at work", kind="late")
    places = Places({0: "ABC", 1: "ABC"}, {"C": late})
    found = enrolment(places)
    found.open(2)
    assert found.inside == ["A", "B"] and said(found, "late") == [("C", 0)]
    assert said(found, "missing") == [("O", 0)], "C is named once"
    places.broken = {}
    assert found.members(Step("train", 1)) == ["A", "B", "C"] and not said(found, "failed")


def test_where_too_few_answer_in_time_the_missing_are_named() -> None:
    silent = {"B": Reply(problem="no sign of life in 'enrol' of round 0", kind="missing"), "C": Reply(problem="too late", kind="late")}
    with pytest.raises(FederationFailed, match=r"B: no sign.*C: too late"):
        enrolment(Places({0: "ABC"}, silent)).open(2)


def test_too_few_inside_sites_are_counted_without_the_outside_ones() -> None:
    with pytest.raises(FederationFailed, match=r"1 of .*min_sites"):
        enrolment(Places({0: "BO"})).open(2)
    with pytest.raises(FederationFailed, match="none"):
        enrolment(Places({0: "O"})).open(1)


def test_problems_name_their_site_once() -> None:
    assert join_problems({"B": "late", "A": "site A has no images"}) == "site A has no images; B: late"
    assert join_problems({}) == ""


def test_a_site_that_makes_no_sense_is_turned_away_once_and_the_others_go_on() -> None:
    nonsense = Reply(Message({}, {"n": {"train": 10**400}, "class_counts": [1]}))
    places = Places({0: "ABC", 1: "ABC"}, broken={"B": nonsense})
    found = enrolment(places)
    found.open(2)
    assert found.inside == ["A", "C"]
    places.told.clear()
    assert found.members(Step("train", 1)) == ["A", "C"] and not places.told
    (event,) = found.context.events.of("rejected")
    assert event["site"] == "B"


def test_a_site_that_was_turned_away_is_not_told_to_join_later() -> None:
    found = enrolment(Places({0: "ABCO"}, {"B": Reply(Message({}, counts(7) | {"class_counts": [0]}))}))
    found.open(2)
    assert said(found, "rejected") == [("B", 0)] and not said(found, "missing")


def test_who_was_turned_away_is_among_the_reasons_for_too_few() -> None:
    nonsense = {"B": Reply(Message({}, counts(7) | {"class_counts": [0]}))}
    with pytest.raises(FederationFailed, match=r"\(B: class_counts"):
        enrolment(Places({0: "ABC"}, nonsense)).open(3)
    with pytest.raises(FederationFailed, match="B: class_counts"):
        enrolment(Places({0: "AB"}, nonsense)).open(2)


HERE: Final = versions_here()


@pytest.mark.parametrize(
    ("theirs", "kind", "words"),
    [
        ({}, None, ""),
        (HERE, None, ""),
        ({"torch": f"{HERE['torch'].partition('+')[0]}+rocm9"}, None, ""),
        ({"jax": "1.0"}, None, ""),
        ({**HERE, "torch": "1.13"}, "warning", f"runs torch 1.13 (the server {HERE['torch']}): numbers may differ in the last digits"),
        ({"medflare": f"{HERE['medflare']}.post1"}, "warning", f"runs medflare {HERE['medflare']}.post1 (the server {HERE['medflare']})"),
        ({"medflare": "9.1.0"}, "rejected", f"runs medflare 9.1.0, the server {HERE['medflare']}; install the same version at both"),
        ({"medflare": "nine"}, "rejected", "runs medflare nine"),
    ],
)
def test_a_site_that_runs_on_other_versions_is_named(theirs: dict[str, str], kind: str | None, words: str) -> None:
    places = Places({0: "ABC", 1: "ABC"}, {"B": Reply(Message({}, {**COUNTS, "versions": dict(theirs)}))})
    found = enrolment(places)
    found.open(2)
    found.members(Step("train", 1))
    events = [event for event in found.context.events if event["site"] == "B"]
    assert [event["kind"] for event in events] == ([kind] if kind else [])
    assert all(event["message"].startswith(words) for event in events)
    assert ("B" in found.enrolled) == (kind != "rejected")
