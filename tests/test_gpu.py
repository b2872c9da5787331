"""benchmarks/gpu.py on a CPU: every part, small, and what its numbers rest on."""

import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """benchmarks/gpu.py."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    threads = torch.get_num_threads()
    yield gpu
    torch.set_num_threads(threads)


PARTS = ["throughput", "breakdown", "resident", "graph", "stacked", "memory", "predict", "workers"]


@pytest.mark.slow
def test_every_part_is_tried(gpu: Any) -> None:
    assert sorted(gpu.PARTS) == sorted(PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_a_part_fills_its_table(
    gpu: Any, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    part = gpu.Part(name, torch.device("cpu"), tiny=True, out=out)
    gpu.PARTS[name](part)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows and all(row["part"] == name for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == len(rows) + 2
    compared = [
        row[column] for row in rows for column in ("bits equal", "weights equal") if row.get(column)
    ]
    assert set(compared) <= {"True"}
    assert bool(compared) == (name in ("resident", "graph", "workers"))


def test_a_span_counts_without_the_spans_inside_it(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 1.0, 3.0, 10.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    ledger = gpu.Ledger(lambda: None)
    with ledger.span("outer"), ledger.span("inner"):
        pass
    assert ledger.seconds == {"inner": 2.0, "outer": 8.0}


def test_a_ratio_is_that_to_the_plain_epochs_around(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two warming turns, then plain epochs of 2, 4 and 6 s with others of 1 and 5 s between them."""
    taken = {"plain": iter([9.0, 9.0, 2.0, 4.0, 6.0]), "other": iter([9.0, 9.0, 1.0, 5.0, 1.0])}

    class Site:
        @staticmethod
        def seconds(run: Any, *_: Any) -> float:
            return next(taken[run])

    monkeypatch.setattr(gpu, "benchmark", lambda _: Site)
    part = gpu.Part("", torch.device("cpu"))
    results = gpu.in_turns(part, {gpu.PLAIN: "plain", "other": "other"}, 0.0)
    assert results == {gpu.PLAIN: (4.0, 1.0), "other": (1.0, pytest.approx((3 / 1 + 5 / 5) / 2))}


def test_stacked_sites_train_as_single_ones(gpu: Any) -> None:
    """In double precision, where a step's rounding is far below its length; with torch's Adam for each."""
    task = gpu.TINY[0].task("instance")
    networks = [gpu.initial_network(task, seed).double() for seed in range(3)]
    for network in networks:  # without the biases that the normalization removes
        for name, weight in network.named_parameters():
            weight.requires_grad_(not name.endswith("conv.bias"))
    loss = gpu.build_loss(task)
    stack = gpu.Stack(task, copy.deepcopy(networks), loss)
    draw = torch.Generator().manual_seed(0)
    images = torch.rand(3, 4, 3, 16, 16, generator=draw, dtype=torch.float64)
    targets = (torch.rand(3, 4, 2, 16, 16, generator=draw) > 0.5).double()
    for _ in range(5):
        stack.step(images, targets)
    for place, network in enumerate(networks):
        weights = [weight for weight in network.parameters() if weight.requires_grad]
        optimizer = torch.optim.Adam(weights, lr=task.optimizer["lr"])
        for _ in range(5):
            optimizer.zero_grad()
            loss(network(images[place]), targets[place]).backward()
            optimizer.step()
        for name, weight in network.named_parameters():
            if weight.requires_grad:
                torch.testing.assert_close(stack.weights[name][place], weight, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_a_part_that_fails_says_why_and_the_next_one_starts(
    gpu: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["--device", "nowhere", "--tiny", "--parts", "memory,predict", "--out", str(out)]
    assert gpu.main(arguments) == 1
    assert "exit code 1: RuntimeError: Expected one of cpu, cuda" in capfd.readouterr().out
    ended = [json.loads(line) for line in out.read_text().splitlines()][1:]
    assert [line["part"] for line in ended] == ["memory", "predict"]
    assert all("RuntimeError" in line["problem"] for line in ended)


@pytest.mark.slow
def test_a_part_that_takes_too_long_is_stopped(gpu: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--parts", "memory", "--seconds", "0.2"]) == 1
    assert "stopped after 0.2 s" in capfd.readouterr().out
