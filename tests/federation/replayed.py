"""Federations whose sites have answered before: what they sent is replayed, so that a whole run takes milliseconds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from federation.strategies import copied
from helpers.small_tasks import small_task
from medflare.core.message import Message
from medflare.federation.exchange import Reply
from medflare.federation.participant import Participant
from medflare.federation.run import Run
from medflare.federation.settings import run_settings
from medflare.methods.base import Step
from medflare.methods.catalogue import get_method
from medflare.methods.method import Method
from medflare.tasks.config import TaskConfig
from methods import squares

SITES: Final = ("A", "B", "C")
OUTSIDE: Final = ("O",)
LIAR: Final = "B"
ROUNDS: Final = 1
Place = tuple[str, int, int]  # phase, round, part of a step

# Federations that between them have every phase, entry and item: (method, its server algorithm, hyper-parameters).
FEDERATIONS: Final[dict[str, tuple[str, str | None, dict[str, Any]]]] = {
    "fedavg": ("fedavg", None, {}),
    "fedsm": ("fedsm", None, {"selector": "compact_selector", "selector_updates": 1}),
    "fedsm pfedme": ("fedsm", None, {"selector": "compact_selector", "selector_updates": 1, "personalization": "pfedme"}),
    "fedsm ridge": ("fedsm", None, {"personalization": "perfedavg"}),
    "fedsm_extra": ("fedsm_extra", None, {"selector": "compact_selector", "selector_rounds": 1}),
    "prr": ("prr", None, {}),
    "grace": ("grace", None, {"probe": True}),
    "iop_fl": ("iop_fl", None, {}),
    "feddag": ("feddag", None, {"generator_width": 4, "pictures": 0, "distribution": "type2"}),
    "robust+sha": ("robust", "sha", {"rule": "median"}),
    "scaffold": ("scaffold", None, {}),
    "fedrep": ("fedrep", None, {}),
}


@dataclass
class Recorded:
    """One honest federation: what was sent to every site and what it answered, by place."""

    method: Method
    task: TaskConfig
    hyper: Mapping[str, Any]
    sent: dict[Place, dict[str, Message]] = field(default_factory=dict)
    replies: dict[Place, dict[str, Message]] = field(default_factory=dict)
    participants: dict[str, Participant] = field(default_factory=dict)

    def run(self, folder: Path | None = None) -> Run:
        """The same federation, to be executed with an exchange."""
        settings = run_settings({"rounds": ROUNDS, "seed": squares.SEED, "outside": list(OUTSIDE)})
        return Run(self.method, self.task, self.hyper, settings, SITES, folder=folder)

    def answers(self, lies: Mapping[Place, Callable[[], Reply]]) -> "Replay":
        """An exchange that replays it.

        Args:
            lies: place -> what the liar answers there; elsewhere it is honest.
        """
        return Replay(self, lies)


class Recorder:
    """Asks real participants, and keeps what passes."""

    def __init__(self, recorded: Recorded):
        self.recorded = recorded

    def present(self, round: int) -> list[str]:
        return [*SITES, *OUTSIDE]

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, Reply]:
        place = step.phase, step.round, step.part
        self.recorded.sent[place] = {site: copied(message) for site, message in outgoing.items()}
        members = self.recorded.participants
        answers = {site: members[site].answer(step.phase, step.round, copied(message)) for site, message in outgoing.items()}
        self.recorded.replies[place] = {site: copied(message) for site, message in answers.items()}
        return {site: Reply(message) for site, message in answers.items()}


class Replay:
    """Answers as the sites of a recorded federation did; the liar as it likes."""

    def __init__(self, recorded: Recorded, lies: Mapping[Place, Callable[[], Reply]]):
        self.recorded, self.lies = recorded, lies
        self.sent: dict[Place, dict[str, Message]] = {}

    def present(self, round: int) -> list[str]:
        return [*SITES, *OUTSIDE]

    def __call__(self, step: Step, outgoing: Mapping[str, Message]) -> dict[str, Reply]:
        place = step.phase, step.round, step.part
        self.sent[place] = {site: copied(message) for site, message in outgoing.items()}
        known = self.recorded.replies[place]
        replies = {site: Reply(copied(known[site])) for site in outgoing}
        if place in self.lies and LIAR in outgoing:
            replies[LIAR] = self.lies[place]()
        return replies


@cache
def recorded(name: str) -> Recorded:
    """An honest federation of three sites and one outside, recorded once in a process.

    Args:
        name: of `FEDERATIONS`.
    """
    method_name, server, hyper = FEDERATIONS[name]
    method = get_method(method_name, server=server)
    task = small_task(batch_size=6)
    found = Recorded(method, task, hyper)
    found.participants |= {site: _participant(site, found) for site in (*SITES, *OUTSIDE)}
    results = found.run().execute(Recorder(found))
    assert results["status"] == "COMPLETED", results["reason"]
    return found


def _participant(name: str, found: Recorded) -> Participant:
    def opened(role: str) -> Any:
        return squares.site(name, found.task)

    return Participant(name, opened, found.method, found.hyper)
