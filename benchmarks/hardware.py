"""What a training step of each preset needs: parameters, peak memory and time, on random images of the task's size.

    python benchmarks/hardware.py [--device cuda] [--tasks brain_lgg,brain_lgg_3d]

Each task runs in a process of its own and is measured as `medflare task init` measures: see `preparation.step_cost`.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from medflare.networks.catalogue import meta_network
from medflare.preparation.step_cost import measure_step
from medflare.tasks.config import load_task

TASKS = "phantom,ham10000,fundus_vessels,brain_lgg,brain_lgg_3d,papers/fundus_fedsm,papers/prostate_prr,papers/fed_isic2019_grace"


def step_cost(name: str, device: torch.device) -> dict[str, float]:
    """Parameters (millions), peak memory (GB) and seconds of a step, without augmentation."""
    task = replace(load_task(name), augment=())
    cost = measure_step(task, device)
    parameters = sum(weight.numel() for weight in meta_network(task).parameters())
    return {
        "parameters": parameters / 1e6,
        "memory": cost.gibibytes * 2**30 / 1e9,
        "seconds": cost.seconds,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        torch.set_num_threads(1)
        print(json.dumps(step_cost(options.one, torch.device(options.device))))
        return 0
    print(
        "| preset | image | batch | parameters, M | memory of a step, GB | seconds of a step |\n|---|---|---|---|---|---|"
    )
    for name in options.tasks.split(","):
        task = load_task(name)
        command = [sys.executable, __file__, "--device", options.device, "--one", name]
        cost = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
        )
        row = [
            name,
            " x ".join(map(str, task.size)),
            str(task.batch_size),
            *(f"{value:.2f}" for value in cost.values()),
        ]
        print(f"| {' | '.join(row)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
