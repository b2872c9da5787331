"""The mathematics of IOP-FL (Jiang et al., IEEE TMI 2023) as pure functions: local adapted models and the test-time losses.

Probabilities are (N, C, H, W) for segmentation and (N, C) for classification, over all classes (background included).
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from medflare.core.states import StateDict, blend, moved


def local_adapted(previous: Mapping[str, Tensor], local: Mapping[str, Tensor], tau: float) -> StateDict:
    """P <- (1 - tau) P + tau w_k: Eq. 4 as an average of weights (reading `ema_local`).

    Printed Eq. 4 subtracts a gradient step from a shrunk weight, P <- (1 - tau) P - tau (eta_l grad_L + eta_g grad_G), which at
    tau = 0.9 shrinks every weight tenfold per round. The local model after training, w_k = w - eta_g grad_G - eta_l grad_L with w
    the previous global model, already carries both gradients, so the bracket is read as the model that they lead to. This is
    also what the published code computes.

    Args:
        previous: P_k^t, a state dict.
        local: w_k, the site's model after this round's local training.
        tau: accumulation rate in [0, 1]; 1 gives the local model, 0 leaves P alone.

    Returns:
        P_k^{t+1}; integer entries (batch counters) are those of `local`.
    """
    return blend(previous, local, tau)


def local_adapted_explicit(
    previous: Mapping[str, Tensor], global_: Mapping[str, Tensor], step: Mapping[str, Tensor], tau: float
) -> StateDict:
    """P <- (1 - tau) P + tau (w_g^{t+1} - eta_l grad_L): Eq. 4 with this round's global step taken before the local one.

    Args:
        global_: w_g^{t+1}, which carries -eta_g grad_G of the same round.
        step: -eta_l grad_L = w_k - w_g^t, the site's own way of that round (see `states.difference`).
    """
    return blend(previous, moved(global_, step), tau)


def local_adapted_incremental(
    previous: Mapping[str, Tensor], local_step: Mapping[str, Tensor], global_step: Mapping[str, Tensor], tau: float
) -> StateDict:
    """P <- P - tau (eta_l grad_L + eta_g grad_G): Eq. 4 as a pure gradient step without averaging.

    Args:
        local_step: -eta_l grad_L = w_k - w_g.
        global_step: -eta_g grad_G, the way between two global models.
    """
    return moved(moved(previous, global_step, tau), local_step, tau)


def consistency_loss(p: Tensor, p_noisy: Tensor) -> Tensor:
    """Eq. 7: squared distance of the predictions for an image and its noisy copy; sum over classes, mean over pixels and images."""
    return (p - p_noisy).square().sum(dim=1).mean()


def neighbourhood_range(p: Tensor, d: int) -> Tensor:
    """Per class, largest minus smallest probability in the (2d+1) x (2d+1) window around each pixel (the bracket of Eq. 8).

    Windows are clipped at the border. A square window's maximum is the maximum over rows of the maxima over columns, which
    costs 2(2d+1) comparisons a pixel instead of (2d+1)^2.

    Args:
        p: (N, C, H, W).
        d: radius in pixels, >= 0.

    Returns:
        (N, C, H, W), all zero for d = 0 and where the prediction is constant.
    """
    return _window_maximum(p, d) + _window_maximum(-p, d)


def _window_maximum(p: Tensor, d: int) -> Tensor:
    rows = F.max_pool2d(p, (2 * d + 1, 1), stride=1, padding=(d, 0))
    return F.max_pool2d(rows, (1, 2 * d + 1), stride=1, padding=(0, d))


def shape_loss(p: Tensor, d: int) -> Tensor:
    """Eq. 8-9: the neighbourhood range, summed over the classes of `p` and averaged over pixels and images.

    Eq. 9 sums over pixels; beside the pixel mean of Eq. 7 that would make this term H*W times larger, so it is averaged too.
    """
    return neighbourhood_range(p, d).sum(dim=1).mean()


def shape_loss_official(p_foreground: Tensor, d: int) -> Tensor:
    """The published code's shape term: L2 norm over all pixels of 1e-6 times the range, foreground classes only."""
    return (neighbourhood_range(p_foreground, d) * 1e-6).norm()


def entropy_loss(p: Tensor) -> Tensor:
    """Eq. 9: -sum_c p_c log p_c, averaged over pixels and images; 0 log 0 counts as 0."""
    return _surprise(p).sum(dim=1).mean()


def entropy_loss_official(p: Tensor) -> Tensor:
    """The published code's entropy: it sums over the images of the batch instead of the classes, divides by log C, averages the rest.

    Equals `entropy_loss` times N / (C log C).
    """
    return _surprise(p).sum(dim=0).mean() / math.log(p.shape[1])


def _surprise(p: Tensor) -> Tensor:
    """-p log p with a finite slope at p = 0."""
    return -p * p.clamp_min(torch.finfo(p.dtype).tiny).log()


def total_loss(consistency: Tensor, shape: Tensor, entropy: Tensor, beta: float) -> Tensor:
    """Eq. 10: L_t = L_cons + beta (L_s + L_e)."""
    return consistency + beta * (shape + entropy)


def total_loss_official(consistency: Tensor, shape: Tensor, entropy: Tensor, classes: int) -> Tensor:
    """The published code's weights, 10 L_e + 0.1 L_cons / C + L_s, for its own shape and entropy terms.

    Its consistency is a mean over the C classes where Eq. 7 (`consistency_loss`) sums over them.
    """
    return 10 * entropy + 0.1 * consistency / classes + shape


def all_classes(p: Tensor, target: str) -> Tensor:
    """Probabilities over every class, from a network's own: sigmoid outputs are joined by their complements.

    Args:
        p: (N, outputs, ...) as of `TaskConfig.probabilities`.
        target: "multiclass" (softmax: already complete), "binary" or "multilabel" (one yes-or-no question per channel).

    Returns:
        (N, C, ...); for binary and multilabel the complements come first, the foreground last.
    """
    return p if target == "multiclass" else torch.cat([1 - p, p], dim=1)


def foreground(p: Tensor, target: str) -> Tensor:
    """The foreground classes of a network's probabilities: all but class 0 for softmax, every channel for sigmoid."""
    return p[:, 1:] if target == "multiclass" else p


def turned(images: Tensor, turns: Tensor, flips: Tensor) -> Tensor:
    """Each image turned by `turns` (N,) quarter turns, then, where `flips` (N,) is set, flipped upside down."""
    parts = [torch.rot90(image, int(turn), (-2, -1)) for image, turn in zip(images, turns, strict=True)]
    return torch.stack([part.flip(-2) if flip else part for part, flip in zip(parts, flips, strict=True)])


def turned_back(maps: Tensor, turns: Tensor, flips: Tensor) -> Tensor:
    """The inverse of `turned`, for the maps (N, C, H, W) predicted from turned images."""
    parts = [one.flip(-2) if flip else one for one, flip in zip(maps, flips, strict=True)]
    return torch.stack([torch.rot90(part, -int(turn), (-2, -1)) for part, turn in zip(parts, turns, strict=True)])
