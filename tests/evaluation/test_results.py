"""results.json keeps its contract for whole, odd and failed runs; metrics.jsonl survives crashes and restarts."""

import copy
import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from medflare.core.errors import StateError
from medflare.evaluation.contract import validate_results
from medflare.evaluation.results import (
    RunRecord,
    SiteRecord,
    append_round,
    build_results,
    find_results,
    json_ready,
    load_results,
    mean_of_defined,
    read_rounds,
    write_results,
)


def test_contract_holds_and_every_key_is_there(record):
    results = build_results(record)
    validate_results(results)
    contract = {"schema", "method", "task", "seed", "rounds", "sites", "mean", "traffic", "seconds", "events", "versions"}
    assert contract <= set(results)
    assert (results["schema"], results["method"], results["task"], results["seed"], results["rounds"]) == (1, "fedsm", "tiny", 7, 2)
    assert (results["status"], results["reason"]) == ("COMPLETED", None)
    assert results["traffic"] == {"down_bytes": 3 * 2**20, "up_bytes": 2**20}
    assert results["events"][0] == {
        "round": 1,
        "site": "C",
        "kind": "rejected",
        "message": "update to 'train' not used: model/w holds NaN or infinity",
    }
    assert list(results["sites"]) == ["A", "B", "C", "X"]
    assert results["versions"]["python"].startswith("3.")
    assert results["configuration"]["hyper"] == {"lam": 0.7, "gamma": "tune"}


def test_every_site_names_every_model_and_metric_and_undefined_is_null(record):
    sites = build_results(record)["sites"]
    for site in sites.values():
        assert list(site["metrics"]) == ["global", "personal", "deployed"]
        assert all(list(metrics) == ["dice", "iou", "hd95"] for metrics in site["metrics"].values())
    assert sites["A"]["metrics"]["personal"]["hd95"] is None, "NaN"
    assert sites["A"]["metrics"]["deployed"]["dice"] is None, "never measured"
    assert sites["C"]["n"] == {"train": 3, "validation": None, "test": None}
    assert sites["X"]["reports"]["deployed"] == {"global": 5, "A": 1, "B": 3}


def test_means_by_hand(record):
    mean = build_results(record)["mean"]
    assert mean["inside"]["global"]["dice"] == pytest.approx((0.4 + 0.6) / 2), "C is left out"
    assert mean["inside"]["global"]["hd95"] == pytest.approx((4 + 8) / 2)
    assert mean["inside"]["personal"]["hd95"] == 2, "A's NaN is left out"
    assert mean["inside"]["deployed"]["dice"] is None
    assert mean["outside"]["deployed"]["dice"] == 0.75


def test_models_beyond_the_three_are_kept(record):
    record.sites["X"].metrics["tent"] = {"dice": 0.9, "iou": 0.8, "hd95": 1.0}
    results = build_results(record)
    validate_results(results)
    assert results["mean"]["outside"]["tent"]["dice"] == 0.9
    assert results["sites"]["A"]["metrics"]["tent"]["dice"] is None


def test_failed_run_without_any_site(task):
    results = build_results(RunRecord("fedavg", task, 0, 5, {}, reason="no data root"))
    validate_results(results)
    assert (results["status"], results["reason"]) == ("FAILED", "no data root")
    assert results["mean"]["inside"]["global"]["dice"] is None


def test_written_results_are_what_is_returned(tmp_path, record):
    results = write_results(tmp_path / "medflare", record)
    assert json.loads((tmp_path / "medflare" / "results.json").read_text()) == results
    assert (tmp_path / "medflare" / "report.html").read_text().startswith("<!doctype html>")
    assert load_results(tmp_path) == results


# -- the contract refuses what breaks it -----------------------------------------------------------------------------------


def _set(*path_and_value):
    *path, value = path_and_value

    def change(results):
        for key in path[:-1]:
            results = results[key]
        results[path[-1]] = value

    return change


