"""What formulas ask of the tensors that they are given: one shape, and more than half precision for squares and sums."""

import torch
from torch import Tensor


def widened(tensor: Tensor) -> Tensor:
    """A tensor of half precision as float32, since squares and sums leave its range; any other as it is.

    Examples:
        >>> widened(torch.ones(2, dtype=torch.float16)).dtype, widened(torch.ones(2, dtype=torch.float64)).dtype
        (torch.float32, torch.float64)
    """
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def refuse_shapes(**tensors: Tensor) -> None:
    """Nothing where all tensors have one shape: torch would spread the smaller over the larger without a word.

    Args:
        tensors: by the names that the message gives them.

    Raises:
        ValueError: two shapes, with the names.

    Examples:
        >>> refuse_shapes(p=torch.zeros(2, 2), p_noisy=torch.zeros(1, 2))
        Traceback (most recent call last):
        ValueError: p of shape (2, 2) and p_noisy of shape (1, 2); give both the same shape
    """
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        named = " and ".join(f"{name} of shape {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"{named}; give both the same shape")


def refuse_widths(x: Tensor, y: Tensor) -> None:
    """Nothing where the rows of two sets are equally long.

    Args:
        x: features (N, D).
        y: features (M, D).

    Raises:
        ValueError: two lengths, with both shapes.

    Examples:
        >>> refuse_widths(torch.zeros(4, 2), torch.zeros(3, 1))
        Traceback (most recent call last):
        ValueError: features of shapes (4, 2) and (3, 1): give both sets rows of one length
    """
    if x.shape[1:] != y.shape[1:]:
        raise ValueError(f"features of shapes {tuple(x.shape)} and {tuple(y.shape)}: give both sets rows of one length")
