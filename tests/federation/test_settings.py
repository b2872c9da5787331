"""The settings of a run: one list behind the controller, the job builder and the recipes."""

import json
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from medflare.core.errors import ConfigError
from medflare.federation.settings import RunSettings
from medflare.flare.controller import MedflareController
from medflare.flare.jobs.building import JobSettings
from medflare.flare.recipes import FedSMRecipe


def test_the_controller_takes_every_setting_by_name() -> None:
    """FLARE builds it from JSON and writes back what its constructor names, so the constructor must name them all."""
    names = {field.name for field in fields(RunSettings)}
    assert set(signature(MedflareController).parameters) == {*names, "aggregator_id"}
    settings: dict[str, Any] = {"rounds": 3, "seed": 1, "outside": ["X"], "silence": 30.0}
    controller = MedflareController(**settings)
    assert controller.run_settings() == {**RunSettings(rounds=3, seed=1).run_settings(), "outside": ("X",), "silence": 30.0}
    assert len({controller, MedflareController(rounds=3, seed=1)}) == 2  # FLARE keeps components by identity


def test_a_recipe_tells_settings_and_hyper_parameters_apart(tmp_path: Path) -> None:
    FedSMRecipe(task="phantom", num_rounds=4, seed=5, outside=["X"], min_sites=2, lam=0.3).export(str(tmp_path))
    (file,) = tmp_path.rglob("config_fed_server.json")
    config = json.loads(file.read_text())
    assert config["workflows"][0]["args"] == {"rounds": 4, "seed": 5, "outside": ["X"], "min_sites": 2}
    assert config["components"][0]["args"]["hyper"]["lam"] == 0.3
    for wrong in ({"rounds": 3}, {"lam_": 0.3}):
        with pytest.raises(ConfigError, match="no hyper-parameter"):
            FedSMRecipe(task="phantom", **wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rounds": 0}, "rounds = 0: a federation needs at least one round"),
        ({"rounds": "three"}, "rounds = 'three'"),
        ({"rounds": True}, "rounds = True"),
        ({"seed": 1.5}, "seed = 1.5: give a whole number"),
        ({"outside": "HT"}, "outside = 'HT': give a list of site names"),
        ({"outside": [3]}, "outside = "),
        ({"min_sites": 0}, "min_sites = 0: give a number of sites, 1 or more"),
        ({"sites_per_round": "all"}, "sites_per_round = 'all'"),
        ({"step_timeout": -1}, "step_timeout = -1: give a number of seconds"),
        ({"silence": float("nan")}, "silence = nan"),
    ],
)
def test_what_no_run_can_have(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        JobSettings(method="fedavg", **wrong).check()


def test_the_defaults_are_fine() -> None:
    JobSettings(method="fedavg").check()
