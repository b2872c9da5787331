"""Robust means for FedAvg-like federations: a few bad sites cannot move the model far.

The coordinate-wise median and the trimmed mean (Yin, Chen, Ramchandran and Bartlett, ICML 2018), Krum, the geometric median and clipped
updates, see `parts.robust`. Every site counts alike: a bad site could lie about its own number of images.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from medflare.core.hyper import param
from medflare.core.settings import STRICT
from medflare.methods.aggregation import Aggregation, SiteModel, WeightedMean
from medflare.methods.base import ServerHyper
from medflare.methods.fedavg.server import FedAvgServer
from medflare.methods.method import Method
from medflare.methods.parts.robust import RobustLimits, RobustRule

METHOD = Method(
    name="robust",
    title="Median, trimmed mean, Krum, geometric median or clipped updates",
    paper="Yin et al., ICML 2018",
    site="medflare.methods.fedavg.site:FedAvgSite",
    server="medflare.methods.baselines.robust:RobustServer",
)


@dataclass(frozen=True, config=STRICT)
class RobustHyper(RobustLimits, ServerHyper):
    """Which mean, and how much it cuts off."""

    rule: RobustRule = param("median", "median or trimmed by coordinate, krum, geometric median, or clipped updates")


class RobustAggregation(WeightedMean):
    """The chosen robust mean, for everybody."""

    def shares(self, models: Mapping[str, SiteModel]) -> dict[str, float]:
        """Site -> 1: samples are not considered."""
        return dict.fromkeys(models, 1.0)


class RobustServer(FedAvgServer[RobustHyper]):
    """FedAvg with a robust mean in place of the weighted one; a server algorithm for any site algorithm that FedAvg's server serves."""

    Hyper: ClassVar[type] = RobustHyper
    aggregation_class: ClassVar[type[Aggregation[Any]]] = RobustAggregation
