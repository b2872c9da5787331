"""The report is one self-contained page that shows what the results hold, whatever they hold."""

import dataclasses
from typing import Any
from xml.etree import ElementTree

import pytest

from evaluation.pages import Page, faults
from medflare.core.events import EventLog
from medflare.evaluation import report
from medflare.evaluation.classes import class_tables
from medflare.evaluation.figures import roc_curves, training_curves
from medflare.evaluation.report import render_report
from medflare.evaluation.results import RunRecord, SiteRecord, build_results
from medflare.tasks.config import TaskConfig


def test_page_holds_the_numbers(record: RunRecord, history: list[dict[str, Any]]) -> None:
    page = Page(render_report(build_results(record), history))
    headline = {row[0]: row[1:] for row in page.tables[0]}
    assert headline["site"] == ["train", "validation", "test", "global", "personal", "deployed"]
    assert headline["A"] == ["4 (31 %)", "1", "3", "0.400", "0.500(best)", "–undefined"]
    assert headline["C"][:3] == ["3 (23 %)", "?", "?"]
    assert headline["Xoutside"][3:] == ["0.700", "–undefined", "0.750(best)"]
    assert headline["mean, inside"][1:] == ["0.500", "0.650(best)", "–undefined"]
    full = {row[0]: row[1:] for row in page.tables[1] if row}
    assert full["B"] == ["0.600", "0.800(best)", "–undefined", "0.429", "0.667(best)", "–undefined", "4.0", "2.0(best)", "–undefined"]
    selected = {row[0]: row[1:] for row in page.tables[2]}
    assert selected == {"site": ["global", "A", "B"], "X": ["5", "1", "3"]}
    assert ["1", "C", "rejected", "update to 'train' not used: model/w holds NaN or infinity"] in page.tables[3]


def test_the_page_shows_the_chosen_round_and_every_vote(record: RunRecord) -> None:
    """Two rounds; C, whose metric is undefined in the first, would have chosen another one."""
    candidates = [
        {"round": 1, "value": 0.7, "votes": {"A": 0.7, "B": 0.7}},
        {"round": 2, "value": 0.5, "votes": {"A": 0.5, "B": 0.4, "C": 0.9}},
    ]
    page = Page(
        render_report(
            build_results(dataclasses.replace(record, model_selection={"global": {"round": 1, "rule": "mean", "candidates": candidates}}))
        )
    )
    (table,) = [table for caption, table in zip(page.captions, page.tables, strict=True) if caption.startswith("Validation of the global")]
    assert table[0] == ["after rounds", "mean", "A", "B", "C"]
    assert table[1:] == [["1delivered", "0.700", "0.700", "0.700", "–"], ["2", "0.500", "0.500", "0.400", "0.900"]]


def test_the_page_shows_gamma_its_candidates_all_votes_and_the_confusion(selecting: RunRecord) -> None:
    html = render_report(build_results(selecting))
    page = Page(html)
    tables = {caption.split()[0]: table for caption, table in zip(page.captions, page.tables, strict=True)}
    assert tables["Mean"] == [["gamma", "A"], ["0.0", "0.020"], ["0.3chosen", "0.043"], ["1.0", "0.000"]]
    assert [table for caption, table in zip(page.captions, page.tables, strict=True) if caption.startswith("Test images of each site")] == [
        [["site", "A", "B", "C"], ["A", "2", "1", "0"]]
    ]
    assert faults(html) == []


def test_a_methods_tables_of_its_sites_are_shown(record: RunRecord) -> None:
    rows: dict[str, Any] = {"A": {"images": 4, "size": "8 x 8"}, "B": {"images": 5, "class <b>": 1}}
    page = Page(render_report(build_results(dataclasses.replace(record, tables={"Training images": rows}))))
    (table,) = (table for table, caption in zip(page.tables, page.captions, strict=True) if caption == "Training images by site")
    assert table == [["site", "images", "size", "class <b>"], ["A", "4", "8 x 8", ""], ["B", "5", "", "1"]]


