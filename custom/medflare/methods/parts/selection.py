"""Choosing the round whose model is delivered: by the sites' validation metric, the last round's model included."""

from collections.abc import Mapping
from typing import Any

from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state


class Best:
    """The best state seen so far by a validation metric (higher is better), kept in a half's memory; the earliest of equals wins.

    Until a metric was ever defined, the latest state stands in, so a federation without validation images still delivers.

    Args:
        memory: of the half that chooses.
        name: tells several choices of a half apart.
    """

    def __init__(self, memory: Message, name: str):
        self._memory = memory
        self._name = f"{name}/best"

    @property
    def state(self) -> StateDict | None:
        """The best state, None before the first offer."""
        return self._memory.states.get(self._name)

    @property
    def round(self) -> int | None:
        """The number of rounds of training behind the state."""
        return self._found.get("round")

    @property
    def value(self) -> float | None:
        """Its metric."""
        return self._found.get("value")

    @property
    def _found(self) -> dict[str, Any]:
        return self._memory.facts.get(self._name, {})

    def offer(self, value: float | None, round: int, state: StateDict) -> None:
        """Take a candidate, where it is better than what is kept.

        Args:
            value: its validation metric; None where it is undefined.
            round: the round that it entered; the untrained model of round 0 is no candidate.
            state: the candidate, copied where it is kept.
        """
        if round == 0:
            return
        better = value is not None and (self.value is None or value > self.value)
        if better or (value is None and self.value is None):
            self._memory.facts[self._name] = {"value": value, "round": round}
            self._memory.states[self._name] = copy_state(state)


def mean_validation(replies: Mapping[str, Message], role: str) -> float | None:
    """Mean over sites of the validation metric of the incoming model of `role`, weighted by training samples.

    Sites where it is undefined are left out; None where it is undefined everywhere.

    Args:
        replies: site -> reply with the facts "validation" and "n_samples".
        role: for example "global".
    """
    pairs = [(_value(reply.facts, role), float(reply.facts.get("n_samples", 1))) for _, reply in sorted(replies.items())]
    known = [(value, weight) for value, weight in pairs if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total > 0 else None


def _value(facts: Mapping[str, Any], role: str) -> float | None:
    return (facts.get("validation") or {}).get(role)
