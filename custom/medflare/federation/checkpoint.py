"""The server half after every step, on disk, so that a killed server goes on after the last finished one."""

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
from medflare.federation.screening.past import Past

CHECKPOINT: Final = "checkpoint"
_RUN = "run"  # the fact that holds what belongs to the run and not to the half
_TAKEN_UP = "taken_up"  # in it: the run whose checkpoint this still is; gone with the first step of its own


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of one run in a folder.

    Attributes:
        plan: what the run is, as far as it decides what its steps mean: a checkpoint is taken up by the same run only.
    """

    folder: Path
    plan: Mapping[str, Any]

    def save(self, finished: int, federation: Federation) -> None:
        """Keep the server half and what belongs to the run, after so many steps."""
        half, outcome = federation.server.state(), federation.outcome
        run = {
            "finished": finished,
            "enrolled": {site: outcome.enrolled[site]["n"] for site in sorted(outcome.enrolled)},
            "past": federation.past.to_dict(),
            "events": federation.events.to_list(),
            "history": outcome.history,
            "bytes": [outcome.down_bytes, outcome.up_bytes],
            "costs": {site: asdict(cost) for site, cost in outcome.costs.items()},
            "plan": dict(self.plan),
        }
        StateStore(self.folder).save(CHECKPOINT, Message(half.states, {**half.facts, _RUN: run}))

    def restore(self, federation: Federation) -> int:
        """Bring a federation to where the checkpoint was made; returns the number of finished steps.

        Raises:
            StateError: there is none, or it belongs to another run.
        """
        message = _stored(self.folder, "the run did not finish its first step; start it afresh")
        run = message.facts.pop(_RUN)
        for name, value in json.loads(json.dumps(dict(self.plan))).items():
            if run["plan"].get(name) != value:
                raise StateError(
                    f"the checkpoint in {self.folder} has {name} = {run['plan'].get(name)!r}, this run {value!r}; "
                    "resume with what it began with"
                )
        federation.server.restore(message)
        federation.returning = run["enrolled"]
        federation.past = Past(**run["past"])
        federation.outcome.history = run["history"]
        federation.outcome.down_bytes, federation.outcome.up_bytes = run["bytes"]
        federation.outcome.costs = {site: Cost(**cost) for site, cost in run.get("costs", {}).items()}  # 0.2.0 kept none
        federation.events.replace([*run["events"], *federation.events.to_list()])
        federation.events.add("resumed", f"went on after {run['finished']} finished steps")
        return int(run["finished"])


def take_up(interrupted: Path, own: Path) -> None:
    """Copy the checkpoint of an interrupted run to where a new run looks for its own.

    Args:
        interrupted: folder of its checkpoint, which bears the run's name.
        own: that of the new run.

    Raises:
        StateError: there is none, or it is damaged, or that run had taken up another one and its sites may not know of it yet.
    """
    message = _stored(interrupted, "that run did not finish its first step, or it came to its end; start afresh")
    run = message.facts[_RUN]
    if earlier := run.get(_TAKEN_UP):
        raise StateError(f"{interrupted.name} took up {earlier} and was interrupted before a step of its own; resume {earlier}")
    message.facts[_RUN] = {**run, _TAKEN_UP: interrupted.name}
    StateStore(own).save(CHECKPOINT, message)


def stored_plan(folder: Path) -> dict[str, Any]:
    """What the run was whose checkpoint lies in `folder`, see `Checkpoint.plan`.

    Raises:
        StateError: there is none, or it is damaged.
    """
    plan = dict(_stored(folder, "the run did not finish its first step; start it afresh").facts[_RUN]["plan"])
    if "halves" not in plan:
        raise StateError(f"the checkpoint in {folder} was written by medflare 0.1; finish the run with that version, or start it afresh")
    return plan


def _stored(folder: Path, otherwise: str) -> Message:
    message = StateStore(folder).load(CHECKPOINT)
    if message is None:
        raise StateError(f"no checkpoint in {folder}: {otherwise}")
    return message
