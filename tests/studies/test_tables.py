"""Tables of a study against numbers worked out by hand."""

import dataclasses
from pathlib import Path
from statistics import stdev
from typing import Any
from xml.etree import ElementTree

import pytest

from medflare.cli import main
from medflare.core.errors import ConfigError
from medflare.evaluation.results import RunRecord, SiteRecord, build_results
from medflare.studies.differences import delong_text, difference_of, differences, differences_within
from medflare.studies.figures import learning_curves
from medflare.studies.markdown import Table
from medflare.studies.page import study_page
from medflare.studies.report import banner, equal_rows, notes, study_report
from medflare.studies.runs import curve_of, selection
from medflare.studies.statistics import Comparison, Results
from medflare.studies.study import write_run
from medflare.studies.tables import StudyTables
from medflare.tasks.config import load_task
from studies.conftest import leaving_out


def line_of(table: Table, label: str, model: str) -> list[str]:
    """The cells of a row after its label and model."""
    (line,) = [
        line for line in str(table).splitlines() if line.startswith(f"| {label} | {model} |")
    ]
    return [cell.strip() for cell in line.split("|")[3:-1]]


def measured(
    record: RunRecord, seed: int, method: str = "fedavg", **sites: dict[str, float]
) -> Results:
    """A run whose sites have these Dice by model; A has three equal patients, B one."""
    records = {}
    for site, of in sites.items():
        records[site] = SiteRecord(
            "inside", metrics={model: {"dice": value} for model, value in of.items()}
        )
    hyper = {"site": {}, "server": {"selection": "last"}}
    run = build_results(
        dataclasses.replace(record, method=method, seed=seed, sites=records, hyper=hyper)
    )
    patients = {"A": ["p", "q", "r"], "B": ["p"]}
    scores = {}
    for site, of in sites.items():
        scores[site] = {
            model: {"patients": patients[site], "values": {"dice": [value] * len(patients[site])}}
            for model, value in of.items()
        }
    return {**run, "scores": scores}


def test_the_table_of_sites(runs: list[Results]) -> None:
    table = StudyTables({"FedSM": runs, "single-site": runs[:1]}).sites("dice")
    assert str(table).splitlines() == [
        "| method | model | selection | A | B | mean inside | X (outside) | mean outside | runs |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| FedSM | global | – | **0.500 ± 0.100** | 0.550 ± 0.071 | **0.533 ± 0.058** | – | – | 3 |",
        "| FedSM | deployed | – | – | – | – | **0.300 ± 0.265** | **0.300 ± 0.265** | 3 |",
        "| single-site | global | – | 0.400 | **0.600** | 0.500 | – | – | 1 |",
        "| single-site | deployed | – | – | – | – | 0.100 | 0.100 | 1 |",
    ]
    table = StudyTables({"all": runs, "single-site": runs[:1]}).sites("hd95")
    assert "| single-site | global | – | **4.0** | – | **4.0** |" in str(table)


def test_models_share_a_row_if_they_differ_in_a_site_or_have_the_same_numbers(
    record: RunRecord,
) -> None:
    of_sites = {"global": {"dice": 0.1}, "personal/A": {"dice": 0.2}, "personal/B": {"dice": 0.6}}
    run = build_results(
        dataclasses.replace(record, sites={"X": SiteRecord("outside", metrics=of_sites)})
    )
    expected = [
        "| iop | global | – | 0.100 | 0.100 | 1 |",
        "| iop | personal/* | – | **0.400** | **0.400** | 1 |",
    ]
    expected += [
        "| iop | best expert (chosen on test) | – | 0.600 | 0.600 | 1 |",
        "| iop | spread of experts | – | 0.400 | 0.400 | 1 |",
    ]
    assert str(StudyTables({"iop": [run]}).sites("dice")).splitlines()[2:] == expected
    same = {"global": {"dice": 0.5}, "personal": {"dice": 0.5}, "deployed": {"dice": 0.6}}
    run = build_results(
        dataclasses.replace(record, sites={"A": SiteRecord("inside", metrics=same)})
    )
    expected = [
        "| FedSM | global, personal | – | 0.500 | 0.500 | 1 |",
        "| FedSM | deployed | – | **0.600** | **0.600** | 1 |",
    ]
    assert str(StudyTables({"FedSM": [run]}).sites("dice")).splitlines()[2:] == expected


