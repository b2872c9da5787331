"""The server algorithm after every step, on disk.

A killed server continues after the last finished step.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from medflare.core.errors import StateError
from medflare.core.message import Message
from medflare.core.specs import TensorSpec
from medflare.core.store import StateStore
from medflare.core.text import JsonDict
from medflare.evaluation.results import RESULTS_FILE
from medflare.federation.outcome import SiteCost
from medflare.federation.schedule import Federation

CHECKPOINT = "checkpoint"
_RUN = "run"  # metadata item of what belongs to the run and not to the algorithm
_DRIFT = TensorSpec("drift of updates")  # the family of states that belong to the run


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of one run in a folder.

    Attributes:
        folder: None: nothing is stored.
        plan: method, task, settings, ... of the run; only the same run can resume from the
            checkpoint.
        versions: of the code that the run uses, see `versions_of_run`.
    """

    folder: Path | None
    plan: JsonDict
    versions: dict[str, str] = field(default_factory=dict)

    def save(self, finished: int, federation: Federation) -> None:
        """Store the server algorithm and the state of the run after so many steps."""
        if self.folder is None:
            return
        outcome = federation.outcome
        members = {site: meta["n"] for site, meta in outcome.enrolled.items()}
        run = {
            "finished": finished,
            # Also those that have not returned yet.
            "enrolled": {**federation.returning, **members},
            "history": outcome.history,
            "events": federation.events.to_list(),
            "costs": {site: asdict(cost) for site, cost in outcome.costs.items()},
            "drift": federation.drift.memory.meta,
            "plan": self.plan,
            "versions": self.versions,
        }
        algorithm = federation.server.state()
        message = Message(dict(algorithm.states), {**algorithm.meta, _RUN: run})
        for entry, state in federation.drift.memory.states.items():
            message[_DRIFT.member(entry)] = state
        StateStore(self.folder).save(CHECKPOINT, message)

    def stored(self) -> Message:
        """The checkpoint of this run.

        Raises:
            StateError: there is none, or it belongs to another run.
        """
        if self.folder is None:
            raise StateError("a run without a folder cannot be resumed")
        message = _stored(self.folder)
        before = message.meta[_RUN]["plan"]
        for name, value in json.loads(json.dumps(self.plan)).items():
            if before.get(name) != value:
                raise StateError(
                    f"the checkpoint of {self.folder.resolve().name} has {name} = "
                    f"{before.get(name)!r}, this run {value!r}; use the same"
                )
        return message

    def restore(self, federation: Federation) -> int:
        """Restore a federation from the checkpoint; returns the number of finished steps.

        Raises:
            StateError: see `stored`.
        """
        message = self.stored()
        run = message.meta.pop(_RUN)
        sampled = message.family(_DRIFT)
        for entry in sampled:
            del message.states[_DRIFT.member(entry).name]
        federation.drift.memory = Message(sampled, run["drift"])
        federation.server.restore(message)
        federation.returning = run["enrolled"]
        outcome = federation.outcome
        outcome.history.extend(run["history"])
        outcome.costs = {site: SiteCost(**cost) for site, cost in run["costs"].items()}
        federation.events.restore(run["events"])
        federation.events.add("resumed", f"continued after {run['finished']} finished steps")
        before = run["versions"]
        changed = [name for name, here in self.versions.items() if before.get(name, here) != here]
        if changed:
            text = f"the steps before had other versions of {', '.join(changed)}: results mix both"
            federation.events.add("warning", text)
        return run["finished"]


def copy_checkpoint(interrupted: Path, folder: Path) -> None:
    """Copy the checkpoint in the folder of an interrupted run to that of the run that resumes it.

    Raises:
        StateError: there is none, or it is damaged.
    """
    StateStore(folder).save(CHECKPOINT, _stored(interrupted))


def checkpoint_of(folder: Path) -> Path:
    """The file with the state of a run in a folder after its last complete step."""
    return StateStore(folder).path(CHECKPOINT)


def has_run(folder: Path) -> bool:
    """Whether the results or the checkpoint of a run are in a folder."""
    return (folder / RESULTS_FILE).is_file() or checkpoint_of(folder).is_file()


def stored_plan(folder: Path) -> Any:
    """The `Checkpoint.plan` of the checkpoint in a folder.

    Raises:
        StateError: there is none, or it is damaged.
    """
    return _stored(folder).meta[_RUN]["plan"]


def _stored(folder: Path) -> Message:
    message = StateStore(folder).load(CHECKPOINT)
    if message is None:
        raise StateError(
            f"no checkpoint of {folder.resolve().name}: the run did not finish its first step, "
            "or is complete; start it again"
        )
    return message
