"""IOP-FL's halves: the personal model inside, routing outside, on small generated images."""

from typing import Any

import pytest

from medflare.core.errors import ConfigError, StateError
from medflare.core.manifest import violation
from medflare.core.states import blend, copy_state
from medflare.methods import iop_fl
from medflare.methods.base import Step
from medflare.methods.catalogue import get_method
from medflare.methods.fedavg import FedAvgServer, FedAvgSite
from medflare.methods.iop_fl import formulas as iop_math
from medflare.methods.iop_fl.server import IOPServer
from medflare.methods.iop_fl.site import IOPSite
from methods import squares
from methods.squares import equal, play


def test_contract_names() -> None:
    for name in ("local_adapted", "consistency_loss", "shape_loss", "entropy_loss"):
        assert getattr(iop_fl, name) is getattr(iop_math, name)


def test_the_global_model_is_fedavgs() -> None:
    ours, theirs = squares.server(IOPServer, outside=()), squares.server(FedAvgServer, outside=())
    play(ours, squares.halves(IOPSite))
    play(theirs, squares.halves(FedAvgSite))
    assert equal(ours.model, theirs.model)


@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0])
def test_local_models_are_accumulated(tau: float) -> None:
    server, halves = squares.server(IOPServer), squares.halves(IOPSite, tau=tau)
    expected = copy_state(server.model)
    for step, _, replies in play(server, halves).log:
        if step.phase == "train":
            expected = blend(expected, replies["B"].states["model"], tau)
    assert equal(halves["B"].adapted, expected)


def test_delivered_personal_model_is_the_best_by_the_sites_own_validation() -> None:
    server, halves = squares.server(IOPServer, rounds=4), squares.halves(IOPSite)
    log = play(server, halves).log
    for name, half in halves.items():
        values = [replies[name].facts["validation"]["personal"] for step, _, replies in log if step.phase != "submit"]
        assert half.best.round == 1 + values[1:].index(max(values[1:])) and half.best.value == max(values[1:])
        models = half.deliver(server.configure_delivery(name))
        assert equal(models["personal"].states["model"], half.best.state) and models["deployed"] is models["personal"]
        assert equal(models["global"].states["model"], server.selected[0])


def test_personal_models_leave_a_site_only_for_outside_sites_and_as_declared() -> None:
    assert [step.phase for step in squares.server(IOPServer, rounds=1, outside=()).steps()] == ["train", "validate"]
    server, halves = squares.server(IOPServer, rounds=1), squares.halves(IOPSite)
    log = play(server, halves).log
    assert [step.phase for step, _, _ in log] == ["train", "validate", "submit"]
    for step, _, replies in log:
        for reply in replies.values():
            assert violation(reply, IOPSite.manifest(step.phase, halves["A"].plan)) is None
    assert not any(entry.startswith("expert/") for entry in server.configure_delivery("A").states)
    experts = sorted(entry for entry in server.configure_delivery("O").states if entry.startswith("expert/"))
    assert experts == ["expert/A", "expert/B", "expert/C"]
    assert server.models().keys() == {"global", "personal/A", "personal/B", "personal/C"}


def test_the_cards_of_personal_models_say_the_rounds_behind_them() -> None:
    """Also after a restart; where the last state is sent, the best round is not said of it."""
    for selection in ("median", "last"):
        server, halves = squares.server(IOPServer, rounds=4, selection=selection), squares.halves(IOPSite, selection=selection)
        play(server, halves)
        again = squares.server(IOPServer, rounds=4, selection=selection)
        again.restore(server.state())
        for name, half in halves.items():
            card, own = again.models()[f"personal/{name}"], half.deliver(server.configure_delivery(name))["personal"]
            assert equal(card.states["model"], own.states["model"])
            assert card.facts["selected_round"] == (half.best.round if selection == "median" else None)
            assert own.facts["selected_round"] == (half.best.round if selection == "median" else 4)


def test_a_site_without_a_round_has_nothing_to_submit() -> None:
    half = squares.halves(IOPSite)["A"]
    with pytest.raises(StateError, match="site A"):
        half.perform("submit", 3, squares.server(IOPServer).configure(Step("submit", 3), "A"))


@pytest.mark.parametrize(("name", "value"), [("tau", 1.5), ("tau", "much"), ("radius", -1), ("routing", "none")])
def test_bad_settings_are_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        get_method("iop_fl").check({name: value})
