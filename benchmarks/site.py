"""How fast a site trains beside a plain PyTorch loop of the same network on the same images, both measured in one run.

    python benchmarks/site.py [--device cuda] [--precision bf16] [--channels-last] [--compile] [--no-augment]

The site is FedAvg's site half answering `train`: weights loaded, an epoch, weights copied out. The plain loop has the images in memory
and knows of no federation, key or manifest; where the task augments, MONAI's own data set and loader give it its batches. It always runs
in fp32, so that the ratio of another precision is what that precision gains. Both take turns, an epoch each, on one thread; what counts
is the ratio of the medians. On a CPU time is processor time, on a GPU the clock's, with the device waited for.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from medflare.core.message import Message
from medflare.core.states import copy_state
from medflare.data.sites.opening import open_site
from medflare.data.sites.site import Site
from medflare.data.splits import SiteData, Split
from medflare.methods.fedavg import FedAvgSite
from medflare.methods.catalogue import get_method
from medflare.tasks.config import TaskConfig, load_task
from medflare.tasks.losses import build_loss

UNET: dict[str, Any] = {"name": "unet", "channels": [16, 32, 64, 128], "norm": "instance"}  # 0.5 M parameters


def site_epoch(site: Site) -> Callable[[int], None]:
    """What trains the site half for a round."""
    half = FedAvgSite(site, get_method("fedavg").plan(site.task, (site.name,), {}))
    start = copy_state(site.network().state_dict())
    return lambda round: void(half.perform("train", round, Message({"model": start})))


def plain_epoch(task: TaskConfig, images: Tensor, targets: Tensor, network: torch.nn.Module, device: torch.device) -> Callable[[int], None]:
    """What trains the same network by hand for an epoch."""
    loss, network = build_loss(task).to(device), network.to(device).train()
    optimizer = torch.optim.Adam(network.parameters(), lr=task.optimizer["lr"])
    batches = loaded(task, images, targets) if task.augment else indexed(task, images.to(device), targets.to(device))

    def run(_round: int) -> None:
        for inputs, truth in batches():
            optimizer.zero_grad(set_to_none=True)
            value = loss(network(inputs.to(device, non_blocking=True)), truth.to(device, non_blocking=True))
            value.backward()
            optimizer.step()

    return run


def indexed(task: TaskConfig, images: Tensor, targets: Tensor) -> Callable[[], Any]:
    """Batches of images that lie on the device."""
    return lambda: ((images[rows], targets[rows]) for rows in torch.randperm(len(images)).split(task.batch_size))


def loaded(task: TaskConfig, images: Tensor, targets: Tensor) -> Callable[[], Any]:
    """Batches by MONAI's data set and loader, each image through the task's random transforms."""
    from monai import transforms
    from monai.data.dataloader import DataLoader
    from monai.data.dataset import Dataset

    made = []
    for settings in task.augment:
        arguments = {name: value for name, value in settings.items() if name != "name"}
        made.append(getattr(transforms, f"{settings['name']}d")(keys=["image", "target"], **arguments))
    rows = [{"image": image, "target": target} for image, target in zip(images, targets, strict=True)]
    loader = DataLoader(Dataset(rows, transforms.Compose(made)), batch_size=task.batch_size, shuffle=True, num_workers=0)
    return lambda: ((batch["image"].as_tensor(), batch["target"].as_tensor()) for batch in loader)


def void(_: object) -> None:
    """Nothing."""


def seconds(run: Callable[[int], None], round: int, device: torch.device) -> float:
    """What an epoch takes: processor time, or the clock's where a GPU computes."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    started = clock()
    run(round)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--no-augment", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    changes: dict[str, Any] = {"network": UNET, "size": [options.size] * 2, "batch_size": options.batch}
    task = load_task({**load_task("phantom").to_dict(), **changes, **({"augment": []} if options.no_augment else {})})
    local = {"device": options.device}
    opened = open_site("site-1", task, local=local)
    train = opened.data.train
    assert isinstance(train, Split)
    none = Split(train.images[:0], train.targets[:0], (), ())
    opened.data = SiteData(train, none, none)  # what is measured is training alone
    plain = plain_epoch(task, train.images, train.targets, opened.network(), opened.device)
    runs = {"plain loop": plain, "site half": site_epoch(opened)}
    found: dict[str, list[float]] = {name: [] for name in runs}
    for round in range(options.epochs + 1):
        for name, run in runs.items():
            taken = seconds(run, round, opened.device)
            if round:  # the first one warms up
                found[name].append(taken)
    rates = {name: len(train) / median(taken) for name, taken in found.items()}
    print("| | images/s | beside the plain loop |\n|---|---|---|")
    for name, rate in rates.items():
        print(f"| {name} | {rate:.1f} | {rate / rates['plain loop']:.3f} |")


if __name__ == "__main__":
    main()
