"""Grids: every combination runs, and validation images alone select the row that is shown."""

import dataclasses
import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from helpers.small_tasks import tiny_phantom
from medflare.cli.options import task_with
from medflare.core.errors import ConfigError
from medflare.evaluation.results import RunRecord, SiteRecord, build_results
from medflare.studies.candidates import Candidate
from medflare.studies.grid import TRIED, cells_of, parse_grid, selected, validation_values
from medflare.studies.references import Draw, Setting
from medflare.studies.study import STUDY_FILE, read_study, run_study, study_tables
from medflare.tasks.config import load_task

TASK = load_task(tiny_phantom())
SETTING = Setting(TASK, ("site-1", "site-2"), rounds=1)


def cells(rows: list[str], *grid: str) -> dict[str, list[Candidate]]:
    return cells_of(list(map(Candidate.parse, rows)), parse_grid(grid), TASK, task_with)


def test_every_row_that_knows_a_name_has_all_combinations() -> None:
    rows = ["fedavg", "fedprox", "fedprox:mu=0.5", "constant", "single-site"]
    of_rows = cells(rows, "mu=0.01,0.1", "lr=0.5", "lr=0.25")
    labels = {}
    for row, of_row in of_rows.items():
        labels[row] = [cell.row for cell in of_row]
    assert labels == {
        "fedavg": ["fedavg:lr=0.5", "fedavg:lr=0.25"],
        "fedprox": [
            "fedprox:mu=0.01,lr=0.5",
            "fedprox:mu=0.01,lr=0.25",
            "fedprox:mu=0.1,lr=0.5",
            "fedprox:mu=0.1,lr=0.25",
        ],
        "fedprox:mu=0.5": ["fedprox:mu=0.5,lr=0.5", "fedprox:mu=0.5,lr=0.25"],
        "single-site": ["single-site:lr=0.5", "single-site:lr=0.25"],
    }
    cell = of_rows["fedprox"][3]
    assert cell.hyper["site"] == {"mu": 0.1}
    assert cell.task_changes == {"optimizer": {**TASK.optimizer, "lr": 0.25}}
    (shown,) = cells(["fedavg"], "task.batch_size=2")["fedavg"]
    assert shown.row == "fedavg:task.batch_size=2" and shown.task_changes == {"batch_size": 2}


@pytest.mark.parametrize(
    ("rows", "grid", "token"),
    [
        (["fedavg", "constant"], "mu=0.1", "--grid mu"),
        (["fedprox:mu=1"], "mu=0.1", "--grid mu"),
        (["constant"], "lr=0.1", "--grid lr"),
        (["fedprox"], "mu=-1,1", "mu"),
        (["fedavg"], "task.batch=1", "batch"),
        (["fedavg"], "lr", "NAME=VALUE"),
        (["fedavg"], "lr=", "NAME=VALUE"),
    ],
)
def test_a_grid_that_no_row_can_have_raises_an_error(
    rows: list[str], grid: str, token: str
) -> None:
    with pytest.raises(ConfigError, match=token):
        cells(rows, grid)


def test_a_cell_trains_with_its_task_and_has_the_task_of_the_study() -> None:
    of_row = cells(["fedavg", "equal-compute"], "lr=0.001,0.1")
    curves = []
    for cell in of_row["fedavg"]:
        run = cell.run(Draw(SETTING, 0))
        assert run["configuration"]["task"]["optimizer"] == TASK.optimizer
        changes = run["configuration"]["settings"]["task_changes"]
        curves.append(run["curves"])
    assert changes["optimizer"]["lr"] == 0.1 and curves[0] != curves[1]
    changes = of_row["equal-compute"][0].run(Draw(SETTING, 0))["configuration"]["settings"]
    assert set(changes["task_changes"]) == {"optimizer", "local_epochs"}


