"""benchmarks/gpu.py on a CPU: every part, small, and what its numbers rest on; and what only a GPU shows, skipped without one."""

import copy
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import medflare
from helpers.final_models import same_weights
from helpers.small_tasks import tiny_phantom
from helpers.volume_sites import PATCHES, make_sites
from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state
from medflare.core.store import StateStore
from medflare.methods.fedavg import FedAvgSite
from medflare.tasks.config import load_task
from medflare.training import computing, graph, opening
from medflare.training.opening import open_site
from medflare.training.site import Site
from methods import squares

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """benchmarks/gpu.py."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    threads = torch.get_num_threads()
    yield gpu
    torch.set_num_threads(threads)


EQUAL = ["throughput", "graph", "workers", "simulator"]  # parts that compare weights
PARTS = [*EQUAL, "breakdown", "stacked", "memory", "predict"]


@pytest.mark.slow
def test_every_part_is_tried(gpu: Any) -> None:
    assert sorted(gpu.PARTS) == sorted(PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_a_part_fills_its_table(
    gpu: Any,
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without FLARE's simulator, which takes a minute: it returns the loop's weights."""

    def simulated(part: Any, sites: int, rounds: int, scratch: Path) -> tuple[float, Any]:
        return 1.0, load_file(scratch / "loop/models/global/model.safetensors")

    monkeypatch.setattr(gpu, "simulated", simulated)
    out = tmp_path / "rows.jsonl"
    part = gpu.Part(name, torch.device("cpu"), tiny=True, out=out)
    gpu.PARTS[name](part)
    rows = list(map(json.loads, out.read_text().splitlines()))
    assert rows
    for row in rows:
        assert row["part"] == name
    assert len(capsys.readouterr().out.splitlines()) == len(rows) + 2
    compared = []
    for row in rows:
        for column in ("bits equal", "weights equal"):
            if row.get(column):
                compared.append(row[column])
    assert set(compared) <= {"True"}
    assert bool(compared) == (name in EQUAL)


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
    ended = list(map(json.loads, out.read_text().splitlines()))[1:]
    assert [line["part"] for line in ended] == ["memory", "predict"]
    for line in ended:
        assert "RuntimeError" in line["problem"]


@pytest.mark.slow
def test_a_part_that_takes_too_long_is_stopped(gpu: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--parts", "memory", "--seconds", "0.2"]) == 1
    assert "stopped after 0.2 s" in capfd.readouterr().out


# -- with a GPU --------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
AUGMENT = [{"name": "RandFlip", "prob": 0.5}, {"name": "RandGaussianNoise", "prob": 0.5}]
# A step with all that may be in a graph: the last batch of an epoch is smaller.
STEP: dict[str, Any] = {
    "network": {"name": "unet", "channels": [4, 8], "norm": "batch"},
    "clip": {"norm": 0.5},
    "schedule": {"name": "cosine"},
    "local_epochs": 2,
}
ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1}
TASKS: dict[str, Any] = {
    "phantom": tiny_phantom(batch_size=8, augment=AUGMENT),
    "patches": {**PATCHES, "augment": AUGMENT},
    "step": tiny_phantom(batch_size=4, augment=AUGMENT, **STEP),
    "bf16": tiny_phantom(batch_size=4, **STEP, precision="bf16", optimizer=ADAMW),
}


class Killed(BaseException):
    """Ends a run as no error does."""


def on_gpu(folder: Path, task: str = "phantom", method: str = "fedavg", **options: Any) -> None:
    """A run of the plain loop with two sites on the GPU."""
    sites = ["site-1", "site-2"]
    settings: dict[str, Any] = {"rounds": 3, "seed": 1, "out": folder, "device": "cuda", **options}
    if task == "patches":
        settings["data_root"] = folder.parent / "data"
        if not settings["data_root"].exists():
            make_sites(settings["data_root"], sites)
    results = medflare.run_local(method, TASKS[task], sites, **settings)
    assert results["status"] == "COMPLETED", results["reason"]


