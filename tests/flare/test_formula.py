"""The aggregator that a job names is what makes the next model, under medflare's own controller too."""

from pathlib import Path
from typing import Any

import pytest

from flare.server import SITES, Server, in_this_process
from helpers.small_tasks import tiny_phantom
from medflare.core.errors import ConfigError
from medflare.core.states import StateDict
from medflare.evaluation.results import load_results
from medflare.federation.local.loop import run_local
from medflare.flare.aggregators import AGGREGATORS, MethodAggregator
from medflare.flare.controller import MedflareController
from medflare.flare.server_run import ServerSpec
from medflare.methods.aggregation import Aggregation
from medflare.methods.catalogue import get_method
from medflare.tasks.config import TaskConfig, load_task

ROUNDS, SEED = 1, 3
LAST: dict[str, Any] = {"server": {"selection": "last"}}  # the best round may be the one before anything was aggregated


@pytest.fixture(scope="module")
def task() -> TaskConfig:
    return load_task(tiny_phantom(size=[16, 16]))


def models_of(folder: Path) -> dict[str, bytes]:
    """Path below `folder` -> content, for every model that the server keeps."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("model.safetensors"))}


def served(folder: Path, aggregator: MethodAggregator, task: TaskConfig, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The models of a run that the controller makes with this component."""
    exchange = in_this_process(get_method(aggregator.method_name), task, LAST, SEED)
    monkeypatch.setattr("medflare.flare.messages.MessageExchange", exchange)
    server = Server(folder, aggregator, task)
    server.run(MedflareController(rounds=ROUNDS, seed=SEED))
    assert load_results(folder)["status"] == "COMPLETED", server.panics
    return models_of(folder / "job" / "medflare" / "models")


def doctor(formula: Aggregation[Any]) -> list[str]:
    """From now on the formula answers twice what it is meant to; returns the list that its calls are noted in."""
    calls: list[str] = []
    shared, own = formula.shared, formula.own

    def doubled(state: StateDict) -> StateDict:
        return {name: tensor * 2 for name, tensor in state.items()}

    def wrong_shared(*arguments: Any) -> StateDict:
        calls.append("shared")
        return doubled(shared(*arguments))

    def wrong_own(*arguments: Any) -> dict[str, StateDict]:
        calls.append("own")
        return {site: doubled(state) for site, state in own(*arguments).items()}

    vars(formula).update(shared=wrong_shared, own=wrong_own)
    return calls


@pytest.mark.parametrize("method", AGGREGATORS)
def test_the_component_makes_the_next_model(method: str, task: TaskConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_local(method, task.to_dict(), SITES, rounds=ROUNDS, seed=SEED, out=tmp_path / "plain", **LAST)
    expected = models_of(tmp_path / "plain" / "models")
    assert expected and served(tmp_path / "right", AGGREGATORS[method](LAST), task, monkeypatch) == expected
    component = AGGREGATORS[method](LAST)
    calls = doctor(component.aggregation)
    found = served(tmp_path / "wrong", component, task, monkeypatch)
    assert calls, "the server algorithm has a formula of its own"
    assert found.keys() == expected.keys() and found != expected


class TestWhatShapesTheFormula:
    """The server algorithm's hyper-parameters, whichever way somebody spells them."""

    @pytest.mark.parametrize(
        "hyper",
        [
            {"lam": 0.3},
            {"server.lam": 0.3},
            {"server": {"lam": 0.3}},
            {"site": {"personalization": "softpull"}, "lam": 0.3},
            {"lam": 0.3, "personalization": "softpull"},
        ],
    )
    def test_every_spelling_means_the_same(self, hyper: dict[str, Any]) -> None:
        assert MethodAggregator(hyper, "fedsm").aggregation.hyper.lam == 0.3

    def test_a_wrong_name_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="lamb"):
            _ = MethodAggregator({"lamb": 0.3}, "fedsm").aggregation
        with pytest.raises(ConfigError, match="lamb"):
            _ = MethodAggregator({"server": {"lamb": 0.3}}, "fedsm").aggregation

    def test_the_site_half_may_be_another_methods(self) -> None:
        """A job of two algorithms holds both algorithms' values; the formula looks at its own."""
        formula = MethodAggregator({"site": {"mu": 0.7}, "server": {"consistency": False}}, "grace").aggregation
        assert not formula.hyper.consistency

    def test_bare_names_of_two_methods_halves(self, task: TaskConfig, tmp_path: Path) -> None:
        """`mu` is MOON's: the controller, which knows both algorithms, sorts them before the formula is made."""
        server = Server(tmp_path, MethodAggregator({"mu": 0.7, "consistency": False}, "grace"), task)
        settings = {"rounds": ROUNDS, "seed": SEED}
        run = ServerSpec.of(server.context(), server.aggregator, "moon", settings, SITES).run(server.aggregator)
        assert run.aggregation is not None and run.aggregation is server.aggregator.aggregation
        assert not run.aggregation.hyper.consistency and run.hyper["site"]["mu"] == 0.7
