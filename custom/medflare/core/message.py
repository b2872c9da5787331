"""What travels between a site algorithm and a server algorithm."""

from dataclasses import dataclass, field
from typing import Any

from medflare.core.states import StateDict, state_bytes


@dataclass
class Message:
    """Named states and meta.

    Attributes:
        states: entry name -> state dict; everything that holds tensors, so that privacy filters and manifests see it.
        meta: JSON-serialisable numbers and names (sample counts, losses, metrics); never anything model-like.
    """

    states: dict[str, StateDict] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: what an exchange of this message costs beside small change."""
        return sum(state_bytes(state) for state in self.states.values())