@pytest.mark.parametrize(
    ("rule", "voters", "text"),
    [
        ("paired", "AB", "best dice, paired over sites"),
        ("best", "AB", "best dice"),
        ("last", "", "last"),
        ("median", "AB", "best dice, median of sites"),
        ("median", "A", "best dice"),  # a federation of one site
        ("median", "", "best dice, each site its own"),  # as FedAMP and PRR
    ],
)
def test_the_selection_of_a_round_is_named_with_who_selected(
    record: RunRecord, rule: str, voters: str, text: str
) -> None:
    candidate = {"round": 1, "value": 0.5, "votes": dict.fromkeys(voters, 0.5)}
    record = dataclasses.replace(
        record,
        hyper={"site": {}, "server": {"selection": rule}},
        model_selection={"global": {"round": 1, "rule": rule, "candidates": [candidate]}},
    )
    run = build_results(record)
    assert selection(run) == text
    before = {key: value for key, value in run.items() if key != "model_selection"}
    joined = {"paired": ", paired over sites", "median": ", median of sites"}.get(rule, "")
    rule_alone = "last" if rule == "last" else f"best dice{joined}"
    assert selection(before) == rule_alone, "of a version that did not record it"
    assert selection({**run, "model_selection": {}, "reason": "killed"}) == rule_alone
    alone = "last" if rule == "last" else "best dice, each site its own"
    assert selection({**run, "method": "single-site"}) == alone


def test_some_metrics_only(runs: list[Results]) -> None:
    study = StudyTables({"all": runs}, ["hd95"])
    assert list(study.everything) == ["hd95", "hd95, what the mean hides"]
    assert "dice" not in study_report(study)
    page = study_page(study)
    assert "HD95" in page and "dice, differences" not in page
    with pytest.raises(ConfigError, match="unknown metric 'dise'; did you mean dice"):
        StudyTables({"all": runs}, ["dise"])


def test_rows_with_equal_values_in_every_cell_are_named(record: RunRecord) -> None:
    def row(a: float, b: float) -> list[Results]:
        return [measured(record, seed, A={"deployed": a}, B={"deployed": b}) for seed in (0, 1)]

    groups = {"fedavg": row(0.5, 0.6), "fedyogi": row(0.5, 0.6), "other": row(0.6, 0.5)}
    study = StudyTables(groups)
    (line,) = equal_rows(study)
    assert line.startswith("fedavg and fedyogi have")
    assert f"- {line}" in study_report(study).split("\n## ")[0] and line in study_page(study)
    fewer = {"fedavg": row(0.5, 0.6), "fedyogi": row(0.5, 0.6)[:1]}
    assert equal_rows(StudyTables(fewer)) == []


def test_areas_under_roc_curves_are_compared_by_class(record: RunRecord) -> None:
    """The patients and values of test_statistics' DeLong test, twice; class 2 has one case."""
    task = load_task("ham10000_3class")
    targets = [0, 0, 0, 0, 1, 1, 1, 2]
    first = [0.9, 0.8, 0.4, 0.7, 0.6, 0.5, 0.2, 0.1]
    second = [0.9, 0.8, 0.7, 0.7, 0.6, 0.5, 0.2, 0.1]

    def run(scores: list[float], seed: int) -> Results:
        cases = {
            "patients": list("abcdefgh"),
            "probabilities": [[score, 1 - score, 0.0] for score in scores],
            "targets": targets,
        }
        sites = {"A": SiteRecord("inside", metrics={"deployed": {"auc_macro": 0.5}})}
        run = build_results(dataclasses.replace(record, task=task, sites=sites, seed=seed))
        return {**run, "scores": {"A": {"deployed": cases}}}

    groups = {"plain": [run(first, 0), run(first, 1)], "better": [run(second, 0), run(first, 1)]}
    table = StudyTables(groups).makers["AUC by class, DeLong's test"]()
    lines = str(table).splitlines()
    assert lines[0] == "| method | class | A (inside) |"
    assert delong_text([Comparison(0.1, p=p) for p in (0.01, 0.02, 0.9)]) == "+0.100, p 0.040"
    assert delong_text([Comparison(0.1, p=p) for p in (0.6, 0.9)]) == "+0.100, p 1.000"
    assert delong_text([Comparison(0.1, p=0.03), Comparison()]) == "+0.100, p 0.030"
    # Two of 16 pairs change sides in seed 0, none in seed 1, which counts as p of 1.
    assert f"| better - plain | {task.labels[0]} | +0.062, p 1.000 |" in lines
    assert f"| better - plain | {task.labels[2]} | – |" in lines


