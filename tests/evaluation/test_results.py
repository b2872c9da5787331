"""results.json keeps its schema for complete, odd and failed runs; metrics.jsonl survives crashes and restarts."""

import copy
import csv
import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation.conftest import History
from foreign.install import install, install_extensions
from helpers.rounds import read_rounds
from medflare.cli.run import results as show
from medflare.core.errors import StateError
from medflare.evaluation.report import write_results
from medflare.evaluation.results import (
    RunRecord,
    append_round,
    build_results,
    find_results,
    json_ready,
    load_results,
    results_frame,
    validate_results,
    versions_of_run,
    write_rounds,
)
from medflare.tasks.config import TaskConfig, load_task


def test_every_key_of_the_schema_is_there(record: RunRecord) -> None:
    results = build_results(record)
    validate_results(results)
    assert (
        results["schema"],
        results["method"],
        results["task"],
        results["seed"],
        results["rounds"],
    ) == (1, "fedsm", "tiny", 7, 2)
    assert (results["status"], results["reason"]) == ("COMPLETED", None)
    assert results["traffic"] == {"down_bytes": 3 * 2**20, "up_bytes": 2**20}
    message = "update to 'train' not used: model/w holds NaN or infinity"
    assert results["events"][0] == {"round": 1, "site": "C", "kind": "rejected", "message": message}
    assert list(results["sites"]) == ["A", "B", "C", "X"]
    assert results["versions"]["python"].startswith("3.")
    assert results["configuration"]["hyper"] == {
        "site": {"lam": 0.7},
        "server": {"gamma": "tune", "selection": None},
    }


def test_every_site_has_every_model_and_metric_and_undefined_is_null(record: RunRecord) -> None:
    results = build_results(record)
    sites = results["sites"]
    for site in sites.values():
        assert list(site["metrics"]) == ["global", "personal", "deployed"]
        for metrics in site["metrics"].values():
            assert list(metrics) == ["dice", "iou", "hd95"]
    assert sites["A"]["metrics"]["personal"]["hd95"] is None, "NaN"
    assert sites["A"]["metrics"]["deployed"]["dice"] is None, "never measured"
    assert sites["C"]["n"] == {"train": 3, "validation": None, "test": None}
    assert sites["X"]["reports"]["deployed"] == {"global": 5, "A": 1, "B": 3}
    frame = results_frame(results).set_index(["site", "model", "metric"])
    assert len(frame) == 4 * 3 * 3 and frame.loc[("B", "personal", "dice"), "value"] == 0.8
    assert (
        np.isnan(frame.loc[("A", "deployed", "dice"), "value"])
        and frame.loc[("X", "global", "iou"), "role"] == "outside"
    )


def test_the_confusion_of_a_selector_has_inside_sites_that_report_counts(
    selecting: RunRecord, record: RunRecord
) -> None:
    assert build_results(selecting)["selector"] == {
        **selecting.selector,
        "confusion": {"A": {"A": 2, "B": 1}},
    }
    assert "selector" not in build_results(record)


def test_means_by_hand(record: RunRecord) -> None:
    mean = build_results(record)["mean"]
    assert mean["inside"]["global"]["dice"] == pytest.approx((0.4 + 0.6) / 2), "C is left out"
    assert mean["inside"]["personal"]["hd95"] == 2, "A's NaN is left out"
    assert mean["inside"]["deployed"]["dice"] is None
    assert mean["outside"]["deployed"]["dice"] == 0.75


def test_a_further_model_is_kept(record: RunRecord) -> None:
    outside = record.sites["X"]
    compared = dataclasses.replace(
        outside, metrics={**outside.metrics, "tent": {"dice": 0.9, "iou": 0.8, "hd95": 1.0}}
    )
    results = build_results(dataclasses.replace(record, sites={**record.sites, "X": compared}))
    validate_results(results)
    assert results["mean"]["outside"]["tent"]["dice"] == 0.9
    assert results["sites"]["A"]["metrics"]["tent"]["dice"] is None


