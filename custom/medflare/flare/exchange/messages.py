"""What the schedule says to the sites and hears from them under FLARE: messages, packed into tasks and read from their answers."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from nvflare.apis.shareable import Shareable

from medflare.core.message import Message
from medflare.federation.exchange import Reply, laid_aside
from medflare.flare.exchange.tasks import A, Answer, Read
from medflare.flare.exchange.wire import readable, to_message, to_shareable
from medflare.methods.base import Step


class Tasks(Protocol):
    """What reaches the sites, see `TaskExchange`."""

    def present(self, outside: Iterable[str]) -> list[str]:
        """Names of the sites that can be asked."""

    def __call__(self, phase: str, round: int, outgoing: Mapping[str, Shareable], read: Read[A]) -> dict[str, Answer[A]]:
        """Ask every site that is sent something."""


class MessageExchange:
    """The exchange that the schedule uses under FLARE.

    Args:
        tasks: of the job.
        outside: names of sites that never train.
    """

    def __init__(self, tasks: Tasks, outside: Iterable[str]):
        self._tasks, self._outside = tasks, tuple(outside)

    def present(self, round: int) -> list[str]:
        """See `TaskExchange.present`."""
        return self._tasks.present(self._outside)

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, Reply]:
        packed = {site: to_shareable(message) for site, message in outgoing.items()}
        answers = self._tasks(step.phase, step.round, packed, lambda site, answer: reply_of(answer))
        return {site: replied(answer) for site, answer in answers.items()}


def reply_of(answer: Shareable) -> Reply:
    """A site's answer, laid aside, or why nobody can read it."""
    return laid_aside(Reply(*readable(answer, to_message)))


def replied(answer: Answer[Reply]) -> Reply:
    """What the schedule hears of a site's task: an answer that came after the site was given up does not count."""
    if answer.content is None or answer.problem:
        return Reply(problem=answer.problem, kind=answer.kind, seconds=answer.seconds)
    return replace(answer.content, seconds=answer.seconds)
