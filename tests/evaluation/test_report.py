"""Both reports are self-contained pages that show what the results hold, whatever they hold."""

import dataclasses
import math
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from xml.etree import ElementTree

import pytest
import torch

from evaluation.conftest import History
from evaluation.pages import Page, faults
from helpers.small_tasks import small_task
from medflare.core.events import EventLog
from medflare.core.palette import COLOURS
from medflare.evaluation import figures, report
from medflare.evaluation.figures import roc_curves, training_curves
from medflare.evaluation.presentation import metric_label
from medflare.evaluation.report import (
    SiteReport,
    class_tables,
    patient_values,
    render_report,
    render_site_report,
    write_results,
)
from medflare.evaluation.results import RunRecord, build_results
from medflare.tasks.classes import Cases
from medflare.tasks.config import TaskConfig
from medflare.tasks.summaries import Summary, summarize

MODEL_SELECTION: dict[str, Any] = {
    "global": {
        "round": 1,
        "rule": "mean",
        "candidates": [
            {"round": 1, "value": 0.7, "votes": {"A": 0.7, "B": 0.7}},
            {"round": 2, "value": 0.5, "votes": {"A": 0.5, "B": 0.4, "C": 0.9}},
        ],
    }
}


def table(page: Page, caption: str) -> list[list[str]]:
    """The one table whose caption begins with these words."""
    (content,) = [
        content
        for words, content in zip(page.captions, page.tables, strict=True)
        if words.startswith(caption)
    ]
    return content


def test_the_page_has_the_numbers(record: RunRecord, history: History) -> None:
    page = Page(render_report(build_results(record), history))
    main = {row[0]: row[1:] for row in page.tables[0]}
    assert main["site"] == ["deployed", "global", "personal", "images: train / validation / test"]
    assert (
        main["A"][:3] == ["–undefined", "0.400", "0.500(best)"]
        and "".join(main["A"][3].split()) == "4/1/3weight31%"
    )
    assert "".join(main["C"][3].split()).startswith("3/?/?")
    assert main["Xoutside"][:3] == ["0.750(best)", "0.700", "–undefined"]
    assert main["mean, inside"][:3] == ["–undefined", "0.500", "0.650(best)"]
    assert table(page, "IoU")[2] == ["B", "–undefined", "0.429", "0.667(best)"]
    assert table(page, "HD95 (px), lower is better")[2] == ["B", "–undefined", "4.0", "2.0(best)"]
    assert table(page, "The deployed model") == [["site", "global", "A", "B"], ["X", "5", "1", "3"]]
    assert [
        "2",
        "C",
        "rejected",
        "update to 'train' not used: model/w holds NaN or infinity",
    ] in table(page, "Everything that was rejected")
    assert table(page, "Hyper-parameters of the site algorithm") == [
        ["name", "value"],
        ["lam", "0.7"],
    ]
    assert table(page, "Hyper-parameters of the server algorithm")[1:] == [
        ["gamma", "tune"],
        ["selection", "none"],
    ]


def test_the_page_says_whether_the_model_is_better_than_the_constant_prediction(
    record: RunRecord,
) -> None:
    # Undefined at X.
    values = {"A": (0.9, [0.65, 0.95]), "B": (0.5, [0.4, 0.65]), "X": (None, None)}
    sites = {}
    for name, (dice, bounds) in values.items():
        sites[name] = dataclasses.replace(
            record.sites[name],
            metrics={"deployed": {"dice": dice}},
            intervals={"deployed": {"": {"dice": bounds} if bounds else {}}},
            constant=0.6,
        )
    page = Page(render_report(build_results(dataclasses.replace(record, sites=sites))))
    assert (
        "Dice 0.700, constant prediction (which ignores the image) 0.600, mean over 2 sites"
        in page.text
    )
    assert "better at 1 of 3 sites" in page.text and "no better at B; undefined at X" in page.text
    assert page.tables[0][1][:5] == [
        "A",
        "0.9000.650 to 0.950",
        "–undefined",
        "–undefined",
        "0.600",
    ]
    rows = {row[0]: row[1:] for row in page.tables[0]}
    assert rows["mean, inside"][0] == "0.700" and rows["mean, inside"][3] == "0.600", (
        "beside the constant prediction"
    )
    assert (
        rows["worst inside site"][0] == "0.500B"
        and rows["disparity (best minus worst)"][0] == "0.400"
    )


