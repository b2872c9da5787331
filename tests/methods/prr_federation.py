"""Sites with a few generated images of every kind of task, and PRR's schedule without an engine."""

import torch

from medflare.methods.base import Plan, ServerContext
from medflare.methods.hyper import build_hyper
from medflare.methods.prr import PRRServer, PRRSite
from medflare.methods.screening import screen
from medflare.tasks.config import load_task
from medflare.tasks.data import SiteData, Split
from medflare.tasks.site import Site

SITES = ("A", "B", "C")
FEDBN = {"pfa": False, "det": False, "cpa": "off"}
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
        "optimizer": {"name": "adam", "lr": 0.01},
        "batch_size": 4,
        "local_epochs": 1,
        "metric": "dice",
    }
)


def like(task=SEGMENTATION, **changes):
    return load_task({**task.to_dict(), **changes})


CLASSIFICATION = like(
    name="bright",
    kind="classification",
    target="multiclass",
    labels=["dark", "grey", "bright"],
    network={"name": "small_cnn", "channels": [4, 8]},
    loss={"name": "ce"},
    metric="accuracy",
)
VGG = like(CLASSIFICATION, size=[32, 32], network={"name": "vgg16_slim", "dimension": 8}, batch_size=8)
MULTILABEL = like(target="multilabel", labels=["square", "corner"])
MULTICLASS = like(target="multiclass", labels=["background", "square", "corner"])
WITHOUT_BATCH_NORM = like(network={"name": "unet", "channels": [4, 8], "norm": "instance"})
BINARY_CLASSIFICATION = like(CLASSIFICATION, target="binary", labels=["bright"])


def split(task, count, seed, shift, missing=None):
    generator = torch.Generator().manual_seed(seed)
    height, width = task.size
    images = shift + 0.2 * torch.randn(count, 1, height, width, generator=generator)
    masks = torch.zeros(count, height, width, dtype=torch.long)
    for image, mask, (top, left) in zip(images, masks, torch.randint(1, 8, (count, 2), generator=generator).tolist(), strict=True):
        image[0, top : top + 7, left : left + 7] += 1.0
        mask[top : top + 7, left : left + 7] = 1
        if task.target != "binary":
            mask[top : top + 2, left : left + 2] = 2
    targets = torch.stack([masks > 0, masks == 2], dim=1).float() if task.target == "multilabel" else masks
    if task.kind == "classification":
        targets = torch.arange(count) % task.outputs if task.target == "multiclass" else torch.arange(count) % 2
        if missing is not None:
            targets[targets == missing] = 0
        images = images + targets.view(-1, 1, 1, 1)
    names = tuple(f"{seed}-{i}" for i in range(count))
    return Split(images, targets, names, names)


def site(name, task=SEGMENTATION, counts=(8, 4, 4), seed=11, missing=None):
    place = "ABCO".index(name)
    parts = [split(task, count, 100 * place + i, 0.5 * place, missing) for i, count in enumerate(counts)]
    return Site(name, task, SiteData(*parts), seed)


def enrolled(data):
    return {"n": data.n, "class_counts": data.class_counts().tolist()}


def halves_of(task=SEGMENTATION, cls=PRRSite, sites=SITES, missing=None, counts=(8, 4, 4), **hyper):
    return {name: cls(site(name, task, counts, missing=missing), build_hyper(cls.Hyper, hyper), sites) for name in sites}


def server_of(halves, rounds=2, outside=(), cls=PRRServer, **hyper):
    first = next(iter(halves.values()))
    counts = {name: enrolled(half.site) for name, half in halves.items()}
    context = ServerContext(first.site.task, 11, rounds, tuple(halves), outside, counts)
    return cls(context, build_hyper(cls.Hyper, hyper))


def run(server, halves, absent=lambda step, name: False, rebuilt=False):
    """The schedule without an engine, screened as in one; returns every step's outgoing messages and replies."""
    log = []
    for step in server.steps():
        outgoing = {name: server.outgoing(step, name) for name in halves if not absent(step, name)}
        replies = {}
        for name, message in outgoing.items():
            if rebuilt:
                old, halves[name] = halves[name], type(halves[name])(halves[name].site, halves[name].hyper, halves[name].sites)
                halves[name].restore(old.state())
            replies[name] = halves[name].perform(step.phase, step.round, message)
        half = next(iter(halves.values()))
        manifest = type(half).outbound(step.phase, Plan(half.site.task, half.sites, half.hyper))
        screened = screen(replies, manifest, outgoing, {name: half.site.n for name, half in halves.items()})
        assert not screened.rejected
        server.accept(step, screened.accepted)
        log.append((step, outgoing, replies))
        if rebuilt:
            server, old = type(server)(server.context, server.hyper), server
            server.restore(old.state())
    return log, server


def federation(task=SEGMENTATION, rounds=2, outside=(), absent=lambda step, name: False, rebuilt=False, sites=SITES, **hyper):
    halves = halves_of(task, sites=sites, **hyper)
    log, server = run(server_of(halves, rounds, outside, **hyper), halves, absent, rebuilt)
    return log, server, halves


def assert_equal(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def assert_close(first, second):
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def differ(first, second):
    return any(not torch.equal(first[name], second[name]) for name in first)
