"""Findings about a deployed model: from which numbers they follow, and that every surface has the same ones."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.pages import Page
from helpers.small_tasks import small_task
from medflare.core.events import DOUBTS, EventLog
from medflare.evaluation import console
from medflare.evaluation.console import results_table
from medflare.evaluation.findings import (
    FLOORS,
    KINDS,
    OF_TRAINING,
    findings,
    findings_of,
    is_rising,
    kinds_of_training,
    late_rounds,
    level_sentence,
)
from medflare.evaluation.report import SiteReport, render_report, render_site_report, write_results
from medflare.evaluation.results import RunRecord, SiteRecord, build_results, load_results
from medflare.tasks.config import TaskConfig
from medflare.tasks.summaries import ALL, Summary


def kinds(results: dict[str, Any]) -> list[str]:
    return [finding["kind"] for finding in results["findings"]]


def segmented(record: RunRecord, **dice: tuple[float, float, list[float] | None]) -> dict[str, Any]:
    """Site -> Dice of its disc, constant prediction, and interval."""
    sites = {}
    for name, (value, constant, bounds) in dice.items():
        sites[name] = SiteRecord(
            "inside",
            {"train": 4, "validation": 12, "test": 8},
            {"deployed": {"dice": value}},
            by_label={"deployed": {"disc": {"dice": value}}},
            intervals={"deployed": {ALL: {"dice": bounds}}} if bounds else {},
            constant=constant,
        )
    return build_results(dataclasses.replace(record, sites=sites, history=[], events=[]))


def test_a_good_model_has_no_finding(record: RunRecord) -> None:
    results = segmented(record, A=(0.8, 0.3, [0.7, 0.9]), B=(0.7, 0.3, [0.6, 0.8]))
    assert kinds(results) == [] and "WARNING" not in results_table(results)
    assert (
        "Dice 0.750, constant prediction (which ignores the image) 0.300, mean over 2 sites: better at 2 of 2 sites"
        in level_sentence(results)
    )
    assert not [
        tag
        for tag, attributes in Page(render_report(results)).tags
        if attributes.get("class") == "status doubtful"
    ]


def test_a_low_dice_is_never_praised(record: RunRecord) -> None:
    """The hippocampus of three sites, six rounds: far above a constant prediction of 0.028, and not usable."""
    results = segmented(
        record,
        A=(0.100, 0.028, [0.07, 0.13]),
        B=(0.066, 0.028, [0.05, 0.08]),
        C=(0.083, 0.028, [0.07, 0.1]),
    )
    assert kinds(results) == ["below_floor"]
    assert "better than the constant prediction, but Dice 0.083: not usable" in level_sentence(
        results
    )
    for surface in (results_table(results), Page(render_report(results)).text):
        assert (
            "not usable" in surface
            and "better at" not in surface
            and "B: disc Dice 0.066" in surface
        )


def test_a_structure_of_one_site_below_the_floor_is_named(record: RunRecord) -> None:
    results = segmented(record, A=(0.9, 0.3, [0.8, 0.95]), B=(0.15, 0.05, [0.1, 0.2]))
    (finding,) = findings(results)
    assert (finding.kind, finding.sites, finding.where) == (
        "below_floor",
        ("B",),
        "B: disc Dice 0.150",
    )
    assert "not usable for a structure below the floor (B: disc Dice 0.150)" in level_sentence(
        results
    )


def test_no_volume_beyond_nine_times_the_true_one_reaches_the_floor() -> None:
    true, predicted = 100, 901  # pixels, where the prediction contains the whole structure
    assert 2 * true / (true + predicted) < FLOORS["dice"] < 2 * true / (true + 899)
    assert true / predicted < FLOORS["iou"] < true / 899


def test_below_like_and_not_distinguishable_from_the_constant_prediction(record: RunRecord) -> None:
    results = segmented(
        record,
        A=(0.5, 0.6, [0.4, 0.65]),
        B=(0.605, 0.6, [0.5, 0.7]),
        C=(0.7, 0.6, [0.55, 0.8]),
        D=(0.7, 0.6, None),
    )
    assert {finding.kind: finding.where for finding in findings(results)} == {
        "at_chance": "A: Dice 0.500, below the constant prediction 0.600; B: Dice 0.605, like the constant prediction 0.600",
        "indistinct": "C: Dice 0.700 (0.550 to 0.800), the constant prediction 0.600",
    }
    assert (
        "above it, but without an interval, at D; no better at A, B; not distinguishable at C"
        in level_sentence(results)
    )


def test_the_f1_of_a_guess_is_above_the_constant_prediction_and_not_better(
    record: RunRecord,
) -> None:
    """Answers of a fair coin for 35 and 15 images: F1 0.46 at an AUC of 0.5; one class: F1 0.41."""
    task = small_task("classification", metric="f1_macro")
    sites = {}
    for name, auc in (("A", 0.5), ("B", 0.9)):
        metrics = {"deployed": {"f1_macro": 0.46, "auc_macro": auc}}
        sites[name] = SiteRecord("inside", {"test": 50}, metrics, constant=0.41)
    results = build_results(
        dataclasses.replace(record, task=task, sites=sites, history=[], events=[])
    )
    where = {finding.kind: finding.where for finding in findings(results)}
    assert where["at_chance"] == "A: AUC (macro) 0.500, like the constant prediction 0.500"


def test_volumes_far_from_the_truth(record: RunRecord) -> None:
    task = small_task(labels=["disc"], metrics=["dice", "volume_error"])
    sites = {}
    for name, error in (("A", 1.9), ("B", 5.2)):
        values = {"dice": 0.3, "volume_error": error}
        sites[name] = SiteRecord(
            "inside", metrics={"deployed": values}, by_label={"deployed": {"disc": values}}
        )
    (finding,) = findings(
        build_results(dataclasses.replace(record, task=task, sites=sites, history=[], events=[]))
    )
    assert finding.kind == "wrong_volume" and finding.where == "B: disc volume error 5.200"


@pytest.mark.parametrize("counts_sent", [True, False])
def test_a_class_that_is_never_recognized(record: RunRecord, counts_sent: bool) -> None:
    """Class 0 has three images at A and no right answer; class 2 does not occur there: its F1 is 0 as well, since it is predicted."""
    task = small_task("classification")
    dark, medium, bright = task.labels
    values: dict[str, dict[str, float | None]] = {
        dark: {"sensitivity": 0.0, "f1": 0.0},
        medium: {"sensitivity": 0.5, "f1": 0.4},
        bright: {"sensitivity": None, "f1": 0.0},
    }
    counts = {"deployed": {"confusion": [[[0, 2, 1], [1, 2, 1], [0, 0, 0]]], "roc": []}}
    site = SiteRecord(
        "inside",
        metrics={"deployed": {"accuracy": 0.3}},
        by_label={"deployed": values},
        classes=counts if counts_sent else {},
    )
    results = build_results(
        dataclasses.replace(record, task=task, sites={"A": site}, history=[], events=[])
    )
    (finding,) = findings(results)
    assert finding.kind == "class_missed" and finding.where == f"A: {dark}" + (
        " (0 of 3 images)" if counts_sent else ""
    )


def test_models_that_findings_call_bad_are_not_called_better(record: RunRecord) -> None:
    """Each is above the constant prediction with its whole interval."""
    task = small_task("classification")
    missed = SiteRecord(
        "inside",
        metrics={"deployed": {task.metric: 0.8}},
        by_label={
            "deployed": {task.labels[0]: {"sensitivity": 0.0}, task.labels[1]: {"sensitivity": 1.0}}
        },
        intervals={"deployed": {ALL: {task.metric: [0.7, 0.9]}}},
        constant=0.5,
    )
    event = {"round": None, "site": "A", "kind": "constant_output", "message": "one class"}
    record = dataclasses.replace(record, task=task, sites={"A": missed}, history=[], events=[])
    line = level_sentence(build_results(record))
    assert f"but it never recognizes a class (A: {task.labels[0]})." in line
    assert "better at" not in line
    line = level_sentence(build_results(dataclasses.replace(record, events=[event])))
    assert line.endswith("mean over 1 site: one prediction for all test images: not usable.")
    assert "better" not in line


def test_a_model_of_wrong_volumes_is_not_called_better(record: RunRecord) -> None:
    task = small_task(labels=["disc"], metrics=["dice", "volume_error"])
    values = {"dice": 0.3, "volume_error": 5.2}
    site = SiteRecord(
        "inside",
        metrics={"deployed": values},
        by_label={"deployed": {"disc": values}},
        intervals={"deployed": {ALL: {"dice": [0.25, 0.35]}}},
        constant=0.1,
    )
    record = dataclasses.replace(record, task=task, sites={"B": site}, history=[], events=[])
    line = level_sentence(build_results(record))
    assert "but it predicts volumes far from the true ones (B: disc volume error 5.200)" in line
    assert "better at" not in line


@pytest.mark.parametrize(
    ("values", "rising"),
    [
        ((), False),
        ((0.9,), False),  # one round: nothing to compare
        ((0.05, 0.08), True),
        ((0.08, 0.085), False),
        ((0.5, 0.8, 0.79), False),
        ((0.03, 0.05, 0.06, 0.066, 0.074, 0.083), True),
        ((0.80, 0.84, 0.81, 0.83, 0.82, 0.835), False),
        (tuple(0.5 + 0.1 * (at % 2) for at in range(20)), False),
        (tuple(0.3 + at / 50 + 0.005 * (-1) ** at for at in range(20)), True),
        (tuple(0.8 + at / 5000 for at in range(20)), False),  # 0.0014 over the last third
    ],
)
def test_what_still_rises(values: tuple[float, ...], rising: bool) -> None:
    assert is_rising({0: 0.01, **dict(enumerate(values, start=1))}) == rising


def test_late_rounds_are_the_last_third_and_at_least_four() -> None:
    assert late_rounds(dict.fromkeys(range(7), 0.0)) == [3, 4, 5, 6]
    assert late_rounds(dict.fromkeys(range(31), 0.0)) == list(range(20, 31))


def rising(record: RunRecord) -> RunRecord:
    """A and B become better in the last round; C, which is better, is missing in it."""
    last = {
        "A": {"validation": {"global": 0.6, "personal": None}},
        "B": {"validation": {"global": 0.7}},
    }
    return dataclasses.replace(
        record, history=[*record.history[:2], {**record.history[2], "sites": last}]
    )


def test_a_run_that_ends_too_early_says_so(record: RunRecord) -> None:
    assert kinds(build_results(record)) == [], "0.450, then 0.455"
    results = build_results(rising(record))
    assert kinds(results) == ["still_rising"]
    where = results["findings"][0]["where"]
    assert (
        where
        == "validation Dice 0.450 after round 1, 0.650 after round 2; the last round is the best"
    )


def test_without_steps_the_curve_is_that_of_the_selection(record: RunRecord) -> None:
    candidates = [
        {"round": at, "value": at / 4, "votes": {"A": at / 4, "B": at / 4}} for at in (1, 2, 3)
    ]
    selected = {"global": {"round": 3, "rule": "median", "candidates": candidates}}
    results = build_results(dataclasses.replace(record, history=[], model_selection=selected))
    assert kinds(results) == ["still_rising"]
    old = {key: value for key, value in results.items() if key != "findings"}
    assert [finding.kind for finding in findings_of(old)] == ["still_rising"], (
        "results of an older version"
    )


def test_every_surface_has_the_same_findings(record: RunRecord, tmp_path: Path) -> None:
    log = EventLog()
    for kind in DOUBTS:
        log.add(kind, f"of A <b> {kind}", site="A")
    write_results(tmp_path, dataclasses.replace(rising(record), events=log.to_list()))
    results = load_results(tmp_path)
    assert kinds(results) == [kind for kind in KINDS if kind in (*DOUBTS, "still_rising")]
    printed = results_table(results)
    page = Page((tmp_path / "report.html").read_text())
    assert json.loads((tmp_path / "results.json").read_text())["findings"] == results["findings"]
    banners = [tag for tag, attributes in page.tags if attributes.get("class") == "status doubtful"]
    box_of_the_status = 1
    assert len(banners) - box_of_the_status == len(results["findings"]) == printed.count("WARNING")
    for finding in findings_of(results):
        assert f"WARNING {finding.line}" in printed
        assert finding.problem in page.text and finding.where in page.text
        assert page.text.index(finding.problem) < page.text.index("Results on the test images"), (
            "before any number"
        )


@pytest.mark.parametrize("rich", [True, False])
def test_findings_are_the_last_lines_of_a_log(
    record: RunRecord, rich: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not rich:
        monkeypatch.setattr(console, "installed", lambda module: False)
    results = segmented(record, A=(0.1, 0.028, [0.07, 0.13]))
    level, warning = results_table(results).splitlines()[-2:]
    assert "not usable" in level and warning.startswith("WARNING below_floor")


def test_the_site_report_has_the_findings_of_its_site(task: TaskConfig) -> None:
    event = {
        "round": None,
        "site": "A",
        "kind": "constant_output",
        "message": "the deployed model answers no pixel of disc",
    }
    low = Summary({"dice": 0.1, "iou": 0.05}, by_label={"disc": {"dice": 0.1}})
    report = SiteReport(
        "fedavg",
        "A",
        "inside",
        task,
        {"train": 1, "validation": 1, "test": 1},
        {"deployed": low},
        {},
        [event],
        0.2,
        of_training=[],
        groups={},
        minimum_patients=0,
    )
    text = Page(render_site_report(report)).text
    for part in (
        "no pixel of disc",
        "Dice 0.100, below the constant prediction 0.200",
        "disc Dice 0.100",
        "not usable",
    ):
        assert part in text


def test_a_site_report_has_findings_of_the_training(task: TaskConfig, record: RunRecord) -> None:
    """The server's list without numbers of other sites and without findings of their models."""
    events = EventLog()
    events.add("few_validation_images", "its personal model was chosen on 4 images", site="B")
    results = build_results(dataclasses.replace(rising(record), events=events.to_list()))
    history = rising(record).history
    assert kinds(results) == list(OF_TRAINING)
    of_sites = kinds_of_training(history, events, ("A", "B"))
    assert of_sites == {"A": ["still_rising"], "B": [*OF_TRAINING]}

    good = Summary({"dice": 0.9, "iou": 0.8}, by_label={"disc": {"dice": 0.9}})
    n = {"train": 1, "validation": 4, "test": 1}
    report = SiteReport(
        "fedavg", "B", "inside", task, n, {"deployed": good}, {}, [], None, of_sites["B"], {}, 0
    )
    page = Page(render_site_report(report))
    for finding in findings_of(results):
        assert finding.problem in page.text and finding.remedy in page.text
        assert page.text.index(finding.problem) < page.text.index("Results on this site")
    assert "4 validation images at this site" in page.text and "0.650" not in page.text


def test_a_finding_names_five_of_many_sites(record: RunRecord) -> None:
    events = [
        {"round": None, "site": f"site-{number}", "kind": "rare_class", "message": "few"}
        for number in range(9)
    ]
    (finding,) = findings(build_results(dataclasses.replace(record, history=[], events=events)))
    assert "site-4" in finding.where and "site-5" not in finding.where and "4 more" in finding.where