def test_a_failed_run_without_any_site(task: TaskConfig) -> None:
    results = build_results(RunRecord("fedavg", task, 0, 5, {}, reason="no data root"))
    validate_results(results)
    assert (results["status"], results["reason"]) == ("FAILED", "no data root")
    assert results["mean"]["inside"]["global"]["dice"] is None


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("schema", 2, "schema"),
        ("seed", "7", "seed"),
        ("sites.A.metrics.global.dice", math.nan, "sites.A.metrics.global.dice"),
        ("sites.A.role", "visitor", "sites.A.role"),
        ("sites.A.metrics.personal", None, "personal"),
        ("events.0.kind", "oops", "oops"),
        ("costs", {"A": {"down_bytes": 1, "up_bytes": -1, "seconds": 1.5}}, "costs.A.up_bytes"),
        ("status", "FAILED", "reason"),
        ("configuration.hyper", {"lam": 0.7}, "configuration.hyper.site"),
        ("sites", {"..": {}}, "sites."),
    ],
)
def test_a_violation_of_the_schema_is_named(
    record: RunRecord, path: str, value: Any, named: str
) -> None:
    results: Any = copy.deepcopy(build_results(record))
    place = results
    (*above, last) = path.split(".")
    for key in above:
        place = place[int(key) if key.isdecimal() else key]
    place[last] = value
    with pytest.raises(ValueError, match=named):
        validate_results(results)


def test_json_ready() -> None:
    odd = {
        1: (np.int64(2), np.float64(0.5), math.inf),
        "path": Path("a/b"),
        "flag": True,
        "set": {"b", "a"},
        "none": None,
    }
    assert json_ready(odd) == {
        "1": [2, 0.5, None],
        "path": "a/b",
        "flag": True,
        "set": ["a", "b"],
        "none": None,
    }
    with pytest.raises(TypeError, match="object"):
        json_ready({"x": object()})


def test_written_results_are_returned_and_read_again(tmp_path: Path, record: RunRecord) -> None:
    results = write_results(tmp_path / "medflare", record)
    assert (
        json.loads((tmp_path / "medflare" / "results.json").read_text())
        == results
        == load_results(tmp_path)
    )
    assert (tmp_path / "medflare" / "report.html").read_text().startswith("<!doctype html>")


def test_the_newest_results_below_a_folder_are_read(tmp_path: Path, record: RunRecord) -> None:
    old = tmp_path / "flare/x/server/simulate_job/medflare"
    new = tmp_path / "local"
    write_results(old, record)
    write_results(new, dataclasses.replace(record, seed=8))
    os.utime(old / "results.json", (1, 1))
    assert find_results(tmp_path) == new / "results.json"
    os.utime(new / "results.json", (0, 0))
    assert find_results(tmp_path) == old / "results.json"
    assert load_results(old)["seed"] == load_results(old / "results.json")["seed"] == 7


def test_missing_or_damaged_results_raise_an_error_with_the_path(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(StateError, match=str(path)):
            load_results(path)
    with pytest.raises(StateError, match="A run writes it at its end"):
        load_results(tmp_path)
    for content in ("", "{", "[]", '{"schema": 1}', "[" * 10_000):
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(StateError, match=r"results\.json"):
            load_results(tmp_path)


ESCAPE = "\x1b]0;PWN\x07\x1b[2J"


@pytest.mark.parametrize("name", [ESCAPE, "", "..", "A\nB", "x" * 101])
def test_a_name_that_no_site_can_have_is_refused(
    tmp_path: Path, record: RunRecord, name: str
) -> None:
    """The server of another institution may have written the file."""
    results = build_results(record)
    results["sites"][name] = results["sites"]["A"]
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(
        StateError, match=r"results\.json: .*sites\..*a name of 1 to 100"
    ) as refused:
        load_results(tmp_path)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 600


def test_all_text_of_results_is_printable(tmp_path: Path, record: RunRecord) -> None:
    hostile = {"name": ESCAPE, "metric": ESCAPE, "source": ESCAPE}
    results = build_results(
        dataclasses.replace(record, reason=ESCAPE, method=ESCAPE, citation=ESCAPE)
    )
    results |= {
        "task": ESCAPE,
        "tables": {ESCAPE: {ESCAPE: {ESCAPE: ESCAPE}}},
        "cross_site": {ESCAPE: {ESCAPE: 0.5}},
    }
    results["events"].append({"round": None, "site": ESCAPE, "kind": "warning", "message": ESCAPE})
    results["configuration"]["task"] |= hostile
    results["configuration"]["settings"]["label"] = ESCAPE
    for site in results["sites"].values():
        site["metrics"][ESCAPE] = {ESCAPE: 0.5}
        site["metrics"]["deployed"] = {ESCAPE: 0.5, "structures": {ESCAPE: {ESCAPE: 0.5}}}
    (tmp_path / "results.json").write_text(json.dumps(results))
    loaded = load_results(tmp_path)
    assert "\x1b" not in json.dumps(loaded, ensure_ascii=False) and "PWN" in loaded["reason"]
    assert loaded["sites"]["A"]["role"] == "inside" and load_results(tmp_path) == loaded


def test_no_site_is_a_formula_in_the_table(tmp_path: Path, record: RunRecord) -> None:
    formula = '=cmd|"/c calc"!A1'
    write_results(
        tmp_path / "medflare", dataclasses.replace(record, sites={formula: record.sites["B"]})
    )
    assert show([tmp_path], tmp_path / "table.csv") == 0
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["site"] for row in rows} == {f"'{formula}"} and rows[0]["value"] == "0.6"
    assert rows[-1]["value"] == "", "undefined"


