"""Statistics over repeated runs against numbers worked out by hand."""

import dataclasses
import math

import pytest

from medflare.evaluation.results import RunRecord, SiteRecord, build_results
from medflare.studies.statistics.seeds import Comparison, Estimate, Run, compare, estimate, values_of
from studies.left_out import leaving_out


def test_estimate_by_hand() -> None:
    found = estimate([1.0, 2.0, 6.0])
    assert found.mean == pytest.approx(3.0)
    assert found.sd == pytest.approx(math.sqrt((4 + 1 + 9) / 2)), "n - 1 in the denominator"
    assert found.n == 3
    assert found.interval is not None
    low, high = found.interval
    assert 1.0 <= low < 3.0 < high <= 6.0


def test_interval_of_three_runs_is_the_range_of_their_resampled_means() -> None:
    # 1/27 = 3.7 % of all resamples are (0, 0, 0): more than 2.5 %, so the interval reaches the smallest and the largest value.
    assert estimate([0.0, 1.0, 3.0]).interval == (0.0, 3.0)
    narrow = estimate([0.0, 1.0, 3.0], confidence=0.5).interval
    assert narrow is not None and narrow[0] > 0.0


def test_estimate_repeats_itself() -> None:
    values = [0.1, 0.5, 0.4, 0.9, 0.35]
    assert estimate(values) == estimate(values)


def test_estimate_of_little() -> None:
    assert estimate([]) == Estimate(None, None, 0, None)
    assert estimate([None, math.nan, 0.5]) == Estimate(0.5, None, 1, None)
    assert estimate([0.5, 0.5]) == Estimate(0.5, 0.0, 2, (0.5, 0.5))


def test_compare_by_hand() -> None:
    # Differences 1, 2, 3: t = 2 / (1 / sqrt(3)) = 3.4641 with 2 degrees of freedom, p = 1 - t / sqrt(t^2 + 2) = 0.0742;
    # the 97.5 % point of that t is 4.3027, so the interval is 2 ± 4.3027 / sqrt(3).
    found = compare([1.0, 1.0, 1.0], [2.0, 3.0, 4.0])
    assert found.difference == 2.0
    assert found.p == pytest.approx(1 - 12**0.5 / 14**0.5)
    assert found.interval == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5))
    assert found.n == 3


def test_compare_is_antisymmetric() -> None:
    first, second = [0.3, 0.5, 0.2, 0.9], [0.4, 0.45, 0.5, 0.95]
    one, other = compare(first, second), compare(second, first)
    assert one.difference is not None and other.difference is not None
    assert one.difference == pytest.approx(-other.difference)
    assert one.p == pytest.approx(other.p)
    assert one.interval is not None and other.interval is not None
    assert one.interval == pytest.approx((-other.interval[1], -other.interval[0]))


def test_compare_degenerate() -> None:
    assert compare([], []) == Comparison(None, None, None, 0)
    assert compare([0.5], [0.75]) == Comparison(0.25, None, None, 1)
    assert compare([0.5, None, math.nan], [None, 0.5, 0.5]) == Comparison(None, None, None, 0)
    assert compare([0.5, 0.2], [0.5, 0.2]) == Comparison(0.0, None, None, 2)
    shifted = compare([0.1, 0.2, 0.3], [0.6, 0.7, 0.8])
    assert (shifted.interval, shifted.p) == (None, None), "equal differences have no spread"
    with pytest.raises(ValueError, match="pairs"):
        compare([0.5], [0.5, 0.5])


def test_values_of(runs: list[Run]) -> None:
    assert values_of(runs, "global", "dice") == pytest.approx([0.5, 0.5, 0.6])
    assert values_of(runs, "global", "dice", site="B") == [0.6, 0.5, None]
    assert values_of(runs, "deployed", "dice", role="outside") == [0.1, 0.2, 0.6]
    assert values_of(runs, "global", "dice", role="outside", site="B") == [None] * 3, "B is never outside"
    assert values_of(runs, "global", "dice", site="nobody") == [None] * 3


def test_a_seed_with_several_runs_counts_once(runs: list[Run]) -> None:
    """Left out in turn: A's values as an inside site are averaged within the seed, and then over sites."""
    without_x, without_b = runs[0], leaving_out("B", 0.8, runs[0])
    both = [without_x, without_b]
    assert values_of(both, "global", "dice", site="A") == pytest.approx([0.4]), "inside in both runs"
    assert values_of(both, "global", "dice", site="B") == pytest.approx([0.6]), "inside in the first run alone"
    assert values_of(both, "global", "dice") == pytest.approx([(0.4 + 0.6) / 2])
    assert values_of(both, "deployed", "dice", role="outside") == pytest.approx([(0.1 + 0.8) / 2]), "X and B, each once"
    assert values_of([runs[1], *both], "global", "dice", site="A") == pytest.approx([0.4, 0.5]), "in the order of the seeds"


def test_models_of_several_sites_are_averaged(record: RunRecord) -> None:
    of_sites = {"global": {"dice": 0.1}, "personal/A": {"dice": 0.2}, "personal/B": {"dice": 0.6}}
    run = build_results(dataclasses.replace(record, sites={"X": SiteRecord("outside", metrics=of_sites)}))
    assert values_of([run], "personal/*", "dice", role="outside") == pytest.approx([0.4])
