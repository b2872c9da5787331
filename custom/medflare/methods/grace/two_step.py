"""GRACE's way of local training: meta-train on one half of every batch, meta-update with the other (MICCAI 2023, Sec. 2.2)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.func import functional_call

from medflare.data.sites.site import Site
from medflare.methods.grace.formulas import gradients_of, meta_trained
from medflare.methods.parts.training import train_epochs
from medflare.networks.features import FeatureNetwork

_SMALLEST_CUT = 4  # both halves then hold two images, without which BatchNorm and covariances are undefined

Penalty = Callable[[Tensor, Tensor], Tensor]  # (images, the local model's features of them) -> scalar
Parameters = Mapping[str, Tensor]


def train_two_steps(
    model: FeatureNetwork,
    optimizer: torch.optim.Optimizer,
    site: Site,
    round: int,
    penalty: Penalty | None = None,
    *,
    rate: float | None = None,
    second_order: bool = False,
    adam_plus_sgd: bool = False,
) -> float:
    """One round of local training in place; returns the mean meta-loss (Eq. 2).

    Args:
        model: trained in place.
        optimizer: takes the meta-update's gradient.
        site: gives batches and the task's loss.
        round: 0-based, a key of batches and dropout.
        penalty: weighted alignment loss of the second half's features; None for none.
        rate: eta of the meta-train step, a plain gradient step; None: the optimizer's learning rate.
        second_order: differentiate through the meta-train step.
        adam_plus_sgd: both steps are a step of the optimizer and a plain one of the same rate, as in the published code, where
            meta-train therefore leaves its mark in the optimizer's moments.
    """
    eta = float(optimizer.param_groups[0]["lr"]) if rate is None else rate

    def adapt(parameters: Parameters, task_loss: Callable[[Parameters], Tensor]) -> dict[str, Tensor]:
        if adam_plus_sgd:
            return stepped(parameters, task_loss, optimizer)
        return meta_trained(parameters, task_loss, eta, second_order)

    with plain_step_too(optimizer) if adam_plus_sgd else nullcontext():
        return train_epochs(model, optimizer, site, round, "model", loss=MetaLoss(model, site, penalty, adapt))


class MetaLoss:
    """L_meta (Eq. 2) as a function of theta, whose gradient is the meta-update's: any training loop can follow it.

    Args:
        network: holds theta.
        site: gives the task loss.
        penalty: see `train_two_steps`.
        adapt: (theta, loss on the first half) -> theta', differentiable by theta.
    """

    def __init__(self, network: FeatureNetwork, site: Site, penalty: Penalty | None, adapt: Callable[..., Parameters]):
        self.model = _WithFeatures(network)
        self.parameters = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        self.site, self.penalty, self.adapt = site, penalty, adapt

    def __call__(self, _network: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        first, second = halves(len(images))

        def task_loss(parameters: Parameters) -> Tensor:
            _, logits = functional_call(self.model, dict(parameters), (images[first],))
            return self.site.loss(logits, targets[first])

        adapted = self.adapt(self.parameters, task_loss)
        features, logits = functional_call(self.model, dict(adapted), (images[second],))
        loss = self.site.loss(logits, targets[second])
        return loss if self.penalty is None else loss + self.penalty(images[second], features)


class _WithFeatures(nn.Module):
    """`functional_call` reaches `forward` alone."""

    def __init__(self, network: FeatureNetwork):
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.network.features_and_output(images)


def halves(count: int) -> tuple[slice, slice]:
    """The meta-train and the meta-test part of a batch, by position; a batch of fewer than four images is both.

    Examples:
        >>> halves(8), halves(3)
        ((slice(None, 4, None), slice(4, None, None)), (slice(None, None, None), slice(None, None, None)))
    """
    return (slice(count // 2), slice(count // 2, None)) if count >= _SMALLEST_CUT else (slice(None), slice(None))


def stepped(parameters: Parameters, task_loss: Callable[[Parameters], Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """theta' by a step of the optimizer itself, which keeps its trace in the moments, as a function of theta (first order).

    Args:
        parameters: theta by name; leaves that the optimizer steps, left as they were.
        task_loss: parameters -> loss on the meta-train half of the batch.
        optimizer: of these parameters.

    Returns:
        theta' by name.
    """
    origin = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for name, gradient in gradients_of(parameters, task_loss).items():
        parameters[name].grad = gradient
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        moves = {name: parameter - origin[name] for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            parameter.copy_(origin[name])
    return {name: parameter + moves[name] for name, parameter in parameters.items()}


@contextmanager
def plain_step_too(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, every step of the optimizer is followed by theta <- theta - lr * gradient."""

    @torch.no_grad()
    def descend(*_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])

    handle = optimizer.register_step_post_hook(descend)
    try:
        yield
    finally:
        handle.remove()
