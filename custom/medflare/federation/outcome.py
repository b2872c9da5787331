"""What the schedule leaves behind: a report after every step, and the outcome of the whole."""

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from medflare.methods.base import Step


@dataclass
class StepReport:
    """What an observer learns after a step.

    Attributes:
        index: 0-based number of the step in the run.
        meta: site -> meta of its usable reply.
        rejected: site -> why there is none.
        aggregation: site -> numbers that the server algorithm noted about it, see `ServerContext.note`.
    """

    step: Step
    index: int
    meta: dict[str, dict[str, Any]]
    rejected: dict[str, str]
    seconds: float
    aggregation: dict[str, dict[str, float | None]] = field(default_factory=dict)

    def line(self) -> dict[str, Any]:
        """The step as metrics.jsonl and the report have it."""
        place = {"step": self.index, "phase": self.step.phase, "round": self.step.round, "seconds": self.seconds}
        return {**place, "sites": self.meta, "aggregation": self.aggregation}


@dataclass
class Cost:
    """What one site has cost so far.

    Attributes:
        down_bytes, up_bytes: tensors sent to it and received from it.
        seconds: that it was at work, as far as the engine knows.
    """

    down_bytes: int = 0
    up_bytes: int = 0
    seconds: float = 0.0


@dataclass
class Outcome:
    """How a federation ended.

    Attributes:
        enrolled: site -> meta it enrolled with ("n", "class_counts", ...).
        delivered: site -> meta of its final evaluation ("metrics": role -> metric -> value).
        history: one line a step, see `StepReport.line`.
        seconds: stage -> wall-clock seconds.
        costs: site -> what it has cost.
        model_selection: model -> {"round": of the final model, "rule": that decided, "candidates": see `ModelSelector.record`}.
        tables: see `Telling.tables`.
        selector: see `Selecting.selector_summary`.
        rounds: of training that were done; None in a run that failed before its end.
    """

    enrolled: dict[str, dict[str, Any]] = field(default_factory=dict)
    delivered: dict[str, dict[str, Any]] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    down_bytes: int = 0
    up_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    costs: dict[str, Cost] = field(default_factory=dict)
    model_selection: dict[str, dict[str, Any]] = field(default_factory=dict)
    tables: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    selector: dict[str, Any] = field(default_factory=dict)
    rounds: int | None = None


@runtime_checkable
class Telling(Protocol):
    """A server algorithm that ends with more than models: with files beside the results, and with tables in them."""

    def documents(self) -> dict[str, Any]:
        """Name of a file -> its content, as JSON."""

    def tables(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Title -> site -> column -> number or text."""


@runtime_checkable
class Selecting(Protocol):
    """A server algorithm whose deployed model selects one of several networks for every image."""

    def selector_summary(self) -> dict[str, Any]:
        """By what it selects, as `RunRecord.selector`."""