def test_a_site_left_out_in_turn_has_a_column_for_each_role(runs: list[Results]) -> None:
    turned = {
        **runs[0],
        "sites": {**runs[0]["sites"], "A": {**runs[0]["sites"]["A"], "role": "outside"}},
    }
    heading = str(StudyTables({"all": [runs[1], turned]}).sites("dice")).splitlines()[0]
    assert "| A | B | mean inside | A (outside) | X (outside) |" in heading


def test_a_site_counts_once_in_the_means_of_a_structure(record: RunRecord) -> None:
    dice = {"A": 0.2, "B": 0.4, "C": 0.9}  # C is inside whichever of A and B is left out

    def run(outside: str) -> dict[str, Any]:
        sites = {}
        for name, value in dice.items():
            sites[name] = SiteRecord(
                "outside" if name == outside else "inside",
                metrics={"deployed": {"dice": value}},
                by_label={"deployed": {"disc": {"dice": value}, "cup": {"dice": value}}},
            )
        return build_results(dataclasses.replace(record, sites=sites))

    tables = StudyTables({"fedavg": [run("A"), run("B")]})
    assert "| 0.900 | 0.500 |" in str(tables.sites("dice"))
    assert str(tables.by_label()).count("| 0.900 | 0.500 |") == 2


def test_the_summary_has_the_worst_site_all_images_and_sites_below_training_alone(
    record: RunRecord,
) -> None:
    alone = [measured(record, 0, "single-site", A={"deployed": 0.75}, B={"deployed": 0.25})]
    method = [measured(record, 0, A={"global": 0.5}, B={"global": 0.75})]
    table = StudyTables({"together": method, "single-site": alone}).summary("dice")
    assert line_of(table, "together", "global") == [
        "last",
        "inside",
        "0.625",
        "0.500 (A)",
        "0.562",
        "1 of 2 (A)",
        "–",
    ]
    assert line_of(table, "single-site", "deployed") == [
        "last",
        "inside",
        "0.500",
        "0.250 (B)",
        "0.625",
        "–",
        "–",
    ]
    without_scores = StudyTables({"together": [{**method[0], "scores": {}}]}).summary("dice")
    assert line_of(without_scores, "together", "global")[2:5] == ["0.625", "0.500 (A)", "–"]


def test_a_row_at_the_constant_prediction_is_named(record: RunRecord) -> None:
    flat = [
        measured(record, seed, "constant", A={"deployed": 0.2 + seed / 10}, B={"deployed": 0.4})
        for seed in (0, 1)
    ]
    method = [
        measured(record, seed, A={"global": 0.205 + seed / 10}, B={"global": 0.6})
        for seed in (0, 1)
    ]
    table = StudyTables({"together": method, "constant": flat}).summary("dice")
    assert (
        line_of(table, "together", "global")[-1] == "no better than the constant prediction at A"
    ), "seed by seed, since splits differ"
    assert line_of(table, "constant", "deployed")[-1] == "–"


def test_a_row_that_still_rises_is_named(record: RunRecord) -> None:
    run = measured(record, 0, A={"global": 0.5}, B={"global": 0.5})
    curve = [[at, at / 20] for at in range(13)]
    rising = {**run, "curves": {"global": {"A": curve, "B": curve}}}
    assert (
        line_of(StudyTables({"m": [rising]}).summary("dice"), "m", "global")[-1] == "still rising"
    )


