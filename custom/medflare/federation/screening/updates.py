"""Replies to the phases of a method: what does not hold what the method declares, or cannot be meant, reaches no average.

What is certainly wrong is rejected. What an honest site with other patients might send as well is used, and becomes an event.
"""

import math
import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from medflare.core.manifest import Fact, Manifest, negative, non_finite, violation
from medflare.core.message import Message
from medflare.federation.screening.evidence import Evidence, cosines_to_the_others, digest, gathered, similarity, sum_with_and_without
from medflare.federation.screening.plain import one_line
from medflare.federation.screening.replies import METRIC, unfit

_NEEDED: Final = ("n_samples",)  # without which no half can work with a reply whose phase reports them
_COUNTS: Final = {"n_samples": ("train", "training")}  # fact -> split, in words
_LIMIT: Final = 10.0  # times the others' median length: a longer update is rejected, from the first round on
_LARGEST: Final = 100.0  # where nobody can say which length is the usual one: of two sites, one alone, and what is no update
OPPOSITE: Final = -0.3  # cosine to the others below which an update is named; those of honest phantom sites are positive


@dataclass(frozen=True)
class Screened:
    """Usable replies in sorted site order, why each of the others is not usable, and what is odd about those that are.

    Attributes:
        steps: "phase/entry" -> median length of what is declared as a step.
        digests: "phase/entry" -> hash of an update -> its site.
        similarity: of the accepted updates of entries that are new versions of what was sent, or steps, see `evidence.similarity`.
    """

    accepted: dict[str, Message]
    rejected: dict[str, str]
    suspicious: dict[str, str] = field(default_factory=dict)
    steps: Mapping[str, float] = field(default_factory=dict)
    digests: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    similarity: Callable[[], dict[str, dict[str, dict[str, float]]]] = dict


@dataclass
class Past:
    """What is remembered of earlier steps, by "phase/entry": lengths and hashes, never a state. It goes into the checkpoint.

    Attributes:
        steps: -> the largest median length that a round had of what is declared as a step.
        seen: -> hash of an update -> [its site, its round].
    """

    steps: dict[str, float] = field(default_factory=dict)
    seen: dict[str, dict[str, list[Any]]] = field(default_factory=dict)

    def remember(self, screened: Screened, round: int) -> None:
        """Add a step that has come to its end.

        Args:
            screened: its replies.
            round: of the step.
        """
        for key, length in screened.steps.items():
            self.steps[key] = max(length, self.steps.get(key, 0.0))
        for key, digests in screened.digests.items():
            for mark, site in digests.items():
                self.seen.setdefault(key, {}).setdefault(mark, [site, round])


def screen(
    replies: Mapping[str, Message],
    manifest: Manifest,
    outgoing: Mapping[str, Message],
    enrolled: Mapping[str, Mapping[str, int]],
    *,
    reports: tuple[Fact, ...] = (),
    phase: str = "train",
    past: Past | None = None,
    weights: Collection[str] | None = None,
    steps: Collection[str] = (),
    strict: bool = False,
    contradicted: Callable[[str, Message], str | None] = lambda site, reply: None,
) -> Screened:
    """Check every reply against the declaration, for finite values, the sample counts of enrolment, and updates against their peers'.

    Args:
        replies: site -> reply.
        manifest: what a reply to this step holds.
        outgoing: what each site was sent; an update is the difference to the entry of the same name.
        enrolled: site -> {"train", "validation", "test"} counts given when it enrolled.
        reports: the facts that a reply to this step may hold, with what they take.
        phase: of the step.
        past: earlier steps; None: there are none.
        weights: the entries that hold weights of the task's network, and are judged as such; None: all.
        steps: the entries that are declared as steps, see `core.manifest.Entry`.
        strict: reject what is suspicious too, where it is the fewer of three replies or more.
        contradicted: (site, reply) -> what of it cannot be so, though it is as declared, in words, or None.
    """
    accepted: dict[str, Message] = {}
    rejected: dict[str, str] = {}
    for site in sorted(replies):
        reason = _reason(replies[site], manifest, reports, enrolled.get(site, {}), partial(contradicted, site))
        if reason is None:
            accepted[site] = replies[site]
        else:
            rejected[site] = reason
    past = past or Past()
    entries = sorted(next(iter(accepted.values())).states) if accepted else []
    found = {
        f"{phase}/{entry}": gathered(accepted, outgoing, entry, weights is None or entry in weights, entry in steps) for entry in entries
    }
    digests = {key: _digests(accepted, key.removeprefix(f"{phase}/"), evidence) for key, evidence in found.items()}
    too_long, long = _too_long(found, enrolled, past)
    for judged in (too_long, _unmoved(found), _replayed(digests, past)):
        for site, reason in judged.items():
            rejected.setdefault(site, reason)
    left = _of(found, [site for site in accepted if site not in rejected])
    rejected |= _turning(left)
    accepted = {site: reply for site, reply in accepted.items() if site not in rejected}
    left = _of(found, list(accepted))
    odd = long | _against_the_others(left)
    suspicious = {site: odd[site] for site in accepted if site in odd}
    if strict and len(accepted) > 2 and 2 * len(suspicious) < len(accepted):
        rejected, suspicious = rejected | suspicious, {}
        accepted = {site: reply for site, reply in accepted.items() if site not in rejected}
        left = _of(found, list(accepted))
    updates = {_entry(key): evidence for key, evidence in left.items() if evidence.whole}
    steps_taken = {key: statistics.median_low(evidence.lengths.values()) for key, evidence in left.items() if evidence.step}
    known = {key: {mark: site for site, mark in digests[key].items() if site in accepted} for key in left}
    return Screened(accepted, dict(sorted(rejected.items())), suspicious, steps_taken, known, partial(similarity, updates))


