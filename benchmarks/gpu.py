"""What a GPU gives to a site, in one script for a machine that is there for minutes only.

    python benchmarks/gpu.py [--device cuda] [--parts throughput,stacked] [--seconds 44]
                             [--out results.jsonl] [--tiny]

Every part runs in a process of its own that ends after `--seconds` (times `LONGER`; 7.5 minutes for
all parts by default), prints its table row by row and appends each row to `--out` as a line of
JSON. A part that fails prints its last line of
errors, and the next part starts. `--tiny` runs every path on small images, for a CPU.

    throughput  the site algorithm beside a plain PyTorch loop: sizes, normalizations, precisions
    breakdown   the milliseconds of a site's epoch, by what they are spent on
    graph       the site algorithm with and without CUDA graphs; the parts above have none
    stacked     prototype: the networks of several sites as one batched network
    workers     the plain loop with several processes on one device: seconds, equal weights
    simulator   FLARE's simulator beside the plain loop: seconds, equal weights
    memory      peak memory and seconds of a training step of large presets
    predict     images per second of a delivered model, on the device and on the CPU

A ratio is the plain epoch's time (mean of those just before and after) divided by the other's,
median over turns. On a GPU all of these compute with torch's deterministic algorithms, as a site
does; `memory` and `predict` do not.
"""

import argparse
import copy
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from medflare.core.message import Message
from medflare.core.rng import torch_generator
from medflare.core.states import StateDict, copy_state
from medflare.data.loading import Split
from medflare.methods.catalogue import get_method
from medflare.methods.fedavg import FedAvgSite
from medflare.networks.catalogue import initial_network
from medflare.tasks.config import TaskConfig, load_task
from medflare.tasks.losses import build_loss
from medflare.tasks.optimizers import build_optimizer
from medflare.training import computing
from medflare.training.graph import StepReplay
from medflare.training.site import Site

HERE = Path(__file__).resolve().parent
PAPERS = ("papers/fundus_fedsm", "papers/prostate_prr", "papers/fed_isic2019_grace")
PRESETS = (*PAPERS, "brain_lgg_3d")
SOFT = 0.65  # share of a part's seconds for what is repeated; the rest: imports, images, last turn
T = TypeVar("T")
Run = Callable[[int], Any]  # trains an epoch; its argument is the round
Training = Callable[[int, StateDict], StateDict]  # (round, weights) -> trained weights


