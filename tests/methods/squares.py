"""A federation of three sites with small generated images, driven without an engine.

Bright squares on noise; every site has its own background. Segmentation finds the square, classification says how bright all is.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from helpers import small_tasks
from helpers.small_tasks import small_task
from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state
from medflare.core.store import StateStore
from medflare.core.text import Json
from medflare.data.loading import SiteData, Split
from medflare.federation.participant import Participant
from medflare.federation.protocol import message_problem, request_problem
from medflare.federation.settings import ENROL
from medflare.federation.update_validation.drift import DriftMemory
from medflare.federation.update_validation.updates import validate_replies
from medflare.methods.base import Plan, ServerAlgorithm, ServerContext, SiteAlgorithm, Step
from medflare.methods.catalogue import get_method, method_names
from medflare.methods.fedavg import FedAvgServer, FedAvgSite
from medflare.methods.method import Method
from medflare.tasks.config import TaskConfig
from medflare.training.site import Site

SEED = 11
SITES = ("A", "B", "C")
OUTSIDE = ("O",)
COUNTS = (12, 4, 5)  # training, validation and test images of a site


def task(kind: str = "segmentation", **changes: Any) -> TaskConfig:
    """ "segmentation" or "classification" with some settings changed."""
    return small_task(kind, **{"batch_size": 6, **changes})


SEGMENTATION = task()
CLASSIFICATION = task("classification")
MULTILABEL = task(target="multilabel", labels=["square", "corner"])
MULTICLASS = task(target="multiclass", labels=["background", "square", "corner"])
WITHOUT_BATCH_NORM = task(network=small_tasks.INSTANCE_UNET)
CLASSIFICATION_WITH_BATCH_NORM = task(
    "classification", network={"name": "small_cnn", "channels": [4, 8], "batch_norm": True}
)
BINARY_CLASSIFICATION = task("classification", target="binary", labels=["bright"])
VGG = task(
    "classification", size=[32, 32], network={"name": "vgg16_slim", "dimension": 8}, batch_size=8
)


# -- sites -----------------------------------------------------------------------------------------------------------------


def split(
    task: TaskConfig, count: int, seed: int, shift: float, missing: int | None = None
) -> Split:
    """Images with their targets; those of the class `missing` are of class 0 instead."""
    generator = torch.Generator().manual_seed(seed)
    height, width = task.size
    images = shift + 0.2 * torch.randn(count, 1, height, width, generator=generator)
    masks = torch.zeros(count, height, width, dtype=torch.long)
    for image, mask, (top, left) in zip(
        images, masks, torch.randint(1, 8, (count, 2), generator=generator).tolist(), strict=True
    ):
        image[0, top : top + 7, left : left + 7] += 1.0
        mask[top : top + 7, left : left + 7] = 1
        if task.target != "binary":
            mask[top : top + 2, left : left + 2] = 2
    targets = (
        torch.stack([masks > 0, masks == 2], dim=1).float()
        if task.target == "multilabel"
        else masks
    )
    if task.kind == "classification":
        targets = torch.arange(count) % (2 if task.target == "binary" else task.outputs)
        targets[targets == missing] = 0
        images = images + targets.view(-1, 1, 1, 1)
    names = tuple(f"{seed}-{i}" for i in range(count))
    return Split(images, targets, names, names)


def site(
    name: str = "A",
    task: TaskConfig = SEGMENTATION,
    counts: tuple[int, int, int] = COUNTS,
    missing: int | None = None,
) -> Site:
    place = "ABCO".index(name)
    train, validation, test = (
        split(task, count, 100 * place + i, 0.5 * place, missing) for i, count in enumerate(counts)
    )
    return Site(name, task, SiteData(train, validation, test), SEED)


def enrolled(site: Site) -> dict[str, Any]:
    """What a site tells about its images when it enrols."""
    return {"n": site.n, "class_counts": site.class_counts().tolist()}


def start(task: TaskConfig = SEGMENTATION) -> StateDict:
    """The initial global model."""
    return copy_state(site("A", task).network().state_dict())


# -- a method's algorithms -----------------------------------------------------------------------------------------------------


@cache
def partner(cls: type[Any]) -> type[Any]:
    """The other algorithm of an algorithm's method; FedAvg's if it has none."""
    for method in sorted(
        map(get_method, method_names()), key=lambda method: method.name != "fedavg"
    ):
        pair = (method.site_class, method.server_class)
        if cls in pair:
            return pair[1 - pair.index(cls)]
    return FedAvgServer if issubclass(cls, SiteAlgorithm) else FedAvgSite


def plan_of(
    site_class: type[SiteAlgorithm[Any]],
    server_class: type[ServerAlgorithm[Any]],
    task: TaskConfig = SEGMENTATION,
    sites: tuple[str, ...] = SITES,
    **hyper: Any,
) -> Plan[Any, Any]:
    """What a pair of algorithms knows, checked as their method checks it; hyper-parameters of either algorithm go by name."""
    pair = Method(
        f"{site_class.__name__}+{server_class.__name__}", "a pair", "none", site_class, server_class
    )
    pair.check(hyper, task)
    return pair.plan(task, sites, hyper)


def algorithm(
    cls: type[SiteAlgorithm[Any]],
    name: str = "A",
    task: TaskConfig = SEGMENTATION,
    counts: tuple[int, int, int] = COUNTS,
    missing: int | None = None,
    sites: tuple[str, ...] = SITES,
    server_class: type[ServerAlgorithm[Any]] | None = None,
    **hyper: Any,
) -> Any:
    """A site algorithm that plans with its own server algorithm, or with another one."""
    return cls(
        site(name, task, counts, missing),
        plan_of(cls, server_class or partner(cls), task, sites, **hyper),
    )


def algorithms(
    cls: type[SiteAlgorithm[Any]],
    task: TaskConfig = SEGMENTATION,
    sites: tuple[str, ...] = SITES,
    counts: Mapping[str, tuple[int, int, int]] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """site -> its algorithm; numbers of images by site where they are not `COUNTS`, other options as of `algorithm`."""
    return {
        name: algorithm(cls, name, task, (counts or {}).get(name, COUNTS), sites=sites, **options)
        for name in sites
    }


def server(
    cls: type[ServerAlgorithm[Any]],
    task: TaskConfig = SEGMENTATION,
    rounds: int = 3,
    outside: tuple[str, ...] = OUTSIDE,
    algorithms: Mapping[str, SiteAlgorithm[Any]] | None = None,
    **hyper: Any,
) -> Any:
    """A server algorithm for sites with its own site algorithm, or for `algorithms`, with their enrollment and hyper-parameters."""
    if algorithms is None:
        site_class = partner(cls)
        plan = plan_of(site_class, cls, task, **hyper)
        return cls(ServerContext(plan, SEED, rounds, outside, phases=site_class.phases))
    one = next(iter(algorithms.values()))
    plan = plan_of(type(one), cls, one.site.task, tuple(algorithms), **hyper)
    plan = replace(plan, site_hyper=one.plan.site_hyper)
    if not hyper and isinstance(one.plan.server_hyper, cls.Hyper):
        plan = replace(plan, server_hyper=one.plan.server_hyper)
    known = {name: enrolled(algorithm.site) for name, algorithm in algorithms.items()}
    return cls(ServerContext(plan, SEED, rounds, outside, phases=one.phases, site_counts=known))


# -- a site of a federation ------------------------------------------------------------------------


def participant(
    site: Site, method: str | Method = "fedavg", hyper: Json | None = None, **settings: Any
) -> Participant:
    """A site with the settings of its kit."""
    if isinstance(method, str):
        method = get_method(method)
    return Participant(site.name, lambda role: site, method, hyper or {}, **settings)


def enrol(
    asked: Participant, *sites: str, role: str = "inside", round: int = 0, **items: Any
) -> Message:
    """The reply to an invitation, by default with site B."""
    invitation = {"role": role, "sites": list(sites or ("A", "B")), **items}
    return asked.reply(ENROL, round, Message({}, invitation))


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
    algorithms: dict[str, Any]

    @property
    def model(self) -> StateDict:
        """The global model."""
        return self.server.model


def play(
    server: Any,
    algorithms: dict[str, Any],
    absent: Callable[[Step, str], bool] | None = None,
    store: Path | None = None,
) -> Played:
    """The whole schedule, with an engine's update validation; no update may be rejected.

    Args:
        algorithms: site -> its algorithm.
        absent: whether a site misses a step; None: none does.
        store: a folder, to rebuild the algorithms from disk before every task.
    """
    log = []
    for step in server.steps():
        outgoing = {}
        for name in algorithms:
            if absent is None or not absent(step, name):
                outgoing[name] = server.configure(step, name)
        replies = {}
        for name, message in outgoing.items():
            if store is not None:
                old = algorithms[name]
                algorithms[name] = _restored(
                    type(old)(old.site, old.plan), old.memory, store / name
                )
            algorithm = algorithms[name]
            assert request_problem(algorithm.phase(step.phase), algorithm.plan, message) is None, (
                step,
                name,
            )
            # Refuses to send what is not declared.
            replies[name] = algorithm.perform(step.phase, step.round, message)
            assert message_problem(replies[name], name) is None, (step, name)
        algorithm = next(iter(algorithms.values()))
        screened = validate_replies(
            server.context, step, replies, outgoing, DriftMemory(0), strict=False
        )
        assert not screened.rejected, screened.rejected
        server.aggregate(step, screened.accepted)
        if store is not None:
            server = _restored(type(server)(server.context), server.state(), store / "server")
        log.append(Turn(step, outgoing, replies))
    return Played(log, server, algorithms)


def _restored(fresh: Any, memory: Message, folder: Path) -> Any:
    """`fresh` with a memory, by way of the disk."""
    kept = StateStore(folder)
    kept.save("algorithm", memory)
    fresh.restore(kept.load("algorithm"))
    return fresh


def federation(
    site_class: type[SiteAlgorithm[Any]],
    server_class: type[ServerAlgorithm[Any]],
    task: TaskConfig = SEGMENTATION,
    rounds: int = 2,
    sites: tuple[str, ...] = SITES,
    outside: tuple[str, ...] = (),
    absent: Callable[[Step, str], bool] | None = None,
    store: Path | None = None,
    **hyper: Any,
) -> Played:
    """A pair of algorithms with one plan, from the first step to the last one."""
    members = algorithms(site_class, task, sites=sites, server_class=server_class, **hyper)
    return play(
        server(server_class, rounds=rounds, outside=outside, algorithms=members),
        members,
        absent,
        store,
    )


def run(name: str, *arguments: Any, **options: Any) -> Played:
    """A method by name; arguments as of `federation`."""
    method = get_method(name)
    return federation(method.site_class, method.server_class, *arguments, **options)


def trained(
    cls: type[SiteAlgorithm[Any]],
    task: TaskConfig = SEGMENTATION,
    rounds: int = 1,
    counts: tuple[int, int, int] = COUNTS,
    **hyper: Any,
) -> tuple[StateDict, Mapping[str, Any]]:
    """One site alone, every round from the initial model: its last local model and meta."""
    alone = algorithm(cls, "A", task, counts, **hyper)
    first = start(task)
    for round in range(rounds):
        reply = alone.perform("train", round, Message({"model": copy_state(first)}))
    return reply.states["model"], reply.meta


# -- comparisons -----------------------------------------------------------------------------------------------------------


def one_by_one(**options: Any) -> list[dict[str, Any]]:
    """Every option alone, with each of its values if it has a tuple of them."""
    changes = []
    for name, values in options.items():
        for value in values if isinstance(values, tuple) else (values,):
            changes.append({name: value})
    return changes


def equal(first: StateDict, second: StateDict) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def assert_close(first: StateDict, second: StateDict) -> None:
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(
            first[name], second[name], rtol=1e-5, atol=1e-6, msg=f"{name}: {{}}".format
        )
