"""What a round of large models costs the server, beside reading the answers of all sites once, measured in one run.

    python benchmarks/server.py                      # VGG-16 (138 million weights), 4 sites: up to 16 GB of disk
    python benchmarks/server.py --width 16           # a sixteenth of its widths
    OMP_NUM_THREADS=2 python benchmarks/server.py --clock wall

Every method has a process of its own. Nobody trains: sites answer with stored weights. A round is what the schedule does with the answers:
their screening, and the aggregation. Reading is that of all answers of the round, once: as the server reads any state, from its file and
with its checksum, and beside that a bare sum of all their numbers. Seconds are processor time, since a busy machine lengthens all others,
of one thread unless OMP_NUM_THREADS says otherwise; what several threads are worth `--clock wall` tells, on an idle machine. Memory is what
cannot be given back to the system (anonymous memory) above what the process had before the server was made, counted in models. The answers
lie in a temporary folder (TMPDIR, which must be on a disk), which is removed.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).resolve().parent
GB = 10**9
# Of VGG-16; 0 is a pooling.
WIDTHS = (3, 64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
TASK: dict[str, Any] = {
    "name": "large",
    "kind": "classification",
    "target": "multiclass",
    "labels": ["a", "b"],
    "channels": 3,
    "size": [224, 224],
    "loss": {"name": "ce"},
    "optimizer": {"name": "adam", "lr": 0.001},
    "batch_size": 4,
    "local_epochs": 1,
    "metric": "accuracy",
}
CLOCKS = {"processor": time.process_time, "wall": time.perf_counter}
TRAINED: dict[str, Any] = {"gamma": 0.5, "selector": "vgg11", "selector_updates": 1}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedsm": TRAINED,
    "prr": {"cpa": "off"},
    "grace": {},
    "sha": {},
}


class VGG16(nn.Sequential):
    """VGG-16 (configuration D of Simonyan and Zisserman, ICLR 2015) with 1000 hidden outputs, all widths divided by `narrow`."""

    def __init__(self, in_channels: int, out_channels: int, narrow: int = 1):
        layers: list[nn.Module] = []
        width = in_channels
        for wide in WIDTHS[1:]:
            layers += (
                [nn.Conv2d(width, wide // narrow, 3, padding=1), nn.ReLU()]
                if wide
                else [nn.MaxPool2d(2)]
            )
            width = wide // narrow or width
        for inputs, outputs in itertools.pairwise(
            (width * 49, 4096 // narrow, 4096 // narrow, 1000 // narrow)
        ):
            layers += [
                nn.Flatten() if inputs == width * 49 else nn.Identity(),
                nn.Linear(inputs, outputs),
                nn.ReLU(),
            ]
        super().__init__(*layers, nn.Linear(1000 // narrow, out_channels))


class Stored:
    """An exchange with sites that answer every phase with what lies in their files.

    Args:
        sites: names.
        folder: of the files, one for each site and entry.
        manifest: phase -> what a reply holds.
        now: the clock.
    """

    def __init__(self, sites: list[str], folder: Path, manifest: Any, now: Callable[[], float]):
        self.sites, self.folder, self.manifest, self.now = sites, folder, manifest, now
        self.left = 0.0
        self.sent = 0.0
        self.distinct = 0.0

    def present(self, round: int) -> list[str]:
        return self.sites

    def __call__(self, step: Any, outgoing: Mapping[str, Any]) -> dict[str, Any]:
        from medflare.core.message import Message
        from medflare.core.store import read_message
        from medflare.federation.exchange import SiteReply

        replies = {}
        for site in outgoing:
            meta = self._facts(step.phase, site)
            states = (
                read_message(self.path(step.phase, site)).states
                if self.path(step.phase, site).exists()
                else {}
            )
            states = {
                entry: {name: tensor.clone() for name, tensor in state.items()}
                for entry, state in states.items()
            }  # as from the wire
            replies[site] = SiteReply(Message(states, meta))
        if step.phase == "finalize":
            tensors = [
                tensor
                for message in outgoing.values()
                for state in message.states.values()
                for tensor in state.values()
            ]
            self.sent, self.distinct = (
                sum(t.nbytes for t in found) / GB
                for found in (tensors, {t.data_ptr(): t for t in tensors}.values())
            )
        self.left = self.now()
        return replies

    def path(self, phase: str, site: str) -> Path:
        return self.folder / f"{phase}-{site}.safetensors"

    def _facts(self, phase: str, site: str) -> dict[str, Any]:
        if phase == "enrol":
            return {"n": {"train": 10, "validation": 5, "test": 5}, "class_counts": [5, 5]}
        if phase == "finalize":
            return {"metrics": {"deployed": {"accuracy": 0.5}}, "n": {"train": 10}}
        if phase == "score":
            return {
                "scores": {
                    other: 0.5 + 0.1 * place
                    for place, other in enumerate(self.sites)
                    if other != site
                }
            }
        return {"n_samples": 10, "loss": 0.5, "validation": {"global": 0.5, "personal": 0.5}}

    def answer(self, phase: str, start: Mapping[str, torch.Tensor]) -> None:
        """Write what all sites answer: the initial weights with a little noise, and noise for what is no weight of the network."""
        from medflare.core.message import Message
        from medflare.core.rng import torch_generator
        from medflare.core.store import write_message

        for site in self.sites:
            states: dict[str, dict[str, torch.Tensor]] = {}
            for entry, spec in self.manifest(phase).items():
                generator = torch_generator(0, "benchmark", site, phase, entry)
                states[entry] = {}
                for name, (shape, dtype) in spec.tensors.items():
                    noise = torch.randn(shape, generator=generator).mul_(0.01).to(dtype)
                    states[entry][name] = (
                        noise.add_(start[name])
                        if name in start and start[name].shape == shape
                        else noise.abs_()
                    )
            write_message(self.path(phase, site), Message(states))

    def read(self, phase: str) -> tuple[float, float]:
        """Seconds of reading all answers to a phase once, and of adding up their numbers."""
        from medflare.core.store import read_message

        reading = summing = 0.0
        for site in self.sites:
            started = self.now()
            message = read_message(self.path(phase, site))
            read = self.now()
            for state in message.states.values():
                for tensor in state.values():
                    tensor.sum()
            reading = reading + read - started
            summing = summing + self.now() - read
        return reading, summing


class Watched:
    """The most memory that this process has had since it was asked to look, in GB."""

    def __init__(self) -> None:
        self.most = 0.0
        self.before, self._over = self._now(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _now(self) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(
            float(line.split()[1]) * 1024 / GB for line in lines if line.startswith("RssAnon")
        )

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.most = max(self.most, self._now() - self.before)

    def finish(self) -> float:
        self._over.set()
        self._thread.join()
        return self.most


def measure(
    method: str, sites: int, narrow: int, scratch: Path, clock: str = "processor"
) -> dict[str, float]:
    """One round of a method in this process."""
    from medflare.federation.schedule import Federation
    from medflare.methods.base import ServerContext
    from medflare.methods.catalogue import get_method
    from medflare.tasks.config import load_task

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    names = [f"site-{number + 1}" for number in range(sites)]
    task = load_task({**TASK, "network": {"name": "server:VGG16", "narrow": narrow}})
    chosen = get_method(method)
    plan = chosen.plan(task, tuple(names), METHODS[method])
    exchange = Stored(
        names, scratch, lambda phase: chosen.site_class.manifest(phase, plan), CLOCKS[clock]
    )
    template = ServerContext(plan, 0, 1, phases=chosen.site_class.phases).initial_state()
    for phase in chosen.site_class.phases.values():
        if exchange.manifest(phase.name):
            exchange.answer(phase.name, template)
    model = sum(tensor.nbytes for tensor in template.values())
    del template
    reading, summing = (
        min(seconds) for seconds in zip(*(exchange.read("train") for _ in range(2)), strict=True)
    )
    size = sum(exchange.path("train", site).stat().st_size for site in names)
    seconds: dict[str, float] = {}

    def after_step(report: Any) -> None:
        assert not report.rejected, report.rejected
        seconds[report.step.phase] = exchange.now() - exchange.left

    watched = Watched()
    server = chosen.make_server(ServerContext(plan, 0, 1, phases=chosen.site_class.phases))
    Federation(server, exchange, on_step=after_step).run()
    memory = watched.finish()
    whole = sum(seconds[phase] for phase in seconds if phase in ("train", "score"))
    return {
        "model": model / GB,
        "answers": size / GB,
        "reading": reading,
        "summing": summing,
        "round": whole,
        "memory": memory,
        "sent": exchange.sent,
        "distinct": exchange.distinct,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument(
        "--width", type=int, default=1, help="by how much the widths of VGG-16 are divided"
    )
    parser.add_argument("--clock", choices=list(CLOCKS), default="processor")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        method, folder = options.one
        print(
            json.dumps(measure(method, options.sites, options.width, Path(folder), options.clock))
        )
        return
    print(
        "| method | answers, GB | reading, s | bare sum, s | round, s | beside reading | memory | delivery sent | held |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for method in options.methods.split(","):
        found = _one(method, options)
        size = found["model"]
        cells = [f"{found[name]:.2f}" for name in ("answers", "reading", "summing", "round")]
        cells += [f"{found['round'] / found['reading']:.1f}"]
        cells += [f"{found[name] / size:.1f}" for name in ("memory", "sent", "distinct")]
        print(f"| `{method}` | " + " | ".join(cells) + " |", flush=True)


def _one(method: str, options: argparse.Namespace) -> dict[str, float]:
    paths = [str(HERE), str(HERE.parent / "custom"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "MEDFLARE_PACKAGES": "server",
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", str(HERE / "server.py"), "--one", method, folder]
        command += ["--sites", str(options.sites), "--width", str(options.width)]
        command += ["--clock", options.clock]
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found


if __name__ == "__main__":
    main()
