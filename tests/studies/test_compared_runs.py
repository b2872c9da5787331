"""Runs side by side: numbers by hand, and scores by patient where the runs have them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.small_tasks import small_task
from medflare.cli import main
from medflare.evaluation.report import write_results
from medflare.evaluation.results import RunRecord, SiteRecord, build_results
from medflare.studies.compared_runs import (
    comparison,
    delong_of_runs,
    differing_settings,
    metric_of_runs,
    read_run,
)
from medflare.tasks.config import load_task

A = np.array([0.5, 0.6, 0.7, 0.4, 0.55, 0.65, 0.75, 0.45])
GAINS = np.array([0.1, 0.08, 0.12, 0.09, 0.11, 0.1, 0.07, 0.13])
B = np.array([0.3, 0.4])


def write_run(
    folder: Path,
    method: str,
    values: dict[str, np.ndarray],
    seed: int = 0,
    patients: str = "p",
    **changes: Any,
) -> Path:
    """A run with results.json and the sites' scores."""
    sites = {}
    for site, of_site in values.items():
        sites[site] = SiteRecord(
            "inside", {"test": len(of_site)}, {"deployed": {"dice": float(of_site.mean())}}
        )
        scores = folder / "sites" / site / "scores"
        scores.mkdir(parents=True)
        cases = {
            "patients": [f"{patients}{number}" for number in range(len(of_site))],
            "values": {"dice": of_site.tolist()},
        }
        (scores / "deployed.json").write_text(json.dumps(cases))
    write_results(folder, RunRecord(method, small_task(**changes), seed, 2, sites))
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    first = write_run(tmp_path / "first", "fedavg", {"A": A, "B": B})
    return [
        first,
        write_run(
            tmp_path / "second", "fedsm", {"A": A + GAINS, "B": B - 0.1}, seed=4, batch_size=7
        ),
    ]


def runs_of(folders: list[Path]) -> dict[str, Any]:
    return {folder.name: read_run(folder) for folder in folders}


def test_the_settings_that_differ(folders: list[Path]) -> None:
    table = differing_settings(runs_of(folders))
    assert table.to_dict("index") == {
        "method": {"first": "fedavg", "second": "fedsm"},
        "seed": {"first": "0", "second": "4"},
        "task.batch_size": {"first": "4", "second": "7"},
    }


def test_the_order_of_keys_is_no_difference(folders: list[Path]) -> None:
    runs = runs_of(folders)
    flip = {"name": "RandFlip", "prob": 0.5}
    resumed = dict(reversed(flip.items()))
    runs["first"]["configuration"]["task"]["augment"] = [flip]
    runs["second"]["configuration"]["task"]["augment"] = [resumed]
    assert "task.augment" not in differing_settings(runs).index


def test_the_deployed_models_by_site(folders: list[Path]) -> None:
    table = metric_of_runs(runs_of(folders))
    assert table["first"].to_dict() == {
        "A": f"{A.mean():.3f}",
        "B": "0.350",
        "mean, inside": f"{(A.mean() + 0.35) / 2:.3f}",
    }
    differences = table["second - first"]
    assert differences["B"] == "-0.100, n = 2", "two patients have no interval"
    assert differences["mean, inside"].startswith(f"{(GAINS.mean() - 0.1) / 2:+.3f} (")
    value, _, interval = differences["A"].partition(" (")
    low, high = map(float, interval.partition(")")[0].split(" to "))
    error = GAINS.std(ddof=1) / np.sqrt(len(GAINS))
    assert value == f"{GAINS.mean():+.3f}" and interval.endswith("n = 8")
    assert GAINS.mean() - 3 * error < low < GAINS.mean() < high < GAINS.mean() + 3 * error


@pytest.mark.parametrize(
    "changes", [{"patients": "other"}, {"labels": ["circle"]}, {"metric": "iou"}]
)
def test_other_patients_or_labels_have_no_difference(
    changes: dict[str, Any], folders: list[Path], tmp_path: Path
) -> None:
    third = write_run(tmp_path / "third", "fedavg", {"A": A, "B": B}, **changes)
    assert set(metric_of_runs(runs_of([folders[0], third]))["third - first"]) == {"–"}


def test_areas_under_roc_curves_are_compared_by_class() -> None:
    task = dataclasses.replace(load_task("ham10000_3class"), metric="auc_macro")
    targets = [0, 0, 0, 1, 1, 1]
    runs: dict[str, Any] = {}
    for seed, scores in enumerate(([0.9, 0.3, 0.5, 0.4, 0.2, 0.1], [0.9, 0.8, 0.5, 0.4, 0.2, 0.6])):
        cases = {
            "patients": list("abcdef"),
            "probabilities": [[score, 1 - score, 0.0] for score in scores],
            "targets": targets,
        }
        sites = {"A": SiteRecord("inside", metrics={"deployed": {"auc_macro": 0.5}})}
        if seed:
            sites["B"] = SiteRecord("inside")  # the federations differ
        run = build_results(RunRecord("fedavg", task, seed, 2, sites))
        runs[str(seed)] = {**run, "scores": {"A": {"deployed": cases}}}
    # Of nine pairs one is in the wrong order in each run: the difference is 0, not its variance.
    table = delong_of_runs(runs).set_index("class")
    assert table["1 - 0"].to_dict() == {
        task.labels[0]: "+0.000, p 1.000",
        task.labels[1]: "+0.000, p 1.000",
        task.labels[2]: "–",
    }
    assert "DeLong" in comparison(runs)
    other = {
        **runs["1"],
        "configuration": {"task": {**runs["1"]["configuration"]["task"], "metric": "f1_macro"}},
    }
    assert delong_of_runs({"0": runs["0"], "1": other}).empty


def test_the_command(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = list(map(str, folders))
    assert main(["results", *names, "--csv", str(tmp_path / "table.csv")]) == 0
    printed = capsys.readouterr().out
    assert "task.batch_size" in printed and f"{GAINS.mean():+.3f} (" in printed
    rows = (tmp_path / "table.csv").read_text().splitlines()
    assert rows[0].endswith(",run") and {row.rpartition(",")[2] for row in rows[1:]} == {
        "first",
        "second",
    }
    assert main(["results", names[0], names[0]]) == 1
    assert "named twice" in capsys.readouterr().err
    (folders[0] / "sites" / "A" / "scores" / "deployed.json").write_text("{")
    assert main(["results", *names]) == 1
    assert "not valid JSON" in capsys.readouterr().err


def test_runs_without_sites_have_an_empty_table() -> None:
    runs: dict[str, Any] = {}
    for seed in (0, 1):
        run = build_results(RunRecord("fedavg", small_task(), seed, 2, {}, reason="no site"))
        runs[str(seed)] = {**run, "scores": {}}
    table = metric_of_runs(runs)
    assert table.empty and table.index.name == "site"
    assert "seed" in comparison(runs)
