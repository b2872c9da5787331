"""What it gains, or costs, to train the networks of several sites as one batch, beside one site after the other in the same run.

    python benchmarks/together.py [--device cuda] [--sites 8] [--size 64] [--batch 4] [--norm batch] [--augment]

`training` is a local epoch of every site: `train_epochs` for each, or `train_together` for all. `round` is all that the plain loop does
in a round of FedAvg: validation, training, screening, aggregation. The two ways take turns, on one thread, and what counts is the ratio of
the medians. On a CPU time is processor time, on a GPU the clock's, with the device waited for.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from medflare import run_local
from medflare.data.sites.opening import open_site
from medflare.data.sites.site import Site
from medflare.federation.outcome import StepReport
from medflare.methods.parts.together import train_together
from medflare.methods.parts.training import Lesson, train_epochs, trainable
from medflare.tasks.config import load_task

UNET: dict[str, Any] = {"name": "unet", "channels": [16, 32, 64, 128]}  # 0.17 M parameters
WAYS = ("one after the other", "together")


def now(device: torch.device) -> float:
    """Processor time, or the clock's where a GPU computes, after all that it was given."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def training(hospitals: Sequence[Site], turns: int) -> dict[str, list[float]]:
    """Seconds of an epoch of all sites, by way."""
    lessons = []
    for site in hospitals:
        model = site.network()
        lessons.append(Lesson(model, site.optimizer(trainable(model)), site, 0, "model", None, None))

    def apart() -> None:
        for one in lessons:
            train_epochs(one.model, one.optimizer, one.site, one.round, one.purpose)

    runs: dict[str, Callable[[], object]] = {WAYS[0]: apart, WAYS[1]: lambda: train_together(lessons)}
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(turns + 1):
        for way, run in runs.items():
            started = now(hospitals[0].device)
            run()
            taken[way].append(now(hospitals[0].device) - started)
    return {way: seconds[1:] for way, seconds in taken.items()}  # the first one warms up


def rounds(hospitals: Sequence[Site], turns: int) -> dict[str, list[float]]:
    """Seconds of a round of the plain loop, by way."""
    sites = {site.name: site for site in hospitals}
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(turns):
        for way in WAYS:
            ends = round_ends(sites, together=way == "together")
            taken[way] += [end - begin for begin, end in pairwise(ends)]
    return taken


def round_ends(sites: Mapping[str, Site], together: bool) -> list[float]:
    """When the three rounds of a run ended; the first one warmed up."""
    ends: list[float] = []
    task, device = next((site.task, site.device) for site in sites.values())

    def note(report: StepReport) -> None:
        ends.append(now(device))

    run_local("fedavg", task, sites, rounds=3, seed=0, opener=lambda name, role: sites[name], together=together, observe=note)
    return ends[:3]  # after them the last models are validated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--norm", default="instance")
    parser.add_argument("--augment", action="store_true")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    changes: dict[str, Any] = {"network": {**UNET, "norm": options.norm}, "size": [options.size] * 2, "batch_size": options.batch}
    task = load_task({**load_task("phantom").to_dict(), **changes, **({} if options.augment else {"augment": []})})
    hospitals = [open_site(f"site-{number + 1}", task, local={"device": options.device}) for number in range(options.sites)]
    print("| | ms one after the other | ms together | times as fast |\n|---|---|---|---|")
    for what, measure in (("training", training), ("round", rounds)):
        apart, together = (median(seconds) * 1000 for seconds in measure(hospitals, options.turns).values())
        print(f"| {what} | {apart:.0f} | {together:.0f} | {apart / together:.2f} |")


if __name__ == "__main__":
    main()
