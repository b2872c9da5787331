"""Tables of repeated runs against numbers worked out by hand."""

import dataclasses

from medflare.evaluation.results import RunRecord, SiteRecord, build_results
from medflare.studies.report import comparison_table, markdown_table
from medflare.studies.statistics import Run
from studies.left_out import leaving_out


def test_markdown_table(runs: list[Run]) -> None:
    table = markdown_table({"FedSM": runs, "single-site": runs[:1]}, "dice")
    assert table.splitlines() == [
        "| method | model | A | B | mean inside | X (outside) | mean outside | runs |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| FedSM | global | **0.500 ± 0.100** | 0.550 ± 0.071 | **0.533 ± 0.058** | – | – | 3 |",
        "| FedSM | deployed | – | – | – | **0.300 ± 0.265** | **0.300 ± 0.265** | 3 |",
        "| single-site | global | 0.400 | **0.600** | 0.500 | – | – | 1 |",
        "| single-site | deployed | – | – | – | 0.100 | 0.100 | 1 |",
    ]


def test_models_of_several_sites_share_a_row(record: RunRecord) -> None:
    of_sites = {"global": {"dice": 0.1}, "personal/A": {"dice": 0.2}, "personal/B": {"dice": 0.6}}
    run = build_results(dataclasses.replace(record, sites={"X": SiteRecord("outside", metrics=of_sites)}))
    assert markdown_table({"iop": [run]}, "dice").splitlines()[2:] == [
        "| iop | global | 0.100 | 0.100 | 1 |",
        "| iop | personal/* | **0.400** | **0.400** | 1 |",
    ]


def test_models_with_the_same_numbers_share_a_row(record: RunRecord) -> None:
    same = {"global": {"dice": 0.5}, "personal": {"dice": 0.5}, "deployed": {"dice": 0.6}}
    run = build_results(dataclasses.replace(record, sites={"A": SiteRecord("inside", metrics=same)}))
    rows = markdown_table({"FedSM": [run]}, "dice").splitlines()[2:]
    assert rows == ["| FedSM | global, personal | 0.500 | 0.500 | 1 |", "| FedSM | deployed | **0.600** | **0.600** | 1 |"]


def test_markdown_table_of_a_distance_marks_the_smallest(runs: list[Run]) -> None:
    table = markdown_table({"all": runs, "first": runs[:1]}, "hd95", ["global"])
    assert "| first | global | **4.0** | – | **4.0** |" in table


def test_a_site_left_out_in_turn_has_a_column_for_each_role(runs: list[Run]) -> None:
    turned = {**runs[0], "sites": {**runs[0]["sites"], "A": {**runs[0]["sites"]["A"], "role": "outside"}}}
    heading = markdown_table({"all": [runs[1], turned]}, "dice").splitlines()[0]
    assert "| A | B | mean inside | A (outside) | X (outside) |" in heading


def test_comparison_table(runs: list[Run]) -> None:
    """Differences of B's method to A's: +0.1 in every seed, where nothing is left to test against."""
    better = [leaving_out("X", value, run) for run, value in zip(runs, (0.2, 0.3, 0.7), strict=True)]
    lines = comparison_table({"plain": runs, "better": better}, "dice").splitlines()
    assert lines[0] == "| method | model | sites | difference to plain | paired t-test, p | Wilcoxon, p | seeds |"
    assert "| better | deployed | outside | +0.100 | – | 0.250 | 3 |" in lines
    assert not any(line.startswith("| plain | deployed") for line in lines), "not against itself"
