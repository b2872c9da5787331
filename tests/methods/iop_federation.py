"""A federation of a few small images for the tests of IOP-FL."""

import torch

from medflare.core.states import copy_state
from medflare.methods.base import ServerContext
from medflare.methods.hyper import build_hyper
from medflare.methods.iop_fl import IOPServer, IOPSite
from medflare.tasks.config import load_task
from medflare.tasks.data import SiteData, Split
from medflare.tasks.site import Site

SITES = ("A", "B", "C")
SEGMENTATION = load_task(
    {
        "name": "squares",
        "kind": "segmentation",
        "target": "binary",
        "labels": ["square"],
        "channels": 1,
        "size": [16, 16],
        "network": {"name": "unet", "channels": [4, 8], "norm": "batch"},
        "loss": {"name": "dice"},
        "optimizer": {"name": "adam", "lr": 0.01, "amsgrad": True},
        "batch_size": 4,
        "local_epochs": 1,
        "metric": "dice",
    }
)
CLASSIFICATION = load_task(
    {
        **SEGMENTATION.to_dict(),
        "name": "bright",
        "kind": "classification",
        "target": "multiclass",
        "labels": ["dark", "bright"],
        "network": {"name": "small_cnn", "channels": [4, 8]},
        "loss": {"name": "ce"},
        "metric": "accuracy",
    }
)


def with_network(task, **network):
    return load_task({**task.to_dict(), "network": {**task.network, **network}})


def split(task, count, seed, shift):
    generator = torch.Generator().manual_seed(seed)
    images = shift + 0.2 * torch.randn(count, 1, 16, 16, generator=generator)
    masks = torch.zeros(count, 16, 16, dtype=torch.long)
    for image, mask, (top, left) in zip(images, masks, torch.randint(1, 8, (count, 2), generator=generator).tolist(), strict=True):
        image[0, top : top + 7, left : left + 7] += 1.0
        mask[top : top + 7, left : left + 7] = 1
    classes = torch.arange(count) % 2
    if task.kind == "classification":
        images = images + classes.view(-1, 1, 1, 1)
    names = tuple(f"{seed}-{i}" for i in range(count))
    return Split(images, masks if task.kind == "segmentation" else classes, names, names)


def site(name, task=SEGMENTATION, counts=(8, 4, 5), seed=11):
    place = "ABCO".index(name)
    parts = [split(task, count, 100 * place + i, 0.5 * place) for i, count in enumerate(counts)]
    return Site(name, task, SiteData(*parts), seed)


def server_of(task=SEGMENTATION, rounds=3, outside=("O",), cls=IOPServer, **hyper):
    context = ServerContext(task, 11, rounds, SITES, outside)
    return cls(context, build_hyper(cls.Hyper, hyper))


def halves_of(task=SEGMENTATION, cls=IOPSite, **hyper):
    return {name: cls(site(name, task), build_hyper(cls.Hyper, hyper), SITES) for name in SITES}


def run(server, halves, absent=lambda step, name: False, rebuilt=False):
    """The schedule without an engine; returns every step's replies. With `rebuilt` every task runs in a half made anew."""
    log = []
    for step in server.steps():
        replies = {}
        for name in SITES:
            if absent(step, name):
                continue
            if rebuilt:
                old, halves[name] = halves[name], type(halves[name])(site(name, server.context.task), halves[name].hyper, SITES)
                halves[name].restore(old.state())
            replies[name] = halves[name].perform(step.phase, step.round, server.outgoing(step, name))
        log.append((step, copy_state(server.model), replies))
        server.accept(step, replies)
    return log


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def close(first, second):
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-5, atol=1e-6)
