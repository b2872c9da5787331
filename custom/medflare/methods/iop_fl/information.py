"""What keeps test-time routing from collapse, as pure functions: noise and windows in an image's own units, information, agreement.

Eq. 7-10 of the paper fall when every prediction becomes the same: an empty mask, or one half everywhere, is consistent, has no shape and
costs next to no entropy. The functions here say how much a prediction still tells, and how far it has gone from where it started.
Probabilities are over all classes, (N, C, ...), as in `formulas`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_CODE_RADIUS, _CODE_SIDE = 10, 384  # the published code's window, and the side of the images that it belongs to


def image_spread(images: Tensor) -> Tensor:
    """Standard deviation of every image over its channels and pixels, (N, 1, ...): the unit of Eq. 7's noise.

    The paper's images are normalised to a standard deviation of one, where this changes nothing. A constant image has 0.

    Args:
        images: (N, C, H, W) or (N, C, X, Y, Z).

    Examples:
        >>> image_spread(torch.tensor([[[[0.0, 2.0]]], [[[5.0, 5.0]]]])).flatten()
        tensor([1., 0.])
    """
    return images.flatten(1).std(dim=1, correction=0).view(-1, *[1] * (images.ndim - 1))


def window_radius(sides: Sequence[int]) -> int:
    """Radius d of Eq. 8's window as the share of the image's shortest side that the published code has, 10 of 384; at least 1 pixel.

    Args:
        sides: of the image in pixels.

    Examples:
        >>> window_radius([384, 384]), window_radius([64, 96]), window_radius([16, 16])
        (10, 2, 1)
    """
    return max(1, round(min(sides) * _CODE_RADIUS / _CODE_SIDE))


def mean_entropy(p: Tensor) -> Tensor:
    """H(mean p), the entropy of the classes' shares over all pixels and images; log C where all are equally frequent.

    Its difference to the mean entropy of the pixels, `formulas.entropy_loss`, is the mutual information of pixel and prediction
    (Krause et al., NIPS 2010, Eq. 2).

    Args:
        p: over all classes.

    Returns:
        A scalar.

    Examples:
        >>> mean_entropy(torch.tensor([[1.0, 0.0], [0.0, 1.0]])), mean_entropy(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
        (tensor(0.6931), tensor(0.))
    """
    return entropy_of(class_shares(p))


def class_shares(p: Tensor) -> Tensor:
    """Mean probability of every class over all pixels and images, (C,).

    Args:
        p: over all classes.
    """
    return p.transpose(0, 1).flatten(1).mean(dim=1)


def entropy_of(shares: Tensor) -> Tensor:
    """-sum_c s_c log s_c, with 0 log 0 = 0 and a finite slope there.

    Args:
        shares: (C,).

    Examples:
        >>> entropy_of(torch.tensor([0.5, 0.5])), entropy_of(torch.tensor([1.0, 0.0]))
        (tensor(0.6931), tensor(0.))
    """
    return (-shares * shares.clamp_min(torch.finfo(shares.dtype).tiny).log()).sum()


def divergence(start: Tensor, p: Tensor) -> Tensor:
    """KL(start || p), summed over classes, mean over pixels and images: what leaving the starting prediction costs.

    Args:
        start: probabilities before the first step; they take no gradient.
        p: probabilities of the moment, of the same shape.

    Returns:
        A scalar: 0 for equal predictions.

    Examples:
        >>> even, certain = torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0]])
        >>> divergence(certain, certain), divergence(certain, even)
        (tensor(0.), tensor(0.6931))
    """
    start, least = start.detach(), torch.finfo(p.dtype).eps
    ratio = start.clamp_min(least).log() - p.clamp_min(least).log()
    return (start * ratio).sum(dim=1).mean()


def information_total(consistency: Tensor, shape: Tensor, information: Tensor, leaving: Tensor, beta: float, anchor: float) -> Tensor:
    """L = L_cons + beta (L_s - I) + anchor KL(start || p): Eq. 10 whose entropy term is a negative mutual information.

    Eq. 9's entropy alone rewards one class for everything; I = H(mean p) - mean H(p) also pays for that. The last term keeps what is
    unsure from drifting to where all terms are small.

    Args:
        consistency: L_cons, a scalar.
        shape: L_s, a scalar.
        information: I, a scalar.
        leaving: see `divergence`.
        beta: weight of shape and information.
        anchor: weight of the divergence.

    Returns:
        A scalar.

    Examples:
        >>> information_total(*map(torch.tensor, (1.0, 2.0, 0.5, 3.0)), beta=0.1, anchor=0.2)
        tensor(1.7500)
    """
    return consistency + beta * (shape - information) + anchor * leaving


def agreeing(chosen: Tensor, start: Tensor) -> tuple[int, int]:
    """Numerator and denominator of the agreement of two predictions: of masks their Dice over all pixels together, of lists of classes the
    share that is the same. Both add up over batches; 0 of 0, two empty masks, is full agreement.

    Args:
        chosen: bool masks (N, C, ...), or classes (N,).
        start: of the same shape.

    Examples:
        >>> agreeing(torch.tensor([True, True]), torch.tensor([True, False])), agreeing(torch.tensor([2, 1]), torch.tensor([2, 0]))
        ((2, 3), (1, 2))
        >>> agreeing(torch.tensor([False]), torch.tensor([False]))
        (0, 0)
    """
    if chosen.dtype != torch.bool:
        return int((chosen == start).sum()), chosen.numel()
    return 2 * int((chosen & start).sum()), int(chosen.sum()) + int(start.sum())
