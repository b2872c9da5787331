"""Update validation: what the server does with replies to a method's phase before it aggregates them.

A reply that does not hold what the phase declares, is not finite, has other counts than enrolment, or is far longer than the others' is
rejected. An update that points against the others' may come from other patients: it is used, and becomes an event.
"""

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from medflare.core.manifest import Manifest, MetaSpec, negative, non_finite, violation
from medflare.core.message import Message
from medflare.core.states import CACHED, StateDict, cosines, stretches
from medflare.federation.update_validation.messages import METRIC, one_line, unfit

_NEEDED: Final = ("n_samples",)  # without which no algorithm can work with a reply whose phase reply_meta them
_LIMIT: Final = 10.0  # times the median length of the others' updates
_LARGEST: Final = 100.0  # of two sites, of which nobody knows the usual length, and of what is no update (gradients, statistics)
OPPOSITE: Final = -0.3  # cosine to the others below which an update is named; those of honest phantom sites are positive


@dataclass(frozen=True)
class Screened:
    """Usable replies in sorted site order, why each of the others is not usable, and what is suspicious about those that are."""

    accepted: dict[str, Message]
    rejected: dict[str, str]
    suspicious: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Updates:
    """One entry of all replies.

    Attributes:
        products: (K, K) inner products of the sites' updates, float64.
        replaces: whether the entry is a new version of what the sites were sent.
        weights: whether it holds weights of the network.
    """

    sites: tuple[str, ...]
    products: Tensor
    replaces: bool
    weights: bool

    @property
    def lengths(self) -> dict[str, float]:
        """site -> Euclidean length of its update."""
        return dict(zip(self.sites, self.products.diagonal().clamp(min=0).sqrt().tolist(), strict=True))

    def of(self, sites: Collection[str]) -> "_Updates":
        """The same for some of the sites."""
        chosen = [row for row, site in enumerate(self.sites) if site in sites]
        return _Updates(tuple(self.sites[row] for row in chosen), self.products[chosen][:, chosen], self.replaces, self.weights)


def screen(
    replies: Mapping[str, Message],
    manifest: Manifest,
    outgoing: Mapping[str, Message],
    enrolled: Mapping[str, Mapping[str, int]],
    *,
    reply_meta: tuple[MetaSpec, ...] = (),
    weights: Collection[str] | None = None,
    strict: bool = False,
) -> Screened:
    """Check every reply against its declaration and its sample count against enrolment, and the updates against each other.

    Args:
        replies: site -> reply.
        manifest: what a reply to this step holds.
        outgoing: what each site was sent; an update is the difference to the entry of the same name.
        enrolled: site -> {"train", "validation", "test"} counts given when it enrolled.
        reply_meta: the meta that a reply to this step may hold.
        weights: the entries that hold weights of the task's network, whose directions are compared; None: all.
        strict: reject what is suspicious too, where it is the fewer of three replies or more.
    """
    problems = {site: _problem(replies[site], manifest, reply_meta, enrolled.get(site, {})) for site in sorted(replies)}
    accepted = {site: replies[site] for site, problem in problems.items() if problem is None}
    rejected = {site: problem for site, problem in problems.items() if problem is not None}
    entries = sorted(next(iter(accepted.values())).states) if accepted else []
    found = {entry: _updates(accepted, outgoing, entry, weights is None or entry in weights) for entry in entries}
    rejected |= _too_long(found, {site: counts.get("train", 0) for site, counts in enrolled.items()})
    accepted = {site: reply for site, reply in accepted.items() if site not in rejected}
    suspicious = _against_the_others({entry: updates.of(accepted) for entry, updates in found.items()})
    if strict and len(accepted) > 2 and 2 * len(suspicious) < len(accepted):
        rejected, suspicious = rejected | suspicious, {}
        accepted = {site: reply for site, reply in accepted.items() if site not in rejected}
    return Screened(accepted, dict(sorted(rejected.items())), suspicious)


def _problem(reply: Message, manifest: Manifest, reply_meta: tuple[MetaSpec, ...], counts: Mapping[str, int]) -> str | None:
    """Why a reply by itself is not usable, one line, or None."""
    try:
        problem = violation(reply, manifest) or non_finite(reply) or negative(reply, manifest)
        if reply_meta and not problem:
            problem = unfit(reply, reply_meta, tuple(item for item in reply_meta if item in _NEEDED))
        samples, known = reply.meta.get("n_samples"), counts.get("train")
        if not problem and samples is not None and known is not None and samples != known:
            problem = f"n_samples is {samples}, the site enrolled with {known} training images; counts do not change during a run"
    except Exception as error:  # whatever it is made of, it is the site's
        problem = f"it cannot be checked ({type(error).__name__}: {error})"
    return None if problem is None else one_line(problem)


def _updates(replies: Mapping[str, Message], outgoing: Mapping[str, Message], entry: str, weights: bool) -> _Updates:
    """The updates of one entry; integer tensors do not count."""
    states = [reply.states[entry] for reply in replies.values()]
    origins: list[StateDict] = [outgoing[site].states.get(entry, {}) if site in outgoing else {} for site in replies]
    replaces = all(origin and state.keys() <= origin.keys() for state, origin in zip(states, origins, strict=True))
    products = torch.zeros(len(states), len(states), dtype=torch.float64)
    room = torch.empty(len(states), CACHED, dtype=torch.float64)
    for name, tensor in states[0].items():
        if not tensor.is_floating_point():
            continue
        starts = [origin.get(name, torch.zeros(())).expand_as(tensor) for origin in origins]
        if all(origin.get(name) is origins[0].get(name) for origin in origins):
            starts = starts[:1]  # all were sent the same
        for parts in stretches([*(state[name] for state in states), *starts]):
            begun = [part.double() for part in parts[len(states) :]]
            updates = room[:, : parts[0].numel()]
            for place, update in enumerate(updates):
                update.copy_(parts[place]).sub_(begun[place % len(begun)])
            products += updates @ updates.T
    return _Updates(tuple(replies), products, replaces, weights)


