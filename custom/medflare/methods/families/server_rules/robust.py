"""FedAvg with a robust rule in place of the mean.

A few faulty or harmful sites then cannot move the model far. The rules are the coordinate-wise
median and the trimmed mean (Yin, Chen, Ramchandran and Bartlett, ICML 2018), Krum, the geometric
median and clipped updates, see `parts.robust`. Sites have equal weights, since a harmful site can
report a false number of images.
"""

from collections.abc import Mapping

from medflare.core.hyper import param
from medflare.core.settings import strict_dataclass
from medflare.methods.aggregation import SiteModel, WeightedMean
from medflare.methods.base import ServerHyper
from medflare.methods.fedavg.server import FedAvgServer
from medflare.methods.parts.robust import RobustLimits, RobustRule


@strict_dataclass
class RobustHyper(RobustLimits, ServerHyper):
    """The rule and its limits."""

    rule: RobustRule = param(
        "median", "median or trimmed by coordinate, krum, geometric median, or clipped updates"
    )


class RobustAggregation(WeightedMean):
    """The robust rule with equal weights."""

    def shares(self, models: Mapping[str, SiteModel]) -> dict[str, float]:
        return dict.fromkeys(models, 1.0)


class RobustServer(FedAvgServer[RobustHyper]):
    """FedAvg's server algorithm with a robust rule."""

    aggregation_class = RobustAggregation
