"""How the schedule reaches the sites.

The exchange that an engine supplies, and the transport that validates and counts.
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
class Answer:
    """A site's reply: a message, or why there is none.

    Attributes:
        problem: empty if there is a message; else one line.
        kind: the kind of event of a problem: "failed" (the site reported an error), "rejected" (not
            valid), "late" or "missing".
        seconds: that the site worked on it.
    """

    message: Message | None = None
    problem: str = ""
    kind: str = "failed"
    seconds: float = field(default=0.0, compare=False)


Answers = dict[str, Answer]  # by site


class Exchange(Protocol):
    """How messages reach the sites. A site's MedflareError becomes an Answer with a problem.

    Any other error of a site is a bug: FLARE makes it an Answer as well, the plain loop raises it.
    """

    def present(self, round: int) -> list[str]:
        """Names of the sites that can be reached in this round."""

    def __call__(self, step: Step, outgoing: Messages) -> Mapping[str, Answer]:
        """Ask every site in `outgoing`; a site without an entry in the result is missing."""


@dataclass
class Transport:
    """Asks sites over an exchange, and replaces invalid replies by their problem.

    It counts bytes and seconds.
    """

    exchange: Exchange
    outcome: Outcome

    def ask(self, step: Step, outgoing: Messages) -> Answers:
        """site -> reply for every site in `outgoing`, sorted.

        Without a reply its kind is "missing".
        """
        answers = self.exchange(step, outgoing) if outgoing else {}
        missing = Answer(None, f"no answer to {step_name(step.phase, step.round)}", "missing")
        valid = {}
        for site in sorted(outgoing):
            answer = _checked(answers.get(site, missing), site, step.phase)
            cost = self.outcome.costs.setdefault(site, SiteCost())
            cost.down_bytes += outgoing[site].nbytes
            if answer.message is not None:
                cost.up_bytes += answer.message.nbytes
            cost.seconds += answer.seconds
            valid[site] = answer
        return valid


def with_step_number(message: Message, index: int, rounds: int) -> Message:
    """The message with the number of its step and the number of rounds.

    A site recognizes a repeated step by its number.
    """
    request = Message(message.states, dict(message.meta))
    request[STEP] = index
    request[RUN_ROUNDS] = rounds
    return request


def _checked(answer: Answer, site: str, phase: str) -> Answer:
    """The answer, or its problem.

    `update_validation.updates` checks what the phases of a method declare.
    """
    if answer.message is None:
        return replace(answer, problem=reason_line(answer.problem))
    problem = message_problem(answer.message, site)
    if problem is None and phase in BUILTIN_REPLY_META:
        allowed = {PERSONAL_MODEL.name} if phase == FINALIZE else set()
        problem = "unexpected tensors"
        if answer.message.states.keys() <= allowed:
            problem = declaration_problem(answer.message, *BUILTIN_REPLY_META[phase])
    if problem is None:
        return answer
    return Answer(None, reason_line(problem), "rejected", answer.seconds)
