"""Recipes: what they take, and the job that comes of it. That they run is told by e2e/test_recipes.py."""

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from nvflare.recipe import PocEnv, SimEnv
from nvflare.recipe.spec import ExecEnv

from medflare.core.errors import ConfigError, FederationFailed
from medflare.flare.names import NO_TABLE
from medflare.flare.recipes import FedAvgRecipe, FedSMRecipe, MedflareRecipe


def exported(recipe: MedflareRecipe, folder: Path) -> dict[str, Any]:
    """The arguments of the job's controller, and those of its aggregator."""
    recipe.export(str(folder))
    (path,) = folder.rglob("config_fed_server.json")
    config = json.loads(path.read_text())
    aggregator = next(part for part in config["components"] if part["id"] == "aggregator")
    return {"workflow": config["workflows"][0]["args"], **aggregator}


@pytest.mark.parametrize(
    ("counts", "rounds"),
    [
        ({"rounds": 3}, 3),
        ({"num_rounds": 3}, 3),
        ({"rounds": 3, "num_rounds": 3}, 3),
        ({}, 10),
        ({"rounds": None, "num_rounds": 4}, 4),
    ],
)
def test_rounds_by_both_names(counts: dict[str, Any], rounds: int, tmp_path: Path) -> None:
    assert exported(FedAvgRecipe(**counts), tmp_path)["workflow"]["rounds"] == rounds


def test_two_numbers_of_rounds_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_rounds"):
        FedAvgRecipe(rounds=3, num_rounds=4)


@pytest.mark.parametrize("recipe", MedflareRecipe.__subclasses__())
def test_each_recipe_writes_its_methods_job(recipe: type[MedflareRecipe], tmp_path: Path) -> None:
    part = exported(recipe(num_rounds=1), tmp_path)
    assert part["args"].get("method", recipe.default_method) == recipe.default_method


def test_hyper_parameters_by_name_and_by_half(tmp_path: Path) -> None:
    bare = exported(FedSMRecipe(lam=0.3, seed=4, min_sites=2), tmp_path / "bare")
    halved = exported(FedSMRecipe(server={"lam": 0.3}, seed=4, min_sites=2), tmp_path / "halved")
    assert bare == halved and bare["args"]["hyper"]["server"]["lam"] == 0.3
    assert bare["workflow"] == {"rounds": 10, "seed": 4, "min_sites": 2}


def test_any_method_by_its_name(tmp_path: Path) -> None:
    part = exported(MedflareRecipe(method="moon", mu=0.5), tmp_path)
    assert part["args"]["hyper"]["site"]["mu"] == 0.5
    with pytest.raises(ConfigError, match="mon"):
        MedflareRecipe(method="mon")
    with pytest.raises(ConfigError, match="lamb"):
        FedSMRecipe(lamb=0.3)


@pytest.mark.parametrize(("environment", "waits_for"), [(SimEnv, 1), (PocEnv, 3)])
def test_where_sites_have_yet_to_register_the_job_waits_for_them(
    environment: Callable[..., ExecEnv], waits_for: int
) -> None:
    recipe = FedAvgRecipe(rounds=1)
    recipe.process_env(environment(num_clients=3))
    assert recipe._job.job.min_clients == waits_for


def test_a_failure_of_the_simulator_has_the_last_error_of_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(recipe: MedflareRecipe, env: ExecEnv) -> None:
        assert NO_TABLE in os.environ
        log = tmp_path / "fedavg" / "server" / "log.txt"
        log.parent.mkdir(parents=True)
        full = "OSError: [Errno 28] No space left on device: 'results.json'"
        log.write_text(f"Traceback:\n  in x\nKeyError: 'x'\nTraceback:\n  in y\n{full}\nend\n")
        raise RuntimeError("Simulation failed with return code 2.")

    monkeypatch.setattr(MedflareRecipe, "execute", execute)
    with pytest.raises(FederationFailed, match=r"code 2\.; the last error: OSError: .* No space"):
        FedAvgRecipe(rounds=1).simulate(["A"], tmp_path)
    assert NO_TABLE not in os.environ


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_no_failure_of_the_simulator(
    stop: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(recipe: MedflareRecipe, env: ExecEnv) -> None:
        with suppress(KeyboardInterrupt):  # as FLARE waits for its processes
            os.kill(os.getpid(), stop)
            time.sleep(5)
        raise RuntimeError("Simulation failed with return code -2.")

    monkeypatch.setattr(MedflareRecipe, "execute", execute)
    before = signal.signal(stop, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt, match="start it again"):
            FedAvgRecipe(rounds=1).simulate(["A"], tmp_path)
        assert signal.getsignal(stop) == signal.SIG_DFL
    finally:
        signal.signal(stop, before)