def run_with(curves: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A run whose model_selection has round 1 of the global model."""
    selection = {"global": {"round": 1, "candidates": []}}
    record = RunRecord("fedavg", TASK, 0, 2, {}, model_selection=selection)
    record = dataclasses.replace(record, **changes)
    return build_results(record) | {"curves": curves}


def test_the_validation_value_is_of_the_selected_round() -> None:
    curve = {"A": [[0, 0.9], [1, 0.5], [2, 0.75]], "B": [[0, 0.1], [1, 0.25], [2, 0.5]]}
    assert validation_values(run_with({"global": curve})) == [0.5, 0.25]
    alone = run_with({"global": curve}, method="single-site")
    assert validation_values(alone) == [0.75, 0.5], "model_selection is of its first site"
    personal = {"A": [[0, 0.9], [1, 0.7], [2, 0.6]]}
    both = {"global": curve, "personal": personal}
    assert validation_values(run_with(both)) == [0.7], "each site selects its own"
    last = {"site": {}, "server": {"selection": "last"}}
    assert validation_values(run_with(both, hyper=last)) == [0.6]
    assert validation_values(run_with({})) == []
    assert validation_values(run_with(both, reason="no number")) == [], "it ended early"


def test_a_label_with_a_failed_run_is_not_selected() -> None:
    good = {"A": [[1, 0.5]], "B": [[1, 0.5]]}
    better = {"A": [[1, 0.75]], "B": [[1, 0.75]]}
    groups = {
        "first": [run_with({"global": good}), run_with({"global": good})],
        "second": [run_with({"global": better}), run_with({}, reason="no number")],
    }
    assert selected(["second", "first"], groups) == "first"
    assert selected(["b", "first"], {**groups, "b": groups["first"]}) == "b", "the first of equals"
    assert selected(["c", "d"], {"c": [run_with({})], "d": [run_with({})]}) == "c"


def test_validation_images_select_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mu = 0.1 is better on validation images, mu = 0.01 on test images."""

    def run(row: Candidate, draw: Draw) -> dict[str, Any]:
        mu = row.hyper["site"].get("mu", 0)
        test = {"deployed": {"dice": 0.5 - mu}}
        sites = {site: SiteRecord("inside", metrics=test) for site in draw.setting.sites}
        record = RunRecord("fedprox", draw.task, draw.seed, 1, sites, seconds={"total": 1.0})
        results = build_results(dataclasses.replace(record, hyper=row.effective))
        return results | {"curves": {"global": {"site-1": [[0, 1.0], [1, mu]]}}}

    monkeypatch.setattr(Candidate, "run", run)
    rows = list(map(Candidate.parse, ("fedavg", "fedprox")))
    grids = cells(["fedavg", "fedprox"], "mu=0.01,0.1")
    groups = run_study(rows, SETTING, [0, 1], tmp_path, grids=grids)
    assert list(groups) == ["fedavg", "fedprox:mu=0.01", "fedprox:mu=0.1"], "everything that ran"
    assert list(read_study(tmp_path)) == ["fedavg", "fedprox:mu=0.1"]
    table = (tmp_path / "table.md").read_text()
    shown, _, tried = table.partition(f"## {TRIED}")
    assert "fedprox:mu=0.1 |" in shown and "mu=0.01" not in shown
    assert "| fedprox:mu=0.01 | dice 0.010 | 2 |\n| fedprox:mu=0.1 | **dice 0.100** | 2 |" in tried
    page = (tmp_path / "study.html").read_text()
    assert TRIED in page and "fedprox:mu=0.01" in page
    with ZipFile(tmp_path / STUDY_FILE) as archive:
        content = json.loads(archive.read("study.json"))
        assert "fedprox_mu=0.01/seed1/results.json" in archive.namelist()
    assert content["grids"] == {"fedprox": ["fedprox:mu=0.01", "fedprox:mu=0.1"]}
    wider = cells(["fedprox"], "mu=0.1,0.4")
    run_study(rows[1:], SETTING, [0, 1], tmp_path, grids=wider, rerun=["fedprox"])
    assert list(read_study(tmp_path)) == ["fedprox:mu=0.4", "fedavg"]
    assert str(study_tables(tmp_path).everything[TRIED]).count("fedprox:mu") == 3
    by_hand = [Candidate.parse("fedprox:mu=0.01")]
    run_study(by_hand, SETTING, [0, 1], tmp_path)
    assert "fedprox:mu=0.01" in read_study(tmp_path), "a row that is named is shown"
