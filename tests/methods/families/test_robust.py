"""Robust rules: values by hand, degenerate cases, one harmful site, and the server algorithms that can use them."""

import math

import pytest
import torch

import medflare
from helpers.small_tasks import tiny_phantom
from medflare.core.text import JsonDict
from medflare.methods.aggregation import SiteModel
from medflare.methods.catalogue import get_method
from medflare.methods.families.server_rules.robust import RobustServer
from medflare.methods.parts import robust
from methods import squares

RULES = ["median", "trimmed", "krum", "geometric", "clipped"]
NONE = robust.RobustLimits()


def states(*rows: list[float]) -> dict[str, dict[str, torch.Tensor]]:
    return {f"site-{number}": {"w": torch.tensor(row)} for number, row in enumerate(rows)}


def test_median_and_trimmed_mean_by_hand() -> None:
    """Coordinate by coordinate: (1, 2, 9) -> 2, (30, 10, 20) -> 20; of four values the mean of the middle two.

    β = 0.2 of five sites: one off at either end, (0, 1, 2, 6, 1000) -> 3.
    """
    assert robust.robust_mean(states([1.0, 30.0], [2.0, 10.0], [9.0, 20.0]), "median")[
        "w"
    ].tolist() == [2.0, 20.0]
    assert robust.robust_mean(states([1.0], [2.0], [4.0], [100.0]), "median")["w"].tolist() == [3.0]
    assert robust.robust_mean(states([6.0], [0.0], [1000.0], [1.0], [2.0]), "trimmed", 0.2)[
        "w"
    ].tolist() == [3.0]


def test_counters_and_dtypes() -> None:
    mean = robust.robust_mean(
        {
            s: {"n": torch.tensor(n), "w": torch.tensor([0.5]).half()}
            for s, n in (("a", 3), ("b", 8), ("c", 4))
        },
        "median",
    )
    assert (
        mean["n"].item() == 4
        and mean["n"].dtype == torch.int64
        and mean["w"].dtype == torch.float16
    )


def test_shares_beyond_half_are_refused() -> None:
    for trim in (0.5, -0.5, math.nan):
        with pytest.raises(ValueError, match="trim"):
            robust.RobustLimits(trim=trim)


@pytest.mark.parametrize(("trim", "warned"), [(0.2, 1), (0.33, 1), (0.34, 0)])
def test_a_trim_that_cuts_no_site_gives_a_warning(trim: float, warned: int) -> None:
    server = squares.server(RobustServer, rule="trimmed", trim=trim)
    texts = [event["message"] for event in server.context.events.of("warning")]
    assert len(server.context.sites) == 3 and len(texts) == warned
    assert all("is their mean" in text for text in texts)


def test_fewer_than_three_sites_give_a_warning() -> None:
    events = medflare.run_local("robust", tiny_phantom(batch_size=32), 2, rounds=1, seed=0)[
        "events"
    ]
    assert any(event["kind"] == "warning" and "three" in event["message"] for event in events)


def by(
    rule: str, sites: dict[str, dict[str, torch.Tensor]], origin: float = 0.0, clip: float = 1.0
) -> list[float]:
    state, _ = robust.combined(
        sites,
        dict.fromkeys(sites, 1.0),
        rule,
        robust.RobustLimits(clip=clip),
        {"w": torch.tensor([origin])},
    )
    return state["w"].tolist()


class TestKrum:
    def test_by_hand(self) -> None:
        """K = 5, f = 1: two nearest. Of 0, 1, 2, 4, 100 the scores are 1 + 4, 1 + 1, 1 + 4, 4 + 9 and 96² + 98²: the second site."""
        sites = states([0.0], [1.0], [2.0], [4.0], [100.0])
        for faulty in (None, 1, 9):  # at most what five sites allow
            assert robust.krum_weights(robust.squared_distances(sites), faulty) == [
                0.0,
                1.0,
                0.0,
                0.0,
                0.0,
            ]
        assert by("krum", sites) == [1.0]

    @pytest.mark.parametrize("number", [math.nan, math.inf])
    def test_a_model_with_nan_or_infinity_is_never_chosen(self, number: float) -> None:
        """FLARE's own workflows do not validate updates. Two nearest of 1, 2, 4: 1 + 9, 1 + 4 and 4 + 9."""
        assert by("krum", states([number], [1.0], [2.0], [4.0])) == [2.0]

    @pytest.mark.parametrize("rule", ["geometric", "clipped"])
    def test_rules_by_lengths_name_its_site(self, rule: str) -> None:
        with pytest.raises(ValueError, match="site-1"):
            by(rule, states([1.0], [math.nan], [2.0], [4.0]))

    def test_the_counter_is_that_of_the_chosen_one(self) -> None:
        sites = {
            f"s{number}": {"w": torch.tensor(float(number)), "n": torch.tensor(100 * number)}
            for number in range(5)
        }
        chosen, _ = robust.combined(sites, {}, "krum", robust.RobustLimits())
        assert chosen["n"] == 100 * chosen["w"]


