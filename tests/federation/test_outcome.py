"""One line per step."""

from medflare.federation.outcome import StepReport
from medflare.methods.base import Step


def test_a_step_line_has_every_site_and_its_aggregation() -> None:
    """B's reply is not used, and its model still has a weight, as in FedDAG's second phase."""
    meta = {"A": {"loss": 0.5, "validation": {"global": 0.4, "personal": None}}, "C": {}}
    rejected = {"B": "model/w holds\n NaN"}
    numbers: dict[str, dict[str, float | None]] = {
        "A": {"score": 0.81234, "weight": 0.6},
        "B": {"score": None, "weight": 0.4},
    }
    report = StepReport(Step("score", 1), 2, meta, rejected, 1.234, numbers)
    assert report.text(20) == (
        "round 2/20 score: A loss 0.5000 global before 0.400 personal before – score 0.812 weight 0.600"
        " | B not used (model/w holds NaN) score – weight 0.400 | C | 1.2 s"
    )
