"""The mathematics of IOP-FL (Jiang et al., IEEE TMI 2023) as pure functions: local adapted models and the test-time losses.

Probabilities are (N, C, H, W), or (N, C, X, Y, Z) of volumes, for segmentation and (N, C) for classification, over all classes
(background included).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor

from medflare.core.states import StateDict, blend, difference, misfit, moved
from medflare.methods.parts.tensors import refuse_shapes

_CODE_RADIUS, _CODE_SIDE = 10, 384  # the published code's window, and the side of the images that it belongs to


@overload
def local_adapted(previous: Mapping[str, Tensor], local: Mapping[str, Tensor], tau: float) -> StateDict: ...
@overload
def local_adapted(previous: Tensor, local: Tensor, tau: float) -> Tensor: ...
def local_adapted(previous: Mapping[str, Tensor] | Tensor, local: Mapping[str, Tensor] | Tensor, tau: float) -> StateDict | Tensor:
    """P <- (1 - tau) P + tau w_k: Eq. 4 as an average of weights (reading `ema_local`).

    Printed Eq. 4 subtracts a gradient step from a shrunk weight, P <- (1 - tau) P - tau (eta_l grad_L + eta_g grad_G), which at
    tau = 0.9 shrinks every weight tenfold per round. The local model after training, w_k = w - eta_g grad_G - eta_l grad_L with w
    the previous global model, already carries both gradients, so the bracket is read as the model that they lead to. This is
    also what the published code computes.

    Args:
        previous: P_k^t, a state dict, or one tensor.
        local: w_k, the site's model after this round's local training.
        tau: accumulation rate in [0, 1]; 1 gives the local model, 0 leaves P alone.

    Returns:
        P_k^{t+1} in the form of `previous`; integer entries (batch counters) are those of `local`.

    Raises:
        ValueError: tau outside [0, 1], or two models whose names or shapes differ.

    Examples:
        >>> local_adapted({"w": torch.tensor(0.0)}, {"w": torch.tensor(2.0)}, tau=0.75)
        {'w': tensor(1.5000)}
    """
    if isinstance(previous, Tensor) or isinstance(local, Tensor):
        return local_adapted({"the tensor": _tensor(previous)}, {"the tensor": _tensor(local)}, tau)["the tensor"]
    if not 0 <= tau <= 1:
        raise ValueError(f"tau = {tau} is outside [0, 1], where P_k lies between its last value and the local model")
    if odd := misfit(local, previous):
        raise ValueError(f"the local model does not fit P_k: {odd}")
    return blend(previous, local, tau)


def _tensor(given: Mapping[str, Tensor] | Tensor) -> Tensor:
    if not isinstance(given, Tensor):
        raise ValueError("P_k and the local model are a tensor and a state dict; give both as one or as the other")
    return given


def site_step(local: Mapping[str, Tensor], global_: Mapping[str, Tensor], learnt: Collection[str]) -> StateDict:
    """-eta_l grad_L = w_k - w_g of what is learnt by gradients, and w_k itself of everything else.

    Running statistics have no gradient. The way of a variance that fell from 1 to 0.1 would make another one of 0.5 negative, and BatchNorm
    answers NaN.

    Examples:
        >>> w_k, w_g = ({"w": torch.tensor(a), "running_var": torch.tensor(b)} for a, b in ((1.0, 0.25), (3.0, 1.0)))
        >>> site_step(w_k, w_g, learnt=["w"])
        {'w': tensor(-2.), 'running_var': tensor(0.2500)}
    """
    way = difference(local, global_)
    return {name: way[name] if name in learnt else tensor.clone() for name, tensor in local.items()}


def _statistics(step: Mapping[str, Tensor], learnt: Collection[str] | None) -> StateDict:
    """The entries of a `site_step` that are no step but w_k's own; none where everything is learnt."""
    return {} if learnt is None else {name: tensor for name, tensor in step.items() if name not in learnt}