def box_of(record: RunRecord, **results: object) -> str:
    """The class of the box of a completed run."""
    tags = Page(render_report({**build_results(record), **results})).tags
    (classes,) = [of["class"] for _, of in tags if of.get("role") == "status"]
    return str(classes)


def test_the_box_of_a_completed_run_is_green_only_without_findings(record: RunRecord) -> None:
    def finding(kind: str) -> dict[str, Any]:
        return {
            "kind": kind,
            "problem": "p",
            "where": "w",
            "remedy": "r",
            "sites": [],
            "brief": "b",
        }

    assert box_of(record, findings=[]) == "status completed"
    assert box_of(record, findings=[finding("still_rising")]) == "status ended"
    assert (
        box_of(record, findings=[finding("still_rising"), finding("below_floor")])
        == "status doubtful"
    )


def test_the_page_says_what_the_task_is_and_uses_the_deployed_model(record: RunRecord) -> None:
    stored = {"deployed", "global"}
    text = Page(render_report(build_results(record), models=stored)).text
    assert (
        "tiny: segmentation of disc in images. Source: Synthetic discs, generated for tests."
        in text
    )
    assert (
        "medflare predict models/deployed IMAGES" in text
        and "medflare export models/deployed" in text
    )
    equal = {model: {"dice": 0.5} for model in ("global", "personal", "deployed")}
    sites = {name: dataclasses.replace(site, metrics=equal) for name, site in record.sites.items()}
    same = build_results(dataclasses.replace(record, sites=sites))
    assert "medflare predict models/global IMAGES" in Page(render_report(same, models=stored)).text


def test_the_page_names_models_that_are_there(record: RunRecord, tmp_path: Path) -> None:
    def page() -> str:
        write_results(tmp_path, record)
        return (tmp_path / "report.html").read_text()

    assert "medflare predict" not in page() and "models/" not in page()
    (tmp_path / "models" / "global").mkdir(parents=True)
    assert "predict models/global" in page() and "models/deployed" not in page()
    (tmp_path / "models" / "deployed").mkdir()
    assert "predict models/deployed" in page()


def test_settings_without_a_value_have_no_row(record: RunRecord) -> None:
    settings: dict[str, Any] = {
        "engine": "local",
        "outside": [],
        "resume": "",
        "patience": None,
        "min_sites": 0,
        "cross_site": False,
    }
    page = Page(render_report(build_results(dataclasses.replace(record, settings=settings))))
    shown = [row[0] for row in table(page, "Settings")[1:]]
    assert shown == ["engine", "patience", "min_sites", "cross_site"]


def test_tables_by_structure_are_in_one_place(record: RunRecord, task: TaskConfig) -> None:
    by_label = {"deployed": {label: {"dice": 0.5, "iou": 1 / 3} for label in ("disc", "cup")}}
    both = dataclasses.replace(task, target="multilabel", labels=("disc", "cup"))
    sites = {
        name: dataclasses.replace(site, by_label=by_label) for name, site in record.sites.items()
    }
    html = render_report(build_results(dataclasses.replace(record, task=both, sites=sites)))
    captions = Page(html).captions
    assert html.count(">Further metrics<") == 1
    assert [caption for caption in captions if "by structure" in caption] == [
        "Dice by structure, deployed model",
        "IoU by structure, deployed model",
    ]


