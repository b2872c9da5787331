"""The server algorithm after every step, on disk.

A killed server continues after the last finished step.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from medflare.core.errors import StateError
from medflare.core.message import Message
from medflare.core.store import StateStore
from medflare.federation.outcome import SiteCost
from medflare.federation.schedule import Federation

CHECKPOINT: Final = "checkpoint"
_RUN: Final = "run"  # metadata item of what belongs to the run and not to the algorithm
_DRIFT: Final = "drift of updates/"  # beginning of the names of states that belong to the run


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of one run in a folder.

    Attributes:
        plan: method, task, settings, ... of the run; only the same run can resume from the
            checkpoint.
    """

    folder: Path
    plan: Mapping[str, Any]

    def save(self, finished: int, federation: Federation) -> None:
        """Store the server algorithm and the state of the run after so many steps."""
        outcome = federation.outcome
        members = dict(federation.returning)
        for site, meta in outcome.enrolled.items():
            members[site] = meta["n"]
        run = {
            "finished": finished,
            "enrolled": dict(sorted(members.items())),  # also those that have not returned yet
            "history": outcome.history,
            "events": federation.events.to_list(),
            "costs": {site: asdict(cost) for site, cost in outcome.costs.items()},
            "drift": federation.drift.memory.meta,
            "plan": dict(self.plan),
        }
        algorithm = federation.server.state()
        states = dict(algorithm.states)
        for entry, state in federation.drift.memory.states.items():
            states[f"{_DRIFT}{entry}"] = state
        message = Message(states, {**algorithm.meta, _RUN: run})
        StateStore(self.folder).save(CHECKPOINT, message)

    def restore(self, federation: Federation) -> int:
        """Restore a federation from the checkpoint; returns the number of finished steps.

        Raises:
            StateError: there is none, or it belongs to another run.
        """
        message = _stored(self.folder)
        run = message.meta.pop(_RUN)
        for name, value in json.loads(json.dumps(dict(self.plan))).items():
            stored = run["plan"].get(name)
            if stored != value:
                raise StateError(
                    f"the checkpoint in {self.folder} has {name} = {stored!r}, this run {value!r}; "
                    "use the same"
                )
        names = [name for name in message.states if name.startswith(_DRIFT)]
        sampled = {name.removeprefix(_DRIFT): message.states.pop(name) for name in names}
        # A checkpoint of an older release has no "drift".
        federation.drift.memory = Message(sampled, run.get("drift", {}))
        federation.server.restore(message)
        federation.returning = run["enrolled"]
        outcome = federation.outcome
        outcome.history.extend(run["history"])
        outcome.costs = {site: SiteCost(**cost) for site, cost in run["costs"].items()}
        federation.events.replace([*run["events"], *federation.events.to_list()])
        federation.events.add("resumed", f"continued after {run['finished']} finished steps")
        return int(run["finished"])


def take_up(interrupted: Path, folder: Path) -> None:
    """Copy the checkpoint in the folder of an interrupted run to that of the run that resumes it.

    Raises:
        StateError: there is none, or it is damaged.
    """
    StateStore(folder).save(CHECKPOINT, _stored(interrupted))


def stored_plan(folder: Path) -> dict[str, Any]:
    """The `Checkpoint.plan` of the checkpoint in a folder.

    Raises:
        StateError: there is none, or it is damaged.
    """
    return dict(_stored(folder).meta[_RUN]["plan"])


def _stored(folder: Path) -> Message:
    message = StateStore(folder).load(CHECKPOINT)
    if message is None:
        raise StateError(
            f"no checkpoint in {folder}: the run did not finish its first step, or is complete; "
            "start it again"
        )
    return message
