"""What PRR is for: sites whose labels are partly wrong, which a model learns by heart and a model of all sites does not."""

from statistics import fmean

import pytest

from medflare.studies.candidates import Candidate
from medflare.studies.references import Draw, Setting
from medflare.tasks.config import load_task

SEEDS = (0, 1, 2)
ALONE = "single-site:method=prr"


def f1_of(federation: str, row: str) -> dict[str, float]:
    """Model -> macro F1, mean of the sites and of three seeds."""
    setting = Setting(load_task(federation), ("A", "B", "C"), rounds=10)
    values: dict[str, list[float]] = {"deployed": [], "personal": []}
    for seed in SEEDS:
        results = Candidate.parse(row).run(Draw(setting, seed))
        for model, of_model in values.items():
            of_model.append(results["mean"]["inside"][model]["f1_macro"])
    return {model: fmean(of_model) for model, of_model in values.items()}


@pytest.mark.slow
@pytest.mark.parametrize("federation", ["mechanisms/wrong_labels", "mechanisms/clean_labels"])
def test_the_deputy_gains_and_the_personal_model_does_not(federation: str) -> None:
    """The deployed model is the deputy, a model of all sites' images, over training alone with the
    same deputy. Its knowledge does not pass into personal models, which learn their site's labels
    by heart, right and wrong ones. PFA costs some of the gain: the plain mean is no worse."""
    f1 = {row: f1_of(federation, row) for row in ("prr", "prr:pfa=false", ALONE)}
    assert f1["prr"]["deployed"] - f1[ALONE]["deployed"] >= 0.03
    assert f1["prr"]["personal"] - f1[ALONE]["personal"] <= 0.03
    assert f1["prr:pfa=false"]["deployed"] >= f1["prr"]["deployed"]