def test_the_oracle_is_marked_and_is_never_the_best(record: RunRecord) -> None:
    run = measured(
        record, 0, A={"global": 0.5, "personal": 0.75}, B={"global": 0.5, "personal": 0.25}
    )
    constant = measured(record, 0, "constant", A={"global": 0.5, "personal": 0.6})
    one_model = measured(record, 0, A={"global": 0.5, "personal": 0.5})
    table = StudyTables({"m": [run], "constant": [constant], "fedavg": [one_model]}).sites("dice")
    assert line_of(table, "m", "oracle (chosen on test)") == [
        "last",
        "0.750",
        "0.500",
        "0.625",
        "1",
    ]
    assert line_of(table, "m", "personal") == ["last", "**0.750**", "0.250", "0.500", "1"]
    assert str(table).count("oracle") == 1, "references and runs with one model have none"
    plain = measured(record, 0, A={"deployed": 0.5}, B={"deployed": 0.5})
    assert "| m | oracle (chosen on test) | inside | +0.125 |" in str(
        differences(StudyTables({"plain": [plain], "m": [run]}))
    )


def test_the_table_of_differences(runs: list[Results]) -> None:
    """+0.1 in every seed, so that there is no spread to test against."""
    better = []
    for run, value in zip(runs, (0.2, 0.3, 0.7), strict=True):
        better.append(leaving_out("X", value, run))
    tables = StudyTables({"plain": runs, "better": better})
    lines = str(differences(tables)).splitlines()
    assert lines[0] == (
        "| method | model | sites | difference to plain | 95 % over seeds | t-test over seeds, p | seeds "
        "| 95 % over patients | test over patients, p | patients | p over seeds, Holm | detectable | d | verdict |"
    )
    assert (
        "| better | deployed | outside | +0.100 | – | – | 3 | – | – | – | – | – | 0.020 | study too small |"
        in lines
    )
    for line in lines:
        assert not line.startswith("| plain | deployed"), "not against itself"
    against = str(differences(tables, "better"))
    assert (
        "| difference to better |" in against
        and "| plain | deployed | outside | -0.100 | – |" in against
    )


def varied(record: RunRecord, method: str, *dice: float, resplit: bool = False) -> list[Results]:
    """A run for each seed with 140 training images, 20 test images, and seven patients with the same Dice."""
    rows: list[Results] = []
    for seed, value in enumerate(dice):
        sites = {
            "A": SiteRecord(
                "inside", n={"train": 140, "test": 20}, metrics={"deployed": {"dice": value}}
            )
        }
        assert record.task is not None
        task = dataclasses.replace(record.task, resplit=seed if resplit else None)
        cases = {"patients": list("abcdefg"), "values": {"dice": [value] * 7}}
        run = build_results(
            dataclasses.replace(record, method=method, seed=seed, task=task, sites=sites)
        )
        rows.append({**run, "scores": {"A": {"deployed": cases}}})
    return rows


def test_the_lines_of_a_table_are_one_claim(record: RunRecord) -> None:
    """Differences .1, .2, .3 to fedavg: t = 2 sqrt(3) and p = .074 as for 1, 2, 3; .09, .1, .11: t = 10 sqrt(3) and p = .003."""
    groups = {
        "fedavg": varied(record, "fedavg", 0.5, 0.5, 0.5),
        "wide": varied(record, "fedprox", 0.6, 0.7, 0.8),
        "narrow": varied(record, "fedsm", 0.59, 0.6, 0.61),
        "constant": varied(record, "constant", 0.3, 0.3, 0.4),
    }
    study = StudyTables(groups)
    table = differences(study)
    # The noncentral t of three seeds detects 3.264 standard deviations, here .1 and .01.
    wide = line_of(table, "wide", "deployed")
    narrow = line_of(table, "narrow", "deployed")
    constant = line_of(table, "constant", "deployed")
    assert wide[3] == "0.074" and wide[-4:] == ["0.074", "0.326", "0.020", "study too small"]
    assert narrow[3] == "0.003" and narrow[-4:] == ["0.007", "0.033", "0.020", "confirmed"]
    assert constant[-4] == constant[-1] == "–", "the constant prediction claims nothing"
    assert notes(study) == []
    page = study_page(study)
    assert "study too small" in page and "confirmed" in page


@pytest.mark.parametrize(
    ("other", "margin"),
    [("fedavg", 0.024), ("fedavg:reset_optimizer=true", 0.024), ("single-site", 0.02)],
)
def test_a_papers_effect_is_over_the_papers_comparator_in_both_orders(
    other: str, margin: float, record: RunRecord
) -> None:
    """IOP-FL's is over FedAvg."""
    groups = {
        "iop_fl": varied(record, "iop_fl", 0.6, 0.61, 0.62),
        other: varied(record, other.partition(":")[0], 0.5, 0.52, 0.5),
    }
    study = StudyTables(groups)
    models = [(label, "deployed") for label in groups]
    for first, second in (models, reversed(models)):
        difference = difference_of(study, first, second, "inside")
        assert difference is not None and difference.margin == margin


