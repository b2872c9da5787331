"""What an engine costs beside a plain PyTorch loop of the same network on the same images, all measured in one run.

    python benchmarks/compare.py [--sites 4] [--rounds 5] [--repeats 1] [--only floor,loop]
    pip install 'flwr[simulation]' pfl blazefl       # in an environment of its own; those that are there are measured too

`floor` trains the network on every site's images in turn and averages, with nothing around it: no message, no metric, no file. All
of ours run the whole federation: enrolment, validation in every round, selection, delivery, results. The simulator runs a job that was
written before. Other frameworks (`rivals/`) train and average as the floor does, in their own simulation. Each is a process of its own on
one thread a site; they take turns, so that a busy machine slows all of them alike, and what counts is the ratio to the floor. Seconds,
processor seconds and memory are of the process and everything that it started. What trains in the process itself is also timed without
its imports: that is what a call costs in a program which had its imports long ago. A test (tests/test_speed.py) calls `processor_seconds`
on small runs.
"""

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from torch import Tensor

    from medflare.networks.features import FeatureNetwork
    from medflare.training.site import Site

HERE = Path(__file__).resolve().parent
# Name -> package, and module of `rivals/`.
RIVALS = {"Flower": "flwr", "pfl": "pfl", "BlazeFL": "blazefl"}
PIP = {"flwr": "'flwr[simulation]'"}
SIMULATOR = "simulator"
RATIO = "beside the floor"
HEADINGS = (
    "engine",
    "seconds",
    RATIO,
    "without imports",
    RATIO,
    "processor seconds",
    RATIO,
    "peak memory, MB",
)
_ADOPT = 36  # Linux, prctl(2), PR_SET_CHILD_SUBREAPER: processes whose parent ends become children of this one
_LAST = 10.0  # seconds for what was started to notice that its time is over
TASK: dict[str, Any] = {
    "network": {"name": "unet", "channels": [16, 32, 64, 128], "norm": "instance"}
}


def task_settings() -> dict[str, Any]:
    from medflare.tasks.config import load_task

    return {**load_task("phantom").to_dict(), **TASK}


def floor(hospitals: "Sequence[Site]", rounds: int) -> None:
    """FedAvg by hand."""
    import torch

    weights = hospitals[0].network().state_dict()
    shares = torch.tensor([float(site.n["train"]) for site in hospitals])
    shares /= shares.sum()
    for round in range(rounds):
        states = [trained(site, weights, round) for site in hospitals]
        weights = {
            name: sum(share * state[name] for share, state in zip(shares, states, strict=True))
            for name in weights
        }


def trained(site: "Site", weights: "Mapping[str, Tensor]", round: int) -> "dict[str, Tensor]":
    """Local epochs by hand: what all engines but our own call a site's part of a round."""
    model = network_of(site)
    model.load_state_dict(weights)
    model.train()
    optimizer = site.optimizer(model.parameters())
    for epoch in range(site.task.local_epochs):
        for images, targets, _ in site.batches("train", round, epoch):
            optimizer.zero_grad(set_to_none=True)
            site.loss(model(images), targets).backward()
            optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@cache
def network_of(site: "Site") -> "FeatureNetwork":
    """A site's network, built once in a process."""
    return site.network()


def sites_model(sites: int) -> "FeatureNetwork":
    """The network with which all of them begin."""
    return network_of(hospital(sites - 1))


@cache
def hospital(number: int) -> "Site":
    """A site with its images, read once in a process."""
    from medflare.tasks.config import load_task
    from medflare.training.opening import open_site

    return open_site(f"site-{number + 1}", load_task(task_settings()))


def loop(sites: int, rounds: int, workers: int) -> None:
    """The plain loop."""
    from medflare import run_local

    with tempfile.TemporaryDirectory() as out:
        results = run_local(
            "fedavg", task_settings(), sites, rounds=rounds, seed=0, out=out, workers=workers
        )
    assert results["status"] == "COMPLETED", results["reason"]


def written_job(rounds: int, out: Path) -> Path:
    """What the simulator runs: written once, as `medflare job` writes it, before anything is measured."""
    from medflare.flare.jobs.building import build_job

    return build_job("fedavg", task_settings(), rounds=rounds, out=out)


def simulator(job: Path, sites: int, threads: int) -> None:
    """The job under `nvflare simulator`."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable,
            "-m",
            "nvflare.cli",
            "simulator",
            str(job),
            "-w",
            f"{scratch}/w",
            "-n",
            str(sites),
            "-t",
            str(threads),
        ]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        results = json.loads(
            (Path(scratch) / "w/server/simulate_job/medflare/results.json").read_text()
        )
    assert results["status"] == "COMPLETED", results["reason"]


def engines(sites: int, rounds: int, job: Path) -> dict[str, Callable[[], None]]:
    """name -> what runs it in this process; `job` is where `written_job` puts one."""
    return {
        "floor": lambda: floor([hospital(number) for number in range(sites)], rounds),
        "loop": lambda: loop(sites, rounds, 1),
        "loop, 2 workers": lambda: loop(sites, rounds, 2),
        f"{SIMULATOR} -t {sites}": lambda: simulator(job, sites, sites),
        f"{SIMULATOR} -t 2": lambda: simulator(job, sites, 2),
        f"{SIMULATOR} -t 1": lambda: simulator(job, sites, 1),
        **{
            f"{name} {version(package)}": partial(rival, package, sites, rounds)
            for name, package in RIVALS.items()
            if find_spec(package)
        },
    }


def import_first(name: str) -> None:
    """Import what an engine that trains in this process needs."""
    if name.startswith(SIMULATOR):
        return
    from medflare.federation.participant import import_ahead

    import_ahead()
    if name.split()[0] in RIVALS:
        import_module(f"rivals.{RIVALS[name.split()[0]]}")


def rival(package: str, sites: int, rounds: int) -> None:
    """The same network, images, local epochs, optimiser and weights of the mean in another framework's simulation."""
    import_module(f"rivals.{package}").run(sites, rounds)


