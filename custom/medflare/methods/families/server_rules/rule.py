"""What the rules share: weights by models or metrics, and a change of the mean model."""

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from medflare.core.numbers import fractions
from medflare.core.states import States, gram
from medflare.methods import (
    FedAvgServerHyper,
    Message,
    StateDict,
    TaskConfig,
    WeightedMean,
    param,
    states_of,
    strict_dataclass,
)
from medflare.methods.aggregation import Models, capped
from medflare.networks.catalogue import meta_network

Weights: TypeAlias = dict[str, float]


@strict_dataclass
class UniformHyper(FedAvgServerHyper):
    """Rules that start from equal weights."""

    weighting: Literal["samples", "uniform"] = param(
        "uniform", "weights that the rule changes: n_k/n or 1/K", symbol="p_k"
    )


class ReweightedMean(WeightedMean):
    """The weighted mean with the weights of `weigh`, changed by `server_step`.

    It is FedAvg's mean if there is no previous model (local parts, the first round of FLARE's own
    workflows). The weights are FedAvg's if `weigh` gives 0 for all sites, or for so many that the
    others would have more than `max_client_weight`.

    Attributes:
        trained: names of the trained entries; None without a task: all floating ones.
        record: numbers of earlier rounds; JSON.
    """

    def __init__(self, hyper: Any):
        super().__init__(hyper)
        self.trained: set[str] | None = None
        self.record: dict[str, Any] = {}

    def prepare(self, task: TaskConfig, rounds: int) -> None:
        super().prepare(task, rounds)
        # An entry in two places of the network has two names in its state.
        parameters = meta_network(task).named_parameters(remove_duplicate=False)
        self.trained = {name for name, parameter in parameters if parameter.requires_grad}

    def trained_part(self, state: StateDict) -> StateDict:
        """The trained entries of a state."""
        part = {}
        for name, tensor in state.items():
            if tensor.is_floating_point() and (self.trained is None or name in self.trained):
                part[name] = tensor
        return part

    def trained_parts(self, models: Models) -> States:
        return {site: self.trained_part(model.state) for site, model in models.items()}

    def weigh(self, models: Models, round: int, previous: StateDict) -> Weights:
        """Site -> its weight, up to a common factor; arguments as of `shared`."""
        return self.shares(models)

    def server_step(self, mean: StateDict, models: Models, previous: StateDict) -> StateDict:
        """The trained entries of the next model; `mean` has those of the mean."""
        return mean

    def shared(self, models: Models, round: int, previous: StateDict | None = None) -> StateDict:
        weights = self.shares(models)
        if previous is not None:
            weighed = self.weigh(models, round, previous)
            if any(weighed.values()):
                weights = self._limited(weighed) or weights
        self.weights = fractions(weights)
        mean = self.combined(states_of(models), weights, previous)
        if previous is None:
            return mean
        return {**mean, **self.server_step(self.trained_part(mean), models, previous)}

    def _limited(self, weights: Weights) -> Weights:
        """The weights, the largest lowered to `max_client_weight`; empty if that leaves none."""
        normalized = fractions(weights)
        most = self.max_client_weight
        if most is None or max(normalized.values()) <= most:
            return weights
        limited = capped(normalized, most)
        return limited if any(limited.values()) else {}

    def pack(self, message: Message) -> None:
        message.meta["rule"] = self.record

    def unpack(self, message: Message) -> None:
        self.record = message.meta.pop("rule", {})


def inner_products(
    states: Iterable[StateDict], origin: StateDict, names: Iterable[str] | None = None
) -> Tensor:
    """(K, K) inner products <w_j - w, w_k - w> in float64, over the entries `names` (None: those of
    the first state).
    """
    ordered = list(states)
    if names is None:
        names = ordered[0]
    total = torch.zeros(len(ordered), len(ordered), dtype=torch.float64)
    for name in names:
        total += gram([state[name] for state in ordered], origin[name])
    return total
