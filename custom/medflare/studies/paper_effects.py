"""The smallest difference that matters in a study, d: the effect that a method's paper has."""

from collections.abc import Mapping

MARGIN = 0.02  # d where no paper has an effect
# The papers' effects on the mean over sites, see docs/results.md: (method, metric, role of the
# sites) -> d.
PAPER_EFFECTS: Mapping[tuple[str, str, str], float] = {
    ("fedsm", "dice", "inside"): 0.020,
    ("iop_fl", "dice", "inside"): 0.024,
    ("iop_fl", "dice", "outside"): 0.035,
    ("prr", "f1_macro", "inside"): 0.12,
    ("grace", "balanced_accuracy", "inside"): 0.10,
    ("grace", "balanced_accuracy", "outside"): 0.07,
    ("grace", "dice", "inside"): 0.037,
    ("grace", "dice", "outside"): 0.020,
}
# Method -> the row, or the own model, that the paper's effect is over.
PAPER_COMPARATORS: Mapping[str, tuple[str, ...]] = {
    "fedsm": ("fedavg", "global"),  # its global model is FedAvg's
    "iop_fl": ("fedavg", "global"),
    "prr": ("fedbn", "prr:pfa=false,det=false,cpa=off"),
    "grace": ("fedavg",),
}
