"""Means of sites' models that a few bad sites cannot move far, for every server algorithm that
averages.

    median:    w_j <- median of w_kj over the sites k
               (Yin et al., ICML 2018, Definition 1)
    trimmed:   w_j <- mean of w_kj without the largest and smallest floor(β K)
               (the same, Definition 2)
    krum:      w <- the w_k with the least Σ |w_k - w_i|² over its K - f - 2 nearest
               (Blanchard et al., NeurIPS 2017, Sec. 4)
    geometric: w <- argmin_v Σ_k p_k |v - w_k|
               (Pillutla et al., IEEE TSP 2022, Eq. 5 and Alg. 2)
    clipped:   w <- w_g + Σ_k p_k Δ_k / max(1, |Δ_k| / M)
               (Sun et al., 2019, Sec. 4, norm thresholding)

Distances and lengths are those of whole models. Running statistics have a large share in them,
since scanners differ more than updates do; but a rule by weights alone would accept any statistics
from a site whose weights are central.

"mean" is the weighted mean Σ_k p_k w_k. The first three treat every site alike, since a bad site
could report a false sample count. Update validation comes first and rejects what is plainly wrong;
these rules are for bad updates that look plausible.

An extension is a further rule: (site -> state, site -> share, the round's first state or None) ->
state.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from medflare.core.extensions import Extensions
from medflare.core.hyper import param
from medflare.core.settings import no_such, strict_dataclass
from medflare.core.states import (
    LONG_CHUNK,
    State,
    StateDict,
    States,
    check_same_shapes,
    difference,
    iter_chunks,
    misfit,
    moved,
    weighted_mean,
)

_Builtin = Literal["median", "trimmed", "krum", "geometric", "clipped"]


def _try(rule: Any) -> None:
    """Raise if the rule does not return a state like those of two sites."""
    state = {"weight": torch.ones(2, 3), "count": torch.tensor(4)}
    states = {"A": state, "B": {name: 2 * tensor for name, tensor in state.items()}}
    for origin in (None, state):
        reason = misfit(rule(states, {"A": 0.5, "B": 0.5}, origin), state)
        if reason:
            raise ValueError(f"its state does not fit those of the sites: {reason}")


EXTENSIONS = Extensions("rule", "rules", lambda: ("mean", *get_args(_Builtin)), _try)


def _extension(name: str) -> str:
    """Raises ValueError for an unknown rule, ConfigError for one that cannot be used."""
    if EXTENSIONS.foreign(name) is None:
        raise ValueError(no_such("rule", name, EXTENSIONS))
    return name


RobustRule = _Builtin | Annotated[str, AfterValidator(_extension)]
# Steps of Weiszfeld's algorithm; two sites of nearly equal shares need most: shares of 1.01 and 1
# about 900.
_STEPS = 2000
_NEAR = 1e-6  # ν: distances below this do not count as smaller


@strict_dataclass
class RobustLimits:
    """Parameters of the rules."""

    trim: Annotated[float, Field(lt=0.5)] = param(
        0.2, "trimmed: share cut at each end", symbol="β", source="Yin, Def. 2", low=0, high=0.5
    )
    faulty: int | None = param(
        None,
        "krum: bad sites to reckon with; none: as many as it bears",
        symbol="f",
        source="Blanchard",
        low=0,
    )
    clip: float = param(
        1.0,
        "clipped: longest update, in medians of the round",
        symbol="M",
        source="Sun, Sec. 4",
        low=0.0,
    )


def combined(
    states: States,
    shares: Mapping[str, float],
    rule: str,
    limits: RobustLimits,
    origin: State | None = None,
) -> tuple[StateDict, dict[str, float]]:
    """The sites' models as one.

    Args:
        states: site -> state, all with equal names and shapes.
        shares: site -> p_k, up to a common factor; not used by "median", "trimmed" and "krum".
        rule: one of `RobustRule`.
        limits: of the rules.
        origin: the model that the round began with, for "clipped"; None: the coordinate-wise
            median of the states.

    Returns:
        (the state, site -> its weight; empty for coordinate-wise rules).

    Raises:
        ValueError: states that differ in names or shapes, or NaN where a rule needs lengths.
    """
    check_same_shapes(states)
    extension = EXTENSIONS.foreign(rule)
    if extension is not None:
        return extension(states, shares, origin), {}
    if rule in ("median", "trimmed"):
        return robust_mean(states, rule, limits.trim), {}
    if rule == "clipped":
        return weighted_mean(_clipped(states, limits.clip, origin), shares), dict(shares)
    sites = sorted(states)
    distances = squared_distances(states)
    if rule == "krum":
        weights = krum_weights(distances, limits.faulty)
    else:
        # Of a state to itself: 0, or NaN for one that is not finite.
        _refuse_non_finite(sites, distances.diagonal().tolist())
        weights = geometric_weights(distances, [shares[site] for site in sites])
    by_site = dict(zip(sites, weights, strict=True))
    return weighted_mean(states, by_site), by_site


def _clipped(states: States, clip: float, origin: State | None) -> States:
    """w_g + Δ_k / max(1, |Δ_k| / M) of every site."""
    sites = sorted(states)
    if origin is None:
        centre = robust_mean(states, "median")
    else:
        centre = {name: origin[name] for name in states[sites[0]]}
    updates = [difference(states[site], centre) for site in sites]
    lengths = [_length(update) for update in updates]
    _refuse_non_finite(sites, lengths)
    parts = zip(sites, updates, clip_factors(lengths, clip), strict=True)
    return {site: moved(centre, update, factor) for site, update, factor in parts}


def _refuse_non_finite(sites: Sequence[str], lengths: Sequence[float]) -> None:
    refused = [
        site for site, length in zip(sites, lengths, strict=True) if not math.isfinite(length)
    ]
    if refused:
        raise ValueError(
            f"the state of {', '.join(refused)} holds NaN or infinite values; leave it out"
        )


def robust_mean(states: States, rule: str, trim: float = 0.2) -> StateDict:
    """Coordinate-wise median or trimmed mean of states with equal names and shapes (Yin et al.
    2018, Definitions 1 and 2).

    Floating tensors are computed in float64 and return to their own dtype; integer ones
    (BatchNorm's counters) take the largest value that is not cut off. With an even number of sites
    the median is the mean of the two in the middle.

    Args:
        states: site -> state, at least one.
        rule: "median" or "trimmed".
        trim: fraction cut off at either end, 0 <= trim < 0.5; floor(trim K) sites.
    """
    cut = math.floor(trim * len(states))
    if rule == "median":
        cut = (len(states) - 1) // 2
    ordered = [states[site] for site in sorted(states)]
    mean = {}
    for name in ordered[0]:
        mean[name] = _trimmed([state[name] for state in ordered], cut)
    return mean


def _trimmed(tensors: list[Tensor], cut: int) -> Tensor:
    """The mean without the `cut` largest and smallest values of every coordinate; with the largest
    possible cut it is the median.
    """
    if not tensors[0].is_floating_point():
        return torch.stack(tensors).sort(dim=0).values[len(tensors) - cut - 1]
    mean = torch.empty(tensors[0].shape, dtype=tensors[0].dtype)
    for result, *parts in iter_chunks([mean, *tensors]):
        ordered = torch.stack(parts).double().sort(dim=0).values
        result.copy_(ordered[cut : len(tensors) - cut].mean(dim=0))
    return mean


def squared_distances(states: States) -> Tensor:
    """(K, K) squared Euclidean distances between states, in sorted order of the sites; without
    integer entries.
    """
    ordered = [states[site] for site in sorted(states)]
    total = torch.zeros(len(ordered), len(ordered), dtype=torch.float64)
    for name, tensor in ordered[0].items():
        if not tensor.is_floating_point():
            continue
        for parts in iter_chunks([state[name] for state in ordered], LONG_CHUNK):
            rows = torch.stack(parts).double()
            total += torch.stack([(rows - row).square().sum(dim=1) for row in rows])
    return total


def krum_weights(distances: Tensor, faulty: int | None = None) -> list[float]:
    """1 for the site that Krum chooses, 0 for all others (Blanchard et al. 2017, Sec. 4).

    A site's score is the sum of its squared distances to its K - f - 2 nearest neighbours; the
    smallest wins, ties go to the first. The theory needs K > 2f + 2; with fewer than three sites
    all have equal weights.

    Args:
        distances: (K, K) squared distances; NaN counts as infinite.
        faulty: f, at most what K sites allow; None: this maximum.
    """
    count = len(distances)
    if count < 3:
        return [1.0] * count
    most = max(0, (count - 3) // 2)
    if faulty is None or faulty > most:
        faulty = most
    nearest = count - faulty - 2
    finite = torch.where(distances.isnan(), torch.inf, distances)
    # The least distance is that to itself.
    scores = finite.sort(dim=1).values[:, 1 : nearest + 1].sum(dim=1)
    chosen = int(scores.argmin())
    return [float(site == chosen) for site in range(count)]


def geometric_weights(distances: Tensor, shares: Sequence[float]) -> list[float]:
    """Weights of the geometric median, summing to 1, by smoothed Weiszfeld (Pillutla et al. 2022,
    Alg. 2).

        β_k <- p_k / max(ν, |v - w_k|),  v <- Σ_k β_k w_k / Σ_k β_k

    All iterates are means of the w_k, so (K, K) squared distances d are enough: |v - w_k|² =
    Σ_i β_i d_ik - 1/2 Σ_ij β_i β_j d_ij for weights β that sum to 1. `shares` are the p_k, up to a
    common factor.
    """
    prior = torch.tensor(shares, dtype=torch.float64)
    weights = prior / prior.sum()
    for _ in range(_STEPS):
        to_mean = distances @ weights
        distance = (to_mean - weights @ to_mean / 2).clamp(min=0).sqrt()  # |v - w_k|
        before = weights
        weights = prior / distance.clamp(min=_NEAR)
        weights = weights / weights.sum()
        if (weights - before).abs().max() < 1e-9:
            break
    return weights.tolist()


def clip_factors(lengths: Sequence[float], clip: float = 1.0) -> list[float]:
    """1 / max(1, |Δ_k| / M) for lengths |Δ_k|, with M = clip times their median (Sun et al. 2019,
    Sec. 4; there M is a constant).
    """
    most = clip * median(lengths)
    return [1.0 if length <= most else most / length for length in lengths]


def _length(state: State) -> float:
    """Euclidean length of the floating entries."""
    squares = []
    for tensor in state.values():
        if tensor.is_floating_point():
            for (part,) in iter_chunks([tensor], LONG_CHUNK):
                squares.append(float(part.double().square().sum()))
    return math.sqrt(sum(squares))
