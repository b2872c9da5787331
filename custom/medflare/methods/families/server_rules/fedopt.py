"""Server optimizers: the mean update Δ of a round is a step's direction.

FedAvgM is Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution", 2019.
FedAdagrad, FedAdam and FedYogi are Reddi et al., "Adaptive Federated Optimization", ICLR 2021.
Their Alg. 2 differs from torch's Adam and Adagrad: it has no bias correction, v starts at τ², and
FedAdagrad has a first moment. Moments have the names of the weights, so that some weights can be
frozen at first. Only trained entries are stepped; statistics are averaged.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from medflare.methods import (
    FedAvgServer,
    FedAvgServerHyper,
    Message,
    StateDict,
    param,
    strict_dataclass,
)
from medflare.methods.families.server_rules.rule import Models, ReweightedMean
from medflare.methods.parts.tensors import widened

_MOMENTS = "server_moments"


@strict_dataclass
class FedAvgMHyper(FedAvgServerHyper):
    """Momentum."""

    eta: float = param(1.0, "learning rate of the server", symbol="η", low=0)
    beta: float = param(0.9, "momentum; 0 with η 1: FedAvg", symbol="β", low=0, high=1)


@strict_dataclass
class FedAdagradHyper(FedAvgServerHyper):
    """The settings of Alg. 2 with a sum of squares."""

    kind: ClassVar[str] = "adagrad"
    eta: float = param(
        0.01, "learning rate of the server; the paper tunes it by task", symbol="η", low=0
    )
    beta1: float = param(0.0, "decay of the first moment", symbol="β1", low=0, high=1)
    tau: float = param(1e-3, "adaptivity: smallest divisor", symbol="τ", low=1e-12)


@strict_dataclass
class FedAdamHyper(FedAdagradHyper):
    """The settings of Alg. 2 with a moving average of squares."""

    kind: ClassVar[str] = "adam"
    beta1: float = param(0.9, "decay of the first moment", symbol="β1", low=0, high=1)
    beta2: float = param(0.99, "decay of the second moment", symbol="β2", low=0, high=1)


@strict_dataclass
class FedYogiHyper(FedAdamHyper):
    """The settings of Alg. 2 with Yogi's second moment."""

    kind: ClassVar[str] = "yogi"


def second_moment(kind: str, v: Tensor, delta: Tensor, beta2: float = 0.0) -> Tensor:
    """v_t from v_{t-1} and Δ_t (Reddi et al. 2021, Alg. 2, FedAdagrad, FedYogi and FedAdam).

    adagrad: v + Δ²;  yogi: v - (1 - β2) Δ² sign(v - Δ²);  adam: β2 v + (1 - β2) Δ².
    """
    squares = delta.square()
    if kind == "adagrad":
        return v + squares
    if kind == "yogi":
        return v - (1 - beta2) * squares * torch.sign(v - squares)
    return beta2 * v + (1 - beta2) * squares


class MomentumMean(ReweightedMean):
    """FedAvgM: v <- β v + Δ, w <- w + η v, with Δ = mean - previous model.

    Attributes:
        moments: "m.weight" -> moment of a weight.
    """

    def __init__(self, hyper: Any):
        super().__init__(hyper)
        self.moments: StateDict = {}

    def moment(self, name: str, beta: float, update: Tensor) -> Tensor:
        """The moment β m + update, which is stored; m starts at 0."""
        if name in self.moments:
            update = beta * self.moments[name] + update
        self.moments[name] = update
        return update

    def direction(self, name: str, delta: Tensor) -> Tensor:
        """The step of a weight for a learning rate of 1."""
        return self.moment(f"m.{name}", self.hyper.beta, delta)

    def server_step(self, mean: StateDict, models: Models, previous: StateDict) -> StateDict:
        stepped = {}
        for name, tensor in mean.items():
            start = widened(previous[name])
            step = self.direction(name, widened(tensor) - start)
            stepped[name] = (start + self.hyper.eta * step).to(tensor.dtype)
        return stepped

    def pack(self, message: Message) -> None:
        message.states[_MOMENTS] = self.moments

    def unpack(self, message: Message) -> None:
        self.moments = message.states.pop(_MOMENTS, {})


class AdaptiveMean(MomentumMean):
    """Alg. 2: m <- β1 m + (1 - β1) Δ, v by `second_moment`, w <- w + η m / (√v + τ)."""

    def direction(self, name: str, delta: Tensor) -> Tensor:
        hyper = self.hyper
        m = self.moment(f"m.{name}", hyper.beta1, (1 - hyper.beta1) * delta)
        v = self.moments.get(f"v.{name}", torch.full_like(delta, hyper.tau**2))
        v = second_moment(hyper.kind, v, delta, getattr(hyper, "beta2", 0.0))
        self.moments[f"v.{name}"] = v
        return m / (v.sqrt() + hyper.tau)


class FedAvgMServer(FedAvgServer[FedAvgMHyper]):
    """FedAvg's server algorithm with momentum."""

    aggregation_class = MomentumMean


class FedAdagradServer(FedAvgServer[FedAdagradHyper]):
    """FedAvg's server algorithm with Adagrad."""

    aggregation_class = AdaptiveMean


class FedAdamServer(FedAvgServer[FedAdamHyper]):
    """FedAvg's server algorithm with Adam."""

    aggregation_class = AdaptiveMean


class FedYogiServer(FedAvgServer[FedYogiHyper]):
    """FedAvg's server algorithm with Yogi."""

    aggregation_class = AdaptiveMean