class TestGeometricMedian:
    def test_on_a_line_it_is_the_median(self) -> None:
        assert by("geometric", states([0.0], [1.0], [50.0])) == pytest.approx([1.0], abs=1e-3)

    def test_a_triangle_by_hand(self) -> None:
        """Fermat's point of (0, 0), (4, 0), (2, 6): below the apex, where all angles are 120°, at (2, 2 / √3)."""
        sites = {
            place: {"w": torch.tensor(row)}
            for place, row in zip("ABC", ([0.0, 0.0], [4.0, 0.0], [2.0, 6.0]), strict=True)
        }
        actual, weights = robust.combined(sites, dict.fromkeys("ABC", 1.0), "geometric", NONE)
        assert actual["w"].tolist() == pytest.approx([2.0, 2 / 3**0.5], abs=1e-4)
        assert sum(weights.values()) == pytest.approx(1)

    def test_shares_count(self) -> None:
        """Of two points the heavier one is the geometric median; of two alike any point between them, here the mean."""
        far = robust.squared_distances(states([0.0], [1.0]))
        assert robust.geometric_weights(far, [3.0, 1.0]) == pytest.approx([1.0, 0.0], abs=1e-4)
        assert robust.geometric_weights(far, [1.0, 1.0]) == pytest.approx([0.5, 0.5])


def test_clipped_updates_by_hand() -> None:
    """From 1 the updates are 1, 2 and -8, their median length 2: 1 + (1 + 2 - 2) / 3. Without an origin from the median, 2."""
    sites = states([2.0], [3.0], [-7.0])
    assert by("clipped", sites, origin=1.0) == pytest.approx([1 + 1 / 3])
    assert by("clipped", sites, origin=1.0, clip=4.0) == pytest.approx([1 - 5 / 3])
    state, _ = robust.combined(sites, dict.fromkeys(sites, 1.0), "clipped", NONE)
    assert state["w"].tolist() == pytest.approx([2 + (0 + 1 - 1) / 3])


@pytest.mark.parametrize("rule", RULES)
def test_running_statistics_count_in_distances(rule: str) -> None:
    """The harmful site E has the most central weights, and wrong running statistics."""
    rows = zip("ABCDE", (0.9, 1.2, 0.8, 1.1, 1.0), (0.9, 1.0, 1.1, 1.2, -1000.0), strict=True)
    sites = {
        site: {"w": torch.tensor([weight]), "running_mean": torch.tensor([mean])}
        for site, weight, mean in rows
    }
    actual, _ = robust.combined(
        sites,
        dict.fromkeys(sites, 1.0),
        rule,
        NONE,
        {name: torch.zeros(1) for name in ("w", "running_mean")},
    )
    for tensor in actual.values():
        assert 0.5 <= tensor.item() <= 1.2


@pytest.mark.parametrize("rule", RULES)
def test_one_site_alone_and_two(rule: str) -> None:
    assert by(rule, states([5.0])) == [5.0]
    assert by(rule, states([5.0], [7.0]), origin=6.0) == pytest.approx([6.0])


@pytest.mark.parametrize("name", ["fedavg", "fedsm", "iop_fl", "grace", "sha", "robust"])
@pytest.mark.parametrize("rule", RULES)
def test_every_averaging_server_algorithm_has_them(name: str, rule: str) -> None:
    method = get_method(name)
    hyper: JsonDict = {"rho": 0.0} if name == "sha" else {}
    server = squares.server(method.server_class, rule=rule, outside=(), **hyper)
    sent = server.model
    models = {}
    for site, step in zip("ABCDE", (0.8, 0.9, 1.1, 1.2, -1000.0), strict=True):
        moved = {
            name: tensor + step if tensor.is_floating_point() else tensor
            for name, tensor in sent.items()
        }
        models[site] = SiteModel(moved, 5.0, {"score": 0.5})
    state = server.aggregation.shared(models, 0, sent)
    travelled = {
        name: (state[name] - sent[name]).mean().item()
        for name in state
        if sent[name].is_floating_point()
    }
    for step in travelled.values():
        assert 0.5 < step < 1.2, travelled
