"""How fast a site trains beside a plain PyTorch loop of the same network on the same images, both measured in one run.

    python benchmarks/site.py [--ways site,site:bf16] [--device cuda] [--size 64] [--batch 4] [--channels 16,32,64,128] [--augment]

The site is FedAvg's site algorithm answering `train`: weights loaded, an epoch, weights copied out. The plain loop has the images in memory
and knows of no federation, key or manifest; with `--augment`, MONAI's own data set and loader give it its batches. It always runs in fp32,
so that the ratio of another precision is what that precision gains. All take turns, an epoch each, on one thread, and what counts is the
median of the ratios to the plain epochs just before and after. On a CPU time is processor time, on a GPU the clock's, with the device
waited for.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from medflare.core.message import Message
from medflare.core.states import copy_state
from medflare.data.loading import SiteData, Split
from medflare.methods.catalogue import get_method
from medflare.methods.fedavg import FedAvgSite
from medflare.tasks.config import TaskConfig, load_task
from medflare.tasks.losses import build_loss
from medflare.training.opening import open_site
from medflare.training.site import Site

PLAIN = "plain loop"
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what the task says, what the site says
    "site": ({}, {}),
    "site:bf16": ({"precision": "bf16"}, {}),
    "site:fp16": ({"precision": "fp16"}, {}),
    "site:channels_last": ({}, {"channels_last": True}),
    "site:compile": ({}, {"compile": True}),
    "site:bf16+channels_last": ({"precision": "bf16"}, {"channels_last": True}),
}
Epoch = Callable[[int], float]  # runs the epoch of a turn and returns its seconds
Medians = dict[str, tuple[float, float]]  # name -> seconds of an epoch, and its ratio


def opened(task: TaskConfig, device: str, way: str) -> tuple[Site, Split]:
    """The first generated hospital with its training images alone, and these images."""
    of_task, of_site = WAYS[way]
    site = open_site(
        "site-1", load_task({**task.to_dict(), **of_task}), local={"device": device, **of_site}
    )
    train = site.data.train
    assert isinstance(train, Split)
    none = Split(train.images[:0], train.targets[:0], (), ())
    site.data = SiteData(train, none, none)
    return site, train


def site_epoch(site: Site) -> Callable[[int], None]:
    """What trains the site algorithm for a round."""
    algorithm = FedAvgSite(site, get_method("fedavg").plan(site.task, (site.name,), {}))
    start = copy_state(site.network().state_dict())

    def run(round: int) -> None:
        algorithm.perform("train", round, Message({"model": start}))

    return run


def plain_epoch(
    task: TaskConfig,
    images: Tensor,
    targets: Tensor,
    network: torch.nn.Module,
    device: torch.device,
) -> Callable[[int], None]:
    """What trains the same network by hand for an epoch."""
    loss = build_loss(task).to(device)
    network = network.to(device).train()
    optimizer = torch.optim.Adam(network.parameters(), lr=task.optimizer["lr"])
    batches = (
        loaded(task, images, targets)
        if task.augment
        else indexed(task, images.to(device), targets.to(device))
    )

    def run(_round: int) -> None:
        for inputs, truth in batches():
            optimizer.zero_grad(set_to_none=True)
            value = loss(
                network(inputs.to(device, non_blocking=True)), truth.to(device, non_blocking=True)
            )
            value.backward()
            optimizer.step()

    return run


def indexed(task: TaskConfig, images: Tensor, targets: Tensor) -> Callable[[], Any]:
    """Batches of images that lie on the device."""
    return lambda: (
        (images[rows], targets[rows]) for rows in torch.randperm(len(images)).split(task.batch_size)
    )


def loaded(task: TaskConfig, images: Tensor, targets: Tensor) -> Callable[[], Any]:
    """Batches by MONAI's data set and loader, each image through the task's random transforms."""
    from monai import transforms
    from monai.data.dataloader import DataLoader
    from monai.data.dataset import Dataset

    made = []
    for settings in task.augment:
        arguments = {name: value for name, value in settings.items() if name != "name"}
        made.append(
            getattr(transforms, f"{settings['name']}d")(keys=["image", "target"], **arguments)
        )
    rows = [
        {"image": image, "target": target} for image, target in zip(images, targets, strict=True)
    ]
    loader = DataLoader(
        Dataset(rows, transforms.Compose(made)),
        batch_size=task.batch_size,
        shuffle=True,
        num_workers=0,
    )
    return lambda: ((batch["image"].as_tensor(), batch["target"].as_tensor()) for batch in loader)


def seconds(run: Callable[[int], None], round: int, device: torch.device) -> float:
    """What an epoch takes: processor time, or the clock's where a GPU computes."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    started = clock()
    run(round)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - started


def in_turns(timed: Mapping[str, Epoch], turns: Iterable[int], warming: int) -> Medians:
    """What `main` compares: medians of epochs that take turns.

    A ratio is the mean of the plain epochs just before and after, divided by the epoch.

    Args:
        timed: name -> epoch; one name is PLAIN.
        turns: numbers of the turns; in each, every name runs once.
        warming: how many turns at the start do not count.
    """
    taken: dict[str, list[float]] = {name: [] for name in timed}
    for turn in turns:
        for name, epoch in timed.items():
            taken[name].append(epoch(turn))
    taken = {name: times[warming:] for name, times in taken.items()}
    around = [(before + after) / 2 for before, after in pairwise(taken[PLAIN])]
    results: Medians = {}
    for name, times in taken.items():
        ratios = [plain / this for plain, this in zip(around, times, strict=False)]
        results[name] = median(times), 1.0 if name == PLAIN else median(ratios)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", default="site", help=f"separated by commas: {', '.join(WAYS)}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument(
        "--channels", default="16,32,64,128", help="of the U-Net; by default 0.17 M parameters"
    )
    parser.add_argument("--norm", default="instance")
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--augment", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    changes: dict[str, Any] = {"size": [options.size] * 2, "batch_size": options.batch}
    changes["network"] = {
        "name": "unet",
        "channels": [int(width) for width in options.channels.split(",")],
        "norm": options.norm,
    }
    task = load_task(
        {
            **load_task("phantom").to_dict(),
            **changes,
            **({} if options.augment else {"augment": []}),
        }
    )
    sites = {way: opened(task, options.device, way) for way in options.ways.split(",")}
    first, train = next(iter(sites.values()))
    runs = {way: site_epoch(site) for way, (site, _) in sites.items()}
    runs = {
        PLAIN: plain_epoch(task, train.images, train.targets, first.network(), first.device),
        **runs,
    }
    timed = {name: partial(seconds, run, device=first.device) for name, run in runs.items()}
    results = in_turns(timed, range(options.epochs + 1), warming=1)
    print("| | images/s | beside the plain loop |\n|---|---|---|")
    for name, (middle, ratio) in results.items():
        print(f"| {name} | {len(train) / middle:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
