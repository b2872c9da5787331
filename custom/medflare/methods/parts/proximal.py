"""The proximal term λ/2 |θ - w|² towards a shared model w, of FedProx, Ditto and pFedMe."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from medflare.core.states import StateDict
from medflare.training.epochs import named_trainable


def proximal_gradients(
    gradients: Sequence[Tensor],
    weights: Sequence[Tensor],
    anchor: Sequence[Tensor],
    strength: float,
) -> list[Tensor]:
    """g + λ (θ - w), for gradients g, weights θ and anchor w in the same order.

    Source: pFedMe's inner problem (Dinh et al. 2020, Eq. 3, λ); FedProx is the same step with
    strength μ (Li et al. 2020, Eq. 2), Ditto with λ for the personal model (Li et al. 2021,
    Alg. 1).
    """
    return [g + strength * (t - a) for g, t, a in zip(gradients, weights, anchor, strict=True)]


def proximal_term(model: nn.Module, anchor: StateDict, strength: float) -> Callable[[], None]:
    """A `gradient_hook` for `train_epochs` that adds λ (θ - w) to every gradient of `model`, in
    place; w are the entries of `anchor`.
    """
    pairs = []  # θ and w
    for name, weight in named_trainable(model).items():
        pairs.append((weight, anchor[name].detach().to(weight.device, copy=True)))

    @torch.no_grad()
    def gradient_hook() -> None:
        for weight, origin in pairs:
            if weight.grad is not None:
                (weight.grad,) = proximal_gradients([weight.grad], [weight], [origin], strength)

    return gradient_hook