def test_validation_curves_of_bounded_metrics_go_from_0_to_1(
    record: RunRecord, history: History
) -> None:
    def ticks(metric: str) -> set[str]:
        results = build_results(record)
        results["configuration"]["task"]["metric"] = metric
        svg = training_curves(results, history)
        words = []
        for element in ElementTree.fromstring(f"<div>{svg}</div>").iter():
            if element.tag.endswith("text"):
                words.append(element.text or "")
        start = next(
            place
            for place, word in enumerate(words)
            if word == "Validation " + metric_label(metric) + ", global"
        )
        return set(words[:start][-12:])

    assert {"0.0", "1.0"} <= ticks("dice") and "1.0" not in ticks("hd95"), (
        "validation values are 0.1 to 0.505"
    )


def test_the_page_has_the_selected_round_and_all_candidates(
    record: RunRecord, history: History
) -> None:
    results = build_results(dataclasses.replace(record, model_selection=MODEL_SELECTION))
    html = render_report(results)
    assert table(Page(html), "Validation of the global") == [
        ["after round", "mean", "A", "B", "C"],
        ["1selected", "0.700", "0.700", "0.700", "–"],
        ["2", "0.500", "0.500", "0.400", "0.900"],
    ]
    assert '<dd class="number">1 of 2</dd>' in html
    assert training_curves(results, history) != training_curves(build_results(record), history), (
        "a line at the round"
    )


def test_the_page_has_gamma_its_candidates_and_the_confusion(selecting: RunRecord) -> None:
    page = Page(render_report(build_results(selecting)))
    assert table(page, "Mean paired gain") == [
        ["gamma", "A"],
        ["0.0", "0.020"],
        ["0.3selected", "0.043"],
        ["1.0", "0.000"],
    ]
    assert table(page, "Test images of each site") == [
        ["site", "A", "B", "C"],
        ["A", "2", "1", "0"],
    ]


def test_the_page_has_tables_of_a_method(record: RunRecord) -> None:
    rows: dict[str, Any] = {"A": {"images": 4, "size": "8 x 8"}, "B": {"images": 5, "class <b>": 1}}
    page = Page(
        render_report(build_results(dataclasses.replace(record, tables={"Training images": rows})))
    )
    assert table(page, "Training images by site") == [
        ["site", "images", "size", "class <b>"],
        ["A", "4", "8 x 8", ""],
        ["B", "5", "", "1"],
    ]


def test_pages_are_well_formed_and_fetch_nothing(
    record: RunRecord, history: History, classified: RunRecord, selecting: RunRecord
) -> None:
    rich = dataclasses.replace(
        record, model_selection=MODEL_SELECTION, tables={"Training images": {"A": {"images": 4}}}
    )
    html = render_report(build_results(rich), history, {"Generated images": b"\x89PNG"})
    failed = RunRecord("fedavg", record.task, 0, 5, {}, reason="site B: <empty> split")
    pages = [html, *(render_report(build_results(run)) for run in (classified, selecting, failed))]
    assert list(map(faults, pages)) == [[], [], [], []]
    assert html.count("<svg") == 2 and len(html) < 200_000
    assert "FAILED" in Page(pages[3]).text and "site B: <empty> split" in Page(pages[3]).text


def test_a_long_run_of_many_sites_is_a_small_page(record: RunRecord) -> None:
    events = EventLog()
    for round in range(3000):
        events.add(
            "rejected", f"update of round {round} not used: {'x' * 200}", site="A", round=round
        )
    votes = {f"site-{number:02d}": 0.5 for number in range(16)}
    candidates = [{"round": round, "value": 0.5, "votes": votes} for round in range(1, 501)]
    selection = {"global": {"round": 7, "rule": "median", "candidates": candidates}}
    html = render_report(
        build_results(
            dataclasses.replace(record, events=events.to_list(), model_selection=selection)
        )
    )
    page = Page(html)
    assert not faults(html) and len(html) < 2_000_000
    assert len(table(page, "Everything that was rejected")) == 1001
    rounds = [row[0] for row in table(page, "Validation of the global model at every site")[1:]]
    assert rounds == ["7selected", *map(str, range(301, 501))]


