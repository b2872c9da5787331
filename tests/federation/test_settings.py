"""The settings of a run: one list with names, types and ranges, refused in one line."""

import dataclasses
import inspect
import json
from typing import Any

import pytest
from pydantic import ValidationError

from medflare.core.errors import ConfigError
from medflare.federation.local.loop import run_local
from medflare.federation.settings import RUN_SETTINGS, WAITS, Rules, RunSettings, run_settings

NEEDED: dict[str, Any] = {"rounds": 3, "seed": 1}


def test_all_that_a_run_fixes_has_a_name_and_a_default_but_rounds_and_seed() -> None:
    assert RUN_SETTINGS == (
        "rounds",
        "seed",
        "outside",
        "min_sites",
        "sites_per_round",
        "max_share",
        "suspects",
        "patience",
        "wire",
        "step_timeout",
        "enrol_timeout",
        "silence",
        "resume",
    )
    assert run_settings(NEEDED) == RunSettings(rounds=3, seed=1)
    few = {"outside": (), "min_sites": None, "sites_per_round": None, "max_share": None, "suspects": "used", "patience": None}
    defaults = {**few, "wire": "fp32", "step_timeout": 0.0, "enrol_timeout": 3600.0, "silence": 120.0, "resume": ""}
    assert dataclasses.asdict(run_settings(NEEDED)) == {**NEEDED, **defaults}


def test_what_json_has_is_taken_and_comes_back() -> None:
    given = {
        **NEEDED,
        "seed": -4,
        "outside": ["X", "Y"],
        "min_sites": 2,
        "sites_per_round": 3,
        "max_share": 0.5,
        "suspects": "rejected",
        "patience": 4,
        "wire": "bf16",
        "step_timeout": 60,
        "enrol_timeout": 0.5,
        "silence": 30.5,
        "resume": "id",
    }
    settings = run_settings(json.loads(json.dumps(given)))
    assert settings.outside == ("X", "Y") and settings.step_timeout == 60.0
    assert settings.to_dict() == given == json.loads(json.dumps(settings.to_dict()))
    assert run_settings(settings.to_dict()) == settings


def test_the_schedule_is_told_its_rules() -> None:
    assert run_settings(NEEDED).rules == Rules()
    given: dict[str, Any] = {"min_sites": 2, "sites_per_round": 3, "max_share": 0.5, "suspects": "rejected", "patience": 4, "wire": "bf16"}
    assert given.keys() == {rule.name for rule in dataclasses.fields(Rules)}, "each of them can be set"
    assert run_settings({**NEEDED, **given}).rules == Rules(**given)


def test_a_resumed_run_has_all_settings_that_the_plain_loop_takes() -> None:
    """`resume_local` hands on whatever of `RUN_SETTINGS` the checkpoint holds."""
    assert {*RUN_SETTINGS} - {*WAITS, "resume"} <= {*inspect.signature(run_local).parameters}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rounds": -1}, "rounds must be at least 0, got -1"),
        ({"rounds": "three"}, "rounds must be a whole number, got 'three'"),
        ({"rounds": True}, "rounds must be a whole number, got True"),
        ({"rounds": None}, "rounds must be a whole number, got None"),
        ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
        ({"seed": True}, "seed must be a whole number, got True"),
        ({"outside": "HT"}, "outside must be a list, got 'HT'"),
        ({"outside": [3]}, "outside[0] must be text, got 3"),
        ({"min_sites": 0}, "min_sites must be at least 1, got 0"),
        ({"min_sites": 2.5}, "min_sites must be a whole number"),
        ({"sites_per_round": "all"}, "sites_per_round must be a whole number"),
        ({"sites_per_round": 0}, "sites_per_round must be at least 1, got 0"),
        ({"max_share": 1.5}, "max_share must be at most 1, got 1.5"),
        ({"max_share": 0}, "max_share must be above 0, got 0"),
        ({"patience": 0}, "patience must be at least 1, got 0"),
        ({"suspects": "hanged"}, "suspects must be one of"),
        ({"step_timeout": -1}, "step_timeout must be at least 0, got -1"),
        ({"step_timeout": "1"}, "step_timeout must be a number, got '1'"),
        ({"enrol_timeout": -1}, "enrol_timeout must be at least 0, got -1"),
        ({"silence": float("nan")}, "silence must be a finite number, got nan"),
        ({"silence": None}, "silence must be a number, got None"),
        ({"resume": 3}, "resume must be text, got 3"),
        ({"round": 3}, "unknown setting 'round'; did you mean rounds"),
    ],
    ids=str,
)
def test_what_no_run_can_have(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_settings({**NEEDED, **wrong})
    assert str(caught.value).startswith(f"run: {said}") and "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", NEEDED)
def test_what_no_run_can_do_without(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"^run: setting '{missing}' is missing$"):
        run_settings({name: value for name, value in NEEDED.items() if name != missing})


def test_settings_stay_as_they_are_and_go_by_name() -> None:
    settings: Any = run_settings(NEEDED)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.rounds = 4
    with pytest.raises(ValidationError):
        RunSettings(3, 1)  # type: ignore[call-arg]
