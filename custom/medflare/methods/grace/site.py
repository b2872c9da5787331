"""GRACE's site algorithm (MICCAI 2023, Sec. 2.2): two steps on every batch.

A batch is cut into a meta-train and a meta-test half. A step on the first half (meta-train) gives
theta'. The update is the gradient at theta' of the task loss on the second half plus beta times the
distance between its features under the frozen global model and under theta' (meta-update).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from medflare.adaptation.registry import adapted_at, check_adaptable
from medflare.core.message import FinalModels
from medflare.core.rng import derived_seed, seeded
from medflare.methods import (
    MEASURED,
    MODEL,
    FeatureNetwork,
    FedAvgSiteHyper,
    Message,
    MetaSpec,
    PersistentState,
    PersonalSite,
    StateDict,
    TaskConfig,
    build,
    copied_state,
    finite_or_none,
    number,
    param,
    phase,
    strict_dataclass,
    train_epochs,
)
from medflare.methods.grace.formulas import a_distance, adversarial, coral, meta_trained, mmd
from medflare.methods.parts.normalisation import batch_statistics
from medflare.methods.parts.tensors import named_gradients
from medflare.networks.catalogue import feature_width
from medflare.networks.features import overwrite, pooled
from medflare.training.epochs import named_trainable, preserved_moments

_DISTANCES = {"coral": coral, "mmd": mmd}
_HIDDEN = 64  # width of the two-layer discriminator
_SMALLEST_CUT = 4  # each half then has two images, which BatchNorm and covariances need

A_DISTANCE = MetaSpec[float | None](
    "a_distance", "between global and local features", number(-2.0, 2.0, optional=True), "train"
)

# (images, the local model's features of them) -> scalar
Penalty = Callable[[Tensor, Tensor], Tensor]
Parameters = Mapping[str, Tensor]
TaskLoss = Callable[[Parameters], Tensor]
# (theta, loss on the meta-train half) -> theta'
Adapt = Callable[[Parameters, TaskLoss], Parameters]


@strict_dataclass
class GraceSiteHyper(FedAvgSiteHyper):
    """Meta-train, meta-update, alignment and test-time adaptation."""

    tta: Literal["none", "dsbn", "tent"] = param(
        "none", "adaptation of the global model at an outside site", source="Table 3"
    )
    probe: bool = param(
        False,
        "report the A-distance between global and local features every round",
        source="Fig. 2",
    )
    client: Literal["erm", "meta", "coral", "mmd", "adv"] = param(
        "coral",
        "plain training, two steps without alignment, or two steps with CORAL, MMD or adversarial "
        "alignment",
        source="Sec. 2.2, Table 4",
    )
    beta: float = param(1.0, "weight of the alignment", symbol="β", source="Eq. 2", low=0)
    inner: Literal["optimizer", "sgd"] = param(
        "optimizer",
        "the meta-train step: one of the task's optimizer, or a plain gradient step",
        source="Eq. 1",
    )
    swap: bool = param(
        True, "each half of a batch is meta-test once; false: only the second", source="Sec. 2.2"
    )


class GraceSite(PersonalSite[GraceSiteHyper]):
    """Two-step training with feature alignment.

    `client` selects the paper's variants; "erm" is FedAvg's training. The personal model is the
    local one after training, of the best round by the site's own validation.
    """

    accumulates = False
    dp_unsupported_reason = (
        "its alignment compares the features of a whole batch, "
        "and meta-train follows a gradient without noise"
    )
    discriminator = PersistentState("discriminator")

    @classmethod
    def check(cls, task: TaskConfig, hyper: GraceSiteHyper, server_hyper: Any) -> None:
        """Also raises ConfigError if `tta` is set and the network has no BatchNorm."""
        super().check(task, hyper, server_hyper)
        if hyper.tta != "none":
            check_adaptable(task)

    @classmethod
    def needs_features(cls, hyper: GraceSiteHyper) -> bool:
        """Whether the settings include two steps, alignment or the probe, which need features."""
        return hyper.client != "erm" or hyper.probe

    @phase(request=(MODEL,), reply=(MODEL,), meta=(*MEASURED, A_DISTANCE.as_optional()))
    def train(self, round: int, incoming: Message) -> Message:
        """FedAvg's training; then the local model is validated as the personal one and, with
        `probe`, its A-distance is computed.
        """
        reply = super().train(round, incoming)
        self.selection.add_trained(round, reply[MODEL], reply)
        if self.hyper.probe:
            reply[A_DISTANCE] = self._distance(round, incoming[MODEL], reply[MODEL])
        return reply

    def _distance(self, round: int, shared: StateDict, local: StateDict) -> float | None:
        """The A-distance between the features of the global and of the local model."""
        of_shared = self._features(self.frozen(shared))
        of_local = self._features(self.network("model", local))
        seed = derived_seed(self.site.seed, self.site.name, round, "probe") % 2**32
        return finite_or_none(a_distance(of_shared, of_local, seed=seed))

    @torch.no_grad()
    def _features(self, model: FeatureNetwork) -> Tensor:
        """Pooled features (N, D) of the site's training images."""
        model.eval()
        rows = []
        for batch in self.site.ordered("train"):
            features, _ = model.features_and_output(batch.images)
            rows.append(pooled(features).cpu())
        return torch.cat(rows)

    def fit(self, model: FeatureNetwork, optimizer: Optimizer, round: int) -> float | None:
        """Two-step training with the alignment of `client`; "erm" is FedAvg's training."""
        client = self.hyper.client
        if client == "erm":
            return super().fit(model, optimizer, round)
        if client == "meta":
            return self._two_steps(model, optimizer, round)
        shared = self.frozen(model.state_dict())
        if client in _DISTANCES:
            return self._two_steps(
                model, optimizer, round, self.aligned(shared, _DISTANCES[client])
            )
        with self._adversary(optimizer) as discriminator:
            penalty = self.aligned(shared, partial(adversarial, discriminator))
            return self._two_steps(model, optimizer, round, penalty)

    def _two_steps(
        self,
        model: FeatureNetwork,
        optimizer: Optimizer,
        round: int,
        penalty: Penalty | None = None,
    ) -> float:
        """One round of two-step training in place; returns the mean meta-loss (Eq. 2)."""

        def adapt(parameters: Parameters, task_loss: TaskLoss) -> Parameters:
            if self.hyper.inner == "sgd":
                return meta_trained(parameters, task_loss, float(optimizer.param_groups[0]["lr"]))
            with preserved_moments(optimizer):
                return optimizer_step(parameters, task_loss, optimizer)

        loss = MetaLoss(model, self.site.loss, adapt, penalty, self.hyper.swap)
        return train_epochs(model, optimizer, self.site, round, "model", loss=loss)

    def aligned(self, shared: FeatureNetwork, distance: Penalty) -> Penalty:
        """beta * L_align(h(x; phi_g), h(x; phi')) of Eq. 2 as (images, local features) -> scalar.

        It is 0 for a single row. Both models normalise by the same batch. With running statistics
        in one of them, CORAL between a model and itself is not 0 but most of its value between
        different models.
        """

        def penalty(images: Tensor, features: Tensor) -> Tensor:
            with torch.no_grad(), batch_statistics(shared):
                shared_features, _ = shared.features_and_output(images)
            x = pooled(shared_features)
            y = pooled(features)
            if len(x) <= 1:
                return y.new_zeros(())
            return self.hyper.beta * distance(x, y)

        return penalty

    @contextmanager
    def _adversary(self, optimizer: Optimizer) -> Iterator[nn.Module]:
        """The site's discriminator for a round, whose own Adam steps with the model's optimizer,
        after the same backward pass.
        """
        width = feature_width(self.site.task)
        with seeded(self.site.seed, self.site.name, "discriminator"):
            discriminator = nn.Sequential(
                nn.Linear(width, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, 1)
            ).to(self.site.device)
        if self.discriminator is not None:
            discriminator.load_state_dict(self.discriminator)
        # The rate of the published code.
        adam = torch.optim.Adam(discriminator.parameters(), lr=7e-4)

        def step(*_: object) -> None:
            adam.step()
            adam.zero_grad()

        with self.continued({"discriminator": adam}):
            handle = optimizer.register_step_post_hook(step)
            try:
                yield discriminator
            finally:
                handle.remove()
        self.discriminator = copied_state(discriminator)

    def finalize(self, incoming: Message) -> FinalModels:
        """The local model inside; the global one outside, adapted by `tta`."""
        models = super().finalize(incoming)
        if not self.inside:
            build_base = partial(build, self.site.task)
            models["deployed"] = adapted_at(self.site, models["global"], self.hyper.tta, build_base)
        return models


