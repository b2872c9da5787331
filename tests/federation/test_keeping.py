"""The model that a site deploys by its own choice, and its card."""

from typing import Any

import pytest

from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.federation.final_models import SiteFolder, with_choice
from medflare.federation.participant import Participant
from medflare.federation.settings import ENROL, FINALIZE
from medflare.inference.deployed import KEPT, load_model, plain_message
from medflare.methods.catalogue import get_method
from medflare.tasks.classes import Cases
from medflare.training.site import Site
from methods import squares

DITTO = get_method("ditto")


@pytest.fixture
def site() -> Site:
    return squares.site("A")


@pytest.fixture
def models(site: Site) -> dict[str, Message]:
    """Three different networks."""
    return {role: plain_message(site.network(role).state_dict()) for role in ("global", "personal", "deployed")}


@pytest.mark.parametrize("role", ["global", "personal"])
def test_a_model_by_name(models: dict[str, Message], role: str) -> None:
    found, said = with_choice(models, role)
    assert found["deployed"].states is models[role].states and KEPT not in models[role].meta
    assert found["deployed"].meta[KEPT] == {"keep": role, "model": role, "validation": {}}
    assert len(said) == 1 and role in said[0]


def test_without_a_choice_nothing_changes(models: dict[str, Message]) -> None:
    assert with_choice(models, None) == (models, []) and with_choice({}, "global") == ({}, [])
    alone = {"global": models["global"], "deployed": models["deployed"]}
    found, (said,) = with_choice(alone, "personal")
    assert found == alone and "personal" in said


def test_the_card_and_an_event_say_so(site: Site, tmp_path: Any) -> None:
    folder = SiteFolder(tmp_path, "A", DITTO, site.task, squares.SEED)
    participant = Participant("A", lambda role: site, DITTO, {}, artifacts=folder, chosen="global")
    participant.answer(ENROL, 0, Message({}, {"role": "inside", "sites": ["A", "B"]}))
    state = site.network().state_dict()
    for step, phase in enumerate(("train", FINALIZE)):
        reply = participant.answer(phase, 0, Message({"model": state}, {"step": step, "run_rounds": 1}))
    weights = {role: load_model(tmp_path / role).message.states["model"] for role in ("global", "personal", "deployed")}
    assert squares.equal(weights["deployed"], weights["global"]) and not squares.equal(weights["deployed"], weights["personal"])
    assert reply.meta["metrics"]["deployed"] == reply.meta["metrics"]["global"]
    assert any("'global'" in event["message"] for event in reply.meta["events"])
    cards = {role: load_model(tmp_path / role).card for role in ("global", "personal", "deployed")}
    assert cards["deployed"]["kept"] == {"keep": "global", "model": "global", "validation": {}}
    assert "kept" not in cards["global"] and "kept" not in cards["personal"]


def test_the_card_has_the_rounds_behind_a_model_where_its_method_says_them(site: Site, tmp_path: Any) -> None:
    folder, state = SiteFolder(tmp_path, "A", DITTO, site.task, squares.SEED), site.network().state_dict()
    folder.keep("personal", plain_message(state, selected_round=3), {}, Cases())
    folder.keep("global", plain_message(state), {}, Cases())
    assert [load_model(tmp_path / role).card["round"] for role in ("personal", "global")] == [3, None]


def test_a_site_that_never_trains_cannot_keep_a_personal_model(site: Site) -> None:
    participant = Participant("A", lambda role: site, DITTO, {}, chosen="personal")
    with pytest.raises(ConfigError, match="personal"):
        participant.answer(ENROL, 0, Message({}, {"role": "outside", "sites": ["B", "C"]}))