def benchmark(name: str) -> ModuleType:
    """Another script of this folder; by its path, since Python has a module `site`."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PLAIN: str = benchmark("site").PLAIN
median_of_turns = benchmark("site").in_turns


@dataclass(frozen=True)
class Size:
    """Side of the images, batch size and widths of the U-Net."""

    name: str
    side: int
    batch: int
    channels: tuple[int, ...]

    def task(self, norm: str = "batch") -> TaskConfig:
        """The phantom in this size, without augmentation."""
        changes: dict[str, Any] = {"size": [self.side] * 2, "batch_size": self.batch, "augment": []}
        changes["network"] = {"name": "unet", "channels": list(self.channels), "norm": norm}
        return load_task({**load_task("phantom").to_dict(), **changes})


SIZES = (
    Size("64 x 64, 0.17 M, batch 4", 64, 4, (16, 32, 64, 128)),
    Size("256 x 256, 0.17 M, batch 4", 256, 4, (16, 32, 64, 128)),
    Size("256 x 256, 2.66 M, batch 8", 256, 8, (64, 128, 256, 512)),
)
TINY = (Size("16 x 16, tiny, batch 8", 16, 8, (4, 8)),)


@dataclass
class Part:
    """A part that runs: its device and time, and the table that it prints."""

    name: str
    device: torch.device
    tiny: bool = False
    seconds: float = 44.0
    out: Path | None = None
    started: float = field(default_factory=time.monotonic)
    columns: tuple[str, ...] = ()

    @property
    def sizes(self) -> tuple[Size, ...]:
        return TINY if self.tiny else SIZES

    def share(self, left: int) -> float:
        """Seconds for one of `left` equal pieces of work."""
        return max(0.0, self.started + SOFT * self.seconds - time.monotonic()) / left

    def table(self, *columns: str) -> None:
        """Begin a table."""
        self.columns = columns
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)

    def row(self, *values: Any) -> None:
        """A row of the table: printed, and a line of the file."""
        shown = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
        print(f"| {' | '.join(shown)} |", flush=True)
        write(self.out, {"part": self.name, **dict(zip(self.columns, values, strict=True))})

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def write(out: Path | None, line: Mapping[str, Any]) -> None:
    """Append a line of JSON to the file, if there is one."""
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(dict(line)) + "\n")


# -- a site beside a plain loop -------------------------------------------------------------------


def turns_within(budget: float, least: int, most: int) -> Iterator[int]:
    """Numbers of turns until `budget` seconds are over, at least `least` and at most `most`."""
    deadline = time.monotonic() + budget
    for turn in range(most):
        if turn >= least and time.monotonic() > deadline:
            return
        yield turn


def in_turns(part: Part, runs: Mapping[str, Run], budget: float) -> dict[str, tuple[float, float]]:
    """Name -> median seconds of an epoch, and its ratio; the first two turns warm up."""
    seconds = benchmark("site").seconds

    def epoch_of(run: Run) -> Callable[[int], float]:
        return lambda turn: float(seconds(run, turn, part.device))

    timed = {name: epoch_of(run) for name, run in runs.items()}
    if part.tiny:
        return dict(median_of_turns(timed, range(3), warming=1))
    return dict(median_of_turns(timed, turns_within(budget, least=5, most=13), warming=2))


@contextmanager
def memory_filled() -> Iterator[None]:
    """Inside, torch fills new memory with NaN, as its deterministic mode does by default."""
    mode: Any = torch.utils.deterministic
    mode.fill_uninitialized_memory = True
    try:
        yield
    finally:
        mode.fill_uninitialized_memory = False


@contextmanager
def nothing_stays() -> Iterator[None]:
    """Inside, sites move images and moments to the GPU in every round, as if its memory were full."""
    free_memory = computing.free_memory
    computing.free_memory = lambda device: 0
    try:
        yield
    finally:
        computing.free_memory = free_memory


def inside(
    context: Callable[[], AbstractContextManager[None]], run: Callable[..., T]
) -> Callable[..., T]:
    """The same in a context."""

    def changed(*values: Any) -> T:
        with context():
            return run(*values)

    return changed


def opened(
    part: Part, task: TaskConfig, way: str = "site", *, graph: bool = False
) -> tuple[Site, Split, Run]:
    """The first generated hospital with its training images, these images, and the plain loop."""
    module = benchmark("site")
    site, train = module.opened(task, str(part.device), way)
    site.computing = replace(site.computing, graph=graph)
    network = site.network()
    return site, train, module.plain_epoch(task, train.images, train.targets, network, site.device)


def throughput(part: Part) -> None:
    module = benchmark("site")
    ways = ["site", "site:bf16", *(["site:fp16"] if part.device.type == "cuda" else [])]
    settings = [(size, norm) for norm in ("batch", "instance") for size in part.sizes]
    part.table("size", "norm", "way", "images/s", "ratio", "bits equal")
    for place, (size, norm) in enumerate(settings):
        task = size.task(norm)
        site, train, plain = opened(part, task)
        moving = opened(part, task)[0]  # a site whose images do not stay on the device
        start = copy_state(site.network().state_dict())
        moved = inside(nothing_stays, site_training(moving))
        same = same_after(2, start, site_training(site), moved)
        runs: dict[str, Run] = {PLAIN: plain, "site": module.site_epoch(site)}
        for way in ways[1:]:
            runs[way] = module.site_epoch(opened(part, task, way)[0])
        runs["site, nothing stays"] = inside(nothing_stays, module.site_epoch(moving))
        runs["plain loop, memory filled"] = inside(memory_filled, plain)
        budget = part.share(len(settings) - place)
        for name, (seconds, ratio) in in_turns(part, runs, budget).items():
            shown = same if name == "site" else ""
            part.row(size.name, norm, name, len(train) / seconds, ratio, shown)


# -- where the time goes --------------------------------------------------------------------------


class Ledger:
    """Seconds by label, without those of the spans inside; waits for the device at both ends."""

    def __init__(self, wait: Callable[[], None]):
        self.seconds: dict[str, float] = {}
        self._wait = wait
        self._inner: list[float] = []
        self._undo: list[Callable[[], None]] = []

    @contextmanager
    def span(self, label: str) -> Iterator[None]:
        self._wait()
        started = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            self._wait()
            whole = time.perf_counter() - started
            self.seconds[label] = self.seconds.get(label, 0.0) + whole - self._inner.pop()
            if self._inner:
                self._inner[-1] += whole

    def watch(self, owner: Any, name: str, label: str) -> None:
        """Measure every call of a function of `owner`, until `release`."""
        original = getattr(owner, name)

        def measured(*values: Any, **options: Any) -> Any:
            with self.span(label):
                return original(*values, **options)

        setattr(owner, name, measured)
        self._undo.append(lambda: setattr(owner, name, original))

    def watch_batches(self, label: str) -> None:
        """Measure the waiting for every batch of a site, until `release`."""
        original = Site.batches

        def measured(*values: Any, **options: Any) -> Iterator[Any]:
            batches = original(*values, **options)
            while True:
                with self.span(label):
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch

        Site.batches = measured  # type: ignore[method-assign]
        self._undo.append(lambda: setattr(Site, "batches", original))

    def release(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()


def breakdown(part: Part) -> None:
    from medflare.methods.fedavg import site as fedavg
    from medflare.networks.features import FeatureNetwork
    from medflare.training import epochs

    module = benchmark("site")
    site, _, plain = opened(part, part.sizes[-1].task())
    run = module.site_epoch(site)
    whole = in_turns(part, {PLAIN: plain, "site": run}, part.share(2))
    ledger = Ledger(part.wait)
    ledger.watch(fedavg.FedAvgSite, "network", "weights into the network")
    ledger.watch(fedavg.FedAvgSite, "validation", "validation of no image")
    ledger.watch(epochs, "unpack_optimizer", "moments into the optimizer")
    ledger.watch_batches("cutting batches")
    ledger.watch(computing.Computing, "on_device", "copies to the device")
    ledger.watch(FeatureNetwork, "forward", "forward")
    ledger.watch(Site, "loss", "loss")
    ledger.watch(torch.Tensor, "backward", "backward")
    ledger.watch(epochs.Steps, "finish", "zero_grad and the rest of a step")
    ledger.watch(torch.optim.Adam, "step", "optimizer step")
    ledger.watch(epochs, "weighted_sum", "losses to the CPU")
    ledger.watch(fedavg, "copied_state", "weights to the CPU")
    ledger.watch(epochs, "pack_optimizer", "moments into the memory")
    repeats = 2 if part.tiny else 5
    try:
        run(100)
        ledger.seconds.clear()
        for number in range(repeats):
            with ledger.span("the rest"):
                run(101 + number)
    finally:
        ledger.release()
    part.table("what", "ms of an epoch")
    for label, seconds in sorted(ledger.seconds.items(), key=lambda item: -item[1]):
        part.row(label, 1000 * seconds / repeats)
    whole_ms = 1000 * sum(ledger.seconds.values()) / repeats
    part.row("all of these, with the waiting after each", whole_ms)
    part.row("the site's epoch as it is", 1000 * whole["site"][0])
    part.row("the plain loop's epoch", 1000 * whole[PLAIN][0])


# -- a graph, and a prototype ---------------------------------------------------------------------


def equal_bits(first: StateDict, second: StateDict) -> bool:
    """Whether two states are equal, bit by bit."""
    same_names = first.keys() == second.keys()
    return same_names and all(torch.equal(first[name], second[name]) for name in first)


def largest_difference(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """The largest difference of two numbers at the same place."""
    largest = 0.0
    for name, tensor in first.items():
        difference = tensor.detach().double() - second[name].detach().double()
        largest = max(largest, float(difference.abs().max()))
    return largest


def same_after(rounds: int, start: StateDict, first: Training, second: Training) -> str:
    """Whether two ways to train give equal weights, and otherwise the largest difference."""
    for round in range(rounds):
        trained = first(round, start), second(round, start)
        if not equal_bits(*trained):
            return f"False: {largest_difference(*trained):.1e} in round {round}"
    return "True"


def site_training(site: Site) -> Training:
    """FedAvg's site algorithm."""
    algorithm = FedAvgSite(site, get_method("fedavg").plan(site.task, (site.name,), {}))

    def train(round: int, start: StateDict) -> StateDict:
        return algorithm.perform("train", round, Message({"model": start})).states["model"]

    return train


