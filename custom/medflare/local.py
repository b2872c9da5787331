"""The plain loop: a whole federation in one process, for tests, sweeps and studies. Same halves, same schedule as under FLARE."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from medflare.core.errors import Aborted, ConfigError, FederationFailed, MedflareError
from medflare.core.events import EventLog
from medflare.core.message import Message
from medflare.core.states import copy_state
from medflare.evaluation.results import RunRecord, build_results, write_results
from medflare.methods.base import ServerContext, Step
from medflare.methods.federation import ENROL, Federation, Reply, Rules, StepReport
from medflare.methods.participant import Participant, identity_of
from medflare.methods.registry import Method, get_method
from medflare.tasks.config import TaskConfig, load_task
from medflare.tasks.site import Site, open_site


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
        return [site for site in self.sites if site not in self.absent.get(round, ())]

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, Reply]:
        replies = {}
        for site in sorted(outgoing):
            try:
                if site not in self.participants:
                    self.participants[site] = self.opened(site)
                sent = Message({entry: copy_state(state) for entry, state in outgoing[site].states.items()}, outgoing[site].facts)
                replies[site] = Reply(self.participants[site].answer(step.phase, step.round, sent))
            except Aborted:
                raise
            except MedflareError as error:
                replies[site] = Reply(problem=str(error))
        return replies
