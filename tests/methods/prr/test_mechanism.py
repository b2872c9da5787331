"""What PRR is for: sites whose labels are partly wrong, which a model learns by heart and a model of all sites does not."""

from statistics import fmean

import pytest

from medflare.studies.candidates import Candidate
from medflare.studies.references import Draw, Setting
from medflare.tasks.config import load_task

SEEDS = (0, 1, 2)


def gains(federation: str) -> dict[str, float]:
    """Model -> macro F1 of PRR minus that of training alone with the same deputy, mean of the sites
    and of three seeds."""
    setting = Setting(load_task(federation), ("A", "B", "C"), rounds=10)
    differences: dict[str, list[float]] = {"deployed": [], "personal": []}
    for seed in SEEDS:
        models = {}
        for row in ("prr", "single-site:method=prr"):
            results = Candidate.parse(row).run(Draw(setting, seed))
            models[row] = results["mean"]["inside"]
        for model, of_model in differences.items():
            f1 = [models[row][model]["f1_macro"] for row in ("prr", "single-site:method=prr")]
            of_model.append(f1[0] - f1[1])
    return {model: fmean(of_model) for model, of_model in differences.items()}


@pytest.mark.slow
@pytest.mark.parametrize("federation", ["mechanisms/wrong_labels", "mechanisms/clean_labels"])
def test_the_deputy_gains_and_the_personal_model_does_not(federation: str) -> None:
    """The deployed model is the deputy, a model of all sites' images. Its knowledge does not pass
    into personal models, which learn their site's labels by heart, right and wrong ones."""
    of_model = gains(federation)
    assert of_model["deployed"] >= 0.03
    assert of_model["personal"] <= 0.03
