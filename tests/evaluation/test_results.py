"""results.json and report.html are found and read again; metrics.jsonl survives crashes and restarts."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from medflare.core.errors import StateError
from medflare.evaluation import results
from medflare.evaluation.results import LiveReport, RunRecord, append_round, find_results, load_results, read_rounds, write_results


def test_written_results_are_what_is_returned(tmp_path: Path, record: RunRecord) -> None:
    results = write_results(tmp_path / "medflare", record)
    assert json.loads((tmp_path / "medflare" / "results.json").read_text()) == results
    assert (tmp_path / "medflare" / "report.html").read_text().startswith("<!doctype html>")
    assert load_results(tmp_path) == results


# -- finding and loading ---------------------------------------------------------------------------------------------------


def test_newest_results_below_a_workspace_are_found(tmp_path: Path, record: RunRecord) -> None:
    old, new = (tmp_path / "server" / job / "medflare" for job in ("first", "second"))
    write_results(old, record)
    write_results(new, dataclasses.replace(record, seed=8))
    os.utime(old / "results.json", (1, 1))
    assert find_results(tmp_path) == new / "results.json"
    assert load_results(old)["seed"] == 7
    assert load_results(old / "results.json")["seed"] == 7


def test_missing_results_are_an_error_that_names_the_place(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=str(tmp_path)):
        load_results(tmp_path)
    with pytest.raises(StateError, match="nowhere"):
        load_results(Path("nowhere"))
    (tmp_path / "task.json").write_text("{}")
    with pytest.raises(StateError, match="task"):
        load_results(tmp_path / "task.json")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 1}'])
def test_damaged_results_are_an_error_that_names_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(StateError, match=r"results\.json"):
        load_results(tmp_path)


# -- metrics.jsonl ---------------------------------------------------------------------------------------------------------


def test_rounds_round_trip(tmp_path: Path, history: list[dict[str, Any]]) -> None:
    assert read_rounds(tmp_path) == []
    for line in history:
        append_round(tmp_path / "new", line)
    assert read_rounds(tmp_path / "new") == history
    assert len((tmp_path / "new" / "metrics.jsonl").read_text().splitlines()) == len(history)


def test_a_line_cut_short_spoils_only_itself(tmp_path: Path, history: list[dict[str, Any]]) -> None:
    append_round(tmp_path, history[0])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "train", "rou')
    append_round(tmp_path, history[1])
    assert read_rounds(tmp_path) == history[:2]


def test_a_repeated_step_counts_once_in_its_last_form(tmp_path: Path, history: list[dict[str, Any]]) -> None:
    for line in (*history[:2], {**history[1], "seconds": 9.0}, history[2]):
        append_round(tmp_path, line)
    assert [(line["round"], line["seconds"]) for line in read_rounds(tmp_path)] == [(0, 1.5), (1, 9.0), (2, 0.2)]


# -- while a run goes on ---------------------------------------------------------------------------------------------------


def test_a_running_report_is_written_when_it_is_time_and_replaced_at_the_end(
    tmp_path: Path, record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = dataclasses.replace(record, running=True)
    live = LiveReport()
    assert live.refresh(tmp_path, lambda: running) == "" and not any(tmp_path.iterdir()), "not in the first seconds"
    monkeypatch.setattr(results, "_PAUSE", 0.0)
    live = LiveReport()
    assert live.refresh(tmp_path, lambda: running) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"], "results are for the end"
    written = (tmp_path / "report.html").read_text()
    assert "RUNNING" in written and 'http-equiv="refresh"' in written
    assert live.refresh(tmp_path, lambda: pytest.fail("it is too early")) == "", "it took its time, and the run gets fifty times that"
    write_results(tmp_path, record)
    assert "RUNNING" not in (tmp_path / "report.html").read_text() and load_results(tmp_path)["status"] == "COMPLETED"


def test_a_report_that_cannot_be_drawn_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> RunRecord:
        raise ValueError("odd")

    monkeypatch.setattr(results, "_PAUSE", 0.0)
    live = LiveReport()
    assert live.refresh(tmp_path, broken) == "ValueError: odd"
    assert live.refresh(tmp_path, broken) == ""