def test_splits_that_are_drawn_again_are_named_and_corrected(record: RunRecord) -> None:
    dice = {"fedavg": (0.5, 0.5, 0.5), "fedsm": (0.6, 0.7, 0.8)}
    study = StudyTables(
        {method: varied(record, method, *values, resplit=True) for method, values in dice.items()}
    )
    line = line_of(differences(study), "fedsm", "deployed")
    half = 4.302653 * 0.1 * (1 / 3 + 1 / 7) ** 0.5
    assert (
        line[2] == f"{0.2 - half:+.3f} to {0.2 + half:+.3f}"
        and line[-3] == f"{3.264044 * 0.1 * (1 + 3 / 7) ** 0.5:.3f}"
    )
    (note,) = notes(study)
    assert "(0.14)" in note
    report = study_report(study)
    assert report.index("## dice, differences\n") < report.index(note), (
        "below the table of differences"
    )
    assert "1/n + test/training images" in study_page(study)


def test_classes_that_do_not_count_are_named_below_the_table(record: RunRecord) -> None:
    assert record.task is not None
    task = dataclasses.replace(load_task("ham10000_3class"), resplit=None)
    labels = list(task.labels)
    truth = [0] * 12 + [1] * 10 + [2] * 3
    cases = {
        "patients": list(map(str, range(25))),
        "probabilities": [[0.5, 0.3, 0.2]] * 25,
        "targets": truth,
    }
    few = {**cases, "targets": [0] * 20 + [1] * 5}
    metrics = {"deployed": {task.metric: 0.5}}
    site = SiteRecord("inside", metrics=metrics)
    sites = {"A": site, "B": site}
    scores = {"A": {"deployed": cases}, "B": {"deployed": few}}
    run = build_results(dataclasses.replace(record, task=task, sites=sites)) | {"scores": scores}
    of_classes = notes(StudyTables({"fedavg": [run], "fedsm": [run]}))
    assert (
        len(of_classes) == 2
        and f"A counts without {labels[2]} (" in of_classes[0]
        and "B does not count" in of_classes[1]
    )


def test_rows_are_compared_with_training_alone_once(record: RunRecord) -> None:
    alone = [
        measured(record, seed, "single-site", A={"global": 0.5, "personal": 0.5, "deployed": 0.5})
        for seed in (0, 1)
    ]
    fedavg = [
        measured(record, seed, A={"global": 0.6, "personal": 0.6, "deployed": 0.6})
        for seed in (0, 1)
    ]
    titles = ["dice, differences", "dice, differences to single-site"]
    tables = StudyTables({"fedavg": fedavg, "single-site": alone}).everything
    assert tables.keys() >= set(titles)
    assert "| fedavg | global, personal, deployed | inside | +0.100 |" in str(tables[titles[1]])
    reversed_tables = StudyTables({"single-site": alone, "fedavg": fedavg}).everything
    assert titles[0] in reversed_tables and titles[1] not in reversed_tables


def test_a_deployed_model_is_compared_with_other_models_of_its_runs(record: RunRecord) -> None:
    runs = [
        measured(record, 0, A={"global": 0.5, "deployed": 0.6}),
        measured(record, 1, A={"global": 0.5, "deployed": 0.8}),
    ]
    same = [measured(record, 0, A={"global": 0.5, "deployed": 0.5})]
    table = differences_within(StudyTables({"fedsm": runs, "fedavg": same}))
    line = str(table).splitlines()[2]
    assert line.startswith("| fedsm | global | inside | +0.200 | -1.071 to +1.471 |"), (
        "t(1) is 12.706 at 0.975"
    )
    assert differences_within(StudyTables({"fedavg": same})) is None


