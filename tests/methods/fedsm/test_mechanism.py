"""What FedSM is for: sites that draw boundaries by conventions of their own, and whose images show where they are from."""

import pytest

from medflare.studies.candidates import Candidate
from medflare.studies.references import Draw, Setting
from medflare.tasks.config import load_task

SITES = ("A", "B", "C", "D")
SETTING = Setting(load_task("mechanisms/conventions"), SITES, rounds=20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_super_model_is_better_than_one_model_and_than_training_alone(seed: int) -> None:
    """FedSM's global model is FedAvg's."""
    draw = Draw(SETTING, seed)
    alone = Candidate.parse("single-site").run(draw)
    results = Candidate.parse("fedsm").run(draw)
    dice = {model: metrics["dice"] for model, metrics in results["mean"]["inside"].items()}
    assert dice["deployed"] >= dice["global"] + 0.005
    assert dice["deployed"] >= alone["mean"]["inside"]["deployed"]["dice"]
    assert dice["deployed"] >= max(dice["global"], dice["personal"]) - 0.01
    selector = results["selector"]
    assert selector["gamma"] in selector["candidates"] and selector["votes"].keys() == set(SITES)
    assert sum(selector["confusion"][name][name] for name in SITES) >= 0.9 * 4 * 40