def test_hyper_parameters_stand_under_their_half(record: RunRecord) -> None:
    page = Page(render_report(build_results(record)))
    tables = {caption: table for caption, table in zip(page.captions, page.tables, strict=True) if caption.startswith("Hyper")}
    assert tables == {
        "Hyper-parameters of the site algorithm": [["name", "value"], ["lam", "0.7"]],
        "Hyper-parameters of the server algorithm": [["name", "value"], ["gamma", "tune"], ["selection", "none"]],
    }
    bare = Page(render_report(build_results(dataclasses.replace(record, hyper={"site": {}, "server": {}}))))
    assert bare.tables[-3] == bare.tables[-4] == [["name", "value"], ["none"]], "an algorithm without any says so"


def test_pages_are_whole_and_fetch_nothing(record: RunRecord, history: list[dict[str, Any]], classified: RunRecord) -> None:
    model_selection = {"global": {"round": 1, "rule": "median", "candidates": [{"round": 1, "value": 0.7, "votes": {"A": 0.7}}]}}
    rich = dataclasses.replace(record, model_selection=model_selection, tables={"Training images": {"A": {"images": 4}}})
    html = render_report(build_results(rich), history, {"Generated images": b"\x89PNG"})
    failed = RunRecord("fedavg", record.task, 0, 5, {}, reason="site B: <empty> split")
    pages = [html, *(render_report(build_results(one)) for one in (classified, failed, dataclasses.replace(record, running=True)))]
    assert [faults(page) for page in pages] == [[], [], [], []]
    assert html.count("<svg") == 1 and len(html) < 200_000


def test_a_long_run_of_many_sites_is_a_page_that_opens(record: RunRecord) -> None:
    """A liar that is named at every step, and sixteen sites that vote on five hundred rounds."""
    events = EventLog()
    for round in range(3000):
        events.add("rejected", f"update of round {round} not used: {'x' * 200}", site="A", round=round)
    votes = {f"site-{number:02d}": 0.5 for number in range(16)}
    candidates = [{"round": round, "value": 0.5, "votes": votes} for round in range(1, 501)]
    long = dataclasses.replace(
        record, events=events.to_list(), model_selection={"global": {"round": 7, "rule": "median", "candidates": candidates}}
    )
    html = render_report(build_results(long))
    page = Page(html)
    assert not faults(html) and len(html) < 2_000_000
    assert len(table(page, "Whatever was rejected")) == 1001
    rounds = [row[0] for row in table(page, "Validation of the global model at every site, the latest rounds")[1:]]
    assert rounds[0] == "7delivered" and rounds[1:] == [str(round) for round in range(301, 501)]


def test_synthetic_images_are_said_to_be_synthetic(record: RunRecord, task: TaskConfig) -> None:
    assert "Synthetic images." in Page(render_report(build_results(record))).text
    real = dataclasses.replace(record, task=dataclasses.replace(task, source="A paper, 2020, CC BY."))
    text = Page(render_report(build_results(real))).text
    assert "Synthetic" not in text
    assert "A paper, 2020, CC BY." in text


def test_failed_run_shows_its_reason(task: TaskConfig) -> None:
    page = Page(render_report(build_results(RunRecord("fedavg", task, 0, 5, {}, reason="site B: <empty> split"))))
    assert "FAILED" in page.text
    assert "site B: <empty> split" in page.text


def test_names_are_escaped(record: RunRecord, history: list[dict[str, Any]]) -> None:
    named = dataclasses.replace(record, sites={"<script>alert(1)</script>": record.sites["B"]})
    html = render_report(build_results(named), history)
    Page(html)
    assert "<script" not in html


def drawn(svg: str | None) -> tuple[str, str]:
    """The figure as it is, and the text in it."""
    assert svg is not None
    return svg, "".join(ElementTree.fromstring(svg).itertext())


def test_curves_hold_every_defined_point(record: RunRecord, history: list[dict[str, Any]]) -> None:
    svg, text = drawn(training_curves(build_results(record), history))
    assert "Training loss" in text
    assert "Validation Dice, global" in text
    assert "personal" not in text, "no personal value is defined, so there is no such panel"
    assert all(site in text for site in "ABC")
    assert "currentColor" in svg
    assert "#010203" not in svg
    assert training_curves(build_results(record), []) is None


def test_curves_show_the_aggregation(record: RunRecord, history: list[dict[str, Any]]) -> None:
    steps = [{**step, "aggregation": {"A": {"weight": 0.4}, "B": {"weight": None}}} for step in history[:2]]
    assert "Aggregation weight" in drawn(training_curves(build_results(record), steps))[1]
    assert "Aggregation weight" not in drawn(training_curves(build_results(record), history))[1]


