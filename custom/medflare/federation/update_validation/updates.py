"""Update validation: what the server does with replies to a method's phase before it aggregates
them.

A reply is rejected if it differs from the phase's declaration, is not finite, has other counts than
at enrollment, or is much longer than the others' updates, or if it and its site's last ones add up
far in a direction of their own (`drift`). A longer one than usual is clipped (`clipping`). One that
points against the others', or a short drift, may come from other patients: it is used, with an
event, or rejected with `strict`.
"""

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from medflare.core.message import Message, Messages
from medflare.core.phases import Items, Phase
from medflare.core.specs import Manifest, StateSpec
from medflare.core.states import CHUNK, cosines, iter_chunks
from medflare.core.text import reason_line
from medflare.federation.builtin_messages import COUNTS, METRIC
from medflare.federation.protocol import declaration_problem, tensor_problem
from medflare.federation.update_validation import clipping
from medflare.federation.update_validation.drift import DriftMemory, ImageCounts, Reasons, Sketches
from medflare.methods.base import ServerContext, Step
from medflare.methods.parts.measured import N_SAMPLES, VALIDATION

T = TypeVar("T")
_USUAL_LIMIT = 10.0  # times the median length of the others' updates
# With two sites, without a usual length, and for gradients and statistics.
_LARGEST_LIMIT = 100.0
# An update with a smaller cosine to the others is suspicious; those of honest phantom sites are
# positive.
OPPOSITE = -0.3


@dataclass(frozen=True)
class Validated:
    """What validation makes of the replies to a phase.

    Attributes:
        accepted: usable replies in sorted site order.
        rejected: site -> why its reply is not usable.
        suspicious: site -> why its usable reply is suspicious.
        sketches: for `DriftMemory.remember`, once the step is finished.
    """

    accepted: dict[str, Message]
    rejected: Reasons
    suspicious: Reasons
    sketches: Sketches


@dataclass(frozen=True)
class _Updates:
    """The updates of one entry in all replies."""

    sites: list[str]
    image_counts: list[float]  # training images of the sites
    products: Tensor  # (K, K) inner products of the sites' updates, float64
    squares: dict[str, Tensor]  # tensor -> their squared lengths, (K,)
    sizes: dict[str, int]  # tensor -> how many numbers it has
    replaces: bool  # whether the entry is a new version of what the sites were sent

    @property
    def lengths(self) -> list[float]:
        return self.products.diagonal().clamp(min=0).sqrt().tolist()

    def of(self, sites: Collection[str]) -> "_Updates":
        """The updates of some of the sites."""
        rows = [row for row, site in enumerate(self.sites) if site in sites]
        return replace(
            self,
            sites=[self.sites[row] for row in rows],
            image_counts=[self.image_counts[row] for row in rows],
            products=self.products[rows][:, rows],
            squares={name: lengths[rows] for name, lengths in self.squares.items()},
        )


def exchange_name(step: Step) -> str:
    """The name of the exchange of a round whose updates are compared over the rounds."""
    return f"{step.phase}/{step.part}"


def validate_replies(
    context: ServerContext,
    step: Step,
    replies: Messages,
    outgoing: Messages,
    drift: DriftMemory,
    *,
    strict: bool,
) -> Validated:
    """Check every reply against its declaration, its site's counts and the other updates; clip long
    updates.

    Args:
        context: of the server algorithm, with the phase's declaration and what the sites enrolled
            with.
        replies: site -> reply.
        outgoing: site -> request; an update is the difference to the entry of the same name.
        drift: earlier updates.
        strict: also reject suspicious updates, if they are the minority of at least three.
    """
    phase = context.phases.get(step.phase) or Phase(step.phase)
    manifest = phase.manifest(context.plan)
    enrolled = {site: meta[COUNTS.name] for site, meta in context.site_counts.items()}
    image_counts = {}
    for site, counts in enrolled.items():
        image_counts[site] = counts.get("train", 0) * context.counted_fraction.get(site, 1)

    # 1. Refuse what is not as declared.
    accepted = {}
    rejected = {}
    for site in sorted(replies):
        problem = _problem(replies[site], manifest, phase.meta, enrolled.get(site, {}))
        if problem is None:
            accepted[site] = replies[site]
        else:
            rejected[site] = problem
    entries = sorted(next(iter(accepted.values())).states) if accepted else []
    updates = {entry: _updates(accepted, outgoing, entry, image_counts) for entry in entries}

    # 2. Refuse updates that are far too long.
    name = exchange_name(step)
    usual = {entry: drift.usual_length(name, entry) for entry in updates}
    too_long, doubted = _too_long(updates, usual)
    rejected |= too_long
    accepted = _without(accepted, rejected)

    # 3. Refuse long drifts.
    network = StateSpec.like(context.plan.template(), "").tensors.items()
    compared = []  # entries with weights of the task's network
    sketches = {}
    for entry, update in updates.items():
        if update.replaces and manifest[entry].tensors.items() <= network:
            compared.append(entry)
            # Of all updates, also of refused ones: no site knows the lengths of the others', and so
            # none can foresee the coordinates that are drawn with them.
            squares = update.products.diagonal().tolist()
            salt = " ".join(f"{square:.3g}" for square in squares)
            if accepted:
                sketches[entry] = drift.sketch(name, entry, accepted, outgoing, salt)
    drifted, drifting = drift.drifting(name, sketches, image_counts)
    rejected |= drifted
    accepted = _without(accepted, rejected)

    # 4. Clip long updates.
    updates = {entry: update.of(accepted) for entry, update in updates.items()}
    clipped = _clip(updates, accepted, outgoing)

    # 5. Doubt updates, or refuse them if the rules are strict.
    against = _against_the_others({entry: updates[entry] for entry in compared})
    suspicious = _without(_joined(doubted, clipped, against, drifting), rejected)
    if strict and len(accepted) > 2 and 2 * len(suspicious) < len(accepted):
        rejected |= suspicious
        suspicious = {}
        accepted = _without(accepted, rejected)

    for entry, update in updates.items():
        if accepted and not update.replaces:
            drift.note_lengths(name, entry, update.of(accepted).lengths)
    return Validated(
        accepted, dict(sorted(rejected.items())), dict(sorted(suspicious.items())), sketches
    )


