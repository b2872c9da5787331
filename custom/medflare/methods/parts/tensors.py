"""What formulas share: requirements on their arguments (known options, equal shapes, more than half
precision for squares and sums), and gradients by name.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medflare.core.states import State, StateDict


def widened(tensor: Tensor) -> Tensor:
    """A tensor of half precision as float32, since squares and sums leave its range; any other as
    it is.
    """
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.float()
    return tensor


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raises ValueError if `value` is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name} = {value!r}: choose one of {', '.join(choices)}")


def refuse_shapes(**tensors: Tensor) -> None:
    """Raises ValueError if two tensors differ in shape, which torch would broadcast; arguments by
    the names in the message.
    """
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = [f"{name} of shape {tuple(tensor.shape)}" for name, tensor in tensors.items()]
        raise ValueError(f"{' and '.join(shapes)}; give both the same shape")


def refuse_widths(x: Tensor, y: Tensor) -> None:
    """Raises ValueError if features (N, D) and (M, D) differ in D."""
    if x.shape[1:] != y.shape[1:]:
        raise ValueError(
            f"features of shapes {tuple(x.shape)} and {tuple(y.shape)}: "
            "give both sets rows of one length"
        )


def named_gradients(loss: Tensor, weights: State, *, retain_graph: bool = False) -> StateDict:
    """The gradients of a loss by named weights; zero for one that it does not use."""
    gradients = torch.autograd.grad(
        loss, list(weights.values()), retain_graph=retain_graph, materialize_grads=True
    )
    return dict(zip(weights, gradients, strict=True))