def test_synthetic_images_are_marked(record: RunRecord, task: TaskConfig) -> None:
    assert "Synthetic images." in Page(render_report(build_results(record))).text
    real = dataclasses.replace(
        record, task=dataclasses.replace(task, source="A paper, 2020, CC BY.")
    )
    text = Page(render_report(build_results(real))).text
    assert "Synthetic" not in text and "A paper, 2020, CC BY." in text


@pytest.mark.parametrize(
    ("name", "source", "options"),
    [
        ("tiny", "A paper", "--task TASK.json --data-root DATA --sites"),
        ("brain_lgg", "A paper", "--task brain_lgg --data-root DATA --sites"),
        ("phantom", "Synthetic discs", "--task phantom --sites"),
    ],
)
def test_the_command_of_a_study_names_the_task_and_its_images(
    record: RunRecord, task: TaskConfig, name: str, source: str, options: str
) -> None:
    used = dataclasses.replace(task, name=name, source=source)
    results = build_results(dataclasses.replace(record, task=used))
    assert options in Page(render_report(results, models={"deployed", "global"})).text


def test_names_are_escaped(record: RunRecord, history: History) -> None:
    named = dataclasses.replace(record, sites={"<script>alert(1)</script>": record.sites["B"]})
    assert "<script" not in render_report(build_results(named), history)


@pytest.mark.parametrize("name", [r"$\frac$", "a $b$ c", "$x_$", 'a id="b'])
def test_a_name_is_no_formula_and_no_part_of_the_figure(name: str) -> None:
    """matplotlib would fail on some dollars, and no page be written."""
    panel = figures.Panel("curves", {name: [(0, 0), (1, 1)]}, "round")
    assert name in text_of(figures.line_panels([panel], "curves"))


def text_of(svg: str | None) -> str:
    assert svg is not None and "currentColor" in svg and figures.INK not in svg
    return "".join(ElementTree.fromstring(f"<div>{svg}</div>").itertext())


def test_training_curves_have_every_defined_value(record: RunRecord, history: History) -> None:
    text = text_of(training_curves(build_results(record), history))
    assert "Training loss" in text and "Validation Dice, global" in text
    for site in "ABC":
        assert site in text
    assert "personal" not in text and "Aggregation" not in text, "no value, no panel"
    steps = [
        {**step, "aggregation": {"A": {"weight": 0.4}, "B": {"weight": None}}}
        for step in history[:2]
    ]
    assert "Aggregation weight" in text_of(training_curves(build_results(record), steps))
    assert training_curves(build_results(record), []) is None


def test_pages_without_matplotlib_have_no_figures(
    record: RunRecord, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "installed", lambda module: module != "matplotlib")
    assert "<svg" not in render_report(build_results(record), history) + render_site_report(
        segmented()
    )


def test_class_counts_of_all_sites_together_and_of_each(classified: RunRecord) -> None:
    page = Page(render_report(build_results(classified)))
    together = []
    for caption, content in zip(page.captions, page.tables, strict=True):
        if caption == "2 inside sites together":
            together.append(content)
    header = ["truth", "not <ill>", "<ill>"]
    assert together[0] == [
        header,
        ["not <ill>", "0.750(6)", "0.250(2)"],
        ["<ill>", "0.625(5)", "0.375(3)"],
    ], "the deployed model first"
    assert together[1][2] == ["<ill>", "0.750(6)", "0.250(2)"]
    assert page.captions.count("A") == 2 and page.captions.count("X") == 0, (
        "X keeps its counts back"
    )
    areas = next(content for content in page.tables if content[0] == ["site", "<ill>"])
    assert areas[1:] == [["A", "0.7500.500 to 1.000"], ["B", "0.750"]]
    assert table(page, "Traffic and time")[1:] == [["A", "2.0 KiB", "1.0 KiB", "1 min 01 s"]]


