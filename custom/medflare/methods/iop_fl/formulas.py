"""The formulas of IOP-FL (Jiang et al., IEEE TMI 2023) as pure functions: local adapted models and
the test-time losses. Eq. 5 and 6 are in `routing`.

Probabilities are (N, C, H, W) or (N, C, X, Y, Z) for segmentation and (N, C) for classification,
over all classes, background included.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from medflare.core.states import StateDict, blend, misfit, moved
from medflare.methods.parts.tensors import refuse_shapes

# The published code's window radius, in its images of this side.
_CODE_RADIUS = 10
_CODE_SIDE = 384


def local_adapted(
    previous: Mapping[str, Tensor], local: Mapping[str, Tensor], tau: float
) -> StateDict:
    """P <- (1 - tau) P + tau w_k: Eq. 4 as an average of weights.

    Printed Eq. 4 subtracts a gradient step from a shrunk weight, P <- (1 - tau) P - tau
    (eta_l grad_L + eta_g grad_G), which at tau = 0.9 shrinks every weight tenfold per round. The
    local model after training, w_k = w - eta_g grad_G - eta_l grad_L with w the previous global
    model, includes both gradients, so the bracket is read as this model. The published code does
    the same.

    Args:
        previous: P_k^t.
        local: w_k, the site's model after this round's local training.
        tau: accumulation rate in [0, 1]; 1 gives the local model.

    Returns:
        P_k^{t+1}; integer entries are those of `local`.

    Raises:
        ValueError: tau outside [0, 1], or two models whose names or shapes differ.

    Examples:
        >>> local_adapted({"w": torch.tensor(0.0)}, {"w": torch.tensor(2.0)}, tau=0.75)
        {'w': tensor(1.5000)}
    """
    if not 0 <= tau <= 1:
        raise ValueError(f"tau must be in [0, 1], got {tau}")
    reason = misfit(local, previous)
    if reason:
        raise ValueError(f"the local model does not fit P_k: {reason}")
    return blend(previous, local, tau)


def local_adapted_explicit(
    previous: Mapping[str, Tensor],
    global_: Mapping[str, Tensor],
    step: Mapping[str, Tensor],
    tau: float,
    learnt: Collection[str] | None = None,
) -> StateDict:
    """P <- (1 - tau) P + tau (w_g^{t+1} - eta_l grad_L): Eq. 4 with this round's global step taken
    before the local one.

    Args:
        previous: P_k^t.
        global_: w_g^{t+1}, which includes -eta_g grad_G of the same round.
        step: -eta_l grad_L = w_k - w_g^t; of entries without a gradient (running statistics), w_k
            itself.
        learnt: names of the parameters; None: all entries. Entries without a gradient move to w_k,
            as in `local_adapted`.
    """
    return blend(previous, {**moved(global_, step), **_statistics(step, learnt)}, tau)


def local_adapted_incremental(
    previous: Mapping[str, Tensor],
    local_step: Mapping[str, Tensor],
    global_step: Mapping[str, Tensor],
    tau: float,
    learnt: Collection[str] | None = None,
) -> StateDict:
    """P <- P - tau (eta_l grad_L + eta_g grad_G): Eq. 4 as a gradient step without averaging.

    Args:
        previous: P_k^t.
        local_step: -eta_l grad_L, as `step` of `local_adapted_explicit`.
        global_step: -eta_g grad_G, the difference of two global models.
        learnt: as for `local_adapted_explicit`.
    """
    statistics = _statistics(local_step, learnt)
    stepped = moved(moved(previous, global_step, tau), local_step, tau)
    return {**stepped, **blend({name: previous[name] for name in statistics}, statistics, tau)}


def _statistics(step: Mapping[str, Tensor], learnt: Collection[str] | None) -> StateDict:
    """The entries of a local step that have no gradient."""
    if learnt is None:
        return {}
    return {name: tensor for name, tensor in step.items() if name not in learnt}


def consistency_loss(p: Tensor, p_noisy: Tensor) -> Tensor:
    """Eq. 7: squared distance of the predictions for an image and its noisy copy; sum over classes,
    mean over pixels and images.
    """
    refuse_shapes(p=p, p_noisy=p_noisy)
    return (p - p_noisy).square().sum(dim=1).mean()


def neighbourhood_range(p: Tensor, d: int) -> Tensor:
    """Per class, largest minus smallest probability in the window of 2d+1 pixels a side around each
    pixel (the bracket of Eq. 8).

    Windows are clipped at the border; in volumes they are cubes. The maximum is taken axis by axis.

    Args:
        p: (N, C, H, W) or (N, C, X, Y, Z).
        d: radius in pixels, >= 0.

    Returns:
        Of the same shape.
    """
    return _window_maximum(p, d) + _window_maximum(-p, d)


def _window_maximum(p: Tensor, d: int) -> Tensor:
    dims = p.ndim - 2
    pool = F.max_pool2d if dims == 2 else F.max_pool3d
    for axis in range(dims):
        window = [1] * dims
        padding = [0] * dims
        window[axis] = 2 * d + 1
        padding[axis] = d
        p = pool(p, window, 1, padding)
    return p


def shape_loss(p: Tensor, d: int) -> Tensor:
    """Eq. 8-9: the neighbourhood range, summed over the classes of `p` and averaged over pixels and
    images.

    Eq. 9 sums over pixels, which would make this term H*W times larger than the mean of Eq. 7; so
    it is averaged too.
    """
    return neighbourhood_range(p, d).sum(dim=1).mean()


def shape_loss_official(p_foreground: Tensor, d: int) -> Tensor:
    """The published code's shape term: L2 norm over all pixels of 1e-6 times the range, foreground
    classes only.
    """
    return (neighbourhood_range(p_foreground, d) * 1e-6).norm()


def entropy_loss(p: Tensor) -> Tensor:
    """Eq. 9: -sum_c p_c log p_c, averaged over pixels and images; 0 log 0 counts as 0."""
    return _minus_p_log_p(p).sum(dim=1).mean()


def entropy_loss_official(p: Tensor) -> Tensor:
    """The published code's entropy: summed over the images of the batch, divided by log C, averaged
    over classes and pixels; it equals `entropy_loss` times N / (C log C).
    """
    return _minus_p_log_p(p).sum(dim=0).mean() / math.log(p.shape[1])


def _minus_p_log_p(p: Tensor) -> Tensor:
    """-p log p with a finite gradient at p = 0."""
    return -p * p.clamp_min(torch.finfo(p.dtype).tiny).log()


def total_loss(consistency: Tensor, shape: Tensor, entropy: Tensor, beta: float) -> Tensor:
    """Eq. 10: L_t = L_cons + beta (L_s + L_e)."""
    return consistency + beta * (shape + entropy)


def total_loss_official(
    consistency: Tensor, shape: Tensor, entropy: Tensor, classes: int
) -> Tensor:
    """The published code's weights, 10 L_e + 0.1 L_cons / C + L_s, for its shape and entropy terms.

    The code's consistency is a mean over the C classes; Eq. 7 (`consistency_loss`) sums over them.
    """
    return 10 * entropy + 0.1 * consistency / classes + shape


def all_classes(p: Tensor, target: str) -> Tensor:
    """Probabilities of all classes (N, C, ...): of a network's own, and for sigmoid outputs their
    complements before them.

    Args:
        p: (N, outputs, ...) as of `TaskConfig.probabilities`.
        target: "multiclass" (softmax), "binary" or "multilabel" (sigmoid).
    """
    if target == "multiclass":
        return p
    return torch.cat([1 - p, p], dim=1)


def turned(images: Tensor, turns: Tensor, flips: Tensor) -> Tensor:
    """The published augmentation: each image is rotated by quarter turns, then flipped upside down.

    Args:
        images: (N, C, H, W) with H = W for odd turns; volumes (N, C, X, Y, Z) rotate about their
            third axis.
        turns: (N,) counter-clockwise quarter turns.
        flips: (N,) bool.
    """
    results = []
    for image, turn, flip in zip(images, turns, flips, strict=True):
        rotated = torch.rot90(image, int(turn), (1, 2))
        results.append(rotated.flip(1) if flip else rotated)
    return torch.stack(results)


def turned_back(maps: Tensor, turns: Tensor, flips: Tensor) -> Tensor:
    """The inverse of `turned`, for maps that were predicted from its images."""
    results = []
    for prediction, turn, flip in zip(maps, turns, flips, strict=True):
        upright = prediction.flip(1) if flip else prediction
        results.append(torch.rot90(upright, -int(turn), (1, 2)))
    return torch.stack(results)


# Protection from collapse. Eq. 7-10 fall if all predictions become the same: an empty mask is
# consistent, without shape and certain. These functions measure the information of a prediction and
# its agreement with another one.


def image_spread(images: Tensor) -> Tensor:
    """Standard deviation of every image over its channels and pixels, (N, 1, ...): the unit of
    Eq. 7's noise, 1 in the paper.

    Examples:
        >>> image_spread(torch.tensor([[[[0.0, 2.0]]], [[[5.0, 5.0]]]])).flatten()
        tensor([1., 0.])
    """
    spread = images.flatten(1).std(dim=1, correction=0)
    return spread.view(-1, *[1] * (images.ndim - 1))


def window_radius(sides: Sequence[int]) -> int:
    """Radius d of Eq. 8's window: 10 / 384 of the image's shortest side, as in the published code;
    at least 1 pixel.

    Examples:
        >>> window_radius([384, 384]), window_radius([64, 96]), window_radius([16, 16])
        (10, 2, 1)
    """
    return max(1, round(min(sides) * _CODE_RADIUS / _CODE_SIDE))


def mean_entropy(p: Tensor) -> Tensor:
    """H(mean p), the entropy of the mean probabilities over all pixels and images; log C for
    equally frequent classes.

    Minus the mean entropy of the pixels (`entropy_loss`), it is the mutual information of pixel and
    prediction (Krause et al., NIPS 2010, Eq. 2).

    Examples:
        >>> mean_entropy(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        tensor(0.6931)
        >>> mean_entropy(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
        tensor(0.)
    """
    return entropy_of(class_shares(p))


def class_shares(p: Tensor) -> Tensor:
    """Mean probability of every class over all pixels and images, (C,)."""
    return p.transpose(0, 1).flatten(1).mean(dim=1)


def entropy_of(shares: Tensor) -> Tensor:
    """-sum_c s_c log s_c, with a finite gradient at 0.

    Examples:
        >>> entropy_of(torch.tensor([0.5, 0.5])), entropy_of(torch.tensor([1.0, 0.0]))
        (tensor(0.6931), tensor(0.))
    """
    return _minus_p_log_p(shares).sum()


def information_total(
    consistency: Tensor, shape: Tensor, information: Tensor, beta: float
) -> Tensor:
    """L = L_cons + beta (L_s - I): Eq. 10 with the negative mutual information as entropy term.

    Eq. 9's entropy is lowest if all pixels have one class; I = H(mean p) - mean H(p) is then 0.

    Examples:
        >>> information_total(*map(torch.tensor, (1.0, 2.0, 0.5)), beta=0.1)
        tensor(1.1500)
    """
    return consistency + beta * (shape - information)


def agreeing(chosen: Tensor, start: Tensor) -> tuple[int, int]:
    """Numerator and denominator of the agreement of two predictions: Dice of masks, accuracy of
    classes. Both are sums over batches; two empty masks give (0, 0).

    Args:
        chosen: bool masks (N, C, ...), or classes (N,).
        start: of the same shape.

    Examples:
        >>> agreeing(torch.tensor([True, True]), torch.tensor([True, False]))
        (2, 3)
        >>> agreeing(torch.tensor([2, 1]), torch.tensor([2, 0]))
        (1, 2)
        >>> agreeing(torch.tensor([False]), torch.tensor([False]))
        (0, 0)
    """
    if chosen.dtype != torch.bool:
        return int((chosen == start).sum()), chosen.numel()
    return 2 * int((chosen & start).sum()), int(chosen.sum()) + int(start.sum())
