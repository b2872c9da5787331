"""How far one site's update may move a model: lengths compared with the others' lengths, and
updates that are scaled to them.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from medflare.core.message import Message
from medflare.core.states import State

# Times the usual length of an update; of honest sites at most 2.8 (SGD with momentum, 400:8:8
# images).
_MODEL_LIMIT = 3.0
# The same for one tensor; of honest sites one in 3000 is above it, all of them with 400:8:8 images.
_TENSOR_LIMIT = 5.0
# A tensor beyond so many times the usual length is no update; of honest sites at most 12.
_ABSURD = 30.0
# So many times its share of the length is usual for every tensor, also for one that the others
# leave as it is.
_SMALL = 2.0
# Set by the images, not by steps of an optimizer.
_STATISTICS = ("running_mean", "running_var")


def usual_lengths(lengths: Tensor, image_counts: Sequence[float]) -> Tensor:
    """The usual length for site k: the upper median over the others j that moved of |u_j| max(1,
    n_k / n_j).

    An update is a path of n / batch size steps per epoch, so it is at most (steps) x (longest step)
    long. With steps of one length, n_k / n_j times the images allow n_k / n_j times the length. A
    site with fewer images gets the others' length: its steps may all have one direction. The upper
    median is between two honest lengths as long as most sites are honest.

    Args:
        lengths: (..., K).
        image_counts: training images of the K sites.

    Returns:
        (..., K); 0 if no other site moved.

    Examples:
        >>> usual_lengths(torch.tensor([1.0, 2.0, 9.0]), [8, 8, 16])
        tensor([9., 9., 4.])
    """
    sites = lengths.shape[-1]
    usual = torch.zeros_like(lengths)
    if sites == 1:
        return usual
    counts = torch.tensor(image_counts, dtype=lengths.dtype).clamp(min=1)
    for site in range(sites):
        others = [other for other in range(sites) if other != site]
        scaled = lengths[..., others] * (counts[site] / counts[others]).clamp(min=1)
        ordered = scaled.sort(dim=-1).values
        moved = (ordered > 0).sum(dim=-1, keepdim=True)  # those that did not move come first
        middle = len(others) - moved + moved // 2
        usual[..., site] = ordered.gather(-1, middle.clamp(max=len(others) - 1)).squeeze(-1)
    return usual


def scales(
    squares: State, sizes: Mapping[str, int], image_counts: Sequence[float]
) -> dict[str, Tensor]:
    """Tensor -> the factors, (K,), to which the sites' updates of it are scaled; 1: as it is.

    1. A tensor's update u_t that is longer than 5 times the usual length m_t is scaled to m_t. m_t
       is at least 2 m sqrt(size_t / size), twice its share of the whole update's usual length m.
    2. If all of them together, without running statistics, are then longer than 3 times m, all are
       scaled to the length m.

    Args:
        squares: tensor -> squared lengths of the sites' updates, (K,).
        sizes: tensor -> how many numbers it has.
        image_counts: training images of the K sites.
    """
    factors: dict[str, Tensor] = {}
    for names, lengths, usual, whole in _parts(squares, sizes, image_counts):
        scale = _scale(lengths, usual, _TENSOR_LIMIT)
        if not names[0].endswith(_STATISTICS):
            together = (lengths * scale).square().sum(dim=0).sqrt()
            scale = scale * _scale(together, whole, _MODEL_LIMIT)
        factors |= dict(zip(names, scale, strict=True))
    return factors


def absurd(
    squares: State, sizes: Mapping[str, int], image_counts: Sequence[float]
) -> dict[int, str]:
    """Site's index -> a tensor that moved more than 30 times its usual length, with the factor;
    running statistics are not checked. Arguments as of `scales`.
    """
    reasons: dict[int, str] = {}
    for names, lengths, usual, _ in _parts(squares, sizes, image_counts):
        if names[0].endswith(_STATISTICS):
            continue
        far = (lengths > _ABSURD * usual) & (usual > 0)
        for row, site in far.nonzero().tolist():
            times = float(lengths[row, site] / usual[row, site])
            reasons.setdefault(
                site, f"{names[row]} moved {times:.3g} times as far as the others' updates allow"
            )
    return reasons


def _parts(
    squares: State, sizes: Mapping[str, int], image_counts: Sequence[float]
) -> Iterator[tuple[list[str], Tensor, Tensor, Tensor]]:
    """Names of tensors, their lengths and usual lengths, (tensors, K), and the usual length of all,
    (K,): first of weights, then of running statistics.
    """
    for running in (False, True):
        names = [name for name in squares if name.endswith(_STATISTICS) == running]
        if not names:
            continue
        lengths = torch.stack([squares[name] for name in names]).clamp(min=0).sqrt()
        counts = torch.tensor([sizes[name] for name in names], dtype=lengths.dtype)
        fraction = (counts / counts.sum().clamp(min=1)).sqrt().unsqueeze(1)
        whole = usual_lengths(lengths.square().sum(dim=0).sqrt(), image_counts)
        usual = torch.maximum(usual_lengths(lengths, image_counts), _SMALL * fraction * whole)
        yield names, lengths, usual, whole


def _scale(lengths: Tensor, usual: Tensor, limit: float) -> Tensor:
    """usual / length where an update is longer than `limit` times the usual length, else 1; 1 if no
    other site moved.
    """
    long = (lengths > limit * usual) & (usual > 0)
    return torch.where(long, usual / lengths, torch.ones_like(lengths))


def clipped(reply: Message, sent: Message, entry: str, factors: Mapping[str, float]) -> Message:
    """A reply with w_sent + factor (w - w_sent) for tensors with a factor below 1; variances stay
    variances, between the two.
    """
    state = dict(reply.states[entry])
    for name, factor in factors.items():
        if factor < 1:
            start = sent.states[entry][name].double()
            end = state[name]
            state[name] = torch.lerp(start, end.double(), factor).to(end.dtype)
    return Message({**reply.states, entry: state}, reply.meta)


def reason(entry: str, factors: Mapping[str, float], tensors: int) -> str:
    """What was clipped in one site's update of an entry with so many tensors, in one line;
    `factors` are those below 1.
    """
    if 2 * len(factors) > tensors:
        what = entry
        factor = statistics.median(factors.values())
    else:
        name = min(factors, key=factors.__getitem__)
        what = f"{entry}/{name}"
        factor = factors[name]
        if len(factors) > 1:
            what += f" (and {len(factors) - 1} other tensors)"
    return (
        f"{what} moved {1 / factor:.3g} times as far as the others' updates allow, "
        "and was clipped to their length"
    )
