"""The message between a site algorithm and a server algorithm."""

import copy
from dataclasses import dataclass, field
from typing import Any

from medflare.core.states import StateDict, copy_state, state_bytes


@dataclass
class Message:
    """Named states and metadata.

    Attributes:
        states: entry -> state dict; all tensors, so that privacy filters and manifests see them.
        meta: JSON values (sample counts, losses, metrics); never anything model-like.
    """

    states: dict[str, StateDict] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(state_bytes(state) for state in self.states.values())

    def copied(self) -> "Message":
        """A copy with tensors on the CPU that shares no memory with this message."""
        return Message({entry: copy_state(state) for entry, state in self.states.items()}, copy.deepcopy(self.meta))
