"""One line per step."""

from typing import Any

from medflare.federation.outcome import StepReport
from medflare.methods.base import Step


def test_a_step_line_has_every_site() -> None:
    meta = {
        "A": {"loss": 0.5, "validation": {"global": 0.4, "personal": None}},
        "B": {"loss": 0.4, "validation": {"global": 0.5, "personal": None}},
    }
    report = StepReport(Step("train", 1), 2, meta, {"C": "model/w holds\n NaN"}, 1.234, {})
    sites = [
        "A loss 0.5000 global 0.400 personal –",
        "B loss 0.4000 global 0.500 personal –",
        "C not used (model/w holds NaN)",
    ]
    assert report.text(20) == f"round 2/20 train: {' | '.join(sites)} | 1.23 s"


def test_a_step_line_has_the_aggregation_of_each_site() -> None:
    """FedDAG's second phase; B did not reply, and its model still has a weight."""
    numbers: dict[str, dict[str, float | None]] = {
        "A": {"score": 0.81234, "weight": 0.6},
        "B": {"score": None, "weight": 0.4},
        "C": {"score": 0.5, "weight": 0.0},
    }
    meta: dict[str, dict[str, Any]] = {"A": {"scores": {"B": 0.7}}, "C": {"scores": {}}}
    report = StepReport(Step("score", 0), 1, meta, {"B": "no answer"}, 1.0, numbers)
    sites = [
        "A score 0.812 weight 0.600",
        "B not used (no answer) score – weight 0.400",
        "C score 0.500 weight 0.000",
    ]
    assert report.text(2) == f"round 1/2 score: {' | '.join(sites)} | 1.00 s"
