"""What formulas share: requirements on their arguments (equal shapes, more than half precision for
squares and sums), and gradients by name.
"""

import torch
from torch import Tensor

from medflare.core.states import State, StateDict


def widened(tensor: Tensor) -> Tensor:
    """A tensor of half precision as float32, since squares and sums leave its range; any other is
    returned as it is.
    """
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.float()
    return tensor


def refuse_shapes(**tensors: Tensor) -> None:
    """Raises ValueError if two tensors, given by their names in the message, differ in shape, which
    torch would broadcast.
    """
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = [f"{name} of shape {tuple(tensor.shape)}" for name, tensor in tensors.items()]
        raise ValueError(f"{' and '.join(shapes)}; give both the same shape")


def named_gradients(loss: Tensor, weights: State, *, retain_graph: bool = False) -> StateDict:
    """The gradients of a loss by named weights; zero for one that it does not use."""
    gradients = torch.autograd.grad(
        loss, list(weights.values()), retain_graph=retain_graph, materialize_grads=True
    )
    return dict(zip(weights, gradients, strict=True))
