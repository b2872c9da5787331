"""GRACE's site algorithm: every batch is cut in two.

A step on the first half (meta-train) gives theta'; the site's update is the gradient at theta' of the task loss on the second half
plus beta times the distance between its features under the frozen global model and under theta' (meta-update).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from medflare.adaptation.registry import check_adaptable, dsbn_for, with_tent
from medflare.core.errors import ConfigError
from medflare.core.manifest import MetaSpec, Phase, number, table
from medflare.core.message import Message
from medflare.core.rng import derived_seed, seeded
from medflare.core.states import copy_state
from medflare.inference.deployed import build
from medflare.methods.base import MEASURED, VALIDATION, Capability, PersistentState, Plan
from medflare.methods.fedavg.site import GLOBAL, MODEL, PRIVACY, VALIDATE, FedAvgSite, received, trained_model
from medflare.methods.grace.formulas import a_distance, adversarial, coral, mmd
from medflare.methods.grace.hyper import GraceSiteHyper
from medflare.methods.grace.two_step import Penalty, train_two_steps
from medflare.methods.parts.normalisation import batch_statistics
from medflare.methods.parts.selection import Best
from medflare.networks.features import FeatureNetwork, pooled
from medflare.tasks.config import TaskConfig
from medflare.training.epochs import finite_or_none
from medflare.training.site import Site

_HIDDEN: Final = 64  # width of the two-layer discriminator
_DISCRIMINATOR_RATE: Final = 7e-4  # of its Adam, as in the published code


A_DISTANCE = MetaSpec("a_distance", "between global and local features", number(-2.0, 2.0, optional=True), "train")
STEPS = MetaSpec("steps", "mean length of two-step training's inner and outer step", table(number(0, optional=True)), "train")


class GraceSite(FedAvgSite[GraceSiteHyper]):
    """Two-step training with feature alignment; `client` chooses the paper's variants, "erm" is FedAvg's training.

    The site keeps its local model after training, before the next broadcast overwrites it, of the best round by its own validation images.
    """

    Hyper: ClassVar[type] = GraceSiteHyper
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    phases: ClassVar[tuple[Phase, ...]] = (
        Phase("train", request=(GLOBAL,), reply=(MODEL,), reply_meta=(*MEASURED, PRIVACY, A_DISTANCE, STEPS)),
        VALIDATE,
    )
    dp_unsupported_reason = "its alignment compares the features of a whole batch, and meta-train follows a gradient without noise"

    discriminator = PersistentState("discriminator")

    def __init__(self, site: Site, plan: Plan[GraceSiteHyper, Any]):
        super().__init__(site, plan)
        self.personal = Best(self.memory, "personal")
        self._steps: dict[str, float | None] | None = None

    @classmethod
    def check(cls, task: TaskConfig, hyper: GraceSiteHyper, server_hyper: Any) -> None:
        """Refuse a rate of a plain meta-train step where there is none, and a network that cannot be adapted where it is to be.

        Raises:
            ConfigError: one of both.
        """
        super().check(task, hyper, server_hyper)
        if hyper.tta != "none":
            check_adaptable(task)
        if hyper.inner_rate is not None and hyper.inner != "sgd":
            raise ConfigError("inner_rate is the rate of a plain gradient step; set inner=sgd, or leave inner_rate out")

    @classmethod
    def needs_features(cls, hyper: GraceSiteHyper) -> bool:
        """Two steps, alignment and the probe."""
        return hyper.client != "erm" or hyper.probe

    def train(self, round: int, incoming: Message) -> Message:
        """FedAvg's training; the local model is measured, offered as the personal one and, where asked for, probed (A-distance)."""
        self._steps = None
        reply = super().train(round, incoming)
        state = reply.states[MODEL]
        local = self.network("model", state)
        value = finite_or_none(self.validation(local))
        reply.meta[VALIDATION]["personal"] = value
        self.personal.offer(value if self.plan.server_hyper.selection != "last" else None, round + 1, state)
        if self.hyper.probe:
            features = (self._features(model) for model in (self.frozen(incoming.states[GLOBAL]), local))
            seed = derived_seed(self.site.seed, self.site.name, round, "probe") % 2**32
            reply.meta[A_DISTANCE] = finite_or_none(a_distance(*features, seed=seed))
        if self._steps is not None:
            reply.meta[STEPS] = self._steps
        return reply

    @torch.no_grad()
    def _features(self, model: FeatureNetwork) -> Tensor:
        """Pooled features (N, D) of the site's training images."""
        model.eval()
        return torch.cat([pooled(model.features_and_output(batch.images)[0]).cpu() for batch in self.site.ordered("train")])

    def fit(self, model: FeatureNetwork, optimizer: torch.optim.Optimizer, round: int) -> float | None:
        """Two-step training with the alignment that `client` names; "erm" is FedAvg's training."""
        client = self.hyper.client
        if client == "erm":
            return super().fit(model, optimizer, round)
        if client == "meta":
            return self._two_steps(model, optimizer, round)
        shared = self.frozen(model.state_dict())
        if client != "adv":
            return self._two_steps(model, optimizer, round, self.aligned(shared, coral if client == "coral" else mmd))
        with self._adversary(shared, optimizer) as discriminator:
            return self._two_steps(model, optimizer, round, self.aligned(shared, partial(adversarial, discriminator)))

    def _two_steps(self, model: FeatureNetwork, optimizer: torch.optim.Optimizer, round: int, penalty: Penalty | None = None) -> float:
        hyper = self.hyper
        options: dict[str, Any] = {"inner": hyper.inner, "rate": hyper.inner_rate, "swap": hyper.swap}
        loss, self._steps = train_two_steps(model, optimizer, self.site, round, penalty, **options)
        return loss

    def aligned(self, shared: FeatureNetwork, distance: Penalty) -> Penalty:
        """beta * L_align(h(x; phi_g), h(x; phi')) of Eq. 2; nothing for a single row, which has no distribution to align.

        Both models normalise by the same batch, or their distance would be that of two modes of batch normalisation: on the running
        statistics of a model, CORAL between the model and itself is most of what it is between the models that are to be aligned.

        Returns:
            (images, local features) -> weighted alignment loss.
        """

        def penalty(images: Tensor, features: Tensor) -> Tensor:
            with torch.no_grad(), batch_statistics(shared):
                x = pooled(shared.features_and_output(images)[0])
            y = pooled(features)
            return self.hyper.beta * distance(x, y) if len(x) > 1 else y.new_zeros(())

        return penalty

    @contextmanager
    def _adversary(self, shared: FeatureNetwork, optimizer: torch.optim.Optimizer) -> Iterator[nn.Module]:
        """The site's discriminator for a round; it steps with its own Adam whenever the model steps, from the same backward pass."""
        with torch.no_grad():
            features, _ = shared.features_and_output(next(self.site.ordered("train")).images[:1])
        with seeded(self.site.seed, self.site.name, "discriminator"):
            discriminator = build_discriminator(features.shape[1]).to(self.site.device)
        if self.discriminator is not None:
            discriminator.load_state_dict(self.discriminator)
        own = self.optimizers.recall("discriminator", torch.optim.Adam(discriminator.parameters(), lr=_DISCRIMINATOR_RATE))

        def learn(*_: object) -> None:
            own.step()
            own.zero_grad()

        handle = optimizer.register_step_post_hook(learn)
        try:
            yield discriminator
        finally:
            handle.remove()
        self.optimizers.keep("discriminator", own)
        self.discriminator = copy_state(discriminator.state_dict())

    def finalize(self, incoming: Message) -> dict[str, Message]:
        """Inside: the local model (the global one where the site never trained). Outside: the global one, adapted as chosen."""
        shared = received(incoming)
        if self.inside:
            own = shared if self.personal.state is None else trained_model(self.personal.state, self.personal.round)
            return {"global": shared, "personal": own, "deployed": own}
        adapted = shared
        if self.hyper.tta == "tent":
            adapted = with_tent(shared, self.site.task, rate=self.hyper.tent_rate)
        elif self.hyper.tta == "dsbn":
            adapted = dsbn_for(self.site, shared, partial(build, self.site.task))
        return {"global": shared, "deployed": adapted}


def build_discriminator(width: int) -> nn.Module:
    """Features (N, width) -> logits (N, 1)."""
    return nn.Sequential(nn.Linear(width, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, 1))
