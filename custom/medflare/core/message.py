"""The message between a site algorithm and a server algorithm."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from medflare.core.specs import MetaSpec, Spec, TensorSpec
from medflare.core.states import StateDict, copy_state, state_bytes

T = TypeVar("T")


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

    @overload
    def __getitem__(self, spec: TensorSpec) -> StateDict: ...
    @overload
    def __getitem__(self, spec: MetaSpec[T]) -> T: ...
    def __getitem__(self, spec: Spec) -> Any:
        return self._part(spec)[spec.name]

    @overload
    def __setitem__(self, spec: TensorSpec, value: StateDict) -> None: ...
    @overload
    def __setitem__(self, spec: MetaSpec[T], value: T) -> None: ...
    def __setitem__(self, spec: Spec, value: Any) -> None:
        self._part(spec)[spec.name] = value

    def __contains__(self, spec: Spec) -> bool:
        return spec.name in self._part(spec)

    @overload
    def get(self, spec: TensorSpec) -> StateDict | None: ...
    @overload
    def get(self, spec: MetaSpec[T]) -> T | None: ...
    def get(self, spec: Spec) -> Any:
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
        return sum(state_bytes(state) for state in self.states.values())

    def copied(self) -> "Message":
        """A copy with tensors on the CPU that shares no memory with this message."""
        return Message(
            {entry: copy_state(state) for entry, state in self.states.items()},
            copy.deepcopy(self.meta),
        )
