"""What PRR is for: a model of all sites that helps a site, and a personal model where it does not."""

from statistics import fmean

import pytest

from medflare.studies.candidates import Candidate
from medflare.studies.references import Draw, Setting
from medflare.tasks.config import load_task

pytestmark = pytest.mark.timeout(900)  # several runs, on a machine that may be busy

SEEDS = (0, 1, 2)
ALONE = "single-site:method=prr"


WITHOUT_CPA = "prr:cpa=off"
ALONE_WITHOUT_CPA = "single-site:method=prr,cpa=off"


def f1_of(federation: str, row: str) -> dict[str, float]:
    """Model -> macro F1, mean of the sites and of three seeds."""
    setting = Setting(load_task(federation), ("A", "B", "C"), rounds=10)
    values: dict[str, list[float]] = {"global": [], "deployed": [], "personal": []}
    for seed in SEEDS:
        results = Candidate.parse(row).run(Draw(setting, seed))
        for model, of_model in values.items():
            of_model.append(results["mean"]["inside"][model]["f1_macro"])
    return {model: fmean(of_model) for model, of_model in values.items()}


@pytest.mark.slow
@pytest.mark.weekly
@pytest.mark.parametrize("federation", ["mechanisms/wrong_labels", "mechanisms/clean_labels"])
def test_sites_gain_by_the_deputy(federation: str) -> None:
    """The deployed model is the deputy, a model of all sites' images, over training alone with the
    same deputy. PFA costs some of the gain: the plain mean is no worse. The deputy's knowledge
    passes into personal models, where neither loss counts classes."""
    rows = ("prr", "prr:pfa=false", ALONE, WITHOUT_CPA, ALONE_WITHOUT_CPA)
    f1 = {row: f1_of(federation, row) for row in rows}
    assert f1["prr"]["deployed"] - f1[ALONE]["deployed"] >= 0.03
    assert f1["prr:pfa=false"]["deployed"] >= f1["prr"]["deployed"]
    assert f1[WITHOUT_CPA]["personal"] - f1[ALONE_WITHOUT_CPA]["personal"] >= 0.02


@pytest.mark.slow
def test_sites_fall_back_on_personal_models_where_the_deputy_is_wrong() -> None:
    """Each site has other names for the classes, so that the mean of all sites is of no use."""
    federation = "mechanisms/contrary_labels"
    prr = f1_of(federation, WITHOUT_CPA)
    alone = f1_of(federation, ALONE_WITHOUT_CPA)
    fedbn = f1_of(federation, "fedbn")
    assert prr["deployed"] >= max(alone["deployed"] - 0.03, prr["global"] + 0.03)
    assert fedbn["deployed"] <= alone["deployed"] - 0.2
