"""The server algorithm after every step, on disk, so that a killed server goes on after the last finished one."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from medflare.core.errors import StateError
from medflare.core.message import Message
from medflare.core.store import StateStore
from medflare.federation.outcome import Cost
from medflare.federation.schedule import Federation

CHECKPOINT: Final = "checkpoint"
_ADDED: Final = {"transport_dtype": "fp32"}  # settings that 0.2.0 did not have, as it ran
_RUN: Final = "run"  # the item that holds what belongs to the run and not to the algorithm


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of one run in a folder.

    Attributes:
        plan: what the run is, as far as it decides what its steps mean: a checkpoint is taken up by the same run only.
    """

    folder: Path
    plan: Mapping[str, Any]

    def save(self, finished: int, federation: Federation) -> None:
        """Keep the server algorithm and what belongs to the run, after so many steps."""
        algorithm, outcome = federation.server.state(), federation.outcome
        members = {**federation.returning, **{site: meta["n"] for site, meta in outcome.enrolled.items()}}
        run = {
            "finished": finished,
            "enrolled": dict(sorted(members.items())),  # also those that have not come back yet
            "history": outcome.history,
            "events": federation.events.to_list(),
            "bytes": [outcome.down_bytes, outcome.up_bytes],
            "costs": {site: asdict(cost) for site, cost in outcome.costs.items()},
            "plan": dict(self.plan),
        }
        StateStore(self.folder).save(CHECKPOINT, Message(algorithm.states, {**algorithm.meta, _RUN: run}))

    def restore(self, federation: Federation) -> int:
        """Bring a federation to where the checkpoint was made; returns the number of finished steps.

        Raises:
            StateError: there is none, or it belongs to another run.
        """
        message = _stored(self.folder)
        run = message.meta.pop(_RUN)
        begun_with = {**_ADDED, **run["plan"]}
        for name, value in json.loads(json.dumps(dict(self.plan))).items():
            if begun_with.get(name) != value:
                raise StateError(
                    f"the checkpoint in {self.folder} has {name} = {begun_with.get(name)!r}, this run {value!r}; "
                    "resume with what it began with"
                )
        federation.server.restore(message)
        federation.returning = run["enrolled"]
        outcome = federation.outcome
        outcome.history.extend(run["history"])
        outcome.down_bytes, outcome.up_bytes = run["bytes"]
        outcome.costs = {site: Cost(**cost) for site, cost in run.get("costs", {}).items()}  # 0.2.0 kept none
        federation.events.replace([*run["events"], *federation.events.to_list()])
        federation.events.add("resumed", f"went on after {run['finished']} finished steps")
        return int(run["finished"])


def take_up(interrupted: Path, own: Path) -> None:
    """Copy the checkpoint in the folder of an interrupted run to where a new run looks for its own.

    Raises:
        StateError: there is none, or it is damaged.
    """
    StateStore(own).save(CHECKPOINT, _stored(interrupted))


def stored_plan(folder: Path) -> dict[str, Any]:
    """What the run was whose checkpoint lies in `folder`, see `Checkpoint.plan`.

    Raises:
        StateError: there is none, or it is damaged.
    """
    return dict(_stored(folder).meta[_RUN]["plan"])


def _stored(folder: Path) -> Message:
    message = StateStore(folder).load(CHECKPOINT)
    if message is None:
        raise StateError(f"no checkpoint in {folder}: the run did not finish its first step, or came to its end; start it afresh")
    return message
