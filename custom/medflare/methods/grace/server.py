"""GRACE's server algorithm: updates are averaged with weights that grow with their mean cosine to all updates (Eq. 3)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from medflare.core.states import StateDict, blend
from medflare.methods.aggregation import Aggregation, SiteModel, WeightedMean, states_of
from medflare.methods.base import Capability, ServerContext
from medflare.methods.fedavg.server import FedAvgServer
from medflare.methods.grace.formulas import consistent_aggregate
from medflare.methods.grace.hyper import GraceServerHyper
from medflare.networks.catalogue import meta_network
from medflare.tasks.config import TaskConfig

LEAST_BATCH: Final = 16  # images; CORAL's covariances are of one half of them, the paper's of 32


class ConsistencyAggregation(WeightedMean):
    """Consistency-enhanced re-weighting. Without a model to measure updates from (the first round elsewhere) it is the weighted mean.

    A robust `rule` takes the weights by consistency where it takes weights (geometric, clipped), and goes without where it does not.

    Cosines are taken over the trainable entries, shallow to deep; where no task says which those are, over all floating ones.
    """

    def __init__(self, hyper: GraceServerHyper):
        super().__init__(hyper)
        self.parameters: list[str] | None = None

    def prepare(self, task: TaskConfig, rounds: int) -> None:
        """Learn which entries are trainable."""
        super().prepare(task, rounds)
        self.parameters = trainable_names(task)

    def shared(self, models: Mapping[str, SiteModel], round: int, previous: StateDict | None = None) -> StateDict:
        """The step along the re-weighted updates (`consistent_aggregate`), or the weighted mean where it is switched off."""
        self.weights = {}
        if previous is None or not self.hyper.consistency:
            return super().shared(models, round, previous)
        sent = next(iter(models.values())).state
        chosen = [name for name, tensor in sent.items() if tensor.is_floating_point()] if self.parameters is None else self.parameters
        model, self.weights = consistent_aggregate(
            {name: previous[name] for name in sent},
            states_of(models),
            self.shares(models),
            [name for name in chosen if name in sent],
            server_rate=self.hyper.server_rate,
        )
        if self.hyper.rule == "mean":
            return model
        origin = {name: previous[name] for name in sent}
        robust = self.combined(states_of(models), self.weights, origin)
        return {**robust, **blend({name: origin[name] for name in chosen if name in sent}, robust, self.hyper.server_rate)}


class GraceServer(FedAvgServer[GraceServerHyper]):
    """Works with every site algorithm that sends a model as FedAvg's does."""

    Hyper: ClassVar[type] = GraceServerHyper
    aggregation_class: ClassVar[type[Aggregation[Any]]] = ConsistencyAggregation
    capabilities: ClassVar[frozenset[Capability]] = frozenset()

    def __init__(self, context: ServerContext):
        super().__init__(context)
        task, site = context.task, context.plan.site_hyper
        if getattr(site, "client", None) == "coral" and task.batch_size < LEAST_BATCH:
            text = f"CORAL's covariances are of half a batch of {task.batch_size}, mostly noise below {LEAST_BATCH}"
            context.events.add("warning", f"{text}; make task.batch_size larger, or set client=meta")


def trainable_names(task: TaskConfig) -> list[str]:
    """Names of the trainable entries of the task's network, shallow to deep."""
    return [name for name, parameter in meta_network(task).named_parameters() if parameter.requires_grad]