def test_counts_of_other_classes_are_left_out(classified: RunRecord) -> None:
    """A hostile site reports a matrix of three classes where the task has two."""
    counts = {"confusion": [[[1, 0, 0]] * 3], "roc": []}
    sites = {
        **classified.sites,
        "A": dataclasses.replace(classified.sites["A"], classes={"deployed": counts}),
    }
    page = Page(render_report(build_results(dataclasses.replace(classified, sites=sites))))
    assert page.captions.count("A") == 0 and page.captions.count("B") == 2


def test_roc_curves_of_every_site(classified: RunRecord) -> None:
    tables = class_tables(build_results(classified))
    assert [of_model["model"] for of_model in tables] == ["deployed", "global"]
    text = text_of(roc_curves(tables[0]["roc"], "roc"))
    for word in ("<ill>", "A, AUC 0.750", "B", "sensitivity"):
        assert word in text
    assert roc_curves({}, "roc") is None


NAMES = ("Meier", "<b>Roe</b>", "Xu")


def segmented(**changes: object) -> SiteReport:
    def cases(*dice: float) -> Cases:
        return Cases(NAMES, {"dice": torch.tensor(dice, dtype=torch.float64)})

    task = small_task()
    models = {
        "global": summarize({"dice": 0.5}, cases(0.4, 0.5, 0.6), task),
        "personal": summarize({"dice": 0.8}, cases(0.9, 0.7, math.nan), task),
        "deployed": summarize({"dice": 0.8}, cases(0.9, 0.7, math.nan), task),
    }
    content: dict[str, Any] = {
        "task": task,
        "models": models,
        "n": {"train": 4, "validation": 2, "test": 3},
        "pictures": {},
        "events": (),
        "constant": None,
        "of_training": (),
        "groups": {},
        "minimum_patients": 0,
        **changes,
    }
    return SiteReport("fedsm", "A", "inside", **content)


def test_the_figure_and_the_table_of_a_site_have_one_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"p{number}" for number in range(10)]
    dice = torch.linspace(0.4, 0.9, 10, dtype=torch.float64)
    deployed = summarize({"dice": 0.65}, Cases(names, {"dice": dice}), small_task())
    drawing = MagicMock()
    drawing.return_value.svg.return_value = ""
    monkeypatch.setattr(report, "patients_drawing", drawing)
    page = Page(render_site_report(segmented(models={"deployed": deployed})))
    [interval] = drawing.call_args.args[1].values()
    low, high = interval
    assert f"{low:.3f} to {high:.3f}" in table(page, "Means over the test images")[1][1]


def test_a_site_report_has_the_values_of_fewer_than_six_patients() -> None:
    rows = {
        "disc": {"dice": torch.tensor([0.5, 0.5, math.nan])},
        "cup": {"dice": torch.tensor([math.nan] * 3)},
    }
    task = small_task(target="multilabel", labels=("disc", "cup"))
    deployed = summarize(
        {"dice": 1.0},
        Cases(NAMES, {"dice": torch.ones(3, dtype=torch.float64)}, structures=rows),
        task,
    )
    page = Page(render_site_report(segmented(task=task, models={"deployed": deployed})))
    assert table(page, "Metrics of the deployed")[1:] == [
        ["disc", "0.500each: 0.500, 0.500"],
        ["cup", "–"],
    ]
    assert table(page, "Means over the test images")[1] == [
        "model",
        "1.000each: 1.000, 1.000, 1.000",
    ]
    assert "By structure" not in Page(render_site_report(segmented())).text


def test_a_site_report_has_patients_model_by_model() -> None:
    events = [{"round": None, "site": None, "kind": "warning", "message": "m"}]
    html = render_site_report(segmented(pictures={"worst: Xu": b"\x89PNG"}, events=events))
    assert html.startswith("<!doctype html>") and "<b>Roe" not in html and "&lt;b&gt;Roe" in html
    assert (
        "deployed = personal" in html
        and "each: 0.700, 0.900" in html
        and "0.700 to 0.900" not in html
    )
    assert html.count("<svg") == 1 and 'alt="worst: Xu"' in html
    assert not faults(html) and len(html) < 200_000
    assert [row[0] for row in table(Page(html), "Patients with the lowest")] == [
        "patient",
        "<b>Roe</b>",
        "Meier",
    ], "Xu has no value"