def local_adapted_explicit(
    previous: Mapping[str, Tensor],
    global_: Mapping[str, Tensor],
    step: Mapping[str, Tensor],
    tau: float,
    learnt: Collection[str] | None = None,
) -> StateDict:
    """P <- (1 - tau) P + tau (w_g^{t+1} - eta_l grad_L): Eq. 4 with this round's global step taken before the local one.

    Args:
        previous: P_k^t, a state dict.
        global_: w_g^{t+1}, which carries -eta_g grad_G of the same round.
        step: -eta_l grad_L = w_k - w_g^t, the site's own way of that round, see `site_step`.
        learnt: names of the parameters; None: all entries. The others have no gradient and move to w_k, as in `local_adapted`.

    Returns:
        P_k^{t+1}.

    Examples:
        >>> P, w_g, step = ({"w": torch.tensor(value)} for value in (0.0, 2.0, -1.0))
        >>> local_adapted_explicit(P, w_g, step, tau=1.0), local_adapted_explicit(P, w_g, step, tau=0.5)
        ({'w': tensor(1.)}, {'w': tensor(0.5000)})
    """
    return blend(previous, {**moved(global_, step), **_statistics(step, learnt)}, tau)


def local_adapted_incremental(
    previous: Mapping[str, Tensor],
    local_step: Mapping[str, Tensor],
    global_step: Mapping[str, Tensor],
    tau: float,
    learnt: Collection[str] | None = None,
) -> StateDict:
    """P <- P - tau (eta_l grad_L + eta_g grad_G): Eq. 4 as a pure gradient step without averaging.

    Args:
        previous: P_k^t, a state dict.
        local_step: -eta_l grad_L = w_k - w_g, see `site_step`.
        global_step: -eta_g grad_G, the way between two global models.

    Returns:
        P_k^{t+1}.

    Examples:
        >>> P, local_step, global_step = ({"w": torch.tensor(value)} for value in (1.0, -1.0, 3.0))
        >>> local_adapted_incremental(P, local_step, global_step, tau=0.5)
        {'w': tensor(2.)}
    """
    statistics = _statistics(local_step, learnt)
    stepped = moved(moved(previous, global_step, tau), local_step, tau)
    return {**stepped, **blend({name: previous[name] for name in statistics}, statistics, tau)}


def consistency_loss(p: Tensor, p_noisy: Tensor) -> Tensor:
    """Eq. 7: squared distance of the predictions for an image and its noisy copy; sum over classes, mean over pixels and images.

    Examples:
        >>> certain = torch.tensor([[1.0, 0.0]])
        >>> consistency_loss(certain, certain), consistency_loss(certain, 1 - certain)
        (tensor(0.), tensor(2.))
    """
    refuse_shapes(p=p, p_noisy=p_noisy)
    return (p - p_noisy).square().sum(dim=1).mean()


def neighbourhood_range(p: Tensor, d: int) -> Tensor:
    """Per class, largest minus smallest probability in the window of 2d+1 pixels a side around each one (the bracket of Eq. 8).

    Windows are clipped at the border; in volumes they are cubes. A window's maximum is the maximum over rows of the maxima over
    columns, which costs 2(2d+1) comparisons a pixel instead of (2d+1)^2.

    Args:
        p: (N, C, H, W) or (N, C, X, Y, Z).
        d: radius in pixels, >= 0.

    Returns:
        Of the same shape, all zero for d = 0 and where the prediction is constant.

    Examples:
        >>> p = torch.tensor([[[[0.0, 0.0, 0.0, 1.0]]]])
        >>> neighbourhood_range(p, 1), neighbourhood_range(p, 0)
        (tensor([[[[0., 0., 1., 1.]]]]), tensor([[[[0., 0., 0., 0.]]]]))
    """
    return _window_maximum(p, d) + _window_maximum(-p, d)


def _window_maximum(p: Tensor, d: int) -> Tensor:
    dims = p.ndim - 2
    pool = F.max_pool2d if dims == 2 else F.max_pool3d
    for axis in range(dims):
        p = pool(p, [2 * d + 1 if other == axis else 1 for other in range(dims)], 1, [d if other == axis else 0 for other in range(dims)])
    return p


