"""The limit of an update's length: ten times the others' median, in which no site has a say of its own."""

import math

import pytest
import torch

from medflare.core.manifest import EntrySpec
from medflare.core.message import Message
from medflare.federation.screening.updates import Screened, screen

WEIGHTS = {"w": torch.ones(4)}
ALONG = torch.tensor([0.1, 0.1, 0.0, 0.0])


def judged(lengths: list[float], images: list[int] | None = None, weights: bool = True, sent: bool = True) -> Screened:
    """A round in which the sites' updates have the same direction and these lengths."""
    sites = "ABCDE"[: len(lengths)]
    origin = WEIGHTS if sent else {}
    replies = {
        site: Message({"model": {"w": (WEIGHTS["w"] if sent else 0) + length * ALONG + place * 1e-6}}, {})
        for place, (site, length) in enumerate(zip(sites, lengths, strict=True))
    }
    enrolled = {site: {"train": count} for site, count in zip(sites, images or [4] * len(sites), strict=True)}
    asked = {site: Message({"model": dict(origin)} if sent else {}, {}) for site in sites}
    manifest = {"model": EntrySpec.like(WEIGHTS, "")}
    return screen(replies, manifest, asked, enrolled, weights=["model"] if weights else [])


@pytest.mark.parametrize("lengths", [[1, 1, 11], [1, 2, 16], [1, 1, 1, 11], [1, 1, 90, 90], [1, 1, 1, 1e30]])
def test_longer_than_ten_times_the_others_median_is_rejected(lengths: list[float]) -> None:
    """Two who lie alike are still held against the median of the others, as long as they are no more than half."""
    longest = {site for site, length in zip("ABCD", lengths, strict=False) if length > 10}
    assert judged(lengths).rejected.keys() == longest


@pytest.mark.parametrize("lengths", [[1, 1, 9], [1e-4, 1, 1], [1, 8, 1, 9], [5, 1, 1]])
def test_a_short_update_takes_nobody_else_out(lengths: list[float]) -> None:
    assert not judged(lengths).rejected


@pytest.mark.parametrize(("images", "taken"), [([4, 4, 4], False), ([4, 4, 8], True), ([8, 8, 12], True), ([400, 4, 4], False)])
def test_who_has_more_images_takes_more_steps(images: list[int], taken: bool) -> None:
    """Of honest sites of 400, 8 and 8 images the large one's update is 64 times as long (SGD with momentum), of 60, 8 and 8 20 times."""
    assert ("C" in judged([1, 1, 14], images).accepted) == taken


@pytest.mark.parametrize(("length", "named"), [(4.5, set()), (5.5, {"C"}), (9.5, {"C"})])
def test_from_half_of_the_limit_on_a_site_is_named(length: float, named: set[str]) -> None:
    found = judged([1, 1, length])
    assert found.suspicious.keys() == named and len(found.accepted) == 3


def test_no_number_of_images_allows_more_than_a_hundred() -> None:
    assert judged([1, 1, 110], [4, 4, 10**9]).rejected.keys() == {"C"} and not judged([1, 1, 90], [4, 4, 400]).rejected


def test_a_new_version_of_what_is_no_network_has_the_same_limit() -> None:
    assert judged([1, 1, 11], weights=False).rejected.keys() == {"C"}
    assert not judged([1, 1, 90], weights=False, sent=False).rejected, "gradients of honest sites differ more than updates do"
    assert judged([1, 1, 110], weights=False, sent=False).rejected.keys() == {"C"}


def test_of_two_sites_both_are_named_before_one_is_rejected() -> None:
    assert not judged([1, 9]).suspicious
    apart, far = judged([1, 20]), judged([1, 110])
    assert apart.suspicious.keys() == {"A", "B"} == apart.accepted.keys()
    assert far.rejected.keys() == {"B"} and not far.suspicious


def test_one_alone_is_held_against_what_it_was_sent() -> None:
    """Two numbers of 1 were sent and two moved by 0.1 each: of the length 0.14, beside 2."""
    assert not judged([1000]).rejected and judged([math.ceil(100 * 2 / 0.14)]).rejected.keys() == {"A"}
