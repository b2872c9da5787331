"""The methods' aggregations as FLARE aggregators.

Under `MedflareController` the server algorithm calls the aggregation; in FLARE's own workflows
(FedAvg, scatter and gather) FLARE does, on the full models of any client. If an aggregation gives
each site its own model, the aggregated model holds all of them, and `OwnPartFilter` hands each site
its part.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator

from medflare.core.errors import UpdateError
from medflare.flare.job_policy import authorize
from medflare.methods.catalogue import get_method

if TYPE_CHECKING:
    from torch import Tensor

    from medflare.core.states import StateDict
    from medflare.methods.aggregation import Aggregation, SiteModel

_SEPARATOR = "//"  # between a site's name and a tensor's
_OTHERS = "*"  # in place of a site's name: the part of any other site


@dataclass(eq=False, repr=False)
class MethodAggregator(ModelAggregator):
    """The aggregation of a method's server algorithm.

    Args:
        hyper: the method's hyper-parameters, see `core.hyper.split_hyper`; the aggregation uses
            those of the server algorithm.
        method: name of the method; the subclasses below have one by default.
        num_rounds: of FLARE's workflow, for aggregations with a schedule; `MedflareController`
            knows its own.
    """

    default_method = ""

    hyper: dict[str, Any] | None = None
    method: str = ""
    num_rounds: int | None = None

    def __post_init__(self) -> None:
        super().__init__()
        self._models: dict[str, FLModel] = {}
        self._round = 0
        self._last: StateDict | None = None

    @property
    def method_name(self) -> str:
        """The method whose server algorithm this is."""
        return self.method or self.default_method

    @cached_property
    def aggregation(self) -> "Aggregation":
        """The object that the server algorithm of a run calls, too.

        Raises:
            ConfigError: a hyper-parameter is wrong, or under FLARE the server does not trust the
                package of the method or of its rule.
        """
        if self.fl_ctx is not None:  # FLARE has set it
            authorize((self.method_name,), {}, self.fl_ctx)
        method = get_method(self.method_name)
        given = (self.hyper or {}).items()
        values = {name: value for name, value in given if name.split(".")[0] != "site"}
        _, hyper = method.built(values)
        aggregation = method.server_class.aggregation_class(hyper)
        aggregation.rounds = self.num_rounds
        return aggregation

    def accept(self, shareable: Shareable, fl_ctx: FLContext) -> bool:
        """Whether the model is used; scatter and gather calls this, and an exception here would end
        the round for all sites.
        """
        try:
            return super().accept(shareable, fl_ctx)
        except UpdateError as error:
            self.log_error(fl_ctx, f"medflare: {error}")
            return False

    def accept_model(self, model: FLModel) -> None:
        """Take a client's full model.

        Raises:
            UpdateError: it has no site's name, its params_type is not FULL, or it holds NaN or
                infinite values.
        """
        import torch

        meta = model.meta or {}
        site = meta.get("client_name") or meta.get(FLMetaKey.SITE_NAME)
        if not site:
            raise UpdateError(
                "a model without the name of its site cannot be aggregated; set meta['client_name']"
            )
        if model.params_type != ParamsType.FULL:
            raise UpdateError(
                f"site {site} sent {model.params_type}; send full models (params_type FULL)"
            )
        for name in sorted(model.params):
            if not torch.isfinite(torch.as_tensor(model.params[name])).all():
                raise UpdateError(
                    f"site {site} sent {name} with NaN or infinite values; its model is not used"
                )
        self._models[site] = model

    def aggregate_model(self) -> FLModel:
        """The next model, in sorted site order: numpy arrays if the clients sent numpy arrays."""
        import torch

        from medflare.methods.aggregation import SiteModel

        models = {}
        for site, model in sorted(self._models.items()):
            state = {name: torch.as_tensor(value) for name, value in model.params.items()}
            samples = float((model.meta or {}).get(FLMetaKey.NUM_STEPS_CURRENT_ROUND, 1.0))
            models[site] = SiteModel(state, samples, model.metrics or {})
        combined: dict[str, Any] = dict(self.combine(self._round, models))
        sent = [value for model in self._models.values() for value in model.params.values()]
        if not any(isinstance(value, torch.Tensor) for value in sent):
            combined = {name: tensor.numpy() for name, tensor in combined.items()}
        self._round += 1
        self.reset_stats()
        return FLModel(params=combined, params_type=ParamsType.FULL, metrics=_mean_metrics(models))

    def combine(self, round: int, models: "Mapping[str, SiteModel]") -> "StateDict":
        """The next model from the sites' models, which are in sorted site order; `round` from 0.

        If each site gets its own state, they are joined to one whose names begin with the site's,
        see `own_part`.
        """
        personal = self.aggregation.personal(models, round)
        self._last = self.aggregation.shared(models, round, self._last)
        if not personal:
            return self._last
        joined: StateDict = {}
        for site, part in {**personal, _OTHERS: self._last}.items():
            joined |= {f"{site}{_SEPARATOR}{name}": tensor for name, tensor in part.items()}
        return joined

    def reset_stats(self) -> None:
        """Forget the models of a round."""
        self._models.clear()


class WeightedAggregator(MethodAggregator):
    """The weighted mean of FedAvg."""

    default_method = "fedavg"


class SoftPullAggregator(MethodAggregator):
    """The soft pull of FedSM."""

    default_method = "fedsm"


class FourierAggregator(MethodAggregator):
    """The progressive Fourier aggregation (PFA) of PRR-Imbalance."""

    default_method = "prr"


class ConsistencyAggregator(MethodAggregator):
    """The consistency-based weights of GRACE."""

    default_method = "grace"


class SharpnessAggregator(MethodAggregator):
    """The sharpness-aware hierarchical aggregation (SHA) of FedDAG."""

    default_method = "sha"


AGGREGATORS = {  # method -> aggregator
    aggregator.default_method: aggregator for aggregator in MethodAggregator.__subclasses__()
}


def own_part(joined: "Mapping[str, Tensor]", site: str) -> "StateDict":
    """The site's part of what `MethodAggregator.combine` joined, or the part for other sites."""
    for owner in (site, _OTHERS):
        prefix = f"{owner}{_SEPARATOR}"
        names = [name for name in joined if name.startswith(prefix)]
        if names:
            return {name.removeprefix(prefix): joined[name] for name in names}
    return {}


class OwnPartFilter(Filter):
    """A server-side task-data filter for FLARE's own workflows that gives each site its own part of
    an aggregated model.
    """

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """The task's data with the part of the receiving site; a model without parts stays as it
        is.
        """
        dxo = from_shareable(shareable)
        if dxo.data_kind != DataKind.WEIGHTS or not any(_SEPARATOR in name for name in dxo.data):
            return shareable
        site = fl_ctx.get_peer_context().get_identity_name()
        return DXO(DataKind.WEIGHTS, own_part(dxo.data, site), dxo.meta).update_shareable(shareable)


def _mean_metrics(models: "Mapping[str, SiteModel]") -> dict[str, float] | None:
    """Mean of each number that all sites report, weighted by samples, or unweighted if no site
    reports samples.
    """
    samples = [model.samples for model in models.values()]
    weights = samples if any(samples) else None
    means = {}
    for name in sorted(set.intersection(*(set(model.meta) for model in models.values()))):
        values = [model.meta[name] for model in models.values()]
        if all(isinstance(value, (int, float)) for value in values):
            means[name] = float(np.average(values, weights=weights))
    return means or None
