"""How the schedule reaches the sites: the exchange that an engine supplies, and the transport that
validates replies and counts bytes and seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from medflare.core.message import Message, Messages
from medflare.core.text import reason_line
from medflare.federation.builtin_messages import (
    BUILTIN_REPLY_META,
    PERSONAL_MODEL,
    RUN_ROUNDS,
    STEP,
)
from medflare.federation.outcome import Outcome, SiteCost
from medflare.federation.protocol import declaration_problem, message_problem
from medflare.federation.settings import FINALIZE, step_name
from medflare.methods.base import Step


@dataclass
class SiteReply:
    """A site's reply: a message, or why there is none.

    Attributes:
        problem: one line; empty if there is a message.
        kind: the kind of event of a problem: "failed" (the site reported an error), "rejected" (not
            valid), "late" or "missing".
        seconds: how long the site worked on it.
    """

    message: Message | None = None
    problem: str = ""
    kind: str = "failed"
    seconds: float = field(default=0.0, compare=False)


SiteReplies = dict[str, SiteReply]  # by site


class Exchange(Protocol):
    """How messages reach the sites. A site's MedflareError becomes a SiteReply with a problem.

    Any other error of a site is a bug: FLARE makes it a SiteReply, too; the plain loop raises it.
    """

    def present(self, round: int) -> list[str]:
        """Names of the sites that can be reached in this round."""

    def __call__(self, step: Step, outgoing: Messages) -> Mapping[str, SiteReply]:
        """Ask every site in `outgoing`; a site without an entry in the result is missing."""


@dataclass
class Transport:
    """Asks sites over an exchange, replaces invalid replies by their problem, and counts bytes and
    seconds.
    """

    exchange: Exchange
    outcome: Outcome

    def ask(self, step: Step, outgoing: Messages) -> SiteReplies:
        """site -> reply for every site in `outgoing`, sorted; a missing reply is one of the kind
        "missing".
        """
        replies = self.exchange(step, outgoing) if outgoing else {}
        missing = SiteReply(None, f"no reply to {step_name(step.phase, step.round)}", "missing")
        valid = {}
        for site in sorted(outgoing):
            reply = _checked(replies.get(site, missing), site, step.phase)
            cost = self.outcome.costs.setdefault(site, SiteCost())
            cost.down_bytes += outgoing[site].nbytes
            if reply.message is not None:
                cost.up_bytes += reply.message.nbytes
            cost.seconds += reply.seconds
            valid[site] = reply
        return valid


def with_step_number(message: Message, index: int, rounds: int) -> Message:
    """The message with the number of rounds and of its step, by which a site recognizes a repeated
    step.
    """
    request = Message(message.states, dict(message.meta))
    request[STEP] = index
    request[RUN_ROUNDS] = rounds
    return request


def _checked(reply: SiteReply, site: str, phase: str) -> SiteReply:
    """The reply, or its problem in place of an invalid message.

    What the phases of a method declare is checked by `update_validation.updates`.
    """
    if reply.message is None:
        return replace(reply, problem=reason_line(reply.problem))
    problem = message_problem(reply.message, site)
    if problem is None and phase in BUILTIN_REPLY_META:
        allowed = {PERSONAL_MODEL.name} if phase == FINALIZE else set()
        if reply.message.states.keys() <= allowed:
            problem = declaration_problem(reply.message, *BUILTIN_REPLY_META[phase])
        else:
            problem = "unexpected tensors"
    if problem is None:
        return reply
    return SiteReply(None, reason_line(problem), "rejected", reply.seconds)
