"""What makes a deployed model doubtful stands above the report and under the table: the same words, and nothing where nothing is wrong."""

import dataclasses
import io

import pytest

from evaluation.pages import Page
from medflare.core.events import DOUBTS, EventLog
from medflare.evaluation import console
from medflare.evaluation.console import print_results, results_table
from medflare.evaluation.doubts import doubts
from medflare.evaluation.report import render_report
from medflare.evaluation.results import RunRecord, build_results
from medflare.evaluation.site_report import SiteReport, render_site_report
from medflare.tasks.config import TaskConfig


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def doubtful(record: RunRecord, *kinds: str) -> RunRecord:
    log = EventLog(record.events)
    for kind in kinds:
        for site in ("A", "B"):
            log.add(kind, f"of {site} <b>", site=site)
    return dataclasses.replace(record, events=log.to_list())


@pytest.mark.parametrize("kind", DOUBTS)
@pytest.mark.parametrize("rich", [True, False])
def test_a_line_under_the_table_and_a_banner_in_the_report(
    record: RunRecord, kind: str, rich: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not rich:
        monkeypatch.setattr(console, "installed", lambda module: False)
    results = build_results(doubtful(record, kind))
    (doubt,) = doubts(results["events"])
    last = results_table(results).splitlines()[-1]
    assert kind in last and doubt.words in last and doubt.remedy in last and "A: of A" in last and "B: of B" in last
    terminal = Terminal()
    print_results(results, terminal)
    assert f"WARNING {kind}" in terminal.getvalue()
    page = Page(render_report(results))
    assert doubt.words in page.text and doubt.remedy in page.text
    assert page.text.index(doubt.words) < page.text.index("Results on the test images"), "before any number"
    assert [tag for tag, given in page.tags if given.get("class") == "status doubtful" and given["role"] == "alert"] == ["div"]


def test_nothing_is_said_of_a_run_without_doubts(record: RunRecord) -> None:
    results = build_results(record)
    assert doubts(results["events"]) == [] and "WARNING" not in results_table(results)
    assert not [given for _, given in Page(render_report(results)).tags if given.get("class") == "status doubtful"]


def test_the_sites_own_report_has_the_banner_too(task: TaskConfig) -> None:
    event = {"round": None, "site": "A", "kind": "constant_output", "message": "the deployed model answers no pixel of disc"}
    images = {"train": 1, "validation": 1, "test": 1}
    page = Page(render_site_report(SiteReport("fedavg", "A", "inside", task, images, {}, {}, {}, [event])))
    assert doubts([event])[0].words in page.text


def test_many_sites_are_told_in_part() -> None:
    events = [{"site": f"site-{number}", "kind": "rare_class", "message": "few"} for number in range(9)]
    (doubt,) = doubts(events)
    assert "site-4" in doubt.where and "site-5" not in doubt.where and "4 more" in doubt.where