def _too_long(found: Mapping[str, _Updates], images: Mapping[str, int]) -> dict[str, str]:
    """Sites whose update of some entry is longer than ten times the median of the others that moved, with the reason.

    A site with more training images takes more steps: its limit is as many times higher as its count is above the others' median, at most
    a hundred times their length. Of two sites the longer one may be right, and what is no update has no usual length: a hundred times, too.
    """
    rejected: dict[str, str] = {}
    for entry, updates in found.items():
        lengths = updates.lengths
        for site, length in lengths.items():
            others = [other for other, moved in lengths.items() if other != site and 0 < moved < math.inf]
            if not others:
                continue
            usual = statistics.median(lengths[other] for other in others)
            count = statistics.median(images.get(other, 0) for other in others)
            more = max(1.0, images.get(site, 0) / count) if count else 1.0
            limit = min(_LIMIT * more, _LARGEST) if updates.replaces and len(others) > 1 else _LARGEST
            if not length <= limit * usual:  # NaN, where lengths overflow, is too long as well
                rejected.setdefault(site, f"{entry} moved by {length:.3g}, more than {limit:.3g} times the others' median {usual:.3g}")
    return rejected


def _against_the_others(found: Mapping[str, _Updates]) -> dict[str, str]:
    """Sites whose update of the network's weights points against those of the others, with the reason."""
    reasons: dict[str, str] = {}
    for entry, updates in found.items():
        if not (updates.replaces and updates.weights):
            continue
        for site, cosine in zip(updates.sites, cosines_to_the_others(updates.products).tolist(), strict=True):
            if cosine < OPPOSITE:
                reasons.setdefault(site, f"{entry} moved against the others: cosine {cosine:.2f} to their mean direction")
    return reasons


def cosines_to_the_others(products: Tensor) -> Tensor:
    """cos(u_k, Σ_{j≠k} u_j / |u_j|): how far each update points where the others point on average, whatever their lengths.

    Args:
        products: (K, K) inner products <u_j, u_k>.

    Returns:
        (K,); NaN for an update of length 0, for one whose others cancel out, and for one alone.

    Examples:
        >>> cosines_to_the_others(torch.tensor([[1.0, 1.0, -2.0], [1.0, 1.0, -2.0], [-2.0, -2.0, 4.0]]))
        tensor([nan, nan, -1.])
    """
    moved = products.diagonal() > 0
    others = cosines(products).fill_diagonal_(0)
    along = others.sum(dim=1)  # <û_k, Σ_{j≠k} û_j>
    squared = (moved.sum() - 1) + others.sum() - 2 * along  # |Σ_{j≠k} û_j|²
    known = moved & (squared > 1e-9)
    return torch.where(known, along / squared.clamp(min=1e-9).sqrt(), math.nan)


def lost_votes(meta: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Set validation metrics that no metric can be to None, in place; returns model -> (kind of event, what is wrong).

    A site's metric only helps to choose a round, so a bad one costs the site its vote and not its update.

    Examples:
        >>> meta = {"validation": {"global": float("nan"), "personal": 0.5, "selector": 7}}
        >>> [(model, kind) for model, (kind, _) in lost_votes(meta).items()], meta["validation"]
        ([('global', 'undefined'), ('selector', 'rejected')], {'global': None, 'personal': 0.5, 'selector': None})
    """
    measured = meta.get("validation") or {}
    bad = {model: problem for model, value in measured.items() if (problem := METRIC(value))}
    meta["validation"] = {model: None if model in bad else value for model, value in measured.items()}
    undefined = [model for model in bad if isinstance(measured[model], float) and math.isnan(measured[model])]
    return {model: ("undefined" if model in undefined else "rejected", problem) for model, problem in bad.items()}


def capped(samples: Mapping[str, float], most: float) -> dict[str, float]:
    """Counts in which no site has more than a share of the whole: the largest are lowered, the others stay as they are.

    Args:
        samples: site -> training images, none of them 0.
        most: the largest share; where it is below 1/K, which not all can be, all get the smallest count.

    Examples:
        >>> capped({"A": 98.0, "B": 1.0, "C": 1.0}, 0.5)
        {'A': 2.0, 'B': 1.0, 'C': 1.0}
        >>> capped({"A": 100.0, "B": 100.0, "C": 1.0}, 0.25)
        {'A': 1.0, 'B': 1.0, 'C': 1.0}
    """
    if not samples or most * len(samples) <= 1:
        return dict.fromkeys(samples, min(samples.values(), default=0.0))
    rest = float(sum(samples.values()))
    limit = most * rest
    for lowered, count in enumerate(sorted(samples.values(), reverse=True)):
        limit = most * rest / (1 - lowered * most)  # with so many sites at the limit it is their share of what they and the rest have
        if count <= limit:
            break
        rest -= count
    return {site: min(count, limit) for site, count in samples.items()}