def timed(train: Training, seconds: list[float]) -> Training:
    """The same, which adds its seconds to the list."""

    def run(round: int, start: StateDict) -> StateDict:
        started = time.perf_counter()
        trained = train(round, start)
        seconds.append(time.perf_counter() - started)
        return trained

    return run


@contextmanager
def no_capture() -> Iterator[None]:
    """Inside, the optimizer of a graph's steps takes them without one."""
    captured = StepReplay.captured
    StepReplay.captured = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        StepReplay.captured = captured  # type: ignore[method-assign]


def graph(part: Part) -> None:
    module = benchmark("site")
    part.table("size", "norm", "way", "images/s", "ratio", "bits equal")
    settings = [(size, norm) for norm in ("batch", "instance") for size in part.sizes]
    for place, (size, norm) in enumerate(settings):
        site, train, plain = opened(part, size.task(norm))
        captured = opened(part, size.task(norm), graph=True)[0]
        start = copy_state(site.network().state_dict())
        rounds: list[float] = []
        with_graph = timed(site_training(captured), rounds)
        beside = opened(part, size.task(norm), graph=True)[0]
        loop = inside(no_capture, site_training(beside))
        same = same_after(2, start, loop, with_graph)
        part.row(size.name, norm, "graph, round 1 (captures)", len(train) / rounds[0], "", same)
        part.row(size.name, norm, "graph, round 2", len(train) / rounds[1], "", "")
        runs: dict[str, Run] = {PLAIN: plain, "site": module.site_epoch(site)}
        runs["graph"] = module.site_epoch(captured)
        budget = part.share(len(settings) - place)
        for name, (seconds, ratio) in in_turns(part, runs, budget).items():
            part.row(size.name, norm, name, len(train) / seconds, ratio, "")


