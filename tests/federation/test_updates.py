"""Updates compared with each other: the limit of their length, and their direction."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medflare.core.message import Message
from medflare.core.phases import Phase
from medflare.core.specs import TensorSpec
from medflare.core.states import StateDict
from medflare.federation.update_validation.drift import DriftMemory
from medflare.federation.update_validation.updates import Validated, validate_replies
from medflare.methods.aggregation import capped
from medflare.methods.base import ServerContext, Step

WEIGHTS = {"w": torch.ones(4)}
ALONG = torch.tensor([0.1, 0.1, 0.0, 0.0])


def validated_model(
    model: StateDict,
    replies: dict[str, Message],
    requests: dict[str, Message],
    images: Mapping[str, int] | None = None,
    *,
    network: StateDict | None = None,
    counted: Mapping[str, float] | None = None,
    drift: DriftMemory | None = None,
    strict: bool = False,
) -> Validated:
    """The replies to a training step, which hold a model like this one; `network`: that of the task, if it is another one."""
    phase = Phase("train", reply=(TensorSpec("model", template=lambda plan: model),))
    plan: Any = SimpleNamespace(template=lambda: model if network is None else network)
    context = ServerContext(
        plan, 0, 1, phases={"train": phase}, counted_fraction=dict(counted or {})
    )
    context.site_counts = {site: {"n": {"train": count}} for site, count in (images or {}).items()}
    step = Step("train", 0)
    return validate_replies(
        context, step, replies, requests, drift or DriftMemory(0), strict=strict
    )


def validated(
    lengths: list[float],
    images: list[int] | None = None,
    weights: bool = True,
    sent: bool = True,
    strict: bool = False,
    counted: Mapping[str, float] | None = None,
    drift: DriftMemory | None = None,
) -> Validated:
    """A round in which the sites' updates have one direction, or for a negative length the opposite one."""
    sites = "ABCDE"[: len(lengths)]
    replies = {
        site: Message({"model": {"w": WEIGHTS["w"] * sent + length * ALONG}}, {})
        for site, length in zip(sites, lengths, strict=True)
    }
    requests = {site: Message({"model": dict(WEIGHTS)} if sent else {}, {}) for site in sites}
    return validated_model(
        WEIGHTS,
        replies,
        requests,
        dict(zip(sites, images or [4] * len(sites), strict=True)),
        network=WEIGHTS if weights else {},
        counted=counted,
        drift=drift,
        strict=strict,
    )


@pytest.mark.parametrize(
    "lengths", [[1, 1, 11], [1, 2, 16], [1, 1, 1, 11], [1, 1, 90, 90], [1, 1, 1, 1e30]]
)
def test_longer_than_ten_times_the_others_median_is_rejected(lengths: list[float]) -> None:
    """Two sites with the same fault are detected if they are at most half."""
    assert validated(lengths).rejected.keys() == {
        site for site, length in zip("ABCD", lengths, strict=False) if length > 10
    }


@pytest.mark.parametrize(
    "lengths", [[1, 1, 2.9], [1e-4, 1, 1], [1, 2, 1, 2], [0, 1, 1], [0, 0, 0], [1, 9], [1]]
)
def test_a_short_update_is_accepted(lengths: list[float]) -> None:
    result = validated(lengths)
    assert not result.rejected and not result.suspicious
    for length, site in zip(lengths, "ABCD", strict=False):
        assert torch.equal(
            result.accepted[site].states["model"]["w"], WEIGHTS["w"] + length * ALONG
        ), "as it was sent"


