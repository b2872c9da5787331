"""The settings of a run: names, types and ranges."""

import dataclasses
import json
from typing import Any

import pytest

from medflare.core.errors import ConfigError
from medflare.federation.settings import RUN_SETTINGS, RunSettings, run_settings

NEEDED: dict[str, Any] = {"rounds": 3, "seed": 1}
SETTINGS: dict[str, Any] = {
    **NEEDED,
    "seed": -4,
    "outside": ["X", "Y"],
    "min_sites": 2,
    "sites_per_round": 3,
    "max_client_weight": 0.5,
    "outlier_policy": "rejected",
    "patience": 4,
    "adapt": "tent",
    "cross_site": True,
    "step_timeout": 60,
    "enrol_timeout": 0.5,
    "heartbeat_timeout": 30.5,
    "resume": "id",
}


def test_all_settings_have_a_default_but_rounds_and_seed() -> None:
    fields = {field.name for field in dataclasses.fields(RunSettings)}
    assert {*RUN_SETTINGS} == SETTINGS.keys() == fields
    few = {
        "outside": (),
        "min_sites": None,
        "sites_per_round": None,
        "max_client_weight": None,
        "outlier_policy": "used",
        "patience": None,
    }
    defaults = {
        **few,
        "adapt": "none",
        "cross_site": False,
        "step_timeout": 0.0,
        "enrol_timeout": 3600.0,
        "heartbeat_timeout": 120.0,
        "resume": "",
    }
    assert dataclasses.asdict(run_settings(NEEDED)) == {**NEEDED, **defaults}


def test_settings_are_read_from_json_and_written_back() -> None:
    settings = run_settings(json.loads(json.dumps(SETTINGS)))
    assert settings.outside == ("X", "Y") and settings.step_timeout == 60.0
    assert settings.to_dict() == SETTINGS == json.loads(json.dumps(settings.to_dict()))
    assert run_settings(settings.to_dict()) == settings


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("rounds", -1),
        ("seed", 1.5),
        ("outside", "HT"),
        ("max_client_weight", 1.5),
        ("outlier_policy", "hanged"),
        ("heartbeat_timeout", float("nan")),
        ("round", 3),
    ],
)
def test_a_wrong_setting_is_named(name: str, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"^run: .*{name}") as caught:
        run_settings({**NEEDED, name: wrong})
    assert "\n" not in str(caught.value)
