"""A server algorithm's formula, apart from its schedule: it makes the next global model, or the
next one of each site, from the sites' models.

The same object is called by a server algorithm on the replies of a round, and by FLARE's aggregator
on the models of FLARE's workflows.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from medflare.core.errors import ConfigError, UpdateError
from medflare.core.message import Message
from medflare.core.specs import TensorSpec
from medflare.core.states import StateDict, States, weighted_mean
from medflare.methods.parts.measured import N_SAMPLES
from medflare.methods.parts.robust import RobustLimits, combined
from medflare.tasks.config import TaskConfig

V = TypeVar("V")


@dataclass(frozen=True)
class SiteModel:
    """One site's part in an aggregation: its model, its number n_k of training samples, and the
    metadata of its reply.
    """

    state: StateDict
    samples: float = 1.0
    meta: Mapping[str, Any] = field(default_factory=dict)


Models: TypeAlias = Mapping[str, SiteModel]  # by site


def states_of(models: Models) -> States:
    return {site: model.state for site, model in models.items()}


def plain_mean(states: States) -> StateDict:
    """(1/K) Σ_k w_k, see `weighted_mean`."""
    return weighted_mean(states, dict.fromkeys(states, 1.0))


def site_models(replies: Mapping[str, Message], entry: TensorSpec) -> dict[str, SiteModel]:
    """Site -> an entry of its reply, for example `MODEL`, with its samples and metadata.

    Raises:
        UpdateError: a reply without its number of samples.
    """
    models = {}
    for site, reply in replies.items():
        if N_SAMPLES not in reply:
            raise UpdateError(
                "a reply without the item 'n_samples' cannot be weighted by samples; "
                "use weighting=uniform"
            )
        models[site] = SiteModel(reply[entry], float(reply[N_SAMPLES]), reply.meta)
    return models


def capped(samples: Mapping[str, float], most: float) -> dict[str, float]:
    """Counts, the largest lowered so that no site has more than the fraction `most` of their sum.

    The maximum client weight limits three things: the samples of replies (`Federation._step`), the
    images of enrolled sites (`Enrolment._weigh`), with which updates are compared and class totals
    are added, and the weights of a rule (`ReweightedMean`).

    Args:
        samples: site -> training images, none of them 0.
        most: if it is below 1/K, which not all sites can meet, all get the smallest count.

    Examples:
        >>> capped({"A": 98.0, "B": 1.0, "C": 1.0}, 0.5)
        {'A': 2.0, 'B': 1.0, 'C': 1.0}
        >>> capped({"A": 100.0, "B": 100.0, "C": 1.0}, 0.25)
        {'A': 1.0, 'B': 1.0, 'C': 1.0}
    """
    if most * len(samples) <= 1:
        return dict.fromkeys(samples, min(samples.values(), default=0.0))
    rest = float(sum(samples.values()))
    limit = most * rest
    for lowered, count in enumerate(sorted(samples.values(), reverse=True)):
        limit = most * rest / (1 - lowered * most)  # the limit, if so many sites are at it
        if count <= limit:
            break
        rest -= count
    return {site: min(count, limit) for site, count in samples.items()}


class Aggregation(ABC, Generic[V]):
    """The formula of a server algorithm, whose hyper-parameters it takes.

    Attributes:
        rounds: of the federation, for formulas with a schedule; None if unknown.
        weights: site -> its weight in the last call, for the record; may stay empty.
        max_client_weight: of the federation (`federation.settings.Rules`); None: no maximum.
    """

    def __init__(self, hyper: V):
        self.hyper = hyper
        self.rounds: int | None = None
        self.weights: dict[str, float] = {}
        self.max_client_weight: float | None = None

    def prepare(self, task: TaskConfig, rounds: int) -> None:
        """Gives task and rounds to the formula; not called under FLARE's own workflows."""
        self.rounds = rounds

    @abstractmethod
    def shared(self, models: Models, round: int, previous: StateDict | None = None) -> StateDict:
        """The next model for all sites.

        Args:
            models: site -> its model, in sorted order.
            round: 0-based.
            previous: the model that the round started from, if there is one.
        """

    def personal(self, models: Models, round: int) -> dict[str, StateDict]:
        """Site -> the next model for that site alone; empty if all sites get the shared one."""
        return {}

    def pack(self, message: Message) -> None:
        """Adds the formula's state of earlier rounds to the algorithm's stored message."""

    def unpack(self, message: Message) -> None:
        """Takes what `pack` added out of the message, and continues from it."""


class NoAggregation(Aggregation):
    """The formula of a server algorithm that averages no models."""

    def shared(self, models: Models, round: int, previous: StateDict | None = None) -> StateDict:
        raise ConfigError(
            "the method's server algorithm averages no models; run it with its own server algorithm"
        )


class WeightedMean(Aggregation):
    """w <- sum_k p_k w_k with p_k = n_k / n, or 1 / K if `hyper.weighting` is "uniform" (McMahan et
    al. 2017, Alg. 1).

    If `hyper.rule` is not "mean", a robust mean takes its place (`parts.robust`).
    """

    def shared(self, models: Models, round: int, previous: StateDict | None = None) -> StateDict:
        return self.combined(states_of(models), self.shares(models), previous)

    def combined(
        self, states: States, shares: Mapping[str, float], origin: StateDict | None = None
    ) -> StateDict:
        """The mean by `hyper.rule`, which sets `weights`; arguments as of
        `parts.robust.combined`.
        """
        # Methods of other distributions may have no rule.
        rule = getattr(self.hyper, "rule", "mean")
        if rule == "mean":
            return weighted_mean(states, shares)
        limits = self.hyper if isinstance(self.hyper, RobustLimits) else RobustLimits()
        model, self.weights = combined(states, shares, rule, limits, origin)
        return model

    def shares(self, models: Models) -> dict[str, float]:
        """Site -> p_k, up to a common factor."""
        if self.hyper.weighting == "uniform":
            return dict.fromkeys(models, 1.0)
        return {site: model.samples for site, model in models.items()}
