"""What FedSM is for: sites that draw boundaries by conventions of their own, and whose images show where they are from."""

from dataclasses import replace
from statistics import fmean

import pytest

from medflare.federation.local.loop import run_local
from medflare.studies.candidates import Candidate
from medflare.studies.references import Draw, Setting
from medflare.tasks.config import load_task
from medflare.training.opening import open_site
from medflare.training.site import Site

pytestmark = pytest.mark.timeout(900)  # several runs, on a machine that may be busy

SITES = ("A", "B", "C", "D")
SETTING = Setting(load_task("mechanisms/conventions"), SITES, rounds=20)


@pytest.mark.slow
def test_the_super_model_is_better_than_one_model_and_than_training_alone() -> None:
    """FedSM's global model is FedAvg's. Sites and images were chosen with the seeds 0 to 2."""
    over_alone = []
    for seed in (3, 4, 5):
        draw = Draw(SETTING, seed)
        alone = Candidate.parse("single-site").run(draw)
        results = Candidate.parse("fedsm").run(draw)
        dice = {model: metrics["dice"] for model, metrics in results["mean"]["inside"].items()}
        assert dice["deployed"] >= dice["global"] + 0.005
        over_alone.append(dice["deployed"] - alone["mean"]["inside"]["deployed"]["dice"])
        assert dice["deployed"] >= max(dice["global"], dice["personal"]) - 0.01
        selector = results["selector"]
        assert selector["gamma"] in selector["candidates"]
        assert selector["votes"].keys() == set(SITES)
        assert sum(selector["confusion"][name][name] for name in SITES) >= 0.9 * 4 * 40
    assert fmean(over_alone) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_equal_sites_fall_back_on_the_global_model(seed: int) -> None:
    """All have images of site B, each a draw of its own: nothing to personalize, and no image tells its site."""

    def opener(name: str, role: str) -> Site:
        draw = len(SITES) * seed + SITES.index(name)
        like_all = open_site("B", replace(SETTING.task, resplit=draw), role=role)
        return Site(name, SETTING.task, like_all.data, seed)

    results = run_local("fedsm", SETTING.task, SITES, rounds=6, seed=seed, opener=opener)
    dice = {model: metrics["dice"] for model, metrics in results["mean"]["inside"].items()}
    assert dice["personal"] < dice["global"]
    assert dice["deployed"] >= dice["global"] - 0.01
