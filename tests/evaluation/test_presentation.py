"""Numbers and names as text, and the reasons to doubt a deployed model."""

import dataclasses
from typing import Any

import pytest

from evaluation.pages import Page
from medflare.core.events import DOUBTS, EventLog
from medflare.evaluation import console
from medflare.evaluation.console import results_table
from medflare.evaluation.presentation import doubts, format_bytes, format_seconds, format_setting, model_columns
from medflare.evaluation.report import SiteReport, render_report, render_site_report
from medflare.evaluation.results import RunRecord, build_results
from medflare.tasks.config import TaskConfig


def test_bytes_and_seconds() -> None:
    sizes = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 3 * 2**20: "3.0 MiB", 1.45 * 2**30: "1.4 GiB", 2**41: "2.0 TiB"}
    assert {count: format_bytes(count) for count in sizes} == sizes
    times = {0.0: "0.00 s", 9.994: "9.99 s", 59.9: "59.9 s", 60: "1 min 00 s", 200.4: "3 min 20 s", 7500: "2 h 05 min"}
    assert {seconds: format_seconds(seconds) for seconds in times} == times


def test_settings_as_the_command_line_takes_them() -> None:
    values: dict[str, Any] = {"none": None, "true": True, "1e-05": 1e-05, "tune": "tune", "1,none": (1, None), "": []}
    assert {text: format_setting(value) for text, value in values.items()} == {text: text for text in values}


def test_models_with_equal_numbers_share_a_column() -> None:
    def site(**dice: float | None) -> dict[str, Any]:
        return {"role": "inside", "metrics": {"global": {"dice": 0.5}, **{model: {"dice": value} for model, value in dice.items()}}}

    def columns(*sites: dict[str, Any]) -> dict[str, str]:
        return model_columns({"sites": dict(zip("AB", sites, strict=False))})

    assert columns(site(personal=0.5, deployed=0.5)) == {"model": "global"}
    assert columns(site(personal=0.5), site(personal=0.6)) == {"global": "global", "personal": "personal"}, "different at one site"
    assert columns(site(personal=0.5), site(personal=None)) == {"global": "global", "personal": "personal"}, "undefined is not equal"
    assert list(columns(site(personal=None, deployed=None))) == ["global", "personal", "deployed"], "undefined models are not equal"
    assert list(columns(site(personal=0.6, mixture=0.6))) == ["global", "personal = mixture"]
    assert columns() == {}


@pytest.mark.parametrize("kind", DOUBTS)
@pytest.mark.parametrize("rich", [True, False])
def test_a_doubt_is_a_line_below_the_table_and_a_banner_in_the_report(
    record: RunRecord, kind: str, rich: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not rich:
        monkeypatch.setattr(console, "installed", lambda module: False)
    log = EventLog(record.events)
    for site in ("A", "B"):
        log.add(kind, f"of {site} <b>", site=site)
    results = build_results(dataclasses.replace(record, events=log.to_list()))
    (doubt,) = doubts(results["events"])
    last = results_table(results).splitlines()[-1]
    assert all(part in last for part in (f"WARNING {kind}", doubt.problem, doubt.remedy, "A: of A", "B: of B"))
    page = Page(render_report(results))
    assert page.text.index(doubt.problem) < page.text.index("Results on the test images"), "before any number"
    assert [tag for tag, attributes in page.tags if attributes.get("class") == "status doubtful"] == ["div"]


def test_a_run_without_doubts_has_no_warning(record: RunRecord) -> None:
    results = build_results(record)
    assert doubts(results["events"]) == [] and "WARNING" not in results_table(results)
    assert not [tag for tag, attributes in Page(render_report(results)).tags if attributes.get("class") == "status doubtful"]


def test_the_site_report_has_the_banner(task: TaskConfig) -> None:
    event = {"round": None, "site": "A", "kind": "constant_output", "message": "the deployed model answers no pixel of disc"}
    report = SiteReport("fedavg", "A", "inside", task, dict.fromkeys(("train", "validation", "test"), 1), {}, {}, [event])
    assert doubts([event])[0].problem in Page(render_site_report(report)).text


def test_a_doubt_names_five_of_many_sites() -> None:
    (doubt,) = doubts([{"site": f"site-{number}", "kind": "rare_class", "message": "few"} for number in range(9)])
    assert "site-4" in doubt.where and "site-5" not in doubt.where and "4 more" in doubt.where
