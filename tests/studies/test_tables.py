"""Tables of repeated runs against numbers worked out by hand."""

import dataclasses
from typing import Any

import pytest

from medflare.evaluation.results import RunRecord, SiteRecord, build_results
from medflare.studies.statistics import Run
from medflare.studies.tables.report import (
    differences_table,
    own_differences_table,
    routing_table,
    selector_table,
    sites_table,
    study_report,
    study_tables,
    summary_table,
)
from medflare.studies.tables.rows import Row, is_rising, selection, with_oracle
from studies.test_statistics import leaving_out


def test_sites_table(runs: list[Run]) -> None:
    table = sites_table({"FedSM": runs, "single-site": runs[:1]}, "dice")
    assert table.splitlines() == [
        "| method | model | selection | A | B | mean inside | X (outside) | mean outside | runs |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| FedSM | global | – | **0.500 ± 0.100** | 0.550 ± 0.071 | **0.533 ± 0.058** | – | – | 3 |",
        "| FedSM | deployed | – | – | – | – | **0.300 ± 0.265** | **0.300 ± 0.265** | 3 |",
        "| single-site | global | – | 0.400 | **0.600** | 0.500 | – | – | 1 |",
        "| single-site | deployed | – | – | – | – | 0.100 | 0.100 | 1 |",
    ]


def test_models_of_several_sites_share_a_row(record: RunRecord) -> None:
    of_sites = {"global": {"dice": 0.1}, "personal/A": {"dice": 0.2}, "personal/B": {"dice": 0.6}}
    run = build_results(dataclasses.replace(record, sites={"X": SiteRecord("outside", metrics=of_sites)}))
    assert sites_table({"iop": [run]}, "dice").splitlines()[2:] == [
        "| iop | global | – | 0.100 | 0.100 | 1 |",
        "| iop | personal/* | – | **0.400** | **0.400** | 1 |",
    ]


def test_models_with_the_same_numbers_share_a_row(record: RunRecord) -> None:
    same = {"global": {"dice": 0.5}, "personal": {"dice": 0.5}, "deployed": {"dice": 0.6}}
    run = build_results(dataclasses.replace(record, sites={"A": SiteRecord("inside", metrics=same)}))
    rows = sites_table({"FedSM": [run]}, "dice").splitlines()[2:]
    assert rows == ["| FedSM | global, personal | – | 0.500 | 0.500 | 1 |", "| FedSM | deployed | – | **0.600** | **0.600** | 1 |"]


def test_a_row_says_by_what_its_round_was_chosen(record: RunRecord) -> None:
    rules = {
        "median": "best dice, median of sites",
        "paired": "best dice, paired over sites",
        "mean": "best dice, mean of sites",
        "best": "best dice",
        "last": "last",
    }
    for rule, shown in rules.items():
        run = build_results(dataclasses.replace(record, hyper={"site": {}, "server": {"selection": rule}}))
        assert selection(Row("fedsm", ("global",), [], [run])) == shown


def test_a_table_of_a_distance_marks_the_smallest(runs: list[Run]) -> None:
    table = sites_table({"all": runs, "first": runs[:1]}, "hd95", ["global"])
    assert "| first | global | – | **4.0** | – | **4.0** |" in table


def test_a_site_left_out_in_turn_has_a_column_for_each_role(runs: list[Run]) -> None:
    turned = {**runs[0], "sites": {**runs[0]["sites"], "A": {**runs[0]["sites"]["A"], "role": "outside"}}}
    heading = sites_table({"all": [runs[1], turned]}, "dice").splitlines()[0]
    assert "| A | B | mean inside | A (outside) | X (outside) |" in heading