def test_steps_are_appended_and_read(tmp_path: Path, history: History) -> None:
    """A line cut short is skipped; a resumed run writes all anew."""
    assert read_rounds(tmp_path) == []
    folder = tmp_path / "new"
    append_round(folder, history[0])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "train", "rou')
    for line in history[1:]:
        append_round(folder, line)
    assert read_rounds(folder) == history
    write_rounds(folder, history[:2])
    assert read_rounds(folder) == history[:2]


def test_metrics_of_structures_and_classes_stand_beside_the_means(
    record: RunRecord, classified: RunRecord, task: TaskConfig
) -> None:
    by_label: dict[str, Any] = {
        "deployed": {"disc": {"dice": 0.5, "iou": None}, "strange": {"dice": 1.0}}
    }
    intervals = {
        "deployed": {
            "": {"dice": [0.4, 0.6], "iou": []},
            "disc": {"dice": [0.3, 0.7]},
            "strange": {},
        }
    }
    sites = {
        **record.sites,
        "A": dataclasses.replace(record.sites["A"], by_label=by_label, intervals=intervals),
    }
    results = build_results(dataclasses.replace(record, sites=sites))
    validate_results(results)
    assert results["sites"]["A"]["metrics"]["deployed"]["structures"] == {
        "disc": {"dice": 0.5, "iou": None}
    }, "labels of the task"
    assert "structures" not in results["sites"]["A"]["metrics"]["global"]
    assert results["sites"]["A"]["intervals"] == {
        "deployed": {"dice": [0.4, 0.6], "structures": {"disc": {"dice": [0.3, 0.7]}}}
    }
    frame = results_frame(results).query("site == 'A' and model == 'deployed' and metric == 'dice'")
    assert frame[["label", "value", "low", "high"]].values.tolist()[1:] == [["disc", 0.5, 0.3, 0.7]]
    assert "structures" not in results["mean"]["inside"]["deployed"]
    grades: dict[str, Any] = {"deployed": {"<ill>": {"sensitivity": 0.75}}}
    sites = {
        name: dataclasses.replace(site, by_label=grades if name == "A" else {})
        for name, site in classified.sites.items()
    }
    of_classes = build_results(dataclasses.replace(classified, sites=sites))["sites"]
    assert of_classes["A"]["metrics"]["deployed"]["classes"] == grades["deployed"]
    assert "classes" not in of_classes["X"]["metrics"]["deployed"], "suppressed"


def test_the_versions_of_a_run_are_of_all_packages_that_it_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lab_nets.py").write_text("x = 1")
    monkeypatch.syspath_prepend(str(install(tmp_path)))
    task = load_task("phantom")
    assert set(versions_of_run("fedavg", task, {})) == {"medflare", "medflare code"}
    task = dataclasses.replace(task, network={"name": "lab_nets.small:Net"})
    packages = set(versions_of_run("fedavg+damped_fedavg", task, {}))
    assert packages == {
        "medflare",
        "medflare code",
        "damped-fedavg",
        "damped-fedavg code",
        "lab_nets code",
    }
    assert set(versions_of_run("unknown", None, {})) == {"medflare", "medflare code"}


def test_the_versions_of_a_run_are_of_its_rule_and_its_adaptation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(install_extensions(tmp_path)))
    for settings in ({"server": {"rule": "lab_largest"}}, {"run": {"adapt": "lab_sharper:a=1"}}):
        record = versions_of_run("fedavg", load_task("phantom"), settings)
        assert "lab-extensions code" in record
