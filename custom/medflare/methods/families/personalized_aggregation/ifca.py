"""IFCA (Ghosh et al., "An efficient framework for clustered federated learning", NeurIPS 2020).

    ĵ = argmin_j F_k(θ_j)                                                     (Alg. 1)
    θ_j <- mean of the models of the sites with ĵ = j   (Alg. 1, option model averaging)

F_k is the loss on the training images, in evaluation mode. Clusters start from different random
weights. A site tells the server its ĵ: it reveals which hospitals have similar images, as does the
model itself. A cluster without a site stays as it is. Deep networks may all choose one cluster,
which is FedAvg: see the table "clusters" of the results.
"""

from typing import Any

from medflare.core.message import FinalModels
from medflare.methods import (
    MEASURED,
    SELECTED_ROUND,
    ConfigError,
    FedAvgSiteHyper,
    Message,
    MetaSpec,
    Replies,
    ServerAlgorithm,
    ServerContext,
    ServerHyper,
    StateDict,
    Step,
    TaskConfig,
    TensorSpec,
    asks,
    handles,
    param,
    phase,
    strict_dataclass,
    text,
)
from medflare.methods.aggregation import plain_mean
from medflare.methods.families.personalized_aggregation.personalized import (
    TRAINED,
    PersonalizedSite,
    family_message,
)


@strict_dataclass
class IFCAServerHyper(ServerHyper):
    """The clusters."""

    clusters: int = param(2, "number of clusters", symbol="k", source="Alg. 1", low=1, high=16)


def cluster_names(plan: Any) -> list[str]:
    """ "0", "1", ..."""
    return [str(index) for index in range(plan.server_hyper.clusters)]


CLUSTERS = TensorSpec("cluster", of=cluster_names)
CLUSTER = MetaSpec[str]("cluster", "the cluster whose model the site trained", text())


class IFCASite(PersonalizedSite[FedAvgSiteHyper]):
    """Trains the cluster with the least loss; the site uses the model of the best round."""

    server_hyper = IFCAServerHyper

    @classmethod
    def check(cls, task: TaskConfig, hyper: FedAvgSiteHyper, server_hyper: Any) -> None:
        """Also raises ConfigError for clusters that would start from the same weights."""
        super().check(task, hyper, server_hyper)
        if server_hyper.clusters > 1 and "weights" in task.network:
            raise ConfigError(
                f"task {task.name}: all clusters would start from network.weights and stay one; "
                "leave out network.weights, or run fedavg"
            )

    def start(self, incoming: Message) -> StateDict:
        """θ_ĵ; the first one if losses are equal."""
        clusters = incoming.family(CLUSTERS)
        nearest = min(clusters, key=lambda name: self.mean_loss(clusters[name], "train"))
        self.memory[CLUSTER] = nearest
        return clusters[nearest]

    @phase(request=(CLUSTERS,), reply=(TRAINED,), meta=(*MEASURED, CLUSTER))
    def train(self, round: int, incoming: Message) -> Message:
        """Trains θ_ĵ and names it."""
        reply = super().train(round, incoming)
        reply[CLUSTER] = self.memory[CLUSTER]
        return reply

    @phase(request=(CLUSTERS,), meta=MEASURED)
    def validate(self, round: int, incoming: Message) -> Message:
        return super().validate(round, incoming)

    @phase(request=(CLUSTERS,), request_meta=(SELECTED_ROUND,))
    def finalize(self, incoming: Message) -> FinalModels:
        """The model of the best round; if the site never trained, θ_ĵ."""
        return super().finalize(incoming)


class IFCAServer(ServerAlgorithm[IFCAServerHyper]):
    """Averages the models of each cluster."""

    site_algorithm = IFCASite

    def __init__(self, context: ServerContext):
        super().__init__(context)
        for name in cluster_names(context.plan):
            purpose = "model" if name == "0" else f"cluster/{name}"
            self.memory[CLUSTERS.member(name)] = context.initial_state(purpose)
        self.memory.meta["clusters"] = {}  # site -> its latest one

    @classmethod
    def fewest_combined(cls, hyper: Any, sites: int) -> int:
        """1 with several clusters: a site may be alone in its cluster, whose model all sites
        receive.
        """
        return 1 if hyper.clusters > 1 else sites

    @asks(IFCASite.train, IFCASite.validate)
    def request(self, step: Step, site: str) -> Message:
        """All clusters."""
        return family_message(self.memory, CLUSTERS)

    @handles(IFCASite.train)
    def aggregate_models(self, step: Step, replies: Replies) -> None:
        """The next models of all clusters that a site trained; others are refused with an event."""
        chosen: dict[str, dict[str, StateDict]]
        chosen = {name: {} for name in cluster_names(self.context.plan)}
        for site, reply in replies.items():
            name = str(reply.get(CLUSTER))
            if name not in chosen:
                reason = f"cluster {name!r} is none of this run; its model is not used"
                self.context.events.add("rejected", reason, site=site, round=step.round)
                continue
            chosen[name][site] = reply[TRAINED]
            self.memory.meta["clusters"][site] = name
        for name, states in chosen.items():
            if states:
                self.memory[CLUSTERS.member(name)] = plain_mean(states)

    def tables(self) -> dict[str, dict[str, dict[str, Any]]]:
        """The cluster of every site."""
        clusters = self.memory.meta["clusters"]
        return {"clusters": {site: {"cluster": name} for site, name in clusters.items()}}

    def configure_final(self, site: str) -> Message:
        """All clusters: the site chooses its own."""
        message = family_message(self.memory, CLUSTERS)
        message[SELECTED_ROUND] = self.context.rounds
        return message