def test_without_matplotlib_the_page_says_so(record: RunRecord, history: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "installed", lambda module: False)
    page = Page(render_report(build_results(record), history))
    assert not any(tag == "svg" for tag, _ in page.tags)


def table(page: Page, caption: str) -> list[list[str]]:
    """The one table whose caption begins so."""
    (found,) = [table for own, table in zip(page.captions, page.tables, strict=True) if own.startswith(caption)]
    return found


def test_equal_models_share_a_column(record: RunRecord) -> None:
    """FedAvg delivers one model in three roles."""
    sites = {}
    for name, dice in (("A", 0.4), ("B", 0.6)):
        metrics = {model: {"dice": dice, "iou": dice / 2} for model in ("global", "personal", "deployed")}
        sites[name] = SiteRecord("inside", {"train": 4}, metrics)
    results = build_results(dataclasses.replace(record, sites=sites))
    assert set(results["sites"]["A"]["metrics"]) == {"global", "personal", "deployed"}, "the results hold all of them"
    page = Page(render_report(results))
    assert page.tables[0][0] == ["site", "train", "validation", "test", "global = personal = deployed"]
    assert page.tables[0][1:] == [["A", "4 (50 %)", "?", "?", "0.400"], ["B", "4 (50 %)", "?", "?", "0.600"], ["mean, inside", "", "0.500"]]
    assert table(page, "All metrics")[1] == ["global = personal = deployed"] * 2


def test_counts_of_all_sites_together_and_of_each(classified: RunRecord) -> None:
    page = Page(render_report(build_results(classified)))
    together = [table for caption, table in zip(page.captions, page.tables, strict=True) if caption == "2 inside sites together"]
    header = ["truth", "not <ill>", "<ill>"]
    assert together[0] == [header, ["not <ill>", "0.750(6)", "0.250(2)"], ["<ill>", "0.625(5)", "0.375(3)"]], "the deployed model first"
    assert together[1][2] == ["<ill>", "0.750(6)", "0.250(2)"]
    assert page.captions.count("A") == 2 and page.captions.count("X") == 0, "what a site keeps back is not there"
    areas = next(found for found in page.tables if found[0] == ["site", "<ill>"])
    assert areas[1:] == [["A", "0.750 (0.500 to 1.000)"], ["B", "0.750"]]


def test_curves_of_every_site(classified: RunRecord) -> None:
    tables = class_tables(build_results(classified))
    assert [of.model for of in tables] == ["deployed", "global"]
    _, text = drawn(roc_curves(tables[0].points))
    assert all(word in text for word in ("<ill>", "A", "B", "sensitivity"))
    assert roc_curves({}) is None


def test_traffic_and_time_of_every_site(classified: RunRecord) -> None:
    found = table(Page(render_report(build_results(classified))), "Tensors on the wire and time")
    assert found[1:] == [["A", "2.0 KiB", "1.0 KiB", "1 min 01 s"]]
    older = build_results(dataclasses.replace(classified, costs={}))
    del older["costs"]
    assert "time at work" not in render_report(older), "results of earlier versions say nothing of it"


def test_the_chosen_round_stands_at_the_top_and_in_the_curves(record: RunRecord, history: list[dict[str, Any]]) -> None:
    model_selection = {"global": {"round": 1, "rule": "median", "candidates": [{"round": 1, "value": 0.7, "votes": {"A": 0.7, "B": 0.7}}]}}
    results = build_results(dataclasses.replace(record, model_selection=model_selection))
    text = render_report(results)
    assert '<dd class="number">1 of 2</dd>' in text
    assert training_curves(results, history) != training_curves(build_results(record), history)


def test_a_page_renews_itself_only_while_the_run_goes_on(record: RunRecord, history: list[dict[str, Any]]) -> None:
    html = render_report(build_results(dataclasses.replace(record, sites={}, running=True)), history[:1])
    assert ("meta", {"http-equiv": "refresh", "content": "10"}) in Page(html).tags
    assert "RUNNING" in Page(html).text and "1 of 2 rounds" in Page(html).text and "COMPLETED" not in html
    assert "http-equiv" not in render_report(build_results(record), history)
