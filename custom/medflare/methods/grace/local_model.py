"""What GRACE and MOON share: inside, a site uses the model that it trained itself; outside, the global one is used.

A site's personal model is its local model after training, before the next broadcast overwrites it. It never leaves the site.
"""

from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from medflare.adaptation.registry import check_adaptable, dsbn_for, with_tent
from medflare.core.manifest import Fact, Phase, number, table
from medflare.core.message import Message
from medflare.core.rng import derived_seed
from medflare.data.sites.site import Site
from medflare.inference.deployed import build
from medflare.methods.base import MEASURED, VALIDATION, Capability, Plan
from medflare.methods.fedavg.site import GLOBAL, MODEL, PRIVACY, VALIDATE, FedAvgSite, received, trained_model
from medflare.methods.grace.formulas import a_distance
from medflare.methods.grace.hyper import LocalModelHyper
from medflare.methods.grace.two_step import Penalty, train_two_steps
from medflare.methods.parts.selection import Best
from medflare.methods.parts.training import finite_or_none
from medflare.networks.features import FeatureNetwork, pooled
from medflare.tasks.config import TaskConfig

A_DISTANCE = Fact("a_distance", "between global and local features", number(-2.0, 2.0, optional=True), "train")
STEPS = Fact("steps", "mean length of two-step training's inner and outer step", table(number(0, optional=True)), "train")

H = TypeVar("H", bound=LocalModelHyper)


class LocalModelSite(FedAvgSite[H]):
    """FedAvg's site half that keeps its local model of the best round by its own validation images.

    Facts beside FedAvg's: `validation["personal"]`, of the local model after training; `a_distance` where asked for; `steps` of training
    in two steps.
    """

    Hyper: ClassVar[type] = LocalModelHyper
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    phases: ClassVar[tuple[Phase, ...]] = (
        Phase("train", sends=(GLOBAL,), answers=(MODEL,), reports=(*MEASURED, PRIVACY, A_DISTANCE, STEPS)),
        VALIDATE,
    )

    def __init__(self, site: Site, plan: Plan[H, Any]):
        super().__init__(site, plan)
        self.personal = Best(self.memory, "personal")
        self._steps: dict[str, float | None] | None = None

    @classmethod
    def check(cls, task: TaskConfig, hyper: H, server_hyper: Any) -> None:
        """As FedAvg's; test-time adaptation needs a network that can be adapted."""
        super().check(task, hyper, server_hyper)
        if hyper.tta != "none":
            check_adaptable(task)

    def train(self, round: int, incoming: Message) -> Message:
        """FedAvg's training; the local model is measured, offered as the personal one and, where asked for, probed (A-distance)."""
        self._steps = None
        reply = super().train(round, incoming)
        state = reply.states[MODEL]
        local = self.network("model", state)
        value = finite_or_none(self.validation(local))
        reply.facts[VALIDATION]["personal"] = value
        self.personal.offer(value if self.plan.server_hyper.selection != "last" else None, round + 1, state)
        if self.hyper.probe:
            reply.facts[A_DISTANCE] = self._a_distance(self.frozen(incoming.states[GLOBAL]), local, round)
        if self._steps is not None:
            reply.facts[STEPS] = self._steps
        return reply

    def two_steps(
        self, model: FeatureNetwork, optimizer: torch.optim.Optimizer, round: int, penalty: Penalty | None = None, **options: Any
    ) -> float:
        """`train_two_steps`, whose options these are; the lengths of its steps go into the reply. Returns the mean meta-loss."""
        loss, self._steps = train_two_steps(model, optimizer, self.site, round, penalty, **options)
        return loss

    def _a_distance(self, shared: FeatureNetwork, local: FeatureNetwork, round: int) -> float | None:
        seed = derived_seed(self.site.seed, self.site.name, round, "probe") % 2**32
        return finite_or_none(a_distance(self._features(shared), self._features(local), seed=seed))

    @torch.no_grad()
    def _features(self, model: FeatureNetwork) -> Tensor:
        """Pooled features (N, D) of the site's training images."""
        model.eval()
        return torch.cat([pooled(model.features_and_output(batch.images)[0]).cpu() for batch in self.site.ordered("train")])

    def deliver(self, incoming: Message) -> dict[str, Message]:
        """Inside: the local model (the global one where the site never trained). Outside: the global one, adapted as chosen."""
        shared = received(incoming)
        if not self.inside:
            return {"global": shared, "deployed": self._adapted(shared)}
        own = shared if self.personal.state is None else trained_model(self.personal.state, self.personal.round)
        return {"global": shared, "personal": own, "deployed": own}

    def _adapted(self, model: Message) -> Message:
        hyper, task = self.hyper, self.site.task
        if hyper.tta == "tent":
            return with_tent(model, task, rate=hyper.tent_rate)
        return dsbn_for(self.site, model, partial(build, task)) if hyper.tta == "dsbn" else model
