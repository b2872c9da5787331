"""What a training step of each preset needs: parameters, peak memory and time, on random images of the task's size.

    python benchmarks/hardware.py [--device cuda] [--tasks brain_lgg,brain_lgg_3d] [--steps 3]

Each task runs in a process of its own. On a CPU, memory is the growth of the process's peak above what Python, torch and MONAI take, and
time is processor time on one thread; on a GPU, torch's peak allocation and the clock's time after a first step.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from medflare.networks.catalogue import initial_network
from medflare.tasks.config import TaskConfig, load_task
from medflare.tasks.losses import build_loss
from medflare.tasks.optimizers import build_optimizer

TASKS = "phantom,ham10000,fundus_vessels,brain_lgg,brain_lgg_3d,papers/fundus_fedsm,papers/prostate_prr,papers/fed_isic2019_grace"


def targets(task: TaskConfig, batch: int) -> torch.Tensor:
    """Random targets as the task's data have them: class indices, or one mask per structure."""
    spatial = tuple(task.size) if task.kind == "segmentation" else ()
    if task.target == "multilabel":
        return torch.randint(0, 2, (batch, len(task.labels), *spatial)).float()
    return torch.randint(0, 2 if task.target == "binary" else len(task.labels), (batch, *spatial))


def step_cost(name: str, device: torch.device, steps: int) -> dict[str, float]:
    """Parameters (millions), peak memory (GB) and seconds of a step."""
    task = load_task(name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    network, loss = initial_network(task, 0).to(device).train(), build_loss(task).to(device)
    optimizer = build_optimizer(task.optimizer, network.parameters(), f"task {name}")
    images, truth = torch.rand(task.batch_size, task.image_channels, *task.size, device=device), targets(task, task.batch_size).to(device)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    seconds = []
    for _ in range(steps + 1):
        start = clock()
        optimizer.zero_grad(set_to_none=True)
        loss(network(images), truth).backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(clock() - start)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else grown
    parameters = sum(weight.numel() for weight in network.parameters())
    return {"parameters": parameters / 1e6, "memory": memory / 1e9, "seconds": sum(seconds[1:]) / steps}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        torch.set_num_threads(1)
        print(json.dumps(step_cost(options.one, torch.device(options.device), options.steps)))
        return 0
    print("| preset | image | batch | parameters, M | memory of a step, GB | seconds of a step |\n|---|---|---|---|---|---|")
    for name in options.tasks.split(","):
        task = load_task(name)
        command = [sys.executable, __file__, "--device", options.device, "--steps", str(options.steps), "--one", name]
        cost = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        row = [name, " x ".join(map(str, task.size)), str(task.batch_size), *(f"{value:.2f}" for value in cost.values())]
        print(f"| {' | '.join(row)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
