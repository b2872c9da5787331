"""GRACE (Zhang et al., "GRACE: A Generalized and Personalized Federated Learning Method for Medical Imaging", MICCAI 2023).

Site: every batch is cut in two. A step on the first half (meta-train) gives theta'; the site's update is the gradient at theta'
of the task loss on the second half plus beta times the distance between its features under the frozen global model and under
theta' (meta-update). Server: updates are averaged with weights that grow with their mean cosine to all updates. Inside, a site
uses its local model; outside, the global one is used. The formulas stand in `grace_math.py`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from medflare.core.errors import ConfigError
from medflare.core.hyper import param
from medflare.core.message import Message
from medflare.core.rng import seeded, torch_generator
from medflare.core.states import StateDict, copy_state
from medflare.methods.base import ServerContext, sample_weights
from medflare.methods.fedavg import FedAvgServer, FedAvgServerHyper
from medflare.methods.grace.formulas import (
    CORAL_FORMS,
    GRANULARITIES,
    MMD_KERNELS,
    NEGATIVE_RULES,
    adversarial,
    consistency_weights,
    consistent_aggregate,
    coral,
    mmd,
    reversal_ramp,
)
from medflare.methods.grace.local_model import LocalModelHyper, LocalModelSite
from medflare.methods.grace.two_step import Penalty, train_two_steps
from medflare.networks.catalogue import build_network
from medflare.networks.features import FeatureNetwork, pooled
from medflare.sites.site import Site
from medflare.tasks.config import TaskConfig

_HIDDEN = 64  # width of the two-layer discriminator


@dataclass(frozen=True)
class GraceSiteHyper(LocalModelHyper):
    client: str = param(
        "coral",
        "plain training, two steps without alignment, or two steps with CORAL, MMD or adversarial alignment",
        source="Sec. 2.2, Table 4",
        choices=("erm", "meta", "coral", "mmd", "adv"),
    )
    beta: float = param(1.0, "weight of the alignment", symbol="β", source="Eq. 2", low=0)
    warmup: int = param(0, "rounds before the alignment sets in", source="code", low=0)
    inner_rate: float | None = param(None, "rate of the meta-train step; none: the task's learning rate", symbol="η", source="Eq. 1", low=0)
    second_order: bool = param(False, "differentiate through the meta-train step", source="Sec. 2.2")
    adam_plus_sgd: bool = param(False, "both steps are one of the optimizer and a plain one of the same rate", source="code")
    coral_form: str = param("domainbed", "CORAL with means, or as in Deep CORAL", source="Eq. 2", choices=CORAL_FORMS)
    mmd_kernel: str = param(
        "mixture", "seven fixed Gaussian kernels, or five around the mean distance", source="Eq. 2", choices=MMD_KERNELS
    )
    align_pixels: int = param(0, "segmentation: align this many pixels of the feature maps; 0: the maps' means", source="Eq. 2", low=0)
    discriminator: str = param("mlp", "two layers or one", source="Table 4, Adv", choices=("mlp", "linear"))
    adv_rate: float = param(7e-4, "the discriminator's Adam rate", source="code", low=0)
    reversal: float = param(1.0, "strength of the reversed gradient", symbol="α", source="Table 4, Adv", low=0)
    reversal_rounds: int = param(0, "rounds over which the reversal grows as in DANN; 0: full from the start", source="Table 4, Adv", low=0)


@dataclass(frozen=True)
class GraceServerHyper(FedAvgServerHyper):
    server: str = param("grace", "weights by consistency, or FedAvg's", source="Table 4", choices=("grace", "fedavg"))
    include_self: bool = param(True, "consistency counts a site's cosine with itself; false as in the code", symbol="c", source="Eq. 3")
    negative: str = param("shift", "what becomes of consistencies that are not positive", source="Eq. 3", choices=NEGATIVE_RULES)
    granularity: str = param("total", "cosines of whole models, or of single tensors", symbol="σ", source="Eq. 3", choices=GRANULARITIES)
    server_rate: float = param(1.0, "step of the server", symbol="η_g", source="Sec. 2.3", low=0)


class GraceSite(LocalModelSite):
    """Two-step training with feature alignment; `client` chooses the paper's variants, "erm" is FedAvg's training."""

    Hyper: ClassVar[type] = GraceSiteHyper
    unprotected = "its alignment compares the features of a whole batch, and meta-train follows a gradient without noise"

    def __init__(self, site: Site, hyper: Any, sites: tuple[str, ...]):
        super().__init__(site, hyper, sites)
        if hyper.adam_plus_sgd and hyper.second_order:
            raise ConfigError("adam_plus_sgd knows a first-order update only; set second_order=false or adam_plus_sgd=false")
        self.discriminator: StateDict | None = None

    def fit(self, model: Any, optimizer: Any, round: int) -> float | None:
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
        options = {"second_order": hyper.second_order, "adam_plus_sgd": hyper.adam_plus_sgd}
        return train_two_steps(model, optimizer, self.site, round, penalty, rate=hyper.inner_rate, **options)

    def aligned(self, shared: FeatureNetwork, distance: Penalty, round: int) -> Penalty:
        """beta * L_align(h(x; phi_g), h(x; phi')) of Eq. 2; nothing for a single row, which has no distribution to align."""
        generator = torch_generator(self.site.seed, self.site.name, round, "pixels")

        def penalty(images: Tensor, features: Tensor) -> Tensor:
            with torch.no_grad():
                reference, _ = shared.features_and_output(images)
            x, y = feature_rows(reference, features, self.hyper.align_pixels, generator)
            return self.hyper.beta * distance(x, y) if len(x) > 1 else y.new_zeros(())

        return penalty

    @contextmanager
    def _adversary(self, shared: FeatureNetwork, optimizer: torch.optim.Optimizer) -> Iterator[nn.Module]:
        """The site's discriminator for a round; it steps with its own Adam whenever the model steps, from the same backward pass."""
        with torch.no_grad():
            features, _ = shared.features_and_output(self.site.data.train.images[:1].to(self.site.device))
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

    def state(self) -> Message:
        message = super().state()
        if self.discriminator is not None:
            message.states["discriminator"] = self.discriminator
        return message

    def restore(self, state: Message) -> None:
        super().restore(state)
        self.discriminator = state.states.get("discriminator")


def build_discriminator(width: int, kind: str) -> nn.Module:
    """Features (N, width) -> logits (N, 1)."""
    if kind == "linear":
        return nn.Linear(width, 1)
    return nn.Sequential(nn.Linear(width, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, 1))


def feature_rows(x: Tensor, y: Tensor, pixels: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Samples (n, D) of two models' features of the same images: a row per image, or the same random `pixels` of both maps."""
    if not pixels or x.ndim == 2:
        return pooled(x), pooled(y)
    rows = [features.movedim(1, -1).flatten(0, -2) for features in (x, y)]
    chosen = torch.randperm(len(rows[0]), generator=generator)[:pixels].to(x.device)
    return rows[0][chosen], rows[1][chosen]


class GraceServer(FedAvgServer):
    """Consistency-enhanced re-weighting (Eq. 3); works with every site half that sends a model as FedAvg's does."""

    Hyper: ClassVar[type] = GraceServerHyper

    def __init__(self, context: ServerContext, hyper: Any):
        super().__init__(context, hyper)
        self.parameters = trainable_names(context.task)

    def aggregate(self, replies: Mapping[str, Message]) -> StateDict:
        if self.hyper.server == "fedavg":
            return super().aggregate(replies)
        model, weights = consistent_aggregate(
            self.model,
            {site: reply.states["model"] for site, reply in replies.items()},
            sample_weights(replies, self.hyper.weighting),
            self.parameters,
            include_self=self.hyper.include_self,
            negative=self.hyper.negative,
            granularity=self.hyper.granularity,
            server_rate=self.hyper.server_rate,
        )
        self.context.note(weight=weights)
        return model


def trainable_names(task: TaskConfig) -> list[str]:
    """Names of the trainable entries of the task's network, shallow to deep: what the cosines are taken over."""
    with torch.device("meta"):
        network = build_network(task.network, task.channels, task.outputs)
    return [name for name, parameter in network.named_parameters() if parameter.requires_grad]


__all__ = [
    "GraceServer",
    "GraceServerHyper",
    "GraceSite",
    "GraceSiteHyper",
    "consistency_weights",
    "consistent_aggregate",
    "coral",
    "mmd",
    "trainable_names",
]