@dataclasses.dataclass
class MetaLoss:
    """L_meta (Eq. 2) of a batch as a function of theta; its gradient is that of the meta-update.

    Attributes:
        network: holds theta.
        loss: (logits, targets) -> the task's loss.
        adapt: the meta-train step, differentiable by theta.
        penalty: weighted alignment loss of the meta-test half's features; None for none.
        swap: see `halves`.
    """

    network: FeatureNetwork
    loss: Callable[[Tensor, Tensor], Tensor]
    adapt: Adapt
    penalty: Penalty | None = None
    swap: bool = False

    def __post_init__(self) -> None:
        self.model = _WithFeatures(self.network)
        self.parameters = named_trainable(self.model)

    def __call__(self, _network: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        cuts = halves(len(images), self.swap)
        losses = [self._loss(images, targets, train, test) for train, test in cuts]
        return torch.stack(losses).mean()

    def _loss(self, images: Tensor, targets: Tensor, train: slice, test: slice) -> Tensor:
        """The meta-loss on the rows `test` after meta-train on the rows `train`."""

        def task_loss(parameters: Parameters) -> Tensor:
            _, logits = functional_call(self.model, dict(parameters), (images[train],))
            return self.loss(logits, targets[train])

        adapted = self.adapt(self.parameters, task_loss)
        features, logits = functional_call(self.model, dict(adapted), (images[test],))
        loss = self.loss(logits, targets[test])
        if self.penalty is None:
            return loss
        return loss + self.penalty(images[test], features)


class _WithFeatures(nn.Module):
    """Makes `features_and_output` the `forward`, which is what `functional_call` calls."""

    def __init__(self, network: FeatureNetwork):
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.network.features_and_output(images)


def halves(count: int, swap: bool) -> list[tuple[slice, slice]]:
    """The (meta-train, meta-test) halves of a batch by position, and with `swap` the exchanged
    ones.

    With `swap` the update is the mean of both. The paper's update is the gradient of half of the
    images; the swapped one uses all of them, at twice the passes. A batch of fewer than four images
    is not cut: it is both halves.

    Examples:
        >>> halves(8, swap=False), len(halves(8, swap=True)), len(halves(3, swap=True))
        ([(slice(None, 4, None), slice(4, None, None))], 2, 1)
    """
    if count < _SMALLEST_CUT:
        return [(slice(None), slice(None))]
    first = slice(count // 2)
    second = slice(count // 2, None)
    if swap:
        return [(first, second), (second, first)]
    return [(first, second)]


def optimizer_step(parameters: Parameters, task_loss: TaskLoss, optimizer: Optimizer) -> StateDict:
    """theta' by a step of the optimizer (Eq. 1, first order), as a function of theta.

    The step changes the optimizer's moments, unless it is inside `preserved_moments`.

    Args:
        parameters: theta by name, the optimizer's leaves; unchanged afterwards.

    Returns:
        theta' by name.
    """
    origin = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for name, gradient in named_gradients(task_loss(parameters), parameters).items():
        parameters[name].grad = gradient
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        moves = {name: parameter - origin[name] for name, parameter in parameters.items()}
        overwrite(parameters.values(), origin.values())
    return {name: parameter + moves[name] for name, parameter in parameters.items()}