@needs_gpu
@pytest.mark.parametrize(
    ("task", "method"), [("phantom", "fedavg"), ("phantom", "ditto"), ("patches", "fedavg")]
)
def test_equal_weights_with_and_without_what_stays_on_the_gpu(
    task: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(tmp_path / "resident", task, method)
    monkeypatch.setattr(computing, "free_memory", lambda device: 0)
    on_gpu(tmp_path / "moved", task, method)
    assert same_weights(tmp_path / "resident", tmp_path / "moved")


@needs_gpu
def test_equal_weights_if_torch_fills_new_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(tmp_path / "as it is", "step")
    mode: Any = torch.utils.deterministic
    be_deterministic = opening.be_deterministic

    def filled() -> None:
        be_deterministic()
        mode.fill_uninitialized_memory = True

    monkeypatch.setattr(opening, "be_deterministic", filled)
    on_gpu(tmp_path / "filled", "step")
    assert mode.fill_uninitialized_memory
    assert same_weights(tmp_path / "as it is", tmp_path / "filled")


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The steps that a test captures."""
    steps: list[Any] = []

    class Counted(graph.CapturedStep):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            steps.append(self)

    monkeypatch.setattr(graph, "CapturedStep", Counted)
    return steps


@needs_gpu
@pytest.mark.parametrize(
    ("method", "networks"),
    [("fedavg", 1), ("fedprox", 1), ("fedbn", 1), ("ditto", 2), ("scaffold", 1)],
)
def test_equal_weights_with_and_without_a_graph(
    method: str,
    networks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    captured: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, graph.__name__)
    on_gpu(tmp_path / "graph", "step", method, rounds=2)
    assert caplog.messages == [] and len(captured) == 2 * networks
    monkeypatch.setattr(graph.StepReplay, "captured", lambda *_: None)
    on_gpu(tmp_path / "loop", "step", method, rounds=2)
    assert len(captured) == 2 * networks
    assert same_weights(tmp_path / "graph", tmp_path / "loop")


def trained(task: str = "step", **local: Any) -> StateDict:
    """FedAvg's reply after two rounds at one site, and its moments."""
    site = open_site("site-1", load_task(TASKS[task]), local={"device": "cuda", **local})
    algorithm = FedAvgSite(site, squares.plan_of(FedAvgSite, squares.FedAvgServer, site.task))
    model = copy_state(site.network().state_dict())
    for round in range(2):
        site.rate_factor = 1.0 / (round + 1)
        model = algorithm.perform("train", round, Message({"model": model})).states["model"]
    return {**model, **copy_state(algorithm.memory.states["optimizer/model"])}


@needs_gpu
@pytest.mark.parametrize("task", ["step", "bf16"])
def test_equal_moments_with_and_without_a_graph(
    task: str, captured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_graph = trained(task)
    assert len(captured) == 1
    monkeypatch.setattr(graph.StepReplay, "captured", lambda *_: None)
    assert squares.equal(with_graph, trained(task))
    assert len(captured) == 1


@needs_gpu
@pytest.mark.parametrize("problem", ["waits", "draws", "fails"])
def test_a_step_that_no_graph_can_repeat(
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    captured: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It waits for the GPU, draws random numbers, or fails in the capture after the warm-up: the
    loop trains, in the stream before, and dropout works on."""
    original = Site.loss

    def loss(site: Site, logits: Tensor, targets: Tensor) -> Tensor:
        value = original(site, logits, targets)
        if problem == "waits":
            return value * float(value.detach())
        if problem == "draws":
            return value + torch.nn.functional.dropout(logits, 0.5).mean()
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not in a graph")
        return value

    monkeypatch.setattr(Site, "loss", loss)
    caplog.set_level(logging.INFO, graph.__name__)
    stream = torch.cuda.current_stream()
    tried = trained()
    (line,) = caplog.messages
    reasons = {"waits": "synchronizing", "draws": "random numbers", "fails": "not in a graph"}
    assert line.startswith("site site-1: ") and reasons[problem] in line
    assert captured == [] and torch.cuda.current_stream() == stream
    monkeypatch.setattr(graph.StepReplay, "captured", lambda *_: None)
    assert squares.equal(tried, trained())


@needs_gpu
def test_the_simulator_ends_in_the_weights_of_the_loop(
    gpu: Any, tmp_path: Path, captured: list[Any]
) -> None:
    out = tmp_path / "rows.jsonl"
    gpu.simulator(gpu.Part("simulator", torch.device("cuda"), tiny=True, out=out))
    assert len(captured) == 2
    assert json.loads(out.read_text().splitlines()[-1])["weights equal"] == "True"


@needs_gpu
def test_a_killed_run_on_the_gpu_ends_in_the_same_weights(tmp_path: Path) -> None:
    def observe(report: Any) -> None:
        if report.step.round == 1:
            raise Killed

    on_gpu(tmp_path / "whole", "step")
    with pytest.raises(Killed):
        on_gpu(tmp_path / "killed", "step", observe=observe)
    on_gpu(tmp_path / "killed", "step", resume=True)
    assert same_weights(tmp_path / "whole", tmp_path / "killed")


@needs_gpu
@pytest.mark.parametrize("channels_last", [False, True])
def test_what_stays_on_the_gpu_and_what_the_store_copies(
    channels_last: bool, tmp_path: Path
) -> None:
    task = load_task(TASKS["phantom"])
    settings = {"device": "cuda", "channels_last": channels_last}
    site = open_site("site-1", task, local=settings)
    algorithm = FedAvgSite(site, squares.plan_of(FedAvgSite, squares.FedAvgServer, task))
    start = copy_state(site.network().state_dict())
    reply = algorithm.perform("train", 0, Message({"model": start}))
    assert next(site.batches("train", 0)).images.is_cuda and site.data.train.images.is_cpu
    assert site._split("train").on_gpu and not site._split("test").on_gpu
    moments = algorithm.memory.states["optimizer/model"]
    assert moments["0.exp_avg"].is_cuda and moments["0.step"].is_cuda
    trained = algorithm.network("model", reply.states["model"]).state_dict()
    for name, tensor in trained.items():
        sent = reply.states["model"][name]
        assert sent.is_cpu and sent.is_contiguous() and torch.equal(sent, tensor.cpu())
    StateStore(tmp_path).save("algorithm", algorithm.memory)
    stored = StateStore(tmp_path).load("algorithm")
    assert stored is not None
    for name, tensor in stored.states["optimizer/model"].items():
        assert torch.equal(tensor, moments[name].cpu())
