"""GRACE's site half: every batch is cut in two.

A step on the first half (meta-train) gives theta'; the site's update is the gradient at theta' of the task loss on the second half
plus beta times the distance between its features under the frozen global model and under theta' (meta-update).
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from medflare.core.errors import ConfigError
from medflare.core.rng import seeded, torch_generator
from medflare.core.states import copy_state
from medflare.methods.base import Kept
from medflare.methods.grace.formulas import adversarial, coral, mmd, reversal_ramp
from medflare.methods.grace.hyper import GraceSiteHyper
from medflare.methods.grace.local_model import LocalModelSite
from medflare.methods.grace.two_step import Penalty
from medflare.methods.parts.normalisation import batch_statistics
from medflare.networks.features import FeatureNetwork, pooled
from medflare.tasks.config import TaskConfig

_HIDDEN = 64  # width of the two-layer discriminator


class GraceSite(LocalModelSite[GraceSiteHyper]):
    """Two-step training with feature alignment; `client` chooses the paper's variants, "erm" is FedAvg's training."""

    Hyper: ClassVar[type] = GraceSiteHyper
    unprotected = "its alignment compares the features of a whole batch, and meta-train follows a gradient without noise"

    discriminator = Kept("discriminator")

    @classmethod
    def check(cls, task: TaskConfig, hyper: GraceSiteHyper, server_hyper: Any) -> None:
        """Refuse settings of the meta-train step that exclude each other.

        Raises:
            ConfigError: `adam_plus_sgd` with a plain or a second-order meta-train step, or what belongs to a plain one without it.
        """
        super().check(task, hyper, server_hyper)
        plain = hyper.inner == "sgd"
        if hyper.adam_plus_sgd and (plain or hyper.second_order):
            raise ConfigError("adam_plus_sgd takes the optimizer's own step, first order; set inner=optimizer second_order=false")
        if hyper.second_order and not plain:
            raise ConfigError("second_order differentiates through a plain gradient step; set inner=sgd, or second_order=false")
        if hyper.inner_rate is not None and not plain:
            raise ConfigError("inner_rate is the rate of a plain gradient step; set inner=sgd, or leave inner_rate out")

    @classmethod
    def needs_features(cls, hyper: GraceSiteHyper) -> bool:
        """Two steps, alignment and the probe."""
        return hyper.client != "erm" or hyper.probe

    def fit(self, model: FeatureNetwork, optimizer: torch.optim.Optimizer, round: int) -> float | None:
        """Two-step training with the alignment that `client` names, without it during the warm-up; "erm" is FedAvg's training."""
        hyper = self.hyper
        if hyper.client == "erm":
            return super().fit(model, optimizer, round)
        if hyper.client == "meta" or round < hyper.warmup:
            return self._two_steps(model, optimizer, round)
        shared = self.frozen(model.state_dict())
        if hyper.client == "coral":
            return self._two_steps(model, optimizer, round, self.aligned(shared, partial(coral, form=hyper.coral_form), round))
        if hyper.client == "mmd":
            return self._two_steps(model, optimizer, round, self.aligned(shared, partial(mmd, kernel=hyper.mmd_kernel), round))
        with self._adversary(shared, optimizer) as discriminator:
            distance = partial(adversarial, discriminator, alpha=self._reversal(round))
            return self._two_steps(model, optimizer, round, self.aligned(shared, distance, round))

    def _two_steps(self, model: FeatureNetwork, optimizer: torch.optim.Optimizer, round: int, penalty: Penalty | None = None) -> float:
        hyper = self.hyper
        options = {"inner": hyper.inner, "second_order": hyper.second_order, "adam_plus_sgd": hyper.adam_plus_sgd, "swap": hyper.swap}
        return self.two_steps(model, optimizer, round, penalty, rate=hyper.inner_rate, **options)

    def aligned(self, shared: FeatureNetwork, distance: Penalty, round: int) -> Penalty:
        """beta * L_align(h(x; phi_g), h(x; phi')) of Eq. 2; nothing for a single row, which has no distribution to align.

        Both models normalise by the same batch, or their distance would be that of two modes of batch normalisation: on the running
        statistics of a model, CORAL between the model and itself is most of what it is between the models that are to be aligned.

        Args:
            shared: the frozen global model.
            distance: (global features (n, D), local features (n, D)) -> scalar.
            round: 0-based, a key of the draw of pixels.

        Returns:
            (images, local features) -> weighted alignment loss.
        """
        generator = torch_generator(self.site.seed, self.site.name, round, "pixels")

        def penalty(images: Tensor, features: Tensor) -> Tensor:
            with torch.no_grad(), batch_statistics(shared) if self.hyper.reference == "batch" else nullcontext():
                reference, _ = shared.features_and_output(images)
            x, y = feature_rows(reference, features, self.hyper.align_pixels, generator)
            return self.hyper.beta * distance(x, y) if len(x) > 1 else y.new_zeros(())

        return penalty

    @contextmanager
    def _adversary(self, shared: FeatureNetwork, optimizer: torch.optim.Optimizer) -> Iterator[nn.Module]:
        """The site's discriminator for a round; it steps with its own Adam whenever the model steps, from the same backward pass."""
        with torch.no_grad():
            features, _ = shared.features_and_output(next(self.site.ordered("train")).images[:1])
        with seeded(self.site.seed, self.site.name, "discriminator"):
            discriminator = build_discriminator(features.shape[1], self.hyper.discriminator).to(self.site.device)
        if self.discriminator is not None:
            discriminator.load_state_dict(self.discriminator)
        own = self.optimizers.recall("discriminator", torch.optim.Adam(discriminator.parameters(), lr=self.hyper.adv_rate))

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

    def _reversal(self, round: int) -> float:
        rounds = self.hyper.reversal_rounds
        return self.hyper.reversal * (reversal_ramp(min(1.0, (round + 1) / rounds)) if rounds else 1.0)


def build_discriminator(width: int, kind: str) -> nn.Module:
    """Features (N, width) -> logits (N, 1)."""
    if kind == "linear":
        return nn.Linear(width, 1)
    return nn.Sequential(nn.Linear(width, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, 1))


def feature_rows(x: Tensor, y: Tensor, pixels: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Samples (n, D) of two models' features of the same images: a row per image, or the same random `pixels` of both maps.

    Args:
        x: features (N, D) or (N, D, H, W) under one model.
        y: features of the same images under the other model.
        pixels: how many are drawn; 0: a row per image.
        generator: source of the draw.
    """
    if not pixels or x.ndim == 2:
        return pooled(x), pooled(y)
    rows = [features.movedim(1, -1).flatten(0, -2) for features in (x, y)]
    chosen = torch.randperm(len(rows[0]), generator=generator)[:pixels].to(x.device)
    return rows[0][chosen], rows[1][chosen]
