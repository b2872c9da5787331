"""Updates compared with each other: the limit of their length, and their direction."""

import pytest
import torch

from medflare.core.manifest import StateSpec
from medflare.core.message import Message
from medflare.federation.update_validation.updates import Validated, capped, validate_replies

WEIGHTS = {"w": torch.ones(4)}
ALONG = torch.tensor([0.1, 0.1, 0.0, 0.0])


def validated(
    lengths: list[float], images: list[int] | None = None, weights: bool = True, sent: bool = True, strict: bool = False
) -> Validated:
    """A round in which the sites' updates have one direction, or for a negative length the opposite one."""
    sites = "ABCDE"[: len(lengths)]
    replies = {
        site: Message({"model": {"w": WEIGHTS["w"] * sent + length * ALONG}}, {}) for site, length in zip(sites, lengths, strict=True)
    }
    enrolled = {site: {"train": count} for site, count in zip(sites, images or [4] * len(sites), strict=True)}
    requests = {site: Message({"model": dict(WEIGHTS)} if sent else {}, {}) for site in sites}
    chosen = ["model"] if weights else []
    return validate_replies(replies, {"model": StateSpec.like(WEIGHTS, "")}, requests, enrolled, weights=chosen, strict=strict)


@pytest.mark.parametrize("lengths", [[1, 1, 11], [1, 2, 16], [1, 1, 1, 11], [1, 1, 90, 90], [1, 1, 1, 1e30]])
def test_longer_than_ten_times_the_others_median_is_rejected(lengths: list[float]) -> None:
    """Two sites with the same fault are detected if they are at most half."""
    assert validated(lengths).rejected.keys() == {site for site, length in zip("ABCD", lengths, strict=False) if length > 10}


@pytest.mark.parametrize("lengths", [[1, 1, 9], [1e-4, 1, 1], [1, 8, 1, 9], [0, 1, 1], [0, 0, 0], [1]])
def test_a_short_update_is_accepted(lengths: list[float]) -> None:
    result = validated(lengths)
    assert not result.rejected and not result.suspicious


@pytest.mark.parametrize(
    ("images", "length", "accepted"),
    [([4, 4, 4], 14, False), ([4, 4, 8], 14, True), ([400, 4, 4], 14, False), ([4, 4, 400], 90, True), ([4, 4, 10**9], 110, False)],
)
def test_a_site_with_more_images_may_move_further_up_to_a_hundredfold(images: list[int], length: float, accepted: bool) -> None:
    """Of honest sites of 400, 8 and 8 images the large one's update is 64 times as long (SGD with momentum), of 60, 8 and 8 20 times."""
    assert ("C" in validated([1, 1, length], images).accepted) == accepted


def test_the_limit_is_a_hundred_for_two_sites_and_for_statistics() -> None:
    assert not validated([1, 90]).rejected and validated([1, 110]).rejected.keys() == {"B"}
    assert not validated([1, 1, 90], sent=False).rejected, "gradients of honest sites differ more than updates do"
    assert validated([1, 1, 110], sent=False).rejected.keys() == {"C"}
    assert validated([1, 1, 11], weights=False).rejected.keys() == {"C"}, "a new version of what is no network"


def test_an_update_against_the_others_is_suspicious_or_rejected() -> None:
    result = validated([1, 1, -1])
    assert list(result.accepted) == ["A", "B", "C"] and result.suspicious.keys() == {"C"}
    assert validated([1, 1, -1], strict=True).rejected.keys() == {"C"}
    assert validated([1, -1], strict=True).suspicious.keys() == {"A", "B"}
    assert not validated([1, 1, -1], weights=False).suspicious, "only weights of the network have a direction"


def test_a_maximum_weight_that_not_all_sites_can_meet_gives_the_smallest_count() -> None:
    assert capped({"A": 3, "B": 2}, 1.0) == {"A": 3, "B": 2} and capped({}, 0.5) == {}
    assert capped({"A": 100.0, "B": 100.0, "C": 1.0}, 0.25) == {"A": 1.0, "B": 1.0, "C": 1.0}