def test_differences_table(runs: list[Run]) -> None:
    """Differences of B's method to A's: +0.1 in every seed, where nothing is left to test against."""
    better = [leaving_out("X", value, run) for run, value in zip(runs, (0.2, 0.3, 0.7), strict=True)]
    lines = differences_table({"plain": runs, "better": better}, "dice").splitlines()
    assert lines[0] == (
        "| method | model | sites | difference to plain | 95 % over seeds | t-test over seeds, p | seeds "
        "| 95 % over patients | test over patients, p | patients |"
    )
    assert "| better | deployed | outside | +0.100 | – | – | 3 | – | – | – |" in lines
    assert not any(line.startswith("| plain | deployed") for line in lines), "not against itself"
    against = differences_table({"plain": runs, "better": better}, "dice", "better")
    assert "| difference to better |" in against and "| plain | deployed | outside | -0.100 | – | – | 3 | – | – | – |" in against
    assert "| better | deployed" not in against


def test_rows_are_held_against_training_alone_wherever_it_stands(record: RunRecord) -> None:
    alone = [measured(record, seed, "single-site", A={"global": 0.5, "personal": 0.5, "deployed": 0.5}) for seed in (0, 1)]
    fedavg = [measured(record, seed, A={"global": 0.6, "personal": 0.6, "deployed": 0.6}) for seed in (0, 1)]
    titles = ["dice, differences", "dice, differences to single-site"]
    tables = study_tables({"fedavg": fedavg, "single-site": alone}, titles)
    assert list(tables) == titles
    assert "| fedavg | global, personal, deployed | inside | +0.100 |" in tables["dice, differences to single-site"]
    assert list(study_tables({"single-site": alone, "fedavg": fedavg}, titles)) == titles[:1], "once is enough"


# ---- what the mean hides -----------------------------------------------------------------------------------------------------


def measured(record: RunRecord, seed: int, method: str = "fedavg", **sites: dict[str, float]) -> Run:
    """A run whose sites have these Dice by model, with as many equal patients as the seed has room for."""
    records = {site: SiteRecord("inside", metrics={model: {"dice": value} for model, value in of.items()}) for site, of in sites.items()}
    run = build_results(
        dataclasses.replace(record, method=method, seed=seed, sites=records, hyper={"site": {}, "server": {"selection": "last"}})
    )
    patients = {"A": ["p", "q", "r"], "B": ["p"]}
    scores = {
        site: {model: {"patients": patients[site], "values": {"dice": [value] * len(patients[site])}} for model, value in of.items()}
        for site, of in sites.items()
    }
    return {**run, "scores": scores}


def line_of(table: str, label: str, model: str) -> list[str]:
    """The cells of a row after its method and model."""
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {label} | {model} |")]
    return [cell.strip() for cell in line.split("|")[3:-1]]


def test_the_summary_says_what_the_mean_hides(record: RunRecord) -> None:
    alone = [measured(record, 0, "single-site", A={"deployed": 0.75}, B={"deployed": 0.25})]
    method = [measured(record, 0, A={"global": 0.5}, B={"global": 0.75})]
    table = summary_table({"together": method, "single-site": alone}, "dice")
    assert line_of(table, "together", "global") == ["last", "inside", "0.625", "0.500 (A)", "0.562", "1 of 2 (A)", "–"]
    assert line_of(table, "single-site", "deployed") == ["last", "inside", "0.500", "0.250 (B)", "0.625", "–", "–"]


def test_without_scores_of_patients_only_their_column_is_empty(record: RunRecord) -> None:
    run = {**measured(record, 0, A={"global": 0.5}, B={"global": 0.75}), "scores": {}}
    assert line_of(summary_table({"together": [run]}, "dice"), "together", "global")[2:5] == ["0.625", "0.500 (A)", "–"]


def test_a_row_at_the_constant_answer_is_named(record: RunRecord) -> None:
    flat = [measured(record, seed, "constant", A={"global": 0.2 + seed / 10}, B={"global": 0.4}) for seed in (0, 1)]
    method = [measured(record, seed, A={"global": 0.205 + seed / 10}, B={"global": 0.6}) for seed in (0, 1)]
    table = summary_table({"together": method, "constant": flat}, "dice")
    assert line_of(table, "together", "global")[-1] == "constant answer at A", "seed by seed, since splits differ"
    assert line_of(table, "constant", "global")[-1] == "–", "not against itself"


