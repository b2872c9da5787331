"""What the server takes from a site: everything else is rejected, by name, before it can reach an average."""

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from medflare.core.manifest import Manifest, non_finite, violation
from medflare.core.message import Message


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
    norm_limit: float = 100.0,
) -> Screened:
    """Check every reply against the manifest, for finite values, plausible sample counts and an update norm near its peers'.

    Args:
        replies: site -> reply.
        manifest: what a reply to this step holds.
        outgoing: what each site was sent; an update is the difference to the entry of the same name.
        enrolled: site -> {"train", "validation", "test"} counts given when it enrolled.
        norm_limit: reject an update longer than this many times the median of the round (with three or more replies).
    """
    accepted: dict[str, Message] = {}
    rejected: dict[str, str] = {}
    for site in sorted(replies):
        reason = _reason(replies[site], manifest, enrolled.get(site, {}))
        if reason is None:
            accepted[site] = replies[site]
        else:
            rejected[site] = reason
    for site, reason in _too_long(accepted, outgoing, norm_limit).items():
        del accepted[site]
        rejected[site] = reason
    return Screened(accepted, dict(sorted(rejected.items())))


def not_plain(facts: Mapping[str, object]) -> str | None:
    """What in a reply's facts cannot be written down as numbers and names, in words, or None.

    Args:
        facts: of a reply.
    """
    try:
        json.dumps(facts)
    except (TypeError, ValueError) as error:
        return f"facts hold something that is neither number nor text ({error})"
    return None


def _reason(reply: Message, manifest: Manifest, counts: Mapping[str, int]) -> str | None:
    return violation(reply, manifest) or non_finite(reply) or _implausible(reply.facts, counts)


def _implausible(facts: Mapping[str, Any], counts: Mapping[str, int]) -> str | None:
    loss = facts.get("loss")
    if loss is not None and not _is_number(loss):
        return f"loss is {loss}: training diverged at the site; lower its learning rate or check its images"
    if "n_samples" not in facts:
        return None
    samples, known = facts["n_samples"], counts.get("train")
    if not _is_number(samples) or samples <= 0:
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
    """Set validation metrics that are no finite numbers to None, in place; returns their names.

    A site's metric only helps to choose a round, so a bad one costs the site its vote and not its update.

    Args:
        facts: of a reply; its "validation" is rewritten.

    Examples:
        >>> facts = {"validation": {"global": float("nan"), "personal": 0.5}}
        >>> drop_undefined_metrics(facts), facts
        (['global'], {'validation': {'global': None, 'personal': 0.5}})
    """
    measured = facts.get("validation") or {}
    bad = [name for name, value in measured.items() if value is not None and not _is_number(value)]
    facts["validation"] = {name: None if name in bad else value for name, value in measured.items()}
    return bad


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
