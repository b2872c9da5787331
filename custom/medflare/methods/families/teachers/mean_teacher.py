"""Mean teacher (Tarvainen and Valpola, NeurIPS 2017) at sites without labels.

A site without labels trains the student θ on consistency with a teacher θ', which follows it:

    J(θ) = || f(x, θ', η') - f(x, θ, η) ||²              (Sec. 3)
    θ'_t = α θ'_{t-1} + (1 - α) θ_t                      (Eq. 1)

All other sites train as in FedAvg. The weight of J and that of such a site in the mean rise over
the rounds: an optimizer such as Adam cancels a factor of the loss.

Ours: student and teacher see the same augmented images with different noise, so that masks stay in
place; in every round the teacher starts as the global model, which is a mean of models itself.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from medflare.methods import (
    FeatureNetwork,
    FedAvgServer,
    FedAvgServerHyper,
    FedAvgSiteHyper,
    StateDict,
    param,
    states_of,
    strict_dataclass,
    torch_generator,
)
from medflare.methods.families.server_rules.rule import Models, ReweightedMean
from medflare.methods.families.teachers.site import ANNOTATED, TeacherSite
from medflare.methods.parts.normalisation import batch_statistics


def ramp_up(round: int, rounds: int) -> float:
    """exp(-5 (1 - x)²) with x = round / rounds, at most 1 (Tarvainen and Valpola, App. B)."""
    progress = min(round / rounds, 1.0) if rounds else 1.0
    return math.exp(-5 * (1 - progress) ** 2)


@strict_dataclass
class MeanTeacherHyper(FedAvgSiteHyper):
    """The consistency at a site without labels."""

    strength: float = param(
        1.0,
        "largest weight of the consistency; 0: the site's model stays the global one",
        source="ours; the paper's 100 is relative to a supervised loss",
        low=0,
    )
    decay: float = param(
        0.99,
        "of the teacher's weights",
        symbol="α",
        source="App. B, during the ramp-up",
        low=0,
        high=1,
    )
    noise: float = param(
        0.15,
        "deviation of the noise of student's and teacher's images",
        symbol="η",
        source="App. B",
        low=0,
    )


@strict_dataclass
class MeanTeacherServerHyper(FedAvgServerHyper):
    """The weight of sites without labels."""

    unlabelled_weight: float = param(
        1.0, "factor of the weight of sites without labels, after the ramp-up", source="ours", low=0
    )
    ramp_rounds: int = param(
        10, "rounds in which consistency and that weight rise; 0: none", source="ours", low=0
    )


class MeanTeacherSite(TeacherSite[MeanTeacherHyper]):
    """Trains on labels where there are any, else on consistency."""

    server_hyper = MeanTeacherServerHyper
    dp_unsupported_reason = "the teacher follows the student batch by batch, not patient by patient"

    def fit(self, model: FeatureNetwork, optimizer: Optimizer, round: int) -> float | None:
        """Epochs of the task's loss, or of the consistency; returns its mean."""
        if self.site.annotation.names:
            return super().fit(model, optimizer, round)
        weight = self.hyper.strength * ramp_up(round, self.plan.server_hyper.ramp_rounds)
        if not weight:
            return None
        teacher = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(self.hyper.decay))
        teacher.eval()

        def follow(*_: object) -> None:
            teacher.update_parameters(model)

        follow()  # the first one copies
        optimizer.register_step_post_hook(follow)
        random = torch_generator(self.site.seed, self.site.name, round, "noise")

        def predicted(network: nn.Module, images: Tensor) -> Tensor:
            noise = torch.randn(images.shape, generator=random).to(images)
            return self.site.task.probabilities(network(images + self.hyper.noise * noise))

        def loss(network: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
            with torch.no_grad(), batch_statistics(teacher):
                taught = predicted(teacher, images)
            return weight * nn.functional.mse_loss(predicted(network, images), taught)

        return self.descend(model, optimizer, round, loss)


class LabelledMean(ReweightedMean):
    """The mean in which sites without labels have a smaller weight."""

    def shared(self, models: Models, round: int, previous: StateDict | None = None) -> StateDict:
        factor = self.hyper.unlabelled_weight * ramp_up(round, self.hyper.ramp_rounds)
        weights = self.shares(models)
        for site, model in models.items():
            if model.meta.get(ANNOTATED.name) == 0:
                weights[site] *= factor
        if previous is not None and not any(weights.values()):
            return previous
        limited = self._limited(weights) if any(weights.values()) else {}
        return self.combined(states_of(models), limited or self.shares(models), previous)


class MeanTeacherServer(FedAvgServer[MeanTeacherServerHyper]):
    """FedAvg's server algorithm with `LabelledMean`."""

    aggregation_class = LabelledMean

    @classmethod
    def fewest_combined(cls, hyper: Any, sites: int) -> int:
        """One if sites without labels have no weight: a single other site's model stays alone."""
        return sites if hyper.unlabelled_weight else 1
