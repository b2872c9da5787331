"""How the schedule reaches the sites: the exchange that an engine supplies, and the transport that counts what travels over it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from torch import Tensor

from medflare.core.backing import backed, empty
from medflare.core.message import Message
from medflare.federation.outcome import Cost, Outcome
from medflare.federation.settings import ENROL, FINALIZE
from medflare.federation.update_validation.messages import DELIVERS, ENROLS, not_states, one_line, stateful, unfit, unreadable
from medflare.methods.base import Step

START: Final = "start"  # entry of an invitation to enrol: what the task's network starts from, where that is no random draw
REPORTS_OF_ALL: Final = {ENROL: (ENROLS, ("n", "class_counts")), FINALIZE: (DELIVERS, ("metrics",))}  # phase -> (meta, required ones)


@dataclass
class Reply:
    """A site's answer: a message, or why there is none.

    Attributes:
        problem: empty when the message is there; else one line.
        kind: the event that a problem becomes: "failed" (the site reported an error), "rejected" (nobody can work with what it sent),
            "late" or "missing".
        seconds: that the site was at work on it.
    """

    message: Message | None = None
    problem: str = ""
    kind: str = "failed"
    seconds: float = field(default=0.0, compare=False)


def laid_aside(reply: Reply) -> Reply:
    """The reply with its large tensors where `core.backing` has them, so that those of other sites find room in memory.

    An exchange calls it on every reply as it comes. What the gate will not let pass is left as it is.
    """
    message = reply.message
    if message is None or not backed() or not_states(message.states):
        return reply
    states = {entry: {name: _laid_aside(tensor) for name, tensor in state.items()} for entry, state in message.states.items()}
    return replace(reply, message=Message(states, message.meta))


def _laid_aside(tensor: Tensor) -> Tensor:
    """The tensor in its new place; counters, one that lies there already, and one that is larger than its memory, as they are."""
    if not tensor.is_floating_point() or not tensor.is_contiguous() or tensor.is_shared():
        return tensor
    return empty(tensor.shape, tensor.dtype).copy_(tensor)


class Exchange(Protocol):
    """How messages reach the sites. For a site's MedflareError implementations never raise: they return a Reply that says so.

    Any other error of a site is a bug. Over FLARE it is a Reply, too, and costs that site's update; the plain loop raises it, so that
    whoever writes a method sees where it is. They call `laid_aside` on every reply as it comes.
    """

    def present(self, round: int) -> list[str]:
        """Names of the sites that can be asked in this round."""

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> Mapping[str, Reply]:
        """Ask every site in `outgoing`; a site without an entry in the answer is missing."""


class Transport:
    """Asks sites over an exchange: counts what travels, answers for those that are silent, lets nothing pass that nobody can work with."""

    def __init__(self, exchange: Exchange, outcome: Outcome):
        self.exchange, self.outcome = exchange, outcome

    def present(self, round: int) -> list[str]:
        """Names of the sites that can be asked."""
        return self.exchange.present(round)

    def ask(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, Reply]:
        """site -> reply, in sorted order, one for every site that was asked.

        Args:
            outgoing: site -> what it is sent.

        Returns:
            Site -> reply; a site without an answer has a reply of kind "missing".
        """
        answers = self.exchange(step, outgoing) if outgoing else {}
        silent = Reply(problem=f"no answer to '{step.phase}' of round {step.round}", kind="missing")
        replies = {site: _usable(answers.get(site, silent), site, step.phase) for site in sorted(outgoing)}
        for site, reply in replies.items():
            self._count(site, outgoing[site].nbytes, 0 if reply.message is None else reply.message.nbytes, reply.seconds)
        return replies

    def _count(self, site: str, down: int, up: int, seconds: float) -> None:
        cost = self.outcome.costs.setdefault(site, Cost())
        self.outcome.down_bytes += down
        self.outcome.up_bytes += up
        cost.down_bytes += down
        cost.up_bytes += up
        cost.seconds += seconds


def numbered(message: Message, index: int, rounds: int) -> Message:
    """The message with what a site must know of the run: a step's number, by which it knows one that it has done before, and its length."""
    return Message(message.states, {**message.meta, "step": index, "run_rounds": rounds})


def _usable(reply: Reply, site: str, phase: str) -> Reply:
    """The reply, or why nobody can work with it; what the phases of a method declare is looked at by `update_validation.updates`."""
    if reply.message is None:
        return replace(reply, problem=one_line(reply.problem))
    problem = unreadable(reply.message, site)
    if problem is None and phase in REPORTS_OF_ALL:
        problem = stateful(reply.message) or unfit(reply.message, *REPORTS_OF_ALL[phase])
    return reply if problem is None else Reply(problem=one_line(problem), kind="rejected", seconds=reply.seconds)
