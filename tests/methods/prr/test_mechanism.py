"""What PRR is for: sites whose labels are partly wrong, which a model learns by heart and a model of all sites does not."""

from statistics import fmean

import pytest

from medflare.studies.candidates import Candidate
from medflare.studies.references import Draw, Setting
from medflare.tasks.config import load_task

SEEDS = (0, 1, 2)
ALONE = "single-site:method=prr"


def f1(row: str, federation: str, model: str, seed: int) -> float:
    """Macro F1, mean of the sites."""
    setting = Setting(load_task(federation), ("A", "B", "C"), rounds=10)
    results = Candidate.parse(row).run(Draw(setting, seed))
    return float(results["mean"]["inside"][model]["f1_macro"])


@pytest.mark.slow
def test_the_deployed_model_gains_where_labels_are_wrong() -> None:
    gains = []
    gains_of_plain_mean = []
    for seed in SEEDS:
        alone = f1(ALONE, "mechanisms/wrong_labels", "deployed", seed)
        gains.append(f1("prr", "mechanisms/wrong_labels", "deployed", seed) - alone)
        plain_mean = f1("prr:pfa=false", "mechanisms/wrong_labels", "deployed", seed)
        gains_of_plain_mean.append(plain_mean - alone)
    assert fmean(gains) >= 0.05
    assert min(gains_of_plain_mean) >= 0.05


@pytest.mark.slow
def test_little_passes_into_the_personal_model_where_labels_are_clean() -> None:
    """The deployed model gains there, too: it is the deputy, a model of all sites' images."""
    gains = []
    for seed in SEEDS:
        alone = f1(ALONE, "mechanisms/clean_labels", "personal", seed)
        gains.append(f1("prr", "mechanisms/clean_labels", "personal", seed) - alone)
    assert fmean(gains) <= 0.03
