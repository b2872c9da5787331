"""A federation of three sites with a few small generated images, driven without an engine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from medflare.core.manifest import violation
from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state
from medflare.core.store import StateStore
from medflare.methods.base import Plan, ServerContext, ServerHalf, SiteHalf
from medflare.methods.hyper import build_hyper
from medflare.tasks.config import TaskConfig, load_task
from medflare.tasks.data import SiteData, Split
from medflare.tasks.site import Site

SEED = 11


class Squares:
    """Bright squares on noise; every site has its own background. Classification: dark or bright."""

    sites = ("A", "B", "C")
    outside = ("O",)
    segmentation = load_task(
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
    classification = load_task(
        {
            **segmentation.to_dict(),
            "name": "bright",
            "kind": "classification",
            "target": "multiclass",
            "labels": ["dark", "bright"],
            "network": {"name": "small_cnn", "channels": [4, 8]},
            "loss": {"name": "ce"},
            "metric": "accuracy",
        }
    )

    def task(self, kind: str = "segmentation", **changes: Any) -> TaskConfig:
        """ "segmentation" or "classification" with some settings changed."""
        return load_task({**getattr(self, kind).to_dict(), **changes})

    def split(self, task: TaskConfig, count: int, seed: int, shift: float) -> Split:
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

    def site(self, name: str = "A", task: TaskConfig | None = None, counts: tuple[int, int, int] = (12, 4, 5)) -> Site:
        """A site with so many training, validation and test images."""
        place, task = "ABCO".index(name), task or self.segmentation
        parts = (self.split(task, count, 100 * place + i, 0.5 * place) for i, count in enumerate(counts))
        return Site(name, task, SiteData(*parts), SEED)

    def start(self, task: TaskConfig | None = None) -> StateDict:
        """The initial global model."""
        return copy_state(self.site("A", task).network().state_dict())

    def half(
        self, cls: type[SiteHalf], name: str = "A", task: TaskConfig | None = None, counts: tuple[int, int, int] = (12, 4, 5), **hyper: Any
    ) -> Any:
        return cls(self.site(name, task, counts), build_hyper(cls.Hyper, hyper), self.sites)

    def halves(self, cls: type[SiteHalf], task: TaskConfig | None = None, **hyper: Any) -> dict[str, Any]:
        return {name: self.half(cls, name, task, **hyper) for name in self.sites}

    def server(self, cls: type[ServerHalf], task: TaskConfig | None = None, rounds: int = 3, **hyper: Any) -> Any:
        return cls(ServerContext(task or self.segmentation, SEED, rounds, self.sites, self.outside), build_hyper(cls.Hyper, hyper))

    def run(self, server: Any, halves: dict[str, Any], store: Path | None = None) -> StateDict:
        """The whole schedule; returns the global model. With `store` every task runs in a half made anew from what lies on disk."""
        task = server.context.task
        for step in server.steps():
            replies = {}
            for name, half in halves.items():
                if store is not None:
                    kept = StateStore(store / name)
                    kept.save("half", half.state())
                    halves[name] = type(half)(self.site(name, task), half.hyper, self.sites)
                    halves[name].restore(kept.load("half"))
                replies[name] = halves[name].perform(step.phase, step.round, server.outgoing(step, name))
                assert violation(replies[name], half.outbound(step.phase, Plan(task, self.sites, half.hyper))) is None
            server.accept(step, replies)
        return server.model

    def trained(
        self, cls: type[SiteHalf], task: TaskConfig | None = None, rounds: int = 1, counts: tuple[int, int, int] = (12, 4, 5), **hyper: Any
    ) -> tuple[StateDict, Mapping[str, Any]]:
        """One site alone, every round from the initial model: its last local model and facts."""
        half, start = self.half(cls, "A", task, counts, **hyper), self.start(task)
        for round in range(rounds):
            reply = half.perform("train", round, Message({"model": copy_state(start)}))
        return reply.states["model"], reply.facts

    @staticmethod
    def equal(first: StateDict, second: StateDict) -> bool:
        return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="session")
def squares() -> Squares:
    return Squares()
