"""The message between a site algorithm and a server algorithm."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from medflare.core.specs import EntrySpec, Spec, TensorSpec
from medflare.core.states import StateDict, aligned, copy_state, state_bytes

T = TypeVar("T")
Messages = Mapping[str, "Message"]  # by site, or final models by role
FinalModels = dict[str, "Message"]  # by role; at the server by path below its folder `models`


@dataclass
class Message:
    """Named states and metadata. `message[SPEC]` reads and writes the entry that SPEC declares.

    Attributes:
        states: entry -> state dict; all tensors, so that privacy filters and manifests see them.
        meta: JSON values (sample counts, losses, metrics); never anything model-like.
    """

    states: dict[str, StateDict] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Mapping[Any, Any]) -> "Message":
        """A message with these entries, spec -> state or metadata item."""
        message = cls()
        for spec, value in entries.items():
            message[spec] = value
        return message

    def _part(self, spec: Spec) -> dict[str, Any]:
        return self.states if isinstance(spec, TensorSpec) else self.meta

    def __getitem__(self, spec: EntrySpec[T]) -> T:
        return self._part(spec)[spec.name]

    def __setitem__(self, spec: EntrySpec[T], value: T) -> None:
        self._part(spec)[spec.name] = value

    def __contains__(self, spec: Spec) -> bool:
        return spec.name in self._part(spec)

    def get(self, spec: EntrySpec[T]) -> T | None:
        """The entry, or None if the message lacks it."""
        return self._part(spec).get(spec.name)

    def family(self, spec: TensorSpec) -> dict[str, StateDict]:
        """Member -> state of a family, sorted by member; empty without any.

        Examples:
            >>> PERSONAL = TensorSpec("personal")
            >>> Message({"personal/B": {}, "model": {}, "personal/A": {}}).family(PERSONAL)
            {'A': {}, 'B': {}}
        """
        prefix = f"{spec.name}/"
        members = {}
        for entry in sorted(self.states):
            if entry.startswith(prefix):
                members[entry.removeprefix(prefix)] = self.states[entry]
        return members

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(map(state_bytes, self.states.values()))

    def aligned(self) -> "Message":
        """The message with every state `aligned`."""
        states = {entry: aligned(state) for entry, state in self.states.items()}
        return Message(states, self.meta)

    def copied(self) -> "Message":
        """A copy, with tensors on the CPU, that shares no memory with this message."""
        return Message(
            {entry: copy_state(state) for entry, state in self.states.items()},
            copy.deepcopy(self.meta),
        )