def _reason(
    reply: Message,
    manifest: Manifest,
    reports: tuple[Fact, ...],
    counts: Mapping[str, int],
    contradicted: Callable[[Message], str | None],
) -> str | None:
    try:
        required = tuple(fact for fact in reports if fact in _NEEDED)
        problem = violation(reply, manifest) or non_finite(reply) or negative(reply, manifest)
        problem = problem or (unfit(reply, reports, required) if reports else None) or _implausible(reply.facts, counts)
        problem = problem or contradicted(reply)
    except Exception as error:  # whatever it is made of, it is the site's
        problem = f"it cannot be checked ({type(error).__name__}: {error})"
    return None if problem is None else one_line(problem)


def _implausible(facts: Mapping[str, Any], counts: Mapping[str, int]) -> str | None:
    """Which count is not that of enrolment, in words, or None."""
    for fact, (split, images) in _COUNTS.items():
        found, known = facts.get(fact), counts.get(split)
        if found is None or known is None or found == known:
            continue
        if found > known:
            return f"{fact} is {found}, more than the {known} {images} images the site enrolled with"
        return f"{fact} is {found}, the site enrolled with {known} {images} images; counts do not change during a run"
    return None


def _limit(site: str, others: Collection[str], enrolled: Mapping[str, Mapping[str, int]]) -> float:
    """How many times the others' median an update may be long: 10, and with more training images, which are more steps, as many times more.

    No number of images makes it more than 100.
    """
    counts = {name: enrolled.get(name, {}).get("train", 0) for name in (site, *others)}
    usual = statistics.median(counts[name] for name in others)
    return _LIMIT * min(max(1.0, counts[site] / usual), _LARGEST / _LIMIT) if usual else _LIMIT


def _too_long(
    found: Mapping[str, Evidence], enrolled: Mapping[str, Mapping[str, int]], past: Past
) -> tuple[dict[str, str], dict[str, str]]:
    """(sites whose update of some entry is too long to be used, sites whose update is long enough to be named).

    A length is compared with the median of the others that moved, so that no site has a say in its own limit; beyond half of the limit the
    site is named. Of two sites the longer one may be right: up to 100 it is used and both are named. A single reply is compared with the
    length of what the site was sent.
    """
    rejected: dict[str, str] = {}
    named: dict[str, str] = {}
    for key, evidence in found.items():
        lengths, largest = evidence.lengths, past.steps.get(key, 0.0) if evidence.step else 0.0
        for site, length in lengths.items():
            others = [other for other, moved in lengths.items() if other != site and 0 < moved < math.inf]
            usual, words = evidence.sent[site], "the length of what it was sent"
            if others:
                usual, words = statistics.median(lengths[other] for other in others), "the others' median"
            if largest > usual:  # what changes little once it is known is long at a site that comes late
                usual, words = largest, "the largest median of the rounds"
            limit = _limit(site, others, enrolled) if others and evidence.update else _LARGEST
            most = limit if len(others) > 1 or largest else _LARGEST
            text = f"{_entry(key)} moved by {length:.3g}, more than {{:.3g}} times {words} {usual:.3g}"
            if usual > 0 and not length <= most * usual:  # NaN, where lengths overflow, is too long as well
                rejected.setdefault(site, text.format(most))
            elif most < _LARGEST and length > limit / 2 * usual > 0:
                named.setdefault(site, text.format(limit / 2))
            elif len(others) == 1 and length > limit * usual > 0:
                pair = f"{text.format(limit)}; of two sites nobody can say which one is wrong"
                named = dict.fromkeys((site, *others), pair) | named
    return rejected, named


