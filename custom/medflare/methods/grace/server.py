"""GRACE's server algorithm: updates are averaged with weights by their consistency (Eq. 3), which
grow with an update's mean cosine to all updates.
"""

from medflare.methods import (
    FedAvgServer,
    FedAvgServerHyper,
    ServerContext,
    StateDict,
    TaskConfig,
    WeightedMean,
    param,
    states_of,
    strict_dataclass,
)
from medflare.methods.aggregation import Models
from medflare.methods.grace.formulas import consistent_aggregate
from medflare.networks.catalogue import meta_network
from medflare.training.epochs import named_trainable

SMALLEST_BATCH = 16  # images; CORAL's covariances are of one half of them (32 in the paper)


@strict_dataclass
class GraceServerHyper(FedAvgServerHyper):
    """Consistency-enhanced re-weighting."""

    consistency: bool = param(True, "weights by consistency; false: FedAvg's", source="Table 4")


class ConsistencyAggregation(WeightedMean):
    """Consistency-enhanced re-weighting; the weighted mean if there is no previous model (the first
    round of FLARE's own workflows).

    Cosines are over the trainable entries, shallow to deep, or over all floating ones if there is
    no task. A robust `rule` uses the weights by consistency if it uses weights (geometric,
    clipped).
    """

    parameters: list[str] | None = None

    def prepare(self, task: TaskConfig, rounds: int) -> None:
        super().prepare(task, rounds)
        self.parameters = list(named_trainable(meta_network(task)))

    def shared(self, models: Models, round: int, previous: StateDict | None = None) -> StateDict:
        self.weights = {}
        if previous is None or not self.hyper.consistency:
            return super().shared(models, round, previous)
        sent = next(iter(models.values())).state
        if self.parameters is None:
            names = [name for name, tensor in sent.items() if tensor.is_floating_point()]
        else:
            names = [name for name in self.parameters if name in sent]
        origin = {name: previous[name] for name in sent}
        states = states_of(models)
        model, self.weights = consistent_aggregate(origin, states, self.shares(models), names)
        if self.hyper.rule == "mean":
            return model
        return self.combined(states, self.weights, origin)


class GraceServer(FedAvgServer[GraceServerHyper]):
    """FedAvg's server algorithm with weights by consistency, for every site algorithm that sends a
    model as FedAvg's does.
    """

    aggregation_class = ConsistencyAggregation
    freezes = False

    def __init__(self, context: ServerContext):
        super().__init__(context)
        size = context.task.batch_size
        aligns = getattr(context.plan.site_hyper, "client", None) == "coral"
        if aligns and size < SMALLEST_BATCH:
            context.warn(
                f"CORAL's covariances are of half a batch of {size}, mostly noise below "
                f"{SMALLEST_BATCH}; make task.batch_size larger, or set client=meta"
            )