def test_the_legend_has_the_colours_of_the_pictures() -> None:
    pictures = {"worst: Xu": b"\x89PNG"}
    one = render_site_report(segmented(pictures=pictures))
    assert "border-color: #e69f00" in one and "background: #56b4e9" in one
    task = small_task(target="multilabel", labels=("disc", "cup"))
    two = render_site_report(segmented(pictures=pictures, task=task))
    for colour in COLOURS[:2]:
        assert f"border-color: {colour}" in two and f"background: {colour}" in two


def test_a_site_without_any_value_has_a_report() -> None:
    undefined = {role: Summary({"dice": None}) for role in ("global", "personal", "deployed")}
    assert "Patient by patient" not in render_site_report(segmented(models=undefined))


def test_a_classification_site_report_has_counts_and_probabilities() -> None:
    task = small_task("classification")
    probabilities = torch.tensor(
        [[0.8, 0.1, 0.1], [0.4, 0.5, 0.1], [0.2, 0.6, 0.2], [0.2, 0.2, 0.6]]
    )
    cases = Cases(("a", "a", "b", "c"), {}, probabilities, torch.tensor([0, 0, 1, 2]))
    assert patient_values(cases, task) == pytest.approx({"a": 0.6, "b": 0.6, "c": 0.6})
    html = render_site_report(
        segmented(task=task, models={"global": summarize({"accuracy": 0.75}, cases, task)})
    )
    assert (
        "probability of the true class" in html
        and "Class by class" in html
        and html.count("<svg") == 7
        and not faults(html)
    )


def test_patient_values_of_multilabel_and_binary_classification() -> None:
    task = small_task("classification", target="multilabel")
    cases = Cases(
        ("a", "b"),
        {},
        torch.tensor([[0.9, 0.2, 0.5], [0.5, 0.5, 0.5]]),
        torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]),
    )
    assert patient_values(cases, task) == pytest.approx({"a": (0.9 + 0.8 + 0.5) / 3, "b": 0.5})
    cases = Cases(("a", "a", "b"), {}, torch.tensor([[0.9], [0.5], [0.3]]), torch.tensor([1, 1, 0]))
    assert patient_values(
        cases, small_task("classification", target="binary", labels=["ill"], loss={"name": "bce"})
    ) == pytest.approx({"a": 0.7, "b": 0.7})


def test_a_site_report_has_the_interval_of_each_structure() -> None:
    names = tuple("abcdefg")
    half = torch.full((7,), 0.5, dtype=torch.float64)
    rows = {
        "disc": {"dice": half},
        "cup": {"dice": torch.where(torch.arange(7) < 5, half, math.nan)},
    }
    task = small_task(target="multilabel", labels=("disc", "cup"))
    deployed = summarize({"dice": 0.5}, Cases(names, {"dice": half}, structures=rows), task)
    page = Page(render_site_report(segmented(task=task, models={"deployed": deployed})))
    cup = "0.500each: 0.500, 0.500, 0.500, 0.500, 0.500"
    assert table(page, "Metrics of the deployed")[1:] == [
        ["disc", "0.5000.500 to 0.500"],
        ["cup", cup],
    ], "five patients have a cup"


def test_a_page_with_pictures_of_images_is_private(record: RunRecord, tmp_path: Path) -> None:
    modes = {}
    for title, pictures in (("none", {}), ("some", {"A: generated": b"\x89PNG"})):
        write_results(tmp_path / title, dataclasses.replace(record, pictures=pictures))
        modes[title] = (tmp_path / title / "report.html").stat().st_mode & 0o077
    assert modes["some"] == 0
    assert modes["none"] != 0
