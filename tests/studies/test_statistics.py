"""Statistics over repeated runs against numbers worked out by hand."""

import dataclasses
import math

import pytest

from medflare.evaluation.results import SiteRecord, build_results
from medflare.studies.statistics import Comparison, Estimate, compare, comparison_table, estimate, markdown_table, values_of


@pytest.fixture
def runs(record):
    """Three seeds; global Dice of A is 0.4, 0.5, 0.6 and of B 0.6, 0.5, undefined."""

    def run(seed: int, a: float, b: float | None, deployed: float):
        sites = {
            "A": SiteRecord("inside", metrics={"global": {"dice": a, "hd95": 10 * a}}),
            "B": SiteRecord("inside", metrics={"global": {"dice": b}}),
            "X": SiteRecord("outside", metrics={"deployed": {"dice": deployed}}),
        }
        return build_results(dataclasses.replace(record, seed=seed, sites=sites))

    return [run(0, 0.4, 0.6, 0.1), run(1, 0.5, 0.5, 0.2), run(2, 0.6, None, 0.6)]


def test_estimate_by_hand():
    found = estimate([1.0, 2.0, 6.0])
    assert found.mean == pytest.approx(3.0)
    assert found.sd == pytest.approx(math.sqrt((4 + 1 + 9) / 2)), "n - 1 in the denominator"
    assert found.n == 3
    low, high = found.interval
    assert 1.0 <= low < 3.0 < high <= 6.0


def test_interval_of_three_runs_is_the_range_of_their_resampled_means():
    # 1/27 = 3.7 % of all resamples are (0, 0, 0): more than 2.5 %, so the interval reaches the smallest and the largest value.
    assert estimate([0.0, 1.0, 3.0]).interval == (0.0, 3.0)
    assert estimate([0.0, 1.0, 3.0], confidence=0.5).interval[0] > 0.0


def test_estimate_repeats_itself():
    values = [0.1, 0.5, 0.4, 0.9, 0.35]
    assert estimate(values) == estimate(values)


def test_estimate_of_little():
    assert estimate([]) == Estimate(None, None, 0, None)
    assert estimate([None, math.nan, 0.5]) == Estimate(0.5, None, 1, None)
    assert estimate([0.5, 0.5]) == Estimate(0.5, 0.0, 2, (0.5, 0.5))


def test_compare_by_hand():
    # Differences 1, 2, 3: t = 2 / (1 / sqrt(3)) = 3.4641 with 2 degrees of freedom, p = 1 - t / sqrt(t^2 + 2) = 0.0742;
    # signed ranks all positive: p = 2 * (1/2)^3 = 0.25.
    found = compare([1.0, 1.0, 1.0], [2.0, 3.0, 4.0])
    assert found.difference == 2.0
    assert found.t_test == pytest.approx(1 - 12**0.5 / 14**0.5)
    assert found.wilcoxon == pytest.approx(0.25)
    assert found.n == 3


def test_compare_is_antisymmetric():
    first, second = [0.3, 0.5, 0.2, 0.9], [0.4, 0.45, 0.5, 0.95]
    one, other = compare(first, second), compare(second, first)
    assert one.difference == pytest.approx(-other.difference)
    assert (one.t_test, one.wilcoxon) == pytest.approx((other.t_test, other.wilcoxon))


def test_compare_degenerate():
    assert compare([], []) == Comparison(None, None, None, 0)
    assert compare([0.5], [0.75]) == Comparison(0.25, None, None, 1)
    assert compare([0.5, None, math.nan], [None, 0.5, 0.5]) == Comparison(None, None, None, 0)
    assert compare([0.5, 0.2], [0.5, 0.2]) == Comparison(0.0, None, 1.0, 2)
    shifted = compare([0.1, 0.2, 0.3], [0.6, 0.7, 0.8])
    assert shifted.t_test is None, "equal differences have no spread"
    assert shifted.wilcoxon == pytest.approx(0.25)
    with pytest.raises(ValueError, match="pairs"):
        compare([0.5], [0.5, 0.5])


def test_values_of(runs):
    assert values_of(runs, "global", "dice") == pytest.approx([0.5, 0.5, 0.6])
    assert values_of(runs, "global", "dice", site="B") == [0.6, 0.5, None]
    assert values_of(runs, "deployed", "dice", role="outside") == [0.1, 0.2, 0.6]
    assert values_of(runs, "global", "dice", role="outside", site="B") == [None] * 3, "B is never outside"
    assert values_of(runs, "global", "dice", site="nobody") == [None] * 3