def shape_loss(p: Tensor, d: int) -> Tensor:
    """Eq. 8-9: the neighbourhood range, summed over the classes of `p` and averaged over pixels and images.

    Eq. 9 sums over pixels; beside the pixel mean of Eq. 7 that would make this term H*W times larger, so it is averaged too.

    Examples:
        >>> shape_loss(torch.tensor([[[[0.0, 0.0, 0.0, 1.0]]]]), 1)
        tensor(0.5000)
    """
    return neighbourhood_range(p, d).sum(dim=1).mean()


def shape_loss_official(p_foreground: Tensor, d: int) -> Tensor:
    """The published code's shape term: L2 norm over all pixels of 1e-6 times the range, foreground classes only.

    Examples:
        >>> shape_loss_official(torch.tensor([[[[0.0, 0.0, 0.0, 1.0]]]]), 1)  # 1e-6 times the root of 2
        tensor(1.4142e-06)
    """
    return (neighbourhood_range(p_foreground, d) * 1e-6).norm()


def entropy_loss(p: Tensor) -> Tensor:
    """Eq. 9: -sum_c p_c log p_c, averaged over pixels and images; 0 log 0 counts as 0.

    Examples:
        >>> entropy_loss(torch.tensor([[1.0, 0.0]])), entropy_loss(torch.tensor([[0.5, 0.5]]))
        (tensor(0.), tensor(0.6931))
    """
    return _surprise(p).sum(dim=1).mean()


def entropy_loss_official(p: Tensor) -> Tensor:
    """The published code's entropy: it sums over the images of the batch instead of the classes, divides by log C, averages the rest.

    Equals `entropy_loss` times N / (C log C).

    Examples:
        >>> entropy_loss_official(torch.tensor([[0.5, 0.5]]))
        tensor(0.5000)
    """
    return _surprise(p).sum(dim=0).mean() / math.log(p.shape[1])


def _surprise(p: Tensor) -> Tensor:
    """-p log p with a finite slope at p = 0."""
    return -p * p.clamp_min(torch.finfo(p.dtype).tiny).log()


def total_loss(consistency: Tensor, shape: Tensor, entropy: Tensor, beta: float) -> Tensor:
    """Eq. 10: L_t = L_cons + beta (L_s + L_e).

    Examples:
        >>> total_loss(torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0), beta=0.5)
        tensor(3.5000)
    """
    return consistency + beta * (shape + entropy)


def total_loss_official(consistency: Tensor, shape: Tensor, entropy: Tensor, classes: int) -> Tensor:
    """The published code's weights, 10 L_e + 0.1 L_cons / C + L_s, for its own shape and entropy terms.

    Its consistency is a mean over the C classes where Eq. 7 (`consistency_loss`) sums over them.

    Examples:
        >>> total_loss_official(torch.tensor(4.0), torch.tensor(1.0), torch.tensor(0.5), classes=2)
        tensor(6.2000)
    """
    return 10 * entropy + 0.1 * consistency / classes + shape


def all_classes(p: Tensor, target: str) -> Tensor:
    """Probabilities over every class, from a network's own: sigmoid outputs are joined by their complements.

    Args:
        p: (N, outputs, ...) as of `TaskConfig.probabilities`.
        target: "multiclass" (softmax: already complete), "binary" or "multilabel" (one yes-or-no question per channel).

    Returns:
        (N, C, ...); for binary and multilabel the complements come first, the foreground last.

    Examples:
        >>> all_classes(torch.tensor([[0.25]]), "binary"), all_classes(torch.tensor([[0.25, 0.75]]), "multiclass")
        (tensor([[0.7500, 0.2500]]), tensor([[0.2500, 0.7500]]))
    """
    return p if target == "multiclass" else torch.cat([1 - p, p], dim=1)


def foreground(p: Tensor, target: str) -> Tensor:
    """The foreground classes of a network's probabilities: all but class 0 for softmax, every channel for sigmoid.

    Examples:
        >>> foreground(torch.tensor([[0.25, 0.75]]), "multiclass"), foreground(torch.tensor([[0.25]]), "binary")
        (tensor([[0.7500]]), tensor([[0.2500]]))
    """
    return p[:, 1:] if target == "multiclass" else p