def test_a_row_that_still_rises_is_named(record: RunRecord) -> None:
    run = measured(record, 0, A={"global": 0.5}, B={"global": 0.5})
    rising = {**run, "curves": {"global": {site: [[at, at / 20] for at in range(13)] for site in ("A", "B")}}}
    assert line_of(summary_table({"m": [rising]}, "dice"), "m", "global")[-1] == "still rising"


def test_a_curve_that_swings_does_not_rise() -> None:
    assert not is_rising({at: 0.5 + 0.1 * (at % 2) for at in range(20)})
    assert not is_rising({})


def test_the_oracle_is_shown_as_what_it_is_and_wins_nothing(record: RunRecord) -> None:
    run = measured(record, 0, A={"global": 0.5, "personal": 0.75}, B={"global": 0.5, "personal": 0.25})
    groups = {"m": [run], "constant": [measured(record, 0, "constant", A={"global": 0.5, "personal": 0.6})]}
    groups = with_oracle({**groups, "fedavg": [measured(record, 0, A={"global": 0.5, "personal": 0.5})]}, "dice")
    table = sites_table(groups, "dice")
    assert line_of(table, "m", "oracle (chosen on test)") == ["last", "0.750", "0.500", "0.625", "1"]
    assert line_of(table, "m", "personal") == ["last", "**0.750**", "0.250", "0.500", "1"]
    assert table.count("oracle") == 1, "a reference has no oracle, and one model for all purposes leaves nothing to choose"
    plain = [measured(record, 0, A={"deployed": 0.5}, B={"deployed": 0.5})]
    assert "| m | oracle (chosen on test) | inside | +0.125 |" in differences_table({"plain": plain, "m": groups["m"]}, "dice")


def caution(groups: dict[str, list[Run]], token: str) -> str:
    """The line above the tables that holds this token; "" where there is none."""
    return next((line for line in study_report(groups).split("\n## ")[0].splitlines() if line.startswith("- ") and token in line), "")


def test_unequal_rows_are_named(record: RunRecord) -> None:
    def row(reset: bool, rounds: int) -> list[Run]:
        hyper = {"site": {"reset_optimizer": reset}, "server": {}}
        return [build_results(dataclasses.replace(record, rounds=rounds, hyper=hyper))]

    groups = {"fresh": row(True, 2), "kept": row(False, 2), "long": row(False, 3)}
    moments = caution(groups, "reset_optimizer")
    assert moments.index("kept, long") < moments.index("fresh")
    assert caution(groups, "rounds") and not caution(groups, "task") and caution(groups, "--reference constant,single-site")
    without_choice: list[Run] = [build_results(dataclasses.replace(record, method="prr", hyper={"site": {}, "server": {}}))]
    constant: list[Run] = [build_results(dataclasses.replace(record, method="constant", hyper={"site": {}, "server": {}}))]
    assert "prr" in caution({"kept": row(False, 2), "prr": without_choice, "constant": constant}, "reset_optimizer")
    assert not caution({"kept": row(False, 2), "constant": constant}, "reset_optimizer"), "a constant trains nothing"
    assert record.task is not None
    tasks = [dataclasses.replace(record.task, **changes) for changes in ({}, {"resplit": 1}, {"size": (8, 8), "batch_size": 1})]
    of_others: dict[str, list[Run]] = {
        str(place): [build_results(dataclasses.replace(record, task=task))] for place, task in enumerate(tasks)
    }
    for name in ("0", "1"):
        del of_others[name][0]["configuration"]["task"]["batch_size"]  # of a version that did not write it down
    assert "(size)" in caution(of_others, "task")