class Stack:
    """The networks of several sites as one batched network, each with its batch.

    torch's Adam works number by number, so that one optimizer does what the sites' optimizers do.
    `torch.func.vmap(torch.func.grad(...))` gave the same gradients, bit by bit, on a CPU.
    """

    def __init__(self, task: TaskConfig, networks: Sequence[nn.Module], loss: nn.Module):
        self.weights: dict[str, nn.Parameter] = {}
        states = [dict(network.named_parameters()) for network in networks]
        for name in states[0]:
            together = torch.stack([state[name].detach() for state in states])
            self.weights[name] = nn.Parameter(together)
        self.optimizer = build_optimizer(task.optimizer, self.weights.values(), "stacked")

        def loss_of(weights: Any, images: Tensor, targets: Tensor) -> Tensor:
            logits = torch.func.functional_call(networks[0], weights, (images,))
            value: Tensor = loss(logits, targets)
            return value

        self.losses = torch.func.vmap(loss_of)

    def step(self, images: Tensor, targets: Tensor) -> None:
        """A step of every site; images (sites, batch, ...)."""
        self.optimizer.zero_grad(set_to_none=True)
        self.losses(self.weights, images, targets).sum().backward()
        self.optimizer.step()


def stacked(part: Part) -> None:
    if part.device.type == "cuda":
        computing.be_deterministic()
    if not part.tiny:
        torch.set_num_threads(2)
    size = part.sizes[0]
    steps = 10
    task = size.task("instance")
    loss = build_loss(task).to(part.device)
    _, train, _ = opened(part, task)
    counts: tuple[int, ...] = (8, 4) if part.device.type == "cpu" else (32, 16, 8, 4)
    if part.tiny:
        counts = (4,)
    columns = ["sites", "ms of a step of all, loop", "stacked", "speed-up"]
    columns += ["weights differ by", "biases before a norm by", "losses by"]
    part.table(*columns)
    network = initial_network(task, 0).to(part.device).train()
    for place, count in enumerate(counts):
        draw = torch_generator(0, "stacked", count)
        rows = torch.randint(len(train), (count, size.batch), generator=draw)
        images, targets = (tensor[rows].to(part.device) for tensor in (train.images, train.targets))
        networks = [copy.deepcopy(network) for _ in range(count)]
        stack = Stack(task, networks, loss)
        parameters = [model.parameters() for model in networks]
        optimizers = [build_optimizer(task.optimizer, weights, "loop") for weights in parameters]
        sites = list(zip(networks, optimizers, images, targets, strict=True))

        def loop(sites: Sequence[Any] = sites) -> None:
            for model, optimizer, inputs, truth in sites:
                for _ in range(steps):
                    optimizer.zero_grad(set_to_none=True)
                    loss(model(inputs), truth).backward()
                    optimizer.step()

        def together(stack: Stack = stack, batch: Sequence[Tensor] = (images, targets)) -> None:
            for _ in range(steps):
                stack.step(*batch)

        loop()
        together()
        trained = [dict(model.named_parameters()) for model in networks]
        apart = {name: torch.stack([state[name] for state in trained]) for name in stack.weights}
        # A normalization removes these: their gradient is rounding, of which Adam makes full steps.
        removed = {name for name in apart if name.endswith("conv.bias")}
        kept = {name: apart[name] for name in apart if name not in removed}
        others = largest_difference(kept, stack.weights)
        biases = largest_difference({name: apart[name] for name in removed}, stack.weights)
        with torch.no_grad():
            outputs = [loss(model(inputs), truth) for model, _, inputs, truth in sites]
            by_loop = torch.stack(outputs)
            by_stack = stack.losses(stack.weights, images, targets)
        budget = part.share(len(counts) - place)
        first, second = (1000 * value / steps for value in alternated(part, loop, together, budget))
        losses = float((by_loop - by_stack).abs().max())
        part.row(count, first, second, first / second, others, biases, losses)


