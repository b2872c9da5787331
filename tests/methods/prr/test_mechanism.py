"""What PRR is for: sites whose labels are partly wrong, which a model learns by heart and a model of all sites does not."""

from statistics import fmean

import pytest

from medflare.studies.candidates import Candidate
from medflare.studies.references import Draw, Setting
from medflare.tasks.config import load_task

SEEDS = (0, 1, 2)


def gain(federation: str, model: str, seed: int) -> float:
    """Macro F1 of PRR minus that of training alone with the same deputy, mean of the sites."""
    setting = Setting(load_task(federation), ("A", "B", "C"), rounds=10)
    f1 = {}
    for row in ("prr", "single-site:method=prr"):
        results = Candidate.parse(row).run(Draw(setting, seed))
        f1[row] = results["mean"]["inside"][model]["f1_macro"]
    return float(f1["prr"] - f1["single-site:method=prr"])


@pytest.mark.slow
def test_the_deployed_model_gains_where_labels_are_wrong() -> None:
    assert fmean(gain("mechanisms/wrong_labels", "deployed", seed) for seed in SEEDS) >= 0.05


@pytest.mark.slow
def test_little_passes_into_the_personal_model_where_labels_are_clean() -> None:
    """The deployed model gains there, too: it is the deputy, a model of all sites' images."""
    assert fmean(gain("mechanisms/clean_labels", "personal", seed) for seed in SEEDS) <= 0.03
