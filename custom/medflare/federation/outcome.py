"""What the schedule leaves behind: a report after every step, and the outcome of the run."""

from dataclasses import dataclass, field

from medflare.core.text import Json, JsonDict, format_seconds
from medflare.evaluation.presentation import format_metric
from medflare.methods.base import Step


@dataclass
class StepReport:
    """A finished step.

    Attributes:
        index: 0-based number of the step in the run.
        meta: site -> metadata of its usable reply.
        rejected: site -> why it has no usable reply.
        aggregation: site -> numbers that the server algorithm noted, see `ServerContext.note`.
    """

    step: Step
    index: int
    meta: dict[str, JsonDict]
    rejected: dict[str, str]
    seconds: float
    aggregation: dict[str, dict[str, float | None]]

    def text(self, rounds: int) -> str:
        """The step in one line, for example "round 3/20 train: A loss 0.4120 global before 0.801
        weight 0.612 | B not used (holds NaN) | 1.2 s"; `rounds`: of the run.

        The metric "before" is of the model that the site received.
        """
        round = self.step.round
        if round < rounds:
            progress = f"round {round + 1}/{rounds}"
        elif rounds:
            progress = f"after round {rounds}"
        else:
            progress = "without training"
        parts = {}
        for site, reply in self.meta.items():
            part = site
            when = ""
            if reply.get("loss") is not None:
                part += f" loss {reply['loss']:.4f}"
                when = " before"
            for model, value in reply.get("validation", {}).items():
                part += f" {model}{when} {format_metric('', value)}"
            if "privacy" in reply:
                part += f" ε {format_metric('', reply['privacy'].get('epsilon'))}"
            parts[site] = part
        for site, reason in self.rejected.items():
            parts[site] = f"{site} not used ({' '.join(reason.split())})"
        for site, numbers in self.aggregation.items():
            parts.setdefault(site, site)
            for name, value in numbers.items():
                parts[site] += f" {name} {format_metric('', value)}"
        of_sites = [parts[site] for site in sorted(parts)]
        seconds = format_seconds(self.seconds)
        return f"{progress} {self.step.phase}: " + " | ".join([*of_sites, seconds])

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
        final_metadata: site -> metadata of its final evaluation ("metrics": model -> metric ->
            value).
        history: one `StepReport.line` per step.
        seconds: stage -> wall-clock seconds; of a resumed run with those of its earlier steps.
        costs: site -> cost.
        model_selection: model -> {"round": of the final model, "rule": used, "candidates": see
            `ModelSelector.record`}.
        tables, selector_summary: see the methods of `ServerAlgorithm` with these names.
        rounds: of training that were done; None if the run failed.
        class_shares: of all training images, if an adaptation needs them.
        cross_site: site of a personal model -> site of the test images -> the task's metric.
    """

    enrolled: dict[str, Json] = field(default_factory=dict)
    final_metadata: dict[str, Json] = field(default_factory=dict)
    history: list[JsonDict] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    costs: dict[str, SiteCost] = field(default_factory=dict)
    model_selection: dict[str, Json] = field(default_factory=dict)
    tables: dict[str, dict[str, JsonDict]] = field(default_factory=dict)
    selector_summary: Json = field(default_factory=dict)
    rounds: int | None = None
    class_shares: list[float] | None = None
    cross_site: dict[str, dict[str, float | None]] = field(default_factory=dict)

    @property
    def seconds_of_steps(self) -> float:
        """Wall-clock seconds of the steps in the history."""
        return sum(line["seconds"] for line in self.history)