def _without(by_site: Mapping[str, T], rejected: Collection[str]) -> dict[str, T]:
    return {site: value for site, value in by_site.items() if site not in rejected}


def _joined(*groups: Reasons) -> Reasons:
    """Site -> its reasons of all groups."""
    joined: Reasons = {}
    for reasons in groups:
        for site, reason in reasons.items():
            joined[site] = f"{joined[site]}; {reason}" if site in joined else reason
    return joined


def _problem(
    reply: Message, manifest: Manifest, reply_meta: Items, counts: Mapping[str, int]
) -> str | None:
    """Why a reply by itself is not usable, one line, or None."""
    problem = tensor_problem(reply, manifest)
    if reply_meta and not problem:
        required = [item for item in reply_meta if item.name == N_SAMPLES.name]
        problem = declaration_problem(reply, reply_meta, required)
    samples = reply.get(N_SAMPLES)
    images = counts.get("train", samples)
    if not problem and samples is not None and samples != images:
        problem = (
            f"n_samples is {samples}, the site enrolled with {images} training images; "
            "counts do not change during a run"
        )
    return None if problem is None else reason_line(problem)


def _updates(
    replies: Messages, outgoing: Messages, entry: str, image_counts: ImageCounts
) -> _Updates:
    """The updates of one entry; integer tensors are ignored."""
    states = [reply.states[entry] for reply in replies.values()]
    origins = [outgoing[site].states.get(entry, {}) for site in replies]
    pairs = zip(states, origins, strict=True)
    replaces = all(origin and state.keys() <= origin.keys() for state, origin in pairs)
    count = len(states)
    products = torch.zeros(count, count, dtype=torch.float64)
    squares = {}
    sizes = {}
    buffer = torch.empty(count, CHUNK, dtype=torch.float64)
    for name, tensor in states[0].items():
        if not tensor.is_floating_point():
            continue
        squares[name] = torch.zeros(count, dtype=torch.float64)
        sizes[name] = tensor.numel()
        starts = [origin.get(name, torch.zeros(())).expand_as(tensor) for origin in origins]
        if all(origin.get(name) is origins[0].get(name) for origin in origins):
            starts = starts[:1]  # all sites were sent the same tensor
        for chunks in iter_chunks([*(state[name] for state in states), *starts]):
            origin_chunks = [chunk.double() for chunk in chunks[count:]]
            updates = buffer[:, : chunks[0].numel()]
            for index, update in enumerate(updates):
                update.copy_(chunks[index]).sub_(origin_chunks[index % len(origin_chunks)])
            inner = updates @ updates.T
            products += inner
            squares[name] += inner.diagonal()
    counts = [image_counts.get(site, 0) for site in replies]
    return _Updates(list(replies), counts, products, squares, sizes, replaces)


def _clip(
    updates: Mapping[str, _Updates], accepted: dict[str, Message], outgoing: Messages
) -> Reasons:
    """Clip long updates in `accepted` (see `clipping.scales`); return site -> what was clipped.

    Updates of two sites are not clipped: they have no majority.
    """
    reasons: Reasons = {}
    for entry, update in updates.items():
        if not update.replaces or len(update.sites) < 3:
            continue
        scales = clipping.scales(update.squares, update.sizes, update.image_counts)
        for index, site in enumerate(update.sites):
            by_tensor = {name: float(scale[index]) for name, scale in scales.items()}
            factors = {name: factor for name, factor in by_tensor.items() if factor < 1}
            if factors:
                accepted[site] = clipping.clipped(accepted[site], outgoing[site], entry, factors)
                reasons.setdefault(site, clipping.reason(entry, factors, len(update.sizes)))
    return reasons