def _unmoved(found: Mapping[str, Evidence]) -> dict[str, str]:
    """Sites that send back what they were sent, where others have moved."""
    lengths = [evidence.lengths for evidence in found.values() if evidence.whole and not evidence.step]
    still = [site for site in (lengths[0] if lengths else ()) if not any(by_site[site] for by_site in lengths)]
    moved = any(length for by_site in lengths for length in by_site.values())
    return dict.fromkeys(still, "it is what the site was sent, unchanged: nothing was trained") if moved else {}


def _digests(accepted: Mapping[str, Message], entry: str, evidence: Evidence) -> dict[str, str]:
    """site -> hash of an entry that has moved."""
    moved = [site for site, length in evidence.lengths.items() if evidence.whole and length > 0]
    return {site: digest(accepted[site].states[entry]) for site in moved}


def _replayed(digests: Mapping[str, Mapping[str, str]], past: Past) -> dict[str, str]:
    """Sites that send, bit for bit, what they or others sent in an earlier step."""
    reasons: dict[str, str] = {}
    for key, by_site in digests.items():
        for site, found in by_site.items():
            if earlier := past.seen.get(key, {}).get(found):
                whose = "its own" if earlier[0] == site else f"that of {earlier[0]}"
                reasons.setdefault(site, f"{_entry(key)} is {whose} of round {earlier[1]}, bit for bit")
    return reasons


def _of(found: Mapping[str, Evidence], sites: list[str]) -> dict[str, Evidence]:
    return {key: evidence.of(tuple(sites)) for key, evidence in found.items()} if sites else {}


def _turning(left: Mapping[str, Evidence]) -> dict[str, str]:
    """Sites whose update of some entry would alone turn the round around: with it all together move against all others together.

    Of two sites the longer update always could; there it is not told which one is wrong.
    """
    reasons: dict[str, str] = {}
    for key, evidence in left.items():
        if not evidence.whole or len(evidence.sites) < 3:
            continue
        for site, along in zip(evidence.sites, sum_with_and_without(evidence.products).tolist(), strict=True):
            if along < 0:
                reasons.setdefault(site, f"{_entry(key)} moved against all others together, and further: it would turn the round around")
    return reasons


def _against_the_others(left: Mapping[str, Evidence]) -> dict[str, str]:
    """Sites whose update of some entry points against those of the others."""
    reasons: dict[str, str] = {}
    for key, evidence in left.items():
        cosines = cosines_to_the_others(evidence.products).tolist() if evidence.whole else []
        unknown = " (of two sites nobody can say which one is wrong)" if len(cosines) == 2 else ""
        for site, cosine in zip(evidence.sites, cosines, strict=False):
            if cosine < OPPOSITE:
                reasons.setdefault(site, f"{_entry(key)} moved against the others: cosine {cosine:.2f} to their mean direction{unknown}")
    return reasons


def _entry(key: str) -> str:
    return key.partition("/")[2]


def lost_votes(facts: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Set validation metrics that no metric can be to None, in place; returns model -> (kind of event, what is wrong).

    A site's metric only helps to choose a round, so a bad one costs the site its vote and not its update.

    Args:
        facts: of a reply; its "validation" is rewritten.

    Examples:
        >>> facts = {"validation": {"global": float("nan"), "personal": 0.5, "selector": 7}}
        >>> sorted(lost_votes(facts)), lost_votes({"validation": {"global": 7}})
        (['global', 'selector'], {'global': ('rejected', 'is 7, expected a number from 0 to 1')})
        >>> facts
        {'validation': {'global': None, 'personal': 0.5, 'selector': None}}
    """
    measured = facts.get("validation") or {}
    bad = {name: problem for name, value in measured.items() if (problem := METRIC(value))}
    facts["validation"] = {name: None if name in bad else value for name, value in measured.items()}
    return {name: ("undefined" if _nan(measured[name]) else "rejected", problem) for name, problem in bad.items()}


def _nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)