def test_the_balanced_accuracy_of_a_selector(record: RunRecord, runs: list[Results]) -> None:
    def run(seed: int, right: int) -> Results:
        reports = {
            "A": {"global": 4, "A": 0, "B": 0, "selector": {"A": 4, "B": 0}},
            "B": {"global": 0, "A": 0, "B": 4, "selector": {"A": 4 - right, "B": right}},
        }
        sites = {
            name: SiteRecord("inside", metrics={}, reports={"deployed": report})
            for name, report in reports.items()
        }
        return build_results(dataclasses.replace(record, seed=seed, sites=sites))

    table = StudyTables({"fedsm": [run(0, 0), run(1, 2)], "fedavg": runs}).selector()
    lines = str(table).splitlines()
    assert (
        lines[0]
        == "| method | balanced accuracy | A recognised | B recognised | answered by a personal model | runs |"
    )
    assert lines[2:] == [
        "| fedsm | 0.625 ± 0.177 | 1.000 ± 0.000 | 0.250 ± 0.354 | 0.500 ± 0.000 | 2 |"
    ]
    assert StudyTables({"fedavg": runs}).selector() is None


def test_runs_in_which_routing_did_harm_are_counted(record: RunRecord, runs: list[Results]) -> None:
    def run(seed: int, end: float, events: int) -> Results:
        metrics = {"mixture": {"dice": 0.5}, "deployed": {"dice": end}}
        sites = {"A": SiteRecord("inside", metrics={}), "X": SiteRecord("outside", metrics=metrics)}
        reverted = [
            {
                "kind": "reverted",
                "message": "deployed: routing kept the start",
                "site": "X",
                "round": None,
            }
        ] * events
        return {
            **build_results(dataclasses.replace(record, seed=seed, sites=sites)),
            "events": reverted,
        }

    routed = [run(0, 0.6, 0), run(1, 0.45, 1), run(2, 0.4, 0), run(3, 0.49, 0)]
    lines = str(StudyTables({"iop_fl": routed, "fedavg": runs}).routing()).splitlines()
    assert (
        lines[0]
        == "| method | outside | start | end | worst run | more than 0.02 below | of these with an event | runs |"
    )
    numbers = "0.500 | 0.485 | -0.100 | 2 | 1 | 4"
    assert lines[2:] == [f"| iop_fl | X | {numbers} |", f"| iop_fl | all | {numbers} |"]
    assert StudyTables({"fedavg": runs}).routing() is None


def caution(groups: dict[str, list[Results]], token: str) -> str:
    """The line above the tables with this token; "" if there is none."""
    head = study_report(StudyTables(groups)).split("\n## ")[0]
    return next((line for line in head.splitlines() if line.startswith("- ") and token in line), "")


def test_unequal_rows_are_named(record: RunRecord) -> None:
    def row(hyper: dict[str, Any], **changes: Any) -> list[Results]:
        return [
            build_results(
                dataclasses.replace(record, hyper={"site": hyper, "server": {}}, **changes)
            )
        ]

    kept = {"reset_optimizer": False}
    fresh = {"reset_optimizer": True}
    groups = {"fresh": row(fresh), "kept": row(kept), "long": row(kept, rounds=3)}
    moments = caution(groups, "reset_optimizer")
    assert moments.index("kept, long") < moments.index("fresh")
    assert (
        caution(groups, "rounds")
        and not caution(groups, "task")
        and caution(groups, "--reference constant,single-site")
    )
    for label, code in (("fresh", "1234"), ("kept", "5678"), ("long", "5678")):
        groups[label][0]["versions"]["lab-fl code"] = code
    assert "different lab-fl code in fresh; kept, long: run" in caution(groups, "lab-fl")
    constant = row({}, method="constant")
    assert "prr" in caution(
        {"kept": row(kept), "prr": row({}, method="prr"), "constant": constant}, "reset_optimizer"
    )
    assert not caution({"kept": row(kept), "constant": constant}, "reset_optimizer"), (
        "the constant is not trained"
    )
    assert record.task is not None
    tasks = [
        dataclasses.replace(record.task, **changes)
        for changes in ({}, {"resplit": 1}, {"size": (8, 8), "batch_size": 1})
    ]
    of_tasks = {str(place): row({}, task=task) for place, task in enumerate(tasks)}
    for name in ("0", "1"):
        # Of a version that did not record it.
        del of_tasks[name][0]["configuration"]["task"]["batch_size"]
    assert "(size)" in caution(of_tasks, "task")


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
def test_rows_with_other_weights_need_uniform_fedavg(
    record: RunRecord, method: str, server: dict[str, Any]
) -> None:
    def row(method: str, server: dict[str, Any]) -> list[Results]:
        return [
            build_results(
                dataclasses.replace(
                    record,
                    method=method,
                    hyper={"site": {"reset_optimizer": False}, "server": server},
                )
            )
        ]

    groups = {
        "fedavg": row("fedavg", {"weighting": "samples"}),
        method: row(method, server),
        "constant": row("constant", {}),
    }
    assert method in caution(groups, "--reference uniform")
    assert not caution({**groups, "control": row("fedavg", {"weighting": "uniform"})}, "uniform")
    assert not caution({name: groups[name] for name in ("fedavg", "constant")}, "uniform")


