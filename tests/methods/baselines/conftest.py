"""A federation that no single model can serve."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from medflare.data.loading import SiteData, Split
from medflare.inference.deployed import build
from medflare.training.site import Site

Change = Callable[[Split], Split]


def opposite(split: Split) -> Split:
    """A binary classification with inverted labels."""
    return replace(split, targets=1 - split.targets)


@pytest.fixture
def torn(squares: ModuleType) -> Callable[..., dict[str, float]]:
    """(site, server, task, rounds, change, hyper-parameters) -> site -> test metric of its deployed model.

    Sites A and B have the same images and targets, except that `change` is applied to B's; by default its labels are inverted.
    """

    def federation(
        site_class: Any, server_class: Any, task: Any, rounds: int = 4, change: Change = opposite, **hyper: Any
    ) -> dict[str, float]:
        data = squares.site("A", task, (24, 8, 8)).data
        other = SiteData(change(data.train), change(data.validation), change(data.test))
        plan = squares.plan_of(site_class, server_class, task, ("A", "B"), **hyper)
        algorithms = {name: site_class(Site(name, task, own, squares.SEED), plan) for name, own in (("A", data), ("B", other))}
        played = squares.play(squares.server(server_class, rounds=rounds, outside=(), algorithms=algorithms), algorithms)
        found = {}
        for name, algorithm in played.algorithms.items():
            used = algorithm.finalize(played.server.configure_final(name))["deployed"]
            found[name] = algorithm.site.score(build(task, used), "test").values[task.metric]
        return found

    return federation
