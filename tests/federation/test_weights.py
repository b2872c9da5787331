"""Runs that start from a weights file: every site starts from what the server sends, and stores it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import medflare
from helpers.small_tasks import tiny_phantom
from medflare.core.store import StateStore
from medflare.federation.local.loop import SITES, STATE
from medflare.inference.deployed import load_model
from medflare.tasks.config import load_task
from medflare.training.opening import open_site


@pytest.fixture(scope="module")
def delivered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A model that a run delivered, and the task that goes on from it."""
    folder = tmp_path_factory.mktemp("first")
    medflare.run_local("fedavg", tiny_phantom(), 2, rounds=1, seed=3, out=folder)
    model = folder / "models" / "global"
    weights = {"file": "model.safetensors", "sha256": load_model(model).card["sha256"], "format": "medflare"}
    task = tiny_phantom()
    return model, {**task, "network": {**task["network"], "weights": weights}}


@pytest.mark.parametrize("method", ["fedavg", "prr"])
def test_every_site_starts_from_what_the_server_sends(tmp_path: Path, delivered: tuple[Path, dict[str, Any]], method: str) -> None:
    model, task = delivered
    results = medflare.run_local(method, task, 2, rounds=1, seed=0, out=tmp_path, weights=model)
    assert results["status"] == "COMPLETED", results["reason"]
    start = load_model(model).message.states["model"]
    found = StateStore(tmp_path / SITES / "site-1" / STATE).load("membership")
    assert found is not None and all(torch.equal(found.states["start"][name], start[name]) for name in start)
    step = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    site = open_site("site-1", load_task(task), seed=0)
    site.start = start
    expected = site.score(site.predictor(site.network()), "validation", ["dice"]).values["dice"]
    assert step["sites"]["site-1"]["validation"]["global"] == pytest.approx(expected)


def test_without_rounds_every_site_evaluates_the_weights(tmp_path: Path, delivered: tuple[Path, dict[str, Any]]) -> None:
    """No round trains: what is delivered is what was given, tested on images of sites that it has never seen, too."""
    model, task = delivered
    given = load_model(model).message.states["model"]
    results = medflare.run_local("fedavg", task, 2, rounds=0, seed=3, outside=["site-3"], out=tmp_path, weights=model)
    assert results["status"] == "COMPLETED" and results["rounds"] == 0 and results["traffic"]["up_bytes"] == 0
    kept = load_model(tmp_path / "sites" / "site-3" / "deployed").message.states["model"]
    assert all(torch.equal(kept[name], given[name]) for name in given)
    for name, found in results["sites"].items():
        site = open_site(name, load_task(task), seed=3, role=found["role"])
        site.start = given
        expected = site.score(site.predictor(site.network()), "test", ["dice"]).values["dice"]
        assert found["metrics"]["global"]["dice"] == pytest.approx(expected)


def test_a_missing_weights_file_fails_the_run(delivered: tuple[Path, dict[str, Any]]) -> None:
    results = medflare.run_local("fedavg", delivered[1], 2, rounds=1, seed=0)
    assert results["status"] == "FAILED" and "model.safetensors" in results["reason"]