VIOLATIONS = {
    "missing key": (lambda results: results.pop("traffic"), "traffic"),
    "other schema": (_set("schema", 2), "schema"),
    "number as text": (_set("seed", "7"), "seed"),
    "NaN": (_set("sites", "A", "metrics", "global", "dice", math.nan), "sites.A.metrics.global.dice"),
    "unknown role": (_set("sites", "A", "role", "visitor"), "sites.A.role"),
    "no personal model": (lambda results: results["sites"]["A"]["metrics"].pop("personal"), "personal"),
    "unknown event": (_set("events", 0, "kind", "oops"), "oops"),
    "negative bytes": (_set("traffic", "up_bytes", -1), "traffic.up_bytes"),
    "failed without reason": (_set("status", "FAILED"), "reason"),
    "completed with reason": (_set("reason", "because"), "reason"),
    "wrong mean": (_set("mean", "inside", "global", "dice", 0.9), "mean.inside.global.dice: 0.9"),
    "mean of nothing": (_set("mean", "inside", "deployed", "dice", 0.0), "mean.inside.deployed.dice"),
    "missing mean": (_set("mean", "outside", "deployed", "dice", None), "mean.outside.deployed.dice"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_violation_is_named(record, name):
    change, expected = VIOLATIONS[name]
    results = copy.deepcopy(build_results(record))
    change(results)
    with pytest.raises(ValueError, match="break their contract") as error:
        validate_results(results)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


# -- finding and loading ---------------------------------------------------------------------------------------------------


def test_newest_results_below_a_workspace_are_found(tmp_path, record):
    import os

    old, new = (tmp_path / "server" / job / "medflare" for job in ("first", "second"))
    write_results(old, record)
    write_results(new, dataclasses.replace(record, seed=8))
    os.utime(old / "results.json", (1, 1))
    assert find_results(tmp_path) == new / "results.json"
    assert load_results(old)["seed"] == 7
    assert load_results(old / "results.json")["seed"] == 7


def test_missing_results_are_an_error_that_names_the_place(tmp_path):
    with pytest.raises(StateError, match=f"{tmp_path}.*no medflare/results.json"):
        load_results(tmp_path)
    with pytest.raises(StateError, match="nowhere"):
        load_results(Path("nowhere"))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 1}'])
def test_damaged_results_are_an_error_that_names_the_file(tmp_path, content):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(StateError, match=r"results\.json"):
        load_results(tmp_path)


# -- metrics.jsonl ---------------------------------------------------------------------------------------------------------


def test_rounds_round_trip(tmp_path, history):
    assert read_rounds(tmp_path) == []
    for line in history:
        append_round(tmp_path / "new", line)
    assert read_rounds(tmp_path / "new") == history
    assert len((tmp_path / "new" / "metrics.jsonl").read_text().splitlines()) == len(history)


def test_a_line_cut_short_spoils_only_itself(tmp_path, history):
    append_round(tmp_path, history[0])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "train", "rou')
    append_round(tmp_path, history[1])
    assert read_rounds(tmp_path) == history[:2]


def test_a_repeated_step_counts_once_in_its_last_form(tmp_path, history):
    for line in (*history[:2], {**history[1], "seconds": 9.0}, history[2]):
        append_round(tmp_path, line)
    assert [(line["round"], line["seconds"]) for line in read_rounds(tmp_path)] == [(0, 1.5), (1, 9.0), (2, 0.2)]


def test_a_phase_that_comes_twice_in_a_round_stays_twice(tmp_path, history):
    for line in ({**history[0], "step": 0}, {**history[0], "step": 1}):
        append_round(tmp_path, line)
    assert len(read_rounds(tmp_path)) == 2


def test_nan_becomes_null_in_a_line(tmp_path):
    append_round(tmp_path, {"step": 0, "phase": "train", "round": 0, "sites": {"A": {"loss": math.nan, "gradient": np.float32(0.5)}}})
    assert read_rounds(tmp_path)[0]["sites"]["A"] == {"loss": None, "gradient": 0.5}


# -- small parts -----------------------------------------------------------------------------------------------------------


def test_json_ready():
    odd = {1: (np.int64(2), np.float64(0.5), math.inf), "path": Path("a/b"), "flag": True, "set": {"b", "a"}, "none": None}
    assert json_ready(odd) == {"1": [2, 0.5, None], "path": "a/b", "flag": True, "set": ["a", "b"], "none": None}
    with pytest.raises(TypeError, match="object"):
        json_ready({"x": object()})


def test_mean_of_defined():
    assert mean_of_defined([1.0, None, math.nan, 3.0]) == 2.0
    assert mean_of_defined([None, math.inf]) is None
    assert mean_of_defined([]) is None


def test_site_record_needs_nothing_but_a_role(task):
    results = build_results(RunRecord("fedavg", task, 0, 1, {"A": SiteRecord("inside")}))
    validate_results(results)
    assert results["sites"]["A"]["n"] == {"train": None, "validation": None, "test": None}
