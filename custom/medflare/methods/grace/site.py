"""GRACE's site half: every batch is cut in two.

A step on the first half (meta-train) gives theta'; the site's update is the gradient at theta' of the task loss on the second half
plus beta times the distance between its features under the frozen global model and under theta' (meta-update).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from medflare.core.errors import ConfigError
from medflare.core.rng import seeded
from medflare.core.states import copy_state
from medflare.methods.base import Kept
from medflare.methods.grace.formulas import adversarial, coral, mmd
from medflare.methods.grace.hyper import GraceSiteHyper
from medflare.methods.grace.local_model import LocalModelSite
from medflare.methods.grace.two_step import Penalty
from medflare.methods.parts.normalisation import batch_statistics
from medflare.networks.features import FeatureNetwork, pooled
from medflare.tasks.config import TaskConfig

_HIDDEN: Final = 64  # width of the two-layer discriminator
_DISCRIMINATOR_RATE: Final = 7e-4  # of its Adam, as in the published code


class GraceSite(LocalModelSite[GraceSiteHyper]):
    """Two-step training with feature alignment; `client` chooses the paper's variants, "erm" is FedAvg's training."""

    Hyper: ClassVar[type] = GraceSiteHyper
    unprotected = "its alignment compares the features of a whole batch, and meta-train follows a gradient without noise"

    discriminator = Kept("discriminator")

    @classmethod
    def check(cls, task: TaskConfig, hyper: GraceSiteHyper, server_hyper: Any) -> None:
        """Refuse a rate of a plain meta-train step where there is none.

        Raises:
            ConfigError: `inner_rate` without inner=sgd.
        """
        super().check(task, hyper, server_hyper)
        if hyper.inner_rate is not None and hyper.inner != "sgd":
            raise ConfigError("inner_rate is the rate of a plain gradient step; set inner=sgd, or leave inner_rate out")

    @classmethod
    def needs_features(cls, hyper: GraceSiteHyper) -> bool:
        """Two steps, alignment and the probe."""
        return hyper.client != "erm" or hyper.probe

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
        return self.two_steps(model, optimizer, round, penalty, inner=hyper.inner, rate=hyper.inner_rate, swap=hyper.swap)

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


def build_discriminator(width: int) -> nn.Module:
    """Features (N, width) -> logits (N, 1)."""
    return nn.Sequential(nn.Linear(width, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, 1))
