"""What a site half remembers, kept so that a step can be done again as if it had never been done.

A step is repeated when too few answers were usable, and when a killed server goes on from its last checkpoint: sites that had
answered that step already must not answer it from a state that has it behind them.
"""

from medflare.core.message import Message
from medflare.core.store import Store

_PREFIX = "half-"


class HalfMemory:
    """States of a half, each under the number of the step that it precedes: the newest one and the one before it."""

    def __init__(self, store: Store):
        self.store = store

    def save(self, step: int, state: Message) -> None:
        """Keep `state` as what `step` starts from, and the newest state of an earlier step; nothing else is needed any more."""
        self.store.save(f"{_PREFIX}{step}", state)
        earlier = [kept for kept in self._steps() if kept < step]
        for kept in self._steps():
            if kept != step and kept not in earlier[-1:]:
                self.store.delete(f"{_PREFIX}{kept}")

    def before(self, step: int) -> tuple[int, Message] | None:
        """(step that it precedes, state): the newest state that `step` may start from; None where there is none.

        Raises:
            StateError: it is damaged.
        """
        usable = [kept for kept in self._steps() if kept <= step]
        state = self.store.load(f"{_PREFIX}{usable[-1]}") if usable else None
        return None if state is None else (usable[-1], state)

    def clear(self) -> None:
        for kept in self._steps():
            self.store.delete(f"{_PREFIX}{kept}")

    def _steps(self) -> list[int]:
        return sorted(int(name.removeprefix(_PREFIX)) for name in self.store.names() if name.startswith(_PREFIX))
