"""The server side of the methods as FLARE aggregators.

Under `MedflareController` an aggregator names the server half and holds its settings. In FLARE's own workflows (FedAvg,
scatter and gather) it aggregates the full models of any client with the same formula. Where a formula gives every site a result
of its own, the aggregated model holds all of them, and `filters.OwnPartFilter` hands each site its part.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator

from medflare.core.errors import UpdateError
from medflare.core.hyper import build_hyper
from medflare.core.states import StateDict, weighted_mean
from medflare.flare.filters import joined_parts
from medflare.methods.catalogue import get_method
from medflare.methods.feddag.sha import HierarchicalAggregation
from medflare.methods.fedsm.halves import soft_pull
from medflare.methods.grace.formulas import consistent_aggregate
from medflare.methods.prr.fourier import Treatment, aggregate_models, frequency_ratio


@dataclass(frozen=True)
class SiteModel:
    """What a client of FLARE's own workflows sent.

    Attributes:
        samples: aggregation weight: FLARE's NUM_STEPS_CURRENT_ROUND, 1 where the client gives none.
        metrics: the client's numbers.
    """

    state: StateDict
    samples: float
    metrics: Mapping[str, float]


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
        self._round = 0

    @property
    def method_name(self) -> str:
        return self.method or self.default_method

    @property
    def settings(self) -> Any:
        """The server half's hyper-parameters, checked."""
        return build_hyper(get_method(self.method_name).server_class.Hyper, self.hyper or {})

    @abstractmethod
    def combine(self, round: int, models: Mapping[str, SiteModel]) -> StateDict:
        """The next model from the sites' models, by site in sorted order; `round` counts this aggregator's rounds from 0."""

    # -- FLARE's own workflows ---------------------------------------------------------------------------------------------

    def accept_model(self, model: FLModel) -> None:
        site = (model.meta or {}).get("client_name") or (model.meta or {}).get(FLMetaKey.SITE_NAME)
        if not site:
            raise UpdateError("a model without the name of its site cannot be aggregated; set meta['client_name']")
        if model.params_type != ParamsType.FULL:
            raise UpdateError(f"site {site} sent {model.params_type}; send full models (params_type FULL)")
        self._models[site] = model

    def aggregate_model(self) -> FLModel:
        """The result does not depend on who answered first."""
        sent = {site: self._models[site] for site in sorted(self._models)}
        models = {site: _site_model(model) for site, model in sent.items()}
        combined: dict[str, Any] = dict(self.combine(self._round, models))
        if not any(isinstance(value, torch.Tensor) for model in sent.values() for value in model.params.values()):
            combined = {name: tensor.numpy() for name, tensor in combined.items()}  # clients that speak numpy get numpy back
        self._round += 1
        self.reset_stats()
        return FLModel(params=combined, params_type=ParamsType.FULL, metrics=_mean_metrics(models))

    def reset_stats(self) -> None:
        self._models.clear()


class WeightedAggregator(MethodAggregator):
    """FedAvg: the mean of the models, weighted by samples."""

    default_method = "fedavg"

    def combine(self, round: int, models: Mapping[str, SiteModel]) -> StateDict:
        return _mean(models)


class SoftPullAggregator(MethodAggregator):
    """FedSM: every site's personal model, pulled towards the others' (Eq. 11); a site that is new gets the weighted mean."""

    default_method = "fedsm"

    def combine(self, round: int, models: Mapping[str, SiteModel]) -> StateDict:
        return joined_parts(soft_pull(_states(models), self.settings.lam), _mean(models))


