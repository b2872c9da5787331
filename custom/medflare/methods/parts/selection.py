"""Choosing the round whose model is delivered: by the sites' validation metric, the last round's model included."""

from collections.abc import Mapping
from typing import Any

from medflare.core.message import Message
from medflare.core.states import StateDict, copy_state


class Best:
    """The best state seen so far by a validation metric (higher is better); the earliest of equals wins.

    Until a metric was ever defined, the latest state stands in, so a federation without validation images still delivers.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self.round: int | None = None
        self.state: StateDict | None = None

    def offer(self, value: float | None, round: int, state: StateDict) -> None:
        """`state` is the model that entered round `round`; the untrained model of round 0 is no candidate."""
        if round == 0:
            return
        better = value is not None and (self.value is None or value > self.value)
        if better or (value is None and self.value is None):
            self.value, self.round, self.state = value, round, copy_state(state)

    def pack(self, name: str, message: Message) -> None:
        """Add this to a message that stores a half."""
        message.facts[f"{name}/best"] = {"value": self.value, "round": self.round}
        if self.state is not None:
            message.states[f"{name}/best"] = self.state

    def unpack(self, name: str, message: Message) -> None:
        stored = message.facts.get(f"{name}/best", {})
        self.value, self.round = stored.get("value"), stored.get("round")
        self.state = message.states.get(f"{name}/best")


def mean_validation(replies: Mapping[str, Message], role: str) -> float | None:
    """Mean over sites of the validation metric of the incoming model of `role`, weighted by training samples.

    Sites where it is undefined are left out; None where it is undefined everywhere.
    """
    pairs = [(_value(reply.facts, role), float(reply.facts.get("n_samples", 1))) for _, reply in sorted(replies.items())]
    known = [(value, weight) for value, weight in pairs if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total > 0 else None


def _value(facts: Mapping[str, Any], role: str) -> float | None:
    return (facts.get("validation") or {}).get(role)
