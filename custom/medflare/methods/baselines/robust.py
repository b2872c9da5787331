"""Robust means for FedAvg-like federations (Yin, Chen, Ramchandran and Bartlett, ICML 2018): a few bad sites cannot move the model far.

    median:       w_j <- median of w_kj over the sites k                                     (Definition 1)
    trimmed mean: w_j <- mean of w_kj without the largest and smallest floor(beta K)          (Definition 2)

Both treat every coordinate alone and every site alike: sample counts do not enter, since a bad site could lie about its own.
The screening of updates comes first and catches what is plainly wrong; these means are for updates that look plausible and are not.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from medflare.core.errors import ConfigError
from medflare.core.hyper import param
from medflare.core.settings import STRICT
from medflare.core.states import StateDict
from medflare.methods.aggregation import Aggregation, SiteModel, states_of
from medflare.methods.base import ServerContext, ServerHyper
from medflare.methods.fedavg.server import FedAvgServer
from medflare.methods.method import Method

METHOD = Method(
    name="robust",
    title="Coordinate-wise median or trimmed mean",
    paper="Yin et al., ICML 2018",
    site="medflare.methods.fedavg.site:FedAvgSite",
    server="medflare.methods.baselines.robust:RobustServer",
)


@dataclass(frozen=True, config=STRICT)
class RobustHyper(ServerHyper):
    """Which mean, and how much it cuts off."""

    rule: Literal["median", "trimmed"] = param("median", "coordinate-wise median or trimmed mean", source="Definitions 1, 2")
    trim: float = param(0.2, "fraction of the sites cut off at either end by the trimmed mean", symbol="β", low=0.0, high=0.5)

    def __post_init__(self) -> None:
        if self.rule == "trimmed" and self.trim >= 0.5:
            raise ConfigError(f"trim = {self.trim} cuts off everybody; choose it below 0.5")


def robust_mean(states: Mapping[str, StateDict], rule: str, trim: float = 0.2) -> StateDict:
    """Coordinate-wise median or trimmed mean of states with equal names and shapes.

    Floating tensors are computed in float64 and return to their own dtype; integer ones (BatchNorm's counters) take the largest
    value, as in `weighted_mean`. With an even number of sites the median is the mean of the two in the middle.

    Args:
        states: site -> state.
        rule: "median" or "trimmed".
        trim: fraction cut off at either end, below 0.5; floor(trim K) sites.

    Raises:
        ValueError: no states, or nothing is left after trimming.

    Examples:
        >>> states = {site: {"w": torch.tensor(value)} for site, value in [("A", 1.0), ("B", 2.0), ("C", 900.0)]}
        >>> robust_mean(states, "median"), robust_mean(states, "trimmed", trim=0.4)
        ({'w': tensor(2.)}, {'w': tensor(2.)})
    """
    if not states:
        raise ValueError("robust_mean needs at least one state")
    cut = (len(states) - 1) // 2 if rule == "median" else math.floor(trim * len(states))
    if 2 * cut >= len(states):
        raise ValueError(f"trim = {trim} leaves none of {len(states)} sites; choose it below 0.5")
    ordered = [states[site] for site in sorted(states)]
    return {name: _trimmed([state[name] for state in ordered], cut) for name in ordered[0]}


def _trimmed(tensors: list[Tensor], cut: int) -> Tensor:
    """The mean without the `cut` largest and smallest values of every coordinate; with the largest possible cut it is the median."""
    stacked = torch.stack(tensors)
    if not stacked.is_floating_point():
        return stacked.amax(dim=0)
    kept = stacked.double().sort(dim=0).values[cut : len(tensors) - cut]
    return kept.mean(dim=0).to(stacked.dtype)


class RobustAggregation(Aggregation[RobustHyper]):
    """The chosen robust mean, for everybody."""

    def shared(self, models: Mapping[str, SiteModel], round: int, previous: StateDict | None = None) -> StateDict:
        """The robust mean by `rule` and `trim`, samples not considered."""
        return robust_mean(states_of(models), self.hyper.rule, self.hyper.trim)


class RobustServer(FedAvgServer[RobustHyper]):
    """FedAvg with a robust mean in place of the weighted one; a server half for any site half that FedAvg's server serves."""

    Hyper: ClassVar[type] = RobustHyper
    aggregation_class: ClassVar[type[Aggregation[Any]]] = RobustAggregation
    freezes: ClassVar[bool] = True

    def __init__(self, context: ServerContext):
        super().__init__(context)
        if len(context.sites) < 3:
            text = f"{self.hyper.rule} of {len(context.sites)} sites is their mean: robustness needs three or more"
            context.events.add("warning", text)
