"""The server side of the methods as FLARE aggregators.

Under `MedflareController` an aggregator names the server half and holds its settings. In FLARE's own workflows (FedAvg,
scatter and gather) it aggregates the models of any client with the same formula. Where a formula gives every site a result of
its own, the aggregated model holds all of them, named `SITE//tensor`, and `filters.OwnPartFilter` hands each site its part.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator

from medflare.core.errors import UpdateError
from medflare.core.states import StateDict, weighted_mean
from medflare.flare.filters import joined_parts
from medflare.methods.fedsm import FedSMHyper, soft_pull
from medflare.methods.hyper import build_hyper


class MethodAggregator(ModelAggregator):
    """The server side of a method.

    Args:
        hyper: the method's hyper-parameters; those of the server half shape the aggregation.
        method: name of the method whose server half runs; the subclasses name it themselves.
    """

    default_method: ClassVar[str] = ""

    def __init__(self, hyper: dict[str, Any] | None = None, method: str = ""):
        super().__init__()
        self.hyper = hyper
        self.method = method
        self._models: dict[str, FLModel] = {}

    @property
    def method_name(self) -> str:
        return self.method or self.default_method

    @abstractmethod
    def combine(self, states: Mapping[str, StateDict], weights: Mapping[str, float]) -> StateDict:
        """The next model from the sites' models, weighted by their numbers of samples."""

    # -- FLARE's own workflows ---------------------------------------------------------------------------------------------

    def accept_model(self, model: FLModel) -> None:
        site = (model.meta or {}).get("client_name") or (model.meta or {}).get(FLMetaKey.SITE_NAME)
        if not site:
            raise UpdateError("a model without the name of its site cannot be aggregated; set meta['client_name']")
        if model.params_type != ParamsType.FULL:
            raise UpdateError(f"site {site} sent {model.params_type}; send full models (params_type FULL)")
        self._models[site] = model

    def aggregate_model(self) -> FLModel:
        """Sites are taken in sorted order, so the result does not depend on who answered first."""
        models = {site: self._models[site] for site in sorted(self._models)}
        states = {site: {name: torch.as_tensor(value) for name, value in model.params.items()} for site, model in models.items()}
        weights = {site: float((model.meta or {}).get(FLMetaKey.NUM_STEPS_CURRENT_ROUND, 1.0)) for site, model in models.items()}
        combined: dict[str, Any] = dict(self.combine(states, weights))
        some_params = next(iter(models.values())).params.values()
        if not all(isinstance(value, torch.Tensor) for value in some_params):
            combined = {name: tensor.numpy() for name, tensor in combined.items()}  # clients that speak numpy get numpy back
        self.reset_stats()
        return FLModel(params=combined, params_type=ParamsType.FULL, metrics=_mean_metrics(models, weights))

    def reset_stats(self) -> None:
        self._models.clear()


class WeightedAggregator(MethodAggregator):
    """FedAvg: the mean of the models, weighted by samples."""

    default_method = "fedavg"

    def combine(self, states: Mapping[str, StateDict], weights: Mapping[str, float]) -> StateDict:
        return weighted_mean(states, weights)


class SoftPullAggregator(MethodAggregator):
    """FedSM: every site's personal model, pulled towards the others' (Eq. 11); a site that is new gets the weighted mean."""

    default_method = "fedsm"

    def combine(self, states: Mapping[str, StateDict], weights: Mapping[str, float]) -> StateDict:
        pulled = soft_pull(states, build_hyper(FedSMHyper, self.hyper or {}).lam)
        return joined_parts(pulled, weighted_mean(states, weights))


def _mean_metrics(models: Mapping[str, FLModel], weights: Mapping[str, float]) -> dict[str, float] | None:
    """The sample-weighted mean of every number that all sites report."""
    reported = [model.metrics or {} for model in models.values()]
    shared = [name for name in reported[0] if all(isinstance(metrics.get(name), (int, float)) for metrics in reported)]
    total = sum(weights.values())
    return {name: sum(weights[site] * models[site].metrics[name] for site in models) / total for name in shared} or None
