"""The results dict keeps its contract for whole, odd and failed runs."""

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medflare.evaluation.contract import validate_results
from medflare.evaluation.record import RunRecord, build_results, json_ready
from medflare.tasks.config import TaskConfig


def test_contract_holds_and_every_key_is_there(record: RunRecord) -> None:
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
    assert results["configuration"]["hyper"] == {"site": {"lam": 0.7}, "server": {"gamma": "tune", "selection": None}}


def test_every_site_names_every_model_and_metric_and_undefined_is_null(record: RunRecord) -> None:
    sites = build_results(record)["sites"]
    for site in sites.values():
        assert list(site["metrics"]) == ["global", "personal", "deployed"]
        assert all(list(metrics) == ["dice", "iou", "hd95"] for metrics in site["metrics"].values())
    assert sites["A"]["metrics"]["personal"]["hd95"] is None, "NaN"
    assert sites["A"]["metrics"]["deployed"]["dice"] is None, "never measured"
    assert sites["C"]["n"] == {"train": 3, "validation": None, "test": None}
    assert sites["X"]["reports"]["deployed"] == {"global": 5, "A": 1, "B": 3}


def test_confusion_of_a_selector_is_of_inside_sites_that_tell_it(selecting: RunRecord, record: RunRecord) -> None:
    assert build_results(selecting)["selector"] == {**selecting.selector, "confusion": {"A": {"A": 2, "B": 1}}}
    assert "selector" not in build_results(record)


def test_means_by_hand(record: RunRecord) -> None:
    mean = build_results(record)["mean"]
    assert mean["inside"]["global"]["dice"] == pytest.approx((0.4 + 0.6) / 2), "C is left out"
    assert mean["inside"]["global"]["hd95"] == pytest.approx((4 + 8) / 2)
    assert mean["inside"]["personal"]["hd95"] == 2, "A's NaN is left out"
    assert mean["inside"]["deployed"]["dice"] is None
    assert mean["outside"]["deployed"]["dice"] == 0.75


def test_models_beyond_the_three_are_kept(record: RunRecord) -> None:
    outside = record.sites["X"]
    compared = dataclasses.replace(outside, metrics={**outside.metrics, "tent": {"dice": 0.9, "iou": 0.8, "hd95": 1.0}})
    results = build_results(dataclasses.replace(record, sites={**record.sites, "X": compared}))
    validate_results(results)
    assert results["mean"]["outside"]["tent"]["dice"] == 0.9
    assert results["sites"]["A"]["metrics"]["tent"]["dice"] is None


def test_failed_run_without_any_site(task: TaskConfig) -> None:
    results = build_results(RunRecord("fedavg", task, 0, 5, {}, reason="no data root"))
    validate_results(results)
    assert (results["status"], results["reason"]) == ("FAILED", "no data root")
    assert results["mean"]["inside"]["global"]["dice"] is None


# -- the contract refuses what breaks it -----------------------------------------------------------------------------------


def _set(*path_and_value: Any) -> Callable[[dict[str, Any]], None]:
    *path, value = path_and_value

    def change(results: dict[str, Any]) -> None:
        for key in path[:-1]:
            results = results[key]
        results[path[-1]] = value

    return change


VIOLATIONS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
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
    "hyper-parameters of no algorithm": (_set("configuration", "hyper", {"lam": 0.7}), "configuration.hyper.site"),
    "one half alone": (lambda results: results["configuration"]["hyper"].pop("server"), "configuration.hyper.server"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_of_the_contract_is_named(record: RunRecord, name: str) -> None:
    change, expected = VIOLATIONS[name]
    results = copy.deepcopy(build_results(record))
    change(results)
    with pytest.raises(ValueError, match=expected):
        validate_results(results)


# -- small parts -----------------------------------------------------------------------------------------------------------


def test_json_ready() -> None:
    odd = {1: (np.int64(2), np.float64(0.5), math.inf), "path": Path("a/b"), "flag": True, "set": {"b", "a"}, "none": None}
    assert json_ready(odd) == {"1": [2, 0.5, None], "path": "a/b", "flag": True, "set": ["a", "b"], "none": None}
    with pytest.raises(TypeError, match="object"):
        json_ready({"x": object()})


def test_costs_of_sites_are_for_those_who_know_of_them(record: RunRecord) -> None:
    cost: dict[str, Any] = {"down_bytes": 10, "up_bytes": 0, "seconds": 1.5}
    results = build_results(dataclasses.replace(record, costs={"B": cost, "A": cost}))
    assert list(results["costs"]) == ["A", "B"]
    validate_results(results)
    validate_results({name: content for name, content in results.items() if name != "costs"})
    with pytest.raises(ValueError, match=r"costs\.A\.up_bytes"):
        validate_results({**results, "costs": {"A": {**cost, "up_bytes": -1}}})