def processor_seconds(work: Callable[[], None]) -> float:
    """Processor seconds of a piece of work: of this process and of all that it started, those among them that outlive their parents."""

    def so_far() -> float:
        usages = [
            resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        ]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    adopt = ctypes.CDLL(None).prctl
    adopt(_ADOPT, 1, 0, 0, 0)
    try:
        before = so_far()
        known = _orphans()
        work()
        deadline = time.monotonic() + _LAST
        while (left := _orphans() - known) and time.monotonic() < deadline:
            for process in left:
                with suppress(ChildProcessError):
                    os.waitpid(process, os.WNOHANG)
            time.sleep(0.05)
        return so_far() - before
    finally:  # nobody would wait for what this process adopted later
        adopt(_ADOPT, 0, 0, 0, 0)


def _orphans() -> set[int]:
    """Children of this process with a session of their own, as the simulator's host has."""
    found = set()
    for child in psutil.Process().children():
        with suppress(ProcessLookupError):
            found |= {child.pid} if os.getsid(child.pid) != os.getsid(0) else set()
    return found


def environment() -> dict[str, str]:
    """Of a process with this package and one thread."""
    paths = [str(HERE.parent / "custom"), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def measured(name: str, sites: int, rounds: int, job: Path) -> dict[str, float]:
    """What an engine takes with everything that it starts.

    Returns:
        "seconds", those of the "call" after the imports of `import_first`, "processor" seconds, and peak memory in "megabytes"
        (proportional share of pages).
    """
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--one",
        name,
        "--sites",
        str(sites),
        "--rounds",
        str(rounds),
    ]
    command += ["--job", str(job)]
    started = time.monotonic()
    mark = f"{os.getpid()}-{started}"  # also found in what leaves the tree of processes
    process = subprocess.Popen(command, env={**environment(), "MEDFLARE_BENCHMARK": mark})
    peak = [0.0]
    times = dict[int, float]()
    done = threading.Event()
    watch = threading.Thread(target=_watch, args=(mark, peak, times, done), daemon=True)
    watch.start()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode, seconds = os.waitstatus_to_exitcode(status), time.monotonic() - started
    done.set()
    watch.join()
    if process.returncode:
        raise SystemExit(f"{name}: exit code {process.returncode}")
    # Ray's actors end without anybody who waits for them.
    processor = max(usage.ru_utime + usage.ru_stime, sum(times.values()))
    return {
        "seconds": seconds,
        "call": float(call_file(job).read_text()),
        "processor": processor,
        "megabytes": peak[0],
    }


def call_file(job: Path) -> Path:
    """Where the measured process says how long its call took."""
    return job.with_name("call")


def timed(work: Callable[[], None], into: Path) -> None:
    """Do a piece of work and write down its seconds."""
    started = time.monotonic()
    work()
    into.write_text(str(time.monotonic() - started))


def _watch(mark: str, peak: list[float], times: dict[int, float], done: threading.Event) -> None:
    """Every second: the memory of all processes that bear the mark, and the processor seconds that each of them has used."""
    while not done.wait(1.0):
        total = 0.0
        for process in psutil.process_iter():
            try:
                if process.environ().get("MEDFLARE_BENCHMARK") == mark:
                    total += process.memory_full_info().pss / 2**20
                    used = process.cpu_times()
                    times[process.pid] = used.user + used.system
            except psutil.Error:
                continue
        peak[0] = max(peak[0], total)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--only", help="beginnings of names, separated by commas: floor, loop, simulator"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        import_first(options.one)
        run = engines(options.sites, options.rounds, options.job)[options.one]
        processor_seconds(lambda: timed(run, call_file(options.job)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        show(options, Path(scratch) / "job")


def show(options: argparse.Namespace, job: Path) -> None:
    """Measure what was asked for, engine by engine in turns, and print the table."""
    known = engines(options.sites, options.rounds, job)
    wanted = tuple((options.only or "").split(","))
    chosen = [name for name in known if name == "floor" or name.startswith(wanted)]
    if any(name.startswith(SIMULATOR) for name in chosen):
        written_job(options.rounds, job)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    for _ in range(options.repeats):
        for name in list(found):
            try:
                found[name].append(measured(name, options.sites, options.rounds, job))
            except SystemExit as failure:
                if name.split()[0] not in RIVALS:
                    raise
                # Algorithm installed, for example: the others' minutes are not lost.
                print(f"{failure}; left out", file=sys.stderr)
                del found[name]
            else:
                print(name, found[name][-1], file=sys.stderr, flush=True)  # where a later one fails
    middle = {
        name: {what: median(one[what] for one in runs) for what in runs[0]}
        for name, runs in found.items()
    }
    for name, package in RIVALS.items():
        if not find_spec(package):
            print(
                f"{name} is not installed: pip install {PIP.get(package, package)}", file=sys.stderr
            )
    print(f"| {' | '.join(HEADINGS)} |\n{'|---' * len(HEADINGS)}|")
    for name, values in middle.items():
        cells = [
            f"{values[what]:.1f} | {values[what] / middle['floor'][what]:.2f}"
            for what in ("seconds", "call", "processor")
        ]
        if name.startswith(SIMULATOR):
            cells[1] = "– | –"
        print(f"| {name} | {' | '.join(cells)} | {values['megabytes']:.0f} |")


if __name__ == "__main__":
    main()
