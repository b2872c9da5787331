"""Large models at the server: memory-mapped files give the same bits, and memory does not grow with the number of sites."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.final_models import same_weights
from helpers.small_tasks import tiny_phantom
from medflare.core.message import Message
from medflare.core.states import is_memory_mapped, memory_mapped
from medflare.federation.exchange import Reply, mapped_reply
from medflare.federation.local.loop import run_local
from medflare.methods.base import ServerAlgorithm
from medflare.networks.catalogue import initial_network
from medflare.tasks.config import load_task

ROOT = Path(__file__).parents[2]
TASK = tiny_phantom(network={"name": "unet", "channels": [32, 64], "norm": "batch"}, size=[16, 16], batch_size=32)


def run(method: str, folder: Path, **more: Any) -> dict[str, Any]:
    results = run_local(method, TASK, 2, rounds=2, seed=1, out=folder, workers=1, **more)
    assert results["status"] == "COMPLETED", results["reason"]
    return results


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether models lay in files when a checkpoint was written."""
    flags: list[bool] = []
    state = ServerAlgorithm.state

    def noted(algorithm: ServerAlgorithm[Any]) -> Message:
        flags.append(is_memory_mapped())
        return state(algorithm)

    monkeypatch.setattr(ServerAlgorithm, "state", noted)
    return flags


@pytest.mark.parametrize("method", ["fedsm", "prr"])
def test_mapped_models_end_in_the_same_bits(method: str, tmp_path: Path, seen: list[bool]) -> None:
    run(method, tmp_path / "memory")
    assert not any(seen)
    run(method, tmp_path / "files", models_gb=0.0)
    assert any(seen) and same_weights(tmp_path / "memory", tmp_path / "files")
    assert not list((tmp_path / "files").glob(".*"))


def test_models_are_mapped_above_models_gb_only(tmp_path: Path, seen: list[bool]) -> None:
    size = sum(tensor.nbytes for tensor in initial_network(load_task(TASK), 0).state_dict().values())
    for most, expected in ((2 * size + 1, False), (2 * size - 1, True)):
        seen.clear()
        run_local("fedavg", TASK, 2, rounds=1, seed=1, out=tmp_path / str(expected), models_gb=most / 10**9)
        assert set(seen) == {expected}


def test_only_large_valid_tensors_of_a_reply_are_mapped(tmp_path: Path) -> None:
    large = torch.zeros(200_000)
    invalid: list[Any] = [large.to_sparse(), large.clone().requires_grad_(), None]
    replies = [*(Reply(Message({"model": {"odd": value, "good": large}})) for value in invalid), Reply(problem="no images")]
    other = {"expanded": torch.zeros(1).expand(10**12), "counts": torch.zeros(200_000, dtype=torch.int64)}
    with memory_mapped(tmp_path):
        assert all(mapped_reply(reply) is reply for reply in replies)
        message = mapped_reply(Reply(Message({"model": {**other, "good": large}}))).message
    assert message is not None
    state = message.states["model"]
    assert all(state[name] is value for name, value in other.items())
    assert state["good"] is not large and state["good"].is_shared() and torch.equal(state["good"], large)


def most_memory(folder: Path, models_gb: float) -> float:
    """Models that a round of FedAvg over sixteen sites has in memory at once, in a separate process."""
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'benchmarks'}:{ROOT / 'custom'}", "MEDFLARE_NETWORKS": "server"}
    command = [sys.executable, str(ROOT / "benchmarks/server.py"), "--one", "fedavg", str(folder), "--sites", "16", "--width", "8"]
    completed = subprocess.run([*command, "--models-gb", str(models_gb)], env=environment, check=True, stdout=subprocess.PIPE, text=True)
    measured = json.loads(completed.stdout.splitlines()[-1])
    assert measured["answers"] == pytest.approx(16 * measured["model"], rel=0.01)
    return float(measured["memory"] / measured["model"])


@pytest.mark.slow
def test_memory_does_not_grow_with_the_sites(tmp_path: Path) -> None:
    assert most_memory(tmp_path / "files", 0.0) < 8 < 16 < most_memory(tmp_path / "memory", 100.0)
