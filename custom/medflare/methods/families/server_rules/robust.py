"""FedAvg with a robust rule in place of the mean; the rules are in `parts/robust.py`.

A few faulty or harmful sites then cannot move the model far. The rules are the coordinate-wise
median and the trimmed mean (Yin, Chen, Ramchandran and Bartlett, ICML 2018), Krum, the geometric
median and clipped updates. Sites have equal weights, since a harmful site can
report a false number of images.
"""

from typing import ClassVar

from medflare.methods import FedAvgServer, ServerHyper, param, strict_dataclass
from medflare.methods.parts.robust import RobustLimits, RobustRule


@strict_dataclass
class RobustHyper(RobustLimits, ServerHyper):
    """The rule and its limits."""

    rule: RobustRule = param(
        "median", "median or trimmed by coordinate, krum, geometric median, or clipped updates"
    )
    weighting: ClassVar[str] = "uniform"


class RobustServer(FedAvgServer[RobustHyper]):
    """FedAvg's server algorithm with a robust rule."""