Work = Callable[[], None]


def alternated(part: Part, first: Work, second: Work, budget: float) -> tuple[float, float]:
    """Median seconds of two pieces of work that take turns; both have warmed up."""
    taken: tuple[list[float], list[float]] = [], []
    deadline = time.monotonic() + budget
    for turn in range(1 if part.tiny else 9):
        if turn >= 2 and time.monotonic() > deadline:
            break
        for work, times in zip((first, second), taken, strict=True):
            part.wait()
            started = time.perf_counter()
            work()
            part.wait()
            times.append(time.perf_counter() - started)
    return median(taken[0]), median(taken[1])


# -- federations, presets, prediction -------------------------------------------------------------


def workers(part: Part) -> None:
    """Several workers first: a process that has used a GPU cannot be forked."""
    from safetensors.torch import load_file

    tiny = part.sizes[0].task("instance").to_dict()
    task = tiny if part.tiny else benchmark("compare").task_settings()
    sites, rounds = (2, 1) if part.tiny else (4, 3)
    part.table("engine", "seconds", "seconds after the first training", "weights equal")
    first: StateDict = {}
    with tempfile.TemporaryDirectory() as scratch:
        for count in (2, None) if part.tiny else (4, 2, 1, None):
            out = Path(scratch) / f"workers-{count}"
            whole, later = one_run(part, task, sites, rounds, count, out)
            weights = load_file(out / "models/global/model.safetensors")
            first = first or weights
            name = f"plain loop, workers {count or 'none'}"
            part.row(name, whole, later, same_weights(first, weights))


def simulator(part: Part) -> None:
    """The loop first: its row is there if the simulator does not end in time."""
    from safetensors.torch import load_file

    task = benchmark("compare").task_settings()
    sites, rounds = (2, 1) if part.tiny else (4, 3)
    part.table("engine", "seconds", "weights equal")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        seconds, _ = one_run(part, task, sites, rounds, None, folder / "loop")
        part.row("plain loop", seconds, "")
        first = load_file(folder / "loop/models/global/model.safetensors")
        seconds, weights = simulated(part, sites, rounds, folder)
        part.row(f"simulator, {sites} threads", seconds, same_weights(first, weights))


def same_weights(first: StateDict, second: StateDict) -> str:
    """Whether they are equal bit by bit, otherwise the largest difference."""
    if equal_bits(first, second):
        return "True"
    return f"False: {largest_difference(first, second):.1e}"


def one_run(
    part: Part, task: Any, sites: int, rounds: int, workers: int | None, out: Path
) -> tuple[float, float]:
    """Seconds of a run of the plain loop, and those after its first training."""
    from medflare import run_local

    finished: list[float] = []

    def observe(report: Any) -> None:
        if report.step.phase == "train":
            finished.append(time.monotonic())

    started = time.monotonic()
    settings: dict[str, Any] = {"rounds": rounds, "seed": 0, "device": str(part.device), "out": out}
    settings |= {"workers": workers, "track": "none", "observe": observe}
    results = run_local("fedavg", task, sites, **settings)
    ended = time.monotonic()
    assert results["status"] == "COMPLETED", results["reason"]
    return ended - started, ended - finished[0]


