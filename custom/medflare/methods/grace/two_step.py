"""GRACE's way of local training: meta-train on one half of every batch, meta-update with the other (MICCAI 2023, Sec. 2.2)."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import get_total_norm

from medflare.methods.grace.formulas import Inner, gradients_of, meta_trained
from medflare.networks.features import FeatureNetwork
from medflare.training.accumulation import unremembered
from medflare.training.epochs import finite_or_none, train_epochs, trainable
from medflare.training.site import Site

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
    inner: Inner = "optimizer",
    rate: float | None = None,
    swap: bool = True,
) -> tuple[float, dict[str, float | None]]:
    """One round of local training in place.

    Args:
        penalty: weighted alignment loss of the meta-test half's features; None for none.
        inner: the meta-train step: "optimizer", one of the optimizer from its moments as they are, which it leaves as they are; "sgd", a
            plain gradient step.
        rate: eta of a plain meta-train step; None: the optimizer's learning rate.
        swap: each half of a batch is meta-test once, see `roles`.

    Returns:
        (mean meta-loss of Eq. 2, how far a step goes on average: "inner", ||theta' - theta||, and "outer", the optimizer's own).
    """
    eta = float(optimizer.param_groups[0]["lr"]) if rate is None else rate
    lengths = StepLengths(model)

    def adapt(parameters: Parameters, task_loss: Callable[[Parameters], Tensor]) -> dict[str, Tensor]:
        if inner == "sgd":
            adapted = meta_trained(parameters, task_loss, eta)
        else:
            with unremembered(optimizer):
                adapted = stepped(parameters, task_loss, optimizer)
        lengths.adapted(list(adapted.values()))
        return adapted

    meta_loss = MetaLoss(model, site, penalty, adapt, swap)

    def loss(network: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        lengths.arrived()
        return meta_loss(network, images, targets)

    mean = train_epochs(model, optimizer, site, round, "model", loss=loss)
    lengths.arrived()
    return mean, lengths.means()


class StepLengths:
    """How far meta-train and the optimizer move the weights, in the weights' own units."""

    def __init__(self, model: nn.Module):
        self._weights = trainable(model)
        self._origin: list[Tensor] | None = None
        self._lengths: dict[str, list[Tensor]] = {"inner": [], "outer": []}

    def arrived(self) -> None:
        """The weights are where a batch begins, or the last one has ended."""
        if self._origin is not None:
            self._note("outer", self._weights)
        self._origin = [weight.detach().clone() for weight in self._weights]

    def adapted(self, weights: Sequence[Tensor]) -> None:
        """Meta-train has gone from the weights of the batch's beginning to these."""
        self._note("inner", weights)

    @torch.no_grad()
    def _note(self, step: str, weights: Sequence[Tensor]) -> None:
        moves = [weight - origin for weight, origin in zip(weights, self._origin or (), strict=True)]
        self._lengths[step].append(get_total_norm(moves))

    def means(self) -> dict[str, float | None]:
        """Mean length by kind of step; None where there was none, or one that is not finite."""
        return {step: finite_or_none(torch.stack(found).mean().item()) if found else None for step, found in self._lengths.items()}


class MetaLoss:
    """L_meta (Eq. 2) as a function of theta, whose gradient is the meta-update's: any training loop can follow it.

    Args:
        adapt: (theta, loss on the meta-train half) -> theta', differentiable by theta.
    """

    def __init__(self, network: FeatureNetwork, site: Site, penalty: Penalty | None, adapt: Callable[..., Parameters], swap: bool = False):
        self.model = _WithFeatures(network)
        self.parameters = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        self.site, self.penalty, self.adapt, self.swap = site, penalty, adapt, swap

    def __call__(self, _network: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
        losses = [self._of(images, targets, first, second) for first, second in roles(len(images), self.swap)]
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def _of(self, images: Tensor, targets: Tensor, first: slice, second: slice) -> Tensor:
        """The meta-loss on the rows `second` after meta-train on the rows `first`."""

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


def roles(count: int, swap: bool) -> list[tuple[slice, slice]]:
    """The (meta-train, meta-test) parts of a batch: once by position, or with `swap` a second time with the parts exchanged.

    The paper takes a gradient from one half of its images alone. Exchanged, the update is the mean of both meta-losses' gradients: it
    rests on every image, as one plain step on the whole batch does, at twice the passes.

    Examples:
        >>> roles(8, swap=False), len(roles(8, swap=True)), len(roles(3, swap=True))  # the parts of a small batch are the same
        ([(slice(None, 4, None), slice(4, None, None))], 2, 1)
    """
    first, second = halves(count)
    return [(first, second), (second, first)] if swap and first != second else [(first, second)]


def stepped(parameters: Parameters, task_loss: Callable[[Parameters], Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """theta' by a step of the optimizer itself, as a function of theta (Eq. 1 with the optimizer's step, first order).

    The step leaves its trace in the optimizer's moments, unless it is taken inside `unremembered`.

    Args:
        parameters: theta by name; leaves that the optimizer steps, left as they were.

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
