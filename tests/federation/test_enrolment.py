"""Enrollment: what sites are sent and reply, which sites are missing, late or rejected."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from foreign.install import METHOD, install
from medflare.core.errors import FederationFailed
from medflare.core.message import Message
from medflare.federation.enrolment import Enrolment, join_problems, versions_here
from medflare.federation.exchange import SiteReply, Transport
from medflare.federation.outcome import Outcome
from medflare.federation.settings import ENROL
from medflare.methods.base import ServerContext, Step
from medflare.methods.catalogue import get_method
from medflare.methods.fedavg import FedAvgSite
from methods import squares

PIXELS: Final = 16 * 16


def counts(train: int) -> dict[str, Any]:
    """The metadata of a site with so many training images."""
    return {"n": {"train": train}, "class_counts": [train * PIXELS - 4, 4]}


COUNTS: Final = counts(7)


class Sites:
    """An exchange with sites that are there in some rounds, of which some cannot take part."""

    def __init__(self, present: Mapping[int, str], broken: Mapping[str, SiteReply] | None = None):
        self.there, self.broken = present, broken or {}
        self.sent: dict[str, dict[str, Any]] = {}

    def present(self, round: int) -> list[str]:
        return list(self.there[round])

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, SiteReply]:
        assert step.phase == ENROL
        for message in outgoing.values():
            assert not message.states
        self.sent |= {site: message.meta for site, message in outgoing.items()}
        events = [{"kind": "warning", "message": "a note"}]
        answers = {
            site: SiteReply(Message({}, {**COUNTS, "events": list(events)})) for site in outgoing
        }
        return {site: self.broken.get(site, answer) for site, answer in answers.items()}


IDENTITY: Final = {"method": "fedavg", "hyper": {}}


def enrolment(
    sites: Sites, returning: Mapping[str, Mapping[str, int]] | None = None, finished: int = 0
) -> Enrolment:
    plan = get_method("fedavg").plan(squares.SEGMENTATION, squares.SITES, {})
    context = ServerContext(plan, squares.SEED, 3, squares.OUTSIDE)
    return Enrolment(context, Transport(sites, Outcome()), IDENTITY, returning or {}, finished)


def noted(admission: Enrolment, kind: str) -> list[tuple[str | None, int | None]]:
    return [(event["site"], event["round"]) for event in admission.context.events.of(kind)]


def test_every_site_of_the_run_is_enrolled_and_no_other() -> None:
    sites = Sites({0: "OCBAX"})
    admission = enrolment(sites)
    admission.open(3)
    assert sites.sent["A"] == {
        "method": "fedavg",
        "hyper": {},
        "sites": ["A", "B", "C"],
        "role": "inside",
        "finished": 0,
    }
    assert sites.sent["O"]["role"] == "outside" and "X" not in sites.sent
    assert list(admission.enrolled) == ["A", "B", "C", "O"] and admission.inside == ["A", "B", "C"]
    assert (
        admission.enrolled["O"]
        == {**COUNTS, "role": "outside"}
        == admission.context.site_counts["O"]
    )
    assert admission.transport.outcome.enrolled is admission.enrolled
    assert noted(admission, "warning") == [(site, None) for site in "ABCO"]


def test_a_returning_site_continues_unless_its_counts_changed_and_a_new_one_starts() -> None:
    sites = Sites({0: "ABC"})
    admission = enrolment(
        sites, returning={"A": COUNTS["n"], "B": {**COUNTS["n"], "train": 10**9}}, finished=4
    )
    admission.open(2)
    assert {site: meta["finished"] for site, meta in sites.sent.items()} == {"A": 4, "B": 4, "C": 0}
    assert sorted(admission.enrolled) == ["A", "C"] and noted(admission, "rejected") == [("B", 0)]
    (event,) = admission.context.events.of("rejected")
    assert "counts" in event["message"] and "\n" not in event["message"]


def test_a_site_with_more_images_than_the_others_together_is_named_once() -> None:
    sites = Sites({0: "AB", 1: "ABC"})
    sites.broken = {
        site: SiteReply(Message({}, counts(train)))
        for site, train in zip("ABC", (5, 5, 90), strict=True)
    }
    admission = enrolment(sites)
    admission.open(2)
    assert not noted(admission, "warning")
    for _ in range(2):
        admission.members(Step("train", 1))
    assert [
        (event["site"], event["message"][:30]) for event in admission.context.events.of("warning")
    ] == [("C", "has 90% of all training images")]


def test_a_maximum_weight_applies_to_counts_by_class() -> None:
    sites = Sites({0: "ABC"}, {"C": SiteReply(Message({}, counts(28)))})
    for most, counted in ((None, {}), (0.5, {"A": 1.0, "B": 1.0, "C": 0.5})):
        admission = enrolment(sites)
        admission.max_client_weight = most
        admission.open(2)
        assert admission.context.counted_fraction == counted


def test_absent_sites_are_noted_at_each_step_and_a_late_one_joins_and_is_invited_once() -> None:
    sites = Sites({0: "AB", 1: "A", 2: "ABC", 3: "ABC"})
    admission = enrolment(sites)
    admission.open(2)
    sites.sent.clear()
    assert [admission.members(Step("train", round)) for round in (1, 2, 3)] == [
        ["A"],
        *[["A", "B", "C"]] * 2,
    ]
    assert noted(admission, "missing") == [("C", 0), ("O", 0), ("B", 1)]
    assert noted(admission, "joined") == [("C", 2)] and list(sites.sent) == ["C"]


LATE: Final = SiteReply(
    problem="'enrol' of round 1 was closed after 9 s; the site was still at work", kind="late"
)


@pytest.mark.parametrize(
    ("present", "reply", "round"), [("AB", SiteReply(problem="no images"), 1), ("ABC", LATE, 0)]
)
def test_a_site_that_fails_late_or_is_late_is_named_once_and_may_join_later(
    present: str, reply: SiteReply, round: int
) -> None:
    sites = Sites({0: present, 1: "ABC", 2: "ABC", 3: "ABC"}, {"C": reply})
    admission = enrolment(sites)
    admission.open(2)
    assert [admission.members(Step("train", step)) for step in (1, 2)] == [["A", "B"]] * 2
    assert noted(admission, reply.kind) == [("C", round)]
    sites.broken = {}
    assert admission.members(Step("train", 3)) == ["A", "B", "C"]


def test_a_site_that_cannot_take_part_ends_the_run() -> None:
    admission = enrolment(
        Sites(
            {0: "ABC"},
            {"B": SiteReply(problem="no images"), "C": SiteReply(problem="site C: another task")},
        )
    )
    with pytest.raises(
        FederationFailed, match=r"B: no images.*site C: another task.*--min-sites 1"
    ):
        admission.open(1)


def test_sites_that_cannot_take_part_are_left_out_where_the_others_are_enough() -> None:
    broken = {"B": SiteReply(problem="no images")}
    admission = enrolment(Sites({0: "ABC"}, broken))
    admission.open(2, all_present=False)
    assert admission.inside == ["A", "C"] and noted(admission, "failed") == [("B", 0)]
    with pytest.raises(FederationFailed, match=r"2 of the sites .* min_sites is 3.*B: no images"):
        enrolment(Sites({0: "ABC"}, broken)).open(3, all_present=False)


def test_too_few_inside_sites_end_the_run_with_the_reasons() -> None:
    with pytest.raises(FederationFailed, match=r"1 of .*min_sites"):
        enrolment(Sites({0: "BO"})).open(2)
    problems = {
        "B": SiteReply(problem="no sign of life", kind="missing"),
        "C": SiteReply(Message({}, counts(7) | {"class_counts": [0]})),
    }
    with pytest.raises(FederationFailed, match=r"B: no sign.*C: class_counts"):
        enrolment(Sites({0: "ABC"}, problems)).open(2)


def test_a_range_is_of_the_training_images() -> None:
    """The server sends the sum of their numbers to all sites."""
    sides = [[16.0, 16.0], [16.0, 16.0]]
    values = [[0.0], [1.0]]
    trained_on = {"sides": sides, "spacing": None, "extent": None, "coloured": [False]}
    trained_on |= {"medians": values, "contrasts": values}
    answers = {}
    for site, images in (("A", 7), ("B", 2**63)):
        meta = {**COUNTS, "trained_on": {**trained_on, "images": images}}
        answers[site] = SiteReply(Message({}, meta))
    admission = enrolment(Sites({0: "ABC"}, answers))
    admission.open(2)
    assert admission.inside == ["A", "C"]
    (event,) = admission.context.events.of("rejected")
    assert event["site"] == "B" and "more images than it trains on" in event["message"]


@pytest.mark.parametrize("joins", [0, 1])
def test_a_range_far_beyond_the_others_is_named_once(joins: int) -> None:
    """Also if the site joins later."""
    answers = {}
    for site, span in (("A", 1.0), ("B", 1e300), ("C", 2.0)):
        sides = [[16.0, 16.0], [16.0, 16.0]]
        trained_on = {"images": 7, "sides": sides, "spacing": None, "extent": None}
        trained_on |= {"coloured": [False], "medians": [[0.0], [1.0]], "contrasts": [[0.0], [span]]}
        answers[site] = SiteReply(Message({}, {**COUNTS, "trained_on": trained_on}))
    present = {0: "AC" if joins else "ABC", 1: "ABC", 2: "ABC"}
    admission = enrolment(Sites(present, answers))
    admission.open(2)
    for round in (1, 2):
        admission.members(Step("train", round))
    (event,) = admission.context.events.of("warning")
    assert (event["site"], event["round"]) == ("B", joins)
    assert "up to 1e+300, those of the others up to 2;" in event["message"]


def test_counts_by_class_are_of_the_training_images() -> None:
    """They decide class weights, shares and which model other sites get."""
    everything = {**COUNTS, "class_counts": [2**53, 0]}
    admission = enrolment(Sites({0: "ABC"}, {"B": SiteReply(Message({}, everything))}))
    admission.open(2)
    assert admission.inside == ["A", "C"]


def test_a_rejected_site_is_named_once_and_not_invited_again() -> None:
    invalid = {"n": {"train": 10**400}, "class_counts": [1]}
    suppressed = {**COUNTS, "class_counts": []}
    replies = {"B": SiteReply(Message({}, invalid)), "C": SiteReply(Message({}, suppressed))}
    sites = Sites({0: "ABCO", 1: "ABCO"}, broken=replies)
    admission = enrolment(sites)
    admission.open(2)
    assert admission.inside == ["A", "C"], "counts by class may be suppressed"
    sites.sent.clear()
    assert admission.members(Step("train", 1)) == ["A", "C"] and not sites.sent
    assert noted(admission, "rejected") == [("B", 0)] and not noted(admission, "missing")


HERE: Final = versions_here(IDENTITY, squares.SEGMENTATION)


@pytest.mark.parametrize(
    ("versions", "kind", "tokens"),
    [
        ({}, None, ()),
        ({"torch": f"{HERE['torch'].partition('+')[0]}+rocm9"}, None, ()),
        ({**HERE, "torch": "1.13"}, "warning", ("torch 1.13", HERE["torch"])),
        (
            {"medflare": f"{HERE['medflare']}.post1"},
            "warning",
            (f"medflare {HERE['medflare']}.post1",),
        ),
        ({"medflare": "9.1.0"}, "rejected", ("medflare 9.1.0", HERE["medflare"])),
        ({"medflare": "nine"}, "rejected", ("medflare nine",)),
        ({"medflare code": "0" * 16}, "warning", ("other code of medflare",)),
    ],
)
def test_a_site_with_other_versions_is_named_or_rejected(
    versions: dict[str, str], kind: str | None, tokens: tuple[str, ...]
) -> None:
    sites = Sites(
        {0: "ABC", 1: "ABC"}, {"B": SiteReply(Message({}, {**COUNTS, "versions": dict(versions)}))}
    )
    admission = enrolment(sites)
    admission.open(2)
    admission.members(Step("train", 1))
    events = [event for event in admission.context.events if event["site"] == "B"]
    assert [event["kind"] for event in events] == ([kind] if kind else [])
    for event in events:
        for token in tokens:
            assert token in event["message"]
    assert ("B" in admission.enrolled) == (kind != "rejected")


@pytest.mark.parametrize(
    ("site", "kind", "text"),
    [
        ({}, None, ""),
        ({"damped-fedavg code": "0" * 16}, "warning", "other code of damped-fedavg"),
        ({"damped-fedavg": "0.1.5"}, "warning", "damped-fedavg 0.1.5 (the server 0.1)"),
        ({"damped-fedavg": "0.2"}, "rejected", "runs damped-fedavg 0.2, the server 0.1;"),
    ],
)
def test_a_site_with_another_release_of_the_methods_package_is_named_or_refused(
    site: dict[str, str],
    kind: str | None,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(install(tmp_path)))
    identity = {"method": METHOD, "hyper": {}}
    here = versions_here(identity, squares.SEGMENTATION)
    assert here["damped-fedavg"] == "0.1" and len(here["damped-fedavg code"]) == 16
    reply = SiteReply(Message({}, {**COUNTS, "versions": {**here, **site}}))
    admission = enrolment(Sites({0: "ABC"}, {"B": reply}))
    admission.identity = identity
    admission.open(2)
    events = [event for event in admission.context.events if event["site"] == "B"]
    assert [event["kind"] for event in events] == ([kind] if kind else [])
    for event in events:
        assert text in event["message"]
    assert ("B" in admission.enrolled) == (kind != "rejected")


def test_an_inside_site_without_training_images_is_rejected() -> None:
    sites = Sites({0: "ABCO"}, {site: SiteReply(Message({}, counts(0))) for site in "BO"})
    for site in sites.broken.values():
        assert site.message is not None
        site.message.meta["class_counts"] = []
    admission = enrolment(sites)
    admission.context = replace(admission.context, phases=FedAvgSite.phases)
    admission.open(2)
    assert admission.inside == ["A", "C"] and noted(admission, "rejected") == [("B", 0)]
    (event,) = admission.context.events.of("rejected")
    assert "training images" in event["message"] and "O" in admission.enrolled


@pytest.mark.parametrize(
    ("site", "problem", "line"),
    [
        ("a", "model holds NaN", "a: model holds NaN"),
        ("site-1", "site-10 is the same", "site-1: site-10 is the same"),
        ("UKE", "no UKE images", "UKE: no UKE images"),
        ("b", "site b: no images", "site b: no images"),
        ("b", "b has no images", "b has no images"),
    ],
)
def test_a_problem_has_the_name_of_its_site_once(site: str, problem: str, line: str) -> None:
    assert join_problems({site: problem}) == line
