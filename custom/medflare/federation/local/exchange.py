"""How the plain loop reaches its sites where it does everything itself: one after the other, in this process."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from medflare.core.errors import Aborted, MedflareError
from medflare.core.message import Message
from medflare.core.states import copy_state
from medflare.federation.exchange import Reply, laid_aside
from medflare.federation.participant import Participant
from medflare.methods.base import Step


class LocalExchange:
    """Calls the sites' participants one after the other, in sorted order.

    Args:
        opened: makes a site's participant when it is first asked; its errors are that site's errors.
        absent: round -> sites that cannot be reached in it.
    """

    def __init__(self, sites: Sequence[str], opened: Callable[[str], Participant], absent: Mapping[int, Iterable[str]] | None = None):
        self.sites = sorted(sites)
        self.opened = opened
        self.absent = {round: set(names) for round, names in (absent or {}).items()}
        self.participants: dict[str, Participant] = {}

    def present(self, round: int) -> list[str]:
        """The sites that are not listed as absent in this round, sorted."""
        return [site for site in self.sites if site not in self.absent.get(round, ())]

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, Reply]:
        return {site: self.answer(site, step, own_copy(outgoing[site])) for site in sorted(outgoing)}

    def answer(self, site: str, step: Step, message: Message) -> Reply:
        """What one site answers, or why it does not.

        Raises:
            Aborted: the run was asked to stop.
        """
        started = time.monotonic()
        try:
            if site not in self.participants:
                self.participants[site] = self.opened(site)
            answer = self.participants[site].answer(step.phase, step.round, message)
        except Aborted:
            raise
        except MedflareError as error:
            return Reply(problem=str(error), seconds=time.monotonic() - started)
        return laid_aside(Reply(answer, seconds=time.monotonic() - started))

    def close(self) -> None:
        """Nothing is left behind."""


def own_copy(message: Message) -> Message:
    """What a site receives: no tensor of it is the sender's."""
    return Message({entry: copy_state(state) for entry, state in message.states.items()}, message.meta)
