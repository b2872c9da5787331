"""The server half after every step, on disk, so that a killed server goes on after the last finished one."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from medflare.core.errors import StateError
from medflare.core.message import Message
from medflare.core.store import StateStore

CHECKPOINT: Final = "checkpoint"
_RUN = "run"  # the fact that holds what belongs to the run and not to the half


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint of one run in a folder.

    Attributes:
        plan: what the run is, as far as it decides what its steps mean: a checkpoint is taken up by the same run only.
    """

    folder: Path
    plan: Mapping[str, Any]

    def save(self, half: Message, run: Mapping[str, Any]) -> None:
        """Keep the server half's state and what belongs to the run ("finished" steps, events, ...)."""
        facts = {**half.facts, _RUN: {**run, "plan": dict(self.plan)}}
        StateStore(self.folder).save(CHECKPOINT, Message(half.states, facts))

    def load(self) -> tuple[Message, dict[str, Any]]:
        """(the server half's state, what belongs to the run).

        Raises:
            StateError: there is none, or it belongs to another run.
        """
        message = _stored(self.folder, "the run did not finish its first step; start it afresh")
        stored = message.facts.pop(_RUN)
        for name, value in json.loads(json.dumps(dict(self.plan))).items():
            if stored["plan"].get(name) != value:
                raise StateError(
                    f"the checkpoint in {self.folder} has {name} = {stored['plan'].get(name)!r}, this run {value!r}; "
                    "resume with what it began with"
                )
        return message, stored


def take_up(interrupted: Path, own: Path) -> None:
    """Copy the checkpoint of an interrupted run to where a new run looks for its own.

    Raises:
        StateError: there is none, or it is damaged.
    """
    reason = "that run did not finish its first step, or it came to its end; start afresh"
    StateStore(own).save(CHECKPOINT, _stored(interrupted, reason))


def stored_plan(folder: Path) -> dict[str, Any]:
    """What the run was whose checkpoint lies in `folder`, see `Checkpoint.plan`.

    Raises:
        StateError: there is none, or it is damaged.
    """
    return dict(_stored(folder, "the run did not finish its first step; start it afresh").facts[_RUN]["plan"])


def _stored(folder: Path, otherwise: str) -> Message:
    message = StateStore(folder).load(CHECKPOINT)
    if message is None:
        raise StateError(f"no checkpoint in {folder}: {otherwise}")
    return message