def _too_long(
    updates: Mapping[str, _Updates], usual: Mapping[str, float]
) -> tuple[Reasons, Reasons]:
    """The sites whose update of some entry is much longer than the others', with the reason; and,
    of two sites, the other one, since either can be wrong.

    Too long is more than ten times the median of the others that moved, of two sites a hundred
    times. A gradient is too long if it exceeds both this median and the `usual` length of the entry
    a hundred times: the gradients of sites that have learnt all vanish.

    A site with r times the others' median count of training images takes more steps: it has r times
    this limit, at most a hundred.
    """
    rejected: Reasons = {}
    doubted: Reasons = {}
    for entry, update in updates.items():
        lengths = dict(zip(update.sites, update.lengths, strict=True))
        image_counts = dict(zip(update.sites, update.image_counts, strict=True))
        for site, length in lengths.items():
            others = {
                other: moved
                for other, moved in lengths.items()
                if other != site and 0 < moved < math.inf
            }
            if not others:
                continue
            median = max(statistics.median(others.values()), usual[entry])
            limit = _LARGEST_LIMIT
            if update.replaces and len(others) > 1:
                count = statistics.median(image_counts[other] for other in others)
                ratio = max(1.0, image_counts[site] / count) if count else 1.0
                limit = min(_USUAL_LIMIT * ratio, _LARGEST_LIMIT)
            if not length <= limit * median:  # also if it is NaN because the square overflows
                rejected.setdefault(
                    site,
                    f"{entry} moved by {length:.3g}, more than {limit:.3g} times "
                    f"the others' median {median:.3g}",
                )
                if len(others) == 1:
                    doubted[next(iter(others))] = (
                        f"{entry} moved by {median:.3g}, that of {site} by {length:.3g}: of two, "
                        "either can be wrong"
                    )
        if update.replaces and len(update.sites) > 2:
            absurd = clipping.absurd(update.squares, update.sizes, update.image_counts)
            for index, reason in absurd.items():
                rejected.setdefault(update.sites[index], f"{entry}/{reason}, their median")
    return rejected, doubted


def _against_the_others(updates: Mapping[str, _Updates]) -> Reasons:
    """The sites whose update points against those of the others, if the others agree.

    Once sites with different patients have converged, their updates add up to zero: each points
    against the sum of the others, which do not agree.
    """
    reasons: Reasons = {}
    for entry, update in updates.items():
        cosines, agreement = cosines_to_the_others(update.products)
        for index, site in enumerate(update.sites):
            cosine = float(cosines[index])
            if cosine < OPPOSITE and agreement[index] > 0:
                reasons.setdefault(
                    site,
                    f"{entry} moved against the others: "
                    f"cosine {cosine:.2f} to their mean direction",
                )
    return reasons


def cosines_to_the_others(products: Tensor) -> tuple[Tensor, Tensor]:
    """cos(u_k, Σ_{j≠k} û_j) with û = u / |u|, and the sum of the cosines between the others, (K,)
    each, from the (K, K) inner products <u_j, u_k>.

    The first is NaN for an update of length 0, if the others cancel out, and for a single update.

    Examples:
        >>> updates = torch.tensor([[1.0], [1.0], [-2.0]])
        >>> cosines_to_the_others(updates @ updates.T)
        (tensor([nan, nan, -1.]), tensor([-2., -2.,  2.]))
    """
    moved = products.diagonal() > 0
    others = cosines(products).fill_diagonal_(0)
    along = others.sum(dim=1)  # <û_k, Σ_{j≠k} û_j>
    between = others.sum() - 2 * along
    squared = (moved.sum() - 1) + between  # |Σ_{j≠k} û_j|²
    defined = moved & (squared > 1e-9)
    return torch.where(defined, along / squared.clamp(min=1e-9).sqrt(), math.nan), between


def drop_invalid_metrics(reply: Message) -> dict[str, tuple[str, str]]:
    """Set validation values that no metric can have to None, in place; a reply without values gets
    an empty table. Return model -> (kind of event, problem).

    Such a value costs the site its vote in model selection, not its update.
    """
    problems = {}
    values = {}
    for model, value in (reply.get(VALIDATION) or {}).items():
        problem = METRIC.problem(value)
        values[model] = None if problem else value
        if problem:
            undefined = isinstance(value, float) and math.isnan(value)
            problems[model] = ("undefined" if undefined else "rejected", problem)
    reply[VALIDATION] = values
    return problems