class FourierAggregator(MethodAggregator):
    """PRR-Imbalance: Progressive Fourier Aggregation (Eq. 1-4), a model for every site; a new one gets the plain mean.

    In FLARE's own workflows the layers are told apart by their shapes: what has two or more axes is a weight, the last of
    them the classifier. Clients keep batch normalisation to themselves by not sending it.

    Args:
        num_rounds: of FLARE's workflow, for the schedule of the low band; `MedflareController` knows its own.
    """

    default_method = "prr"

    def __init__(self, hyper: dict[str, Any] | None = None, method: str = "", num_rounds: int = 50):
        super().__init__(hyper, method)
        self.num_rounds = num_rounds

    def combine(self, round: int, models: Mapping[str, SiteModel]) -> StateDict:
        states, settings = _states(models), self.settings
        low_band = frequency_ratio(min(round, self.num_rounds), self.num_rounds, settings.r0, settings.r1)
        options = {name: getattr(settings, name) for name in ("layout", "window", "components", "phase_mean")}
        parts = aggregate_models(states, _treatments_by_shape(states), low_band, fourier=settings.pfa, **options)
        return joined_parts(parts, weighted_mean(states, dict.fromkeys(states, 1.0)))


class ConsistencyAggregator(MethodAggregator):
    """GRACE: weights by the consistency of the sites' updates (Eq. 3).

    In FLARE's own workflows an update is the difference to this aggregator's last result; the first round, which has none,
    is FedAvg's. All floating entries count for the cosines.
    """

    default_method = "grace"

    def __init__(self, hyper: dict[str, Any] | None = None, method: str = ""):
        super().__init__(hyper, method)
        self._last: StateDict | None = None

    def combine(self, round: int, models: Mapping[str, SiteModel]) -> StateDict:
        if self._last is None:
            self._last = _mean(models)
        else:
            names = [name for name, tensor in self._last.items() if tensor.is_floating_point()]
            options = {name: getattr(self.settings, name) for name in ("include_self", "negative", "granularity", "server_rate")}
            self._last, _ = consistent_aggregate(self._last, _states(models), _samples(models), names, **options)
        return self._last


class SharpnessAggregator(MethodAggregator):
    """FedDAG: sharpness-aware hierarchical aggregation, within each site over its rounds and across sites by score.

    FLARE's own workflows have no phase in which sites score each other's perturbed models; there the score of a model is the
    metric `score` (0 to 1) that comes with it, and a model without one counts as an average one.
    """

    default_method = "sha"

    def __init__(self, hyper: dict[str, Any] | None = None, method: str = ""):
        super().__init__(hyper, method)
        self._aggregation: HierarchicalAggregation | None = None

    def combine(self, round: int, models: Mapping[str, SiteModel]) -> StateDict:
        if self._aggregation is None:
            self._aggregation = HierarchicalAggregation(self.settings)
        scores = {site: float(model.metrics.get("score", math.nan)) for site, model in models.items()}
        return self._aggregation(_states(models), scores)


# -- helpers -------------------------------------------------------------------------------------------------------------------


def _site_model(model: FLModel) -> SiteModel:
    state = {name: torch.as_tensor(value) for name, value in model.params.items()}
    return SiteModel(state, float((model.meta or {}).get(FLMetaKey.NUM_STEPS_CURRENT_ROUND, 1.0)), model.metrics or {})


def _states(models: Mapping[str, SiteModel]) -> dict[str, StateDict]:
    return {site: model.state for site, model in models.items()}


def _samples(models: Mapping[str, SiteModel]) -> dict[str, float]:
    return {site: model.samples for site, model in models.items()}


def _mean(models: Mapping[str, SiteModel]) -> StateDict:
    return weighted_mean(_states(models), _samples(models))


def _treatments_by_shape(states: Mapping[str, StateDict]) -> dict[str, Treatment]:
    first = next(iter(states.values()))
    weights = [name for name, tensor in first.items() if tensor.ndim >= 2 and tensor.is_floating_point()]
    found = {name: Treatment("kernel" if name in weights else "mean") for name in first}
    return {**found, **{name: Treatment("classifier") for name in weights[-1:]}}


def _mean_metrics(models: Mapping[str, SiteModel]) -> dict[str, float] | None:
    """The sample-weighted mean of every number that all sites report."""
    first, *others = [model.metrics for model in models.values()]
    shared = [name for name, value in first.items() if isinstance(value, (int, float)) and all(name in metrics for metrics in others)]
    total = sum(model.samples for model in models.values())
    return {name: sum(model.samples * model.metrics[name] for model in models.values()) / total for name in shared} or None