@pytest.mark.parametrize(
    ("method", "server"),
    [
        ("scaffold", {"weighting": "uniform"}),
        ("sha", {"weighting": "samples", "sha": True}),
        ("grace", {"weighting": "samples", "consistency": True}),
        ("robust", {"weighting": "samples", "rule": "median"}),
        ("prr", {"pfa": True}),
    ],
)
def test_rows_that_weigh_sites_otherwise_need_fedavg_with_sites_alike(record: RunRecord, method: str, server: dict[str, Any]) -> None:
    def row(method: str, server: dict[str, Any]) -> list[Run]:
        return [build_results(dataclasses.replace(record, method=method, hyper={"site": {"reset_optimizer": False}, "server": server}))]

    groups = {"fedavg": row("fedavg", {"weighting": "samples"}), method: row(method, server), "constant": row("constant", {})}
    assert method in caution(groups, "--reference uniform")
    assert not caution({**groups, "control": row("fedavg", {"weighting": "uniform"})}, "uniform")
    assert not caution({name: groups[name] for name in ("fedavg", "constant")}, "uniform")


# ---- what methods chose ------------------------------------------------------------------------------------------------------


def test_a_deployed_model_is_compared_with_its_runs_other_models(record: RunRecord) -> None:
    runs = [measured(record, seed, A={"global": 0.5, "deployed": 0.5 + gain}) for seed, gain in ((0, 0.1), (1, 0.3))]
    same = [measured(record, 0, A={"global": 0.5, "deployed": 0.5})]
    lines = own_differences_table({"fedsm": runs, "fedavg": same}, "dice").splitlines()
    assert len(lines) == 3 and lines[2].startswith("| fedsm | global | inside | +0.200 | -1.071 to +1.471 |"), "t(1) is 12.706 at 0.975"
    assert own_differences_table({"fedavg": same}, "dice") == ""


def test_a_selector_is_measured_by_its_balanced_accuracy(record: RunRecord) -> None:
    def run(seed: int, right: int) -> Run:
        reports = {
            "A": {"global": 4, "A": 0, "B": 0, "selector": {"A": 4, "B": 0}},
            "B": {"global": 0, "A": 0, "B": 4, "selector": {"A": 4 - right, "B": right}},
        }
        sites = {name: SiteRecord("inside", metrics={}, reports={"deployed": report}) for name, report in reports.items()}
        return build_results(dataclasses.replace(record, seed=seed, sites=sites))

    lines = selector_table({"fedsm": [run(0, 0), run(1, 2)], "fedavg": [build_results(record)]}).splitlines()
    assert lines[0] == "| method | balanced accuracy | A recognised | B recognised | answered by a personal model | runs |"
    assert lines[2:] == ["| fedsm | 0.625 ± 0.177 | 1.000 ± 0.000 | 0.250 ± 0.354 | 0.500 ± 0.000 | 2 |"]
    assert selector_table({"fedavg": [build_results(record)]}) == ""


def test_routing_that_does_harm_is_counted_and_so_are_its_events(record: RunRecord) -> None:
    def run(seed: int, end: float, events: int) -> Run:
        metrics = {"mixture": {"dice": 0.5}, "deployed": {"dice": end}}
        sites = {"A": SiteRecord("inside", metrics={}), "X": SiteRecord("outside", metrics=metrics)}
        said = [{"kind": "reverted", "message": "deployed: routing kept the start", "site": "X", "round": None}] * events
        return {**build_results(dataclasses.replace(record, seed=seed, sites=sites)), "events": said}

    lines = routing_table({"iop_fl": [run(0, 0.6, 0), run(1, 0.45, 1), run(2, 0.4, 0), run(3, 0.49, 0)]}, "dice").splitlines()
    assert lines[0] == "| method | outside | start | end | worst run | more than 0.02 below | of these with an event | runs |"
    assert lines[2:] == [f"| iop_fl | {site} | 0.500 | 0.485 | -0.100 | 2 | 1 | 4 |" for site in ("X", "all")]
    assert routing_table({"fedavg": [build_results(record)]}, "dice") == ""
