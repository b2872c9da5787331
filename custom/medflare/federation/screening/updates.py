"""Replies to the phases of a method: what does not hold what the method declares, or cannot be meant, reaches no average."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from medflare.core.manifest import Fact, Manifest, non_finite, violation
from medflare.core.message import Message
from medflare.federation.screening.replies import METRIC, is_number, unfit


@dataclass(frozen=True)
class Screened:
    """Usable replies in sorted site order, and why each of the others is not usable."""

    accepted: dict[str, Message]
    rejected: dict[str, str]


def screen(
    replies: Mapping[str, Message],
    manifest: Manifest,
    outgoing: Mapping[str, Message],
    enrolled: Mapping[str, Mapping[str, int]],
    *,
    reports: tuple[Fact, ...] = (),
    norm_limit: float = 100.0,
) -> Screened:
    """Check every reply against the declaration, for finite values, plausible sample counts and an update norm near its peers'.

    Args:
        replies: site -> reply.
        manifest: what a reply to this step holds.
        outgoing: what each site was sent; an update is the difference to the entry of the same name.
        enrolled: site -> {"train", "validation", "test"} counts given when it enrolled.
        reports: the facts that a reply to this step may hold, with what they take.
        norm_limit: reject an update longer than this many times the median of the round (with three or more replies).
    """
    accepted: dict[str, Message] = {}
    rejected: dict[str, str] = {}
    for site in sorted(replies):
        reason = _reason(replies[site], manifest, reports, enrolled.get(site, {}))
        if reason is None:
            accepted[site] = replies[site]
        else:
            rejected[site] = reason
    for site, reason in _too_long(accepted, outgoing, norm_limit).items():
        del accepted[site]
        rejected[site] = reason
    return Screened(accepted, dict(sorted(rejected.items())))


def _reason(reply: Message, manifest: Manifest, reports: tuple[Fact, ...], counts: Mapping[str, int]) -> str | None:
    try:
        return violation(reply, manifest) or non_finite(reply) or unfit(reply, reports) or _implausible(reply.facts, counts)
    except Exception as error:  # whatever it is made of, it is the site's
        return f"it cannot be checked ({type(error).__name__}: {error})"


def _implausible(facts: Mapping[str, Any], counts: Mapping[str, int]) -> str | None:
    loss = facts.get("loss")
    if loss is not None and not is_number(loss):
        return f"loss is {loss}: training diverged at the site; lower its learning rate or check its images"
    if "n_samples" not in facts:
        return None
    samples, known = facts["n_samples"], counts.get("train")
    if not is_number(samples) or samples <= 0:
        return f"n_samples is {samples!r}, expected a positive number"
    if known is not None and samples > known:
        return f"n_samples is {samples}, more than the {known} training images the site enrolled with"
    return None


def _too_long(accepted: Mapping[str, Message], outgoing: Mapping[str, Message], limit: float) -> dict[str, str]:
    """Sites whose update of some entry is far longer than their peers', judged entry by entry against the median."""
    found: dict[str, str] = {}
    if len(accepted) < 3:
        return found
    for entry in sorted(next(iter(accepted.values())).states):
        norms = {site: _update_norm(reply, outgoing.get(site), entry) for site, reply in accepted.items()}
        median = statistics.median(norms.values())
        for site, norm in norms.items():
            if site not in found and norm > limit * median > 0:
                found[site] = f"{entry} moved by {norm:.3g}, more than {limit:g} times the round's median {median:.3g}"
    return found


def _update_norm(reply: Message, sent: Message | None, entry: str) -> float:
    state = reply.states[entry]
    origin = sent.states.get(entry, {}) if sent else {}
    total = 0.0
    for name, tensor in state.items():
        if tensor.is_floating_point():
            moved = tensor.double() - origin[name].double() if name in origin else tensor.double()
            total += float(moved.square().sum())
    return math.sqrt(total)


def drop_undefined_metrics(facts: dict[str, Any]) -> list[str]:
    """Set validation metrics that no metric can have to None, in place; returns their names.

    A site's metric only helps to choose a round, so a bad one costs the site its vote and not its update.

    Args:
        facts: of a reply; its "validation" is rewritten.

    Examples:
        >>> facts = {"validation": {"global": float("nan"), "personal": 0.5}}
        >>> drop_undefined_metrics(facts), facts
        (['global'], {'validation': {'global': None, 'personal': 0.5}})
    """
    measured = facts.get("validation") or {}
    bad = [name for name, value in measured.items() if METRIC(value)]
    facts["validation"] = {name: None if name in bad else value for name, value in measured.items()}
    return bad