@pytest.mark.parametrize(
    ("lengths", "images", "used"),
    [
        ([1, 1, 4], [4, 4, 4], 1),
        ([1, 2, 9], [4, 4, 4], 2),  # the upper of two
        ([1, 1, 9], [4, 4, 8], 2),  # twice as many images: twice the length
        ([1, 1, 5], [4, 4, 8], 5),  # 2.5 times the usual length 2
        ([1, 1, 9], [8, 8, 4], 1),  # fewer images are no reason for a shorter update
        ([1, 1, 50], [8, 8, 400], 50),
        ([1, 1, 60], [8, 8, 80], 10),
        ([0, 1, 9], [4, 4, 4], 1),  # a site that did not move does not count
    ],
)
def test_an_update_beyond_three_times_the_usual_length_is_clipped_to_it(
    lengths: list[float], images: list[int], used: float
) -> None:
    result = validated(lengths, images)
    assert torch.allclose(result.accepted["C"].states["model"]["w"], WEIGHTS["w"] + used * ALONG)
    assert ("C" in result.suspicious) == (used != lengths[2])
    assert "C" in result.rejected or result.suspicious.keys() <= {"C"}


def test_a_clipped_update_is_rejected_on_request() -> None:
    assert validated([1, 1, 9], strict=True).rejected.keys() == {"C"}


def test_one_tensor_is_clipped_alone_and_variances_stay_variances() -> None:
    """Weights a, b of 50 numbers: in b 2 is usual (twice its share), C moves 12. Its variance goes to 0, ten times as far as usual."""
    sent = {
        "a": torch.ones(50),
        "b": torch.ones(50),
        "running_var": torch.ones(2),
        "steps": torch.tensor(1),
        "alone": torch.ones(0),
    }
    step = torch.full((50,), 50**-0.5)
    along = torch.ones(2)

    def reply(b: float, variance: float) -> Message:
        moved = {
            "a": sent["a"] + step,
            "b": sent["b"] + b * step,
            "running_var": sent["running_var"] - variance * along,
        }
        return Message({"model": {**sent, **moved, "steps": torch.tensor(7)}}, {})

    replies = {"A": reply(1, 0.05), "B": reply(1, 0.05), "C": reply(12, 1.0)}
    requests = {site: Message({"model": dict(sent)}, {}) for site in replies}
    result = validated_model(sent, replies, requests)
    state = result.accepted["C"].states["model"]
    twice_its_share = 2 * 0.5**0.5 * 2**0.5  # of the length of a and b together
    assert torch.allclose(state["b"], sent["b"] + twice_its_share * step) and torch.equal(
        state["a"], replies["A"].states["model"]["a"]
    )
    assert (
        torch.allclose(state["running_var"], torch.full((2,), 1 - 2 * 0.05)) and state["steps"] == 7
    )
    assert "model/" in result.suspicious["C"]
    assert result.accepted["A"] is replies["A"]


@pytest.mark.parametrize("lengths", [[1, 101], [1e-3, 1], [1, 1e30]])
def test_of_two_sites_that_are_far_apart_both_are_named(lengths: list[float]) -> None:
    """One that sends a thousandth of its update has the other one rejected."""
    result = validated(lengths)
    assert result.rejected.keys() == {"B"} and result.suspicious.keys() == {"A"}
    assert "that of B by" in result.suspicious["A"] and "either" in result.suspicious["A"]


def test_the_limit_of_a_sites_weight_is_one_of_its_length_too() -> None:
    """A site that claims a billion images may move as far as it likes; its weight is limited."""
    images = {"A": 24, "B": 24, "C": 10**9}
    limited = capped(images, 0.5)
    fractions = {site: limited[site] / count for site, count in images.items()}
    for counted, moved in (({}, 9), (fractions, 2)):
        result = validated([1, 1, 9], list(images.values()), counted=counted)
        model = result.accepted["C"].states["model"]["w"]
        assert torch.allclose(model, WEIGHTS["w"] + moved * ALONG)


def test_a_tensor_that_holds_a_whole_update_is_rejected() -> None:
    """A bias of 1 of 10001 numbers that holds all of nine updates; its usual share is a hundredth."""
    sent = {"weight": torch.zeros(10000), "bias": torch.zeros(1)}
    honest = {"weight": torch.full((10000,), 0.01), "bias": torch.full((1,), 0.01)}
    replies = {site: Message({"model": dict(honest)}, {}) for site in "AB"}
    replies["C"] = Message(
        {"model": {"weight": torch.zeros(10000), "bias": torch.full((1,), 9.0)}}, {}
    )
    requests = {site: Message({"model": dict(sent)}, {}) for site in replies}
    result = validated_model(sent, replies, requests)
    assert result.rejected.keys() == {"C"} and "bias" in result.rejected["C"]


