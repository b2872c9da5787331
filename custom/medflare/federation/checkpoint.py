"""The server half after every step, on disk, so that a killed server goes on after the last finished one.

What only ever grows (the history of the steps, events, hashes of updates) lies in a journal beside the checkpoint, to which a step adds
its own line: a long run writes no more in its last round than in its first.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

from medflare.core.errors import StateError
from medflare.core.message import Message
from medflare.core.store import StateStore, make_folder, own_opener, write_atomically
from medflare.federation.outcome import Cost
from medflare.federation.schedule import Federation
from medflare.federation.screening.updates import Past

CHECKPOINT: Final = "checkpoint"
_UNSAID: Final = {"wire": "fp32"}  # settings that 0.2.0 did not have, as it ran
T = TypeVar("T")
_RUN = "run"  # the fact that holds what belongs to the run and not to the half
_TAKEN_UP = "taken_up"  # in it: the run whose checkpoint this still is; gone with the first step of its own


class Journal:
    """Lines of JSON that are only added to, up to a mark: what a crash wrote beyond it does not count, and is overwritten.

    Args:
        folder: where it lies.
    """

    def __init__(self, folder: Path):
        self._path = folder / f"{CHECKPOINT}.jsonl"
        self._size = 0
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def mark(self) -> dict[str, Any]:
        """How far it is written: {"size" in bytes, "digest"}."""
        return {"size": self._size, "digest": self._digest.hexdigest()}

    def add(self, content: Mapping[str, Any]) -> None:
        """Write a line, on disk when this returns."""
        line = json.dumps(content).encode() + b"\n"
        make_folder(self._path.parent)
        with open(self._path, "r+b", opener=lambda path, flags: own_opener(path, flags | os.O_CREAT)) as file:
            file.seek(self._size)
            file.truncate()
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._size += len(line)
        self._digest.update(line)

    def read(self, mark: Mapping[str, Any]) -> list[dict[str, Any]]:
        """All lines up to a mark, after which the next one will be written.

        Raises:
            StateError: they are not what was written.
        """
        content = self._path.read_bytes()[: mark["size"]] if self._path.exists() else b""
        self._size, self._digest = len(content), hashlib.blake2b(content, digest_size=16)
        if self.mark != mark:
            raise StateError(f"{self._path}: content does not match its checksum; restore it from a backup or start the run afresh")
        return [json.loads(line) for line in content.splitlines()]

    def copy(self, folder: Path) -> None:
        """Write what was read into another folder."""
        write_atomically(folder / self._path.name, self._path.read_bytes()[: self._size])


@dataclass
class Checkpoint:
    """The checkpoint of one run in a folder.

    Attributes:
        plan: what the run is, as far as it decides what its steps mean: a checkpoint is taken up by the same run only.
    """

    folder: Path
    plan: Mapping[str, Any]
    _journal: Journal = field(init=False)
    _told: dict[str, int] = field(init=False, default_factory=dict)  # list -> how much of it the journal has

    def __post_init__(self) -> None:
        self._journal = Journal(self.folder)

    def save(self, finished: int, federation: Federation) -> None:
        """Keep the server half and what belongs to the run, after so many steps."""
        half, outcome, past = federation.server.state(), federation.outcome, federation.past
        seen = {key: dict(self._new(f"seen/{key}", found.items())) for key, found in past.seen.items()}
        events, history = self._new("events", federation.events), self._new("history", outcome.history)
        self._journal.add({"history": history, "events": events, "seen": seen})
        members = {**federation.returning, **{site: facts["n"] for site, facts in outcome.enrolled.items()}}
        run = {
            "finished": finished,
            "enrolled": dict(sorted(members.items())),  # also those that have not come back yet
            "past": {"steps": past.steps},
            "journal": self._journal.mark,
            "bytes": [outcome.down_bytes, outcome.up_bytes],
            "costs": {site: asdict(cost) for site, cost in outcome.costs.items()},
            "plan": dict(self.plan),
        }
        StateStore(self.folder).save(CHECKPOINT, Message(half.states, {**half.facts, _RUN: run}))

    def _new(self, name: str, items: Iterable[T]) -> list[T]:
        """What a list holds beyond what the journal has of it."""
        new = list(islice(items, self._told.get(name, 0), None))
        self._told[name] = self._told.get(name, 0) + len(new)
        return new

    def restore(self, federation: Federation) -> int:
        """Bring a federation to where the checkpoint was made; returns the number of finished steps.

        Raises:
            StateError: there is none, or it belongs to another run.
        """
        message = _stored(self.folder, "the run did not finish its first step; start it afresh")
        run = message.facts.pop(_RUN)
        begun_with = {**_UNSAID, **run["plan"]}
        for name, value in json.loads(json.dumps(dict(self.plan))).items():
            if begun_with.get(name) != value:
                raise StateError(
                    f"the checkpoint in {self.folder} has {name} = {begun_with.get(name)!r}, this run {value!r}; "
                    "resume with what it began with"
                )
        lines = self._journal.read(run["journal"]) if "journal" in run else [_of_0_2(run)]
        federation.server.restore(message)
        federation.returning = run["enrolled"]
        federation.past = Past(run["past"].get("steps", {}))  # 0.2.0 kept other lengths
        for line in lines:
            federation.outcome.history.extend(line["history"])
            for key, found in line["seen"].items():
                federation.past.seen.setdefault(key, {}).update(found)
        events = [event for line in lines for event in line["events"]]
        federation.outcome.down_bytes, federation.outcome.up_bytes = run["bytes"]
        federation.outcome.costs = {site: Cost(**cost) for site, cost in run.get("costs", {}).items()}  # 0.2.0 kept none
        if "journal" in run:
            seen = {f"seen/{key}": len(found) for key, found in federation.past.seen.items()}
            self._told = {"events": len(events), "history": len(federation.outcome.history), **seen}
        federation.events.replace([*events, *federation.events.to_list()])
        federation.events.add("resumed", f"went on after {run['finished']} finished steps")
        return int(run["finished"])


def _of_0_2(run: dict[str, Any]) -> dict[str, Any]:
    """What 0.2.0 wrote anew with every step, as a line of a journal."""
    return {"history": run["history"], "events": run["events"], "seen": run["past"].pop("seen", {})}


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
    if "journal" in run:
        journal = Journal(interrupted)
        journal.read(run["journal"])
        journal.copy(own)
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