def test_a_seed_with_several_runs_counts_once(runs):
    """Left out in turn: A's values as an inside site are averaged within the seed, and then over sites."""
    without_x, without_b = runs[0], leaving_out("B", 0.8, runs[0])
    both = [without_x, without_b]
    assert values_of(both, "global", "dice", site="A") == pytest.approx([0.4]), "inside in both runs"
    assert values_of(both, "global", "dice", site="B") == pytest.approx([0.6]), "inside in the first run alone"
    assert values_of(both, "global", "dice") == pytest.approx([(0.4 + 0.6) / 2])
    assert values_of(both, "deployed", "dice", role="outside") == pytest.approx([(0.1 + 0.8) / 2]), "X and B, each once"
    assert values_of([runs[1], *both], "global", "dice", site="A") == pytest.approx([0.4, 0.5]), "in the order of the seeds"


def leaving_out(site: str, value: float, run):
    """The run with `site` outside in X's place."""
    outside = {**run["sites"]["X"], "metrics": {"deployed": {"dice": value}}}
    return {**run, "sites": {"A": run["sites"]["A"], site: outside}}


def test_models_of_several_sites_are_averaged(record):
    of_sites = {"global": {"dice": 0.1}, "personal/A": {"dice": 0.2}, "personal/B": {"dice": 0.6}}
    run = build_results(dataclasses.replace(record, sites={"X": SiteRecord("outside", metrics=of_sites)}))
    assert values_of([run], "personal/*", "dice", role="outside") == pytest.approx([0.4])
    assert markdown_table({"iop": [run]}, "dice").splitlines()[2:] == [
        "| iop | global | 0.100 | 0.100 | 1 |",
        "| iop | personal/* | **0.400** | **0.400** | 1 |",
    ]


def test_markdown_table(runs):
    table = markdown_table({"FedSM": runs, "single-site": runs[:1]}, "dice")
    assert table.splitlines() == [
        "| method | model | A | B | mean inside | X (outside) | mean outside | runs |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| FedSM | global | **0.500 ± 0.100** | 0.550 ± 0.071 | **0.533 ± 0.058** | – | – | 3 |",
        "| FedSM | deployed | – | – | – | **0.300 ± 0.265** | **0.300 ± 0.265** | 3 |",
        "| single-site | global | 0.400 | **0.600** | 0.500 | – | – | 1 |",
        "| single-site | deployed | – | – | – | 0.100 | 0.100 | 1 |",
    ]


def test_models_with_the_same_numbers_share_a_row(record):
    same = {"global": {"dice": 0.5}, "personal": {"dice": 0.5}, "deployed": {"dice": 0.6}}
    run = build_results(dataclasses.replace(record, sites={"A": SiteRecord("inside", metrics=same)}))
    rows = markdown_table({"FedSM": [run]}, "dice").splitlines()[2:]
    assert rows == ["| FedSM | global, personal | 0.500 | 0.500 | 1 |", "| FedSM | deployed | **0.600** | **0.600** | 1 |"]


def test_markdown_table_of_a_distance_marks_the_smallest(runs):
    table = markdown_table({"all": runs, "first": runs[:1]}, "hd95", ["global"])
    assert "| first | global | **4.0** | – | **4.0** |" in table


def test_a_site_left_out_in_turn_has_a_column_for_each_role(runs):
    turned = {**runs[0], "sites": {**runs[0]["sites"], "A": {**runs[0]["sites"]["A"], "role": "outside"}}}
    heading = markdown_table({"all": [runs[1], turned]}, "dice").splitlines()[0]
    assert "| A | B | mean inside | A (outside) | X (outside) |" in heading


def test_comparison_table(runs):
    """Differences of B's method to A's: +0.1 in every seed, where nothing is left to test against."""
    better = [leaving_out("X", value, run) for run, value in zip(runs, (0.2, 0.3, 0.7), strict=True)]
    lines = comparison_table({"plain": runs, "better": better}, "dice").splitlines()
    assert lines[0] == "| method | model | sites | difference to plain | paired t-test, p | Wilcoxon, p | seeds |"
    assert "| better | deployed | outside | +0.100 | – | 0.250 | 3 |" in lines
    assert not any(line.startswith("| plain | deployed") for line in lines), "not against itself"
