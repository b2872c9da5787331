"""w_g <- w_g + η (Σ p_k w_k - w_g)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from medflare.core.hyper import param
from medflare.core.settings import STRICT
from medflare.core.states import StateDict, blend
from medflare.methods.aggregation import Aggregation, SiteModel, WeightedMean
from medflare.methods.fedavg.server import FedAvgServer, FedAvgServerHyper


@dataclass(frozen=True, config=STRICT)
class DampedHyper(FedAvgServerHyper):
    """FedAvg's, and the step."""

    step: float = param(0.5, "how far the server goes; 1: FedAvg", symbol="η", low=0, high=1)


class DampedMean(WeightedMean):
    """The step from the last model to the mean; the mean where there is no last model."""

    def shared(
        self, models: Mapping[str, SiteModel], round: int, previous: StateDict | None = None
    ) -> StateDict:
        mean = super().shared(models, round, previous)
        return (
            mean
            if previous is None
            else blend({name: previous[name] for name in mean}, mean, self.hyper.step)
        )


class DampedServer(FedAvgServer[DampedHyper]):
    """FedAvg's server algorithm, more slowly."""

    Hyper: ClassVar[type] = DampedHyper
    aggregation_class: ClassVar[type[Aggregation[Any]]] = DampedMean
