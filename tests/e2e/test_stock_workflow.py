"""Our aggregators as parts of FLARE's own FedAvg, with a client that knows nothing of medflare."""

import json
from pathlib import Path
from typing import Any

import pytest

from e2e.simulation import END_TO_END, Simulate

pytestmark = END_TO_END

COMPONENTS = Path(__file__).parent / "components"


def stock_job(folder: Path, aggregator: str, args: dict[str, Any], rounds: int) -> Path:
    """FLARE's FedAvg as a user would configure it, with one aggregator and the filter that goes with it."""
    part = {"path": f"medflare.flare.aggregators.{aggregator}", "args": args}
    workflow = {
        "id": "fedavg",
        "path": "nvflare.app_common.workflows.fedavg.FedAvg",
        "args": {
            "num_clients": 3,
            "num_rounds": rounds,
            "model": {"w": [0.0, 0.0]},
            "aggregator": part,
        },
    }
    own_part = {
        "tasks": ["train"],
        "filters": [{"path": "medflare.flare.aggregators.OwnPartFilter"}],
    }
    server = {
        "server": {"task_request_interval": 0.2},
        "task_data_filters": [own_part],
        "task_result_filters": [],
        "components": [],
    }
    client = {
        "executors": [{"tasks": ["*"], "executor": {"path": "plain_client.PlainClient"}}],
        "components": [],
    }
    empty: dict[str, Any] = {"task_data_filters": [], "task_result_filters": []}
    config = folder / "app" / "config"
    custom = folder / "app" / "custom"
    config.mkdir(parents=True)
    custom.mkdir()
    (config / "config_fed_server.json").write_text(
        json.dumps({"format_version": 2, **server, "workflows": [workflow]})
    )
    (config / "config_fed_client.json").write_text(
        json.dumps({"format_version": 2, **client, **empty})
    )
    (folder / "meta.json").write_text(
        json.dumps({"name": "stock", "min_clients": 3, "deploy_map": {"app": ["@ALL"]}})
    )
    (custom / "plain_client.py").write_text((COMPONENTS / "plain_client.py").read_text())
    return folder


def test_soft_pull_in_fedavg(simulate: Simulate, tmp_path: Path) -> None:
    """Client k adds k to its own part: 0.7 w_k + 0.15 (the two others), for each site its own."""
    simulation = simulate(
        stock_job(tmp_path / "job", "SoftPullAggregator", {"hyper": {"lam": 0.7}}, rounds=3),
        "-n",
        "3",
        "-t",
        "3",
    ).wait()
    for site, values in {1: [0, 1.45, 3.1475], 2: [0, 2.0, 4.0], 3: [0, 2.55, 4.8525]}.items():
        notes = simulation.workspace / f"site-{site}" / "simulate_job" / "received.txt"
        assert notes.exists(), simulation.console[-4000:]
        lines = [line.rsplit(" ", 1) for line in notes.read_text().splitlines()]
        assert [names for names, _ in lines] == ["['w']"] * 3
        assert [float(value) for _, value in lines] == pytest.approx(values, abs=1e-5)
