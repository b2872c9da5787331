"""What the schedule leaves behind: a report after every step, and the outcome of the run."""

from dataclasses import dataclass, field

from medflare.core.text import Json, JsonDict
from medflare.methods.base import Step


@dataclass
class StepReport:
    """A finished step.

    Attributes:
        index: 0-based number of the step in the run.
        meta: site -> metadata of its usable reply.
        rejected: site -> why there is none.
        aggregation: site -> numbers that the server algorithm noted, see `ServerContext.note`.
    """

    step: Step
    index: int
    meta: dict[str, JsonDict]
    rejected: dict[str, str]
    seconds: float
    aggregation: dict[str, dict[str, float | None]]

    def line(self) -> JsonDict:
        """The step as a line of metrics.jsonl."""
        return {
            "step": self.index,
            "phase": self.step.phase,
            "round": self.step.round,
            "seconds": self.seconds,
            "sites": self.meta,
            "aggregation": self.aggregation,
        }


@dataclass
class SiteCost:
    """What one site has cost so far: bytes of tensors sent to it and received from it, and seconds
    of its work if the engine knows them.
    """

    down_bytes: int = 0
    up_bytes: int = 0
    seconds: float = 0.0


@dataclass
class Outcome:
    """How a federation ended.

    Attributes:
        enrolled: site -> metadata of its enrollment ("n", "class_counts", ...).
        delivered: site -> metadata of its final evaluation ("metrics": role -> metric -> value).
        history: one `StepReport.line` per step.
        seconds: stage -> wall-clock seconds.
        costs: site -> cost.
        model_selection: model -> {"round": of the final model, "rule": used, "candidates": see
            `ModelSelector.record`}.
        tables, selector: see `ServerAlgorithm.tables` and `ServerAlgorithm.selector_summary`.
        rounds: of training that were done; None if the run failed.
        class_shares: of all training images, if an adaptation needs them.
        cross_site: site of a personal model -> site of the test images -> the task's metric.
    """

    enrolled: dict[str, Json] = field(default_factory=dict)
    delivered: dict[str, Json] = field(default_factory=dict)
    history: list[JsonDict] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    costs: dict[str, SiteCost] = field(default_factory=dict)
    model_selection: dict[str, Json] = field(default_factory=dict)
    tables: dict[str, dict[str, JsonDict]] = field(default_factory=dict)
    selector: Json = field(default_factory=dict)
    rounds: int | None = None
    class_shares: list[float] | None = None
    cross_site: dict[str, dict[str, float | None]] = field(default_factory=dict)
