"""A server algorithm's formula, apart from its schedule: from the sites' models to the next global one, or to one for each site.

The same object works in both worlds: a server algorithm calls it on the replies of a round, and the FLARE aggregator that holds it calls
it on the models of FLARE's own workflows.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from medflare.core.errors import ConfigError, UpdateError
from medflare.core.message import Message
from medflare.core.states import StateDict, weighted_mean
from medflare.methods.parts.robust import RobustLimits, combined
from medflare.tasks.config import TaskConfig

V = TypeVar("V")


@dataclass(frozen=True)
class SiteModel:
    """One site's part in an aggregation.

    Attributes:
        samples: its number of training samples n_k.
        meta: what came with it, for example a score.
    """

    state: StateDict
    samples: float = 1.0
    meta: Mapping[str, Any] = field(default_factory=dict)


def states_of(models: Mapping[str, SiteModel]) -> dict[str, StateDict]:
    """site -> state."""
    return {site: model.state for site, model in models.items()}


def samples_of(models: Mapping[str, SiteModel]) -> dict[str, float]:
    """site -> number of samples."""
    return {site: model.samples for site, model in models.items()}


def site_models(replies: Mapping[str, Message], entry: str) -> dict[str, SiteModel]:
    """site -> what an aggregation needs of its reply.

    Args:
        replies: site -> reply to a step that trains.
        entry: the state to aggregate, for example "model".

    Raises:
        UpdateError: a reply without its number of samples.
    """
    states = {site: reply.states[entry] for site, reply in replies.items()}
    try:
        return {site: SiteModel(states[site], float(reply.meta["n_samples"]), reply.meta) for site, reply in replies.items()}
    except KeyError as error:
        raise UpdateError("a reply without the item 'n_samples' cannot be weighted by samples; use weighting=uniform") from error


class Aggregation(ABC, Generic[V]):
    """The formula of a server algorithm.

    Attributes:
        hyper: the server algorithm's hyper-parameters.
        rounds: of the federation, for formulas with a schedule; None where nobody has said.
        weights: site -> its weight in the latest call, for the record; empty where the formula has none to tell.
    """

    def __init__(self, hyper: V):
        self.hyper = hyper
        self.rounds: int | None = None
        self.weights: dict[str, float] = {}

    def prepare(self, task: TaskConfig, rounds: int) -> None:
        """Learn what only a federation of medflare's own can tell; FLARE's own workflows do without."""
        self.rounds = rounds

    @abstractmethod
    def shared(self, models: Mapping[str, SiteModel], round: int, previous: StateDict | None = None) -> StateDict:
        """The next model for everybody.

        Args:
            models: site -> its model, in sorted order.
            round: 0-based.
            previous: the model that the round started from, where there is one.
        """

    def own(self, models: Mapping[str, SiteModel], round: int) -> dict[str, StateDict]:
        """site -> the next model for that site alone; empty where all get the shared one."""
        return {}

    def pack(self, message: Message) -> None:
        """Add what the formula remembers of earlier rounds to a message that stores an algorithm."""

    def unpack(self, message: Message) -> None:
        """Take up what `pack` stored."""


class NoAggregation(Aggregation[Any]):
    """Of a server algorithm that averages no models."""

    def shared(self, models: Mapping[str, SiteModel], round: int, previous: StateDict | None = None) -> StateDict:
        """Nothing to average.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("the method's server algorithm averages no models; run it with its own server algorithm")


class WeightedMean(Aggregation[Any]):
    """w <- sum_k p_k w_k with p_k = n_k / n, or 1 / K where `hyper.weighting` is "uniform" (McMahan et al. 2017, Alg. 1).

    Where `hyper.rule` is not "mean", a robust mean takes its place (`parts.robust`).
    """

    def shared(self, models: Mapping[str, SiteModel], round: int, previous: StateDict | None = None) -> StateDict:
        """The mean of every entry by `hyper.rule`, with the weights of `shares`."""
        return self.combined(states_of(models), self.shares(models), previous)

    def combined(self, states: Mapping[str, StateDict], shares: Mapping[str, float], origin: StateDict | None = None) -> StateDict:
        """The mean by `hyper.rule`, whose weights are left in `weights`; a formula that weighs the sites itself gives its own as shares.

        Args:
            states: site -> state.
            shares: site -> weight, up to a common factor.
            origin: see `parts.robust.combined`.
        """
        rule = getattr(self.hyper, "rule", "mean")  # a method of another distribution may know no rules
        if rule == "mean":
            return weighted_mean(states, shares)
        limits = self.hyper if isinstance(self.hyper, RobustLimits) else RobustLimits()
        model, self.weights = combined(states, shares, rule, limits, origin)
        return model

    def shares(self, models: Mapping[str, SiteModel]) -> dict[str, float]:
        """site -> p_k, up to a common factor.

        Examples:
            >>> from types import SimpleNamespace
            >>> models = {"A": SiteModel({}, 30.0), "B": SiteModel({}, 10.0)}
            >>> [WeightedMean(SimpleNamespace(weighting=kind, rule="mean")).shares(models) for kind in ("samples", "uniform")]
            [{'A': 30.0, 'B': 10.0}, {'A': 1.0, 'B': 1.0}]
        """
        return dict.fromkeys(models, 1.0) if self.hyper.weighting == "uniform" else samples_of(models)
