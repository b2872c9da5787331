"""Which model a site deploys by its own choice, what its card says of that, and what it cannot choose."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from medflare.core.errors import ConfigError
from medflare.core.message import Message
from medflare.data.sites.site import Site
from medflare.federation import delivery
from medflare.federation.delivery import SiteFolder, chosen_here
from medflare.federation.participant import Participant
from medflare.federation.settings import DELIVER, ENROL
from medflare.inference.deployed import KEPT, load_model, plain_message
from medflare.methods.catalogue import get_method
from medflare.tasks.cases import Cases
from methods import squares
from small import stacked

DITTO = get_method("ditto")


@pytest.fixture
def site() -> Site:
    return squares.site("A")


@pytest.fixture
def models(site: Site) -> dict[str, Message]:
    """Three different networks."""
    return {role: plain_message(site.network(role).state_dict()) for role in ("global", "personal", "deployed")}


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch, models: dict[str, Message]) -> Callable[..., None]:
    """Says what the models are to reach on validation images."""

    def reach(**values: float | None) -> None:
        numbers = {id(models[role].states): value for role, value in values.items()}

        def built(task: Any, message: Message) -> nn.Module:
            module = nn.Identity()
            module.reaches = numbers[id(message.states)]  # type: ignore[assignment]
            return module

        def score(site: Site, module: Any, split: str, metrics: list[str]) -> Any:
            assert split == "validation"
            return type("Scores", (), {"values": {metrics[0]: module.reaches}})

        monkeypatch.setattr(delivery, "build_deployed", built)
        monkeypatch.setattr(Site, "score", score)

    return reach


@pytest.mark.parametrize("role", ["global", "personal"])
def test_a_model_by_name(site: Site, models: dict[str, Message], role: str) -> None:
    found, said = chosen_here(site, models, role)
    assert found["deployed"].states is models[role].states and KEPT not in models[role].facts
    assert found["deployed"].facts[KEPT] == {"keep": role, "model": role, "validation": {}}
    assert said == [f"deployed is its {role} model: its local/medflare.json says keep {role!r}"]


@pytest.mark.parametrize(
    ("reached", "expected"),
    [
        ({"global": 0.7, "personal": 0.6, "deployed": 0.5}, "global"),
        ({"global": 0.7, "personal": 0.8, "deployed": 0.5}, "personal"),
        ({"global": 0.7, "personal": 0.7, "deployed": 0.7}, "deployed"),
        ({"global": 0.7, "personal": 0.7, "deployed": 0.6}, "personal"),
        ({"global": 0.1, "personal": None, "deployed": None}, "global"),
        ({"global": None, "personal": None, "deployed": None}, "deployed"),
    ],
)
def test_the_best_by_its_own_validation(
    site: Site, models: dict[str, Message], scored: Callable[..., None], reached: dict[str, float | None], expected: str
) -> None:
    scored(**reached)
    found, said = chosen_here(site, models, "best")
    assert found["deployed"].states is models[expected].states
    assert found["deployed"].facts[KEPT] == {"keep": "best", "model": expected, "validation": reached}
    assert said == [f"deployed is its {expected} model: its local/medflare.json says keep 'best'"]


def test_without_a_choice_nothing_changes(site: Site, models: dict[str, Message]) -> None:
    assert chosen_here(site, models, None) == (models, []) and chosen_here(site, {}, "global") == ({}, [])
    alone = {"global": models["global"], "deployed": models["deployed"]}
    found, (said,) = chosen_here(site, alone, "personal")
    assert found == alone and said.startswith("there is no personal model to keep, as its local/medflare.json asks")


def test_the_card_and_an_event_say_so(site: Site, tmp_path: Any) -> None:
    folder = SiteFolder(tmp_path, "A", DITTO, site.task, squares.SEED)
    participant = Participant("A", lambda role: site, DITTO, {}, keeper=folder, chosen="global")
    participant.answer(ENROL, 0, Message({}, {"role": "inside", "sites": ["A", "B"]}))
    state = site.network().state_dict()
    for step, phase in enumerate(("train", DELIVER)):
        reply = participant.answer(phase, 0, Message({"model": state}, {"step": step, "run_rounds": 1}))
    weights = {role: load_model(tmp_path / role).message.states["model"] for role in ("global", "personal", "deployed")}
    assert squares.equal(weights["deployed"], weights["global"]) and not squares.equal(weights["deployed"], weights["personal"])
    assert reply.facts["metrics"]["deployed"] == reply.facts["metrics"]["global"]
    assert "deployed is its global model: its local/medflare.json says keep 'global'" in [e["message"] for e in reply.facts["events"]]
    cards = {role: load_model(tmp_path / role).card for role in ("global", "personal", "deployed")}
    assert cards["deployed"]["kept"] == {"keep": "global", "model": "global", "validation": {}}
    assert "kept" not in cards["global"] and "kept" not in cards["personal"]


def test_the_card_has_the_rounds_behind_a_model_where_its_method_says_them(site: Site, tmp_path: Any) -> None:
    folder, state = SiteFolder(tmp_path, "A", DITTO, site.task, squares.SEED), site.network().state_dict()
    folder.keep("personal", plain_message(state, selected_round=3), {}, Cases())
    folder.keep("global", plain_message(state), {}, Cases())
    assert [load_model(tmp_path / role).card["round"] for role in ("personal", "global")] == [3, None]


@pytest.mark.parametrize(
    ("role", "chosen", "said"),
    [
        ("outside", "personal", "is 'personal', and a site that never trains has no model of its own; write 'global'"),
        ("inside", "best", "is 'best', and it has no validation images to compare models on"),
    ],
)
def test_what_cannot_be_chosen_is_refused_before_training(site: Site, role: str, chosen: str, said: str) -> None:
    if chosen == "best":
        full = stacked(site.data.validation)
        site.data = replace(site.data, validation=replace(full, images=full.images[:0], targets=full.targets[:0], patients=(), names=()))
    participant = Participant("A", lambda role: site, DITTO, {}, chosen=chosen)
    with pytest.raises(ConfigError, match=f"keep.*{said}"):
        participant.answer(ENROL, 0, Message({}, {"role": role, "sites": ["A", "B"] if role == "inside" else ["B", "C"]}))
