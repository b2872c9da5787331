"""IOP-FL's algorithms inside, on small generated images: the local adapted model and what is sent of it."""

import pytest

from medflare.core.errors import StateError
from medflare.core.manifest import violation
from medflare.core.states import blend, copy_state
from medflare.methods.base import Step
from medflare.methods.iop_fl.server import IOPServer
from medflare.methods.iop_fl.site import IOPSite
from methods import squares
from methods.squares import equal, play


@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0])
def test_local_models_are_accumulated(tau: float) -> None:
    server, algorithms = squares.server(IOPServer), squares.algorithms(IOPSite, tau=tau)
    expected = copy_state(server.model)
    for step, _, replies in play(server, algorithms).log:
        if step.phase == "train":
            expected = blend(expected, replies["B"].states["model"], tau)
    assert equal(algorithms["B"].adapted, expected)


def test_the_personal_model_is_of_the_best_round() -> None:
    server, algorithms = squares.server(IOPServer, rounds=4), squares.algorithms(IOPSite)
    log = play(server, algorithms).log
    for name, algorithm in algorithms.items():
        values = [replies[name].meta["validation"]["personal"] for step, _, replies in log if step.phase != "submit"]
        assert algorithm.best.round == 1 + values[1:].index(max(values[1:])) and algorithm.best.value == max(values[1:])
        models = algorithm.finalize(server.configure_final(name))
        assert equal(models["personal"].states["model"], algorithm.best.state) and models["deployed"] is models["personal"]
        assert equal(models["global"].states["model"], server.selected[0])


def test_personal_models_leave_a_site_only_for_outside_sites_and_as_declared() -> None:
    assert [step.phase for step in squares.server(IOPServer, rounds=1, outside=()).steps()] == ["train", "validate"]
    server, algorithms = squares.server(IOPServer, rounds=1), squares.algorithms(IOPSite)
    log = play(server, algorithms).log
    assert [step.phase for step, _, _ in log] == ["train", "validate", "submit"]
    for step, _, replies in log:
        for reply in replies.values():
            assert violation(reply, IOPSite.manifest(step.phase, algorithms["A"].plan)) is None
    assert not any(entry.startswith("expert/") for entry in server.configure_final("A").states)
    experts = sorted(entry for entry in server.configure_final("O").states if entry.startswith("expert/"))
    assert experts == ["expert/A", "expert/B", "expert/C"]
    assert server.models().keys() == {"global", "personal/A", "personal/B", "personal/C"}


def test_a_site_without_a_round_has_nothing_to_submit() -> None:
    algorithm = squares.algorithms(IOPSite)["A"]
    with pytest.raises(StateError, match="site A"):
        algorithm.perform("submit", 3, squares.server(IOPServer).configure(Step("submit", 3), "A"))
