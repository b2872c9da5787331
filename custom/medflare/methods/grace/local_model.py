"""What GRACE and MOON share: inside, a site uses the model that it trained itself; outside, the global one is used.

A site's personal model is its local model after training, before the next broadcast overwrites it. It never leaves the site.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from medflare.core.hyper import param
from medflare.core.message import Message
from medflare.core.rng import derived_seed
from medflare.core.states import StateDict, batch_norm_entries, split_state
from medflare.inference.deployed import plain_message
from medflare.methods.fedavg import FedAvgSite, FedAvgSiteHyper
from medflare.methods.grace.adaptation import AdaptationHyper, adapted_to, check_adaptable
from medflare.methods.grace.formulas import a_distance
from medflare.methods.parts.selection import Best
from medflare.methods.parts.training import finite_or_none
from medflare.networks.features import FeatureNetwork, pooled
from medflare.sites.site import Site


@dataclass(frozen=True)
class LocalModelHyper(FedAvgSiteHyper, AdaptationHyper):
    reset_optimizer: bool = param(False, "start every round with a fresh optimizer; false keeps its moments at the site", source="code")
    selection: str = param("best", "deliver the round with the best validation metric, or the last one", choices=("best", "last"))
    batch_norm: str = param(
        "average", "local keeps BatchNorm's entries at the site, as FedBN", source="Table 1", choices=("average", "local")
    )
    probe: bool = param(False, "report the A-distance between global and local features every round", source="Fig. 2")


class LocalModelSite(FedAvgSite):
    """FedAvg's site half that keeps its local model of the best round by its own validation images.

    Facts beside FedAvg's: `validation["personal"]`, of the local model after training, and `a_distance` where asked for.
    """

    Hyper: ClassVar[type] = LocalModelHyper

    def __init__(self, site: Site, hyper: Any, sites: tuple[str, ...]):
        super().__init__(site, hyper, sites)
        check_adaptable(site.task, hyper)
        self.personal = Best()
        self.batch_norm: StateDict = {}

    def train(self, round: int, incoming: Message) -> Message:
        start = {**incoming.states["model"], **self.batch_norm}
        reply = super().train(round, Message({"model": start}, incoming.facts))
        state = reply.states["model"]
        local = self.network("model", state)
        value = finite_or_none(self.validation(local))
        reply.facts["validation"]["personal"] = value
        self.personal.offer(value if self.hyper.selection == "best" else None, round + 1, state)
        if self.hyper.batch_norm == "local":
            self.batch_norm = split_state(state, batch_norm_entries(local))[0]
        if self.hyper.probe:
            reply.facts["a_distance"] = self._a_distance(self.frozen(start), local, round)
        return reply

    def frozen(self, state: StateDict, purpose: str = "frozen") -> FeatureNetwork:
        """A network that only looks: evaluation mode, no gradients."""
        return cast(FeatureNetwork, self.network(purpose, state).eval().requires_grad_(False))

    def _a_distance(self, shared: Any, local: Any, round: int) -> float | None:
        seed = derived_seed(self.site.seed, self.site.name, round, "probe") % 2**32
        return finite_or_none(a_distance(self._features(shared), self._features(local), seed=seed))

    @torch.no_grad()
    def _features(self, model: Any) -> Tensor:
        """Pooled features (N, D) of the site's training images."""
        model.eval()
        return torch.cat([pooled(model.features_and_output(batch.images)[0]).cpu() for batch in self.site.ordered("train")])

    def deliver(self, incoming: Message) -> dict[str, Message]:
        """Inside: the local model (the global one where the site never trained). Outside: the global one, adapted as chosen."""
        shared = plain_message(incoming.states["model"])
        if self.site.name not in self.sites:
            return {"global": shared, "deployed": adapted_to(self.site, shared, self.hyper)}
        own = shared if self.personal.state is None else plain_message(self.personal.state)
        return {"global": shared, "personal": own, "deployed": own}

    def state(self) -> Message:
        message = super().state()
        self.personal.pack("personal", message)
        if self.batch_norm:
            message.states["batch_norm"] = self.batch_norm
        return message

    def restore(self, state: Message) -> None:
        super().restore(state)
        self.personal.unpack("personal", state)
        self.batch_norm = state.states.get("batch_norm", {})