@pytest.mark.figures
def test_learning_curves_have_a_line_for_every_model(
    runs: list[Results], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curves = {"global": {"A": [[0, 0.1], [1, 0.5]]}, "personal": {"A": [[0, 0.1], [1, 0.6]]}}
    one_model = [{**runs[0], "curves": {"global": curves["global"]}}]
    drawing = learning_curves(
        {"fedsm": [{**runs[0], "curves": curves}], "fedavg": one_model, "constant": one_model}
    )
    assert drawing is not None
    text = set(ElementTree.fromstring(drawing.svg("curves") or "").itertext())
    assert {
        "fedsm, global",
        "fedsm, personal",
        "fedavg",
        "validation Dice",
    } <= text and "constant" not in text
    assert {"0.0", "1.0"} <= text, "a small difference looks small"
    assert learning_curves({"fedavg": runs}) is None
    write_run(tmp_path, "fedavg/seed0", one_model[0])
    assert main(["study", "table", str(tmp_path), "--figures", str(tmp_path / "figures")]) == 0
    assert "| fedsm | global |" in capsys.readouterr().out
    assert "currentColor" not in (tmp_path / "figures" / "curves.svg").read_text()
    pdf = (tmp_path / "figures" / "curves.pdf").read_bytes()
    assert pdf.startswith(b"%PDF") and b"/FontFile2" in pdf, "TrueType fonts are embedded"
    assert b"/Type3" not in pdf


def test_a_study_warns_of_rows_below_the_constant_prediction_before_any_table(
    record: RunRecord,
) -> None:
    """Both methods are below the constant prediction of 0.78 at A, the second one in one of two seeds only."""

    def row(method: str, *dice: float, at_b: float = 0.9) -> list[Results]:
        return [
            measured(record, seed, method, A={"deployed": value}, B={"deployed": at_b})
            for seed, value in enumerate(dice)
        ]

    constant = row("constant", 0.78, 0.78, at_b=0.3)
    study = StudyTables(
        {
            "fedavg": row("fedavg", 0.75, 0.76),
            "fedsm": row("fedsm", 0.77, 0.85),
            "constant": constant,
        }
    )
    assert banner(study) == [
        "Every method has a site where it is no better than the constant prediction, which ignores the image.",
        "fedavg: no better than the constant prediction at A.",
        "fedsm: no better than the constant prediction at A (1 of 2 runs).",
    ]
    report = study_report(study)
    assert report.index(
        "WARNING fedavg: no better than the constant prediction at A."
    ) < report.index("## dice")
    assert (
        line_of(study.summary("dice"), "fedsm", "deployed")[-1]
        == "no better than the constant prediction at A (1 of 2 runs)"
    )
    page = study_page(study)
    assert page.index("fedavg: no better than the constant prediction at A.") < page.index(
        "Side by side"
    )
    good = StudyTables({"fedavg": row("fedavg", 0.85, 0.86), "constant": constant})
    assert banner(good) == [] and "should not be used" not in study_page(good)


def left_out(
    record: RunRecord, method: str, *of_seeds: tuple[float, float | None]
) -> list[Results]:
    """A run for each seed and each of the outside sites A and B, with its Dice; None: it failed."""
    runs: list[Results] = []
    for seed, values in enumerate(of_seeds):
        for site, value in zip("AB", values, strict=True):
            sites = {site: SiteRecord("outside", metrics={"deployed": {"dice": value}})}
            changed = dataclasses.replace(record, method=method, seed=seed, sites=sites)
            reason = "" if value is not None else "no images"
            runs.append(build_results(dataclasses.replace(changed, reason=reason)))
    return runs


@pytest.mark.parametrize(
    ("hard", "gains"),
    [
        ((0.3, 0.2, 0.1), (0.0, -0.05, -0.1)),  # the usual means over both sites
        ((0.3, 0.2, None), (0.0, -0.05, 0.1)),  # in the last seed A alone
    ],
)
def test_a_run_that_fails_at_a_hard_site_is_left_out_of_both_rows(
    record: RunRecord, hard: tuple[float | None, ...], gains: tuple[float, ...]
) -> None:
    """The gain is 0.1 at A, the easy site, and negative or 0 at B."""
    groups = {
        "fedavg": left_out(record, "fedavg", (0.8, 0.4), (0.8, 0.4), (0.8, 0.4)),
        "fedsm": left_out(record, "fedsm", *((0.9, value) for value in hard)),
    }
    study = StudyTables(groups)
    difference = difference_of(study, ("fedavg", "deployed"), ("fedsm", "deployed"), "outside")
    assert difference is not None and difference.over_seeds.n == 3
    assert difference.over_seeds.difference == pytest.approx(sum(gains) / 3)
    # The noncentral t of three seeds detects 3.264 standard deviations.
    assert difference.detectable == pytest.approx(3.264044 * stdev(gains), rel=1e-5)
    if None not in hard:
        before, after = (study.series(row, "outside", "dice") for row in groups)
        assert difference.over_seeds.difference == pytest.approx((after - before).mean())


def test_a_failed_run_has_no_part_in_a_curve(runs: list[Results]) -> None:
    complete = {"global": {"A": [[0, 0.1], [1, 0.3], [2, 0.5]]}}
    cut = {"global": {"A": [[0, 0.9], [1, 0.9]]}}
    of_rows = [{**runs[0], "curves": complete}]
    failed = {**runs[1], "curves": cut, "status": "FAILED", "reason": "killed"}
    assert curve_of([*of_rows, failed], "deployed") == {0: 0.1, 1: 0.3, 2: 0.5}
    assert curve_of([failed], "deployed") == {}


def test_a_site_that_misses_the_last_validation_has_no_part_in_a_curve(runs: list[Results]) -> None:
    """As in the run's own report (`findings.mean_curve`)."""
    curves = {"A": [[0, 0.1], [1, 0.3], [2, 0.5]], "B": [[0, 0.7], [1, 0.9]]}
    seeds = [{**run, "curves": {"global": curves}} for run in runs[:2]]
    assert curve_of(seeds, "deployed") == {0: 0.1, 1: 0.3, 2: 0.5}


def test_sites_where_training_alone_has_no_value_are_not_counted(record: RunRecord) -> None:
    method = [measured(record, 0, A={"global": 0.5}, B={"global": 0.75})]
    cells = []
    for alone in ({"deployed": 0.75}, {"global": 0.75}):
        runs = [measured(record, 0, "single-site", A=alone)]
        table = StudyTables({"together": method, "single-site": runs}).summary("dice")
        cells.append(line_of(table, "together", "global")[5])
    assert cells == ["1 of 1 (A)", "–"]


def test_a_seed_with_equal_areas_counts_as_p_of_one() -> None:
    """Twice the median of 1, 1 and 0.01 is 2; of 1, 0.01 and 0.02 it is 0.04."""
    equal = Comparison(0.0)
    better = Comparison(0.06, p=0.01)
    assert delong_text([equal, equal, better]) == "+0.020, p 1.000"
    assert delong_text([equal, better, Comparison(0.06, p=0.02)]) == "+0.040, p 0.040"
    assert delong_text([Comparison(0.1), better]) == "+0.080, p 0.010", "one image of a class"


def test_names_in_a_table_are_no_markup() -> None:
    names = ["a|b", "<img src=x>", "[x](javascript:y)", "< 0.001 (t)", "[-0.1, 0.2]"]
    text = str(Table([["name"], *([name] for name in names)], left=1))
    assert text.splitlines()[2:] == [
        r"| a\|b |",
        r"| \<img src=x> |",
        r"| [x\](javascript:y) |",
        "| < 0.001 (t) |",
        "| [-0.1, 0.2] |",
    ]
