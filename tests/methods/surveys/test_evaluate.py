"""The method that tests a final model of any kind at every site."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.small_tasks import small_task, tiny_phantom
from medflare import run_local
from medflare.core.errors import ConfigError, StateError
from medflare.core.message import Message
from medflare.evaluation.results import validate_results
from medflare.inference.deployed import plain_message
from medflare.methods.catalogue import get_method
from medflare.methods.surveys.evaluate import EvaluateSite
from medflare.privacy.ledger import Budget
from medflare.tasks.config import load_task
from methods import squares

TASK = load_task(tiny_phantom())
SITES = ("site-1", "site-2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a FedSM run."""
    folder = tmp_path_factory.mktemp("fedsm")
    assert run_local("fedsm", TASK, SITES, rounds=1, seed=0, out=folder)["status"] == "COMPLETED"
    return folder


def evaluated(model: Path, **more: Any) -> dict[str, Any]:
    sha256 = json.loads((model / "card.json").read_text())["sha256"]
    options = {"weights": model, "sha256": sha256, **more}
    return run_local("evaluate", TASK, SITES, rounds=0, seed=0, **options)


@pytest.mark.parametrize(("path", "role"), [("deployed", "deployed"), ("global", "global")])
def test_the_metrics_are_those_of_the_run(
    trained: Path, path: str, role: str, tmp_path: Path
) -> None:
    results = evaluated(trained / "models" / path, out=tmp_path)
    validate_results(results)
    original = json.loads((trained / "results.json").read_text())
    for site in SITES:
        assert (
            results["sites"][site]["metrics"]["deployed"]
            == original["sites"][site]["metrics"][role]
        )
    ((named, row),) = results["tables"]["Evaluated model"].items()
    card = json.loads((trained / "models" / path / "card.json").read_text())
    assert (named, row["method"], row["kind"]) == (path, "fedsm", card["kind"])
    assert results["rounds"] == 0 and not results["traffic"]["up_bytes"]
    kept = json.loads((tmp_path / "sites" / "site-1" / "deployed" / "card.json").read_text())
    assert kept["trained_on"] == card["trained_on"], "of the training, not of these sites"


@pytest.mark.parametrize("name", ["evaluate", "fingerprint"])
def test_settings_of_training_do_not_matter(name: str) -> None:
    get_method(name).check({}, small_task(freeze=["body"], accumulate=2))


def test_another_model_is_refused(trained: Path) -> None:
    results = evaluated(trained / "models" / "deployed", sha256="0" * 64)
    assert results["status"] == "FAILED" and "sha256" in results["reason"]


def test_a_site_builds_kinds_of_medflare_that_fit_its_task() -> None:
    """The server names the kind: no other package is imported for it."""
    method = get_method("evaluate")
    site = squares.site("A")
    algorithm = EvaluateSite(site, method.plan(site.task, ("A",), {}))
    state = site.network().state_dict()
    assert algorithm.finalize(plain_message(state)).keys() == {"global", "deployed"}
    with pytest.raises(ConfigError, match="of_another_package"):
        algorithm.finalize(Message({"model": state}, {"kind": "of_another_package"}))
    with pytest.raises(StateError):
        algorithm.finalize(plain_message({name: tensor[None] for name, tensor in state.items()}))


@pytest.mark.parametrize("name", ["evaluate", "fingerprint", "fedavg", "fedsm"])
def test_a_site_with_a_privacy_budget_evaluates(name: str, tmp_path: Path) -> None:
    """No training image shows in the reply; what trains, or describes training images, needs DP-SGD there."""
    site = squares.site("A")
    participant = squares.participant(site, name, budget=Budget(1.0, 1e-5, tmp_path, "A"))
    invitation = Message({}, {"role": "inside", "sites": ["A"]})
    if name == "evaluate":
        assert participant.reply("enrol", 0, invitation).meta["n"] == site.n
    else:
        with pytest.raises(ConfigError, match="privacy"):
            participant.reply("enrol", 0, invitation)


@pytest.mark.parametrize("file", ["/etc/passwd", "../models/deployed/weights.safetensors", "a\\b"])
def test_a_job_learns_nothing_of_other_files_at_the_server(
    file: str, trained: Path, tmp_path: Path
) -> None:
    results = evaluated(trained / "models" / "deployed", file=file)
    assert results["status"] == "FAILED"
    assert results["reason"].startswith("weights: the name of the file has folders")
    (tmp_path / "patient-Meier").mkdir()
    (tmp_path / "list.txt").write_text("x")
    other = evaluated(trained / "models" / "deployed", file="list.txt", weights=tmp_path)
    assert "Meier" not in other["reason"] and str(tmp_path) not in other["reason"]
