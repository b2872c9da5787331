"""A federation of three sites with small generated images, driven without an engine.

Bright squares on noise; every site has its own background. Segmentation finds the square, classification says how bright all is.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from medflare.core.hyper import build_hyper
from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state
from medflare.core.store import StateStore
from medflare.data.splits import SiteData, Split
from medflare.federation.screening import screen
from medflare.methods.base import Plan, ServerContext, ServerHalf, SiteHalf, Step
from medflare.sites.site import Site
from medflare.tasks.config import TaskConfig, load_task

SEED = 11
SITES = ("A", "B", "C")
OUTSIDE = ("O",)
COUNTS = (12, 4, 5)  # training, validation and test images of a site

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
        "batch_size": 6,
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
        "labels": ["dark", "grey", "bright"],
        "network": {"name": "small_cnn", "channels": [4, 8]},
        "loss": {"name": "ce"},
        "metric": "accuracy",
    }
)


def task(kind: str = "segmentation", **changes: Any) -> TaskConfig:
    """ "segmentation" or "classification" with some settings changed."""
    return load_task({**{"segmentation": SEGMENTATION, "classification": CLASSIFICATION}[kind].to_dict(), **changes})


MULTILABEL = task(target="multilabel", labels=["square", "corner"])
MULTICLASS = task(target="multiclass", labels=["background", "square", "corner"])
WITHOUT_BATCH_NORM = task(network={"name": "unet", "channels": [4, 8], "norm": "instance"})
BINARY_CLASSIFICATION = task("classification", target="binary", labels=["bright"])
VGG = task("classification", size=[32, 32], network={"name": "vgg16_slim", "dimension": 8}, batch_size=8)


# -- sites -----------------------------------------------------------------------------------------------------------------


def split(task: TaskConfig, count: int, seed: int, shift: float, missing: int | None = None) -> Split:
    """Images with their targets; those of the class `missing` are of class 0 instead."""
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
        targets = torch.arange(count) % (2 if task.target == "binary" else task.outputs)
        targets[targets == missing] = 0
        images = images + targets.view(-1, 1, 1, 1)
    names = tuple(f"{seed}-{i}" for i in range(count))
    return Split(images, targets, names, names)


def site(name: str = "A", task: TaskConfig = SEGMENTATION, counts: tuple[int, int, int] = COUNTS, missing: int | None = None) -> Site:
    place = "ABCO".index(name)
    parts = (split(task, count, 100 * place + i, 0.5 * place, missing) for i, count in enumerate(counts))
    return Site(name, task, SiteData(*parts), SEED)


def enrolled(site: Site) -> dict[str, Any]:
    """What a site tells about its images when it enrols."""
    return {"n": site.n, "class_counts": site.class_counts().tolist()}


def start(task: TaskConfig = SEGMENTATION) -> StateDict:
    """The initial global model."""
    return copy_state(site("A", task).network().state_dict())


# -- a method's halves -----------------------------------------------------------------------------------------------------


def half(
    cls: type[SiteHalf],
    name: str = "A",
    task: TaskConfig = SEGMENTATION,
    counts: tuple[int, int, int] = COUNTS,
    missing: int | None = None,
    sites: tuple[str, ...] = SITES,
    **hyper: Any,
) -> Any:
    return cls(site(name, task, counts, missing), build_hyper(cls.Hyper, hyper), sites)


def halves(cls: type[SiteHalf], task: TaskConfig = SEGMENTATION, sites: tuple[str, ...] = SITES, **options: Any) -> dict[str, Any]:
    """site -> its half; options as of `half`."""
    return {name: half(cls, name, task, sites=sites, **options) for name in sites}


def server(
    cls: type[ServerHalf],
    task: TaskConfig = SEGMENTATION,
    rounds: int = 3,
    outside: tuple[str, ...] = OUTSIDE,
    halves: Mapping[str, SiteHalf] | None = None,
    **hyper: Any,
) -> Any:
    """A server half for the sites of the same task, or for those of `halves`, of which it knows what they told when they enrolled."""
    context = ServerContext(task, SEED, rounds, SITES, outside)
    if halves is not None:
        places = {name: half.site for name, half in halves.items()}
        known = {name: enrolled(place) for name, place in places.items()}
        context = ServerContext(next(iter(places.values())).task, SEED, rounds, tuple(halves), outside, known)
    return cls(context, build_hyper(cls.Hyper, hyper))


# -- the schedule ----------------------------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """A step with what the server sent and what came back, by site."""

    step: Step
    outgoing: dict[str, Message]
    replies: dict[str, Message]


class Played(NamedTuple):
    """A federation after its last step."""

    log: list[Turn]
    server: Any
    halves: dict[str, Any]

    @property
    def model(self) -> StateDict:
        """The global model."""
        return self.server.model


def nobody(step: Step, name: str) -> bool:
    """No site misses a step."""
    return False


def play(server: Any, halves: dict[str, Any], absent: Callable[[Step, str], bool] = nobody, store: Path | None = None) -> Played:
    """The whole schedule, with the screening of an engine; no update may be rejected.

    Args:
        halves: site -> its half; those of `store` take the place of those given.
        absent: whether a site misses a step.
        store: a folder, to have every task answered and accepted by halves made anew from what lies on disk.
    """
    log = []
    for step in server.steps():
        outgoing = {name: server.outgoing(step, name) for name in halves if not absent(step, name)}
        replies = {}
        for name, message in outgoing.items():
            if store is not None:
                old = halves[name]
                halves[name] = _restored(type(old)(old.site, old.hyper, old.sites), old, store / name)
            replies[name] = halves[name].perform(step.phase, step.round, message)
        half = next(iter(halves.values()))
        manifest = half.outbound(step.phase, Plan(half.site.task, half.sites, half.hyper))
        screened = screen(replies, manifest, outgoing, {name: half.site.n for name, half in halves.items()})
        assert not screened.rejected
        server.accept(step, screened.accepted)
        if store is not None:
            server = _restored(type(server)(server.context, server.hyper), server, store / "server")
        log.append(Turn(step, outgoing, replies))
    return Played(log, server, halves)


def _restored(fresh: Any, old: Any, folder: Path) -> Any:
    """`fresh` with what `old` remembers, by way of the disk."""
    kept = StateStore(folder)
    kept.save("half", old.state())
    fresh.restore(kept.load("half"))
    return fresh


def federation(
    site_class: type[SiteHalf],
    server_class: type[ServerHalf],
    task: TaskConfig = SEGMENTATION,
    rounds: int = 2,
    sites: tuple[str, ...] = SITES,
    outside: tuple[str, ...] = (),
    absent: Callable[[Step, str], bool] = nobody,
    store: Path | None = None,
    **hyper: Any,
) -> Played:
    """A method from its first step to its last one."""
    members = halves(site_class, task, sites=sites, **hyper)
    return play(server(server_class, rounds=rounds, outside=outside, halves=members, **hyper), members, absent, store)


def trained(
    cls: type[SiteHalf], task: TaskConfig = SEGMENTATION, rounds: int = 1, counts: tuple[int, int, int] = COUNTS, **hyper: Any
) -> tuple[StateDict, Mapping[str, Any]]:
    """One site alone, every round from the initial model: its last local model and facts."""
    alone, first = half(cls, "A", task, counts, **hyper), start(task)
    for round in range(rounds):
        reply = alone.perform("train", round, Message({"model": copy_state(first)}))
    return reply.states["model"], reply.facts


# -- comparisons -----------------------------------------------------------------------------------------------------------


def equal(first: StateDict, second: StateDict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def assert_close(first: StateDict, second: StateDict) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