def turned(images: Tensor, turns: Tensor, flips: Tensor) -> Tensor:
    """Each image turned by `turns` (N,) quarter turns, then, where `flips` (N,) is set, flipped upside down.

    Args:
        images: (N, C, H, W) with H = W where a turn is odd; volumes (N, C, X, Y, Z) turn about their third axis.
        turns: counter-clockwise quarter turns.
        flips: true where an image is flipped.

    Examples:
        >>> turned(torch.tensor([[[[1, 2], [3, 4]]]]), torch.tensor([1]), torch.tensor([False]))
        tensor([[[[2, 4],
                  [1, 3]]]])
    """
    parts = [torch.rot90(image, int(turn), (1, 2)) for image, turn in zip(images, turns, strict=True)]
    return torch.stack([part.flip(1) if flip else part for part, flip in zip(parts, flips, strict=True)])


def turned_back(maps: Tensor, turns: Tensor, flips: Tensor) -> Tensor:
    """The inverse of `turned`, for the maps predicted from turned images.

    Examples:
        >>> image, turns, flips = torch.tensor([[[[1, 2], [3, 4]]]]), torch.tensor([3]), torch.tensor([True])
        >>> torch.equal(turned_back(turned(image, turns, flips), turns, flips), image)
        True
    """
    parts = [one.flip(1) if flip else one for one, flip in zip(maps, flips, strict=True)]
    return torch.stack([torch.rot90(part, -int(turn), (1, 2)) for part, turn in zip(parts, turns, strict=True)])


# What keeps test-time routing from collapse. Eq. 7-10 fall when every prediction becomes the same: an empty mask, or one half everywhere,
# is consistent, has no shape and costs next to no entropy. These functions say how much a prediction still tells, and how far it has gone.


def image_spread(images: Tensor) -> Tensor:
    """Standard deviation of every image over its channels and pixels, (N, 1, ...): the unit of Eq. 7's noise.

    The paper's images are normalised to a standard deviation of one, where this changes nothing. A constant image has 0.

    Examples:
        >>> image_spread(torch.tensor([[[[0.0, 2.0]]], [[[5.0, 5.0]]]])).flatten()
        tensor([1., 0.])
    """
    return images.flatten(1).std(dim=1, correction=0).view(-1, *[1] * (images.ndim - 1))


def window_radius(sides: Sequence[int]) -> int:
    """Radius d of Eq. 8's window as the share of the image's shortest side that the published code has, 10 of 384; at least 1 pixel.

    Examples:
        >>> window_radius([384, 384]), window_radius([64, 96]), window_radius([16, 16])
        (10, 2, 1)
    """
    return max(1, round(min(sides) * _CODE_RADIUS / _CODE_SIDE))


def mean_entropy(p: Tensor) -> Tensor:
    """H(mean p), the entropy of the classes' shares over all pixels and images; log C where all are equally frequent.

    Its difference to the mean entropy of the pixels, `formulas.entropy_loss`, is the mutual information of pixel and prediction
    (Krause et al., NIPS 2010, Eq. 2).

    Examples:
        >>> mean_entropy(torch.tensor([[1.0, 0.0], [0.0, 1.0]])), mean_entropy(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
        (tensor(0.6931), tensor(0.))
    """
    return entropy_of(class_shares(p))


def class_shares(p: Tensor) -> Tensor:
    """Mean probability of every class over all pixels and images, (C,)."""
    return p.transpose(0, 1).flatten(1).mean(dim=1)


def entropy_of(shares: Tensor) -> Tensor:
    """-sum_c s_c log s_c, with 0 log 0 = 0 and a finite slope there.

    Examples:
        >>> entropy_of(torch.tensor([0.5, 0.5])), entropy_of(torch.tensor([1.0, 0.0]))
        (tensor(0.6931), tensor(0.))
    """
    return (-shares * shares.clamp_min(torch.finfo(shares.dtype).tiny).log()).sum()


def divergence(start: Tensor, p: Tensor) -> Tensor:
    """KL(start || p), summed over classes, mean over pixels and images: what leaving the starting prediction costs.

    Args:
        start: probabilities before the first step; they take no gradient.

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