def simulated(part: Part, sites: int, rounds: int, scratch: Path) -> tuple[float, StateDict]:
    """Seconds of the same run under FLARE's simulator, and its global model."""
    from safetensors.torch import load_file

    job = benchmark("compare").written_job(rounds, scratch / "job")
    workspace = scratch / "w"
    command = [sys.executable, "-m", "nvflare.cli", "simulator", str(job), "-w", str(workspace)]
    command += ["-n", str(sites), "-t", str(sites)]
    started = time.monotonic()
    environment = {**os.environ, "MEDFLARE_DEVICE": str(part.device), "OMP_NUM_THREADS": "1"}
    log = scratch / "log"
    with log.open("w") as file:
        subprocess.run(command, env=environment, stdout=file, stderr=file, check=False)
    seconds = time.monotonic() - started
    model = workspace / "server/simulate_job/medflare/models/global/model.safetensors"
    if not model.is_file():
        last = " / ".join(log.read_text().splitlines()[-5:])
        raise RuntimeError(f"the simulator wrote no global model; its last lines: {last}")
    return seconds, load_file(model)


def memory(part: Part) -> None:
    step_cost = benchmark("hardware").step_cost
    part.table("preset", "parameters, M", "memory of a step, GB", "seconds of a step")
    for name in ("phantom",) if part.tiny else PRESETS:
        if part.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        part.row(name, *step_cost(name, part.device).values())


def predict(part: Part) -> None:
    """From prepared images to probabilities on the CPU, as `medflare predict` but without files."""
    from medflare.inference.deployed import build, plain_message
    from medflare.inference.predict import PreparedImage, predictions

    nothing: Any = None
    part.table("size", "device", "threads", "images/s")
    for size in part.sizes if part.tiny else part.sizes[1:]:
        task = size.task()
        model = build(task, plain_message(copy_state(initial_network(task, 0).state_dict())))
        draw = torch_generator(0, "predict")
        image = torch.rand(1, task.image_channels, size.side, size.side, generator=draw)
        prepared = PreparedImage(nothing, image, (size.side, size.side), False, nothing)
        for device in sorted({"cpu", part.device.type}):
            count = 16 if part.tiny or device == "cpu" else 512
            model.to(device)
            for repeat in (count // 2, count):  # the first warms up
                started = time.perf_counter()
                done = sum(1 for _ in predictions(model, [prepared] * repeat, task, device))
                seconds = time.perf_counter() - started
            part.row(size.name, device, torch.get_num_threads(), done / seconds)


PARTS: dict[str, Callable[[Part], None]] = {
    "throughput": throughput,
    "breakdown": breakdown,
    "graph": graph,
    "stacked": stacked,
    "workers": workers,
    "simulator": simulator,
    "memory": memory,
    "predict": predict,
}
# Of the seconds: many sites, or processes, start here.
LONGER = {"throughput": 1.7, "workers": 1.7, "simulator": 2.0}
THREADS = ("predict",)  # parts that use all threads; a site, and the plain loop, compute on one


def run_alone(name: str, options: argparse.Namespace) -> str:
    """Run a part in a process of its own; returns why it did not end well, "" if it did."""
    command = [sys.executable, str(HERE / "gpu.py"), "--one", name, "--device", options.device]
    limit = options.seconds * LONGER.get(name, 1.0)
    command += ["--seconds", str(limit), *(["--tiny"] if options.tiny else [])]
    command += ["--out", str(options.out)] if options.out else []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stderr=errors)
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the processes of its sites too
            process.kill()
            process.wait()
            return f"stopped after {limit:g} s"
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    return "" if code == 0 else f"exit code {code}: {lines[-1] if lines else 'no error message'}"


def main(arguments: Sequence[str] | None = None) -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", default=",".join(PARTS), help="separated by commas")
    parser.add_argument("--seconds", type=float, default=44.0, help=f"of a part; times {LONGER}")
    parser.add_argument("--out", type=Path, help="file for the rows, a line of JSON each")
    parser.add_argument("--tiny", action="store_true", help="small images and few steps")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        os.setpgrp()  # `run_alone` ends the group
        if options.one not in THREADS:
            torch.set_num_threads(1)
        device = torch.device(options.device)
        part = Part(options.one, device, options.tiny, options.seconds, options.out)
        PARTS[options.one](part)
        return 0
    names = options.parts.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    name_of_device = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    print(f"{name_of_device}, torch {torch.__version__}", flush=True)
    today = time.strftime("%Y-%m-%d")
    write(options.out, {"device": name_of_device, "torch": torch.__version__, "day": today})
    failed = 0
    for name in names:
        print(f"\n## {name}\n", flush=True)
        started = time.monotonic()
        problem = run_alone(name, options)
        failed += bool(problem)
        seconds = time.monotonic() - started
        print(f"\n{problem or 'done'}, {seconds:.0f} s", flush=True)
        write(options.out, {"part": name, "seconds": seconds, "problem": problem})
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
