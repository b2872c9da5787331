"""The page of a study against numbers worked out by hand."""

import dataclasses
import re
from itertools import chain
from typing import Any

import pytest

from evaluation.pages import Page, faults
from medflare.evaluation.results import RunRecord, SiteRecord, build_results
from medflare.studies import figures
from medflare.studies.markdown import Table
from medflare.studies.page import answer_first, study_page
from medflare.studies.report import equal_rows
from medflare.studies.statistics import Results
from medflare.studies.tables import StudyTables

CUP = {"dice": 0.0}


def deployed(record: RunRecord, method: str, seed: int, **dice: float) -> Results:
    sites = {}
    for site, value in dice.items():
        sites[site] = SiteRecord(
            "inside",
            metrics={"deployed": {"dice": value}},
            by_label={"deployed": {"disc": {"dice": value}, "cup": CUP}},
        )
    return build_results(
        dataclasses.replace(
            record, method=method, seed=seed, sites=sites, up_bytes=1024, seconds={"total": 2.0}
        )
    )


def test_means_ranks_and_cost_sites_that_lose_by_joining_structures_and_every_table_are_there(
    record: RunRecord,
) -> None:
    groups = {
        "fedavg": [
            deployed(record, "fedavg", 0, A=0.7, B=0.5),
            deployed(record, "fedavg", 1, A=0.8, B=0.4),
        ],
        "alone <b>": [
            deployed(record, "single-site", 0, A=0.6, B=0.6),
            deployed(record, "single-site", 1, A=0.6, B=0.6),
        ],
        "constant": [deployed(record, "constant", seed, A=0.1, B=0.1) for seed in (0, 1)],
    }
    html = study_page(StudyTables(groups))
    assert not faults(html) and "<b>" not in html
    page = Page(html)
    overview = {row[0]: row[1:] for row in page.tables[0]}
    assert overview["fedavg"][0] == "0.600 ± 0.000" and overview["fedavg"][1] == "1.5", (
        "best at A, second at B"
    )
    assert overview["constant"][1] == "3.0" and overview["fedavg"][2:5] == [
        "1.0 KiB",
        "2 s",
        "2",
    ], "the constant prediction has a rank"
    assert page.tables[1] == [["method", "A", "B", "loses"], ["fedavg", "+0.150", "-0.150", "B"]]
    rows = list(chain.from_iterable(page.tables))
    assert ["fedavgcup", "0.000 ± 0.000", "0.000 ± 0.000", "0.000 ± 0.000"] in rows
    assert "dice, differences" in page.text
    assert ["alone <b>disc", *["0.600 ± 0.000"] * 3] in rows, "a name as it is, not as in Markdown"


@pytest.mark.figures
def test_the_plot_shows_differences_to_the_first_row(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Any] = {}
    drawing = figures.patients_drawing

    def noted(values: Any, intervals: Any, label: str, margin: float | None = None) -> Any:
        drawn.update(values=values, intervals=intervals, label=label, margin=margin)
        return drawing(values, intervals, label, margin)

    monkeypatch.setattr(figures, "patients_drawing", noted)
    groups = {
        "fedavg": [deployed(record, "fedavg", seed, A=0.5, B=0.5) for seed in (0, 1)],
        "fedsm": [
            deployed(record, "fedsm", 0, A=0.51, B=0.53),
            deployed(record, "fedsm", 1, A=0.55, B=0.53),
        ],
        "constant": [deployed(record, "constant", seed, A=0.1, B=0.1) for seed in (0, 1)],
    }
    html = study_page(StudyTables(groups))
    assert not faults(html)
    points = {"A, 0": 0.01, "A, 1": 0.05, "B, 0": 0.03, "B, 1": 0.03}
    assert drawn["values"] == {"fedsm": pytest.approx(points)}, "without the constant prediction"
    # Means 0.02 and 0.04: t(1) is 12.706 at 0.975, the standard error 0.01.
    assert drawn["intervals"]["fedsm"] == pytest.approx((0.03 - 0.12706, 0.03 + 0.12706), abs=1e-5)
    assert drawn["margin"] == 0.02 and "Grey: differences below 0.02." in html
    (svg,) = [part for part in html.split("<figure>")[1:] if "row minus fedavg" in part]
    ticks = re.findall(r">([−\d.]+)</text>", svg)
    assert "1.0" not in ticks and "0.8" not in ticks, "not an axis from 0 to 1"
    assert equal_rows(StudyTables({"fedavg": groups["fedavg"]})) == []
    assert "row minus" not in study_page(StudyTables({"fedavg": groups["fedavg"]}))


def test_without_training_alone_the_page_says_how_to_add_it(record: RunRecord) -> None:
    page = Page(study_page(StudyTables({"fedavg": [deployed(record, "fedavg", 0, A=0.7)]})))
    assert "--reference single-site" in page.text


def test_a_bar_in_a_label_is_no_column() -> None:
    lines = [["method", "whole | core", "x|y"], ["fedsm | fedprox", "**0.5**", "0.4"]]
    table = Table(lines, left=1)
    assert str(table).splitlines()[0] == "| method | whole \\| core | x\\|y |"
    headings, rows = answer_first(table)
    assert headings == lines[0]
    assert rows == [[("fedsm | fedprox", False), ("0.5", True), ("0.4", False)]]