def test_what_is_no_new_version_of_what_was_sent_is_not_clipped() -> None:
    assert not validated([1, 1, 50], sent=False).suspicious


@pytest.mark.parametrize(
    ("images", "length", "accepted"),
    [
        ([4, 4, 4], 14, False),
        ([4, 4, 8], 14, True),
        ([400, 4, 4], 14, False),
        ([4, 4, 400], 90, True),
        ([4, 4, 10**9], 110, False),
    ],
)
def test_a_site_with_more_images_may_move_further_up_to_a_hundredfold(
    images: list[int], length: float, accepted: bool
) -> None:
    """Of honest sites of 400, 8 and 8 images the large one's update is 64 times as long (SGD with momentum), of 60, 8 and 8 20 times."""
    assert ("C" in validated([1, 1, length], images).accepted) == accepted


def test_the_limit_is_a_hundred_for_two_sites_and_for_statistics() -> None:
    assert not validated([1, 90]).rejected and validated([1, 110]).rejected.keys() == {"B"}
    assert not validated([1, 1, 90], sent=False).rejected, (
        "gradients of honest sites differ more than updates do"
    )
    assert validated([1, 1, 110], sent=False).rejected.keys() == {"C"}
    assert validated([1, 1, 11], weights=False).rejected.keys() == {"C"}, (
        "a new version of what is no network"
    )


def test_a_gradient_of_the_usual_length_is_accepted_where_those_of_others_have_vanished() -> None:
    """A site that was absent has not learnt yet what the others have."""
    drift = DriftMemory(0)
    assert not validated([1, 1, 50], sent=False, drift=drift).rejected
    for _ in range(2):  # one site cannot raise what is usual
        later = validated([1e-6, 1e-6, 90], sent=False, drift=drift)
        assert not later.rejected
    assert validated([1e-6, 1e-6, 110], sent=False, drift=drift).rejected.keys() == {"C"}
    pair = DriftMemory(0)  # nor one of two
    assert not validated([1, 99], sent=False, drift=pair).rejected
    assert validated([1, 300], sent=False, drift=pair).rejected.keys() == {"B"}


def test_an_update_against_the_others_is_suspicious_or_rejected() -> None:
    result = validated([1, 1, -1])
    assert list(result.accepted) == ["A", "B", "C"] and result.suspicious.keys() == {"C"}
    assert validated([1, 1, -1], strict=True).rejected.keys() == {"C"}
    assert not validated([1, -1], strict=True).suspicious, "of two, neither is the majority"
    assert not validated([1, 1, -1], weights=False).suspicious, (
        "only weights of the network have a direction"
    )


def test_sites_that_have_converged_are_not_suspicious() -> None:
    """Their updates add up to zero, so that each points against the sum of the others."""
    start = {"w": torch.zeros(4)}
    updates = torch.eye(4) - 0.25
    replies = {
        site: Message({"model": {"w": u}}, {}) for site, u in zip("ABCD", updates, strict=True)
    }
    requests = {site: Message({"model": start}, {}) for site in replies}
    assert not validated_model(start, replies, requests).suspicious
    flipped = Message({"model": {"w": torch.tensor([-1.0, -1, -1, 0])}}, {})
    agreeing = {
        site: Message({"model": {"w": torch.tensor([1.0, 1, 1, 0.1])}}, {}) for site in "ABC"
    }
    assert validated_model(start, agreeing | {"D": flipped}, requests).suspicious.keys() == {"D"}


def test_a_maximum_weight_that_not_all_sites_can_meet_gives_the_smallest_count() -> None:
    assert capped({"A": 3, "B": 2}, 1.0) == {"A": 3, "B": 2} and capped({}, 0.5) == {}
    assert capped({"A": 100.0, "B": 100.0, "C": 1.0}, 0.25) == {"A": 1.0, "B": 1.0, "C": 1.0}
